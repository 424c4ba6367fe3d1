//! Operands in the order that the micro-kernels read: the keys and values of a chunk once per chunk, the queries of a
//! tile once per tile.

use crate::heads::{Heads, Shape};
use crate::matmul::{LANES, Panels, panel_index};
use crate::real::Real;
use crate::tile::{KEY_BLOCK, KeyRun, QueryTile};
use rayon::prelude::*;
use std::ops::Range;

/// Head size in whole vectors.
pub(crate) fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
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

    fn fill<T: Real>(&self, length: usize, fill: impl Fn(usize, usize, Range<usize>, &mut [T]) + Sync) -> Vec<T> {
        let mut data = vec![T::ZERO; self.slots.len() * length];
        data.par_chunks_mut(length.max(1)).zip(&self.slots).for_each(|(out, (row, head, keys))| {
            fill(*row, *head, keys.start as usize..keys.end as usize, out);
        });
        data
    }
}

/// Tiles of keys (or values), one row per key: `[KEY_BLOCK, Dp]` panels.
pub(crate) struct Rows<T> {
    data: Vec<T>,
    width: usize,
}

impl<T: Real> Rows<T> {
    pub fn new(x: &Heads<T>, tiles: &KeyTiles, shape: Shape) -> Self {
        let width = padded(shape.head_dim);
        let data = tiles.fill(KEY_BLOCK * width, |row, head, keys, out| {
            pack_rows(keys.map(|key| x.token(row, head, key)), KEY_BLOCK, width, out);
        });
        Self { data, width }
    }

    pub fn tile(&self, tiles: &KeyTiles, row: usize, head: usize, first_key: u32) -> Panels<'_, T> {
        let length = KEY_BLOCK * self.width;
        let start = tiles.slot(row, head, first_key) * length;
        Panels { data: &self.data[start..start + length], rows: KEY_BLOCK, columns: self.width }
    }
}

/// Tiles of keys (or values), transposed: `[D, KEY_BLOCK]` panels, 0 beyond the last key.
pub(crate) struct Columns<T> {
    data: Vec<T>,
    head_dim: usize,
}

impl<T: Real> Columns<T> {
    pub fn new(x: &Heads<T>, tiles: &KeyTiles, shape: Shape) -> Self {
        let d = shape.head_dim;
        let data = tiles.fill(d * KEY_BLOCK, |row, head, keys, out| {
            for first in (0..keys.len()).step_by(LANES) {
                let lanes = LANES.min(keys.len() - first);
                let mut tokens = [&[][..]; LANES];
                for (lane, token) in tokens[..lanes].iter_mut().enumerate() {
                    *token = x.token(row, head, keys.start + first + lane);
                }
                for i in 0..d {
                    let start = panel_index(d, KEY_BLOCK, i, first);
                    let out = &mut out[start..start + lanes];
                    out.iter_mut().zip(&tokens).for_each(|(out, token)| *out = token[i]);
                }
            }
        });
        Self { data, head_dim: d }
    }

    pub fn tile(&self, tiles: &KeyTiles, row: usize, head: usize, first_key: u32) -> Panels<'_, T> {
        let length = self.head_dim * KEY_BLOCK;
        let start = tiles.slot(row, head, first_key) * length;
        Panels { data: &self.data[start..start + length], rows: self.head_dim, columns: KEY_BLOCK }
    }
}

/// Writes rows as panels of `[rows, width]`, the first elements of each; the rest of `out` keeps its zeros.
pub(crate) fn pack_rows<'a, T: Real>(lines: impl Iterator<Item = &'a [T]>, rows: usize, width: usize, out: &mut [T]) {
    for (row, line) in lines.enumerate() {
        for (panel, part) in line.chunks(crate::matmul::PANEL).enumerate() {
            let start = panel_index(rows, width, row, panel * crate::matmul::PANEL);
            out[start..start + part.len()].copy_from_slice(part);
        }
    }
}
