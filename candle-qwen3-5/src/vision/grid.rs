//! The patches of images as numbers: their order, places, and weights on the learned grid of positions.
//!
//! Patches come frame by frame; within a frame in squares of `merge` x `merge` patches, squares row by row, and the patches
//! of a square row by row. So the patches of a soft token are neighbours.

use candle_core::{DType, Device, Tensor};
use candle_cp_layers::{Error, Result};

/// The grid of one image or clip, in patches. Height and width are multiples of the merge size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Patches along time; 1 for a picture.
    pub frames: usize,
    /// Rows of patches.
    pub height: usize,
    /// Columns of patches.
    pub width: usize,
}

impl Grid {
    /// Patches of a frame.
    pub fn per_frame(&self) -> usize {
        self.height * self.width
    }

    /// Patches of all frames.
    pub fn patches(&self) -> usize {
        self.frames * self.per_frame()
    }

    /// Row and column of every patch, in order.
    pub fn places(self, merge: usize) -> impl Iterator<Item = (usize, usize)> {
        let Self { frames, height, width } = self;
        let squares = (0..frames)
            .flat_map(move |_| (0..height).step_by(merge))
            .flat_map(move |top| (0..width).step_by(merge).map(move |left| (top, left)));
        squares.flat_map(move |(top, left)| {
            (top..top + merge).flat_map(move |row| (left..left + merge).map(move |column| (row, column)))
        })
    }
}

/// Reads `image_grid_thw [images, 3]` (frames, rows, columns of patches), which has to account for all of `patches`.
///
/// # Errors
/// Another shape ([`Error::Input`]); a grid that is empty or not a multiple of `merge` ([`Error::PatchGrid`]); another
/// number of patches.
pub fn read_grids(image_grid_thw: &Tensor, patches: usize, merge: usize) -> Result<Vec<Grid>> {
    let wrong = |found: String, expected: String| Error::Input { name: "image_grid_thw", found, expected };
    if !matches!(image_grid_thw.dims(), [_, 3]) {
        let expected = "[images, 3]: frames, rows and columns of patches of every image".to_string();
        return Err(wrong(format!("{:?}", image_grid_thw.dims()), expected));
    }
    if !image_grid_thw.dtype().is_int() {
        return Err(wrong(format!("{:?}", image_grid_thw.dtype()), "whole numbers, such as I64".to_string()));
    }
    let rows = match image_grid_thw.dim(0)? {
        0 => Vec::new(),
        _ => image_grid_thw.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec2::<i64>()?,
    };
    let grids = rows.iter().enumerate();
    let grids: Vec<Grid> = grids.map(|(image, row)| read_grid(image, row, patches, merge)).collect::<Result<_>>()?;
    let counted: usize = grids.iter().map(Grid::patches).sum();
    match counted == patches {
        true => Ok(grids),
        false => Err(wrong(
            format!("{} grid(s) of {counted} patches together", grids.len()),
            format!("{patches} patches, as pixel_values has"),
        )),
    }
}

/// One grid of at most `patches`.
fn read_grid(image: usize, row: &[i64], patches: usize, merge: usize) -> Result<Grid> {
    let [frames, height, width] = [row[0], row[1], row[2]];
    let refuse = |reason: String| Err(Error::PatchGrid { image, reason });
    let named = format!("its grid of {frames} x {height} x {width} patches (frames, rows, columns)");
    let sizes = [frames, height, width].map(|size| usize::try_from(size).unwrap_or(0));
    let [frames, height, width] = sizes;
    if sizes.contains(&0) {
        return refuse(format!("{named} has no patch; each must be at least 1"));
    }
    if !height.is_multiple_of(merge) || !width.is_multiple_of(merge) {
        return refuse(format!(
            "{named} cannot be merged: rows and columns must be multiples of vision_config.spatial_merge_size {merge}"
        ));
    }
    // Also keeps the sums of all grids from overflowing.
    match frames.checked_mul(height).and_then(|count| count.checked_mul(width)) {
        Some(count) if count <= patches => Ok(Grid { frames, height, width }),
        _ => refuse(format!("{named} is larger than the {patches} patches of pixel_values")),
    }
}

/// The entries of a learned grid that patches lie between, and how much of each they take.
#[derive(Debug, Clone, PartialEq)]
pub struct Interpolation {
    /// Entries of the flattened grid around each patch: upper left, upper right, lower left, lower right.
    pub entries: [Vec<u32>; 4],
    /// Their weights, which sum up to 1.
    pub weights: [Vec<f64>; 4],
}

impl Interpolation {
    /// Bilinear, of a learned grid with `side` entries in each direction; its corners lie on the corners of every image.
    pub fn new(grids: &[Grid], side: usize, merge: usize) -> Self {
        let mut found = Self { entries: Default::default(), weights: Default::default() };
        for grid in grids {
            let rows: Vec<Between> = (0..grid.height).map(|row| Between::new(row, grid.height, side)).collect();
            let columns: Vec<Between> = (0..grid.width).map(|column| Between::new(column, grid.width, side)).collect();
            for (row, column) in grid.places(merge) {
                let corners =
                    rows[row].ends().into_iter().flat_map(|end| columns[column].ends().map(|other| (end, other)));
                for (corner, ((row, along), (column, across))) in corners.enumerate() {
                    found.entries[corner].push((row * side + column) as u32);
                    found.weights[corner].push(along * across);
                }
            }
        }
        found
    }
}

/// A place on one axis of the learned grid.
struct Between {
    lower: usize,
    upper: usize,
    /// Way from the lower entry to the upper.
    way: f64,
}

impl Between {
    /// `index` of `len` places, spread over `side` entries from the first to the last.
    fn new(index: usize, len: usize, side: usize) -> Self {
        let place = (index * (side - 1)) as f64 / (len - 1).max(1) as f64;
        let lower = place as usize;
        Self { lower, upper: (lower + 1).min(side - 1), way: place - lower as f64 }
    }

    /// Entries and their weights.
    fn ends(&self) -> [(usize, f64); 2] {
        [(self.lower, 1.0 - self.way), (self.upper, self.way)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(grids: &[[i64; 3]], patches: usize) -> Result<Vec<Grid>> {
        read_grids(&Tensor::from_slice(grids.as_flattened(), (grids.len(), 3), &Device::Cpu)?, patches, 2)
    }

    #[test]
    fn patches_come_in_squares() {
        let grid = Grid { frames: 1, height: 2, width: 4 };
        let places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)];
        assert_eq!(grid.places(2).collect::<Vec<_>>(), places);
        let clip = Grid { frames: 2, ..grid };
        assert_eq!(clip.places(2).collect::<Vec<_>>(), [places, places].concat());
        assert_eq!(grid.places(1).take(5).collect::<Vec<_>>(), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]);
        // Rows of squares: the second begins after the whole first.
        let tall = Grid { height: 6, width: 3, frames: 1 };
        assert_eq!(tall.places(3).nth(9), Some((3, 0)));
        assert_eq!(tall.places(3).nth(17), Some((5, 2)));
    }

    #[test]
    fn corners_lie_on_corners_and_weights_are_ways() {
        let grid = Grid { frames: 1, height: 2, width: 4 };
        let found = Interpolation::new(&[grid], 3, 2);
        // Patch 4 is at row 0, column 2, two thirds of the way over two steps: between entries 1 and 2.
        assert_eq!(found.entries.clone().map(|entries| entries[4]), [1, 2, 4, 5]);
        let third = 1.0 / 3.0;
        let expected = [1.0 - third, third, 0.0, 0.0];
        found.weights.clone().map(|weights| weights[4]).iter().zip(expected).for_each(|(weight, expected)| {
            assert!((weight - expected).abs() < 1e-15, "{weight} instead of {expected}");
        });
        // The last patch is on the last entry, all of it.
        assert_eq!(found.entries.map(|entries| entries[7]), [8; 4]);
        assert_eq!(found.weights.map(|weights| weights[7]), [1.0, 0.0, 0.0, 0.0]);
        // A single row or column takes the first entry; a learned grid of one entry is taken everywhere.
        let row = Interpolation::new(&[Grid { frames: 1, height: 1, width: 3 }], 2, 1);
        assert_eq!(
            (row.entries[0].as_slice(), row.weights[1].as_slice()),
            ([0, 0, 1].as_slice(), [0.0, 0.5, 0.0].as_slice())
        );
        assert!(Interpolation::new(&[grid], 1, 2).entries.iter().flatten().all(|&entry| entry == 0));
    }

    #[test]
    fn grids_that_do_not_fit_are_refused() {
        assert_eq!(read(&[[1, 2, 4], [2, 2, 2]], 16).unwrap()[1], Grid { frames: 2, height: 2, width: 2 });
        for (grids, patches, message) in [
            (
                &[[1, 2, 4], [1, 3, 2]][..],
                14,
                "image 1: its grid of 1 x 3 x 2 patches (frames, rows, columns) cannot be",
            ),
            (&[[1, 2, 5]], 10, "must be multiples of vision_config.spatial_merge_size 2"),
            (&[[0, 2, 2]], 0, "image 0: its grid of 0 x 2 x 2 patches (frames, rows, columns) has no patch"),
            (&[[1, -2, 2]], 4, "1 x -2 x 2"),
            (&[[1, 2, 2]], 8, "found 1 grid(s) of 4 patches together; expected 8 patches, as pixel_values has"),
            (&[[1, 4, 4]], 8, "larger than the 8 patches of pixel_values"),
            (&[[1 << 62, 1 << 62, 2]], 8, "larger than the 8 patches of pixel_values"),
        ] {
            let error = read(grids, patches).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let flat = read_grids(&Tensor::new(&[1i64, 2, 2], &Device::Cpu).unwrap(), 4, 2).unwrap_err().to_string();
        assert!(flat.starts_with("input image_grid_thw: found [3]; expected [images, 3]"), "{flat}");
        let floats = read_grids(&Tensor::new(&[[1f32, 2.0, 2.0]], &Device::Cpu).unwrap(), 4, 2).unwrap_err();
        assert!(floats.to_string().contains("found F32"), "{floats}");
    }
}
