//! `activation(gate) * up`.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::{Real, TASK, slice, with_real, with_slices};

/// sqrt(2 / pi)
pub(super) const SCALE: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
pub(super) const CUBIC: f64 = 0.044715;
/// 1 / sqrt(2 pi): the normal density at 0.
pub(super) const DENSITY: f64 = 0.5 * SCALE;

/// What the gate of a gated MLP, or the middle of a plain one, goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// The exact GELU: `x` times the normal distribution function at `x`.
    Gelu,
    /// The tanh form of GELU.
    GeluTanh,
    /// `x * sigmoid(x)`.
    Silu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
}

/// An activation as a type, so that loops over it have no branch.
pub trait Curve: Copy + Send + Sync {
    /// Value and slope.
    fn at<T: Real>(self, x: T) -> (T, T);
}

/// Runs a block with `$curve` bound to what an [`Activation`] stands for.
macro_rules! with_curve {
    ($activation:expr, $curve:ident => $body:expr) => {
        match $activation {
            crate::fused::Activation::Gelu => {
                let $curve = crate::fused::gate::Gelu;
                $body
            }
            crate::fused::Activation::GeluTanh => {
                let $curve = crate::fused::gate::GeluTanh;
                $body
            }
            crate::fused::Activation::Silu => {
                let $curve = crate::fused::gate::Silu;
                $body
            }
            crate::fused::Activation::Sigmoid => {
                let $curve = crate::fused::gate::Sigmoid;
                $body
            }
        }
    };
}
pub(super) use with_curve;

/// `activation(gate) * up`, elementwise.
pub fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    gate.contiguous()?.apply_op2(&up.contiguous()?, Gate(activation))
}

struct Gate(Activation);

impl CustomOp2 for Gate {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn cpu_fwd(&self, gate: &CpuStorage, lg: &Layout, up: &CpuStorage, lu: &Layout) -> Result<(CpuStorage, Shape)> {
        with_real!(gate.dtype(), T => {
            let (gate, up) = (slice::<T>(gate, lg)?, slice::<T>(up, lu)?);
            let y = with_curve!(self.0, curve => forward(gate, up, curve));
            Ok((<T as candle_core::WithDType>::to_cpu_storage_owned(y), lg.shape().clone()))
        })
    }

    fn bwd(&self, gate: &Tensor, up: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        with_real!(gate.dtype(), T => {
            let (gate_grad, up_grad) = with_slices::<T, _, 3>([gate, up, grad], |slices| {
                with_curve!(self.0, curve => backward(slices, curve))
            })?;
            let tensor = |values| Tensor::from_vec(values, gate.shape(), gate.device()).map(Some);
            Ok((tensor(gate_grad)?, tensor(up_grad)?))
        })
    }
}

fn forward<T: Real>(gate: &[T], up: &[T], curve: impl Curve) -> Vec<T> {
    let mut y = vec![T::from_f64(0.0); gate.len()];
    let tasks = y.par_chunks_mut(TASK).zip(gate.par_chunks(TASK)).zip(up.par_chunks(TASK));
    tasks.for_each(|((y, gate), up)| {
        for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
            *y = curve.at(gate).0 * up;
        }
    });
    y
}

fn backward<T: Real>([gate, up, grad]: [&[T]; 3], curve: impl Curve) -> (Vec<T>, Vec<T>) {
    let mut gate_grad = vec![T::from_f64(0.0); gate.len()];
    let mut up_grad = gate_grad.clone();
    let results = gate_grad.par_chunks_mut(TASK).zip(up_grad.par_chunks_mut(TASK));
    let inputs = gate.par_chunks(TASK).zip(up.par_chunks(TASK)).zip(grad.par_chunks(TASK));
    results.zip(inputs).for_each(|((gate_grad, up_grad), ((gate, up), grad))| {
        let results = gate_grad.iter_mut().zip(up_grad);
        for ((gate_grad, up_grad), ((&gate, &up), &grad)) in results.zip(gate.iter().zip(up).zip(grad)) {
            let (value, slope) = curve.at(gate);
            *gate_grad = grad * up * slope;
            *up_grad = grad * value;
        }
    });
    (gate_grad, up_grad)
}

#[derive(Clone, Copy)]
pub struct Gelu;

impl Curve for Gelu {
    #[inline(always)]
    fn at<T: Real>(self, x: T) -> (T, T) {
        let number = T::from_f64;
        let below = number(0.5) + number(0.5) * (number(std::f64::consts::FRAC_1_SQRT_2) * x).erf();
        let density = number(DENSITY) * (number(-0.5) * x * x).exp();
        (x * below, below + x * density)
    }
}

#[derive(Clone, Copy)]
pub struct GeluTanh;

impl Curve for GeluTanh {
    #[inline(always)]
    fn at<T: Real>(self, x: T) -> (T, T) {
        let number = T::from_f64;
        let square = x * x;
        let tanh = (number(SCALE) * x * (number(1.0) + number(CUBIC) * square)).tanh();
        let above = number(0.5) * (number(1.0) + tanh);
        let inner_slope = number(SCALE) * (number(1.0) + number(3.0 * CUBIC) * square);
        (x * above, above + number(0.5) * x * (number(1.0) - tanh * tanh) * inner_slope)
    }
}

#[derive(Clone, Copy)]
pub struct Silu;

impl Curve for Silu {
    #[inline(always)]
    fn at<T: Real>(self, x: T) -> (T, T) {
        let sigmoid = sigmoid(x);
        let value = x * sigmoid;
        (value, sigmoid + value * (T::from_f64(1.0) - sigmoid))
    }
}

#[derive(Clone, Copy)]
pub struct Sigmoid;

impl Curve for Sigmoid {
    #[inline(always)]
    fn at<T: Real>(self, x: T) -> (T, T) {
        let sigmoid = sigmoid(x);
        (sigmoid, sigmoid * (T::from_f64(1.0) - sigmoid))
    }
}

/// By `sigmoid(x) = (1 + tanh(x / 2)) / 2`, which overflows nowhere.
#[inline(always)]
fn sigmoid<T: Real>(x: T) -> T {
    let half = T::from_f64(0.5);
    half + half * (half * x).tanh()
}
