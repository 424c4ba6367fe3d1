//! How many steps a data file gives: known before the first one, because packing is a matter of lengths alone.

use crate::config::Config;
use crate::jsonl::{Epochs, Lines};
use crate::packing::FirstFit;
use crate::sample::Position;

/// One epoch, packed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EpochPlan {
    /// Samples.
    pub samples: usize,
    /// Batches.
    pub batches: usize,
    /// Rows that hold a sample.
    pub rows: usize,
    /// Tokens that are not padding.
    pub tokens: usize,
    /// Optimizer steps.
    pub steps: usize,
}

/// The epochs of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    epochs: Vec<EpochPlan>,
}

impl Plan {
    /// Packs the lengths of all epochs that a run goes through, or of the first one if the steps are given. The last step
    /// of an epoch takes the batches that are left, be they fewer than all replicas accumulate. The samples fit a row.
    pub fn make(lines: &Lines, config: &Config) -> Self {
        let epochs = match config.steps {
            Some(_) => 1,
            None => config.epochs.unwrap_or(Config::DEFAULT_EPOCHS),
        };
        let mut order = lines.training(config.seed);
        Self { epochs: (0..epochs).map(|epoch| Self::epoch(lines, &mut order, epoch, config)).collect() }
    }

    fn epoch(lines: &Lines, order: &mut Epochs, epoch: usize, config: &Config) -> EpochPlan {
        let empty = || FirstFit::new(config.batch_rows, config.seq_len);
        let mut plan = EpochPlan { samples: lines.len(), ..EpochPlan::default() };
        let mut batch = empty();
        for taken in 0..lines.len() {
            let len = lines.lines()[order.index(Position { epoch, taken })].encoded.tokens.len();
            plan.tokens += len;
            if batch.place(len).is_none() {
                plan.batches += 1;
                plan.rows += batch.rows();
                batch = empty();
                batch.place(len);
            }
        }
        plan.batches += usize::from(batch.rows() > 0);
        plan.rows += batch.rows();
        plan.steps = plan.batches.div_ceil(config.accumulate * config.replicas());
        plan
    }

    /// The first epoch.
    pub fn first(&self) -> EpochPlan {
        self.epochs.first().copied().unwrap_or_default()
    }

    /// Steps of all epochs.
    pub fn steps(&self) -> usize {
        self.epochs.iter().map(|epoch| epoch.steps).sum()
    }
}
