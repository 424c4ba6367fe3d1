//! Samples in epochs, each in an order of its own.

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::Lines;
use crate::error::Result;
use crate::sample::{Sample, Source};

/// A stream of samples: each one once per epoch.
#[derive(Debug, Clone)]
pub struct Epochs<'a> {
    lines: &'a Lines,
    /// What is left of this epoch, taken from the end.
    order: Vec<usize>,
    started: bool,
    rng: StdRng,
}

impl<'a> Epochs<'a> {
    pub(super) fn new(lines: &'a Lines, seed: u64) -> Self {
        Self { lines, order: Vec::new(), started: false, rng: StdRng::seed_from_u64(seed) }
    }

    /// The next sample's place among the lines; `None` once at the end of each epoch.
    pub(crate) fn next_index(&mut self) -> Option<usize> {
        if !self.started {
            self.order = (0..self.lines.len()).collect();
            self.order.shuffle(&mut self.rng);
            self.started = true;
        }
        let next = self.order.pop();
        self.started = next.is_some();
        next
    }
}

impl Source for Epochs<'_> {
    fn next_sample(&mut self) -> Result<Option<Sample>> {
        self.next_index().map(|index| self.lines.sample(index)).transpose()
    }
}
