//! The transformer layer that the decoder and the vision tower share: norms before and after each half.

use candle_core::Tensor;
use candle_cp::{CpContext, GatheredKeys, MaskRule};

use crate::attention::{Attention, Keys};
use crate::config::{LayerConfig, TextConfig, VisionConfig};
use crate::names;
use candle_cp_layers::clip::Clip;
use candle_cp_layers::{Activation, Linear, Mlp, Result, RmsNorm, Rope, Weights};

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
    /// Keys and values are those of an earlier layer.
    reads_keys: bool,
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
            mlp_width: layer.intermediate_size,
            heads: text.num_attention_heads,
            key_heads: layer.num_key_value_heads,
            head_dim: layer.head_dim,
            keys_are_values: layer.keys_are_values,
            reads_keys: layer.keys_of.is_some(),
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
            reads_keys: false,
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
            bias_o: has_bias.then(|| weights.get(&bias, &[outputs])).transpose()?,
            clip: self.clipped.then(|| Clip::new(weights, &format!("{prefix}.{name}"))).transpose()?,
            ..Linear::load(weights, &format!("{prefix}.{name}.{suffix}"), [outputs, inputs])?
        })
    }

    fn norm(&self, weights: &Weights, name: &str, width: usize) -> Result<RmsNorm> {
        let weight = weights.get(&format!("{}.{name}.weight", self.prefix), &[width])?;
        Ok(RmsNorm::new(Some(weight), self.eps))
    }

    fn attention(&self, weights: &Weights) -> Result<Attention> {
        let query_width = self.heads * self.head_dim;
        Ok(Attention {
            query: self.projection(weights, "self_attn.q_proj", query_width, self.hidden)?,
            keys: match self.reads_keys {
                true => None,
                false => Some(self.keys(weights)?),
            },
            output: self.projection(weights, "self_attn.o_proj", self.hidden, query_width)?,
            query_norm: self.norm(weights, "self_attn.q_norm", self.head_dim)?,
            head_dim: self.head_dim,
            rule: self.rule,
        })
    }

    fn keys(&self, weights: &Weights) -> Result<Keys> {
        let key_width = self.key_heads * self.head_dim;
        Ok(Keys {
            key: self.projection(weights, "self_attn.k_proj", key_width, self.hidden)?,
            value: match self.keys_are_values {
                true => None,
                false => Some(self.projection(weights, "self_attn.v_proj", key_width, self.hidden)?),
            },
            key_norm: self.norm(weights, "self_attn.k_norm", self.head_dim)?,
            value_norm: RmsNorm::new(None, self.eps),
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
                activation: Activation::GeluTanh,
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

    /// What its queries may see.
    pub(crate) fn rule(&self) -> &MaskRule {
        &self.attention.rule
    }

    /// Queries alone, for a layer whose keys and values were gathered.
    pub(crate) fn queries(&self, x_bsw: &Tensor, rope: &Rope) -> Result<Tensor> {
        self.attention.queries(&self.input_norm.forward(x_bsw)?, rope)
    }

    /// Keys and values alone, stacked: `[2, batch, local tokens, key heads, head size]`.
    pub(crate) fn stacked_keys_values(&self, x_bsw: &Tensor, rope: &Rope) -> Result<Tensor> {
        let (key, value) = self.attention.keys_values(&self.input_norm.forward(x_bsw)?, rope)?;
        Ok(Tensor::stack(&[key, value], 0)?)
    }

    /// The first half: attention, added to its input.
    pub(crate) fn attend(&self, x_bsw: &Tensor, qkv_bshd: [&Tensor; 3], context: &CpContext) -> Result<Tensor> {
        self.add_attended(x_bsw, &self.attention.forward(qkv_bshd, context)?)
    }

    /// The first half over keys and values that have travelled before.
    pub(crate) fn attend_gathered(
        &self,
        x_bsw: &Tensor,
        q_bshd: &Tensor,
        keys: &GatheredKeys,
        context: &CpContext,
    ) -> Result<Tensor> {
        self.add_attended(x_bsw, &self.attention.forward_gathered(q_bshd, keys, context)?)
    }

    fn add_attended(&self, x_bsw: &Tensor, attended_bsw: &Tensor) -> Result<Tensor> {
        Ok((x_bsw + self.post_attention_norm.forward(attended_bsw)?)?)
    }

    /// The second half: the MLP, added to its input.
    pub(crate) fn transform(&self, x_bsw: &Tensor) -> Result<Tensor> {
        self.transform_with(x_bsw, Ok)
    }

    /// As [`Layer::transform`], with something done to the MLP's output before its norm.
    pub(crate) fn transform_with(
        &self,
        x_bsw: &Tensor,
        change: impl FnOnce(Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let changed = change(self.mlp.forward(&self.pre_mlp_norm.forward(x_bsw)?)?)?;
        Ok((x_bsw + self.post_mlp_norm.forward(&changed)?)?)
    }
}
