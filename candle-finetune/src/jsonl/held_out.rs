//! Samples for validation: a part of the data that is not trained on, and samples in the order of their file.

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::Lines;
use crate::error::{Error, Result};
use crate::sample::{Position, Sample, Source};

/// How many samples are held out for validation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeldOut {
    /// This share of the samples, rounded to the nearest number of them.
    Share(f64),
    /// This many.
    Count(usize),
}

impl HeldOut {
    /// Which of `samples` samples are held out; the others are trained on.
    pub(super) fn choose(self, samples: usize, seed: u64) -> Result<Vec<bool>> {
        let (held_out, asked) = match self {
            // The conversion is the nearest number of samples for every share, even one that is no number.
            Self::Share(share) => ((share * samples as f64).round() as usize, format!("a share of {share}")),
            Self::Count(count) => (count, count.to_string()),
        };
        if held_out == 0 || held_out >= samples {
            return Err(Error::HeldOut { asked, samples, train: samples.saturating_sub(held_out), held_out });
        }
        let mut order: Vec<usize> = (0..samples).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        let mut is_held_out = vec![false; samples];
        order[..held_out].iter().for_each(|&sample| is_held_out[sample] = true);
        Ok(is_held_out)
    }
}

/// The samples in the order of the file, every epoch the same.
#[derive(Debug, Clone)]
pub struct InOrder<'a> {
    lines: &'a Lines,
}

impl<'a> InOrder<'a> {
    pub(super) fn new(lines: &'a Lines) -> Self {
        Self { lines }
    }
}

impl Source for InOrder<'_> {
    fn epoch_len(&mut self, _epoch: usize) -> usize {
        self.lines.len()
    }

    fn sample(&mut self, place: Position) -> Result<Sample> {
        self.lines.sample(place.taken)
    }

    fn sample_len(&mut self, place: Position) -> Result<usize> {
        Ok(self.lines.lines()[place.taken].encoded.tokens.len())
    }
}
