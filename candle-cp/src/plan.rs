//! Which tiles of attention are live, and what has to travel for them.
//!
//! Computed from interval arithmetic on the metadata that every rank has, never from an S x S matrix. The queries of a
//! block are consecutive tokens, so the keys they see together form one interval, and the keys that all of them see form
//! another one inside it.

use crate::error::{Error, Result};
use crate::layout::SequenceLayout;
use crate::mask::MaskRule;
use crate::tokens::Tokens;
use candle_cp_kernels::{Bounds, KEY_BLOCK, KeyRun, QUERY_BLOCK, QueryTile, TileCount};
use std::ops::Range;

/// How much a plan leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trim {
    /// Only live tiles are visited, and only the keys in reach travel.
    Live,
    /// Every tile is visited and every key travels to every rank. The result is the same, bit for bit; for tests.
    Nothing,
}

/// The work of one rank on the keys of one other rank (or its own).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Edge {
    /// Local key ranges of the key rank that are needed, in order; their concatenation is the chunk that travels.
    pub keys: Vec<Range<usize>>,
    /// What the query rank visits; key indices count in the chunk.
    pub tiles: Vec<QueryTile>,
}

impl Edge {
    /// Keys in the chunk.
    pub fn key_count(&self) -> usize {
        self.keys.iter().map(Range::len).sum()
    }
}

/// One step of the ring, as one rank sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hop {
    /// Distance in ranks.
    pub distance: usize,
    /// Where this rank's keys go, and which local ranges of them.
    pub send: Option<(usize, Vec<Range<usize>>)>,
    /// Whose keys arrive, and what to do with them.
    pub receive: Option<(usize, Edge)>,
}

/// The plan of one rank for one batch and mask rule. All ranks compute theirs from the same metadata, so that what one
/// sends is what the other expects, without a word between them. Forward and backward use the same plan.
#[derive(Debug, Clone)]
pub struct AttentionPlan {
    bounds: Vec<Vec<Bounds>>,
    own: Edge,
    hops: Vec<Hop>,
    live_pairs: Vec<usize>,
}

impl AttentionPlan {
    /// The plan of `rank`.
    ///
    /// # Errors
    /// A layout made for rows of another length.
    pub fn new(layout: &SequenceLayout, tokens: &Tokens, rule: &MaskRule, rank: usize, trim: Trim) -> Result<Self> {
        if layout.len() != tokens.len() {
            let given = format!("for {} tokens", layout.len());
            let allowed = format!("the batch has {} per row", tokens.len());
            return Err(Error::argument("layout", given, allowed, "make the layout for the batch"));
        }
        let mut rows: Vec<_> = (0..tokens.batch()).map(|row| tokens.bounds(row, rule)).collect();
        rows.iter_mut().for_each(|row| row.resize(layout.padded_len(), Bounds::default()));
        let planner = Planner { layout, blocks: summarise(layout, &rows, trim), trim };
        let ranks = layout.ranks();
        let mut hops = Vec::new();
        for distance in 1..ranks {
            let (to, from) = ((rank + distance) % ranks, (rank + ranks - distance) % ranks);
            let send = planner.keys(to, rank);
            let receive = planner.edge(from, planner.keys(rank, from), rank);
            let send = (!send.is_empty()).then_some((to, send));
            let receive = (!receive.keys.is_empty()).then_some((from, receive));
            let needed = |q: usize| !planner.keys(q, (q + ranks - distance) % ranks).is_empty();
            if (0..ranks).any(needed) {
                hops.push(Hop { distance, send, receive });
            }
        }
        let all = 0..layout.local_len(rank);
        let own = planner.edge(rank, if all.is_empty() { vec![] } else { vec![all] }, rank);
        let local = layout.global_indices(rank);
        let bounds = rows.iter().map(|row| local.iter().map(|&i| row[i]).collect()).collect();
        let pairs = |r: usize| -> usize {
            let ranges = layout.ranges(r).iter().cloned();
            ranges
                .flat_map(|range| rows.iter().map(move |row| row[range.clone()].iter().map(Bounds::len).sum::<usize>()))
                .sum()
        };
        Ok(Self { bounds, own, hops, live_pairs: (0..ranks).map(pairs).collect() })
    }

    /// Visible key positions (global row indices) of every local query, `[B][S_local]`.
    pub fn bounds(&self) -> &[Vec<Bounds>] {
        &self.bounds
    }

    /// The work on this rank's own keys; all of them are in the chunk.
    pub fn own(&self) -> &Edge {
        &self.own
    }

    /// The hops of the ring, by increasing distance: every distance at which any rank sends keys. A rank that has nothing
    /// to do at one keeps it, so that all ranks walk the same steps; in another order they could wait for each other in
    /// a circle.
    pub fn hops(&self) -> &[Hop] {
        &self.hops
    }

    /// The distances of the hops; their number is the length of the ring.
    pub fn distances(&self) -> Vec<usize> {
        self.hops.iter().map(|hop| hop.distance).collect()
    }

    /// Allowed (query, key) pairs by query rank, over all batch rows: the live work of each rank per head.
    pub fn live_pairs(&self) -> &[usize] {
        &self.live_pairs
    }

    /// Tiles that this rank visits in one pass per key head.
    pub fn tiles(&self) -> TileCount {
        let mut count = TileCount::default();
        count.add(&self.own.tiles);
        self.hops.iter().filter_map(|hop| hop.receive.as_ref()).for_each(|(_, edge)| count.add(&edge.tiles));
        count
    }

    /// Keys that this rank receives, per batch row and head.
    pub fn keys_received(&self) -> usize {
        self.hops.iter().filter_map(|hop| hop.receive.as_ref()).map(|(_, edge)| edge.key_count()).sum()
    }

    /// A plan for queries and keys that are given by coordinates rather than by a layout: one rank, one chunk.
    /// `segments[row]` are runs of keys at consecutive positions: (key indices, first position).
    pub(crate) fn of_chunk(bounds: Vec<Vec<Bounds>>, segments: &[Vec<(Range<usize>, u32)>], keys: usize) -> Self {
        let mut tiles = Vec::new();
        for (row, (bounds, segments)) in bounds.iter().zip(segments).enumerate() {
            for queries in blocks(0..bounds.len(), QUERY_BLOCK) {
                let reach = Reach::of(&bounds[queries.clone()]);
                let runs = segments.iter().filter_map(|(keys, first)| {
                    let positions = *first as usize..*first as usize + keys.len();
                    run(&reach, positions, keys.start)
                });
                tiles.push(QueryTile { row: row as u32, queries: narrow(&queries), runs: runs.collect() });
            }
        }
        let live_pairs = vec![bounds.iter().flatten().map(Bounds::len).sum()];
        let own = Edge { keys: vec![0..keys], tiles };
        Self { bounds, own, hops: Vec::new(), live_pairs }
    }
}

/// What a block of queries sees: `any` at least one of them, `all` each of them. Global positions.
#[derive(Debug, Clone)]
struct Reach {
    any: Range<usize>,
    all: Range<usize>,
}

impl Reach {
    fn of(bounds: &[Bounds]) -> Self {
        let seeing = bounds.iter().filter(|b| !b.is_empty());
        let (mut any, mut all) = (NOTHING, 0..usize::MAX);
        for b in seeing.clone() {
            any = any.start.min(b.first as usize)..any.end.max(b.end as usize);
            all = all.start.max(b.first as usize)..all.end.min(b.end as usize);
        }
        if seeing.count() < bounds.len() {
            all = 0..0;
        }
        Self { any, all }
    }
}

/// The empty range from which hulls grow.
#[allow(clippy::reversed_empty_ranges)]
const NOTHING: Range<usize> = usize::MAX..0;

/// A block of queries of one rank and batch row.
struct Block {
    row: usize,
    /// Local query indices.
    queries: Range<usize>,
    reach: Reach,
}

/// The query blocks of every rank.
fn summarise(layout: &SequenceLayout, rows: &[Vec<Bounds>], trim: Trim) -> Vec<Vec<Block>> {
    let of_rank = |rank: usize| {
        let mut out = Vec::new();
        for (row, bounds) in rows.iter().enumerate() {
            let mut local = 0;
            for range in layout.ranges(rank) {
                for global in blocks(range.clone(), QUERY_BLOCK) {
                    let mut reach = Reach::of(&bounds[global.clone()]);
                    if trim == Trim::Nothing {
                        reach.any = 0..layout.padded_len();
                    }
                    let queries = local..local + global.len();
                    local = queries.end;
                    out.push(Block { row, queries, reach });
                }
            }
        }
        out
    };
    (0..layout.ranks()).map(of_rank).collect()
}

struct Planner<'a> {
    layout: &'a SequenceLayout,
    blocks: Vec<Vec<Block>>,
    trim: Trim,
}

impl Planner<'_> {
    /// Local ranges of `key_rank`'s keys that `query_rank` needs: one per contiguous piece at most, rounded outwards to
    /// the tile grid.
    fn keys(&self, query_rank: usize, key_rank: usize) -> Vec<Range<usize>> {
        let mut local = 0;
        let mut needed = Vec::new();
        for piece in self.layout.ranges(key_rank) {
            let mut hull = NOTHING;
            for block in &self.blocks[query_rank] {
                let seen = intersect(&block.reach.any, piece);
                if !seen.is_empty() {
                    hull = hull.start.min(seen.start)..hull.end.max(seen.end);
                }
            }
            if self.trim == Trim::Nothing && !self.blocks[query_rank].is_empty() {
                hull = piece.clone();
            }
            if !hull.is_empty() {
                let on_grid = round_out(&hull, piece);
                needed.push(local + on_grid.start - piece.start..local + on_grid.end - piece.start);
            }
            local += piece.len();
        }
        needed
    }

    /// Tiles of `query_rank` on the chunk made of `keys`, local ranges of `key_rank`.
    fn edge(&self, key_rank: usize, keys: Vec<Range<usize>>, query_rank: usize) -> Edge {
        let tiles = self.blocks[query_rank].iter().map(|block| {
            let mut runs = Vec::new();
            let mut local = 0;
            for piece in self.layout.ranges(key_rank) {
                // Where this piece's part of the chunk starts, and which of its keys are there.
                let mut chunk = 0;
                for part in &keys {
                    let inside = intersect(part, &(local..local + piece.len()));
                    if !inside.is_empty() {
                        let positions = piece.start + inside.start - local..piece.start + inside.end - local;
                        let offset = chunk + inside.start - part.start;
                        runs.extend(run(&block.reach, positions, offset));
                    }
                    chunk += part.len();
                }
                local += piece.len();
            }
            QueryTile { row: block.row as u32, queries: narrow(&block.queries), runs }
        });
        let tiles = if keys.is_empty() { Vec::new() } else { tiles.collect() };
        Edge { keys, tiles }
    }
}

/// The keys at `positions` (chunk index `offset` on) that a block reaches, rounded to the tile grid. Chunks
/// start on the grid.
fn run(reach: &Reach, positions: Range<usize>, offset: usize) -> Option<KeyRun> {
    let seen = intersect(&reach.any, &positions);
    if seen.is_empty() {
        return None;
    }
    let visited = round_out(&seen, &positions);
    let full = intersect(&reach.all, &visited);
    let index = |position: usize| (offset + position - positions.start) as u32;
    let full = if full.is_empty() { 0..0 } else { index(full.start)..index(full.end) };
    Some(KeyRun { keys: index(visited.start)..index(visited.end), first_position: visited.start as u32, full })
}

fn intersect(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// `range` extended to multiples of [`KEY_BLOCK`], counted from the start of `within`, but not beyond it.
fn round_out(range: &Range<usize>, within: &Range<usize>) -> Range<usize> {
    let start = (range.start - within.start) / KEY_BLOCK * KEY_BLOCK + within.start;
    let end = (range.end - within.start).next_multiple_of(KEY_BLOCK) + within.start;
    start..end.min(within.end)
}

fn blocks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |start| start..(start + size).min(range.end))
}

fn narrow(range: &Range<usize>) -> Range<u32> {
    range.start as u32..range.end as u32
}
