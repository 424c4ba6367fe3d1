//! Forward pass over one chunk of keys, continuing a running softmax.

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, ROW_PADDING, terms};
use crate::compiled::Compiled as _;
use crate::element::Element;
use crate::heads::{Heads, Order, Shape};
use crate::matmul::{Broadcast, Limits, Product};
use crate::pack::{Columns, KeyTiles, Rows, padded, row_stride};
use crate::real::Real;
use crate::softmax::{Rescale, Softmax, Span};
use crate::tile::{Bounds, KEY_BLOCK, QUERY_BLOCK, QueryTile};
use rayon::prelude::*;
use std::ops::Range;

/// The running softmax of all local queries: nothing seen yet, or some chunks.
///
/// Rows are stacked `(query, g)` inside `[B, Hkv]`, so that a tile's rows are adjacent.
#[derive(Debug)]
pub struct Forward<T> {
    shape: Shape,
    /// `[B, Hkv, Sq, G]` rows of `row_stride(D)`: sum of `exp(score - max) * value`.
    out: Aligned<T>,
    /// `[B, Hkv, Sq, G]`: largest score, -inf before any key.
    max: Vec<T>,
    /// `[B, Hkv, Sq, G]`: sum of `exp(score - max)`.
    sum: Vec<T>,
}

impl<T: Real> Forward<T> {
    /// The state before any key.
    pub fn new(shape: Shape) -> Self {
        let rows = shape.rows();
        Self {
            shape,
            out: Aligned::zeros(rows * row_stride(shape.head_dim)),
            max: vec![T::NEG_INFINITY; rows],
            sum: vec![T::ZERO; rows],
        }
    }

    /// Output in the given order, `[B, Hq, Sq, D]` or `[B, Sq, Hq, D]`, and log-sum-exp stacked `[B, Hkv, Sq, G]`. A query that saw no key gets
    /// output 0 and log-sum-exp -inf.
    pub fn finish<S: Element<Acc = T>>(mut self, order: Order) -> (Vec<S>, Vec<T>) {
        let rows = self.out.par_chunks_mut(row_stride(self.shape.head_dim)).with_min_len(QUERY_BLOCK);
        rows.zip(&mut self.max).zip(&self.sum).for_each(|((row, max), &sum)| {
            if *max == T::NEG_INFINITY {
                return;
            }
            let inverse = T::ONE / sum;
            row.iter_mut().for_each(|x| *x *= inverse);
            *max += sum.ln();
        });
        (unstack(&self.out, self.shape, order), self.max)
    }
}

/// `[B, Hkv, S, G]` rows to `[B, Hq, S, D]` or `[B, S, Hq, D]`.
pub(crate) fn unstack<S: Element>(stacked: &[S::Acc], shape: Shape, order: Order) -> Vec<S> {
    let (stride, group) = (row_stride(shape.head_dim), shape.group());
    let view = |row: usize, head: usize, query: usize| {
        let start = (((row * shape.key_heads + head / group) * shape.queries + query) * group + head % group) * stride;
        &stacked[start..start + shape.head_dim]
    };
    order.collect([shape.batch, shape.query_heads, shape.queries], shape.head_dim, view, S::narrow)
}

/// Queries (or output gradients) of one tile, stacked as `(query, g)` rows, as a left operand: rows of `terms` of `D`.
pub(crate) fn stack<A: Arithmetic>(
    x: &Heads<A::Source>,
    shape: Shape,
    row: usize,
    key_head: usize,
    queries: Range<usize>,
    into: &mut [A::Term],
) {
    let group = shape.group();
    let tokens = queries.flat_map(|q| (0..group).map(move |g| x.token(row, key_head * group + g, q)));
    into.chunks_mut(terms::<A>(shape.head_dim)).zip(tokens).for_each(|(into, token)| A::token_terms(token, into));
}

/// The columns of the keys at `first_position..` that each stacked row sees.
pub(crate) fn set_spans(
    bounds: &[Bounds],
    group: usize,
    first_position: u32,
    columns: usize,
    full: bool,
    into: &mut Vec<Span>,
) {
    into.clear();
    for b in bounds {
        let span = if full {
            0..columns
        } else {
            let column = |position: u32| (position.saturating_sub(first_position) as usize).min(columns);
            let (start, end) = (column(b.first), column(b.end));
            start..end.max(start)
        };
        into.extend(std::iter::repeat_n(span, group));
    }
}

/// The limits of a tile's products, from the spans of its rows.
#[derive(Default)]
pub(crate) struct TileLimits {
    /// For `scores = query . key^T`: which columns.
    pub scores: Vec<Limits>,
    /// For sums over the keys, `[rows, Dp]`: which terms.
    pub over_keys: Vec<Limits>,
}

impl TileLimits {
    pub fn set<A: Arithmetic>(&mut self, arithmetic: A, spans: &[Span], head_dim: usize) {
        self.scores.clear();
        self.over_keys.clear();
        for group in spans.chunks(arithmetic.rows()) {
            let seen = hull(group.iter().filter(|span| !span.is_empty()).cloned());
            let columns = if seen.is_empty() { 0..0 } else { 0..padded(head_dim) };
            self.scores.push(Limits { terms: 0..terms::<A>(head_dim), columns: seen.clone() });
            self.over_keys.push(Limits { terms: seen.start / A::NUMBERS..seen.end.div_ceil(A::NUMBERS), columns });
        }
    }
}

/// The smallest range that holds all of `ranges`.
pub(crate) fn hull(ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

/// Buffers of one worker.
struct Scratch<A: Arithmetic> {
    query: Aligned<A::Term>,
    /// `[rows, KEY_BLOCK]`.
    scores: Aligned<A::Acc>,
    /// Probabilities as a left operand.
    left: Aligned<A::Term>,
    spans: Vec<Span>,
    limits: TileLimits,
    rescale: Vec<A::Acc>,
}

impl<A: Arithmetic> Scratch<A> {
    fn new(shape: Shape) -> Self {
        let rows = QUERY_BLOCK * shape.group();
        Self {
            query: Aligned::zeros(rows.next_multiple_of(ROW_PADDING) * terms::<A>(shape.head_dim)),
            scores: Aligned::zeros(rows * KEY_BLOCK),
            left: Aligned::zeros(0),
            spans: Vec::with_capacity(rows),
            limits: TileLimits::default(),
            rescale: vec![A::Acc::ONE; rows],
        }
    }
}

/// One tile's rows of the running state.
struct Task<'a, T> {
    tile: &'a QueryTile,
    key_head: usize,
    out: &'a mut [T],
    max: &'a mut [T],
    sum: &'a mut [T],
}

/// Continues `state` with one chunk.
///
/// `query` is `[B, Hq, Sq, D]`, `key` and `value` are `[B, Hkv, Sk, D]`. `tiles` are sorted by row and query and
/// do not overlap; `bounds[row][query]` are the positions each query may see. Tiles without keys are not
/// visited; a tile that is not full evaluates the bounds. The result does not depend on the number of threads.
pub fn forward_chunk<S: Element>(
    state: &mut Forward<S::Acc>,
    (query, key, value): (&Heads<S>, &Heads<S>, &Heads<S>),
    tiles: &[QueryTile],
    bounds: &[Vec<Bounds>],
    scale: S::Acc,
) {
    S::forward_chunk(state, [query, key, value], tiles, bounds, scale);
}

pub(crate) fn chunk<A: Arithmetic>(
    arithmetic: A,
    state: &mut Forward<A::Acc>,
    [query, key, value]: [&Heads<A::Source>; 3],
    tiles: &[QueryTile],
    bounds: &[Vec<Bounds>],
    scale: A::Acc,
) {
    let shape = state.shape;
    let packed = KeyTiles::new(tiles, shape);
    let chunk = Chunk::<A> {
        arithmetic,
        query: *query,
        keys: Columns::new(key, &packed, shape),
        values: Rows::new(value, &packed, shape),
        tiles: packed,
        bounds,
        scale,
    };
    let tasks = split_tasks(state, tiles);
    tasks.into_par_iter().for_each_init(|| Scratch::new(shape), |scratch, task| chunk.visit(task, shape, scratch));
}

/// A chunk in the order that the kernels read, and what meets it.
struct Chunk<'a, A: Arithmetic> {
    arithmetic: A,
    query: Heads<'a, A::Source>,
    tiles: KeyTiles,
    keys: Columns<A>,
    values: Rows<A>,
    bounds: &'a [Vec<Bounds>],
    scale: A::Acc,
}

impl<A: Arithmetic> Chunk<'_, A> {
    fn visit(&self, task: Task<A::Acc>, shape: Shape, scratch: &mut Scratch<A>) {
        let (row, head, d, scale) = (task.tile.row as usize, task.key_head, shape.head_dim, self.scale);
        let queries = task.tile.queries.start as usize..task.tile.queries.end as usize;
        let bounds = &self.bounds[row][queries.clone()];
        let rows = queries.len() * shape.group();
        stack::<A>(&self.query, shape, row, head, queries, &mut scratch.query);
        let Scratch { query, scores, left, spans, limits, rescale } = scratch;
        for run in &task.tile.runs {
            for (keys, full) in run.tiles() {
                let first_position = run.first_position + (keys.start - run.keys.start);
                set_spans(bounds, shape.group(), first_position, keys.len(), full, spans);
                limits.set(self.arithmetic, spans, d);
                self.arithmetic.multiply(Product {
                    out: scores,
                    out_row: KEY_BLOCK,
                    accumulate: false,
                    a: Broadcast::rows(query, terms::<A>(d)),
                    b: self.keys.tile(&self.tiles, row, head, keys.start),
                    rows,
                    limits: &limits.scores,
                });
                let rescale = &mut rescale[..rows];
                let (max, sum) = (&mut *task.max, &mut *task.sum);
                A::Acc::softmax(Softmax { scores, spans, scale, max, sum, rescale });
                A::Acc::rescale(Rescale {
                    rows: task.out,
                    stride: row_stride(d),
                    columns: padded(d),
                    factors: rescale,
                });
                self.arithmetic.multiply(Product {
                    out: task.out,
                    out_row: row_stride(d),
                    accumulate: true,
                    a: self.arithmetic.left(scores, rows, left),
                    b: self.values.tile(&self.tiles, row, head, keys.start),
                    rows,
                    limits: &limits.over_keys,
                });
            }
        }
    }
}

/// Cuts the state into the disjoint rows that each (key head, tile) owns.
fn split_tasks<'a, T: Real>(state: &'a mut Forward<T>, tiles: &'a [QueryTile]) -> Vec<Task<'a, T>> {
    let shape = state.shape;
    let width = shape.group();
    let mut out = Splitter::new(&mut state.out, width * row_stride(shape.head_dim));
    let mut max = Splitter::new(&mut state.max, width);
    let mut sum = Splitter::new(&mut state.sum, width);
    let mut tasks = Vec::with_capacity(tiles.len() * shape.key_heads);
    for (tile, key_head, queries) in in_memory_order(tiles, shape) {
        let task = Task {
            tile,
            key_head,
            out: out.take(queries.clone()),
            max: max.take(queries.clone()),
            sum: sum.take(queries),
        };
        if !tile.runs.is_empty() {
            tasks.push(task);
        }
    }
    tasks
}

/// Every (tile, key head) with its range of stacked queries in `[B, Hkv, Sq]`, in increasing order.
pub(crate) fn in_memory_order(
    tiles: &[QueryTile],
    shape: Shape,
) -> impl Iterator<Item = (&QueryTile, usize, Range<usize>)> {
    tiles.chunk_by(|a, b| a.row == b.row).flat_map(move |of_row| {
        (0..shape.key_heads).flat_map(move |key_head| {
            of_row.iter().map(move |tile| {
                let start = (tile.row as usize * shape.key_heads + key_head) * shape.queries;
                let queries = start + tile.queries.start as usize..start + tile.queries.end as usize;
                (tile, key_head, queries)
            })
        })
    })
}

/// Hands out disjoint, increasing parts of a slice.
pub(crate) struct Splitter<'a, T> {
    rest: &'a mut [T],
    taken: usize,
    width: usize,
}

impl<'a, T> Splitter<'a, T> {
    /// Parts are counted in units of `width` elements.
    pub fn new(data: &'a mut [T], width: usize) -> Self {
        Self { rest: data, taken: 0, width }
    }

    /// The units `range`; panics if an earlier call reached past its start.
    pub fn take(&mut self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start >= self.taken, "query tiles overlap or are out of order");
        let rest = std::mem::take(&mut self.rest);
        let (_, rest) = rest.split_at_mut((range.start - self.taken) * self.width);
        let (part, rest) = rest.split_at_mut(range.len() * self.width);
        self.rest = rest;
        self.taken = range.end;
        part
    }
}
