//! Norm, rope and the activations in one pass over memory each, forward and backward, for f32 and f64 on the
//! CPU. Put together from plain operations the same steps touch memory ten times as often, and most of a small
//! model's training step goes into them. Other types and devices use tensor operations, but for the norm, which
//! computes short types in f32 anyway.

mod activate;
mod composed;
mod expert_gate;
mod gate;
mod norm;
mod rope;

use candle_core::cpu::erf::{erf_f32, erf_f64};
use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor, WithDType};

pub use self::activate::activate;
pub use self::composed::{composed_activate, composed_expert_gate, composed_gated};
pub use self::expert_gate::expert_gate;
pub use self::gate::{Activation, gated};
pub use self::norm::rms_norm;
pub use self::rope::rotate;

/// Numbers that one parallel task works on; a multiple of what a core's cache line and vector units like, small enough
/// to balance.
pub const TASK: usize = 16 * 1024;

/// Whether a tensor can take the one-pass way.
pub fn applies(x: &Tensor) -> bool {
    x.device().is_cpu() && matches!(x.dtype(), DType::F32 | DType::F64) && x.elem_count() > 0
}

/// f32 or f64.
pub trait Real: WithDType {
    /// Square root.
    fn sqrt(self) -> Self;
    /// Hyperbolic tangent, within 2e-7 for f32.
    fn tanh(self) -> Self;
    /// Exponential.
    fn exp(self) -> Self;
    /// Error function.
    fn erf(self) -> Self;
}

impl Real for f64 {
    fn sqrt(self) -> Self {
        self.sqrt()
    }

    fn tanh(self) -> Self {
        self.tanh()
    }

    fn exp(self) -> Self {
        self.exp()
    }

    fn erf(self) -> Self {
        erf_f64(self)
    }
}

impl Real for f32 {
    fn sqrt(self) -> Self {
        self.sqrt()
    }

    /// Free of branches and calls, so that loops over it are vectorized.
    fn tanh(self) -> Self {
        candle_cp_kernels::Real::tanh(self)
    }

    fn exp(self) -> Self {
        self.exp()
    }

    fn erf(self) -> Self {
        erf_f32(self)
    }
}

/// The numbers of a contiguous operand.
pub fn slice<'a, T: Real>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => candle_core::bail!("a one-pass operation needs contiguous operands"),
    }
}

/// Calls `f` with the numbers of `N` tensors on the CPU.
fn with_slices<T: Real, R, const N: usize>(tensors: [&Tensor; N], f: impl FnOnce([&[T]; N]) -> R) -> Result<R> {
    let mut contiguous = Vec::with_capacity(N);
    for tensor in tensors {
        contiguous.push(tensor.contiguous()?);
    }
    let guards: Vec<_> = contiguous.iter().map(Tensor::storage_and_layout).collect();
    let mut slices = [&[][..]; N];
    for (part, (storage, layout)) in slices.iter_mut().zip(&guards) {
        match &**storage {
            Storage::Cpu(storage) => *part = slice::<T>(storage, layout)?,
            _ => candle_core::bail!("a one-pass operation needs operands on the CPU"),
        }
    }
    Ok(f(slices))
}

/// Runs a block with `$t` bound to the type a [`DType`] stands for.
macro_rules! with_real {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $t = f64;
                $body
            }
            other => candle_core::bail!("a one-pass operation takes f32 and f64, not {other:?}"),
        }
    };
}
pub(crate) use with_real;

#[doc(hidden)]
pub mod testing {
    use candle_core::{DType, Device, Result, Tensor};

    use crate::spec::{Role, TensorSpec};

    /// Normal numbers from a seed.
    pub fn random(dims: &[usize], dtype: DType, seed: u64) -> Result<Tensor> {
        let role = Role::Matrix { fan_in: 1, range: 1.0 };
        let spec = TensorSpec { name: "test".into(), shape: dims.to_vec(), role };
        crate::random::tensor(&spec, dtype, &Device::Cpu, seed)
    }

    pub fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) -> Result<()> {
        assert_eq!(found.dims(), expected.dims(), "{what}");
        let worst = (found - expected)?.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        assert!(worst <= tolerance, "{what} is off by {worst:e}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tanh_is_close_everywhere() {
        for step in -2400..=2400 {
            let x = step as f32 * 0.005;
            let error = (f64::from(Real::tanh(x)) - f64::from(x).tanh()).abs();
            assert!(error < 2e-7, "tanh({x}) is off by {error:e}");
        }
        assert_eq!(Real::tanh(1e30f32), 1.0);
        assert_eq!(Real::tanh(f32::NEG_INFINITY), -1.0);
        assert!(Real::tanh(f32::NAN).is_nan());
    }
}
