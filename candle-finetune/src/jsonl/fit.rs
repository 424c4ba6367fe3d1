//! Samples that are longer than a row: left out, or cut.

use std::sync::Arc;

use super::Line;
use super::places::Places;
use crate::encoder::Encoded;
use crate::sample::is_learned;

/// Names and numbers that a message lists; the rest is counted.
const LISTED: usize = 8;

/// What became of samples that are longer than a row, by their lines or rows, which count from 1 and, if the data has
/// several files, on from one file to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fitted {
    /// Tokens of a row; 0 if the samples were not fitted.
    pub seq_len: usize,
    /// Samples before any was left out.
    pub samples: usize,
    /// Tokens of the longest of them.
    pub longest: usize,
    /// Left out: longer than a row.
    pub too_long: Vec<usize>,
    /// Cut and kept.
    pub cut: Vec<usize>,
    /// Left out: no learned token before the cut.
    pub nothing_left: Vec<usize>,
    pub(super) places: Arc<Places>,
}

impl Fitted {
    /// Number of samples that were left out.
    pub fn dropped(&self) -> usize {
        self.too_long.len() + self.nothing_left.len()
    }

    /// Whether a sample stays, cut if need be.
    pub(super) fn keeps(&mut self, line: &mut Line, truncate: bool) -> bool {
        if line.encoded.tokens.len() <= self.seq_len {
            return true;
        }
        if !truncate {
            self.too_long.push(line.number);
            return false;
        }
        cut(&mut line.encoded, self.seq_len);
        let keeps = line.encoded.tokens.iter().enumerate().any(is_learned);
        let told = if keeps { &mut self.cut } else { &mut self.nothing_left };
        told.push(line.number);
        keeps
    }

    /// What a user should know about the samples that were left out or cut.
    pub fn notices(&self) -> Vec<String> {
        let Self { seq_len, samples, longest, .. } = self;
        let mut notices = Vec::new();
        let mut tell = |lines: &[usize], what: &str, why: String| {
            if !lines.is_empty() {
                notices.push(format!(
                    "{what} {} of {samples} samples ({}): {why}",
                    lines.len(),
                    self.places.list(lines)
                ));
            }
        };
        tell(
            &self.too_long,
            "left out",
            format!(
                "longer than a row of {seq_len} tokens; the longest has {longest}: --seq-len {longest} keeps all of them, \
                 --truncate cuts them"
            ),
        );
        tell(
            &self.cut,
            "cut",
            format!(
                "longer than a row of {seq_len} tokens; an answer that is cut loses the token that ends it; --seq-len \
                 {longest} keeps all samples whole"
            ),
        );
        tell(&self.nothing_left, "left out", format!("no learned token within the {seq_len} tokens of a row"));
        notices
    }
}

/// Cuts a sample that is longer than `len` tokens: there, or before the picture that would be cut.
pub(crate) fn cut(encoded: &mut Encoded, len: usize) {
    let parted = encoded.blocks.iter().find(|block| block.start < len && len < block.end);
    let len = parted.map_or(len, |block| block.start);
    let whole = encoded.blocks.iter().take_while(|block| block.end <= len).count();
    encoded.tokens.truncate(len);
    encoded.blocks.truncate(whole);
    encoded.pictures.truncate(whole);
    encoded.soft_tokens.truncate(whole);
}

/// `1 line`, `7 lines`, `2 batches`.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    let end = match (count, noun.ends_with("ch")) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{count} {noun}{end}")
}

/// The first few of some texts.
pub(super) fn listed(texts: &[String]) -> String {
    let shown = texts.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", ");
    match texts.len().saturating_sub(LISTED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
