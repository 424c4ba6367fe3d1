//! Where the vision tower's patches stand: for its rope, and for its learned grid of positions.

use super::grid::{self, block_order};
use crate::error::{Error, Result};

/// `[row, column]` of every patch in the grid of its picture, picture after picture, in the order of the patches: what
/// the tower's rope rotates by.
///
/// # Errors
/// A grid that no picture can have: more than 1 along time, or a side that is 0 or no multiple of the merge size.
pub fn patch_positions(grids_thw: &[[usize; 3]], merge_size: usize) -> Result<Vec<[u32; 2]>> {
    grid::check(grids_thw, merge_size)?;
    let of_picture = |&[_, height, width]: &[usize; 3]| block_order(height, width, merge_size);
    Ok(grids_thw.iter().flat_map(of_picture).map(|(row, column)| [row as u32, column as u32]).collect())
}

/// How the learned square grid of positions is read at the patches of pictures: bilinear, the corners of both grids on
/// one another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PositionGrid {
    /// `[patches]`: the four rows of the table (row by row of the square) that a patch mixes: above left, above right,
    /// below left, below right.
    pub indices: Vec<[u32; 4]>,
    /// `[patches]`: their weights, of sum 1.
    pub weights: Vec<[f32; 4]>,
}

impl PositionGrid {
    /// For the patches of pictures, picture after picture, in the order of the patches. `side` is that of the learned
    /// grid, the root of `num_position_embeddings`.
    ///
    /// # Errors
    /// As [`patch_positions`]; a side of 0, or of more than 65,535.
    pub fn new(grids_thw: &[[usize; 3]], merge_size: usize, side: usize) -> Result<Self> {
        grid::check(grids_thw, merge_size)?;
        if side == 0 || side > usize::from(u16::MAX) {
            let reason = format!("the learned grid has a side of {side}; 1 to {} are allowed", u16::MAX);
            return Err(Error::Row { reason });
        }
        let mut result = Self::default();
        for &[_, height, width] in grids_thw {
            let rows: Vec<_> = (0..height).map(|row| Tap::new(row, height, side)).collect();
            let columns: Vec<_> = (0..width).map(|column| Tap::new(column, width, side)).collect();
            for (row, column) in block_order(height, width, merge_size) {
                let (row, column) = (&rows[row], &columns[column]);
                let pairs = [(0, 0), (0, 1), (1, 0), (1, 1)];
                result.indices.push(pairs.map(|(r, c)| row.index[r] * side as u32 + column.index[c]));
                result.weights.push(pairs.map(|(r, c)| row.weight[r] * column.weight[c]));
            }
        }
        Ok(result)
    }
}

/// The two places of one axis of the learned grid that a place of a picture lies between.
struct Tap {
    index: [u32; 2],
    weight: [f32; 2],
}

impl Tap {
    /// In f32 and in the order of transformers, so that the weights are the same bits.
    fn new(place: usize, places: usize, side: usize) -> Self {
        let at = place as f32 * (side - 1) as f32 / (places - 1).max(1) as f32;
        let below = at.floor();
        let index = [below as u32, below as u32 + 1].map(|index| index.min(side as u32 - 1));
        Self { index, weight: [0.0, 1.0].map(|offset| (1.0 - (at - below - offset).abs()).max(0.0)) }
    }
}
