//! One chunk of one head: what forward and backward have in common.
//!
//! With `b_t` the sum of `g` from the start of the chunk to token `t`, the state before the chunk `S` and `y_t` the part of
//! the value that the state does not predict, the recurrence inside of the chunk is
//!
//! ```text
//! y_t = v_t - exp(b_t) S^T k_t - sum over s < t of exp(b_t - b_s) (k_t . k_s) beta_s y_s
//! o_t = exp(b_t) S^T q_t + sum over s <= t of exp(b_t - b_s) (q_t . k_s) beta_s y_s
//! S  <- exp(b_c) S + sum over s of exp(b_c - b_s) k_s (beta_s y_s)^T
//! ```
//!
//! The first line is a triangular system; its inverse does not depend on values or state. Every exponent is <= 0, however
//! strong the decay is. Sums of `g` are f64, so that small decays after large ones keep their digits.

use super::matrix::{Left, Matrix, Multiplier, PANEL, Part, both};
use super::{DeltaHeads, DeltaInputs};
use crate::real::Real;
use std::ops::Range;

/// Tokens of a chunk, at most.
pub(crate) const CHUNK: usize = PANEL;
/// Added to the sum of squares of a query or key.
const EPSILON: f64 = 1e-6;

/// The inputs of one value head in one row of the batch.
pub(crate) struct Head<'a, T> {
    inputs: &'a DeltaInputs<'a, T>,
    /// First token of the row.
    first: usize,
    head: usize,
}

impl<'a, T: Real> Head<'a, T> {
    pub fn new(inputs: &'a DeltaInputs<'a, T>, row: usize, head: usize) -> Self {
        Self { inputs, first: row * inputs.tokens, head }
    }

    #[inline(always)]
    fn part(&self, token: usize, start: usize, len: usize) -> &'a [T] {
        let width = self.inputs.heads.width();
        &self.inputs.qkv[(self.first + token) * width + start..][..len]
    }

    #[inline(always)]
    fn query(&self, token: usize) -> &'a [T] {
        let heads = &self.inputs.heads;
        self.part(token, heads.key_head(self.head) * heads.key_dim, heads.key_dim)
    }

    #[inline(always)]
    fn key(&self, token: usize) -> &'a [T] {
        let heads = &self.inputs.heads;
        self.part(token, (heads.key_heads + heads.key_head(self.head)) * heads.key_dim, heads.key_dim)
    }

    #[inline(always)]
    fn value(&self, token: usize) -> &'a [T] {
        let heads = &self.inputs.heads;
        self.part(token, 2 * heads.key_heads * heads.key_dim + self.head * heads.value_dim, heads.value_dim)
    }

    #[inline(always)]
    fn of_token(&self, x: &[T], token: usize) -> T {
        x[(self.first + token) * self.inputs.heads.value_heads + self.head]
    }

    /// Values of the tokens into `[c, dv]`; with `zeros`, zeros.
    #[inline(always)]
    pub fn read_values(&self, tokens: Range<usize>, zeros: bool, into: &mut Matrix<T>) {
        for (t, token) in tokens.enumerate() {
            let value = self.value(token);
            into.set_row(t, if zeros { &[] } else { value });
        }
    }

    /// This head of a tensor `[B, S, Hv, dv]`.
    #[inline(always)]
    pub fn token_of<'b>(&self, x: &'b [T], token: usize) -> &'b [T] {
        let heads = &self.inputs.heads;
        &x[((self.first + token) * heads.value_heads + self.head) * heads.value_dim..][..heads.value_dim]
    }
}

/// Buffers of a chunk and what is in them: `len` = c tokens. Matrices `[c, c]` are `[t, s]`.
pub(crate) struct Chunk<T> {
    pub len: usize,
    key_dim: usize,
    /// `[c, dk]`: normalised, scaled queries.
    pub query: Matrix<T>,
    /// `[c, dk]`: normalised keys.
    pub key: Matrix<T>,
    /// `[dk, c]`.
    key_t: Matrix<T>,
    /// `exp(b_t - b_s)` for s <= t, else 0.
    pub decay: Matrix<T>,
    /// `exp(b_t - b_s) (k_t . k_s)` for s < t, else 0.
    pub overlap: Matrix<T>,
    /// `exp(b_t - b_s) (q_t . k_s)` for s <= t, else 0.
    pub scores: Matrix<T>,
    /// The inverse of the triangular system; 0 right of the diagonal.
    pub inverse: Matrix<T>,
    pub beta: [T; CHUNK],
    /// `exp(b_t)`.
    pub since_start: [T; CHUNK],
    /// `exp(b_c - b_t)`.
    pub to_end: [T; CHUNK],
    /// `exp(b_c)`.
    pub whole: T,
    /// One over the roots of the sums of squares.
    pub query_norm: [T; CHUNK],
    pub key_norm: [T; CHUNK],
}

impl<T: Real> Chunk<T> {
    pub fn new(heads: &DeltaHeads) -> Self {
        let square = || Matrix::zeros(CHUNK, CHUNK);
        Self {
            len: 0,
            key_dim: heads.key_dim,
            query: Matrix::zeros(CHUNK, heads.key_dim),
            key: Matrix::zeros(CHUNK, heads.key_dim),
            key_t: Matrix::zeros(heads.key_dim, CHUNK),
            decay: square(),
            overlap: square(),
            scores: square(),
            inverse: square(),
            beta: [T::ZERO; CHUNK],
            since_start: [T::ZERO; CHUNK],
            to_end: [T::ZERO; CHUNK],
            whole: T::ONE,
            query_norm: [T::ZERO; CHUNK],
            key_norm: [T::ZERO; CHUNK],
        }
    }

    #[inline(always)]
    pub fn key_dim(&self) -> usize {
        self.key_dim
    }

    /// Takes over the keys, strengths and decays of `tokens`.
    #[inline(always)]
    pub fn read_keys(&mut self, head: &Head<T>, tokens: Range<usize>) {
        self.len = tokens.len();
        let mut sums = [0.0; CHUNK];
        let mut sum = 0.0;
        for (t, token) in tokens.enumerate() {
            self.key_norm[t] = set_normalised(&mut self.key, t, head.key(token), 1.0);
            self.beta[t] = head.of_token(head.inputs.beta, token);
            sum += head.of_token(head.inputs.g, token).to_f64();
            sums[t] = sum;
        }
        // Whole vectors are computed: what is left there from another chunk must not be a NaN.
        self.beta[self.len..].fill(T::ZERO);
        self.key.transpose_into(&mut self.key_t);
        self.whole = T::from_f64(sum).exp();
        for t in 0..self.len {
            self.since_start[t] = T::from_f64(sums[t]).exp();
            self.to_end[t] = T::from_f64(sum - sums[t]).exp();
            // Right of the diagonal the difference may be large; what is there is overwritten.
            let row: [T; CHUNK] = std::array::from_fn(|s| T::from_f64((sums[t] - sums[s]).min(0.0)).exp());
            self.decay.part_mut(t, 0).copy_from_slice(&row);
            self.decay.part_mut(t, 0)[t + 1..].fill(T::ZERO);
        }
    }

    /// The overlap of the keys and the inverse of the triangular system.
    #[inline(always)]
    pub fn solve(&mut self, multiplier: &mut Multiplier) {
        let size = (self.len, self.key_dim);
        multiplier.multiply((&mut self.overlap, false), Left::Plain(&self.key), &self.key_t, size, Part::LowerResult);
        for t in 0..self.len {
            let row = self.overlap.part_mut(t, 0);
            both(row, self.decay.part(t, 0), |x, e| x * e);
            row[t..].fill(T::ZERO);
        }
        self.invert();
    }

    /// Takes over the queries of `tokens` and their scores.
    #[inline(always)]
    pub fn read_queries(&mut self, head: &Head<T>, tokens: Range<usize>, multiplier: &mut Multiplier) {
        let scale = query_scale(self.key_dim);
        for (t, token) in tokens.enumerate() {
            self.query_norm[t] = set_normalised(&mut self.query, t, head.query(token), scale);
        }
        let size = (self.len, self.key_dim);
        multiplier.multiply((&mut self.scores, false), Left::Plain(&self.query), &self.key_t, size, Part::LowerResult);
        for t in 0..self.len {
            let row = self.scores.part_mut(t, 0);
            both(row, self.decay.part(t, 0), |x, e| x * e);
            row[t + 1..].fill(T::ZERO);
        }
    }

    /// Row t of the inverse is that of the unit matrix less `sum over s < t of overlap_ts beta_s` times row s.
    #[inline(always)]
    fn invert(&mut self) {
        for t in 0..self.len {
            let mut row = [T::ZERO; CHUNK];
            row[t] = T::ONE;
            for s in 0..t {
                let factor = self.overlap.part(t, 0)[s] * self.beta[s];
                both(&mut row, self.inverse.part(s, 0), |x, y| x - factor * y);
            }
            self.inverse.part_mut(t, 0).copy_from_slice(&row);
        }
    }

    /// `y`, from the values in `rest` `[c, dv]`, which become what the state leaves of them. `None` is a state of zeros;
    /// `read` is a buffer like `rest`.
    #[inline(always)]
    pub fn residuals(
        &self,
        state: Option<&Matrix<T>>,
        (rest, read, y): (&mut Matrix<T>, &mut Matrix<T>, &mut Matrix<T>),
        multiplier: &mut Multiplier,
    ) {
        if let Some(state) = state {
            let size = (self.len, self.key_dim);
            multiplier.multiply((read, false), Left::Plain(&self.key), state, size, Part::All);
            let factors: [T; CHUNK] = std::array::from_fn(|t| T::ZERO - self.since_start[t]);
            rest.add_scaled(read, &factors[..self.len]);
        }
        let size = (self.len, self.len);
        multiplier.multiply((y, false), Left::Plain(&self.inverse), rest, size, Part::LowerLeft);
    }

    /// Takes the state over the chunk; `fresh` says that it was zeros. `written` is a buffer like `y`.
    #[inline(always)]
    pub fn advance(
        &self,
        (state, fresh): (&mut Matrix<T>, bool),
        y: &Matrix<T>,
        written: &mut Matrix<T>,
        multiplier: &mut Multiplier,
    ) {
        let factors: [T; CHUNK] = std::array::from_fn(|t| self.to_end[t] * self.beta[t]);
        written.set_scaled(y, &factors[..self.len]);
        if !fresh {
            state.scale(self.whole);
        }
        let size = (self.key_dim, self.len);
        multiplier.multiply((state, !fresh), Left::Transposed(&self.key), written, size, Part::All);
    }
}

/// What queries are multiplied by after normalisation.
pub(crate) fn query_scale(key_dim: usize) -> f64 {
    1.0 / (key_dim as f64).sqrt()
}

/// Row `t` becomes `scale * x / sqrt(sum of x^2 + epsilon)`; returns one over the root.
#[inline(always)]
fn set_normalised<T: Real>(into: &mut Matrix<T>, t: usize, x: &[T], scale: f64) -> T {
    into.set_row(t, x);
    let norm = T::from_f64(1.0 / (into.dot_row(into, t).to_f64() + EPSILON).sqrt());
    into.scale_row(t, norm * T::from_f64(scale));
    norm
}
