//! Pictures cut into patches.

use super::settings::{Gemma4ImageSettings, PatchLayout};
use super::size;
use crate::error::PictureFault;
use crate::picture::Picture;
use crate::resize::resize_bicubic;

/// The patches of one picture; [`Gemma4ImageSettings::patches`] pads them to the most that a picture may have.
#[derive(Clone, Debug, PartialEq)]
pub struct ImagePatches {
    /// `[patches, patch_dim]` samples in 0..1, each patch flattened as (row, column, channel); 0 where padded.
    pub pixels: Vec<f32>,
    /// `[patches, 2]`: (x, y) of each patch in the grid; (-1, -1) where padded.
    pub positions: Vec<[i64; 2]>,
    /// Patches, padding among them: the first dimension of both.
    pub patches: usize,
    /// Samples of a patch: the last dimension of `pixels`.
    pub patch_dim: usize,
    /// Soft tokens that the picture takes in the sequence.
    pub soft_tokens: usize,
    /// Height and width after resizing, in pixels.
    pub resized: (usize, usize),
}

impl Gemma4ImageSettings {
    /// Height and width in pixels that a picture of this size is resized to.
    ///
    /// # Errors
    /// A side is 0, or the rule has no answer for the shape.
    pub fn resized(&self, height: usize, width: usize) -> Result<(usize, usize), PictureFault> {
        if height == 0 || width == 0 {
            return Err(PictureFault::Shape { width, height, reason: "a side is 0".into() });
        }
        size::resized(height, width, self)
    }

    /// Soft tokens that a picture of this size takes.
    ///
    /// # Errors
    /// As [`Self::resized`].
    pub fn soft_tokens(&self, height: usize, width: usize) -> Result<usize, PictureFault> {
        let (height, width) = self.resized(height, width)?;
        Ok((height / self.patch_size) * (width / self.patch_size) / self.pooling_kernel_size.pow(2))
    }

    /// Resizes a picture and cuts it into patches.
    ///
    /// DIFFERENCE: pictures are resized as Pillow does it, for both layouts. transformers prefers torchvision where it
    /// is installed, and has nothing else for the merged layout; its levels differ by 1, and by up to 8 where one side
    /// grows while the other shrinks.
    ///
    /// # Errors
    /// As [`Self::resized`].
    pub fn patches(&self, picture: &Picture) -> Result<ImagePatches, PictureFault> {
        let (height, width) = self.resized(picture.height(), picture.width())?;
        let mut cut = self.cut(&resize_bicubic(picture, width, height));
        cut.patches = match self.layout {
            PatchLayout::Tower => self.max_patches(),
            PatchLayout::Merged => self.max_soft_tokens,
        };
        cut.pixels.resize(cut.patches * cut.patch_dim, 0.0);
        cut.positions.resize(cut.patches, [-1, -1]);
        Ok(cut)
    }

    /// Cuts a picture into patches as it is, without resizing and without padding.
    ///
    /// # Errors
    /// A side is 0 or no multiple of `patch_size * pooling_kernel_size`, or there are more patches than allowed.
    pub fn patches_as_is(&self, picture: &Picture) -> Result<ImagePatches, PictureFault> {
        let (height, width) = (picture.height(), picture.width());
        let refused = |reason: String| PictureFault::Shape { width, height, reason };
        let multiple = self.patch_size * self.pooling_kernel_size;
        if height == 0 || width == 0 || height % multiple != 0 || width % multiple != 0 {
            let reason = format!("both sides must be multiples of {multiple} (patch_size x pooling_kernel_size)");
            return Err(refused(reason));
        }
        if (height / self.patch_size) * (width / self.patch_size) > self.max_patches() {
            return Err(refused(format!("at most {} patches are allowed", self.max_patches())));
        }
        Ok(self.cut(picture))
    }

    /// Side in pixels of the patches that the model takes.
    pub fn side(&self) -> usize {
        match self.layout {
            PatchLayout::Tower => self.patch_size,
            // A merged patch holds the pixels of its square in raster order, so it is a larger patch of the same picture.
            PatchLayout::Merged => self.patch_size * self.pooling_kernel_size,
        }
    }

    /// The patches of a picture whose sides are multiples of `patch_size * pooling_kernel_size`, without padding.
    fn cut(&self, picture: &Picture) -> ImagePatches {
        let (height, width, side) = (picture.height(), picture.width(), self.side());
        let soft_tokens = (height / self.patch_size) * (width / self.patch_size) / self.pooling_kernel_size.pow(2);
        let patches = (height / side) * (width / side);
        let patch_dim = side * side * 3;
        let levels = self.levels();
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
        ImagePatches { pixels, positions, patches, patch_dim, soft_tokens, resized: (height, width) }
    }

    /// The value of each 8-bit level in each channel.
    fn levels(&self) -> [[f32; 256]; 3] {
        let rescaled: [f32; 256] = std::array::from_fn(|level| (level as f64 * self.rescale_factor) as f32);
        match self.normalize {
            None => [rescaled; 3],
            Some((mean, std)) => std::array::from_fn(|c| rescaled.map(|value| (value - mean[c]) / std[c])),
        }
    }
}
