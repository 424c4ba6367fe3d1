//! The grid of a picture's patches, and the order in which they stand.

use crate::error::{Error, Result};

/// `(row, column)` of every patch: soft token by soft token, each a square of `merge` x `merge` patches; row by row
/// inside a square and from square to square. Both sides are multiples of `merge`.
pub(super) fn block_order(height: usize, width: usize, merge: usize) -> impl Iterator<Item = (usize, usize)> {
    let squares = (0..height / merge).flat_map(move |row| (0..width / merge).map(move |column| (row, column)));
    squares.flat_map(move |(square_row, square_column)| {
        let inside = (0..merge).flat_map(move |row| (0..merge).map(move |column| (row, column)));
        inside.map(move |(row, column)| (square_row * merge + row, square_column * merge + column))
    })
}

/// Fails on grids that no picture can have.
pub(super) fn check(grids_thw: &[[usize; 3]], merge: usize) -> Result<()> {
    for (index, &grid) in grids_thw.iter().enumerate() {
        let fault = |reason: String| Err(Error::Grid { index: index + 1, grid, reason });
        let [time, height, width] = grid;
        if time != 1 {
            return fault("a picture has 1 patch along time, and videos are not supported".into());
        }
        if merge == 0 {
            return fault("the merge size is 0; it is spatial_merge_size of the model, at least 1".into());
        }
        if height == 0 || width == 0 || height % merge != 0 || width % merge != 0 {
            return fault(format!("height and width must be multiples of the merge size {merge}, and not 0"));
        }
        if height.checked_mul(width).is_none_or(|patches| patches > u32::MAX as usize) {
            return fault("it has more patches than 32 bits can count".into());
        }
    }
    Ok(())
}
