//! Updates of optimizer state in one pass over memory each, for f32 and f64 on the CPU.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp2, InplaceOp3, Layout, Result, WithDType};
use rayon::prelude::*;

/// Numbers that one parallel task works on.
const TASK: usize = 1 << 16;

/// `x = keep * x + (1 - keep) * y`, or with the square of `y`.
pub(super) struct Average {
    pub keep: f64,
    pub squared: bool,
}

/// `x = decay * x - rate * mean / (sqrt(square * square_factor) + eps)`.
pub(super) struct Move {
    pub decay: f64,
    pub rate: f64,
    pub square_factor: f64,
    pub eps: f64,
}

/// The numbers of a contiguous operand.
fn numbers<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => candle_core::bail!("an update in place needs contiguous operands"),
    }
}

fn numbers_mut<'a, T>(all: &'a mut [T], layout: &Layout) -> Result<&'a mut [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&mut all[start..end]),
        None => candle_core::bail!("an update in place needs contiguous operands"),
    }
}

/// Runs a block with `$x`, the numbers of the tensor that changes, and `$t`, their type.
macro_rules! with_numbers {
    ($storage:expr, $layout:expr, $x:ident, $t:ident => $body:expr) => {
        match $storage {
            CpuStorage::F32(all) => {
                type $t = f32;
                let $x = numbers_mut(all, $layout)?;
                $body
            }
            CpuStorage::F64(all) => {
                type $t = f64;
                let $x = numbers_mut(all, $layout)?;
                $body
            }
            other => candle_core::bail!("an update in place takes f32 and f64, not {:?}", other.dtype()),
        }
    };
}

impl InplaceOp2 for Average {
    fn name(&self) -> &'static str {
        "average"
    }

    fn cpu_fwd(&self, x: &mut CpuStorage, lx: &Layout, y: &CpuStorage, ly: &Layout) -> Result<()> {
        with_numbers!(x, lx, x, T => {
            let (keep, share) = (self.keep as T, (1.0 - self.keep) as T);
            x.par_chunks_mut(TASK).zip(numbers::<T>(y, ly)?.par_chunks(TASK)).for_each(|(x, y)| {
                let pairs = x.iter_mut().zip(y);
                match self.squared {
                    true => pairs.for_each(|(x, &y)| *x = keep * *x + share * (y * y)),
                    false => pairs.for_each(|(x, &y)| *x = keep * *x + share * y),
                }
            });
        });
        Ok(())
    }
}

impl InplaceOp3 for Move {
    fn name(&self) -> &'static str {
        "move"
    }

    fn cpu_fwd(
        &self,
        x: &mut CpuStorage,
        lx: &Layout,
        mean: &CpuStorage,
        lm: &Layout,
        square: &CpuStorage,
        ls: &Layout,
    ) -> Result<()> {
        with_numbers!(x, lx, x, T => {
            let [decay, rate, factor, eps] =
                [self.decay, self.rate, self.square_factor, self.eps].map(|number| number as T);
            let means = numbers::<T>(mean, lm)?.par_chunks(TASK).zip(numbers::<T>(square, ls)?.par_chunks(TASK));
            x.par_chunks_mut(TASK).zip(means).for_each(|(x, (mean, square))| {
                for (x, (&mean, &square)) in x.iter_mut().zip(mean.iter().zip(square)) {
                    *x = decay * *x - rate * mean / ((square * factor).sqrt() + eps);
                }
            });
        });
        Ok(())
    }
}
