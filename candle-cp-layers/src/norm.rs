//! Normalization over the last dimension.

use candle_core::{D, DType, Result, Tensor};
use candle_cp::with_backward;

use crate::fused;
use crate::weights::Weights;

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in f32 (f64 for f64 input).
///
/// candle-nn's norms are not used: some of them have no backward pass.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Option<Tensor>,
    /// Added to the weight.
    offset: f64,
    eps: f64,
}

impl RmsNorm {
    /// With the weight as it is, or with none; `eps` is added to the mean square.
    pub fn new(weight: Option<Tensor>, eps: f64) -> Self {
        Self { weight, offset: 0.0, eps }
    }

    /// Multiplies by `1 + weight`.
    pub fn zero_centred(weight: Tensor, eps: f64) -> Self {
        Self { weight: Some(weight), offset: 1.0, eps }
    }

    /// What the normed row is multiplied with.
    fn multiplier(&self) -> Result<Option<Tensor>> {
        match (&self.weight, self.offset) {
            (Some(weight), 0.0) => Ok(Some(weight.clone())),
            // A sum with a number below the precision of a short type would be lost.
            (Some(weight), offset) => Ok(Some((weight.to_dtype(wide(weight.dtype()))? + offset)?)),
            (None, _) => Ok(None),
        }
    }

    /// In the shape and type of `x`.
    ///
    /// # Errors
    /// A weight of another width.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dtype = wide(x.dtype());
        let x_wide = x.to_dtype(dtype)?;
        if !fused::applies(&x_wide) {
            return self.composed(x);
        }
        let weight = self.multiplier()?.map(|weight| weight.to_dtype(dtype)).transpose()?;
        fused::rms_norm(&x_wide, weight.as_ref(), self.eps)?.to_dtype(x.dtype())
    }

    /// By tensor operations. Only `x` is kept for backward.
    fn composed(&self, x: &Tensor) -> Result<Tensor> {
        if x.elem_count() == 0 {
            // Not every device sums over nothing.
            return Ok(x.clone());
        }
        let eps = self.eps;
        let (normed, _) = normed(x, eps)?;
        match &self.multiplier()? {
            Some(weight) => {
                let y = normed.broadcast_mul(&weight.detach().to_dtype(normed.dtype())?)?.to_dtype(x.dtype())?;
                with_backward("rms-norm", [x, weight], y, move |[x, weight], grad| {
                    let (x_grad, weight_grad) = gradients(x, Some(weight), grad, eps)?;
                    Ok([Some(x_grad), weight_grad])
                })
            }
            None => with_backward("rms-norm", [x], normed.to_dtype(x.dtype())?, move |[x], grad| {
                Ok([Some(gradients(x, None, grad, eps)?.0)])
            }),
        }
    }
}

/// `x / rms` and `1 / rms` in the type of sums, outside of the graph.
fn normed(x: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let x_wide = x.detach().to_dtype(wide(x.dtype()))?;
    let inverse_rms = (x_wide.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    Ok((x_wide.broadcast_mul(&inverse_rms)?, inverse_rms))
}

/// Gradients of `x` and of the weight, if it is tracked.
fn gradients(x: &Tensor, weight: Option<&Tensor>, grad: &Tensor, eps: f64) -> Result<(Tensor, Option<Tensor>)> {
    let (normed, inverse_rms) = normed(x, eps)?;
    let dtype = normed.dtype();
    let grad = grad.to_dtype(dtype)?;
    let weight_grad = weight.filter(|weight| weight.track_op()).map(|weight| {
        let width = weight.elem_count();
        let rows = x.elem_count() / width;
        (&grad * &normed)?.reshape((rows, width))?.sum(0)?.to_dtype(weight.dtype())
    });
    let grad = match weight {
        Some(weight) => grad.broadcast_mul(&weight.detach().to_dtype(dtype)?)?,
        None => grad,
    };
    let along = (&grad * &normed)?.mean_keepdim(D::Minus1)?;
    let across = (grad - normed.broadcast_mul(&along)?)?;
    Ok((across.broadcast_mul(&inverse_rms)?.to_dtype(x.dtype())?, weight_grad.transpose()?))
}

/// `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension, in f32 (f64 for f64).
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// The norm whose `weight` and `bias`, of this width, are under its name.
    ///
    /// # Errors
    /// One of them is missing or has another width.
    pub fn load(weights: &Weights, name: &str, width: usize, eps: f64) -> crate::Result<Self> {
        let get = |part: &str| weights.get(&format!("{name}.{part}"), &[width]);
        Ok(Self { weight: get("weight")?, bias: get("bias")?, eps })
    }

    /// In the shape and type of `x`.
    ///
    /// # Errors
    /// Another width.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if x.elem_count() == 0 {
            // Not every device sums over nothing.
            return Ok(x.clone());
        }
        let (eps, dtype) = (self.eps, wide(x.dtype()));
        let (normed, _) = centred(x, eps)?;
        let scaled = normed.broadcast_mul(&self.weight.detach().to_dtype(dtype)?)?;
        let y = scaled.broadcast_add(&self.bias.detach().to_dtype(dtype)?)?.to_dtype(x.dtype())?;
        // Only `x` is kept for backward.
        with_backward("layer-norm", [x, &self.weight, &self.bias], y, move |[x, weight, bias], grad| {
            let (normed, inverse) = centred(x, eps)?;
            let grad = grad.to_dtype(dtype)?;
            let width = weight.elem_count();
            let over_rows =
                |x: Tensor, like: &Tensor| x.reshape((x.elem_count() / width, width))?.sum(0)?.to_dtype(like.dtype());
            let weight_grad = weight.track_op().then(|| over_rows((&grad * &normed)?, weight)).transpose()?;
            let bias_grad = bias.track_op().then(|| over_rows(grad.clone(), bias)).transpose()?;
            let grad = grad.broadcast_mul(&weight.detach().to_dtype(dtype)?)?;
            let along = (&grad * &normed)?.mean_keepdim(D::Minus1)?;
            let across = grad.broadcast_sub(&grad.mean_keepdim(D::Minus1)?)?;
            let across = (across - normed.broadcast_mul(&along)?)?;
            let x_grad = across.broadcast_mul(&inverse)?.to_dtype(x.dtype())?;
            Ok([Some(x_grad), weight_grad, bias_grad])
        })
    }
}

/// `(x - mean) / sqrt(var + eps)` and `1 / sqrt(var + eps)` in the type of sums, outside of the graph.
fn centred(x: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let x_wide = x.detach().to_dtype(wide(x.dtype()))?;
    let centred = x_wide.broadcast_sub(&x_wide.mean_keepdim(D::Minus1)?)?;
    let inverse = (centred.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    Ok((centred.broadcast_mul(&inverse)?, inverse))
}

/// The type that sums are formed in.
pub fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::fused::testing::{assert_close, random};

    #[test]
    fn one_pass_and_composed_norms_agree_with_their_gradients() -> Result<()> {
        // More rows than one parallel task takes, and widths with and without a rest over the vector lanes.
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::BF16, 0.02)] {
            for (rows, width) in [(700, 33), (3, 16), (1200, 48), (2, 1)] {
                let x = Var::from_tensor(&random(&[2, rows, width], dtype, 1)?)?;
                let weight = Var::from_tensor(&random(&[width], dtype, 2)?)?;
                let grad = random(&[2, rows, width], dtype, 3)?;
                for weight in [Some(weight), None] {
                    let norm = RmsNorm::new(weight.as_ref().map(|w| w.as_tensor().clone()), 0.1);
                    let (fused, composed) = (norm.forward(&x)?, norm.composed(&x)?);
                    assert_close("y", &fused, &composed, tolerance)?;
                    let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
                    let (fused, composed) = (gradients(&fused)?, gradients(&composed)?);
                    assert_close("dx", fused.get(&x).unwrap(), composed.get(&x).unwrap(), tolerance)?;
                    if let Some(weight) = &weight {
                        let (fused, composed) = (fused.get(weight).unwrap(), composed.get(weight).unwrap());
                        assert_close("dw", fused, composed, 10.0 * tolerance)?;
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_zero_centred_weight_is_one_more() -> Result<()> {
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::BF16, 0.02)] {
            let x = Var::from_tensor(&random(&[5, 9], dtype, 1)?)?;
            let weight = Var::from_tensor(&random(&[9], dtype, 2)?)?;
            let grad = random(&[5, 9], dtype, 3)?;
            let plain = RmsNorm::new(Some((weight.as_tensor() + 1.0)?), 0.1);
            let centred = RmsNorm::zero_centred(weight.as_tensor().clone(), 0.1);
            let expected = plain.forward(&x)?;
            let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
            for found in [centred.forward(&x)?, centred.composed(&x)?] {
                assert_close("y", &found, &expected, tolerance)?;
                let (found, expected) = (gradients(&found)?, gradients(&expected)?);
                for var in [&x, &weight] {
                    let (found, expected) = (found.get(var).unwrap(), expected.get(var).unwrap());
                    assert_close("gradient", found, expected, 5.0 * tolerance)?;
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_layer_norm_has_the_gradients_of_its_steps() -> Result<()> {
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 0.05)] {
            let x = Var::from_tensor(&random(&[3, 7, 9], dtype, 1)?)?;
            let weight = Var::from_tensor(&random(&[9], dtype, 2)?)?;
            let bias = Var::from_tensor(&random(&[9], dtype, 3)?)?;
            let grad = random(&[3, 7, 9], dtype, 4)?;
            let norm = LayerNorm { weight: weight.as_tensor().clone(), bias: bias.as_tensor().clone(), eps: 0.1 };
            let found = norm.forward(&x)?;
            let wide = wide(dtype);
            let centred = x.to_dtype(wide)?;
            let centred = centred.broadcast_sub(&centred.mean_keepdim(D::Minus1)?)?;
            let deviation = (centred.sqr()?.mean_keepdim(D::Minus1)? + 0.1)?.sqrt()?;
            let scaled = centred.broadcast_div(&deviation)?.broadcast_mul(&weight.to_dtype(wide)?)?;
            let expected = scaled.broadcast_add(&bias.to_dtype(wide)?)?.to_dtype(dtype)?;
            assert_close("y", &found, &expected, tolerance)?;
            let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
            let (found, expected) = (gradients(&found)?, gradients(&expected)?);
            for var in [&x, &weight, &bias] {
                assert_close("gradient", found.get(var).unwrap(), expected.get(var).unwrap(), 10.0 * tolerance)?;
            }
            let frozen = LayerNorm { weight: random(&[9], dtype, 2)?, bias: random(&[9], dtype, 3)?, eps: 0.1 };
            let store = frozen.forward(&x)?.sum_all()?.backward()?;
            assert_eq!(store.get_ids().count(), 1, "{dtype:?}");
        }
        Ok(())
    }

    /// Candle's product would keep a gradient, as large as `x`, of a weight that wants none.
    #[test]
    fn a_frozen_weight_leaves_nothing_behind() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let x = Var::from_tensor(&random(&[4, 6], dtype, 1)?)?;
            let norm = RmsNorm::new(Some(random(&[6], dtype, 2)?), 0.1);
            for y in [norm.forward(&x)?, norm.composed(&x)?] {
                let store = y.sum_all()?.backward()?;
                assert_eq!(store.get_ids().count(), 1, "{dtype:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn nothing_is_normed_to_nothing() -> Result<()> {
        let x = Var::zeros((0, 3), DType::F32, &Device::Cpu)?;
        let norm = RmsNorm::new(Some(random(&[3], DType::F32, 1)?), 0.1);
        assert_eq!(norm.forward(&x)?.dims(), [0, 3]);
        Ok(())
    }

    #[test]
    fn strided_input_is_normed_in_place_order() -> Result<()> {
        let x = random(&[4, 6], DType::F64, 5)?;
        let norm = RmsNorm::new(None, 0.0);
        assert_close("y", &norm.forward(&x.t()?)?, &norm.forward(&x.t()?.contiguous()?)?, 0.0)
    }

    #[test]
    fn a_row_of_zeros_has_finite_gradients() -> Result<()> {
        let x = Var::zeros((1, 8), DType::F32, &Device::Cpu)?;
        let norm = RmsNorm::new(None, 1e-6);
        let gradients = norm.forward(&x)?.sum_all()?.backward()?;
        let row = gradients.get(&x).unwrap().flatten_all()?.to_vec1::<f32>()?;
        assert!(row.iter().all(|value| (value - 1000.0).abs() < 0.1), "{row:?}");
        Ok(())
    }
}
