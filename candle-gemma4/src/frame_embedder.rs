//! Audio without a tower (unified models): every frame of raw samples goes through a norm and a projection.

use candle_core::Tensor;

use crate::config::{Config, FrameEmbedderConfig};
use crate::names;
use candle_cp_layers::{Error, Features, Linear, Result, RmsNorm, Tap, Weights, read_frame_mask};

/// A norm without weight and a projection.
#[derive(Debug, Clone)]
pub(crate) struct FrameEmbedder {
    norm: RmsNorm,
    projection: Linear,
    width: usize,
}

impl FrameEmbedder {
    pub(crate) fn new(config: &Config, shape: &FrameEmbedderConfig, weights: &Weights) -> Result<Self> {
        let projection = Linear::load(weights, names::AUDIO_PROJECTION, [config.text.hidden_size, shape.width])?;
        let norm = RmsNorm::new(None, shape.rms_norm_eps);
        Ok(Self { norm, projection, width: shape.width })
    }

    /// `input_features [clips, frames, samples]`, `input_features_mask [clips, frames]` with 1 for real frames and 0 for
    /// padding: one soft token per real frame.
    pub(crate) fn forward(&self, input_features: &Tensor, mask: &Tensor, tap: &mut dyn Tap) -> Result<Features> {
        let (clips, frames) = match *input_features.dims() {
            [clips, frames, samples] if samples == self.width && frames > 0 => (clips, frames),
            ref dims => {
                return Err(Error::Input {
                    name: "input_features",
                    found: format!("{dims:?}"),
                    expected: format!("[clips, frames, {}] (audio_config.audio_embed_dim)", self.width),
                });
            }
        };
        let is_real = read_frame_mask(mask, [clips, frames])?;
        let frames_cfs = input_features.to_dtype(self.projection.weight_oi.dtype())?;
        let features_cfh = self.projection.forward(&self.norm.forward(&frames_cfs)?)?;
        tap.record("audio.features", &features_cfh)?;
        Features::of_real(&features_cfh, &is_real)
    }
}
