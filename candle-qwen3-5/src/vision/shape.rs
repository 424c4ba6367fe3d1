//! What the tower needs to know of the configuration.

use candle_cp_layers::{Activation, Error, Result};

/// Sizes and settings of a vision tower, named as in `vision_config`.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionShape {
    /// Number of blocks.
    pub depth: usize,
    /// Width of a patch between blocks.
    pub hidden_size: usize,
    /// Attention heads of a block.
    pub num_heads: usize,
    /// Width of a block's MLP.
    pub intermediate_size: usize,
    /// What a block's MLP goes through in its middle: `hidden_act`.
    pub activation: Activation,
    /// Side of a patch, in pixels.
    pub patch_size: usize,
    /// Frames in a patch; a still picture is repeated to fill it.
    pub temporal_patch_size: usize,
    /// Side of the square of patches that become one soft token.
    pub spatial_merge_size: usize,
    /// Entries of the learned grid of positions, a square; those past the largest square are not read.
    pub num_position_embeddings: usize,
    /// Width of a soft token: that of the text model.
    pub out_hidden_size: usize,
    /// Colours of a pixel.
    pub in_channels: usize,
    /// Base of the rotary embedding: `rope_parameters.rope_theta`, 10000 if there is none.
    pub rope_theta: f64,
}

impl VisionShape {
    /// Numbers in a patch: colours, frames, rows, columns.
    pub fn patch_len(&self) -> usize {
        self.patch_kernel()[1..].iter().product()
    }

    /// Shape of the convolution over patches.
    pub(super) fn patch_kernel(&self) -> [usize; 5] {
        [self.hidden_size, self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size]
    }

    /// Patches of a soft token.
    pub(super) fn merged_patches(&self) -> usize {
        self.spatial_merge_size * self.spatial_merge_size
    }

    /// Width of the patches of a soft token side by side.
    pub(super) fn merged_len(&self) -> usize {
        self.merged_patches() * self.hidden_size
    }

    pub(super) fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Side of the learned grid of positions.
    pub(super) fn grid_side(&self) -> usize {
        self.num_position_embeddings.isqrt()
    }

    /// Angle per row or column for each of a quarter of a head's dimensions.
    pub(super) fn inverse_frequencies(&self) -> Vec<f64> {
        let of_axis = self.head_dim() / 2;
        (0..of_axis).step_by(2).map(|i| self.rope_theta.powf(-(i as f64) / of_axis as f64)).collect()
    }

    /// # Errors
    /// A size is 0, or heads do not divide the width into multiples of 4.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |field: &str, value: String, reason: String| {
            Err(Error::Config { field: format!("vision_config.{field}"), value, reason })
        };
        for (field, value) in [
            ("hidden_size", self.hidden_size),
            ("num_heads", self.num_heads),
            ("intermediate_size", self.intermediate_size),
            ("patch_size", self.patch_size),
            ("temporal_patch_size", self.temporal_patch_size),
            ("spatial_merge_size", self.spatial_merge_size),
            ("num_position_embeddings", self.num_position_embeddings),
            ("out_hidden_size", self.out_hidden_size),
            ("in_channels", self.in_channels),
        ] {
            if value == 0 {
                return refuse(field, value.to_string(), "must be at least 1".to_string());
            }
        }
        let (hidden, heads) = (self.hidden_size, self.num_heads);
        if !hidden.is_multiple_of(heads) || !self.head_dim().is_multiple_of(4) {
            let reason = format!(
                "must be num_heads ({heads}) times a multiple of 4: a head turns by rows in one half and by columns in \
                 the other, in pairs of dimensions"
            );
            return refuse("hidden_size", hidden.to_string(), reason);
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            let reason = "must be a positive number".to_string();
            return refuse("rope_parameters.rope_theta", self.rope_theta.to_string(), reason);
        }
        Ok(())
    }
}
