//! One document to learn from: tokens, what is learned of them, and the pictures behind the placeholders.

use std::sync::Arc;

use candle_vlm_processor::ImagePatches;

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

/// A stream of samples in epochs. Every rank makes its own with the same seed and gets the same samples.
pub trait Source {
    /// The next sample; `None` once at the end of each epoch.
    ///
    /// # Errors
    /// A sample could not be made.
    fn next_sample(&mut self) -> crate::Result<Option<Sample>>;
}
