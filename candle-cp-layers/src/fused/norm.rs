//! Root-mean-square norm over the last dimension.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, D, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::{Real, TASK, slice, with_real, with_slices};

/// `x / sqrt(mean(x^2) + eps) * weight`.
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let x = x.contiguous()?;
    let op = RmsNorm { eps };
    match weight {
        Some(weight) => x.apply_op2(&weight.contiguous()?, op),
        None => x.apply_op1(op),
    }
}

#[derive(Clone, Copy)]
struct RmsNorm {
    eps: f64,
}

impl RmsNorm {
    fn forward(
        &self,
        x: (&CpuStorage, &Layout),
        weight: Option<(&CpuStorage, &Layout)>,
    ) -> Result<(CpuStorage, Shape)> {
        let shape = x.1.shape().clone();
        let width = *shape.dims().last().unwrap_or(&1);
        with_real!(x.0.dtype(), T => {
            let x = slice::<T>(x.0, x.1)?;
            let weight = weight.map(|(storage, layout)| slice::<T>(storage, layout)).transpose()?;
            let mut y = vec![0.0; x.len()];
            let task = rows_per_task(width) * width;
            y.par_chunks_mut(task).zip(x.par_chunks(task)).for_each(|(y, x)| {
                for (y, x) in y.chunks_mut(width).zip(x.chunks(width)) {
                    scale_row(y, x, inverse_rms(x, self.eps as T), weight);
                }
            });
            Ok((<T as candle_core::WithDType>::to_cpu_storage_owned(y), shape))
        })
    }

    /// Gradients of `x` and, if there is one, of the weight.
    fn backward(&self, x: &Tensor, weight: Option<&Tensor>, grad: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let width = x.dim(D::Minus1)?;
        with_real!(x.dtype(), T => {
            let gradients = match weight {
                Some(weight) => with_slices([x, grad, weight], |[x, grad, weight]| {
                    backward_rows::<T>(x, grad, Some(weight), self.eps as T, width)
                })?,
                None => with_slices([x, grad], |[x, grad]| backward_rows::<T>(x, grad, None, self.eps as T, width))?,
            };
            let (x_grad, weight_grad) = gradients;
            let x_grad = Tensor::from_vec(x_grad, x.shape(), x.device())?;
            let weight_grad = weight.map(|_| Tensor::from_vec(weight_grad, width, x.device())).transpose()?;
            Ok((x_grad, weight_grad))
        })
    }
}

impl CustomOp1 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward((storage, layout), None)
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.backward(x, None, grad)?.0))
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, lx: &Layout, weight: &CpuStorage, lw: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward((x, lx), Some((weight, lw)))
    }

    fn bwd(&self, x: &Tensor, weight: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (x_grad, weight_grad) = self.backward(x, Some(weight), grad)?;
        Ok((Some(x_grad), weight_grad.filter(|_| weight.track_op())))
    }
}

/// A function of the width only, so that sums over tasks do not depend on the number of threads.
fn rows_per_task(width: usize) -> usize {
    (TASK / width).max(1)
}

fn inverse_rms<T: Real>(x: &[T], eps: T) -> T {
    let mean = dot(x, x) / T::from_f64(x.len() as f64);
    T::from_f64(1.0) / (mean + eps).sqrt()
}

fn scale_row<T: Real>(y: &mut [T], x: &[T], inverse: T, weight: Option<&[T]>) {
    match weight {
        Some(weight) => {
            for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
                *y = x * inverse * weight;
            }
        }
        None => {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = x * inverse;
            }
        }
    }
}

/// With `n = x r`, `r` the inverse root mean square and `h = grad * weight`: the gradient of x is
/// `r (h - n mean(h n))`, that of the weight the sum over rows of `grad n`.
fn backward_rows<T: Real>(x: &[T], grad: &[T], weight: Option<&[T]>, eps: T, width: usize) -> (Vec<T>, Vec<T>) {
    let zero = T::from_f64(0.0);
    let task = rows_per_task(width) * width;
    let mut x_grad = vec![zero; x.len()];
    let parts = x_grad.par_chunks_mut(task).zip(x.par_chunks(task)).zip(grad.par_chunks(task));
    let weight_parts: Vec<Vec<T>> = parts
        .map(|((x_grad, x), grad)| {
            let mut weight_grad = vec![zero; width];
            let rows = x_grad.chunks_mut(width).zip(x.chunks(width)).zip(grad.chunks(width));
            for ((x_grad, x), grad) in rows {
                let inverse = inverse_rms(x, eps);
                match weight {
                    Some(weight) => {
                        for (((h, sum), &grad), (&x, &weight)) in
                            x_grad.iter_mut().zip(&mut weight_grad).zip(grad).zip(x.iter().zip(weight))
                        {
                            *h = grad * weight;
                            *sum += grad * x * inverse;
                        }
                    }
                    None => x_grad.copy_from_slice(grad),
                }
                let mean = dot(x_grad, x) * inverse * inverse / T::from_f64(width as f64);
                for (h, &x) in x_grad.iter_mut().zip(x) {
                    *h = (*h - x * mean) * inverse;
                }
            }
            weight_grad
        })
        .collect();
    let mut weight_grad = vec![zero; width];
    for part in weight_parts {
        for (sum, value) in weight_grad.iter_mut().zip(part) {
            *sum += value;
        }
    }
    (x_grad, weight_grad)
}

/// A sum in 16 lanes, which the compiler keeps in vector registers.
fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    const LANES: usize = 16;
    let mut lanes = [T::from_f64(0.0); LANES];
    let (a_lanes, b_lanes) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_lanes.remainder().iter().zip(b_lanes.remainder());
    for (a, b) in a_lanes.zip(b_lanes) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let mut sum = T::from_f64(0.0);
    for (&a, &b) in rest {
        sum += a * b;
    }
    for lane in lanes {
        sum += lane;
    }
    sum
}
