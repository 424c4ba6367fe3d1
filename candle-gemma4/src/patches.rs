//! What the positions of an image's patches say: which are padding, and which are pooled into which soft token.

use candle_core::{DType, Device, Tensor};

use crate::config::VisionConfig;
use candle_cp_layers::{Error, Result};

/// The position pairs of one image that stand for padding.
const PADDING: (i64, i64) = (-1, -1);

/// The patches of a batch of images.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Patches {
    /// Patches per image, padding included.
    pub(crate) per_image: usize,
    /// `(x, y)` of every patch, image by image; `None` for padding.
    pub(crate) positions: Vec<Option<(u32, u32)>>,
    /// For every soft token in order, the places (in `positions`) of its patches, `pooling_kernel_size^2` each.
    pub(crate) pooled: Vec<u32>,
    /// Soft tokens of each image.
    pub(crate) soft_tokens: Vec<usize>,
}

impl Patches {
    /// Reads `image_position_ids [images, patches, 2]`.
    pub(crate) fn read(position_ids: &Tensor, vision: &VisionConfig) -> Result<Self> {
        let (_, per_image, _) = position_ids.dims3()?;
        let limit = vision.position_embedding_size;
        let positions = read_positions(position_ids, limit, "vision_config.position_embedding_size")?;
        let (mut pooled, mut soft_tokens) = (Vec::new(), Vec::new());
        for (image, of_image) in positions.chunks(per_image).enumerate() {
            let cells = pool(of_image, vision.pooling_kernel_size);
            let cells = cells.map_err(|reason| Error::PatchGrid { image, reason })?;
            let first = (image * per_image) as u32;
            pooled.extend(cells.iter().flatten().map(|place| first + place));
            soft_tokens.push(cells.len());
        }
        Ok(Self { per_image, positions, pooled, soft_tokens })
    }
}

/// Images and patches per image, if `pixel_values [images, patches, patch_len]` and `position_ids [images, patches, 2]` fit
/// the model and each other. A patch is a square of pixels with this `side`.
pub(crate) fn check_shapes(
    pixel_values: &Tensor,
    position_ids: &Tensor,
    patch_len: usize,
    side: usize,
) -> Result<(usize, usize)> {
    let wrong = |name, found: &Tensor, expected| Error::Input { name, found: format!("{:?}", found.dims()), expected };
    let (images, patches) = match *pixel_values.dims() {
        [images, patches, len] if len == patch_len && patches > 0 => (images, patches),
        _ => {
            let expected = format!("[images, patches, {patch_len}] (3 colours, patch_size {side})");
            return Err(wrong("pixel_values", pixel_values, expected));
        }
    };
    let expected = [images, patches, 2];
    match position_ids.dims() == expected {
        true => Ok((images, patches)),
        false => Err(wrong("image_position_ids", position_ids, format!("{expected:?}, to fit pixel_values"))),
    }
}

/// `(x, y)` of every patch of `[images, patches, 2]`, image by image; `None` for padding. `setting` is the field of the
/// configuration that `limit` is from.
pub(crate) fn read_positions(position_ids: &Tensor, limit: usize, setting: &str) -> Result<Vec<Option<(u32, u32)>>> {
    let (_, per_image, _) = position_ids.dims3()?;
    let flat = position_ids.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    let inside = |at: i64| u32::try_from(at).ok().filter(|&at| (at as usize) < limit);
    let read = |(index, pair): (usize, &[i64])| match (pair[0], pair[1]) {
        PADDING => Ok(None),
        (x, y) => match (inside(x), inside(y)) {
            (Some(x), Some(y)) => Ok(Some((x, y))),
            _ => Err(Error::PatchGrid {
                image: index / per_image,
                reason: format!(
                    "patch {} is at ({x}, {y}); both must be from 0 to {} ({setting}), or -1 for padding",
                    index % per_image,
                    limit - 1
                ),
            }),
        },
    };
    flat.chunks_exact(2).enumerate().map(read).collect()
}

/// Places of the patches of every `k` x `k` cell, cells row by row. The patches must fill a grid, each place once.
///
/// DIFFERENCE: with `k` = 1 Hugging Face's pooler leaves its mask of padding as it is, so that the padding becomes the
/// features and the patches are dropped. No released model has it; here every patch is a cell.
fn pool(positions: &[Option<(u32, u32)>], k: usize) -> std::result::Result<Vec<Vec<u32>>, String> {
    let real = || positions.iter().flatten();
    let width = real().map(|&(x, _)| x as usize + 1).max().unwrap_or(0);
    let height = real().map(|&(_, y)| y as usize + 1).max().unwrap_or(0);
    if !width.is_multiple_of(k) || !height.is_multiple_of(k) {
        return Err(format!(
            "its grid of {width} x {height} patches is not a multiple of vision_config.pooling_kernel_size {k}"
        ));
    }
    let count = real().count();
    if count != width.saturating_mul(height) {
        return Err(format!("its grid of {width} x {height} patches is made of {count} patches"));
    }
    let mut seen = vec![false; count];
    let mut cells = vec![Vec::with_capacity(k * k); (width / k) * (height / k)];
    for (place, position) in positions.iter().enumerate() {
        if let Some((x, y)) = position.map(|(x, y)| (x as usize, y as usize)) {
            if std::mem::replace(&mut seen[x + width * y], true) {
                return Err(format!("two of its patches are at ({x}, {y})"));
            }
            cells[x / k + (width / k) * (y / k)].push(place as u32);
        }
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(width: u32, height: u32) -> Vec<Option<(u32, u32)>> {
        (0..height).flat_map(|y| (0..width).map(move |x| Some((x, y)))).collect()
    }

    #[test]
    fn cells_are_squares_row_by_row() {
        let cells = pool(&grid(4, 2), 2).unwrap();
        assert_eq!(cells, [vec![0, 1, 4, 5], vec![2, 3, 6, 7]]);
        let mut padded = grid(2, 2);
        padded.insert(1, None);
        assert_eq!(pool(&padded, 2).unwrap(), [vec![0, 2, 3, 4]]);
        assert_eq!(pool(&[None, None], 2).unwrap(), Vec::<Vec<u32>>::new());
        assert_eq!(pool(&grid(2, 2), 1).unwrap(), [[0], [1], [2], [3]]);
    }

    #[test]
    fn grids_that_cannot_be_pooled_are_refused() {
        assert!(pool(&grid(3, 2), 2).unwrap_err().contains("3 x 2 patches is not a multiple"));
        let mut hole = grid(4, 2);
        hole[2] = None;
        assert!(pool(&hole, 2).unwrap_err().contains("its grid of 4 x 2 patches is made of 7 patches"));
        let mut double = grid(2, 2);
        double[1] = Some((0, 0));
        assert!(pool(&double, 2).unwrap_err().contains("two of its patches are at (0, 0)"));
    }
}
