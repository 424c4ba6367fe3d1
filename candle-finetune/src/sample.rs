//! One document to learn from: tokens, what is learned of them, and the pictures behind the placeholders.

use std::sync::Arc;

use candle_vlm_processor::ImagePatches;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};

/// Which part of an answer a learned token is; accuracies are counted by part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Running text.
    Text,
    /// A digit read from a picture of the same turn.
    Read,
    /// A digit repeated from earlier turns.
    Repeat,
    /// The end of an answer.
    End,
}

impl Part {
    /// All parts.
    pub const ALL: [Part; 4] = [Part::Text, Part::Read, Part::Repeat, Part::End];
}

/// One token of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Which part of an answer it is; `None` if it is not learned.
    pub learned: Option<Part>,
}

/// Whether a token is learned in its place: the first one of a document never is.
pub(crate) fn is_learned((place, token): (usize, &Token)) -> bool {
    place > 0 && token.learned.is_some()
}

/// One document: it is kept whole, in one row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    /// The tokens; the first one is never learned, because nothing predicts it.
    pub tokens: Vec<Token>,
    /// Pictures in the order of their placeholders, cut into patches.
    pub pictures: Vec<Arc<ImagePatches>>,
}

impl Sample {
    /// Appends tokens that are not learned.
    pub fn push(&mut self, ids: &[u32]) {
        self.tokens.extend(ids.iter().map(|&id| Token { id, learned: None }));
    }

    /// Appends tokens that are learned.
    pub fn push_learned(&mut self, ids: &[u32], part: Part) {
        self.tokens.extend(ids.iter().map(|&id| Token { id, learned: Some(part) }));
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// A place in endless epochs of samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: usize,
    /// How many samples of that epoch come before.
    pub taken: usize,
}

/// Samples in epochs. What lies at a place depends on the place and the source's seed only, so that any place can be
/// gone to; every rank makes its own source with the same seed and gets the same samples.
pub trait Source {
    /// How many samples an epoch has.
    fn epoch_len(&mut self, epoch: usize) -> usize;

    /// The sample at a place; `place.taken` is less than [`Source::epoch_len`].
    ///
    /// # Errors
    /// The sample could not be made.
    fn sample(&mut self, place: Position) -> crate::Result<Sample>;

    /// Tokens of the sample at a place.
    ///
    /// # Errors
    /// As [`Source::sample`].
    fn sample_len(&mut self, place: Position) -> crate::Result<usize> {
        Ok(self.sample(place)?.len())
    }
}

/// The random numbers of one epoch, or of one thing in it; different keys give independent numbers.
pub(crate) fn epoch_rng(seed: u64, epoch: usize, item: Option<usize>) -> StdRng {
    let mut key = [0; 32];
    let words = [seed, epoch as u64, item.map_or(0, |item| item as u64 + 1)];
    for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    StdRng::from_seed(key)
}
