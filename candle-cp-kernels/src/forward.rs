//! Forward pass over one chunk of keys, continuing a running softmax.

use crate::heads::{Heads, Shape};
use crate::matmul::{Broadcast, Limits, Product, ROWS};
use crate::pack::{Columns, KeyTiles, Rows, padded};
use crate::real::Real;
use crate::softmax::{Rescale, Softmax, Span};
use crate::tile::{Bounds, KEY_BLOCK, QUERY_BLOCK, QueryTile};
use rayon::prelude::*;
use std::ops::Range;

/// The running softmax of all local queries: nothing seen yet, or some chunks.
///
/// Rows are stacked `(query, g)` inside `[B, Hkv]`, so that a tile's rows are adjacent.
#[derive(Debug, Clone)]
pub struct Forward<T> {
    shape: Shape,
    /// `[B, Hkv, Sq, G, Dp]`: sum of `exp(score - max) * value`, in rows of whole vectors.
    out: Vec<T>,
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
            out: vec![T::ZERO; rows * padded(shape.head_dim)],
            max: vec![T::NEG_INFINITY; rows],
            sum: vec![T::ZERO; rows],
        }
    }

    /// Output `[B, Hq, Sq, D]`, and log-sum-exp stacked `[B, Hkv, Sq, G]`. A query that saw no key gets
    /// output 0 and log-sum-exp -inf.
    pub fn finish(mut self) -> (Vec<T>, Vec<T>) {
        let rows = self.out.par_chunks_mut(padded(self.shape.head_dim)).with_min_len(QUERY_BLOCK);
        rows.zip(&mut self.max).zip(&self.sum).for_each(|((row, max), &sum)| {
            if *max == T::NEG_INFINITY {
                return;
            }
            let inverse = T::ONE / sum;
            row.iter_mut().for_each(|x| *x *= inverse);
            *max += sum.ln();
        });
        (unstack(&self.out, self.shape), self.max)
    }
}

/// `[B, Hkv, S, G, Dp]` to `[B, Hkv, G, S, D]`, which is `[B, Hq, S, D]`.
pub(crate) fn unstack<T: Real>(stacked: &[T], shape: Shape) -> Vec<T> {
    let (d, width, group, queries) = (shape.head_dim, padded(shape.head_dim), shape.group(), shape.queries);
    let mut out = vec![T::ZERO; shape.rows() * d];
    out.par_chunks_mut((queries * d).max(1)).enumerate().for_each(|(head, out)| {
        let rows = stacked[head / group * queries * group * width..].chunks(width).skip(head % group).step_by(group);
        out.chunks_mut(d).zip(rows).for_each(|(out, row)| out.copy_from_slice(&row[..d]));
    });
    out
}

/// Queries (or output gradients) of one tile, stacked as `(query, g)` rows of `D`.
pub(crate) fn stack<T: Real>(
    x: &Heads<T>,
    shape: Shape,
    row: usize,
    key_head: usize,
    queries: Range<usize>,
    into: &mut Vec<T>,
) {
    let group = shape.group();
    into.clear();
    for q in queries {
        for g in 0..group {
            into.extend_from_slice(x.token(row, key_head * group + g, q));
        }
    }
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
    pub fn set(&mut self, spans: &[Span], head_dim: usize) {
        self.scores.clear();
        self.over_keys.clear();
        for group in spans.chunks(ROWS) {
            let seen = hull(group.iter().filter(|span| !span.is_empty()).cloned());
            let columns = if seen.is_empty() { 0..0 } else { 0..padded(head_dim) };
            self.scores.push(Limits { terms: 0..head_dim, columns: seen.clone() });
            self.over_keys.push(Limits { terms: seen, columns });
        }
    }
}

/// The smallest range that holds all of `ranges`.
pub(crate) fn hull(ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

/// Buffers of one worker.
struct Scratch<T> {
    query: Vec<T>,
    /// `[rows, KEY_BLOCK]`.
    scores: Vec<T>,
    spans: Vec<Span>,
    limits: TileLimits,
    rescale: Vec<T>,
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
pub fn forward_chunk<T: Real>(
    state: &mut Forward<T>,
    (query, key, value): (&Heads<T>, &Heads<T>, &Heads<T>),
    tiles: &[QueryTile],
    bounds: &[Vec<Bounds>],
    scale: T,
) {
    let shape = state.shape;
    let packed = KeyTiles::new(tiles, shape);
    let chunk =
        Chunk { keys: Columns::new(key, &packed, shape), values: Rows::new(value, &packed, shape), tiles: packed };
    let tasks = split_tasks(state, tiles);
    let rows = QUERY_BLOCK * shape.group();
    let scratch = || Scratch {
        query: Vec::with_capacity(rows * shape.head_dim),
        scores: vec![T::ZERO; rows * KEY_BLOCK],
        spans: Vec::with_capacity(rows),
        limits: TileLimits::default(),
        rescale: vec![T::ONE; rows],
    };
    tasks.into_par_iter().for_each_init(scratch, |scratch, task| {
        let queries = task.tile.queries.start as usize..task.tile.queries.end as usize;
        let bounds = &bounds[task.tile.row as usize][queries];
        visit(task, shape, query, &chunk, bounds, scale, scratch);
    });
}

/// A chunk in the order that the kernels read.
struct Chunk<T> {
    tiles: KeyTiles,
    keys: Columns<T>,
    values: Rows<T>,
}

fn visit<T: Real>(
    task: Task<T>,
    shape: Shape,
    query: &Heads<T>,
    chunk: &Chunk<T>,
    bounds: &[Bounds],
    scale: T,
    scratch: &mut Scratch<T>,
) {
    let (row, head, d) = (task.tile.row as usize, task.key_head, shape.head_dim);
    let queries = task.tile.queries.start as usize..task.tile.queries.end as usize;
    let rows = queries.len() * shape.group();
    stack(query, shape, row, head, queries, &mut scratch.query);
    let Scratch { query, scores, spans, limits, rescale } = scratch;
    for run in &task.tile.runs {
        for (keys, full) in run.tiles() {
            let first_position = run.first_position + (keys.start - run.keys.start);
            set_spans(bounds, shape.group(), first_position, keys.len(), full, spans);
            limits.set(spans, d);
            T::multiply(Product {
                out: scores,
                accumulate: false,
                a: Broadcast::rows(query, d),
                b: chunk.keys.tile(&chunk.tiles, row, head, keys.start),
                rows,
                limits: &limits.scores,
            });
            let rescale = &mut rescale[..rows];
            let (max, sum) = (&mut *task.max, &mut *task.sum);
            T::softmax(Softmax { scores, spans, scale, max, sum, rescale });
            T::rescale(Rescale { rows: task.out, columns: padded(d), factors: rescale });
            T::multiply(Product {
                out: task.out,
                accumulate: true,
                a: Broadcast::rows(scores, KEY_BLOCK),
                b: chunk.values.tile(&chunk.tiles, row, head, keys.start),
                rows,
                limits: &limits.over_keys,
            });
        }
    }
}

/// Cuts the state into the disjoint rows that each (key head, tile) owns.
fn split_tasks<'a, T: Real>(state: &'a mut Forward<T>, tiles: &'a [QueryTile]) -> Vec<Task<'a, T>> {
    let shape = state.shape;
    let width = shape.group();
    let mut out = Splitter::new(&mut state.out, width * padded(shape.head_dim));
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
