//! Experts beside the MLP of a decoder layer.

use candle_core::Tensor;
use candle_cp_layers::moe::{Experts, RealRows};
use candle_cp_layers::{Activation, Result, RmsNorm, Tap, Weights};

use super::Router;
use crate::config::{MoeConfig, TextConfig};
use crate::names::moe as names;

/// Router, experts, and the norms that join them with the MLP.
#[derive(Debug, Clone)]
pub(crate) struct MoeBlock {
    router: Router,
    experts: Experts,
    post_mlp_norm: RmsNorm,
    pre_experts_norm: RmsNorm,
    post_experts_norm: RmsNorm,
}

impl MoeBlock {
    /// `prefix` is that of the layer.
    pub(crate) fn new(prefix: &str, text: &TextConfig, moe: &MoeConfig, weights: &Weights) -> Result<Self> {
        let (hidden, eps) = (text.hidden_size, text.rms_norm_eps);
        let norm = |name: &str| -> Result<RmsNorm> {
            Ok(RmsNorm::new(Some(weights.get(&format!("{prefix}.{name}.weight"), &[hidden])?), eps))
        };
        let sizes = (moe.num_experts, moe.intermediate_size);
        Ok(Self {
            router: Router::new(prefix, hidden, eps, moe, weights)?,
            experts: Experts::new(&format!("{prefix}.experts"), hidden, sizes, Activation::GeluTanh, weights)?,
            post_mlp_norm: norm(names::POST_MLP_NORM)?,
            pre_experts_norm: norm(names::PRE_EXPERTS_NORM)?,
            post_experts_norm: norm(names::POST_EXPERTS_NORM)?,
        })
    }

    /// The MLP's output plus the experts', each normed. Both router and experts read the residual stream `x_bsh`.
    pub(crate) fn join(&self, x_bsh: &Tensor, mlp_bsh: &Tensor, real: &RealRows) -> Result<Tensor> {
        let routing = self.router.forward(x_bsh, real)?;
        let normed = self.pre_experts_norm.forward(x_bsh)?;
        let of_experts = self.experts.forward(&normed, &routing.dispatch, &routing.weights_rk)?;
        Ok((self.post_mlp_norm.forward(mlp_bsh)? + self.post_experts_norm.forward(&of_experts)?)?)
    }

    /// Tells a tap what the router of layer `layer` decides about the residual stream.
    pub(crate) fn record(&self, x_bsh: &Tensor, real: &RealRows, layer: usize, tap: &mut dyn Tap) -> Result<()> {
        match tap.is_on() {
            true => Ok(self.router.forward(&x_bsh.detach(), real)?.record(layer, tap)?),
            false => Ok(()),
        }
    }
}
