//! The gated MLP.

use candle_core::{Result, Tensor};

use crate::fused;
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
        self.down.forward(&gelu_gate(&self.gate.forward(x)?, &self.up.forward(x)?)?)
    }
}

/// `gelu_tanh(gate) * up`.
pub(crate) fn gelu_gate(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    match fused::applies(gate) {
        true => fused::gelu_gate(gate, up),
        false => fused::composed_gelu_gate(gate, up),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Var};

    use super::*;
    use crate::fused::testing::{assert_close, random};

    #[test]
    fn one_pass_and_composed_gates_agree() -> Result<()> {
        for (dtype, value_tolerance, slope_tolerance) in [(DType::F64, 1e-12, 1e-12), (DType::F32, 2e-6, 5e-6)] {
            let dims = [3, 7000];
            let gate = Var::from_tensor(&(random(&dims, dtype, 1)? * 3.0)?)?;
            let up = Var::from_tensor(&random(&dims, dtype, 2)?)?;
            let grad = random(&dims, dtype, 3)?;
            let (fused, composed) = (gelu_gate(&gate, &up)?, fused::composed_gelu_gate(&gate, &up)?);
            assert_close("y", &fused, &composed, value_tolerance)?;
            let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
            let (fused, composed) = (gradients(&fused)?, gradients(&composed)?);
            for var in [&gate, &up] {
                assert_close("gradient", fused.get(var).unwrap(), composed.get(var).unwrap(), slope_tolerance)?;
            }
        }
        Ok(())
    }

    #[test]
    fn the_slope_is_that_of_the_value() -> Result<()> {
        let gate = Var::from_tensor(&(random(&[400], DType::F64, 4)? * 2.0)?)?;
        let up = random(&[400], DType::F64, 5)?;
        let gradients = gelu_gate(&gate, &up)?.sum_all()?.backward()?;
        let step = 1e-5;
        let moved = |by: f64| gelu_gate(&(gate.as_tensor() + by)?, &up);
        let slope = ((moved(step)? - moved(-step)?)? / (2.0 * step))?;
        assert_close("slope", gradients.get(&gate).unwrap(), &slope, 1e-8)
    }
}
