//! Turning heads by the angles of their tokens.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::{TASK, slice, with_real, with_slices};

/// Turns `x [batch, tokens, heads, head size]`, whose heads begin with `sections` that turn each in itself; tables
/// `[batch, tokens, dimensions of all sections]`. What is behind the sections stays.
pub fn rotate(x_bshd: &Tensor, cos_bsd: &Tensor, signed_sin_bsd: &Tensor, sections: usize) -> Result<Tensor> {
    let op = Rotate { cos_bsd: cos_bsd.detach(), signed_sin_bsd: signed_sin_bsd.detach(), sections, direction: 1.0 };
    x_bshd.contiguous()?.apply_op1(op)
}

#[derive(Clone)]
struct Rotate {
    cos_bsd: Tensor,
    signed_sin_bsd: Tensor,
    sections: usize,
    /// 1, or -1 to turn back.
    direction: f64,
}

impl CustomOp1 for Rotate {
    fn name(&self) -> &'static str {
        "rotate"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, _, heads, head_dim) = layout.shape().dims4()?;
        let turning = self.cos_bsd.dim(2)?;
        if turning > head_dim {
            bail!("heads of size {head_dim} cannot turn in {turning} dimensions");
        }
        let half = turning / self.sections / 2;
        with_real!(storage.dtype(), T => {
            let x = slice::<T>(storage, layout)?;
            let mut y = vec![0.0; x.len()];
            let tokens_per_task = (TASK / (heads * head_dim)).max(1);
            let direction = self.direction as T;
            with_slices::<T, _, 2>([&self.cos_bsd, &self.signed_sin_bsd], |[cos, sin]| {
                let task = tokens_per_task * heads * head_dim;
                let tables = cos.par_chunks(tokens_per_task * turning).zip(sin.par_chunks(tokens_per_task * turning));
                y.par_chunks_mut(task).zip(x.par_chunks(task)).zip(tables).for_each(|((y, x), (cos, sin))| {
                    let tokens = y.chunks_mut(heads * head_dim).zip(x.chunks(heads * head_dim));
                    let tables = cos.chunks(turning).zip(sin.chunks(turning));
                    for ((y, x), (cos, sin)) in tokens.zip(tables) {
                        for (y, x) in y.chunks_mut(head_dim).zip(x.chunks(head_dim)) {
                            y[turning..].copy_from_slice(&x[turning..]);
                            for start in (0..turning).step_by(2 * half) {
                                for low in start..start + half {
                                    let high = low + half;
                                    y[low] = x[low] * cos[low] + x[high] * (sin[low] * direction);
                                    y[high] = x[high] * cos[high] + x[low] * (sin[high] * direction);
                                }
                            }
                        }
                    }
                });
            })?;
            Ok((<T as candle_core::WithDType>::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    /// Turns the gradient back.
    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let back = Self { direction: -self.direction, ..self.clone() };
        Ok(Some(grad.contiguous()?.apply_op1_no_bwd(&back)?))
    }
}
