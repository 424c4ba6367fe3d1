//! The audio tower: from spectrograms to features in the width of the text model.

mod attention;
mod layer;
mod names;
mod subsample;

use candle_core::Tensor;

use self::attention::Window;
use self::layer::AudioLayer;
pub(crate) use self::names::tensors;
use self::subsample::{Subsample, every_second};
use crate::config::{AudioConfig, Config};
use crate::names::AUDIO_PROJECTION;
use candle_cp_layers::{Error, Features, Linear, Result, RmsNorm, Tap, Weights, read_frame_mask, record_numbered};

/// The tower and the projection behind it.
#[derive(Debug, Clone)]
pub(crate) struct AudioTower {
    subsample: Subsample,
    layers: Vec<AudioLayer>,
    output: Linear,
    projection_norm: RmsNorm,
    projection: Linear,
    /// `[positions, width]`, a constant.
    positions_pw: Tensor,
    audio: AudioConfig,
}

impl AudioTower {
    pub(crate) fn new(config: &Config, audio: &AudioConfig, weights: &Weights) -> Result<Self> {
        let (hidden, outputs, text_hidden) = (audio.hidden_size, audio.output_proj_dims, config.text.hidden_size);
        let layers = 0..audio.num_hidden_layers;
        let output = Linear {
            bias_o: Some(weights.get(&format!("{}.bias", names::OUTPUT), &[outputs])?),
            ..Linear::load(weights, &format!("{}.weight", names::OUTPUT), [outputs, hidden])?
        };
        let table_oi = &output.weight_oi;
        Ok(Self {
            subsample: Subsample::new(audio, weights)?,
            layers: layers.map(|index| AudioLayer::new(&names::layer(index), audio, weights)).collect::<Result<_>>()?,
            positions_pw: Window::new(audio).position_table(hidden, table_oi.dtype(), table_oi.device())?,
            output,
            projection_norm: RmsNorm::new(None, audio.rms_norm_eps),
            projection: Linear::load(weights, AUDIO_PROJECTION, [text_hidden, outputs])?,
            audio: audio.clone(),
        })
    }

    /// `input_features [clips, frames, mels]`, `input_features_mask [clips, frames]` with 1 for real frames and 0 for
    /// padding. One soft token stands for four frames; those whose first frame is padding are dropped.
    pub(crate) fn forward(
        &self,
        input_features: &Tensor,
        input_features_mask: &Tensor,
        tap: &mut dyn Tap,
    ) -> Result<Features> {
        let is_real = self.check(input_features, input_features_mask)?;
        let mut x_btw = self.subsample.forward(input_features, &is_real)?;
        tap.record("audio.subsample", &x_btw)?;

        let is_real = every_second(&every_second(&is_real));
        let mask = Window::new(&self.audio).mask(&is_real, x_btw.device())?;
        for (index, layer) in self.layers.iter().enumerate() {
            x_btw = layer.forward(&x_btw, &self.positions_pw, &mask)?;
            record_numbered(tap, "audio.layer", index, &x_btw)?;
        }
        let out_bto = self.output.forward(&x_btw)?;
        tap.record("audio.tower_out", &out_bto)?;
        let features_bth = self.projection.forward(&self.projection_norm.forward(&out_bto)?)?;
        tap.record("audio.features", &features_bth)?;

        Features::of_real(&features_bth, &is_real)
    }

    /// The mask's values, if the shapes fit the tower and each other.
    fn check(&self, input_features: &Tensor, input_features_mask: &Tensor) -> Result<Vec<Vec<bool>>> {
        let mels = self.audio.subsampled_mels();
        let (clips, frames) = match *input_features.dims() {
            [clips, frames, found] if frames > 0 && AudioConfig::subsampled(found) == mels => (clips, frames),
            _ => {
                return Err(Error::Input {
                    name: "input_features",
                    found: format!("{:?}", input_features.dims()),
                    expected: format!(
                        "[clips, frames, mels] with {} to {} mels (a quarter of them must be a quarter of \
                         audio_config.subsampling_conv_channels[0], {})",
                        4 * mels - 3,
                        4 * mels,
                        self.audio.subsampling_conv_channels[0],
                    ),
                });
            }
        };
        read_frame_mask(input_features_mask, [clips, frames])
    }
}
