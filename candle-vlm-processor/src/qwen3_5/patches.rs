//! Pictures cut into patches as Qwen 3.5 takes them.

use super::grid::block_order;
use super::settings::Qwen3_5ImageSettings;
use crate::patches::{ImagePatches, levels};
use crate::picture::Picture;

impl Qwen3_5ImageSettings {
    /// The patches of a picture whose sides are multiples of `patch_size * merge_size`, each flattened as
    /// (channel, time, row, column), the patches of a soft token side by side.
    pub(super) fn cut(&self, picture: &Picture) -> ImagePatches {
        let (height, width, side) = (picture.height(), picture.width(), self.patch_size);
        let grid_thw = [1, height / side, width / side];
        let patches = grid_thw[1] * grid_thw[2];
        let patch_dim = 3 * self.temporal_patch_size * side * side;
        let levels = levels(self.rescale_factor, self.normalize.as_ref());
        let mut pixels = Vec::with_capacity(patches * patch_dim);
        let mut positions = Vec::with_capacity(patches);
        for (y, x) in block_order(grid_thw[1], grid_thw[2], self.merge_size) {
            positions.push([x as i64, y as i64]);
            for (channel, levels) in levels.iter().enumerate() {
                let first = pixels.len();
                for row in y * side..(y + 1) * side {
                    let start = (row * width + x * side) * 3;
                    let samples = picture.rgb_hwc()[start..start + side * 3].iter().skip(channel).step_by(3);
                    pixels.extend(samples.map(|&sample| levels[usize::from(sample)]));
                }
                for _ in 1..self.temporal_patch_size {
                    pixels.extend_from_within(first..first + side * side);
                }
            }
        }
        let soft_tokens = patches / self.merge_size.pow(2);
        ImagePatches { pixels, positions, patches, patch_dim, grid_thw, soft_tokens, resized: (height, width) }
    }
}
