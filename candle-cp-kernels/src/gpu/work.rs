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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::KeyRun;

    const SHAPE: TileShape = TileShape { rows: 16, columns: 8, warps: (1, 1) };
    /// Chunk of two pieces: positions 0..30 and 50..63.
    const PIECES: [(Range<u32>, u32); 2] = [(0..30, 0), (30..43, 50)];
    const GROUP: usize = 3;

    /// Two rows of queries: a window in two documents with a blind query between, and all of everything.
    fn bounds() -> Vec<Vec<Bounds>> {
        let window = |i: u32| match i {
            7 => Bounds { first: 9, end: 2 },
            _ if i < 20 => Bounds { first: i.saturating_sub(4), end: i + 1 },
            _ => Bounds { first: 48.max(i + 25), end: i + 36 },
        };
        vec![(0..27).map(window).collect(), vec![Bounds { first: 0, end: 64 }; 27]]
    }

    fn plan() -> Vec<QueryTile> {
        let run = |(keys, first_position): &(Range<u32>, u32)| KeyRun {
            keys: keys.clone(),
            first_position: *first_position,
            full: 0..0,
        };
        let tile = |row| QueryTile { row, queries: 0..27, runs: PIECES.iter().map(run).collect() };
        vec![tile(0), tile(1)]
    }

    /// (batch, first query row, first key, full) of every tile, from the pairs themselves.
    fn expected(rows: u32, columns: u32) -> Vec<(u32, u32, u32, bool)> {
        let mut out = Vec::new();
        for (batch, bounds) in bounds().iter().enumerate() {
            let stacked = (bounds.len() * GROUP) as u32;
            for first_row in (0..stacked).step_by(rows as usize) {
                for (keys, position) in PIECES {
                    for first_key in keys.clone().step_by(columns as usize) {
                        let end_key = (first_key + columns).min(keys.end);
                        let sees = |row: u32, key: u32| {
                            let (b, at) = (bounds[row as usize / GROUP], position + key - keys.start);
                            b.first <= at && at < b.end
                        };
                        let in_rows = first_row..(first_row + rows).min(stacked);
                        let pairs = in_rows.flat_map(|row| (first_key..end_key).map(move |key| (row, key)));
                        let seen: Vec<bool> = pairs.map(|(row, key)| sees(row, key)).collect();
                        if seen.contains(&true) {
                            let full = !seen.contains(&false) && end_key - first_key == columns;
                            out.push((batch as u32, first_row, first_key, full));
                        }
                    }
                }
            }
        }
        out
    }

    /// (batch, start of the block, start of the entry, full).
    fn listed(list: &WorkList) -> Vec<(u32, u32, u32, bool)> {
        let of_tile = |tile: &[u32]| {
            let (batch, start, first, count) = (tile[0], tile[1], tile[4] as usize, tile[5] as usize);
            let entries = list.entries[4 * first..4 * (first + count)].chunks(4);
            entries.map(move |entry| (batch, start, entry[0], entry[3] == 1)).collect::<Vec<_>>()
        };
        list.tiles.chunks(TILE_WORDS).flat_map(of_tile).collect()
    }

    #[test]
    fn exactly_the_live_tiles_are_visited() {
        let mut by_queries = listed(&WorkList::by_queries(SHAPE, GROUP, &bounds(), &plan()));
        by_queries.sort_unstable();
        let mut live = expected(16, 8);
        live.sort_unstable();
        assert_eq!(by_queries, live);
        assert!(live.iter().any(|tile| tile.3) && live.len() < expected(1, 1).len());
        let list = WorkList::by_keys(SHAPE, GROUP, &bounds(), &plan());
        let mut by_keys: Vec<_> = listed(&list).into_iter().map(|(b, key, row, full)| (b, row, key, full)).collect();
        by_keys.sort_unstable();
        let mut live = expected(8, 16);
        live.sort_unstable();
        assert_eq!(by_keys, live);
        assert_eq!(list.live().live(), live.len());
        let lengths: Vec<u32> = list.tiles.chunks(TILE_WORDS).map(|tile| tile[5]).collect();
        assert!(lengths.is_sorted_by(|a, b| a >= b), "the longest comes first");
        assert_eq!(lengths.len(), list.blocks());
    }

    #[test]
    fn positions_follow_the_pieces() {
        let list = WorkList::by_queries(SHAPE, GROUP, &bounds(), &plan());
        for entry in list.entries.chunks(4) {
            let (keys, first) = PIECES.iter().find(|(keys, _)| keys.contains(&entry[0])).unwrap();
            assert_eq!((entry[2], entry[1]), (first + entry[0] - keys.start, 8.min(keys.end - entry[0])));
        }
        assert_eq!(WorkList::by_queries(SHAPE, GROUP, &bounds(), &[]).blocks(), 0);
    }
}
