//! The gated delta rule, a linear recurrence whose state is a matrix per head, in chunks, with its backward pass.
//!
//! Per value head, with state `S` `[dk, dv]`, normalised keys and scaled, normalised queries:
//!
//! ```text
//! S <- exp(g) S
//! S <- S + k (beta (v - S^T k))^T
//! o  = S^T q
//! ```
//!
//! Work is cut into *runs*: adjacent tokens of one document. A run starts from zeros or from a state that it is given, and is
//! an affine map of it: the state after it is [`delta_transitions`] times the state before it, plus [`delta_states`]. The
//! gradient of the state goes the other way: [`delta_initial_gradients`], plus the transposed transition times the gradient
//! after it. That is all that ranks which share a sequence have to tell each other.
//!
//! Every head of every run is one task, on rayon's threads. Tokens in no run are padding: their outputs and gradients are 0.

mod backward;
mod chunk;
mod forward;
mod matrix;
#[cfg(test)]
mod tests;

use crate::element::Element;
use crate::forward::Splitter;
use crate::real::Real;
pub(crate) use backward::{Backward, InitialGradient};
pub(crate) use forward::{Forward, Passed, Start};
use rayon::prelude::*;
use std::ops::Range;

/// Chunks of a block: forward keeps one state per block, backward runs a block again at a time.
pub(crate) const BLOCK: usize = 16;

/// Sizes of the heads. Value head `h` reads key head `h / (value_heads / key_heads)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, decays, strengths and outputs: a multiple of `key_heads`.
    pub value_heads: usize,
    /// dk.
    pub key_dim: usize,
    /// dv.
    pub value_dim: usize,
}

impl DeltaHeads {
    /// Numbers per token: queries, keys and values of all heads.
    pub fn width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// The key head that a value head reads.
    fn key_head(&self, value_head: usize) -> usize {
        value_head / (self.value_heads / self.key_heads)
    }

    /// Numbers of the states of all heads.
    fn states(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }
}

/// The inputs, contiguous.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInputs<'a, T> {
    heads: DeltaHeads,
    batch: usize,
    tokens: usize,
    qkv: &'a [T],
    g: &'a [T],
    beta: &'a [T],
}

impl<'a, T: Real> DeltaInputs<'a, T> {
    /// `qkv` is `[B, S, 2 Hk dk + Hv dv]`: queries, keys and values of all heads, neither normalised nor scaled. `g`
    /// `[B, S, Hv]` is the log of the decay, at most 0; `beta` `[B, S, Hv]` the strength of writing.
    ///
    /// # Panics
    /// If the lengths do not fit, or the value heads are not a multiple of the key heads.
    pub fn new(heads: DeltaHeads, (batch, tokens): (usize, usize), qkv: &'a [T], g: &'a [T], beta: &'a [T]) -> Self {
        assert!(heads.key_heads > 0 && heads.value_heads.is_multiple_of(heads.key_heads), "groups of value heads");
        assert_eq!(qkv.len(), batch * tokens * heads.width(), "one row of qkv per token");
        assert!(
            g.len() == batch * tokens * heads.value_heads && g.len() == beta.len(),
            "g and beta per token and head"
        );
        Self { heads, batch, tokens, qkv, g, beta }
    }
}

/// Adjacent tokens of one document, in one row of the batch. Not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaRun {
    /// Row of the batch.
    pub row: usize,
    /// Tokens of the row.
    pub tokens: Range<usize>,
}

/// A run to be passed forward.
#[derive(Debug, Clone)]
pub struct DeltaForwardRun<'a, T> {
    /// Which tokens.
    pub run: DeltaRun,
    /// The state before it, `[Hv, dk, dv]`; `None` is zeros.
    pub initial: Option<&'a [T]>,
    /// Whether the state after it is wanted.
    pub keep_final: bool,
}

/// What a run leaves behind.
#[derive(Debug, Clone)]
pub struct DeltaPassed<T> {
    /// The state after it, `[Hv, dk, dv]`; empty unless asked for.
    pub final_state: Vec<T>,
    /// For backward.
    pub blocks: DeltaBlocks<T>,
}

/// States inside a run, one per 1024 tokens and head, that backward starts again from.
#[derive(Debug, Clone)]
pub struct DeltaBlocks<T>(Vec<Vec<T>>);

/// A run to be passed backward.
#[derive(Debug, Clone)]
pub struct DeltaBackwardRun<'a, T> {
    /// Which tokens.
    pub run: DeltaRun,
    /// The state before it, `[Hv, dk, dv]`; `None` is zeros.
    pub initial: Option<&'a [T]>,
    /// What forward left.
    pub blocks: &'a DeltaBlocks<T>,
    /// The gradient of the state after it, `[Hv, dk, dv]`; `None` is zeros.
    pub d_final: Option<&'a [T]>,
    /// Whether the gradient of the state before it is wanted.
    pub keep_initial: bool,
}

/// Outputs of a batch, filled run by run.
#[derive(Debug)]
pub struct DeltaForward<T> {
    heads: DeltaHeads,
    /// `[Hv, B S, dv]`.
    out: Vec<T>,
}

impl<T: Real> DeltaForward<T> {
    /// Zeros for `tokens` tokens in all rows together.
    pub fn new(heads: DeltaHeads, tokens: usize) -> Self {
        Self { heads, out: vec![T::ZERO; heads.value_heads * tokens * heads.value_dim] }
    }

    /// Passes runs, which are sorted by row and token and do not overlap.
    ///
    /// # Panics
    /// For runs out of order or outside of the batch.
    pub fn run(&mut self, inputs: &DeltaInputs<T>, runs: &[DeltaForwardRun<T>]) -> Vec<DeltaPassed<T>> {
        let heads = &self.heads;
        let mut out = Splitter::new(&mut self.out, heads.value_dim);
        let tasks: Vec<_> = in_memory_order(inputs, runs.iter().map(|r| &r.run))
            .map(|(head, i, places)| (head, &runs[i], out.take(places)))
            .collect();
        let passed = tasks.into_par_iter().map_init(
            || forward::Scratch::new(heads, heads.value_dim),
            |scratch, (head, run, out)| {
                let DeltaRun { row, tokens } = run.run.clone();
                let start = run.initial.map_or(Start::Zero, |states| Start::State(of_head(states, heads, head)));
                let keep_final = run.keep_final;
                T::delta_forward(Forward { inputs, row, head, tokens, start, out, keep_final, scratch })
            },
        );
        let mut all: Vec<_> =
            runs.iter().map(|_| DeltaPassed { final_state: Vec::new(), blocks: DeltaBlocks(Vec::new()) }).collect();
        for (i, passed) in passed.collect::<Vec<Passed<T>>>().into_iter().enumerate() {
            let of_run = &mut all[i % runs.len()];
            of_run.final_state.extend(passed.last);
            of_run.blocks.0.push(passed.blocks);
        }
        all
    }

    /// The outputs, `[B, S, Hv, dv]`.
    pub fn finish<S: Element<Acc = T>>(self) -> Vec<S> {
        let (heads, dv) = (self.heads.value_heads, self.heads.value_dim);
        let tokens = self.out.len() / (heads * dv).max(1);
        let mut out = vec![S::default(); self.out.len()];
        out.par_chunks_mut((heads * dv).max(1)).with_min_len(64).enumerate().for_each(|(token, out)| {
            for (head, out) in out.chunks_exact_mut(dv).enumerate() {
                let from = &self.out[(head * tokens + token) * dv..][..dv];
                out.iter_mut().zip(from).for_each(|(out, &x)| *out = S::narrow(x));
            }
        });
        out
    }
}

/// Gradients of a batch, filled run by run.
#[derive(Debug)]
pub struct DeltaBackward<T> {
    heads: DeltaHeads,
    tokens: usize,
    /// `[Hv, B S, dk]`.
    query: Vec<T>,
    /// `[Hv, B S, dk]`.
    key: Vec<T>,
    /// `[Hv, B S, dv]`.
    value: Vec<T>,
    /// `[Hv, B S]`.
    g: Vec<T>,
    /// `[Hv, B S]`.
    beta: Vec<T>,
}

/// The gradients of the inputs, in their shapes.
#[derive(Debug)]
pub struct DeltaGradients<S: Element> {
    /// `[B, S, 2 Hk dk + Hv dv]`.
    pub qkv: Vec<S>,
    /// `[B, S, Hv]`.
    pub g: Vec<S::Acc>,
    /// `[B, S, Hv]`.
    pub beta: Vec<S::Acc>,
}

impl<T: Real> DeltaBackward<T> {
    /// Zeros for `tokens` tokens in all rows together.
    pub fn new(heads: DeltaHeads, tokens: usize) -> Self {
        let zeros = |width: usize| vec![T::ZERO; heads.value_heads * tokens * width];
        let (dk, dv) = (heads.key_dim, heads.value_dim);
        Self { heads, tokens, query: zeros(dk), key: zeros(dk), value: zeros(dv), g: zeros(1), beta: zeros(1) }
    }

    /// Passes runs backward, in any order of calls; within one call they are sorted as in forward. `d_out` is
    /// `[B, S, Hv, dv]`. Returns the gradients of their initial states, `[Hv, dk, dv]`, empty unless asked for.
    ///
    /// # Panics
    /// As [`DeltaForward::run`].
    pub fn run(&mut self, inputs: &DeltaInputs<T>, runs: &[DeltaBackwardRun<T>], d_out: &[T]) -> Vec<Vec<T>> {
        let heads = &self.heads;
        let mut query = Splitter::new(&mut self.query, heads.key_dim);
        let mut key = Splitter::new(&mut self.key, heads.key_dim);
        let mut value = Splitter::new(&mut self.value, heads.value_dim);
        let mut g = Splitter::new(&mut self.g, 1);
        let mut beta = Splitter::new(&mut self.beta, 1);
        let tasks: Vec<_> = in_memory_order(inputs, runs.iter().map(|r| &r.run))
            .map(|(head, i, places)| {
                let into = backward::Gradients {
                    query: query.take(places.clone()),
                    key: key.take(places.clone()),
                    value: value.take(places.clone()),
                    g: g.take(places.clone()),
                    beta: beta.take(places),
                };
                (head, &runs[i], into)
            })
            .collect();
        let initial = tasks.into_par_iter().map_init(
            || backward::Scratch::new(heads),
            |scratch, (head, run, into)| {
                let DeltaRun { row, tokens } = run.run.clone();
                let state = |states| of_head(states, heads, head);
                let (initial, d_final) = (run.initial.map(state), run.d_final.map(state));
                let (blocks, keep_initial) = (&run.blocks.0[head][..], run.keep_initial);
                T::delta_backward(Backward {
                    inputs,
                    row,
                    head,
                    tokens,
                    initial,
                    blocks,
                    d_out,
                    d_final,
                    into,
                    keep_initial,
                    scratch,
                })
            },
        );
        by_run(initial.collect(), runs.len())
    }

    /// The gradients. Those of queries and keys are summed over the value heads that read them.
    pub fn finish<S: Element<Acc = T>>(self) -> DeltaGradients<S> {
        let Self { heads, tokens, query, key, value, g, beta } = self;
        let (dk, dv, group) = (heads.key_dim, heads.value_dim, heads.value_heads / heads.key_heads);
        let mut qkv = vec![S::default(); tokens * heads.width()];
        qkv.par_chunks_mut(heads.width().max(1)).with_min_len(64).enumerate().for_each(|(token, row)| {
            let (of_query, rest) = row.split_at_mut(heads.key_heads * dk);
            let (of_key, of_value) = rest.split_at_mut(heads.key_heads * dk);
            for (row, from) in [(of_query, &query), (of_key, &key)] {
                for (head, row) in row.chunks_exact_mut(dk).enumerate() {
                    let from = |i: usize| &from[((head * group + i) * tokens + token) * dk..][..dk];
                    for (i, x) in row.iter_mut().enumerate() {
                        *x = S::narrow((1..group).fold(from(0)[i], |sum, of| sum + from(of)[i]));
                    }
                }
            }
            for (head, row) in of_value.chunks_exact_mut(dv).enumerate() {
                let from = &value[(head * tokens + token) * dv..][..dv];
                row.iter_mut().zip(from).for_each(|(x, &y)| *x = S::narrow(y));
            }
        });
        let by_token = |x: Vec<T>| -> Vec<T> {
            let places = (0..tokens).flat_map(|token| (0..heads.value_heads).map(move |head| head * tokens + token));
            places.map(|place| x[place]).collect()
        };
        DeltaGradients { qkv, g: by_token(g), beta: by_token(beta) }
    }
}

/// The states after runs that start from zeros, `[Hv, dk, dv]` each.
pub fn delta_states<T: Real>(inputs: &DeltaInputs<T>, runs: &[DeltaRun]) -> Vec<Vec<T>> {
    final_states(inputs, runs, Start::Zero, inputs.heads.value_dim)
}

/// What runs multiply the state before them by, `[Hv, dk, dk]` each.
pub fn delta_transitions<T: Real>(inputs: &DeltaInputs<T>, runs: &[DeltaRun]) -> Vec<Vec<T>> {
    final_states(inputs, runs, Start::Unit, inputs.heads.key_dim)
}

fn final_states<T: Real>(
    inputs: &DeltaInputs<T>,
    runs: &[DeltaRun],
    start: Start<'static, T>,
    columns: usize,
) -> Vec<Vec<T>> {
    let tasks: Vec<_> = in_memory_order(inputs, runs.iter()).map(|(head, i, _)| (head, &runs[i])).collect();
    let states = tasks.into_par_iter().map_init(
        || forward::Scratch::new(&inputs.heads, columns),
        |scratch, (head, run)| {
            let DeltaRun { row, tokens } = run.clone();
            T::delta_forward(Forward { inputs, row, head, tokens, start, out: &mut [], keep_final: true, scratch }).last
        },
    );
    by_run(states.collect(), runs.len())
}

/// The gradients of the states before runs, when those of the states after them are zeros: `[Hv, dk, dv]` each. `d_out` is
/// `[B, S, Hv, dv]`.
pub fn delta_initial_gradients<T: Real>(inputs: &DeltaInputs<T>, runs: &[DeltaRun], d_out: &[T]) -> Vec<Vec<T>> {
    let tasks: Vec<_> = in_memory_order(inputs, runs.iter()).map(|(head, i, _)| (head, &runs[i])).collect();
    let gradients = tasks.into_par_iter().map_init(
        || backward::Scratch::new(&inputs.heads),
        |scratch, (head, run)| {
            let DeltaRun { row, tokens } = run.clone();
            T::delta_initial_gradient(InitialGradient { inputs, row, head, tokens, d_out, scratch })
        },
    );
    by_run(gradients.collect(), runs.len())
}

/// Every (head, run) with the run's places in `[Hv, B S]`, in increasing order.
fn in_memory_order<'a, T: Real>(
    inputs: &DeltaInputs<T>,
    runs: impl Iterator<Item = &'a DeltaRun> + Clone,
) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
    let (rows, tokens) = (inputs.batch, inputs.tokens);
    (0..inputs.heads.value_heads).flat_map(move |head| {
        runs.clone().enumerate().map(move |(i, run)| {
            assert!(run.row < rows && run.tokens.end <= tokens && !run.tokens.is_empty(), "a run outside of the batch");
            let first = (head * rows + run.row) * tokens;
            (head, i, first + run.tokens.start..first + run.tokens.end)
        })
    })
}

/// From one result per (head, run) to one per run, heads one after the other.
fn by_run<T>(results: Vec<Vec<T>>, runs: usize) -> Vec<Vec<T>> {
    let mut all: Vec<Vec<T>> = (0..runs).map(|_| Vec::new()).collect();
    for (i, result) in results.into_iter().enumerate() {
        all[i % runs].extend(result);
    }
    all
}

fn of_head<'a, T>(states: &'a [T], heads: &DeltaHeads, head: usize) -> &'a [T] {
    assert_eq!(states.len(), heads.states(), "a state per head");
    &states[head * heads.key_dim * heads.value_dim..][..heads.key_dim * heads.value_dim]
}
