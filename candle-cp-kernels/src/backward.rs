//! Backward pass over one chunk of keys.
//!
//! With `p = exp(scale * q.k - lse)` and `delta = sum(out * d_out)` over the head:
//! `dv = p^T d_out`, `dp = d_out v^T`, `ds = p * (dp - delta) * scale`, `dq = ds k`, `dk = ds^T q`
//! (Dao et al., FlashAttention-2, 2023, algorithm 2).

use crate::forward::{Splitter, in_memory_order, spans, stack, unstack};
use crate::heads::{Heads, Shape};
use crate::real::{Matrix, Real, matmul};
use crate::softmax::{Probabilities, ScoreGradient, Span};
use crate::tile::{Bounds, KEY_BLOCK, QUERY_BLOCK, QueryTile};
use rayon::prelude::*;

/// What backward keeps over all chunks: the gradient of the queries so far.
#[derive(Debug, Clone)]
pub struct Gradients<T> {
    shape: Shape,
    /// `[B, Hkv, Sq, G, D]`.
    d_query: Vec<T>,
}

impl<T: Real> Gradients<T> {
    /// Zero.
    pub fn new(shape: Shape) -> Self {
        Self { shape, d_query: vec![T::ZERO; shape.rows() * shape.head_dim] }
    }

    /// Gradient of the queries, `[B, Hq, Sq, D]`.
    pub fn finish(self) -> Vec<T> {
        unstack(&self.d_query, self.shape, self.shape.head_dim)
    }
}

/// `delta`, the sum of `out * d_out` over each head, stacked `[B, Hkv, Sq, G]` as [`crate::Forward::finish`] stacks
/// its log-sum-exp. Both arguments are `[B, Hq, Sq, D]`.
pub fn output_dot<T: Real>(out: &Heads<T>, d_out: &Heads<T>, shape: Shape) -> Vec<T> {
    let group = shape.group();
    let mut delta = Vec::with_capacity(shape.rows());
    for row in 0..shape.batch {
        for key_head in 0..shape.key_heads {
            for q in 0..shape.queries {
                for head in key_head * group..(key_head + 1) * group {
                    let pairs = out.token(row, head, q).iter().zip(d_out.token(row, head, q));
                    delta.push(pairs.fold(T::ZERO, |sum, (&a, &b)| sum + a * b));
                }
            }
        }
    }
    delta
}

/// Inputs of [`backward_chunk`] that do not change from chunk to chunk.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a, T> {
    /// `[B, Hq, Sq, D]`.
    pub query: &'a Heads<'a, T>,
    /// `[B, Hq, Sq, D]`.
    pub d_out: &'a Heads<'a, T>,
    /// Final log-sum-exp, `[B, Hkv, Sq, G]`.
    pub lse: &'a [T],
    /// From [`output_dot`], `[B, Hkv, Sq, G]`.
    pub delta: &'a [T],
    /// Positions that `[row][query]` may see.
    pub bounds: &'a [Vec<Bounds>],
    /// Factor on the scores.
    pub scale: T,
}

/// Adds the chunk's part to the query gradient in `gradients`; returns the gradients of this chunk's keys and
/// values, `[B, Hkv, Sk, D]` each, where `keys` is `Sk`.
///
/// Sums run in an order that depends on the tiles and on the number of threads of the rayon pool only.
pub fn backward_chunk<T: Real>(
    gradients: &mut Gradients<T>,
    saved: Saved<T>,
    (key, value): (&Heads<T>, &Heads<T>),
    keys: usize,
    tiles: &[QueryTile],
) -> (Vec<T>, Vec<T>) {
    let shape = gradients.shape;
    let heads = shape.batch * shape.key_heads;
    let length = keys * shape.head_dim;
    let parts = split_parts(gradients, tiles);
    let partials: Vec<(usize, Vec<T>, Vec<T>)> = parts
        .into_par_iter()
        .map(|part| {
            let (mut dk, mut dv) = (vec![T::ZERO; length], vec![T::ZERO; length]);
            let mut scratch = Scratch::new(shape);
            for (tile, d_query) in part.tiles {
                visit((tile, part.key_head, d_query), shape, saved, (key, value), (&mut dk, &mut dv), &mut scratch);
            }
            (part.head, dk, dv)
        })
        .collect();
    let (mut d_key, mut d_value) = (vec![T::ZERO; heads * length], vec![T::ZERO; heads * length]);
    let add = |into: &mut [T], from: &[T]| into.iter_mut().zip(from).for_each(|(a, &b)| *a += b);
    for (head, dk, dv) in partials {
        add(&mut d_key[head * length..(head + 1) * length], &dk);
        add(&mut d_value[head * length..(head + 1) * length], &dv);
    }
    (d_key, d_value)
}

/// Tiles that one worker goes through, adding to its own `dk` and `dv`.
struct Part<'a, T> {
    /// `row * Hkv + key_head`.
    head: usize,
    key_head: usize,
    tiles: Vec<(&'a QueryTile, &'a mut [T])>,
}

/// One part per (row, key head), or several of about equal work when there are fewer heads than threads.
fn split_parts<'a, T: Real>(gradients: &'a mut Gradients<T>, tiles: &'a [QueryTile]) -> Vec<Part<'a, T>> {
    let shape = gradients.shape;
    let splits = rayon::current_num_threads().div_ceil((shape.batch * shape.key_heads).max(1));
    let total: usize = tiles.iter().map(QueryTile::work).sum();
    let share = total.div_ceil(splits * shape.batch.max(1)).max(1);
    let mut d_query = Splitter::new(&mut gradients.d_query, shape.group() * shape.head_dim);
    let mut parts: Vec<Part<T>> = Vec::new();
    let mut work = 0;
    for (tile, key_head, queries) in in_memory_order(tiles, shape) {
        let d_query = d_query.take(queries);
        if tile.runs.is_empty() {
            continue;
        }
        let head = tile.row as usize * shape.key_heads + key_head;
        if work >= share || parts.last().is_none_or(|p| p.head != head) {
            parts.push(Part { head, key_head, tiles: Vec::new() });
            work = 0;
        }
        work += tile.work();
        parts.last_mut().expect("pushed above").tiles.push((tile, d_query));
    }
    parts
}

struct Scratch<T> {
    query: Vec<T>,
    d_out: Vec<T>,
    probabilities: Vec<T>,
    d_scores: Vec<T>,
    spans: Vec<Span>,
}

impl<T: Real> Scratch<T> {
    fn new(shape: Shape) -> Self {
        let rows = QUERY_BLOCK * shape.group();
        let rows_of = |width: usize| vec![T::ZERO; rows * width];
        Self {
            query: rows_of(shape.head_dim),
            d_out: rows_of(shape.head_dim),
            probabilities: rows_of(KEY_BLOCK),
            d_scores: rows_of(KEY_BLOCK),
            spans: Vec::with_capacity(rows),
        }
    }
}

fn visit<T: Real>(
    (tile, head, d_query): (&QueryTile, usize, &mut [T]),
    shape: Shape,
    saved: Saved<T>,
    (key, value): (&Heads<T>, &Heads<T>),
    (d_key, d_value): (&mut [T], &mut [T]),
    scratch: &mut Scratch<T>,
) {
    let (row, d, group) = (tile.row as usize, shape.head_dim, shape.group());
    let queries = tile.queries.start as usize..tile.queries.end as usize;
    let bounds = &saved.bounds[row][queries.clone()];
    let stacked = (row * shape.key_heads + head) * shape.queries;
    let stacked = (stacked + queries.start) * group..(stacked + queries.end) * group;
    let m = queries.len() * group;
    stack(saved.query, shape, row, head, queries.clone(), &mut scratch.query);
    stack(saved.d_out, shape, row, head, queries, &mut scratch.d_out);
    let (q, d_out) = (Matrix::rows(&scratch.query, d), Matrix::rows(&scratch.d_out, d));
    for run in &tile.runs {
        for (keys, full) in run.tiles() {
            let (n, start) = (keys.len(), keys.start as usize);
            let first_position = run.first_position + (keys.start - run.keys.start);
            let k = Matrix::rows(key.tokens(row, head, start, n), key.token_stride());
            let v = Matrix::rows(value.tokens(row, head, start, n), value.token_stride());
            let p = &mut scratch.probabilities[..m * n];
            let ds = &mut scratch.d_scores[..m * n];
            matmul(p, false, q, k.t(), (m, d, n));
            spans(bounds, group, first_position, n, full, &mut scratch.spans);
            let lse = &saved.lse[stacked.clone()];
            let scale = saved.scale;
            pulp::Arch::new().dispatch(Probabilities { scores: p, columns: n, spans: &scratch.spans, scale, lse });
            matmul(&mut d_value[start * d..], true, Matrix::rows(p, n).t(), d_out, (n, m, d));
            matmul(ds, false, d_out, v.t(), (m, d, n));
            let delta = &saved.delta[stacked.clone()];
            pulp::Arch::new().dispatch(ScoreGradient {
                d_probabilities: ds,
                probabilities: p,
                columns: n,
                scale,
                delta,
            });
            let ds = Matrix::rows(ds, n);
            matmul(d_query, true, ds, k, (m, n, d));
            matmul(&mut d_key[start * d..], true, ds.t(), q, (n, m, d));
        }
    }
}
