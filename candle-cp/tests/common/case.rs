//! One attention problem, apart from how it is sharded.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The mask rule in the tests' own words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    pub causal: bool,
    pub window: Option<usize>,
    pub both_sides: bool,
    pub groups: bool,
    /// The window does not cut groups.
    pub whole_groups: bool,
}

impl Rule {
    pub const CAUSAL: Self = Self { causal: true, window: None, both_sides: false, groups: false, whole_groups: false };
    pub const BIDIRECTIONAL: Self = Self { causal: false, ..Self::CAUSAL };

    pub const fn sliding(window: usize) -> Self {
        Self { window: Some(window), ..Self::CAUSAL }
    }

    pub const fn with_groups(self) -> Self {
        Self { groups: true, ..self }
    }

    pub const fn with_whole_groups(self) -> Self {
        Self { groups: true, whole_groups: true, ..self }
    }

    pub const fn with_both_sides(self) -> Self {
        Self { both_sides: true, ..self }
    }
}

/// Shapes, metadata and rule; the numbers follow from `seed`.
#[derive(Debug, Clone)]
pub struct Case {
    /// `[B][S]`, negative for padding.
    pub documents: Vec<Vec<i64>>,
    /// `[B][S]`, negative for none.
    pub groups: Vec<Vec<i64>>,
    pub rule: Rule,
    pub key_heads: usize,
    /// Query heads per key head.
    pub group: usize,
    pub head_dim: usize,
    pub scale: f64,
    /// Factor on queries and keys: scores grow with its square.
    pub spread: f64,
    pub seed: u64,
}

/// Row-major `[B, H, S, D]` each.
#[derive(Debug, Clone)]
pub struct Data {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub d_out: Vec<f64>,
}

impl Case {
    /// One row with 4 query heads over 2 key heads of size 6.
    pub fn row(documents: Vec<i64>, groups: Vec<i64>, rule: Rule) -> Self {
        let (documents, groups) = (vec![documents], vec![groups]);
        let (key_heads, group, head_dim) = (2, 2, 6);
        Self { documents, groups, rule, key_heads, group, head_dim, scale: 0.4, spread: 1.0, seed: 1 }
    }

    /// One document of `len` tokens without groups.
    pub fn plain(len: usize, rule: Rule) -> Self {
        Self::row(vec![0; len], vec![-1; len], rule)
    }

    pub fn batch(&self) -> usize {
        self.documents.len()
    }

    pub fn len(&self) -> usize {
        self.documents[0].len()
    }

    pub fn query_heads(&self) -> usize {
        self.key_heads * self.group
    }

    pub fn query_shape(&self) -> (usize, usize, usize, usize) {
        (self.batch(), self.query_heads(), self.len(), self.head_dim)
    }

    pub fn key_shape(&self) -> (usize, usize, usize, usize) {
        (self.batch(), self.key_heads, self.len(), self.head_dim)
    }

    pub fn data(&self) -> Data {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let mut fill = |heads: usize, spread: f64| -> Vec<f64> {
            let count = self.batch() * heads * self.len() * self.head_dim;
            (0..count).map(|_| rng.random_range(-1.0..1.0) * spread).collect()
        };
        Data {
            q: fill(self.query_heads(), self.spread),
            k: fill(self.key_heads, self.spread),
            v: fill(self.key_heads, 1.0),
            d_out: fill(self.query_heads(), 1.0),
        }
    }
}

/// Document ids 0, 1, ... of the given lengths.
pub fn documents(lengths: &[usize]) -> Vec<i64> {
    lengths.iter().enumerate().flat_map(|(id, &n)| std::iter::repeat_n(id as i64, n)).collect()
}

/// Group ids of a row of `len` tokens: each of `blocks` is one group, the rest has none.
pub fn block(len: usize, blocks: &[std::ops::Range<usize>]) -> Vec<i64> {
    let of = |i: usize| blocks.iter().position(|b| b.contains(&i)).map_or(-1, |g| g as i64);
    (0..len).map(of).collect()
}
