//! The gated delta net of linear attention layers.

use candle_cp_layers::{Fields, Result};

/// Sizes of the gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetConfig {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values: a multiple of `key_heads`.
    pub value_heads: usize,
    /// Size of a query or key head.
    pub key_dim: usize,
    /// Size of a value head.
    pub value_dim: usize,
    /// Taps of the convolution before the rule: a token meets itself and `kernel - 1` tokens before it.
    pub kernel: usize,
}

/// Fields that a model with such layers needs.
pub(super) const REQUIRED: [&str; 5] = [
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
];

impl DeltaNetConfig {
    /// Reads the `linear_*` fields of the text model.
    pub(super) fn read(fields: &Fields) -> Result<Self> {
        let config = Self {
            key_heads: fields.size("linear_num_key_heads")?,
            value_heads: fields.size("linear_num_value_heads")?,
            key_dim: fields.size("linear_key_head_dim")?,
            value_dim: fields.size("linear_value_head_dim")?,
            kernel: fields.size("linear_conv_kernel_dim")?,
        };
        if !config.value_heads.is_multiple_of(config.key_heads) {
            let reason = format!("must be a multiple of linear_num_key_heads {}", config.key_heads);
            return Err(fields.refuse("linear_num_value_heads", reason));
        }
        Ok(config)
    }

    /// Numbers of a token's values.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys and values of all heads.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }
}
