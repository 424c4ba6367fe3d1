//! How many steps a data file gives: known before the first one, because packing is a matter of lengths alone.

use crate::config::Config;
use crate::error::Result;
use crate::jsonl::{Epochs, Lines};
use crate::packing::Packer;
use crate::sample::{Position, Sample, Source};

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
    /// of an epoch takes the batches that are left, be they fewer than are accumulated.
    ///
    /// # Errors
    /// A sample is longer than a row.
    pub fn make(lines: &Lines, model: &candle_gemma4::Config, config: &Config) -> Result<Self> {
        let epochs = match config.steps {
            Some(_) => 1,
            None => config.epochs.unwrap_or(Config::DEFAULT_EPOCHS),
        };
        let source = Box::new(TokensOnly { lines, epochs: lines.training(config.seed) });
        let mut packer = Packer::new(source, model, config.batch_rows, config.seq_len);
        let mut plan = Self { epochs: Vec::new() };
        for _ in 0..epochs {
            let mut epoch = EpochPlan { samples: lines.len(), ..EpochPlan::default() };
            while let Some(batch) = packer.next_batch()? {
                epoch.batches += 1;
                epoch.rows +=
                    batch.documents.iter().filter(|row| row.first().is_some_and(|&document| document >= 0)).count();
                epoch.tokens += batch.token_count();
            }
            epoch.steps = epoch.batches.div_ceil(config.accumulate);
            plan.epochs.push(epoch);
        }
        Ok(plan)
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

/// The samples without their pictures: nothing is read again.
struct TokensOnly<'a> {
    lines: &'a Lines,
    epochs: Epochs<'a>,
}

impl Source for TokensOnly<'_> {
    fn epoch_len(&mut self, epoch: usize) -> usize {
        self.epochs.epoch_len(epoch)
    }

    fn sample(&mut self, place: Position) -> Result<Sample> {
        let line = &self.lines.lines()[self.epochs.index(place)];
        Ok(Sample { tokens: line.encoded.tokens.clone(), pictures: Vec::new() })
    }
}
