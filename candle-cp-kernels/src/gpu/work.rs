//! Which tiles a launch visits.

use super::tiles::TileShape;
use crate::tile::{Bounds, QueryTile, TileCount};
use std::ops::Range;

/// The blocks of a launch and what each of them meets, as the kernels read it.
///
/// A block of rows meets a block of columns if any of its queries sees any of the keys, and none else. Blocks with much
/// work come first, so that the last ones to run are short.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WorkList {
    /// Per thread block `batch, start, count, position, first entry, entries`.
    pub tiles: Vec<u32>,
    /// `start, count, position, full`.
    pub entries: Vec<u32>,
    live: TileCount,
}

/// Numbers per thread block in [`WorkList::tiles`].
const TILE_WORDS: usize = 6;

#[derive(Debug, Clone, Copy)]
struct Block {
    batch: u32,
    start: u32,
    count: u32,
    position: u32,
}

#[derive(Debug, Clone, Copy)]
struct Meeting {
    /// Stacked queries.
    queries: Block,
    keys: Block,
    full: bool,
}

impl WorkList {
    /// Blocks of queries and the keys they meet: forward, and the gradient of the queries.
    ///
    /// `bounds[row][query]` are the positions a query may see, `tiles` what the plan visits in the chunk, `group` the
    /// query heads of a key head.
    pub fn by_queries(shape: TileShape, group: usize, bounds: &[Vec<Bounds>], tiles: &[QueryTile]) -> Self {
        let met = meetings(shape.rows, shape.columns, group, bounds, tiles);
        Self::new(met, |meeting| (meeting.queries, meeting.keys))
    }

    /// Blocks of keys and the queries that see them: the gradients of keys and values.
    pub fn by_keys(shape: TileShape, group: usize, bounds: &[Vec<Bounds>], tiles: &[QueryTile]) -> Self {
        let mut met = meetings(shape.columns, shape.rows, group, bounds, tiles);
        met.sort_by_key(|meeting| (meeting.keys.batch, meeting.keys.start));
        Self::new(met, |meeting| (meeting.keys, meeting.queries))
    }

    fn new(met: Vec<Meeting>, roles: impl Fn(&Meeting) -> (Block, Block)) -> Self {
        let key = |meeting: &Meeting| (roles(meeting).0.batch, roles(meeting).0.start);
        let mut blocks: Vec<&[Meeting]> = met.chunk_by(|a, b| key(a) == key(b)).collect();
        blocks.sort_by_key(|block| std::cmp::Reverse(block.len()));
        let mut out = Self::default();
        for block in blocks {
            let own = roles(&block[0]).0;
            let first = out.entries.len() / 4;
            out.tiles.extend([own.batch, own.start, own.count, own.position, first as u32, block.len() as u32]);
            for meeting in block {
                let other = roles(meeting).1;
                out.entries.extend([other.start, other.count, other.position, u32::from(meeting.full)]);
                *(if meeting.full { &mut out.live.full } else { &mut out.live.partial }) += 1;
            }
        }
        out
    }

    /// Thread blocks per key head.
    pub fn blocks(&self) -> usize {
        self.tiles.len() / TILE_WORDS
    }

    /// Tiles that are visited, per key head.
    pub fn live(&self) -> TileCount {
        self.live
    }
}

/// All live tiles of `rows` stacked queries by `columns` keys, by batch row, query and key.
fn meetings(rows: usize, columns: usize, group: usize, bounds: &[Vec<Bounds>], tiles: &[QueryTile]) -> Vec<Meeting> {
    let mut out = Vec::new();
    for of_row in tiles.chunk_by(|a, b| a.row == b.row) {
        let batch = of_row[0].row;
        let keys: Vec<Block> = key_blocks(batch, segments(of_row), columns).collect();
        let bounds = &bounds[batch as usize];
        let stacked = bounds.len() * group;
        for start in (0..stacked).step_by(rows) {
            let end = (start + rows).min(stacked);
            let seen = Seen::of(&bounds[start / group..(end - 1) / group + 1]);
            let queries = Block { batch, start: start as u32, count: (end - start) as u32, position: 0 };
            for range in &seen.any {
                let first = keys.partition_point(|k| k.position + k.count <= range.start);
                for &key in keys[first..].iter().take_while(|k| k.position < range.end) {
                    let again = out.last().is_some_and(|last: &Meeting| {
                        last.queries.start == queries.start
                            && last.queries.batch == batch
                            && last.keys.start == key.start
                    });
                    if !again {
                        let inside = seen.all.start <= key.position && key.position + key.count <= seen.all.end;
                        out.push(Meeting { queries, keys: key, full: inside && key.count as usize == columns });
                    }
                }
            }
        }
    }
    out
}

/// What the queries of a block see.
struct Seen {
    /// At least one of them: disjoint, in order.
    any: Vec<Range<u32>>,
    /// Each of them.
    all: Range<u32>,
}

impl Seen {
    fn of(bounds: &[Bounds]) -> Self {
        let mut any: Vec<Range<u32>> = bounds.iter().filter(|b| !b.is_empty()).map(|b| b.first..b.end).collect();
        any.sort_unstable_by_key(|range| range.start);
        any.dedup_by(|next, kept| {
            let joined = next.start <= kept.end;
            if joined {
                kept.end = kept.end.max(next.end);
            }
            joined
        });
        let first = bounds.iter().map(|b| b.first).max().unwrap_or(0);
        let end = bounds.iter().map(|b| b.end).min().unwrap_or(0);
        Self { any, all: first..end }
    }
}

/// Keys at consecutive positions that the plan's tiles of one batch row visit: (chunk indices, first position), by
/// position.
fn segments(tiles: &[QueryTile]) -> Vec<(Range<u32>, u32)> {
    let runs = tiles.iter().flat_map(|tile| &tile.runs);
    let mut all: Vec<_> = runs.map(|run| (run.keys.clone(), run.first_position)).collect();
    all.sort_unstable_by_key(|(keys, position)| (*position, keys.end));
    let mut out: Vec<(Range<u32>, u32)> = Vec::new();
    for (keys, position) in all {
        match out.last_mut() {
            Some((last, first))
                if keys.start <= last.end
                    && keys.start >= last.start
                    && keys.start - last.start == position - *first =>
            {
                last.end = last.end.max(keys.end);
            }
            _ => out.push((keys, position)),
        }
    }
    out
}

fn key_blocks(batch: u32, segments: Vec<(Range<u32>, u32)>, size: usize) -> impl Iterator<Item = Block> {
    segments.into_iter().flat_map(move |(keys, position)| {
        keys.clone().step_by(size).map(move |start| Block {
            batch,
            start,
            count: (keys.end - start).min(size as u32),
            position: position + start - keys.start,
        })
    })
}
