//! Attention of the decoder and of the vision tower.

use candle_core::{D, Tensor};
use candle_cp::{CpContext, MaskRule};

use crate::error::Result;
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::rope::Rope;

/// Queries and keys are normed per head, so the scores take no scale of their own.
const SCALE: f64 = 1.0;

/// Attention with normed queries, keys and values.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    /// `None`: the keys' projection, before norm and rope, is also the values'.
    pub(crate) value: Option<Linear>,
    pub(crate) output: Linear,
    pub(crate) query_norm: RmsNorm,
    pub(crate) key_norm: RmsNorm,
    pub(crate) value_norm: RmsNorm,
    pub(crate) head_dim: usize,
    pub(crate) rule: MaskRule,
}

impl Attention {
    /// Queries of this rank's tokens, `[batch, heads, local tokens, head size]`.
    pub(crate) fn queries(&self, x_bsw: &Tensor, rope: &Rope) -> Result<Tensor> {
        let q_bshd = self.query.heads(x_bsw, self.head_dim)?;
        Ok(rope.apply(&self.query_norm.forward(&q_bshd)?)?.transpose(1, 2)?)
    }

    /// Keys and values of this rank's tokens, `[batch, key heads, local tokens, head size]` each.
    pub(crate) fn keys_values(&self, x_bsw: &Tensor, rope: &Rope) -> Result<(Tensor, Tensor)> {
        let k_bshd = self.key.heads(x_bsw, self.head_dim)?;
        let v_bshd = match &self.value {
            Some(value) => value.heads(x_bsw, self.head_dim)?,
            None => k_bshd.clone(),
        };
        let k_bshd = rope.apply(&self.key_norm.forward(&k_bshd)?)?;
        let v_bshd = self.value_norm.forward(&v_bshd)?;
        Ok((k_bshd.transpose(1, 2)?, v_bshd.transpose(1, 2)?))
    }

    /// `[batch, local tokens, width]`; the other ranks' keys and values come through the context.
    pub(crate) fn forward(&self, [q_bhsd, k_bhsd, v_bhsd]: [&Tensor; 3], context: &CpContext) -> Result<Tensor> {
        let out_bhsd = context.attend(q_bhsd, k_bhsd, v_bhsd, &self.rule, SCALE)?;
        let out_bsw = out_bhsd.transpose(1, 2)?.flatten_from(D::Minus2)?;
        Ok(self.output.forward(&out_bsw)?)
    }
}
