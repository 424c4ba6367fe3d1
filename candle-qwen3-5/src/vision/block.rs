//! One block of the tower: attention within frames and an MLP, each behind a norm and added to its input.

use candle_core::Tensor;
use candle_cp::{CpContext, MaskRule};
use candle_cp_layers::{Activation, LayerNorm, Linear, Result, Rope, Weights, activate, wide};

use super::{LAYER_NORM_EPS, VisionShape, linear, names};

/// One block.
#[derive(Debug, Clone)]
pub(super) struct Block {
    attention_norm: LayerNorm,
    /// To queries, keys and values, one after the other.
    query_key_value: Linear,
    output: Linear,
    mlp_norm: LayerNorm,
    up: Linear,
    down: Linear,
    activation: Activation,
    heads: usize,
    head_dim: usize,
}

impl Block {
    pub(super) fn new(index: usize, shape: &VisionShape, weights: &Weights) -> Result<Self> {
        let (hidden, mlp_width) = (shape.hidden_size, shape.intermediate_size);
        let prefix = names::block(index);
        let projection = |name: &str, sizes: [usize; 2]| linear(weights, &format!("{prefix}.{name}"), sizes);
        let norm = |name: &str| LayerNorm::load(weights, &format!("{prefix}.{name}"), hidden, LAYER_NORM_EPS);
        Ok(Self {
            attention_norm: norm("norm1")?,
            query_key_value: projection("attn.qkv", [3 * hidden, hidden])?,
            output: projection("attn.proj", [hidden, hidden])?,
            mlp_norm: norm("norm2")?,
            up: projection("mlp.linear_fc1", [mlp_width, hidden])?,
            down: projection("mlp.linear_fc2", [hidden, mlp_width])?,
            activation: shape.activation,
            heads: shape.num_heads,
            head_dim: shape.head_dim(),
        })
    }

    /// `[1, patches, width]` to the same shape; the frames are the context's documents.
    pub(super) fn forward(&self, x_1pw: &Tensor, rope: &Rope, context: &CpContext) -> Result<Tensor> {
        let x_1pw = (x_1pw + self.attend(&self.attention_norm.forward(x_1pw)?, rope, context)?)?;
        let wide_1pm = activate(&self.up.forward(&self.mlp_norm.forward(&x_1pw)?)?, self.activation)?;
        Ok((x_1pw + self.down.forward(&wide_1pm)?)?)
    }

    fn attend(&self, x_1pw: &Tensor, rope: &Rope, context: &CpContext) -> Result<Tensor> {
        let all_1phd = self.query_key_value.heads(x_1pw, self.head_dim)?;
        let dtype = all_1phd.dtype();
        let part = |index: usize| all_1phd.narrow(2, index * self.heads, self.heads)?.contiguous();
        // Short types are turned in f32, unlike those of the text model.
        let turned = |x_1phd: Tensor| rope.apply(&x_1phd.to_dtype(wide(dtype))?)?.to_dtype(dtype);
        let (query, key, value) = (turned(part(0)?)?, turned(part(1)?)?, part(2)?);
        let scale = (self.head_dim as f64).powf(-0.5);
        let out_1phd = context.attend_bshd(&query, &key, &value, &MaskRule::bidirectional(), scale)?;
        Ok(self.output.over_heads(&out_1phd)?)
    }
}
