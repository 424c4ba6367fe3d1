//! Backward pass over one chunk of keys.
//!
//! With `p = exp(scale * q.k - lse)` and `delta = sum(out * d_out)` over the head:
//! `dv = p^T d_out`, `dp = d_out v^T`, `ds = p * (dp - delta) * scale`, `dq = ds k`, `dk = ds^T q`
//! (Dao et al., FlashAttention-2, 2023, algorithm 2).

use crate::forward::{Splitter, TileLimits, in_memory_order, set_spans, stack, unstack};
use crate::heads::{Heads, Shape};
use crate::matmul::{Broadcast, Limits, Panels, Product, ROWS};
use crate::pack::{Columns, KeyTiles, Rows, pack_rows, padded};
use crate::real::Real;
use crate::softmax::{Probabilities, ScoreGradient, Span};
use crate::tile::{Bounds, KEY_BLOCK, QUERY_BLOCK, QueryTile};
use rayon::prelude::*;
use std::ops::Range;

/// What backward keeps over all chunks: the gradient of the queries so far.
#[derive(Debug, Clone)]
pub struct Gradients<T> {
    shape: Shape,
    /// `[B, Hkv, Sq, G, Dp]`, in rows of whole vectors.
    d_query: Vec<T>,
}

impl<T: Real> Gradients<T> {
    /// Zero.
    pub fn new(shape: Shape) -> Self {
        Self { shape, d_query: vec![T::ZERO; shape.rows() * padded(shape.head_dim)] }
    }

    /// Gradient of the queries, `[B, Hq, Sq, D]`.
    pub fn finish(self) -> Vec<T> {
        unstack(&self.d_query, self.shape)
    }
}

/// `delta`, the sum of `out * d_out` over each head, stacked `[B, Hkv, Sq, G]` as [`crate::Forward::finish`] stacks
/// its log-sum-exp. Both arguments are `[B, Hq, Sq, D]`.
pub fn output_dot<T: Real>(out: &Heads<T>, d_out: &Heads<T>, shape: Shape) -> Vec<T> {
    let group = shape.group();
    let mut delta = vec![T::ZERO; shape.rows()];
    delta.par_chunks_mut((shape.queries * group).max(1)).enumerate().for_each(|(head, delta)| {
        let (row, first) = (head / shape.key_heads, head % shape.key_heads * group);
        for (q, delta) in delta.chunks_mut(group).enumerate() {
            for (g, delta) in delta.iter_mut().enumerate() {
                let pairs = out.token(row, first + g, q).iter().zip(d_out.token(row, first + g, q));
                *delta = pairs.fold(T::ZERO, |sum, (&a, &b)| sum + a * b);
            }
        }
    });
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
    let (heads, d, width) = (shape.batch * shape.key_heads, shape.head_dim, padded(shape.head_dim));
    let packed = KeyTiles::new(tiles, shape);
    let chunk = Chunk {
        key_rows: Rows::new(key, &packed, shape),
        key_columns: Columns::new(key, &packed, shape),
        value_columns: Columns::new(value, &packed, shape),
        tiles: packed,
    };
    let parts = split_parts(gradients, tiles, saved.bounds);
    let partials: Vec<Partial<T>> = parts
        .into_par_iter()
        .map(|part| {
            let (mut dk, mut dv) = (vec![T::ZERO; keys * width], vec![T::ZERO; keys * width]);
            let mut scratch = Scratch::new(shape);
            for (tile, d_query) in part.tiles {
                visit((tile, part.key_head, d_query), shape, saved, &chunk, (&mut dk, &mut dv), &mut scratch);
            }
            Partial { head: part.head, d_key: dk, d_value: dv }
        })
        .collect();
    let sum = |of: fn(&Partial<T>) -> &[T]| {
        let mut sums = vec![T::ZERO; heads * keys * d];
        sums.par_chunks_mut((keys * d).max(1)).enumerate().for_each(|(head, sum)| {
            for part in partials.iter().filter(|part| part.head == head) {
                for (sum, row) in sum.chunks_mut(d).zip(of(part).chunks(width)) {
                    sum.iter_mut().zip(row).for_each(|(a, &b)| *a += b);
                }
            }
        });
        sums
    };
    (sum(|part| &part.d_key), sum(|part| &part.d_value))
}

/// A chunk in the order that the kernels read.
struct Chunk<T> {
    tiles: KeyTiles,
    key_rows: Rows<T>,
    key_columns: Columns<T>,
    value_columns: Columns<T>,
}

/// What one worker adds to the gradients of one (row, key head), `[Sk, Dp]` each.
struct Partial<T> {
    head: usize,
    d_key: Vec<T>,
    d_value: Vec<T>,
}

/// Tiles that one worker goes through, adding to its own `dk` and `dv`.
struct Part<'a, T> {
    /// `row * Hkv + key_head`.
    head: usize,
    key_head: usize,
    tiles: Vec<(&'a QueryTile, &'a mut [T])>,
}

/// One part per (row, key head), or several of about equal work when there are fewer heads than threads.
fn split_parts<'a, T: Real>(
    gradients: &'a mut Gradients<T>,
    tiles: &'a [QueryTile],
    bounds: &[Vec<Bounds>],
) -> Vec<Part<'a, T>> {
    let shape = gradients.shape;
    let splits = rayon::current_num_threads().div_ceil((shape.batch * shape.key_heads).max(1));
    let mut shares = vec![0; shape.batch];
    let pairs = |tile: &QueryTile| tile.pairs(&bounds[tile.row as usize]);
    tiles.iter().for_each(|tile| shares[tile.row as usize] += pairs(tile));
    shares.iter_mut().for_each(|share| *share = share.div_ceil(splits).max(1));
    let mut d_query = Splitter::new(&mut gradients.d_query, shape.group() * padded(shape.head_dim));
    let mut parts: Vec<Part<T>> = Vec::new();
    let mut work = 0;
    for (tile, key_head, queries) in in_memory_order(tiles, shape) {
        let d_query = d_query.take(queries);
        if tile.runs.is_empty() {
            continue;
        }
        let head = tile.row as usize * shape.key_heads + key_head;
        if work >= shares[tile.row as usize] || parts.last().is_none_or(|p| p.head != head) {
            parts.push(Part { head, key_head, tiles: Vec::new() });
            work = 0;
        }
        work += pairs(tile);
        parts.last_mut().expect("pushed above").tiles.push((tile, d_query));
    }
    parts
}

struct Scratch<T> {
    query: Vec<T>,
    d_out: Vec<T>,
    /// The same two in panels.
    query_panels: Vec<T>,
    d_out_panels: Vec<T>,
    /// `[rows, KEY_BLOCK]`.
    probabilities: Vec<T>,
    d_scores: Vec<T>,
    spans: Vec<Span>,
    limits: TileLimits,
    over_rows: Vec<Limits>,
}

impl<T: Real> Scratch<T> {
    fn new(shape: Shape) -> Self {
        let rows = QUERY_BLOCK * shape.group();
        let rows_of = |width: usize| vec![T::ZERO; rows * width];
        Self {
            query: rows_of(shape.head_dim),
            d_out: rows_of(shape.head_dim),
            query_panels: rows_of(padded(shape.head_dim)),
            d_out_panels: rows_of(padded(shape.head_dim)),
            probabilities: rows_of(KEY_BLOCK),
            d_scores: rows_of(KEY_BLOCK),
            spans: Vec::with_capacity(rows),
            limits: TileLimits::default(),
            over_rows: Vec::new(),
        }
    }

    /// Stacks the queries and output gradients of a tile.
    fn load(&mut self, saved: &Saved<T>, shape: Shape, (row, head): (usize, usize), queries: Range<usize>) {
        let (d, rows) = (shape.head_dim, queries.len() * shape.group());
        stack(saved.query, shape, row, head, queries.clone(), &mut self.query);
        stack(saved.d_out, shape, row, head, queries, &mut self.d_out);
        for (lines, panels) in [(&self.query, &mut self.query_panels), (&self.d_out, &mut self.d_out_panels)] {
            pack_rows(lines.chunks(d), rows, padded(d), panels);
        }
    }
}

fn visit<T: Real>(
    (tile, head, d_query): (&QueryTile, usize, &mut [T]),
    shape: Shape,
    saved: Saved<T>,
    chunk: &Chunk<T>,
    (d_key, d_value): (&mut [T], &mut [T]),
    scratch: &mut Scratch<T>,
) {
    let (row, d, group) = (tile.row as usize, shape.head_dim, shape.group());
    let queries = tile.queries.start as usize..tile.queries.end as usize;
    let bounds = &saved.bounds[row][queries.clone()];
    let stacked = (row * shape.key_heads + head) * shape.queries;
    let stacked = (stacked + queries.start) * group..(stacked + queries.end) * group;
    let (lse, delta) = (&saved.lse[stacked.clone()], &saved.delta[stacked]);
    let (rows, width, scale) = (lse.len(), padded(d), saved.scale);
    scratch.load(&saved, shape, (row, head), queries);
    let Scratch { query, d_out, query_panels, d_out_panels, probabilities, d_scores, spans, limits, over_rows } =
        scratch;
    for run in &tile.runs {
        for (keys, full) in run.tiles() {
            let first_position = run.first_position + (keys.start - run.keys.start);
            set_spans(bounds, group, first_position, keys.len(), full, spans);
            limits.set(spans, d);
            set_over_rows(over_rows, spans, keys.len(), width);
            let own = keys.start as usize * width..keys.end as usize * width;

            let key_columns = chunk.key_columns.tile(&chunk.tiles, row, head, keys.start);
            let (a, limits_of) = (Broadcast::rows(query, d), &limits.scores);
            T::multiply(Product { out: probabilities, accumulate: false, a, b: key_columns, rows, limits: limits_of });
            T::probabilities(Probabilities { scores: probabilities, spans, scale, lse });

            let (a, out) = (Broadcast::transposed(probabilities, KEY_BLOCK), &mut d_value[own.clone()]);
            let b = Panels { data: d_out_panels, rows, columns: width };
            T::multiply(Product { out, accumulate: true, a, b, rows: keys.len(), limits: over_rows });

            let value_columns = chunk.value_columns.tile(&chunk.tiles, row, head, keys.start);
            let a = Broadcast::rows(d_out, d);
            T::multiply(Product { out: d_scores, accumulate: false, a, b: value_columns, rows, limits: limits_of });
            T::score_gradient(ScoreGradient { d_probabilities: d_scores, probabilities, spans, scale, delta });

            let (a, b) =
                (Broadcast::rows(d_scores, KEY_BLOCK), chunk.key_rows.tile(&chunk.tiles, row, head, keys.start));
            T::multiply(Product { out: d_query, accumulate: true, a, b, rows, limits: &limits.over_keys });

            let (a, out) = (Broadcast::transposed(d_scores, KEY_BLOCK), &mut d_key[own]);
            let b = Panels { data: query_panels, rows, columns: width };
            T::multiply(Product { out, accumulate: true, a, b, rows: keys.len(), limits: over_rows });
        }
    }
}

/// Limits of sums over the stacked rows, `[keys, Dp]`: for each group of keys the rows that see one of them.
fn set_over_rows(limits: &mut Vec<Limits>, spans: &[Span], keys: usize, width: usize) {
    limits.clear();
    limits.resize(keys.div_ceil(ROWS), Limits { terms: 0..0, columns: 0..0 });
    for (row, span) in spans.iter().enumerate().filter(|(_, span)| !span.is_empty()) {
        for limit in &mut limits[span.start / ROWS..span.end.div_ceil(ROWS)] {
            let first = if limit.terms.is_empty() { row } else { limit.terms.start };
            *limit = Limits { terms: first..row + 1, columns: 0..width };
        }
    }
}
