//! Experts in place of an MLP: a router that chooses a few of them for each token, and one that all tokens share.

use candle_core::Tensor;
use candle_cp_layers::moe::{Experts, RealRows, Routing};
use candle_cp_layers::{Activation, Linear, Mlp, Result, Tap, Weights, activate, record_numbered, wide};

use crate::config::MoeConfig;
use crate::layer::mlp;

/// Router, experts, and the shared expert with its gate.
#[derive(Debug, Clone)]
pub(crate) struct MoeBlock {
    router: Linear,
    experts: Experts,
    shared: Mlp,
    shared_gate: Linear,
    top_k: usize,
}

impl MoeBlock {
    /// `prefix` is that of the module, such as `model.layers.0.mlp`.
    pub(crate) fn new(prefix: &str, hidden: usize, moe: &MoeConfig, weights: &Weights) -> Result<Self> {
        let linear = |name: &str, outputs| Linear::load(weights, &format!("{prefix}.{name}.weight"), [outputs, hidden]);
        let sizes = (moe.num_experts, moe.intermediate_size);
        Ok(Self {
            router: linear("gate", moe.num_experts)?,
            experts: Experts::new(&format!("{prefix}.experts"), hidden, sizes, Activation::Silu, weights)?,
            shared: mlp(&format!("{prefix}.shared_expert"), hidden, moe.shared_intermediate_size, weights)?,
            shared_gate: linear("shared_expert_gate", 1)?,
            top_k: moe.top_k,
        })
    }

    /// `[batch, local tokens, hidden]` to the same shape. Padding goes to the shared expert only.
    pub(crate) fn forward(&self, x_bsh: &Tensor, real: &RealRows) -> Result<Tensor> {
        let routing = self.route(x_bsh, real)?;
        let of_experts = self.experts.forward(x_bsh, &routing.dispatch, &routing.weights_rk)?;
        let share_bs1 = activate(&self.shared_gate.forward(x_bsh)?, Activation::Sigmoid)?;
        Ok((of_experts + self.shared.forward(x_bsh)?.broadcast_mul(&share_bs1)?)?)
    }

    /// Weights of a token's experts sum to 1. Everything is computed in f32 (f64 for f64).
    ///
    /// DIFFERENCE: Hugging Face forms the logits in the model's type; in a short one many of them would be equal.
    fn route(&self, x_bsh: &Tensor, real: &RealRows) -> Result<Routing> {
        let hidden = self.router.weight_oi.dim(1)?;
        let logits = |x_rh: &Tensor| logits(&self.router, x_rh);
        Ok(Routing::new(x_bsh, real, [hidden, self.top_k], logits, |weights_rk, _| Ok(weights_rk))?)
    }

    /// Tells a tap what the router of layer `layer` decides: what [`Routing::record`] does, and `router.logits`.
    pub(crate) fn record(&self, x_bsh: &Tensor, real: &RealRows, layer: usize, tap: &mut dyn Tap) -> Result<()> {
        if !tap.is_on() {
            return Ok(());
        }
        let x_bsh = x_bsh.detach();
        record_numbered(tap, "router.logits", layer, &logits(&self.router, &x_bsh)?)?;
        Ok(self.route(&x_bsh, real)?.record(layer, tap)?)
    }
}

fn logits(router: &Linear, x: &Tensor) -> candle_core::Result<Tensor> {
    let dtype = wide(x.dtype());
    let router = Linear { weight_oi: router.weight_oi.to_dtype(dtype)?, ..router.clone() };
    router.forward(&x.to_dtype(dtype)?)
}
