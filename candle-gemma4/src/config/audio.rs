//! The audio tower's part of the configuration.

use candle_cp_layers::{Fields, Result};

/// The audio tower.
#[derive(Debug, Clone, PartialEq)]
pub struct AudioConfig {
    /// Width of the tower's residual stream; even.
    pub hidden_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of heads; divides the width.
    pub num_attention_heads: usize,
    /// Channels after the first and the second convolution, each of which halves frames and frequencies. The number
    /// of frequencies after both must be a quarter of the first.
    pub subsampling_conv_channels: [usize; 2],
    /// Frames that one output of the convolution inside a layer sees: its own and those before it.
    pub conv_kernel_size: usize,
    /// Factor of a feed-forward block's output before it is added to its input.
    pub residual_weight: f64,
    /// Frames whose queries are worked on together.
    pub attention_chunk_size: usize,
    /// A chunk reaches back by one frame less than this; a frame sees itself and those before it, this number less
    /// one in total.
    pub attention_context_left: usize,
    /// A chunk reaches this far ahead; a frame sees one later frame less than this number, and none for 0.
    pub attention_context_right: usize,
    /// Soft cap `c` of the scores, `c * tanh(score / c)`.
    pub attention_logit_cap: f64,
    /// Score of a key that is not seen.
    pub attention_invalid_logits_value: f64,
    /// Inputs and outputs of the layers' projections are cut to bounds from the checkpoint.
    pub use_clipped_linears: bool,
    /// Added to the mean square (or the variance) in the norms of the convolutions and before the projection to the
    /// text model.
    pub rms_norm_eps: f64,
    /// Values of the residual stream are cut to this size in several places, forward, in spite of the name.
    pub gradient_clipping: f64,
    /// Width of the tower's output.
    pub output_proj_dims: usize,
    /// Standard deviation that fresh matrices have at least.
    pub initializer_range: f64,
}

const REQUIRED: [&str; 10] = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "subsampling_conv_channels",
    "conv_kernel_size",
    "attention_chunk_size",
    "attention_context_left",
    "attention_context_right",
    "rms_norm_eps",
    "output_proj_dims",
];

impl AudioConfig {
    /// Names of the required fields that are absent.
    pub(super) fn missing(fields: &Fields) -> Vec<String> {
        fields.missing(&REQUIRED)
    }

    /// Reads and checks `audio_config`.
    pub(super) fn read(fields: &Fields) -> Result<Self> {
        fields.only("model_type", "gemma4_audio")?;
        fields.only("hidden_act", "silu")?;
        let config = Self {
            hidden_size: fields.size("hidden_size")?,
            num_hidden_layers: fields.listed("num_hidden_layers")?,
            num_attention_heads: fields.size("num_attention_heads")?,
            subsampling_conv_channels: fields.sizes("subsampling_conv_channels")?,
            conv_kernel_size: fields.size("conv_kernel_size")?,
            residual_weight: fields.positive_if_present("residual_weight")?.unwrap_or(0.5),
            attention_chunk_size: fields.size("attention_chunk_size")?,
            attention_context_left: fields.size("attention_context_left")?,
            attention_context_right: fields.count("attention_context_right")?,
            attention_logit_cap: fields.positive_if_present("attention_logit_cap")?.unwrap_or(50.0),
            attention_invalid_logits_value: fields.number("attention_invalid_logits_value")?.unwrap_or(-1e9),
            use_clipped_linears: fields.flag("use_clipped_linears", true)?,
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            gradient_clipping: fields.positive_if_present("gradient_clipping")?.unwrap_or(1e10),
            output_proj_dims: fields.size("output_proj_dims")?,
            initializer_range: fields.positive_if_present("initializer_range")?.unwrap_or(0.02),
        };
        if !config.hidden_size.is_multiple_of(2) {
            return Err(fields.refuse("hidden_size", "must be even: positions are pairs of sine and cosine"));
        }
        if !config.hidden_size.is_multiple_of(config.num_attention_heads) {
            let reason = format!("must divide hidden_size {}", config.hidden_size);
            return Err(fields.refuse("num_attention_heads", reason));
        }
        if config.subsampling_conv_channels[0] < 4 {
            return Err(fields.refuse("subsampling_conv_channels", "the first must be at least 4"));
        }
        Ok(config)
    }

    /// Size of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Frequencies that are left after both convolutions.
    pub fn subsampled_mels(&self) -> usize {
        self.subsampling_conv_channels[0] / 4
    }

    /// Frames or frequencies that are left of `count` after both convolutions: a quarter, rounded up.
    pub fn subsampled(count: usize) -> usize {
        count.div_ceil(2).div_ceil(2)
    }
}
