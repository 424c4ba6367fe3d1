//! Backward over the chunks of one run, from the last to the first.
//!
//! States are not kept per token, nor per chunk: forward left one per block of chunks; a block is run again from there, and
//! then walked backwards.

use super::chunk::{CHUNK, Chunk, Head, query_scale};
use super::matrix::{Left, Matrix, Multiplier, Part, both, dot};
use super::{BLOCK, DeltaHeads, DeltaInputs};
use crate::real::Real;
use pulp::NullaryFnOnce;
use std::ops::Range;

/// What the second visit of a chunk needs of the first.
struct Kept<T> {
    /// `[dv, dk]`: the state before the chunk.
    state_t: Matrix<T>,
    /// `[c, dv]`.
    y: Matrix<T>,
    /// `[c, c]` each.
    inverse: Matrix<T>,
    overlap: Matrix<T>,
}

/// Buffers of one worker. A gradient has the name of what it is the gradient of.
pub(crate) struct Scratch<T> {
    chunk: Chunk<T>,
    kept: Vec<Kept<T>>,
    /// `[c, dv]` each.
    out: Matrix<T>,
    written: Matrix<T>,
    rest: Matrix<T>,
    buffer: Matrix<T>,
    /// `[dv, c]`.
    y_t: Matrix<T>,
    /// `[dk, dv]` each: the state itself, and the gradient of the state after the chunk.
    state: Matrix<T>,
    d_state: Matrix<T>,
    /// `[dv, dk]`.
    d_state_t: Matrix<T>,
    pairs: Pairs<T>,
    /// `[c, dk]` each.
    query: Matrix<T>,
    key: Matrix<T>,
    part: Matrix<T>,
    multiplier: Multiplier,
}

impl<T: Real> Scratch<T> {
    pub fn new(heads: &DeltaHeads) -> Self {
        let (dk, dv) = (heads.key_dim, heads.value_dim);
        let (values, keys) = (|| Matrix::zeros(CHUNK, dv), || Matrix::zeros(CHUNK, dk));
        Self {
            chunk: Chunk::new(heads),
            kept: Vec::new(),
            out: values(),
            written: values(),
            rest: values(),
            buffer: values(),
            y_t: Matrix::zeros(dv, CHUNK),
            state: Matrix::zeros(dk, dv),
            d_state: Matrix::zeros(dk, dv),
            d_state_t: Matrix::zeros(dv, dk),
            pairs: Pairs::new(),
            query: keys(),
            key: keys(),
            part: keys(),
            multiplier: Multiplier::default(),
        }
    }

    /// The gradients of what the chunk writes (`written`, beta times y) and of what the state leaves of its values
    /// (`rest`), from those of its outputs and of the state after it; `last` says that the latter is zeros.
    #[inline(always)]
    fn pull(&mut self, last: bool) {
        let Self { chunk, out, written, rest, buffer, d_state, multiplier, .. } = self;
        let (c, dk) = (chunk.len, chunk.key_dim());
        if !last {
            multiplier.multiply((written, false), Left::Plain(&chunk.key), d_state, (c, dk), Part::All);
            written.scale_rows(&chunk.to_end[..c]);
        }
        multiplier.multiply((written, !last), Left::Transposed(&chunk.scores), out, (c, c), Part::UpperLeft);
        buffer.set_scaled(written, &chunk.beta[..c]);
        multiplier.multiply((rest, false), Left::Transposed(&chunk.inverse), buffer, (c, c), Part::UpperLeft);
    }

    /// Takes the gradient of the state from after the chunk to before it.
    #[inline(always)]
    fn retreat(&mut self, last: bool) {
        let Self { chunk, out, rest, buffer, d_state, multiplier, .. } = self;
        let (c, dk) = (chunk.len, chunk.key_dim());
        if !last {
            d_state.scale(chunk.whole);
        }
        buffer.set_scaled(out, &chunk.since_start[..c]);
        multiplier.multiply((d_state, !last), Left::Transposed(&chunk.query), buffer, (dk, c), Part::All);
        buffer.set_scaled(rest, &negated(&chunk.since_start)[..c]);
        multiplier.multiply((d_state, true), Left::Transposed(&chunk.key), buffer, (dk, c), Part::All);
    }

    #[inline(always)]
    fn read_d_out(&mut self, head: &Head<T>, tokens: Range<usize>, d_out: &[T]) {
        for (t, token) in tokens.enumerate() {
            self.out.set_row(t, head.token_of(d_out, token));
        }
    }
}

#[inline(always)]
fn negated<T: Real>(x: &[T; CHUNK]) -> [T; CHUNK] {
    std::array::from_fn(|t| T::ZERO - x[t])
}

/// Gradients of products between tokens of a chunk, `[t, s]`.
struct Pairs<T> {
    /// In: products of outgoing gradients with `y`; out: gradients of `q_t . k_s`.
    scores: Matrix<T>,
    /// In: products of the gradients of `rest` with `y`; out: gradients of `k_t . k_s`.
    overlap: Matrix<T>,
    /// For beta of s.
    beta: [T; CHUNK],
    /// For the sums of g up to t.
    sums: [T; CHUNK],
}

impl<T: Real> Pairs<T> {
    fn new() -> Self {
        let square = || Matrix::zeros(CHUNK, CHUNK);
        Self { scores: square(), overlap: square(), beta: [T::ZERO; CHUNK], sums: [T::ZERO; CHUNK] }
    }

    #[inline(always)]
    fn run(&mut self, chunk: &Chunk<T>, overlap: &Matrix<T>) {
        self.beta = [T::ZERO; CHUNK];
        self.sums = [T::ZERO; CHUNK];
        let beta = &chunk.beta;
        for t in 0..chunk.len {
            self.scores.part_mut(t, 0)[t + 1..].fill(T::ZERO);
            self.overlap.part_mut(t, 0)[t..].fill(T::ZERO);
            let (d_score, d_overlap) = (row(&self.scores, t), row(&self.overlap, t));
            let (decay, score, overlap) = (row(&chunk.decay, t), row(&chunk.scores, t), row(overlap, t));
            let (mut of_score, mut of_overlap, mut through) = ([T::ZERO; CHUNK], [T::ZERO; CHUNK], [T::ZERO; CHUNK]);
            for s in 0..CHUNK {
                let for_score = d_score[s] * beta[s];
                let for_beta = T::ZERO - d_overlap[s] * overlap[s];
                of_score[s] = for_score * decay[s];
                of_overlap[s] = T::ZERO - d_overlap[s] * beta[s] * decay[s];
                through[s] = for_score * score[s] + for_beta * beta[s];
                self.beta[s] += for_beta;
            }
            // A token's product with itself does not decay.
            through[t] = T::ZERO;
            both(&mut self.sums, &through, |sum, x| sum - x);
            self.sums[t] += dot(&through, &[T::ONE; CHUNK]);
            self.scores.part_mut(t, 0).copy_from_slice(&of_score);
            self.overlap.part_mut(t, 0).copy_from_slice(&of_overlap);
        }
    }
}

/// A row of a `[c, c]` matrix.
#[inline(always)]
fn row<T: Real>(x: &Matrix<T>, t: usize) -> [T; CHUNK] {
    x.part(t, 0).try_into().expect("one panel")
}

/// Where the gradients of one head of one run go.
pub(crate) struct Gradients<'a, T> {
    /// `[tokens, dk]`.
    pub query: &'a mut [T],
    /// `[tokens, dk]`.
    pub key: &'a mut [T],
    /// `[tokens, dv]`.
    pub value: &'a mut [T],
    /// `[tokens]`.
    pub g: &'a mut [T],
    /// `[tokens]`.
    pub beta: &'a mut [T],
}

/// All gradients of one head of one run. Returns that of the initial state, `[dk, dv]`, or nothing unless asked for.
pub(crate) struct Backward<'a, T> {
    pub inputs: &'a DeltaInputs<'a, T>,
    pub row: usize,
    pub head: usize,
    pub tokens: Range<usize>,
    /// `[dk, dv]`; `None` is zeros.
    pub initial: Option<&'a [T]>,
    /// From forward.
    pub blocks: &'a [T],
    /// `[B, S, Hv, dv]`.
    pub d_out: &'a [T],
    /// `[dk, dv]`; `None` is zeros.
    pub d_final: Option<&'a [T]>,
    pub into: Gradients<'a, T>,
    pub keep_initial: bool,
    pub scratch: &'a mut Scratch<T>,
}

impl<T: Real> NullaryFnOnce for Backward<'_, T> {
    type Output = Vec<T>;

    #[inline(always)]
    fn call(mut self) -> Vec<T> {
        let (dk, dv) = (self.inputs.heads.key_dim, self.inputs.heads.value_dim);
        let head = Head::new(self.inputs, self.row, self.head);
        if let Some(d_final) = self.d_final {
            self.scratch.d_state.load(dk, dv, d_final);
        }
        let mut last = self.d_final.is_none();
        let blocks: Vec<_> = self.tokens.clone().step_by(BLOCK * CHUNK).collect();
        for (block, &start) in blocks.iter().enumerate().rev() {
            let tokens = start..self.tokens.end.min(start + BLOCK * CHUNK);
            let initial = match block {
                0 => self.initial,
                _ => Some(&self.blocks[(block - 1) * dk * dv..][..dk * dv]),
            };
            self.again(&head, tokens.clone(), initial);
            let chunks: Vec<_> = tokens.clone().step_by(CHUNK).collect();
            for (number, &first) in chunks.iter().enumerate().rev() {
                let fresh = number == 0 && initial.is_none();
                let goes_on = self.keep_initial || first > self.tokens.start;
                self.chunk(&head, first..tokens.end.min(first + CHUNK), number, (fresh, last, goes_on));
                last = false;
            }
        }
        let mut initial = Vec::new();
        if self.keep_initial {
            self.scratch.d_state.store(dk, dv, &mut initial);
        }
        initial
    }
}

impl<T: Real> Backward<'_, T> {
    /// Forward over a block, keeping what its chunks need.
    #[inline(always)]
    fn again(&mut self, head: &Head<T>, tokens: Range<usize>, initial: Option<&[T]>) {
        let (dk, dv) = (self.inputs.heads.key_dim, self.inputs.heads.value_dim);
        let Scratch { chunk, kept, rest, buffer, state, multiplier, .. } = &mut *self.scratch;
        if let Some(initial) = initial {
            state.load(dk, dv, initial);
        }
        let mut fresh = initial.is_none();
        for (number, first) in tokens.clone().step_by(CHUNK).enumerate() {
            let of_chunk = first..tokens.end.min(first + CHUNK);
            if kept.len() == number {
                let square = || Matrix::zeros(CHUNK, CHUNK);
                let (state_t, y) = (Matrix::zeros(dv, dk), Matrix::zeros(CHUNK, dv));
                kept.push(Kept { state_t, y, inverse: square(), overlap: square() });
            }
            let kept = &mut kept[number];
            chunk.read_keys(head, of_chunk.clone());
            chunk.solve(multiplier);
            head.read_values(of_chunk.clone(), false, rest);
            if !fresh {
                state.transpose_into(&mut kept.state_t);
            }
            chunk.residuals((!fresh).then_some(&*state), (rest, buffer, &mut kept.y), multiplier);
            kept.inverse.copy_from(&chunk.inverse);
            kept.overlap.copy_from(&chunk.overlap);
            if of_chunk.end < tokens.end {
                chunk.advance((state, fresh), &kept.y, buffer, multiplier);
                fresh = false;
            }
        }
    }

    /// Backward over a chunk: `fresh` if the state before it is zeros, `last` if the gradient of the state after it is
    /// zeros, `goes_on` if the gradient of the state before it is wanted.
    #[inline(always)]
    fn chunk(
        &mut self,
        head: &Head<T>,
        tokens: Range<usize>,
        number: usize,
        (fresh, last, goes_on): (bool, bool, bool),
    ) {
        let scratch = &mut *self.scratch;
        scratch.chunk.read_keys(head, tokens.clone());
        std::mem::swap(&mut scratch.chunk.inverse, &mut scratch.kept[number].inverse);
        scratch.chunk.read_queries(head, tokens.clone(), &mut scratch.multiplier);
        scratch.read_d_out(head, tokens.clone(), self.d_out);
        scratch.pull(last);
        let Scratch { chunk, kept, out, written, rest, y_t, pairs, multiplier, .. } = scratch;
        let (c, dv, kept) = (chunk.len, self.inputs.heads.value_dim, &kept[number]);
        kept.y.transpose_into(y_t);
        multiplier.multiply((&mut pairs.scores, false), Left::Plain(out), y_t, (c, dv), Part::LowerResult);
        multiplier.multiply((&mut pairs.overlap, false), Left::Plain(rest), y_t, (c, dv), Part::LowerResult);
        pairs.run(chunk, &kept.overlap);
        for t in 0..c {
            pairs.beta[t] += written.dot_row(&kept.y, t);
        }
        let mut sums = self.through_state(number, fresh, last);
        self.through_pairs(fresh, last);
        self.write(tokens, &mut sums);
        if goes_on {
            self.scratch.retreat(last);
        }
    }

    /// The parts of the gradients of queries and keys that pass through the state before and after the chunk; returns
    /// those of the sums of g.
    #[inline(always)]
    fn through_state(&mut self, number: usize, fresh: bool, last: bool) -> [f64; CHUNK] {
        let Scratch { chunk, kept, out, rest, d_state, d_state_t, query, key, part, multiplier, .. } =
            &mut *self.scratch;
        let (c, dv, kept) = (chunk.len, self.inputs.heads.value_dim, &kept[number]);
        let mut sums = [0.0; CHUNK];
        if !fresh {
            multiplier.multiply((query, false), Left::Plain(out), &kept.state_t, (c, dv), Part::All);
            query.scale_rows(&chunk.since_start[..c]);
            multiplier.multiply((key, false), Left::Plain(rest), &kept.state_t, (c, dv), Part::All);
            key.scale_rows(&negated(&chunk.since_start)[..c]);
            for (t, sum) in sums.iter_mut().take(c).enumerate() {
                *sum = (query.dot_row(&chunk.query, t) + key.dot_row(&chunk.key, t)).to_f64();
            }
        }
        if !last {
            d_state.transpose_into(d_state_t);
            multiplier.multiply((part, false), Left::Plain(&kept.y), d_state_t, (c, dv), Part::All);
            for t in 0..c {
                part.scale_row(t, chunk.to_end[t] * chunk.beta[t]);
                let through = part.dot_row(&chunk.key, t).to_f64();
                sums[t] -= through;
                sums[c - 1] += through;
            }
            if fresh {
                key.copy_from(part);
            } else {
                key.add_scaled(part, &[T::ONE; CHUNK][..c]);
                sums[c - 1] += (chunk.whole * kept.state_t.dot(d_state_t)).to_f64();
            }
        }
        sums
    }

    /// Adds what passes between the tokens of the chunk.
    #[inline(always)]
    fn through_pairs(&mut self, fresh: bool, last: bool) {
        let Scratch { chunk, pairs, query, key, multiplier, .. } = &mut *self.scratch;
        let size = (chunk.len, chunk.len);
        let begun = !(fresh && last);
        multiplier.multiply((query, !fresh), Left::Plain(&pairs.scores), &chunk.key, size, Part::LowerLeft);
        multiplier.multiply((key, begun), Left::Transposed(&pairs.scores), &chunk.query, size, Part::UpperLeft);
        multiplier.multiply((key, true), Left::Plain(&pairs.overlap), &chunk.key, size, Part::LowerLeft);
        multiplier.multiply((key, true), Left::Transposed(&pairs.overlap), &chunk.key, size, Part::UpperLeft);
    }

    /// Hands the gradients of a chunk out, those of queries and keys taken through the normalisation.
    #[inline(always)]
    fn write(&mut self, tokens: Range<usize>, sums: &mut [f64; CHUNK]) {
        let Scratch { chunk, pairs, query, key, rest, .. } = &mut *self.scratch;
        let heads = &self.inputs.heads;
        let into = &mut self.into;
        let scale = query_scale(heads.key_dim);
        let (up, down) = (T::from_f64(scale), T::from_f64(1.0 / scale));
        let mut sum = 0.0;
        for t in (0..chunk.len).rev() {
            let at = tokens.start - self.tokens.start + t;
            sum += sums[t] + pairs.sums[t].to_f64();
            into.g[at] = T::from_f64(sum);
            into.beta[at] = pairs.beta[t];
            rest.read_row(t, &mut into.value[at * heads.value_dim..][..heads.value_dim]);
            let keys = at * heads.key_dim..(at + 1) * heads.key_dim;
            query.normalised_row(&chunk.query, t, (up, down), chunk.query_norm[t]);
            query.read_row(t, &mut into.query[keys.clone()]);
            key.normalised_row(&chunk.key, t, (T::ONE, T::ONE), chunk.key_norm[t]);
            key.read_row(t, &mut into.key[keys]);
        }
    }
}

/// The gradient of the initial state of one head of one run, `[dk, dv]`, when that of the final state is zeros.
pub(crate) struct InitialGradient<'a, T> {
    pub inputs: &'a DeltaInputs<'a, T>,
    pub row: usize,
    pub head: usize,
    pub tokens: Range<usize>,
    /// `[B, S, Hv, dv]`.
    pub d_out: &'a [T],
    pub scratch: &'a mut Scratch<T>,
}

impl<T: Real> NullaryFnOnce for InitialGradient<'_, T> {
    type Output = Vec<T>;

    #[inline(always)]
    fn call(self) -> Vec<T> {
        let Self { inputs, tokens, d_out, scratch, .. } = self;
        let head = Head::new(inputs, self.row, self.head);
        let mut last = true;
        let chunks: Vec<_> = tokens.clone().step_by(CHUNK).collect();
        for &first in chunks.iter().rev() {
            let of_chunk = first..tokens.end.min(first + CHUNK);
            scratch.chunk.read_keys(&head, of_chunk.clone());
            scratch.chunk.solve(&mut scratch.multiplier);
            scratch.chunk.read_queries(&head, of_chunk.clone(), &mut scratch.multiplier);
            scratch.read_d_out(&head, of_chunk, d_out);
            scratch.pull(last);
            scratch.retreat(last);
            last = false;
        }
        let mut initial = Vec::new();
        scratch.d_state.store(inputs.heads.key_dim, inputs.heads.value_dim, &mut initial);
        initial
    }
}
