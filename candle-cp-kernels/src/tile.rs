//! Tiles: which keys a block of queries visits, and where the mask has to be looked at.

use std::ops::Range;

/// Queries in one tile, at most.
pub const QUERY_BLOCK: usize = 48;
/// Keys in one tile, at most. Tiles lie on a grid of this pitch, counted from the start of each
/// contiguous piece of keys, so that a shorter chunk is cut into the same tiles as a longer one.
pub const KEY_BLOCK: usize = 128;

/// The key positions that one query may see: `first <= position < end`. Empty when `first >= end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bounds {
    /// First visible key position.
    pub first: u32,
    /// One past the last visible key position.
    pub end: u32,
}

impl Bounds {
    /// True if no key is visible.
    pub fn is_empty(&self) -> bool {
        self.first >= self.end
    }

    /// Number of visible positions.
    pub fn len(&self) -> usize {
        self.end.saturating_sub(self.first) as usize
    }
}

/// Consecutive keys of a chunk, at consecutive positions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRun {
    /// Indices into the chunk. The run is visited in tiles of [`KEY_BLOCK`] from its start.
    pub keys: Range<u32>,
    /// Position of the key `keys.start`.
    pub first_position: u32,
    /// Indices into the chunk, inside `keys`, that *every* query of the tile sees: no mask needed.
    pub full: Range<u32>,
}

impl KeyRun {
    /// The tiles of this run: key indices, and whether the mask can be skipped.
    pub fn tiles(&self) -> impl Iterator<Item = (Range<u32>, bool)> + '_ {
        let step = KEY_BLOCK as u32;
        (self.keys.start..self.keys.end).step_by(KEY_BLOCK).map(move |start| {
            let tile = start..(start + step).min(self.keys.end);
            let full = self.full.start <= tile.start && tile.end <= self.full.end;
            (tile, full)
        })
    }
}

/// A block of consecutive queries of one batch row, and the keys of a chunk that it visits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueryTile {
    /// Batch row.
    pub row: u32,
    /// Local query indices; at most [`QUERY_BLOCK`].
    pub queries: Range<u32>,
    /// What is visited, in order.
    pub runs: Vec<KeyRun>,
}

/// Number of tiles by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TileCount {
    /// Every pair is allowed; the mask is not looked at.
    pub full: usize,
    /// Some pairs may be masked.
    pub partial: usize,
}

impl TileCount {
    /// Tiles that are visited.
    pub fn live(&self) -> usize {
        self.full + self.partial
    }

    /// Adds the tiles of `query_tiles`.
    pub fn add(&mut self, query_tiles: &[QueryTile]) {
        for (_, full) in query_tiles.iter().flat_map(|t| &t.runs).flat_map(KeyRun::tiles) {
            *(if full { &mut self.full } else { &mut self.partial }) += 1;
        }
    }
}

impl QueryTile {
    /// Pairs that are allowed, given the bounds of the queries of this row: the work worth balancing. It does not depend
    /// on how many masked keys are visited.
    pub(crate) fn pairs(&self, bounds: &[Bounds]) -> usize {
        let seen = |run: &KeyRun, b: &Bounds| {
            let end = run.first_position + run.keys.len() as u32;
            b.end.min(end).saturating_sub(b.first.max(run.first_position)) as usize
        };
        let bounds = &bounds[self.queries.start as usize..self.queries.end as usize];
        self.runs.iter().map(|run| bounds.iter().map(|b| seen(run, b)).sum::<usize>()).sum()
    }
}
