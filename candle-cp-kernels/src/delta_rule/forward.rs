//! Forward over the chunks of one run.

use super::chunk::{CHUNK, Chunk, Head};
use super::matrix::{Left, Matrix, Multiplier, Part};
use super::{BLOCK, DeltaHeads, DeltaInputs};
use crate::real::Real;
use pulp::NullaryFnOnce;
use std::ops::Range;

/// Buffers of one worker.
pub(crate) struct Scratch<T> {
    chunk: Chunk<T>,
    /// `[c, dv]` each.
    rest: Matrix<T>,
    y: Matrix<T>,
    buffer: Matrix<T>,
    /// `[dk, dv]`.
    state: Matrix<T>,
    multiplier: Multiplier,
}

impl<T: Real> Scratch<T> {
    /// `columns` of the state: dv, or dk for a run's transition.
    pub fn new(heads: &DeltaHeads, columns: usize) -> Self {
        let tokens = || Matrix::zeros(CHUNK, columns);
        Self {
            chunk: Chunk::new(heads),
            rest: tokens(),
            y: tokens(),
            buffer: tokens(),
            state: Matrix::zeros(heads.key_dim, columns),
            multiplier: Multiplier::default(),
        }
    }
}

/// What a run starts from, and which values it writes.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a, T> {
    /// A state of zeros.
    Zero,
    /// A state `[dk, dv]`.
    State(&'a [T]),
    /// The unit matrix, and values of zeros: the final state is what the run does to any state.
    Unit,
}

/// One head of one run.
pub(crate) struct Forward<'a, T> {
    pub inputs: &'a DeltaInputs<'a, T>,
    pub row: usize,
    pub head: usize,
    pub tokens: Range<usize>,
    pub start: Start<'a, T>,
    /// `[tokens, dv]`, or empty if outputs are not wanted.
    pub out: &'a mut [T],
    pub keep_final: bool,
    pub scratch: &'a mut Scratch<T>,
}

/// What one head of one run leaves behind.
pub(crate) struct Passed<T> {
    /// `[dk, columns]`; empty unless asked for.
    pub last: Vec<T>,
    /// States `[dk, columns]` at the starts of all blocks but the first; only where outputs were wanted.
    pub blocks: Vec<T>,
}

impl<T: Real> NullaryFnOnce for Forward<'_, T> {
    type Output = Passed<T>;

    #[inline(always)]
    fn call(self) -> Passed<T> {
        let heads = &self.inputs.heads;
        let (dk, outputs) = (heads.key_dim, !self.out.is_empty());
        let head = Head::new(self.inputs, self.row, self.head);
        let Scratch { chunk, rest, y, buffer, state, multiplier } = self.scratch;
        let dv = if matches!(self.start, Start::Unit) { dk } else { heads.value_dim };
        let mut fresh = false;
        match self.start {
            Start::Zero => fresh = true,
            Start::State(from) => state.load(dk, dv, from),
            Start::Unit => state.set_unit(dk),
        }
        let mut blocks = Vec::new();
        for (number, first) in self.tokens.clone().step_by(CHUNK).enumerate() {
            let tokens = first..self.tokens.end.min(first + CHUNK);
            if outputs && number > 0 && number % BLOCK == 0 {
                state.store(dk, dv, &mut blocks);
            }
            chunk.read_keys(&head, tokens.clone());
            chunk.solve(multiplier);
            head.read_values(tokens.clone(), matches!(self.start, Start::Unit), rest);
            chunk.residuals((!fresh).then_some(&*state), (rest, buffer, y), multiplier);
            if outputs {
                chunk.read_queries(&head, tokens.clone(), multiplier);
                let size = (chunk.len, dk);
                if !fresh {
                    multiplier.multiply((rest, false), Left::Plain(&chunk.query), state, size, Part::All);
                    rest.scale_rows(&chunk.since_start[..chunk.len]);
                }
                buffer.set_scaled(y, &chunk.beta[..chunk.len]);
                let size = (chunk.len, chunk.len);
                multiplier.multiply((rest, !fresh), Left::Plain(&chunk.scores), buffer, size, Part::LowerLeft);
                let out = self.out.chunks_exact_mut(dv).skip(first - self.tokens.start);
                out.take(chunk.len).enumerate().for_each(|(t, out)| rest.read_row(t, out));
            }
            if self.keep_final || tokens.end < self.tokens.end {
                chunk.advance((state, fresh), y, buffer, multiplier);
                fresh = false;
            }
        }
        let mut last = Vec::new();
        if self.keep_final {
            state.store(dk, dv, &mut last);
        }
        Passed { last, blocks }
    }
}
