//! What a step and a validation did; the lines of `metrics.jsonl`.

use serde::{Deserialize, Deserializer, Serialize};

use crate::comm_use::CommUse;
use crate::memory::Memory;

/// What one step did; a line of `metrics.jsonl`, with the fields of `comm` and `memory` beside the others.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// The step, from 1.
    pub step: usize,
    /// Epochs of the data that are done after this step, with a fraction; `None` for data without an end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// Mean cross entropy over the learned tokens of the whole batch, before the step.
    pub loss: f64,
    /// Norm of all gradients, before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens of the batch that are not padding, over all ranks.
    pub tokens: usize,
    /// Learned tokens of the batch, over all ranks.
    pub label_tokens: usize,
    /// `tokens` over the duration of this step.
    pub tokens_per_s: f64,
    /// What the ranks exchanged in this step.
    #[serde(flatten)]
    pub comm: CommUse,
    /// Memory of the process after this step.
    #[serde(flatten)]
    pub memory: Memory,
    /// Seconds of training so far; a resumed run goes on from those of its earlier parts.
    pub seconds: f64,
}

/// What the held-out part of the data says; a line of `metrics.jsonl` of its own, known by its `val_loss`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ValidationReport {
    /// Steps done; 0 before training.
    pub step: usize,
    /// As [`StepReport::epoch`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// Mean cross entropy over the learned tokens of all held-out samples; JSON has null for one that is not finite.
    #[serde(deserialize_with = "number_or_null")]
    pub val_loss: f64,
    /// Their learned tokens.
    pub val_tokens: usize,
    /// Seconds of training so far; a resumed run goes on from those of its earlier parts.
    pub seconds: f64,
}

/// A number, or NaN for the null that JSON has in its place.
fn number_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// The reports of a run so far.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct History {
    /// In order of their steps.
    pub steps: Vec<StepReport>,
    /// In order of their steps.
    pub validations: Vec<ValidationReport>,
}

impl History {
    /// The validation with the smallest loss, the first of equals; NaN is never the smallest.
    pub fn best_validation(&self) -> Option<&ValidationReport> {
        let finite = self.validations.iter().filter(|report| report.val_loss.is_finite());
        finite.min_by(|a, b| a.val_loss.total_cmp(&b.val_loss))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::comm_use::OperationUse;
    use candle_cp::comm::Traffic;

    pub fn step_report(step: usize, loss: f64) -> StepReport {
        let ring = OperationUse { bytes_sent: 4096, waited_s: 0.5, waited_max_s: 0.75 };
        let operations = [(Traffic::KeyValue, ring)].into_iter().collect();
        StepReport {
            step,
            epoch: Some(0.25),
            loss,
            grad_norm: 0.5,
            lr: 0.001,
            tokens: 100,
            label_tokens: 10,
            tokens_per_s: 50.0,
            comm: CommUse { bytes_sent: 4096, waited_s: 0.5, waited_max_s: 0.75, operations },
            memory: Memory { memory_bytes: Some(1 << 30), peak_memory_bytes: Some(3 << 30) },
            seconds: 2.0,
        }
    }

    pub fn validation_report(step: usize, val_loss: f64) -> ValidationReport {
        ValidationReport { step, epoch: None, val_loss, val_tokens: 40, seconds: 3.0 }
    }

    #[test]
    fn the_best_validation_is_the_first_of_the_smallest() {
        let history = |losses: &[f64]| {
            let validations = losses.iter().enumerate().map(|(step, &loss)| validation_report(step, loss)).collect();
            History { steps: Vec::new(), validations }
        };
        let best = |losses: &[f64]| history(losses).best_validation().map(|report| report.step);
        assert_eq!(best(&[]), None);
        assert_eq!(best(&[3.0, 1.0, 2.0, 1.0]), Some(1));
        assert_eq!(best(&[-f64::NAN, f64::NAN, 2.0]), Some(2));
        assert_eq!(best(&[f64::NAN]), None);
    }
}
