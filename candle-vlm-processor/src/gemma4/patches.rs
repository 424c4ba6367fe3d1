//! Pictures cut into patches as Gemma 4 takes them.

use super::settings::{Gemma4ImageSettings, PatchLayout};
use crate::patches::{ImagePatches, levels};
use crate::picture::Picture;

impl Gemma4ImageSettings {
    /// Side in pixels of the patches that the model takes.
    pub fn side(&self) -> usize {
        match self.layout {
            PatchLayout::Tower => self.patch_size,
            // A merged patch holds the pixels of its square in raster order, so it is a larger patch of the same picture.
            PatchLayout::Merged => self.patch_size * self.pooling_kernel_size,
        }
    }

    /// The patches of a picture whose sides are multiples of `patch_size * pooling_kernel_size`, without padding.
    pub(super) fn cut(&self, picture: &Picture) -> ImagePatches {
        let (height, width, side) = (picture.height(), picture.width(), self.side());
        let soft_tokens = (height / self.patch_size) * (width / self.patch_size) / self.pooling_kernel_size.pow(2);
        let grid_thw = [1, height / side, width / side];
        let patches = grid_thw[1] * grid_thw[2];
        let patch_dim = side * side * 3;
        let levels = levels(self.rescale_factor, self.normalize.as_ref());
        let mut pixels = Vec::with_capacity(patches * patch_dim);
        let mut positions = Vec::with_capacity(patches);
        for y in 0..height / side {
            for x in 0..width / side {
                positions.push([x as i64, y as i64]);
                for row in y * side..(y + 1) * side {
                    let start = (row * width + x * side) * 3;
                    let samples = picture.rgb_hwc()[start..start + side * 3].chunks_exact(3);
                    pixels.extend(samples.flat_map(|p| [0, 1, 2].map(|c| levels[c][usize::from(p[c])])));
                }
            }
        }
        ImagePatches { pixels, positions, patches, patch_dim, grid_thw, soft_tokens, resized: (height, width) }
    }
}
