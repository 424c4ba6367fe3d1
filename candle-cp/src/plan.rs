//! Which tiles of attention are live, and what has to travel for them.
//!
//! Computed from interval arithmetic on the metadata that every rank has, never from an S x S matrix. The queries of a
//! block are consecutive tokens, so the keys they see together form one interval, and the keys that all of them see form
//! another one inside it.

use crate::error::{Error, Result};
use crate::gpu::WorkCache;
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

/// How many keys the plans of all ranks move: what to plan a run by without making every rank's plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyCounts {
    /// By rank and hop, as in [`AttentionPlan::hops`]: keys sent and keys received, per batch row and head.
    pub hops: Vec<Vec<[usize; 2]>>,
    /// [`AttentionPlan::live_pairs`].
    pub live_pairs: Vec<usize>,
}

impl KeyCounts {
    /// The counts of a batch, made once for all ranks.
    ///
    /// # Errors
    /// A layout made for rows of another length.
    pub fn new(layout: &SequenceLayout, tokens: &Tokens, rule: &MaskRule, trim: Trim) -> Result<Self> {
        let rows = padded_bounds(layout, tokens, rule)?;
        let (planner, ranks) = (Planner::new(layout, &rows, 0, trim), layout.ranks());
        let mut hops = vec![Vec::new(); ranks];
        for distance in (1..ranks).filter(|&distance| planner.anyone_needs(distance)) {
            let count = |query_rank, key_rank| planner.keys(query_rank, key_rank).iter().map(Range::len).sum();
            let received: Vec<usize> = (0..ranks).map(|rank| count(rank, (rank + ranks - distance) % ranks)).collect();
            for (rank, hops) in hops.iter_mut().enumerate() {
                hops.push([received[(rank + distance) % ranks], received[rank]]);
            }
        }
        Ok(Self { hops, live_pairs: live_pairs(layout, &rows) })
    }
}

/// The plan of one rank for one batch and mask rule. All ranks compute theirs from the same metadata, so that what one
/// sends is what the other expects, without a word between them. Forward and backward use the same plan.
#[derive(Debug, Clone)]
pub struct AttentionPlan {
    bounds: Vec<Vec<Bounds>>,
    own: Edge,
    hops: Vec<Hop>,
    live_pairs: Vec<usize>,
    /// Tile lists on devices.
    pub(crate) gpu: WorkCache,
}

impl AttentionPlan {
    /// The plan of `rank`.
    ///
    /// # Errors
    /// A layout made for rows of another length.
    pub fn new(layout: &SequenceLayout, tokens: &Tokens, rule: &MaskRule, rank: usize, trim: Trim) -> Result<Self> {
        let rows = padded_bounds(layout, tokens, rule)?;
        let planner = Planner::new(layout, &rows, rank, trim);
        let ranks = layout.ranks();
        let mut hops = Vec::new();
        for distance in (1..ranks).filter(|&distance| planner.anyone_needs(distance)) {
            let (to, from) = ((rank + distance) % ranks, (rank + ranks - distance) % ranks);
            let send = planner.keys(to, rank);
            let receive = planner.edge(from, planner.keys(rank, from));
            let send = (!send.is_empty()).then_some((to, send));
            let receive = (!receive.keys.is_empty()).then_some((from, receive));
            hops.push(Hop { distance, send, receive });
        }
        let own = planner.edge(rank, vec![0..layout.local_len(rank)]);
        let local = layout.global_indices(rank);
        let bounds = rows.iter().map(|row| local.iter().map(|&i| row[i]).collect()).collect();
        Ok(Self { bounds, own, hops, live_pairs: live_pairs(layout, &rows), gpu: WorkCache::default() })
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
                    run(&reach, &positions, keys.start)
                });
                tiles.push(QueryTile { row: row as u32, queries: narrow(&queries), runs: runs.collect() });
            }
        }
        let live_pairs = vec![bounds.iter().flatten().map(Bounds::len).sum()];
        let own = Edge { keys: vec![0..keys], tiles };
        Self { bounds, own, hops: Vec::new(), live_pairs, gpu: WorkCache::default() }
    }
}

/// What every query of the padded rows sees.
fn padded_bounds(layout: &SequenceLayout, tokens: &Tokens, rule: &MaskRule) -> Result<Vec<Vec<Bounds>>> {
    if layout.len() != tokens.len() {
        let given = format!("for {} tokens", layout.len());
        let allowed = format!("the batch has {} per row", tokens.len());
        return Err(Error::argument("layout", given, allowed, "make the layout for the batch"));
    }
    let mut rows: Vec<_> = (0..tokens.batch()).map(|row| tokens.bounds(row, rule)).collect();
    rows.iter_mut().for_each(|row| row.resize(layout.padded_len(), Bounds::default()));
    Ok(rows)
}

/// Allowed pairs by query rank.
fn live_pairs(layout: &SequenceLayout, rows: &[Vec<Bounds>]) -> Vec<usize> {
    let pairs = |rank: usize| {
        let ranges = layout.ranges(rank).iter();
        let of_range = |range: &Range<usize>| {
            rows.iter().map(|row| row[range.clone()].iter().map(Bounds::len).sum::<usize>()).sum::<usize>()
        };
        ranges.map(of_range).sum()
    };
    (0..layout.ranks()).map(pairs).collect()
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

/// The query blocks of a rank, by row and query.
fn query_blocks(layout: &SequenceLayout, rows: &[Vec<Bounds>], rank: usize, trim: Trim) -> Vec<Block> {
    let mut out = Vec::new();
    for (row, bounds) in rows.iter().enumerate() {
        let mut local = 0;
        for global in layout.ranges(rank).iter().flat_map(|range| blocks(range.clone(), QUERY_BLOCK)) {
            let mut reach = Reach::of(&bounds[global.clone()]);
            if trim == Trim::Nothing {
                reach.any = 0..layout.padded_len();
            }
            let queries = local..local + global.len();
            local = queries.end;
            out.push(Block { row, queries, reach });
        }
    }
    out
}

/// What blocks see together: disjoint ranges in order.
fn union(blocks: &[Block]) -> Vec<Range<usize>> {
    let mut seen: Vec<_> = blocks.iter().map(|block| block.reach.any.clone()).filter(|any| !any.is_empty()).collect();
    seen.sort_unstable_by_key(|range| range.start);
    let mut out: Vec<Range<usize>> = Vec::new();
    for range in seen {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

/// Of sorted, disjoint ranges, those that meet `with`.
fn meeting<T>(sorted: &[T], with: &Range<usize>, range: impl Fn(&T) -> &Range<usize>) -> Range<usize> {
    let first = sorted.partition_point(|x| range(x).end <= with.start);
    let end = sorted.partition_point(|x| range(x).start < with.end);
    first..end.max(first)
}

struct Planner<'a> {
    layout: &'a SequenceLayout,
    /// Query blocks of the rank that plans.
    blocks: Vec<Block>,
    /// Positions that the queries of each rank see, from [`union`].
    seen: Vec<Vec<Range<usize>>>,
}

impl<'a> Planner<'a> {
    fn new(layout: &'a SequenceLayout, rows: &[Vec<Bounds>], rank: usize, trim: Trim) -> Self {
        let blocks_of = |rank| query_blocks(layout, rows, rank, trim);
        let blocks = blocks_of(rank);
        let seen = |other| if other == rank { union(&blocks) } else { union(&blocks_of(other)) };
        let seen = (0..layout.ranks()).map(seen).collect();
        Self { layout, blocks, seen }
    }

    /// What `query_rank` sees and `piece` has a part of.
    fn seen_in(&self, query_rank: usize, piece: &Range<usize>) -> &[Range<usize>] {
        let seen = &self.seen[query_rank];
        &seen[meeting(seen, piece, |range| range)]
    }

    /// Whether any rank needs keys of the rank `distance` behind it.
    fn anyone_needs(&self, distance: usize) -> bool {
        let ranks = self.layout.ranks();
        (0..ranks).any(|query_rank| {
            let pieces = self.layout.ranges((query_rank + ranks - distance) % ranks);
            pieces.iter().any(|piece| !self.seen_in(query_rank, piece).is_empty())
        })
    }

    /// Local ranges of `key_rank`'s keys that `query_rank` needs, in order, rounded outwards to the tile grid.
    fn keys(&self, query_rank: usize, key_rank: usize) -> Vec<Range<usize>> {
        let mut local = 0;
        let mut needed: Vec<Range<usize>> = Vec::new();
        for piece in self.layout.ranges(key_rank) {
            for seen in self.seen_in(query_rank, piece) {
                let on_grid = round_out(&intersect(seen, piece), piece);
                let part = local + on_grid.start - piece.start..local + on_grid.end - piece.start;
                match needed.last_mut() {
                    Some(last) if part.start <= last.end => last.end = part.end,
                    _ => needed.push(part),
                }
            }
            local += piece.len();
        }
        needed
    }

    /// Tiles of the planning rank on the chunk made of `keys`, local ranges of `key_rank`.
    fn edge(&self, key_rank: usize, keys: Vec<Range<usize>>) -> Edge {
        let segments = self.segments(key_rank, &keys);
        let mut tiles = Vec::new();
        for block in &self.blocks {
            let met = &segments[meeting(&segments, &block.reach.any, |segment| &segment.0)];
            let mut runs: Vec<_> =
                met.iter().filter_map(|(positions, offset)| run(&block.reach, positions, *offset)).collect();
            // In the order of the chunk, whatever the order of the pieces in the row.
            runs.sort_unstable_by_key(|run| run.keys.start);
            if !runs.is_empty() {
                tiles.push(QueryTile { row: block.row as u32, queries: narrow(&block.queries), runs });
            }
        }
        Edge { keys, tiles }
    }

    /// The contiguous parts of the chunk made of `keys`, local ranges of `key_rank` in order: (positions, first chunk
    /// index), by position.
    fn segments(&self, key_rank: usize, keys: &[Range<usize>]) -> Vec<(Range<usize>, usize)> {
        let mut out = Vec::new();
        let (mut local, mut chunk, mut next) = (0, 0, 0);
        for piece in self.layout.ranges(key_rank) {
            let held = local..local + piece.len();
            while next < keys.len() && keys[next].start < held.end {
                let inside = intersect(&keys[next], &held);
                let start = piece.start + inside.start - local;
                out.push((start..start + inside.len(), chunk));
                chunk += inside.len();
                if keys[next].end > held.end {
                    break;
                }
                next += 1;
            }
            local = held.end;
        }
        out.sort_unstable_by_key(|(positions, _)| positions.start);
        out
    }
}

/// The keys at `positions` (chunk index `offset` on) that a block reaches, rounded to the tile grid. Chunks
/// start on the grid.
fn run(reach: &Reach, positions: &Range<usize>, offset: usize) -> Option<KeyRun> {
    let seen = intersect(&reach.any, positions);
    if seen.is_empty() {
        return None;
    }
    let visited = round_out(&seen, positions);
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
