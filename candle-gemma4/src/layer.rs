//! The transformer layer that the decoder and the vision tower share: norms before and after each half.

use candle_core::Tensor;
use candle_cp::{CpContext, MaskRule};

use crate::attention::Attention;
use crate::clip::Clip;
use crate::config::{LayerConfig, TextConfig, VisionConfig};
use crate::error::Result;
use crate::linear::Linear;
use crate::mlp::Mlp;
use crate::names;
use crate::norm::RmsNorm;
use crate::rope::Rope;
use crate::weights::Weights;

/// One layer.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    input_norm: RmsNorm,
    attention: Attention,
    post_attention_norm: RmsNorm,
    pre_mlp_norm: RmsNorm,
    mlp: Mlp,
    post_mlp_norm: RmsNorm,
}

/// What differs between a decoder layer and a vision layer.
pub(crate) struct LayerShape {
    prefix: String,
    /// Name of a projection's matrix after the projection's own name.
    suffix: &'static str,
    hidden: usize,
    mlp_width: usize,
    heads: usize,
    key_heads: usize,
    head_dim: usize,
    keys_are_values: bool,
    bias: bool,
    /// Projections have bounds beside their matrices.
    clipped: bool,
    eps: f64,
    rule: MaskRule,
}

impl LayerShape {
    pub(crate) fn text(prefix: String, text: &TextConfig, layer: &LayerConfig, rule: MaskRule) -> Self {
        Self {
            prefix,
            suffix: "weight",
            hidden: text.hidden_size,
            mlp_width: text.intermediate_size,
            heads: text.num_attention_heads,
            key_heads: layer.num_key_value_heads,
            head_dim: layer.head_dim,
            keys_are_values: layer.keys_are_values,
            bias: text.attention_bias,
            clipped: false,
            eps: text.rms_norm_eps,
            rule,
        }
    }

    pub(crate) fn vision(index: usize, vision: &VisionConfig) -> Self {
        Self {
            prefix: names::vision_layer(index),
            suffix: "linear.weight",
            hidden: vision.hidden_size,
            mlp_width: vision.intermediate_size,
            heads: vision.num_attention_heads,
            key_heads: vision.num_key_value_heads,
            head_dim: vision.head_dim,
            keys_are_values: false,
            bias: false,
            clipped: vision.use_clipped_linears,
            eps: vision.rms_norm_eps,
            rule: MaskRule::bidirectional(),
        }
    }

    fn projection(&self, weights: &Weights, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        let (prefix, suffix) = (&self.prefix, self.suffix);
        let bias = format!("{prefix}.{name}.bias");
        let has_bias = self.bias && name.starts_with("self_attn");
        Ok(Linear {
            weight_oi: weights.get(&format!("{prefix}.{name}.{suffix}"), &[outputs, inputs])?,
            bias_o: has_bias.then(|| weights.get(&bias, &[outputs])).transpose()?,
            clip: self.clipped.then(|| Clip::new(weights, &format!("{prefix}.{name}"))).transpose()?,
        })
    }

    fn norm(&self, weights: &Weights, name: &str, width: usize) -> Result<RmsNorm> {
        let weight = weights.get(&format!("{}.{name}.weight", self.prefix), &[width])?;
        Ok(RmsNorm { weight: Some(weight), eps: self.eps })
    }

    fn attention(&self, weights: &Weights) -> Result<Attention> {
        let (query_width, key_width) = (self.heads * self.head_dim, self.key_heads * self.head_dim);
        let value = match self.keys_are_values {
            true => None,
            false => Some(self.projection(weights, "self_attn.v_proj", key_width, self.hidden)?),
        };
        Ok(Attention {
            query: self.projection(weights, "self_attn.q_proj", query_width, self.hidden)?,
            key: self.projection(weights, "self_attn.k_proj", key_width, self.hidden)?,
            value,
            output: self.projection(weights, "self_attn.o_proj", self.hidden, query_width)?,
            query_norm: self.norm(weights, "self_attn.q_norm", self.head_dim)?,
            key_norm: self.norm(weights, "self_attn.k_norm", self.head_dim)?,
            value_norm: RmsNorm { weight: None, eps: self.eps },
            head_dim: self.head_dim,
            rule: self.rule,
        })
    }
}

impl Layer {
    pub(crate) fn new(shape: &LayerShape, weights: &Weights) -> Result<Self> {
        let hidden = shape.hidden;
        Ok(Self {
            input_norm: shape.norm(weights, "input_layernorm", hidden)?,
            attention: shape.attention(weights)?,
            post_attention_norm: shape.norm(weights, "post_attention_layernorm", hidden)?,
            pre_mlp_norm: shape.norm(weights, "pre_feedforward_layernorm", hidden)?,
            mlp: Mlp {
                gate: shape.projection(weights, "mlp.gate_proj", shape.mlp_width, hidden)?,
                up: shape.projection(weights, "mlp.up_proj", shape.mlp_width, hidden)?,
                down: shape.projection(weights, "mlp.down_proj", hidden, shape.mlp_width)?,
            },
            post_mlp_norm: shape.norm(weights, "post_feedforward_layernorm", hidden)?,
        })
    }

    /// `[batch, local tokens, width]` to the same shape.
    pub(crate) fn forward(&self, x_bsw: &Tensor, rope: &Rope, context: &CpContext) -> Result<Tensor> {
        let [query, key, value] = self.project(x_bsw, rope)?;
        self.transform(&self.attend(x_bsw, [&query, &key, &value], context)?)
    }

    /// Queries, keys and values of this rank's tokens, `[batch, local tokens, heads, head size]` each.
    pub(crate) fn project(&self, x_bsw: &Tensor, rope: &Rope) -> Result<[Tensor; 3]> {
        let normed = self.input_norm.forward(x_bsw)?;
        let query = self.attention.queries(&normed, rope)?;
        let (key, value) = self.attention.keys_values(&normed, rope)?;
        Ok([query, key, value])
    }

    /// The first half: attention, added to its input.
    pub(crate) fn attend(&self, x_bsw: &Tensor, qkv_bshd: [&Tensor; 3], context: &CpContext) -> Result<Tensor> {
        let attended = self.attention.forward(qkv_bshd, context)?;
        Ok((x_bsw + self.post_attention_norm.forward(&attended)?)?)
    }

    /// The second half: the MLP, added to its input.
    pub(crate) fn transform(&self, x_bsw: &Tensor) -> Result<Tensor> {
        let changed = self.mlp.forward(&self.pre_mlp_norm.forward(x_bsw)?)?;
        Ok((x_bsw + self.post_mlp_norm.forward(&changed)?)?)
    }
}
