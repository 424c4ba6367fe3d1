//! One layer of the audio tower: half a feed-forward step, attention, a convolution over time, and the other half.

use candle_core::{D, DType, Result, Tensor};

use super::attention::LocalAttention;
use crate::config::AudioConfig;
use candle_cp_layers::clip::Interval;
use candle_cp_layers::{Linear, RmsNorm, Weights, wide};

/// The norms of layers and feed-forward blocks add this whatever the configuration says, as in the library.
const LAYER_EPS: f64 = 1e-6;

#[derive(Debug, Clone)]
pub(super) struct AudioLayer {
    first: FeedForward,
    attention: LocalAttention,
    convolution: LightConv,
    second: FeedForward,
    norm_before_attention: RmsNorm,
    norm_after_attention: RmsNorm,
    norm_out: RmsNorm,
    limit: Interval,
}

impl AudioLayer {
    pub(super) fn new(prefix: &str, audio: &AudioConfig, weights: &Weights) -> candle_cp_layers::Result<Self> {
        let parts = Parts { prefix, audio, weights };
        Ok(Self {
            first: FeedForward::new(&parts, "feed_forward1")?,
            attention: LocalAttention::new(&format!("{prefix}.self_attn"), audio, weights)?,
            convolution: LightConv::new(&parts)?,
            second: FeedForward::new(&parts, "feed_forward2")?,
            norm_before_attention: parts.norm("norm_pre_attn", LAYER_EPS)?,
            norm_after_attention: parts.norm("norm_post_attn", LAYER_EPS)?,
            norm_out: parts.norm("norm_out", LAYER_EPS)?,
            limit: parts.limit()?,
        })
    }

    /// `[clips, frames, width]` to the same shape.
    pub(super) fn forward(&self, x_btw: &Tensor, positions_pw: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let x_btw = self.first.forward(x_btw)?;
        let normed = self.norm_before_attention.forward(&self.limit.clamp(&x_btw)?)?;
        let attended = self.attention.forward(&normed, positions_pw, mask)?;
        let x_btw = (x_btw + self.norm_after_attention.forward(&self.limit.clamp(&attended)?)?)?;
        let x_btw = self.second.forward(&self.convolution.forward(&x_btw)?)?;
        self.norm_out.forward(&self.limit.clamp(&x_btw)?)
    }
}

/// Where a layer's parts come from.
struct Parts<'a> {
    prefix: &'a str,
    audio: &'a AudioConfig,
    weights: &'a Weights,
}

impl Parts<'_> {
    fn linear(&self, name: &str, outputs: usize, inputs: usize) -> candle_cp_layers::Result<Linear> {
        let name = format!("{}.{name}", self.prefix);
        Linear::clippable(self.weights, &name, [outputs, inputs], self.audio.use_clipped_linears)
    }

    fn norm(&self, name: &str, eps: f64) -> candle_cp_layers::Result<RmsNorm> {
        Ok(RmsNorm::new(Some(self.norm_weight(name)?), eps))
    }

    fn norm_weight(&self, name: &str) -> candle_cp_layers::Result<Tensor> {
        self.weights.get(&format!("{}.{name}.weight", self.prefix), &[self.audio.hidden_size])
    }

    /// What the residual stream is cut to: the setting, or what the type of the weights can hold.
    fn limit(&self) -> candle_cp_layers::Result<Interval> {
        let largest = match self.norm_weight("norm_out")?.dtype() {
            DType::F16 => 65504.0,
            DType::F64 => f64::MAX,
            _ => f64::from(f32::MAX),
        };
        let limit = self.audio.gradient_clipping.min(largest);
        Ok(Interval { min: -limit, max: limit })
    }
}

/// `x + weight * norm(down(silu(up(norm(x)))))`.
#[derive(Debug, Clone)]
struct FeedForward {
    norm_before: RmsNorm,
    up: Linear,
    down: Linear,
    norm_after: RmsNorm,
    residual_weight: f64,
    limit: Interval,
}

impl FeedForward {
    fn new(parts: &Parts, name: &str) -> candle_cp_layers::Result<Self> {
        let hidden = parts.audio.hidden_size;
        Ok(Self {
            norm_before: parts.norm(&format!("{name}.pre_layer_norm"), LAYER_EPS)?,
            up: parts.linear(&format!("{name}.ffw_layer_1"), 4 * hidden, hidden)?,
            down: parts.linear(&format!("{name}.ffw_layer_2"), hidden, 4 * hidden)?,
            norm_after: parts.norm(&format!("{name}.post_layer_norm"), LAYER_EPS)?,
            residual_weight: parts.audio.residual_weight,
            limit: parts.limit()?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.norm_before.forward(&self.limit.clamp(x)?)?;
        let changed = self.down.forward(&self.up.forward(&normed)?.silu()?)?;
        let normed = self.norm_after.forward(&self.limit.clamp(&changed)?)?;
        (normed * self.residual_weight)? + x
    }
}

/// A gated projection, a convolution of each channel over the frames up to the present one, and a projection back.
#[derive(Debug, Clone)]
struct LightConv {
    norm_before: RmsNorm,
    start: Linear,
    /// `[width, 1, taps]`; the last tap meets the present frame.
    kernel_w1k: Tensor,
    norm: RmsNorm,
    end: Linear,
    limit: Interval,
}

impl LightConv {
    fn new(parts: &Parts) -> candle_cp_layers::Result<Self> {
        let (hidden, eps) = (parts.audio.hidden_size, parts.audio.rms_norm_eps);
        let kernel = format!("{}.lconv1d.depthwise_conv1d.weight", parts.prefix);
        Ok(Self {
            norm_before: parts.norm("lconv1d.pre_layer_norm", eps)?,
            start: parts.linear("lconv1d.linear_start", 2 * hidden, hidden)?,
            kernel_w1k: parts.weights.get(&kernel, &[hidden, 1, parts.audio.conv_kernel_size])?,
            norm: parts.norm("lconv1d.conv_norm", eps)?,
            end: parts.linear("lconv1d.linear_end", hidden, hidden)?,
            limit: parts.limit()?,
        })
    }

    fn forward(&self, x_btw: &Tensor) -> Result<Tensor> {
        let gated = gate(&self.start.forward(&self.norm_before.forward(x_btw)?)?)?;
        let mixed = self.limit.clamp(&self.convolve(&gated)?)?;
        self.end.forward(&self.norm.forward(&mixed)?.silu()?)? + x_btw
    }

    fn convolve(&self, x_btw: &Tensor) -> Result<Tensor> {
        let (width, _, taps) = self.kernel_w1k.dims3()?;
        let (_, frames, _) = x_btw.dims3()?;
        let dtype = wide(x_btw.dtype());
        let kernel_kw = self.kernel_w1k.to_dtype(dtype)?.reshape((width, taps))?.t()?;
        let padded = x_btw.to_dtype(dtype)?.pad_with_zeros(1, taps - 1, 0)?;
        let tap = |k: usize| padded.narrow(1, k, frames)?.broadcast_mul(&kernel_kw.get(k)?);
        let mut sum = tap(0)?;
        for k in 1..taps {
            sum = (sum + tap(k)?)?;
        }
        sum.to_dtype(x_btw.dtype())
    }
}

/// The first half of the last dimension times the sigmoid of the second, which is written with the hyperbolic tangent
/// because `1 / (1 + e^-x)` has no finite slope where `e^-x` overflows.
fn gate(x: &Tensor) -> Result<Tensor> {
    let width = x.dim(D::Minus1)? / 2;
    let x_wide = x.to_dtype(wide(x.dtype()))?;
    let sigmoid = ((x_wide.narrow(D::Minus1, width, width)? * 0.5)?.tanh()? * 0.5)? + 0.5;
    (x_wide.narrow(D::Minus1, 0, width)? * sigmoid?)?.to_dtype(x.dtype())
}
