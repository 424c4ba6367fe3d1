//! The activations by tensor operations, for what the one-pass operations do not take. They compute in f32 (f64 for f64), keep
//! nothing for backward but their inputs, and have the exact slope: that of Candle's GELU has six digits.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candle_cp::with_backward;

use super::gate::{Activation, CUBIC, DENSITY, SCALE};
use crate::norm::wide;

/// `activation(gate) * up`, elementwise, in the type of `gate`.
pub fn composed_gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    let dtype = gate.dtype();
    let y = (activation.value(&widened(gate)?)? * widened(up)?)?.to_dtype(dtype)?;
    with_backward("gate", [gate, up], y, move |[gate, up], grad| {
        let (value, slope) = activation.curve(&widened(gate)?)?;
        let grad = widened(grad)?;
        let up_grad = (&grad * value)?.to_dtype(dtype)?;
        let gate_grad = ((grad * widened(up)?)? * slope)?.to_dtype(dtype)?;
        Ok([Some(gate_grad), Some(up_grad)])
    })
}

/// `activation(x)`, elementwise.
pub fn composed_activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    let dtype = x.dtype();
    let y = activation.value(&widened(x)?)?.to_dtype(dtype)?;
    with_backward("activate", [x], y, move |[x], grad| {
        let (_, slope) = activation.curve(&widened(x)?)?;
        Ok([Some((widened(grad)? * slope)?.to_dtype(dtype)?)])
    })
}

/// As [`super::expert_gate`].
pub fn composed_expert_gate(
    gate_up_aw: &Tensor,
    weights: &Tensor,
    slots: &Arc<[u32]>,
    activation: Activation,
) -> Result<Tensor> {
    let (assignments, both) = gate_up_aw.dims2()?;
    let places = weights.elem_count();
    if assignments != slots.len() || slots.iter().any(|&slot| slot as usize >= places) {
        bail!("{assignments} assignments and {:?} weights do not fit {} slots", weights.dims(), slots.len());
    }
    let slot_a = Tensor::new(&slots[..], weights.device())?;
    let weight_of = move |weights: &Tensor| weights.detach().flatten_all()?.index_select(&slot_a, 0)?.unsqueeze(1);
    let parts = move |x_aw: &Tensor| Ok::<_, candle_core::Error>((half(x_aw, 0, both / 2)?, half(x_aw, 1, both / 2)?));
    let (gate, up) = parts(gate_up_aw)?;
    let y = (activation.value(&gate)? * up)?.broadcast_mul(&weight_of(weights)?)?;
    let slots = slots.clone();
    with_backward("expert-gate", [gate_up_aw, weights], y, move |[x_aw, weights], grad| {
        let (gate, up) = parts(x_aw)?;
        let (value, slope) = activation.curve(&gate)?;
        // Of the weights, whose places appear once each: of an assignment's place its sum, elsewhere 0.
        let mut at = vec![slots.len() as u32; places];
        (0..).zip(&slots[..]).for_each(|(assignment, &slot)| at[slot as usize] = assignment);
        let sums_a1 = ((grad * &value)? * &up)?.sum_keepdim(1)?;
        let at = Tensor::new(at, weights.device())?;
        let weights_grad = sums_a1.pad_with_zeros(0, 0, 1)?.index_select(&at, 0)?.reshape(weights.shape())?;
        let grad = grad.broadcast_mul(&weight_of(weights)?)?;
        let x_grad = Tensor::cat(&[((&grad * up)? * slope)?, (grad * value)?], 1)?;
        Ok([Some(x_grad), Some(weights_grad)])
    })
}

fn half(x_aw: &Tensor, half: usize, width: usize) -> Result<Tensor> {
    x_aw.detach().narrow(1, half * width, width)?.contiguous()
}

fn widened(x: &Tensor) -> Result<Tensor> {
    x.detach().to_dtype(wide(x.dtype()))
}

impl Activation {
    fn value(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Gelu => x.gelu_erf(),
            Self::GeluTanh => x.gelu(),
            Self::Silu => x.silu(),
            Self::Sigmoid => sigmoid(x),
        }
    }

    /// Value and slope.
    fn curve(self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Gelu => {
                let below = x.affine(std::f64::consts::FRAC_1_SQRT_2, 0.0)?.erf()?.affine(0.5, 0.5)?;
                let value = (x * &below)?;
                let density = x.sqr()?.affine(-0.5, 0.0)?.exp()?.affine(DENSITY, 0.0)?;
                Ok((value, (below + (x * density)?)?))
            }
            Self::GeluTanh => {
                let square = x.sqr()?;
                let tanh = (square.affine(SCALE * CUBIC, SCALE)? * x)?.tanh()?;
                let above = tanh.affine(0.5, 0.5)?;
                let bend = (tanh.sqr()?.affine(-0.5, 0.5)? * x)?;
                let slope = (&above + (bend * square.affine(3.0 * SCALE * CUBIC, SCALE)?)?)?;
                Ok(((x * above)?, slope))
            }
            Self::Silu => {
                let sigmoid = sigmoid(x)?;
                let value = (x * &sigmoid)?;
                let slope = (&sigmoid + (&value * sigmoid.affine(-1.0, 1.0)?)?)?;
                Ok((value, slope))
            }
            Self::Sigmoid => {
                let value = sigmoid(x)?;
                let slope = (&value * value.affine(-1.0, 1.0)?)?;
                Ok((value, slope))
            }
        }
    }
}

/// By the hyperbolic tangent, which overflows nowhere.
fn sigmoid(x: &Tensor) -> Result<Tensor> {
    x.affine(0.5, 0.0)?.tanh()?.affine(0.5, 0.5)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Var};

    use super::*;
    use crate::fused::expert_gate;
    use crate::fused::testing::{assert_close, random};

    #[test]
    fn expert_gates_agree() -> Result<()> {
        let slots: Arc<[u32]> = [4, 0, 7, 2, 3].into();
        let x = Var::from_tensor(&random(&[5, 14], DType::F64, 1)?)?;
        let weights = Var::from_tensor(&random(&[4, 2], DType::F64, 2)?)?;
        let grad = random(&[5, 7], DType::F64, 3)?;
        for activation in [Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Sigmoid] {
            let found = composed_expert_gate(&x, &weights, &slots, activation)?;
            let expected = expert_gate(&x, &weights, &slots, activation)?;
            assert_close("y", &found, &expected, 1e-12)?;
            let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
            let (found, expected) = (gradients(&found)?, gradients(&expected)?);
            for var in [&x, &weights] {
                assert_close("gradient", found.get(var).unwrap(), expected.get(var).unwrap(), 1e-12)?;
            }
        }
        let short: Arc<[u32]> = [0, 8, 1, 2, 3].into();
        assert!(composed_expert_gate(&x, &weights, &short, Activation::Silu).is_err());
        Ok(())
    }

    #[test]
    fn short_types_are_rounded_once() -> Result<()> {
        let [gate, up] = [1, 2].map(|seed| random(&[3, 40], DType::BF16, seed));
        let (gate, up) = (gate?, up?);
        let exact = (gate.to_dtype(DType::F32)?.gelu()? * up.to_dtype(DType::F32)?)?.to_dtype(DType::BF16)?;
        assert_close("y", &composed_gated(&gate, &up, Activation::GeluTanh)?, &exact, 0.0)
    }
}
