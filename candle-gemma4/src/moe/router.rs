//! The router: which experts a token goes to, and how much each counts.

use candle_core::{Result, Tensor};
use candle_cp_layers::moe::{RealRows, Routing};
use candle_cp_layers::{Linear, RmsNorm, Weights, wide};

use crate::config::MoeConfig;

/// Scores all experts for each row and keeps the best `top_k`, whose weights sum to 1 before `per_expert_scale`.
///
/// Everything is computed in f32 (f64 for f64).
/// DIFFERENCE: Hugging Face forms the logits in the model's type; in a short one many of them would be equal.
#[derive(Debug, Clone)]
pub(crate) struct Router {
    pub(crate) proj: Linear,
    pub(crate) scale_h: Tensor,
    pub(crate) per_expert_scale_e: Tensor,
    pub(crate) top_k: usize,
    pub(crate) eps: f64,
}

impl Router {
    /// `prefix` is that of the layer.
    pub(crate) fn new(
        prefix: &str,
        hidden: usize,
        eps: f64,
        moe: &MoeConfig,
        weights: &Weights,
    ) -> candle_cp_layers::Result<Self> {
        let get = |name: &str, shape: &[usize]| weights.get(&format!("{prefix}.router.{name}"), shape);
        Ok(Self {
            proj: Linear::load(weights, &format!("{prefix}.router.proj.weight"), [moe.num_experts, hidden])?,
            scale_h: get("scale", &[hidden])?,
            per_expert_scale_e: get("per_expert_scale", &[moe.num_experts])?,
            top_k: moe.top_k,
            eps,
        })
    }

    /// Routes the residual stream as it is, `[.., hidden]`, which has as many rows as `real` knows; see [`Routing::new`].
    pub(crate) fn forward(&self, x: &Tensor, real: &RealRows) -> Result<Routing> {
        let hidden = self.proj.weight_oi.dim(1)?;
        let scaled = |weights_rk: Tensor, chosen: &Tensor| {
            let scale_e = self.per_expert_scale_e.to_dtype(weights_rk.dtype())?;
            let scale_rk = scale_e.index_select(&chosen.flatten_all()?, 0)?.reshape(chosen.shape())?;
            weights_rk * scale_rk
        };
        Routing::new(x, real, [hidden, self.top_k], |x_rh| self.logits(x_rh, real), scaled)
    }

    fn logits(&self, x_rh: &Tensor, real: &RealRows) -> Result<Tensor> {
        let dtype = wide(x_rh.dtype());
        let normed = RmsNorm::new(None, self.eps).forward(&x_rh.to_dtype(dtype)?)?;
        let root = (x_rh.dim(1)? as f64).powf(-0.5);
        let scaled = (normed.broadcast_mul(&self.scale_h.to_dtype(dtype)?)? * root)?;
        let proj = real.narrow(&self.proj);
        Linear { weight_oi: proj.weight_oi.to_dtype(dtype)?, ..proj }.forward(&scaled)
    }
}
