//! Pictures cut into patches: the result, and what all families do with the samples.

/// The patches of one picture.
#[derive(Clone, Debug, PartialEq)]
pub struct ImagePatches {
    /// `[patches, patch_dim]` samples, each patch flattened as its family does it: (row, column, channel) for Gemma 4,
    /// (channel, time, row, column) for Qwen 3.5. 0 where padded.
    pub pixels: Vec<f32>,
    /// `[patches, 2]`: (x, y) of each patch in the grid; (-1, -1) where padded.
    pub positions: Vec<[i64; 2]>,
    /// Patches, padding among them: the first dimension of both.
    pub patches: usize,
    /// Samples of a patch: the last dimension of `pixels`.
    pub patch_dim: usize,
    /// Patches along time, height and width, without padding (`image_grid_thw`).
    pub grid_thw: [usize; 3],
    /// Soft tokens that the picture takes in the sequence.
    pub soft_tokens: usize,
    /// Height and width after resizing, in pixels.
    pub resized: (usize, usize),
}

impl ImagePatches {
    /// Appends patches of zeros at no position.
    pub(crate) fn pad(&mut self, patches: usize) {
        self.patches = patches;
        self.pixels.resize(patches * self.patch_dim, 0.0);
        self.positions.resize(patches, [-1, -1]);
    }
}

/// The value of each 8-bit level in each channel: times a factor, then minus mean and by standard deviation.
pub(crate) fn levels(rescale_factor: f64, normalize: Option<&([f32; 3], [f32; 3])>) -> [[f32; 256]; 3] {
    let rescaled: [f32; 256] = std::array::from_fn(|level| (level as f64 * rescale_factor) as f32);
    match normalize {
        None => [rescaled; 3],
        Some((mean, std)) => std::array::from_fn(|c| rescaled.map(|value| (value - mean[c]) / std[c])),
    }
}
