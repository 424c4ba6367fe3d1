//! Samples in epochs, each in an order of its own.

use rand::seq::SliceRandom;

use super::Lines;
use crate::error::Result;
use crate::sample::{Position, Sample, Source, epoch_rng};

/// The samples of a file: each one once per epoch, in an order that depends on the seed and the epoch only.
#[derive(Debug, Clone)]
pub struct Epochs<'a> {
    lines: &'a Lines,
    seed: u64,
    /// The order of the epoch that was asked for last.
    order: Option<(usize, Vec<usize>)>,
}

impl<'a> Epochs<'a> {
    pub(super) fn new(lines: &'a Lines, seed: u64) -> Self {
        Self { lines, seed, order: None }
    }

    /// Which of the lines lies at a place.
    pub(crate) fn index(&mut self, place: Position) -> usize {
        if self.order.as_ref().is_none_or(|(epoch, _)| *epoch != place.epoch) {
            let mut order: Vec<usize> = (0..self.lines.len()).collect();
            order.shuffle(&mut epoch_rng(self.seed, place.epoch, None));
            self.order = Some((place.epoch, order));
        }
        let (_, order) = self.order.as_ref().expect("it was just made");
        order[place.taken]
    }
}

impl Source for Epochs<'_> {
    fn epoch_len(&mut self, _: usize) -> usize {
        self.lines.len()
    }

    fn sample(&mut self, place: Position) -> Result<Sample> {
        let index = self.index(place);
        self.lines.sample(index)
    }

    fn sample_len(&mut self, place: Position) -> Result<usize> {
        let index = self.index(place);
        Ok(self.lines.lines()[index].encoded.tokens.len())
    }
}
