//! Loss and gradients in one pass over chunks of the labelled tokens, on plain slices.
//!
//! The vocabulary is cut into blocks. The logits of a chunk are kept block by block, each `[tokens, block]`, and one
//! thread works on one block at a time, so that threads share no memory that they write and wait for each other three
//! times per chunk only.

use super::product::{Matrix, multiply};
use crate::element::Element;
use crate::shard::IGNORED;
use candle_core::WithDType;
use candle_cp_kernels::{CrossEntropy, Real, cross_entropy_row};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;

/// Parts that the blocks are dealt to in backward, each with a sum of its own for the hidden gradient. A constant, so
/// that sums do not depend on the number of threads.
const PARTS: usize = 32;

/// What to compute.
#[derive(Debug, Clone)]
pub(super) struct Pass {
    pub softcap: Option<f64>,
    /// Factor on the gradients: one over the count of labels.
    pub factor: f64,
    /// Labelled tokens whose logits exist at a time.
    pub chunk: usize,
    pub hidden_gradient: bool,
    pub weight_gradient: bool,
}

/// Results of a [`Pass`].
pub(super) struct Sums<T> {
    /// Sum of the cross entropies, without the factor.
    pub loss: f64,
    /// `[N, H]`.
    pub d_hidden: Option<Vec<T>>,
    /// `[V, H]`.
    pub d_weight: Option<Vec<T>>,
}

impl Pass {
    /// `hidden_nh` is `[N, H]`, contiguous, `weight_vh` `[V, H]`. Tokens whose label is ignored are never read.
    pub fn run<T: Element>(&self, hidden_nh: &[T], weight_vh: Matrix<T>, labels: &[i64]) -> Sums<T> {
        let (vocabulary, width) = (weight_vh.rows, weight_vh.columns);
        let labelled: Vec<usize> = (0..labels.len()).filter(|&token| labels[token] != IGNORED).collect();
        let chunk = self.chunk.clamp(1, labelled.len().max(1));
        let rows = chunk.min(labelled.len());
        let mut logits = vec![T::Acc::ZERO; rows * vocabulary];
        let mut x = Vec::with_capacity(rows * width);
        let mut d_hidden = self.hidden_gradient.then(|| vec![T::zero(); hidden_nh.len()]);
        let mut d_weight = self.weight_gradient.then(|| vec![T::Acc::ZERO; vocabulary * width]);
        let mut d_x = vec![T::Acc::ZERO; if self.hidden_gradient { parts(vocabulary).len() * rows * width } else { 0 }];
        let mut loss = 0.0;
        for (index, tokens) in labelled.chunks(chunk).enumerate() {
            x.clear();
            tokens.iter().for_each(|&token| x.extend(hidden_nh[token * width..][..width].iter().map(|x| x.widen())));
            let x = Matrix::contiguous(&x, width);
            let logits = &mut logits[..tokens.len() * vocabulary];
            multiply_logits(logits, x, weight_vh);
            loss += self.cross_entropy(logits, tokens, labels);
            let chunk = Chunk { d_logits: logits, x, weight_vh };
            if let Some(d_weight) = &mut d_weight {
                chunk.weight_gradient(d_weight, index > 0);
            }
            if let Some(d_hidden) = &mut d_hidden {
                let rows = chunk.hidden_gradient(&mut d_x);
                for (row, &token) in rows.chunks(width).zip(tokens) {
                    let out = &mut d_hidden[token * width..][..width];
                    out.iter_mut().zip(row).for_each(|(out, &sum)| *out = T::narrow(sum));
                }
            }
        }
        Sums { loss, d_hidden, d_weight: d_weight.map(T::narrow_all) }
    }

    /// Turns the logits of `tokens` into their gradients and returns the sum of the cross entropies.
    fn cross_entropy<A: Real>(&self, logits: &mut [A], tokens: &[usize], labels: &[i64]) -> f64 {
        let gradient = self.hidden_gradient || self.weight_gradient;
        let options = CrossEntropy { softcap: self.softcap, factor: self.factor, gradient };
        let mut rows: Vec<Vec<&mut [A]>> = tokens.iter().map(|_| Vec::new()).collect();
        for block in logits.chunks_mut(tokens.len() * block_len(logits.len() / tokens.len())) {
            let columns = block.len() / tokens.len();
            rows.iter_mut().zip(block.chunks_mut(columns)).for_each(|(row, part)| row.push(part));
        }
        let rows = rows.par_iter_mut().zip(tokens).with_max_len(4);
        let losses: Vec<f64> =
            rows.map(|(row, &token)| cross_entropy_row(options, row, labels[token] as usize)).collect();
        losses.iter().sum()
    }
}

/// Words in a block: few enough that a block of a chunk's logits fits the cache of a core, and where that allows it
/// enough blocks for the threads.
fn block_len(vocabulary: usize) -> usize {
    vocabulary.div_ceil(PARTS).next_multiple_of(64).min(2048)
}

/// The range of words in blocks.
fn blocks(words: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    words.clone().step_by(len).map(move |start| start..words.end.min(start + len))
}

/// At most [`PARTS`] ranges of words, each of the same number of blocks but for the last.
fn parts(vocabulary: usize) -> Vec<Range<usize>> {
    let block = block_len(vocabulary);
    blocks(0..vocabulary, vocabulary.div_ceil(block).div_ceil(PARTS) * block).collect()
}

/// `x` is `[tokens, H]`; `logits` become the products, block by block.
fn multiply_logits<T: Element>(logits: &mut [T::Acc], x: Matrix<T::Acc>, weight_vh: Matrix<T>) {
    let len = block_len(weight_vh.rows);
    let blocks: Vec<_> = logits.chunks_mut(x.rows * len).zip(blocks(0..weight_vh.rows, len)).collect();
    blocks.into_par_iter().with_max_len(1).for_each(|(logits, words)| {
        let weight = Widened::new(weight_vh.rows(words));
        multiply(logits, x, weight.matrix().transposed(), false);
    });
}

/// One chunk of tokens in backward.
struct Chunk<'a, T: Element> {
    /// `[tokens, V]`, block by block.
    d_logits: &'a [T::Acc],
    /// `[tokens, H]`.
    x: Matrix<'a, T::Acc>,
    weight_vh: Matrix<'a, T>,
}

impl<T: Element> Chunk<'_, T> {
    fn d_logits(&self, block: &Range<usize>) -> Matrix<'_, T::Acc> {
        let tokens = self.x.rows;
        Matrix::contiguous(&self.d_logits[tokens * block.start..tokens * block.end], block.len())
    }

    /// Sets `d_weight`, `[V, H]`, or adds to it.
    fn weight_gradient(&self, d_weight: &mut [T::Acc], add: bool) {
        let (vocabulary, width) = (self.weight_vh.rows, self.x.columns);
        let len = block_len(vocabulary);
        let blocks: Vec<_> = d_weight.chunks_mut(len * width).zip(blocks(0..vocabulary, len)).collect();
        blocks.into_par_iter().with_max_len(1).for_each(|(d_weight, words)| {
            multiply(d_weight, self.d_logits(&words).transposed(), self.x, add);
        });
    }

    /// The gradient of `x`, `[tokens, H]`, in the memory of `sums`, `[parts, chunk, H]`.
    fn hidden_gradient<'s>(&self, sums: &'s mut [T::Acc]) -> &'s [T::Acc] {
        let vocabulary = self.weight_vh.rows;
        let (parts, len) = (parts(vocabulary), self.x.rows * self.x.columns);
        let sums = &mut sums[..parts.len() * len];
        sums.par_chunks_mut(len).zip(parts).with_max_len(1).for_each(|(sum, part)| {
            for words in blocks(part.clone(), block_len(vocabulary)) {
                let weight = Widened::new(self.weight_vh.rows(words.clone()));
                multiply(sum, self.d_logits(&words), weight.matrix(), words.start > part.start);
            }
        });
        sum_parts(sums, len)
    }
}

/// Adds the parts up in their order, into the first.
fn sum_parts<A: Real>(parts: &mut [A], len: usize) -> &[A] {
    let (sum, rest) = parts.split_at_mut(len);
    for part in rest.chunks(len) {
        sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += *x);
    }
    sum
}

/// Rows of the weight in the accumulation type.
struct Widened<'a, A: Clone> {
    data: Cow<'a, [A]>,
    rows: usize,
    columns: usize,
    strides: (usize, usize),
}

impl<'a, A: Real + WithDType> Widened<'a, A> {
    fn new<T: Element<Acc = A>>(matrix: Matrix<'a, T>) -> Self {
        let Matrix { data, rows, columns, strides } = matrix;
        if T::DTYPE == A::DTYPE {
            return Self { data: T::widen_all(data), rows, columns, strides };
        }
        let mut wide = Vec::with_capacity(rows * columns);
        for row in 0..rows {
            let row = &data[row * strides.0..];
            wide.extend((0..columns).map(|column| row[column * strides.1].widen()));
        }
        Self { data: Cow::Owned(wide), rows, columns, strides: (columns, 1) }
    }

    fn matrix(&self) -> Matrix<'_, A> {
        Matrix { data: &self.data, rows: self.rows, columns: self.columns, strides: self.strides }
    }
}
