//! One attention problem, and how it is handed to the kernels.

use std::ops::Range;

/// Shapes, mask and sharding. Token counts are those of the whole problem, over all ranks.
#[derive(Debug, Clone)]
pub struct Case {
    /// What a report calls it.
    pub name: String,
    /// Batch rows.
    pub batch: usize,
    /// Key heads.
    pub key_heads: usize,
    /// Query heads of a key head.
    pub group: usize,
    /// Head size.
    pub head_dim: usize,
    /// Queries.
    pub queries: usize,
    /// Keys.
    pub keys: usize,
    /// Factor on scores.
    pub scale: f64,
    /// Whether a query sees a key, `[B, Sq, Sk]`.
    pub mask: Vec<bool>,
    /// Position of each key, `[B, Sk]`, distinct within a row. The visible positions of a query are consecutive among
    /// those.
    pub positions: Vec<u32>,
    /// Queries of each rank.
    pub query_ranks: Vec<Vec<usize>>,
    /// Keys of each rank: the chunks that every rank visits, its own first.
    pub key_ranks: Vec<Vec<usize>>,
    /// How tensors lie in memory.
    pub placing: Placing,
}

/// How tensors lie in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placing {
    /// `[B, S, H, D]`, not `[B, H, S, D]`.
    pub tokens_first: bool,
    /// Rows do not start on 16 bytes.
    pub odd: bool,
}

/// Row-major `[B, H, S, D]` each.
#[derive(Debug, Clone, Default)]
pub struct Data {
    /// Queries.
    pub q: Vec<f64>,
    /// Keys.
    pub k: Vec<f64>,
    /// Values.
    pub v: Vec<f64>,
    /// Gradient of the output.
    pub d_out: Vec<f64>,
}

impl Case {
    /// Query heads.
    pub fn query_heads(&self) -> usize {
        self.key_heads * self.group
    }

    /// Where `mask` has the keys of a query.
    pub fn mask_row(&self, batch: usize, query: usize) -> Range<usize> {
        let start = (batch * self.queries + query) * self.keys;
        start..start + self.keys
    }

    /// The keys that a query sees.
    pub fn seen(&self, batch: usize, query: usize) -> impl Iterator<Item = usize> + '_ {
        let row = &self.mask[self.mask_row(batch, query)];
        row.iter().enumerate().filter_map(|(key, &seen)| seen.then_some(key))
    }
}
