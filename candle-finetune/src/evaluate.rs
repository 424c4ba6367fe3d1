//! How well held-out answers are predicted: greedy choice at every learned token, and the loss.

use candle_core::{D, DType, Device, Tensor};

use candle_cp_layers::Recompute;

use crate::error::Result;
use crate::packing::Batch;
use crate::sample::Part;
use crate::trainer::Trainer;

/// Counts over held-out batches.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scores {
    /// Sum of the cross entropies of all learned tokens.
    pub loss_sum: f64,
    /// Learned tokens whose most likely prediction was right, by [`Part::ALL`].
    pub right: [f64; Part::ALL.len()],
    /// Learned tokens, by [`Part::ALL`].
    pub total: [f64; Part::ALL.len()],
}

impl Scores {
    /// Share of right predictions over some parts; `None` without such a token.
    pub fn accuracy(&self, parts: &[Part]) -> Option<f64> {
        let chosen = Part::ALL.iter().enumerate().filter(|(_, part)| parts.contains(part));
        let sums = chosen.fold((0.0, 0.0), |(right, total), (i, _)| (right + self.right[i], total + self.total[i]));
        (sums.1 > 0.0).then(|| sums.0 / sums.1)
    }

    /// Mean cross entropy; `None` without a learned token.
    pub fn loss(&self) -> Option<f64> {
        let total: f64 = self.total.iter().sum();
        (total > 0.0).then(|| self.loss_sum / total)
    }

    /// Learned tokens.
    pub fn tokens(&self) -> usize {
        self.total.iter().sum::<f64>() as usize
    }

    fn numbers(&self) -> Vec<f64> {
        [self.loss_sum].into_iter().chain(self.right).chain(self.total).collect()
    }

    fn from_numbers(numbers: &[f64]) -> Self {
        let parts = Part::ALL.len();
        let mut scores = Self { loss_sum: numbers[0], ..Self::default() };
        scores.right.copy_from_slice(&numbers[1..1 + parts]);
        scores.total.copy_from_slice(&numbers[1 + parts..1 + 2 * parts]);
        scores
    }
}

/// Scores of held-out batches over all ranks; every rank has to call it and gets the same. Each replica gives batches of its
/// own, the ranks of one replica the same.
///
/// # Errors
/// A tensor operation or an exchange with another rank failed.
pub fn evaluate(trainer: &Trainer, batches: impl Iterator<Item = Result<Batch>>) -> Result<Scores> {
    let mut scores = Scores::default();
    for batch in batches {
        add_local(trainer, &batch?, &mut scores)?;
    }
    let local = Tensor::new(scores.numbers(), &Device::Cpu)?;
    let sums = trainer.comm().all_reduce_sum(&local)?.to_vec1::<f64>()?;
    Ok(Scores::from_numbers(&sums))
}

/// Adds what this rank's tokens score.
fn add_local(trainer: &Trainer, batch: &Batch, scores: &mut Scores) -> Result<()> {
    let (model, device) = (trainer.model(), trainer.job().device());
    let context = trainer.context(batch)?;
    let hidden_bsh = model.hidden(batch, &context, &Recompute::off(), trainer.config().dtype, device)?.detach();
    let labels = context.shard_labels(&batch.labels_bs(&Device::Cpu)?)?;
    // Parts sit on the same tokens as labels, so the same shift applies.
    let parts = context.shard_labels(&batch.parts_bs(&Device::Cpu)?)?.labels_bs.flatten_all()?.to_vec1::<i64>()?;
    let mean = model.loss(&hidden_bsh, &labels)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    scores.loss_sum += mean * labels.count as f64;

    let labels = labels.labels_bs.flatten_all()?.to_vec1::<i64>()?;
    let places: Vec<u32> = (0..labels.len()).filter(|&i| labels[i] >= 0).map(|i| i as u32).collect();
    if places.is_empty() {
        return Ok(());
    }
    let hidden_nh = hidden_bsh.flatten(0, 1)?.index_select(&Tensor::new(places.as_slice(), device)?, 0)?;
    let predicted = model.logits(&hidden_nh)?.argmax(D::Minus1)?.to_vec1::<u32>()?;
    for (place, predicted) in places.into_iter().zip(predicted) {
        let part = parts[place as usize] as usize;
        scores.total[part] += 1.0;
        scores.right[part] += f64::from(u8::from(labels[place as usize] == i64::from(predicted)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accuracies_are_over_the_parts_asked_for() {
        let scores = Scores { loss_sum: 6.0, right: [0.0, 3.0, 1.0, 8.0], total: [0.0, 4.0, 4.0, 8.0] };
        assert_eq!(scores.accuracy(&[Part::Read]), Some(0.75));
        assert_eq!(scores.accuracy(&[Part::Read, Part::Repeat]), Some(0.5));
        assert_eq!(scores.accuracy(&[Part::Text]), None);
        assert_eq!(scores.loss(), Some(0.375));
        assert_eq!(Scores::default().loss(), None);
        assert_eq!(Scores::from_numbers(&scores.numbers()), scores);
    }
}
