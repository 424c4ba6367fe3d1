//! `activation(x)`.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::gate::{Activation, Curve, with_curve};
use super::{Real, TASK, slice, with_real, with_slices};

/// `activation(x)`, elementwise.
pub fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    x.contiguous()?.apply_op1(Activate(activation))
}

struct Activate(Activation);

impl CustomOp1 for Activate {
    fn name(&self) -> &'static str {
        "activate"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_real!(x.dtype(), T => {
            let x = slice::<T>(x, layout)?;
            let y = with_curve!(self.0, curve => forward(x, curve));
            Ok((<T as candle_core::WithDType>::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        with_real!(x.dtype(), T => {
            let x_grad = with_slices::<T, _, 2>([x, grad], |slices| {
                with_curve!(self.0, curve => backward(slices, curve))
            })?;
            Tensor::from_vec(x_grad, x.shape(), x.device()).map(Some)
        })
    }
}

fn forward<T: Real>(x: &[T], curve: impl Curve) -> Vec<T> {
    let mut y = vec![T::from_f64(0.0); x.len()];
    y.par_chunks_mut(TASK).zip(x.par_chunks(TASK)).for_each(|(y, x)| {
        y.iter_mut().zip(x).for_each(|(y, &x)| *y = curve.at(x).0);
    });
    y
}

fn backward<T: Real>([x, grad]: [&[T]; 2], curve: impl Curve) -> Vec<T> {
    let mut x_grad = vec![T::from_f64(0.0); x.len()];
    let tasks = x_grad.par_chunks_mut(TASK).zip(x.par_chunks(TASK)).zip(grad.par_chunks(TASK));
    tasks.for_each(|((x_grad, x), grad)| {
        for ((x_grad, &x), &grad) in x_grad.iter_mut().zip(x).zip(grad) {
            *x_grad = grad * curve.at(x).1;
        }
    });
    x_grad
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;
    use crate::fused::composed_activate;
    use crate::fused::testing::{assert_close, random};

    const ALL: [Activation; 4] = [Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Sigmoid];

    fn gradient(y: &Tensor, grad: &Tensor, x: &Var) -> Result<Tensor> {
        Ok((y * grad)?.sum_all()?.backward()?.get(x).expect("x is tracked").clone())
    }

    #[test]
    fn one_pass_and_composed_activations_agree() -> Result<()> {
        // More than one task, and a rest.
        let dims = [3, 7001];
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 5e-6)] {
            for activation in ALL {
                let x = Var::from_tensor(&(random(&dims, dtype, 1)? * 3.0)?)?;
                let grad = random(&dims, dtype, 2)?;
                let (fused, composed) = (activate(&x, activation)?, composed_activate(&x, activation)?);
                assert_close("y", &fused, &composed, tolerance)?;
                assert_close("dx", &gradient(&fused, &grad, &x)?, &gradient(&composed, &grad, &x)?, tolerance)?;
            }
        }
        Ok(())
    }

    #[test]
    fn the_slope_is_that_of_the_value_where_candle_has_six_digits() -> Result<()> {
        let x = Var::from_tensor(&(random(&[500], DType::F64, 3)? * 2.0)?)?;
        let step = 1e-4;
        for activation in ALL {
            // The fourth order formula; its error at this step is below 1e-14.
            let at = |by: f64| activate(&(x.as_tensor() + by * step)?, activation);
            let near = (at(1.0)? - at(-1.0)?)?;
            let far = (at(2.0)? - at(-2.0)?)?;
            let slope = ((near * 8.0)? - far)?.affine(1.0 / (12.0 * step), 0.0)?;
            let found = gradient(&activate(&x, activation)?, &x.ones_like()?, &x)?;
            assert_close("slope", &found, &slope, 1e-10)?;
        }
        Ok(())
    }

    #[test]
    fn gelu_has_its_textbook_values() -> Result<()> {
        // x times the normal distribution function, to ten digits.
        let values = [
            (-6.0, -5.919525783e-9),
            (-1.0, -0.1586552539),
            (0.0, 0.0),
            (0.5, 0.3457312306),
            (1.0, 0.8413447461),
            (3.0, 2.995950306),
            (10.0, 10.0),
        ];
        for (x, expected) in values {
            let x = Tensor::new(&[x], &Device::Cpu)?;
            assert_close("y", &activate(&x, Activation::Gelu)?, &Tensor::new(&[expected], &Device::Cpu)?, 1e-9)?;
        }
        Ok(())
    }

    #[test]
    fn short_types_are_rounded_once() -> Result<()> {
        let x = random(&[3, 40], DType::BF16, 4)?;
        for activation in ALL {
            let exact = activate(&x.to_dtype(DType::F32)?, activation)?.to_dtype(DType::BF16)?;
            assert_close("y", &crate::activate(&x, activation)?, &exact, 1e-2)?;
        }
        Ok(())
    }
}
