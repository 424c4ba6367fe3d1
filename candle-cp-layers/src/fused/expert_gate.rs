//! `weight * activation(gate) * up` for the assignments of rows to experts, each with the weight its router gave it.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::gate::{Activation, Curve, with_curve};
use super::{Real, TASK, slice, with_real, with_slices};

/// `[assignments, 2 * width]`, in which the gate comes first, to `[assignments, width]`. Assignment `a` has the weight at
/// place `slots[a]` of the flattened `weights`, which has the type of `gate_up_aw`; no place may appear twice.
pub fn expert_gate(
    gate_up_aw: &Tensor,
    weights: &Tensor,
    slots: &Arc<[u32]>,
    activation: Activation,
) -> Result<Tensor> {
    gate_up_aw.contiguous()?.apply_op2(&weights.contiguous()?, ExpertGate { slots: slots.clone(), activation })
}

struct ExpertGate {
    slots: Arc<[u32]>,
    activation: Activation,
}

/// Assignments that one parallel task works on.
fn task(width: usize) -> usize {
    (TASK / width.max(1)).max(1)
}

impl CustomOp2 for ExpertGate {
    fn name(&self) -> &'static str {
        "expert-gate"
    }

    fn cpu_fwd(&self, x: &CpuStorage, lx: &Layout, w: &CpuStorage, lw: &Layout) -> Result<(CpuStorage, Shape)> {
        let (assignments, both) = lx.shape().dims2()?;
        let width = both / 2;
        if assignments != self.slots.len() || self.slots.iter().any(|&slot| slot as usize >= lw.shape().elem_count()) {
            bail!("{assignments} assignments and {:?} weights do not fit {} slots", lw.shape(), self.slots.len());
        }
        with_real!(x.dtype(), T => {
            let (x, weights) = (slice::<T>(x, lx)?, slice::<T>(w, lw)?);
            let y = with_curve!(self.activation, curve => forward(x, weights, &self.slots, width, curve));
            let shape = Shape::from((assignments, width));
            Ok((<T as candle_core::WithDType>::to_cpu_storage_owned(y), shape))
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        weights: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        with_real!(x.dtype(), T => {
            let width = x.dim(1)? / 2;
            let (x_grad, weights_grad) = with_slices::<T, _, 3>([x, weights, grad], |slices| {
                with_curve!(self.activation, curve => backward(slices, &self.slots, width, curve))
            })?;
            let x_grad = Tensor::from_vec(x_grad, x.shape(), x.device())?;
            Ok((Some(x_grad), Some(Tensor::from_vec(weights_grad, weights.shape(), weights.device())?)))
        })
    }
}

fn forward<T: Real>(x: &[T], weights: &[T], slots: &[u32], width: usize, curve: impl Curve) -> Vec<T> {
    let (rows, both) = (task(width), 2 * width);
    let mut y = vec![T::from_f64(0.0); slots.len() * width];
    let tasks = y.par_chunks_mut(rows * width).zip(x.par_chunks(rows * both)).zip(slots.par_chunks(rows));
    tasks.for_each(|((y, x), slots)| {
        for ((y, x), &slot) in y.chunks_exact_mut(width).zip(x.chunks_exact(both)).zip(slots) {
            let weight = weights[slot as usize];
            let (gate, up) = x.split_at(width);
            y.iter_mut().zip(gate).zip(up).for_each(|((y, &gate), &up)| *y = weight * (curve.at(gate).0 * up));
        }
    });
    y
}

/// Gradients of the gate and up values and of the weights; a weight's sum runs over one assignment only, in order.
fn backward<T: Real>(
    [x, weights, grad]: [&[T]; 3],
    slots: &[u32],
    width: usize,
    curve: impl Curve,
) -> (Vec<T>, Vec<T>) {
    let zero = T::from_f64(0.0);
    let mut x_grad = vec![zero; x.len()];
    let mut by_assignment = vec![zero; slots.len()];
    let (rows, both) = (task(width), 2 * width);
    let results = x_grad.par_chunks_mut(rows * both).zip(by_assignment.par_chunks_mut(rows));
    let inputs = x.par_chunks(rows * both).zip(grad.par_chunks(rows * width)).zip(slots.par_chunks(rows));
    results.zip(inputs).for_each(|((x_grad, sums), ((x, grad), slots))| {
        let results = x_grad.chunks_exact_mut(both).zip(sums);
        let inputs = x.chunks_exact(both).zip(grad.chunks_exact(width)).zip(slots);
        for ((x_grad, sum), ((x, grad), &slot)) in results.zip(inputs) {
            let (gate_grad, up_grad) = x_grad.split_at_mut(width);
            let (gate, up) = x.split_at(width);
            let weight = weights[slot as usize];
            for ((gate_grad, up_grad), ((&gate, &up), &grad)) in
                gate_grad.iter_mut().zip(&mut *up_grad).zip(gate.iter().zip(up).zip(grad))
            {
                let (value, slope) = curve.at(gate);
                *gate_grad = weight * grad * up * slope;
                *up_grad = grad * value;
            }
            // A loop of its own: sums in order are not vectorized, and would take the one above with them.
            *sum = up_grad.iter().zip(up).fold(zero, |sum, (&grad, &up)| sum + grad * up);
            up_grad.iter_mut().for_each(|grad| *grad *= weight);
        }
    });
    let mut weights_grad = vec![zero; weights.len()];
    slots.iter().zip(by_assignment).for_each(|(&slot, sum)| weights_grad[slot as usize] = sum);
    (x_grad, weights_grad)
}
