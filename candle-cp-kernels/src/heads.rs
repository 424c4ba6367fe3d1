//! Strided views of `[B, H, S, D]` data.

use rayon::prelude::*;

/// Sizes of one attention call on one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Batch rows.
    pub batch: usize,
    /// Query heads; a multiple of `key_heads`.
    pub query_heads: usize,
    /// Key and value heads.
    pub key_heads: usize,
    /// Local queries.
    pub queries: usize,
    /// Head size, any.
    pub head_dim: usize,
}

impl Shape {
    /// Query heads per key head.
    pub fn group(&self) -> usize {
        self.query_heads / self.key_heads
    }

    /// Number of (row, query head, query) triples: the length of the softmax statistics.
    pub fn rows(&self) -> usize {
        self.batch * self.query_heads * self.queries
    }
}

/// Order of the dimensions of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// `[B, H, S, D]`.
    HeadsFirst,
    /// `[B, S, H, D]`, as projections give it.
    TokensFirst,
}

impl Order {
    /// Contiguous data in this order; `dims` are `[B, H, S]`, `vector` gives the `d` values of (row, head, token).
    pub fn collect<'a, T: Copy + 'a, S: Copy + Default + Send>(
        self,
        [batch, heads, tokens]: [usize; 3],
        d: usize,
        vector: impl Fn(usize, usize, usize) -> &'a [T] + Sync,
        convert: impl Fn(T) -> S + Sync,
    ) -> Vec<S> {
        const TASK: usize = 1 << 14;
        let mut out = vec![S::default(); batch * heads * tokens * d];
        let inner = if self == Order::HeadsFirst { tokens } else { heads };
        let block = (inner * d).max(1);
        out.par_chunks_mut(block).with_min_len(TASK.div_ceil(block)).enumerate().for_each(|(outer, out)| {
            for (i, out) in out.chunks_mut(d).enumerate() {
                let vector = match self {
                    Order::HeadsFirst => vector(outer / heads, outer % heads, i),
                    Order::TokensFirst => vector(outer / tokens, i, outer % tokens),
                };
                out.iter_mut().zip(vector).for_each(|(out, &x)| *out = convert(x));
            }
        });
        out
    }
}

/// A `[B, H, S, D]` view whose last dimension is contiguous.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a, T> {
    data: &'a [T],
    strides: [usize; 3],
    head_dim: usize,
}

impl<'a, T: Copy> Heads<'a, T> {
    /// A view with `strides` (elements) for batch, head and token.
    ///
    /// # Panics
    /// If the last element of a `[dims.., head_dim]` view would lie outside of `data`.
    pub fn new(data: &'a [T], dims: [usize; 3], strides: [usize; 3], head_dim: usize) -> Self {
        if dims.iter().all(|&d| d > 0) {
            let last: usize = dims.iter().zip(&strides).map(|(d, s)| (d - 1) * s).sum();
            assert!(last + head_dim <= data.len(), "view of {dims:?} x {head_dim} exceeds {} elements", data.len());
        }
        Self { data, strides, head_dim }
    }

    /// A contiguous view.
    pub fn contiguous(data: &'a [T], dims: [usize; 3], head_dim: usize) -> Self {
        let token = head_dim;
        Self::new(data, dims, [dims[1] * dims[2] * token, dims[2] * token, token], head_dim)
    }

    /// The `D` values of one token.
    pub fn token(&self, row: usize, head: usize, token: usize) -> &'a [T] {
        let start = row * self.strides[0] + head * self.strides[1] + token * self.strides[2];
        &self.data[start..start + self.head_dim]
    }
}
