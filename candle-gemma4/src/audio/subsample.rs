//! Two convolutions with stride 2 that leave a quarter of the frames and of the frequencies.

use candle_core::{D, Result, Tensor};

use super::names::SUBSAMPLE;
use crate::config::AudioConfig;
use candle_cp_layers::{Linear, Weights, wide};

/// From a spectrogram to the tower's width.
#[derive(Debug, Clone)]
pub(super) struct Subsample {
    layers: [ConvLayer; 2],
    projection: Linear,
}

impl Subsample {
    pub(super) fn new(audio: &AudioConfig, weights: &Weights) -> candle_cp_layers::Result<Self> {
        let [first, second] = audio.subsampling_conv_channels;
        let layer = |index: usize, outputs: usize, inputs: usize| -> candle_cp_layers::Result<ConvLayer> {
            let prefix = format!("{SUBSAMPLE}.layer{index}");
            Ok(ConvLayer {
                kernel_oi33: weights.get(&format!("{prefix}.conv.weight"), &[outputs, inputs, 3, 3])?,
                norm_weight: weights.get(&format!("{prefix}.norm.weight"), &[outputs])?,
                eps: audio.rms_norm_eps,
            })
        };
        let name = format!("{SUBSAMPLE}.input_proj_linear.weight");
        let projection = Linear::load(weights, &name, [audio.hidden_size, audio.subsampled_mels() * second])?;
        Ok(Self { layers: [layer(0, first, 1)?, layer(1, second, first)?], projection })
    }

    /// `[clips, frames, mels]` to `[clips, frames / 4, width]`, quarters rounded up. `is_real [clips][frames]`:
    /// frames of padding are set to 0 before each convolution.
    pub(super) fn forward(&self, features_btf: &Tensor, is_real: &[Vec<bool>]) -> Result<Tensor> {
        let mut x_btfc = features_btf.to_dtype(self.projection.weight_oi.dtype())?.unsqueeze(3)?;
        let mut is_real = is_real.to_vec();
        for layer in &self.layers {
            x_btfc = layer.forward(&x_btfc.broadcast_mul(&mask_like(&x_btfc, &is_real)?)?)?;
            is_real = every_second(&is_real);
        }
        self.projection.forward(&x_btfc.flatten_from(2)?)
    }
}

/// Of the frames that a convolution leaves, those that stand for real ones.
pub(super) fn every_second(is_real: &[Vec<bool>]) -> Vec<Vec<bool>> {
    is_real.iter().map(|frames| frames.iter().copied().step_by(2).collect()).collect()
}

/// `[clips, frames, 1, 1]`, 1 or 0.
fn mask_like(x_btfc: &Tensor, is_real: &[Vec<bool>]) -> Result<Tensor> {
    let values = is_real.iter().flatten().map(|&real| f32::from(u8::from(real)));
    let (clips, frames, ..) = x_btfc.dims4()?;
    Tensor::from_iter(values, x_btfc.device())?.to_dtype(x_btfc.dtype())?.reshape((clips, frames, 1, 1))
}

/// A 3 x 3 convolution with stride 2 and a border of zeros, a layer norm over the channels, and ReLU.
#[derive(Debug, Clone)]
struct ConvLayer {
    kernel_oi33: Tensor,
    norm_weight: Tensor,
    eps: f64,
}

impl ConvLayer {
    fn forward(&self, x_btfc: &Tensor) -> Result<Tensor> {
        self.norm(&convolve(x_btfc, &self.kernel_oi33)?)?.relu()
    }

    fn norm(&self, x: &Tensor) -> Result<Tensor> {
        let dtype = wide(x.dtype());
        let x_wide = x.to_dtype(dtype)?;
        let centred = x_wide.broadcast_sub(&x_wide.mean_keepdim(D::Minus1)?)?;
        let variance = (centred.sqr()?.mean_keepdim(D::Minus1)? + self.eps)?;
        let normed = centred.broadcast_mul(&variance.powf(-0.5)?)?;
        normed.broadcast_mul(&self.norm_weight.to_dtype(dtype)?)?.to_dtype(x.dtype())
    }
}

/// One matrix product over patches that are put together first: the gradient of Candle's strided convolution fails for
/// even sizes, and its channels come first where the norm needs them last.
fn convolve(x_btfc: &Tensor, kernel_oi33: &Tensor) -> Result<Tensor> {
    let (batch, frames, mels, channels) = x_btfc.dims4()?;
    let (frames_out, mels_out) = (frames.div_ceil(2), mels.div_ceil(2));
    let width = 3 * channels;
    let along_mels = Tensor::cat(&taps(&x_btfc.reshape((batch * frames, mels, channels))?)?, 2)?;
    let rows = along_mels.reshape((batch, frames, mels_out * width))?;
    let patch = |tap: &Tensor| tap.reshape((batch, frames_out, mels_out, width));
    let patches = taps(&rows)?.iter().map(patch).collect::<Result<Vec<_>>>()?;
    let patches = Tensor::cat(&patches, 3)?;
    let outputs = kernel_oi33.dim(0)?;
    // Patches run over frames, then frequencies, then channels.
    let weight_oi = kernel_oi33.permute((0, 2, 3, 1))?.reshape((outputs, 3 * width))?;
    Linear::plain(weight_oi).forward(&patches)
}

/// `[rows, n, width]`: what each of the three taps of a kernel sees at every second place, `[rows, n / 2, width]` (n
/// rounded up), with a zero before the first and after the last place.
fn taps(x_rnw: &Tensor) -> Result<[Tensor; 3]> {
    let (rows, n, width) = x_rnw.dims3()?;
    let places = n.div_ceil(2);
    let padded = x_rnw.pad_with_zeros(1, 1, 2 * places + 1 - n)?.reshape((rows, places + 1, 2, width))?;
    let [even, odd] = [padded.narrow(2, 0, 1)?.squeeze(2)?, padded.narrow(2, 1, 1)?.squeeze(2)?];
    Ok([even.narrow(1, 0, places)?, odd.narrow(1, 0, places)?, even.narrow(1, 1, places)?])
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Var};

    use super::*;
    use candle_cp_layers::testing::{assert_close, random};

    #[test]
    fn convolutions_agree_with_those_of_candle() -> Result<()> {
        for (frames, mels, channels) in [(7, 8, 1), (6, 5, 3), (1, 1, 2), (2, 3, 4)] {
            let x = Var::from_tensor(&random(&[2, frames, mels, channels], DType::F64, 1)?)?;
            let kernel = Var::from_tensor(&random(&[5, channels, 3, 3], DType::F64, 2)?)?;
            let found = convolve(&x, &kernel)?;
            // Candle's gradient of a strided convolution fails for an even number of places: one more zero is added.
            let odd = x.pad_with_zeros(1, 0, 1 - frames % 2)?.pad_with_zeros(2, 0, 1 - mels % 2)?;
            let plain = odd.permute((0, 3, 1, 2))?.conv2d(&kernel, 1, 2, 1, 1)?.permute((0, 2, 3, 1))?;
            let plain = plain.narrow(1, 0, frames.div_ceil(2))?.narrow(2, 0, mels.div_ceil(2))?;
            assert_close("y", &found, &plain, 1e-12)?;
            let grad = random(found.dims(), DType::F64, 3)?;
            let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
            let (found, plain) = (gradients(&found)?, gradients(&plain)?);
            assert_close("dx", found.get(&x).unwrap(), plain.get(&x).unwrap(), 1e-12)?;
            assert_close("dk", found.get(&kernel).unwrap(), plain.get(&kernel).unwrap(), 1e-12)?;
        }
        Ok(())
    }
}
