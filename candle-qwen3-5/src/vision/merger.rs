//! From patches to soft tokens of the text model.

use candle_core::Tensor;
use candle_cp_layers::{Activation, LayerNorm, Linear, Result, Weights, activate};

use super::{LAYER_NORM_EPS, VisionShape, linear, names};

/// The merger: neighbouring patches, normed, side by side through an MLP.
#[derive(Debug, Clone)]
pub(super) struct Merger {
    norm: LayerNorm,
    inner: Linear,
    outer: Linear,
}

impl Merger {
    pub(super) fn new(shape: &VisionShape, weights: &Weights) -> Result<Self> {
        let (prefix, merged) = (names::merger(), shape.merged_len());
        Ok(Self {
            norm: LayerNorm::load(weights, &format!("{prefix}.norm"), shape.hidden_size, LAYER_NORM_EPS)?,
            inner: linear(weights, &format!("{prefix}.linear_fc1"), [merged, merged])?,
            outer: linear(weights, &format!("{prefix}.linear_fc2"), [shape.out_hidden_size, merged])?,
        })
    }

    /// `[patches, width]` to `[soft tokens, text hidden]`. The patches of a soft token are neighbours.
    pub(super) fn forward(&self, x_pw: &Tensor) -> Result<Tensor> {
        let (patches, width) = x_pw.dims2()?;
        let (_, merged) = self.inner.weight_oi.dims2()?;
        let x_tm = self.norm.forward(x_pw)?.reshape((patches * width / merged, merged))?;
        // The exact form, whatever the configuration names for the blocks.
        Ok(self.outer.forward(&activate(&self.inner.forward(&x_tm)?, Activation::Gelu)?)?)
    }
}
