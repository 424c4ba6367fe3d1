//! Gated full attention.

use candle_core::Tensor;
use candle_cp::{CpContext, MaskRule};
use candle_cp_layers::{Activation, Linear, Result, RmsNorm, Rope, Weights, gated};

use crate::config::TextConfig;

/// Attention with normed queries and keys, of whose heads a part turns, and a gate on its output.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    /// Of every head the query, then the gate.
    query_gate: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    query_norm: RmsNorm,
    key_norm: RmsNorm,
    head_dim: usize,
    rule: MaskRule,
}

impl Attention {
    /// `prefix` is that of the module, such as `model.layers.3.self_attn`.
    pub(crate) fn new(prefix: &str, text: &TextConfig, weights: &Weights) -> Result<Self> {
        let (hidden, head_dim) = (text.hidden_size, text.head_dim);
        let query_width = text.num_attention_heads * head_dim;
        let key_width = text.num_key_value_heads * head_dim;
        let projection = |name: &str, [outputs, inputs]: [usize; 2]| -> Result<Linear> {
            let bias = || weights.get(&format!("{prefix}.{name}.bias"), &[outputs]);
            let bias_o = text.attention_bias.then(bias).transpose()?;
            Ok(Linear { bias_o, ..Linear::load(weights, &format!("{prefix}.{name}.weight"), [outputs, inputs])? })
        };
        let norm = |name: &str| -> Result<RmsNorm> {
            let weight = weights.get(&format!("{prefix}.{name}.weight"), &[head_dim])?;
            Ok(RmsNorm::zero_centred(weight, text.rms_norm_eps))
        };
        Ok(Self {
            query_gate: projection("q_proj", [2 * query_width, hidden])?,
            key: projection("k_proj", [key_width, hidden])?,
            value: projection("v_proj", [key_width, hidden])?,
            output: projection("o_proj", [hidden, query_width])?,
            query_norm: norm("q_norm")?,
            key_norm: norm("k_norm")?,
            head_dim,
            rule: text.mask_rule(),
        })
    }

    /// Gates, queries, keys and values of this rank's tokens, `[batch, local tokens, heads, head size]` each, in the order
    /// in which [`Attention::mix`] takes them up: so sums of gradients have the same order with and without recomputation.
    pub(crate) fn project(&self, x_bsh: &Tensor, rope: &Rope) -> Result<Vec<Tensor>> {
        let head_dim = self.head_dim;
        let both_bshd = self.query_gate.heads(x_bsh, 2 * head_dim)?;
        let (q_bshd, gate_bshd) = (both_bshd.narrow(3, 0, head_dim)?, both_bshd.narrow(3, head_dim, head_dim)?);
        let q_bshd = rope.apply(&self.query_norm.forward(&q_bshd)?)?;
        let k_bshd = rope.apply(&self.key_norm.forward(&self.key.heads(x_bsh, head_dim)?)?)?;
        Ok(vec![gate_bshd.contiguous()?, q_bshd, k_bshd, self.value.heads(x_bsh, head_dim)?])
    }

    /// What [`Attention::project`] made to `[batch, local tokens, hidden]`; the other ranks' keys and values come through
    /// the context.
    pub(crate) fn mix(&self, projected: &[Tensor], context: &CpContext) -> Result<Tensor> {
        let [gate_bshd, q_bshd, k_bshd, v_bshd] = projected else {
            unreachable!("attention projects four tensors");
        };
        let scale = (self.head_dim as f64).powf(-0.5);
        let out_bshd = context.attend_bshd(q_bshd, k_bshd, v_bshd, &self.rule, scale)?;
        Ok(self.output.over_heads(&gated(gate_bshd, &out_bshd, Activation::Sigmoid)?)?)
    }
}
