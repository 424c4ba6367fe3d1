//! Operands in the order that the micro-kernels read: the keys and values of a chunk once per chunk, the queries of a
//! tile once per tile.

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, pack_rows, terms};
use crate::heads::{Heads, Shape};
use crate::matmul::{LANES, Panels, panel_index};
use crate::tile::{KEY_BLOCK, KeyRun, QueryTile};
use rayon::prelude::*;
use std::ops::Range;

/// Head size in whole vectors.
pub(crate) fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
}

/// Elements from one row of sums over a head to the next. Not a power of two for the usual sizes, so that the rows of a
/// block do not compete for the same lines of the cache.
pub(crate) fn row_stride(head_dim: usize) -> usize {
    padded(head_dim) + LANES
}

/// The distinct tiles of keys that the query tiles of a chunk visit. A tile is known by its first key.
pub(crate) struct KeyTiles {
    of_row: Vec<Vec<Range<u32>>>,
    /// Tiles of all (row, key head), in this order.
    slots: Vec<(usize, usize, Range<u32>)>,
    /// First slot of each row.
    first: Vec<usize>,
}

impl KeyTiles {
    pub fn new(tiles: &[QueryTile], shape: Shape) -> Self {
        let mut of_row = vec![Vec::new(); shape.batch];
        for tile in tiles {
            of_row[tile.row as usize].extend(tile.runs.iter().flat_map(KeyRun::tiles).map(|(keys, _)| keys));
        }
        let (mut slots, mut first) = (Vec::new(), Vec::new());
        for (row, tiles) in of_row.iter_mut().enumerate() {
            tiles.sort_unstable_by_key(|keys| keys.start);
            tiles.dedup();
            first.push(slots.len());
            slots.extend((0..shape.key_heads).flat_map(|head| tiles.iter().map(move |keys| (row, head, keys.clone()))));
        }
        Self { of_row, slots, first }
    }

    fn slot(&self, row: usize, head: usize, first_key: u32) -> usize {
        let tiles = &self.of_row[row];
        let tile = tiles.partition_point(|keys| keys.start < first_key);
        self.first[row] + head * tiles.len() + tile
    }

    fn fill<T: Copy + Default + Send + Sync>(
        &self,
        length: usize,
        fill: impl Fn(usize, usize, Range<usize>, &mut [T]) + Sync,
    ) -> Aligned<T> {
        let mut data = Aligned::zeros(self.slots.len() * length);
        data.par_chunks_mut(length.max(1)).zip(&self.slots).for_each(|(out, (row, head, keys))| {
            fill(*row, *head, keys.start as usize..keys.end as usize, out);
        });
        data
    }
}

/// Keys (or values) as right operands of sums over keys: for each tile, panels of `[terms of KEY_BLOCK keys, Dp]`.
pub(crate) struct Rows<A: Arithmetic> {
    data: Aligned<A::Term>,
    width: usize,
}

impl<A: Arithmetic> Rows<A> {
    pub fn new(x: &Heads<A::Source>, tiles: &KeyTiles, shape: Shape) -> Self {
        let width = padded(shape.head_dim);
        let data = tiles.fill(terms::<A>(KEY_BLOCK) * width, |row, head, keys, out| {
            pack_rows::<A>(keys.map(|key| x.token(row, head, key)), terms::<A>(KEY_BLOCK), width, out);
        });
        Self { data, width }
    }

    pub fn tile(&self, tiles: &KeyTiles, row: usize, head: usize, first_key: u32) -> Panels<'_, A::Term> {
        let rows = terms::<A>(KEY_BLOCK);
        let start = tiles.slot(row, head, first_key) * rows * self.width;
        Panels { data: &self.data[start..start + rows * self.width], rows, columns: self.width }
    }
}

/// Keys (or values) as right operands of sums over the head: for each tile, panels of `[terms of D, KEY_BLOCK]`, 0
/// beyond the last key.
pub(crate) struct Columns<A: Arithmetic> {
    data: Aligned<A::Term>,
    terms: usize,
}

impl<A: Arithmetic> Columns<A> {
    pub fn new(x: &Heads<A::Source>, tiles: &KeyTiles, shape: Shape) -> Self {
        let terms = terms::<A>(shape.head_dim);
        let data = tiles.fill(terms * KEY_BLOCK, |row, head, keys, out| {
            let mut lanes = vec![A::Term::default(); LANES * terms];
            for first in (0..keys.len()).step_by(LANES) {
                let count = LANES.min(keys.len() - first);
                for (lane, line) in lanes.chunks_mut(terms).take(count).enumerate() {
                    A::token_terms(x.token(row, head, keys.start + first + lane), line);
                }
                for i in 0..terms {
                    let start = panel_index::<A::Term>(terms, KEY_BLOCK, i, first);
                    for (lane, out) in out[start..start + count].iter_mut().enumerate() {
                        *out = lanes[lane * terms + i];
                    }
                }
            }
        });
        Self { data, terms }
    }

    pub fn tile(&self, tiles: &KeyTiles, row: usize, head: usize, first_key: u32) -> Panels<'_, A::Term> {
        let length = self.terms * KEY_BLOCK;
        let start = tiles.slot(row, head, first_key) * length;
        Panels { data: &self.data[start..start + length], rows: self.terms, columns: KEY_BLOCK }
    }
}
