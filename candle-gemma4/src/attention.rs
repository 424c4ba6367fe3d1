//! Attention of the decoder and of the vision tower.

use candle_core::Tensor;
use candle_cp::{CpContext, GatheredKeys, MaskRule};

use candle_cp_layers::{Linear, Result, RmsNorm, Rope};

/// Queries and keys are normed per head, so the scores take no scale of their own.
const SCALE: f64 = 1.0;

/// Attention with normed queries, keys and values.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    pub(crate) query: Linear,
    /// `None`: the layer reads the keys and values of an earlier one.
    pub(crate) keys: Option<Keys>,
    pub(crate) output: Linear,
    pub(crate) query_norm: RmsNorm,
    pub(crate) head_dim: usize,
    pub(crate) rule: MaskRule,
}

/// How a layer makes its own keys and values.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    pub(crate) key: Linear,
    /// `None`: the keys' projection, before norm and rope, is also the values'.
    pub(crate) value: Option<Linear>,
    pub(crate) key_norm: RmsNorm,
    pub(crate) value_norm: RmsNorm,
}

impl Attention {
    /// Queries of this rank's tokens, `[batch, local tokens, heads, head size]`.
    pub(crate) fn queries(&self, x_bsw: &Tensor, rope: &Rope) -> Result<Tensor> {
        let q_bshd = self.query.heads(x_bsw, self.head_dim)?;
        Ok(rope.apply(&self.query_norm.forward(&q_bshd)?)?)
    }

    /// Keys and values of this rank's tokens, `[batch, local tokens, key heads, head size]` each.
    pub(crate) fn keys_values(&self, x_bsw: &Tensor, rope: &Rope) -> Result<(Tensor, Tensor)> {
        let keys = self.keys.as_ref().expect("only layers with keys of their own are asked for them");
        let k_bshd = keys.key.heads(x_bsw, self.head_dim)?;
        let v_bshd = match &keys.value {
            Some(value) => value.heads(x_bsw, self.head_dim)?,
            None => k_bshd.clone(),
        };
        let k_bshd = rope.apply(&keys.key_norm.forward(&k_bshd)?)?;
        let v_bshd = keys.value_norm.forward(&v_bshd)?;
        Ok((k_bshd, v_bshd))
    }

    /// `[batch, local tokens, width]`; the other ranks' keys and values come through the context.
    pub(crate) fn forward(&self, [q_bshd, k_bshd, v_bshd]: [&Tensor; 3], context: &CpContext) -> Result<Tensor> {
        let out_bshd = context.attend_bshd(q_bshd, k_bshd, v_bshd, &self.rule, SCALE)?;
        Ok(self.output.over_heads(&out_bshd)?)
    }

    /// The same over keys and values that have travelled before.
    pub(crate) fn forward_gathered(&self, q_bshd: &Tensor, keys: &GatheredKeys, context: &CpContext) -> Result<Tensor> {
        let out_bshd = context.attend_gathered(q_bshd, keys, SCALE)?;
        Ok(self.output.over_heads(&out_bshd)?)
    }
}
