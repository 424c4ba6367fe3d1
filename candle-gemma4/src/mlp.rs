//! The gated MLP.

use candle_core::{Result, Tensor};

use crate::linear::Linear;

/// `down(gelu_tanh(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

impl Mlp {
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // Candle's `gelu` is the tanh form.
        let gated = (self.gate.forward(x)?.gelu()? * self.up.forward(x)?)?;
        self.down.forward(&gated)
    }
}
