//! The gated MLP.

use candle_core::{Result, Tensor};

use crate::fused::{self, Activation};
use crate::linear::Linear;

/// `down(activation(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// To the width of the MLP; goes through the activation.
    pub gate: Linear,
    /// To the width of the MLP.
    pub up: Linear,
    /// Back.
    pub down: Linear,
    /// On the gate.
    pub activation: Activation,
}

impl Mlp {
    /// `[.., hidden]` to the same shape.
    ///
    /// # Errors
    /// Another last dimension.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&gated(&self.gate.forward(x)?, &self.up.forward(x)?, self.activation)?)
    }
}

/// `activation(gate) * up`, elementwise.
///
/// # Errors
/// Shapes or types that differ.
pub fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    match fused::applies(gate) {
        true => fused::gated(gate, up, activation),
        false => fused::composed_gated(gate, up, activation),
    }
}

/// `activation(x)`, elementwise, for an MLP without a gate. Its slope has all digits; that of Candle's GELUs has six.
///
/// # Errors
/// A type that is no floating point type.
pub fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    match fused::applies(x) {
        true => fused::activate(x, activation),
        false => fused::composed_activate(x, activation),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Var};

    use super::*;
    use crate::fused::testing::{assert_close, random};

    const ALL: [Activation; 4] = [Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Sigmoid];

    #[test]
    fn one_pass_and_composed_gates_agree() -> Result<()> {
        for (dtype, value_tolerance, slope_tolerance) in [(DType::F64, 1e-12, 1e-12), (DType::F32, 2e-6, 5e-6)] {
            for activation in ALL {
                let dims = [3, 7000];
                let gate = Var::from_tensor(&(random(&dims, dtype, 1)? * 3.0)?)?;
                let up = Var::from_tensor(&random(&dims, dtype, 2)?)?;
                let grad = random(&dims, dtype, 3)?;
                let (fused, composed) =
                    (gated(&gate, &up, activation)?, fused::composed_gated(&gate, &up, activation)?);
                assert_close("y", &fused, &composed, value_tolerance)?;
                let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
                let (fused, composed) = (gradients(&fused)?, gradients(&composed)?);
                for var in [&gate, &up] {
                    assert_close("gradient", fused.get(var).unwrap(), composed.get(var).unwrap(), slope_tolerance)?;
                }
            }
        }
        Ok(())
    }

    #[test]
    fn the_slope_is_that_of_the_value() -> Result<()> {
        let gate = Var::from_tensor(&(random(&[400], DType::F64, 4)? * 2.0)?)?;
        let up = random(&[400], DType::F64, 5)?;
        for activation in ALL {
            let gradients = gated(&gate, &up, activation)?.sum_all()?.backward()?;
            let step = 1e-5;
            let moved = |by: f64| gated(&(gate.as_tensor() + by)?, &up, activation);
            let slope = ((moved(step)? - moved(-step)?)? / (2.0 * step))?;
            assert_close("slope", gradients.get(&gate).unwrap(), &slope, 1e-8)?;
        }
        Ok(())
    }

    #[test]
    fn silu_is_x_times_its_sigmoid() -> Result<()> {
        for dtype in [DType::F64, DType::F32] {
            let x = (random(&[500], dtype, 6)? * 20.0)?;
            let sigmoid = (x.neg()?.exp()? + 1.0)?.recip()?;
            assert_close("y", &gated(&x, &x.ones_like()?, Activation::Sigmoid)?, &sigmoid, 1e-6)?;
            assert_close("y", &gated(&x, &x.ones_like()?, Activation::Silu)?, &(&x * sigmoid)?, 1e-5)?;
        }
        Ok(())
    }
}
