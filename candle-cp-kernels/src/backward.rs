//! Backward pass over one chunk of keys.
//!
//! With `p = exp(scale * q.k - lse)` and `delta = sum(out * d_out)` over the head:
//! `dv = p^T d_out`, `dp = d_out v^T`, `ds = p * (dp - delta) * scale`, `dq = ds k`, `dk = ds^T q`
//! (Dao et al., FlashAttention-2, 2023, algorithm 2).

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, ROW_PADDING, pack_rows, terms};
use crate::compiled::Compiled as _;
use crate::element::Element;
use crate::forward::{Splitter, TileLimits, in_memory_order, set_spans, stack, unstack};
use crate::heads::{Heads, Order, Shape};
use crate::matmul::{Broadcast, Limits, Panels, Product};
use crate::pack::{Columns, KeyTiles, Rows, padded, row_stride};
use crate::real::Real;
use crate::softmax::{Probabilities, ScoreGradient, Span};
use crate::tile::{Bounds, KEY_BLOCK, QUERY_BLOCK, QueryTile};
use rayon::prelude::*;
use std::ops::Range;

/// What backward keeps over all chunks: the gradient of the queries so far.
#[derive(Debug)]
pub struct Gradients<T> {
    shape: Shape,
    /// `[B, Hkv, Sq, G]` rows of `row_stride(D)`.
    d_query: Aligned<T>,
}

impl<T: Real> Gradients<T> {
    /// Zero.
    pub fn new(shape: Shape) -> Self {
        Self { shape, d_query: Aligned::zeros(shape.rows() * row_stride(shape.head_dim)) }
    }

    /// Gradient of the queries in the given order, `[B, Hq, Sq, D]` or `[B, Sq, Hq, D]`.
    pub fn finish<S: Element<Acc = T>>(self, order: Order) -> Vec<S> {
        unstack(&self.d_query, self.shape, order)
    }
}

/// `delta`, the sum of `out * d_out` over each head, stacked `[B, Hkv, Sq, G]` as [`crate::Forward::finish`] stacks
/// its log-sum-exp. Both arguments are `[B, Hq, Sq, D]`.
pub fn output_dot<S: Element>(out: &Heads<S>, d_out: &Heads<S>, shape: Shape) -> Vec<S::Acc> {
    let group = shape.group();
    let mut delta = vec![S::Acc::ZERO; shape.rows()];
    delta.par_chunks_mut((shape.queries * group).max(1)).enumerate().for_each(|(head, delta)| {
        let (row, first) = (head / shape.key_heads, head % shape.key_heads * group);
        for (q, delta) in delta.chunks_mut(group).enumerate() {
            for (g, delta) in delta.iter_mut().enumerate() {
                let pairs = out.token(row, first + g, q).iter().zip(d_out.token(row, first + g, q));
                *delta = pairs.fold(S::Acc::ZERO, |sum, (&a, &b)| sum + a.widen() * b.widen());
            }
        }
    });
    delta
}

/// Inputs of [`backward_chunk`] that do not change from chunk to chunk.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a, S: Element> {
    /// `[B, Hq, Sq, D]`.
    pub query: &'a Heads<'a, S>,
    /// `[B, Hq, Sq, D]`.
    pub d_out: &'a Heads<'a, S>,
    /// Final log-sum-exp, `[B, Hkv, Sq, G]`.
    pub lse: &'a [S::Acc],
    /// From [`output_dot`], `[B, Hkv, Sq, G]`.
    pub delta: &'a [S::Acc],
    /// Positions that `[row][query]` may see.
    pub bounds: &'a [Vec<Bounds>],
    /// Factor on the scores.
    pub scale: S::Acc,
}

/// Adds the chunk's part to the query gradient in `gradients`; returns the gradients of this chunk's keys and
/// values, `[B, Hkv, Sk, D]` each, where `keys` is `Sk`.
///
/// Sums run in an order that depends on the tiles and on the number of threads of the rayon pool only.
pub fn backward_chunk<S: Element>(
    gradients: &mut Gradients<S::Acc>,
    saved: Saved<S>,
    (key, value): (&Heads<S>, &Heads<S>),
    keys: usize,
    tiles: &[QueryTile],
) -> (Vec<S::Acc>, Vec<S::Acc>) {
    S::backward_chunk(gradients, saved, [key, value], keys, tiles)
}

pub(crate) fn chunk<A: Arithmetic>(
    arithmetic: A,
    gradients: &mut Gradients<A::Acc>,
    saved: Saved<A::Source>,
    [key, value]: [&Heads<A::Source>; 2],
    keys: usize,
    tiles: &[QueryTile],
) -> (Vec<A::Acc>, Vec<A::Acc>) {
    let shape = gradients.shape;
    let (heads, d, width) = (shape.batch * shape.key_heads, shape.head_dim, row_stride(shape.head_dim));
    let packed = KeyTiles::new(tiles, shape);
    let chunk = Chunk::<A> {
        arithmetic,
        saved,
        key_rows: Rows::new(key, &packed, shape),
        key_columns: Columns::new(key, &packed, shape),
        value_columns: Columns::new(value, &packed, shape),
        tiles: packed,
    };
    let parts = split_parts(gradients, tiles, saved.bounds);
    let partials: Vec<Partial<A::Acc>> = parts
        .into_par_iter()
        .map(|part| {
            let zeros = || Aligned::zeros(keys * width);
            let mut partial = Partial { head: part.head, d_key: zeros(), d_value: zeros() };
            let mut scratch = Scratch::new(shape);
            for (tile, d_query) in part.tiles {
                chunk.visit((tile, part.key_head, d_query), shape, &mut partial, &mut scratch);
            }
            partial
        })
        .collect();
    let sum = |of: fn(&Partial<A::Acc>) -> &[A::Acc]| {
        let mut sums = vec![A::Acc::ZERO; heads * keys * d];
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

/// A chunk in the order that the kernels read, and what meets it.
struct Chunk<'a, A: Arithmetic> {
    arithmetic: A,
    saved: Saved<'a, A::Source>,
    tiles: KeyTiles,
    key_rows: Rows<A>,
    key_columns: Columns<A>,
    value_columns: Columns<A>,
}

/// What one worker adds to the gradients of one (row, key head): a row of `row_stride(D)` for each key.
struct Partial<T> {
    head: usize,
    d_key: Aligned<T>,
    d_value: Aligned<T>,
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
    let mut d_query = Splitter::new(&mut gradients.d_query, shape.group() * row_stride(shape.head_dim));
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

struct Scratch<A: Arithmetic> {
    /// As left operands.
    query: Aligned<A::Term>,
    d_out: Aligned<A::Term>,
    /// The same two as right operands of sums over the rows.
    query_panels: Aligned<A::Term>,
    d_out_panels: Aligned<A::Term>,
    /// `[rows, KEY_BLOCK]`.
    probabilities: Aligned<A::Acc>,
    d_scores: Aligned<A::Acc>,
    left: Aligned<A::Term>,
    spans: Vec<Span>,
    limits: TileLimits,
    over_rows: Vec<Limits>,
}

impl<A: Arithmetic> Scratch<A> {
    fn new(shape: Shape) -> Self {
        let rows = QUERY_BLOCK * shape.group();
        let left = || Aligned::zeros(rows.next_multiple_of(ROW_PADDING) * terms::<A>(shape.head_dim));
        let right = || Aligned::zeros(terms::<A>(rows) * padded(shape.head_dim));
        let tile = || Aligned::zeros(rows * KEY_BLOCK);
        Self {
            query: left(),
            d_out: left(),
            query_panels: right(),
            d_out_panels: right(),
            probabilities: tile(),
            d_scores: tile(),
            left: Aligned::zeros(0),
            spans: Vec::with_capacity(rows),
            limits: TileLimits::default(),
            over_rows: Vec::new(),
        }
    }

    /// Stacks the queries and output gradients of a tile.
    fn load(&mut self, saved: &Saved<A::Source>, shape: Shape, (row, head): (usize, usize), queries: Range<usize>) {
        let group = shape.group();
        let terms = terms::<A>(queries.len() * group);
        for (x, left, right) in [
            (saved.query, &mut self.query, &mut self.query_panels),
            (saved.d_out, &mut self.d_out, &mut self.d_out_panels),
        ] {
            stack::<A>(x, shape, row, head, queries.clone(), left);
            let tokens = queries.clone().flat_map(|q| (0..group).map(move |g| x.token(row, head * group + g, q)));
            pack_rows::<A>(tokens, terms, padded(shape.head_dim), right);
        }
    }
}

impl<A: Arithmetic> Chunk<'_, A> {
    fn multiply(
        &self,
        (out, out_row): (&mut [A::Acc], usize),
        accumulate: bool,
        (a, b): (Broadcast<A::Term>, Panels<A::Term>),
        rows: usize,
        limits: &[Limits],
    ) {
        self.arithmetic.multiply(Product { out, out_row, accumulate, a, b, rows, limits });
    }

    fn visit(
        &self,
        (tile, head, d_query): (&QueryTile, usize, &mut [A::Acc]),
        shape: Shape,
        partial: &mut Partial<A::Acc>,
        scratch: &mut Scratch<A>,
    ) {
        let (saved, arithmetic) = (&self.saved, self.arithmetic);
        let (row, d, group) = (tile.row as usize, shape.head_dim, shape.group());
        let queries = tile.queries.start as usize..tile.queries.end as usize;
        let bounds = &saved.bounds[row][queries.clone()];
        let stacked = (row * shape.key_heads + head) * shape.queries;
        let stacked = (stacked + queries.start) * group..(stacked + queries.end) * group;
        let (lse, delta) = (&saved.lse[stacked.clone()], &saved.delta[stacked]);
        let (rows, width, stride, scale) = (lse.len(), padded(d), row_stride(d), saved.scale);
        scratch.load(saved, shape, (row, head), queries);
        let Scratch { query, d_out, query_panels, d_out_panels, probabilities, d_scores, left, .. } = scratch;
        let Scratch { spans, limits, over_rows, .. } = scratch;
        let over_head = |x| Broadcast::rows(x, terms::<A>(d));
        let over_tile = |data| Panels { data, rows: terms::<A>(rows), columns: width };
        for run in &tile.runs {
            for (keys, full) in run.tiles() {
                let first_position = run.first_position + (keys.start - run.keys.start);
                set_spans(bounds, group, first_position, keys.len(), full, spans);
                limits.set(arithmetic, spans, d);
                set_over_rows(arithmetic, over_rows, spans, keys.len(), width);
                let own = keys.start as usize * stride..keys.end as usize * stride;
                let b = self.key_columns.tile(&self.tiles, row, head, keys.start);
                self.multiply((probabilities, KEY_BLOCK), false, (over_head(query), b), rows, &limits.scores);
                A::Acc::probabilities(Probabilities { scores: probabilities, spans, scale, lse });

                let a = arithmetic.left_transposed(probabilities, rows, left);
                let d_value = &mut partial.d_value[own.clone()];
                self.multiply((d_value, stride), true, (a, over_tile(d_out_panels)), keys.len(), over_rows);

                let b = self.value_columns.tile(&self.tiles, row, head, keys.start);
                self.multiply((d_scores, KEY_BLOCK), false, (over_head(d_out), b), rows, &limits.scores);
                A::Acc::score_gradient(ScoreGradient { d_probabilities: d_scores, probabilities, spans, scale, delta });

                let b = self.key_rows.tile(&self.tiles, row, head, keys.start);
                let a = arithmetic.left(d_scores, rows, left);
                self.multiply((d_query, stride), true, (a, b), rows, &limits.over_keys);

                let a = arithmetic.left_transposed(d_scores, rows, left);
                self.multiply(
                    (&mut partial.d_key[own], stride),
                    true,
                    (a, over_tile(query_panels)),
                    keys.len(),
                    over_rows,
                );
            }
        }
    }
}

/// Limits of sums over the stacked rows, `[keys, Dp]`: for each group of keys the rows that see one of them.
fn set_over_rows<A: Arithmetic>(arithmetic: A, limits: &mut Vec<Limits>, spans: &[Span], keys: usize, width: usize) {
    let group = arithmetic.rows();
    limits.clear();
    limits.resize(keys.div_ceil(group), Limits { terms: 0..0, columns: 0..0 });
    for (row, span) in spans.iter().enumerate().filter(|(_, span)| !span.is_empty()) {
        let term = row / A::NUMBERS;
        for limit in &mut limits[span.start / group..span.end.div_ceil(group)] {
            let first = if limit.terms.is_empty() { term } else { limit.terms.start };
            *limit = Limits { terms: first..term + 1, columns: 0..width };
        }
    }
}
