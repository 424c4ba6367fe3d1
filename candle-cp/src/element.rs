//! Input types, and how Candle's storage is read and made.

use crate::error::{Error, Result};
use candle_core::{CpuStorage, Layout, Storage, Tensor, WithDType};
use candle_cp_kernels::{self as kernels, Heads, Order};
use std::borrow::Cow;

/// A type that queries, keys and values may have.
pub(crate) trait Element: WithDType + kernels::Element<Acc: WithDType> {}

impl<T: WithDType + kernels::Element<Acc: WithDType>> Element for T {}

/// Runs a block with `$t` bound to the type that a [`candle_core::DType`] of queries, keys and values stands for.
macro_rules! dispatch {
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
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            other => candle_core::bail!("attention over {other:?}: checked before"),
        }
    };
}
pub(crate) use dispatch;

/// The numbers of a tensor that was made contiguous before.
pub(crate) fn slice<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [T]> {
    let (start, end) = layout.contiguous_offsets().expect("made contiguous before");
    Ok(&storage.as_slice::<T>()?[start..end])
}

/// A `[B, H, S, D]` operand: borrowed with its strides, or copied where the last dimension is not contiguous.
pub(crate) struct Operand<'a, T: Clone> {
    data: Cow<'a, [T]>,
    dims: [usize; 4],
    strides: [usize; 3],
}

impl<'a, T: Element> Operand<'a, T> {
    /// Reads CPU storage, `[B, S, H, D]` with [`Order::TokensFirst`].
    pub fn new(storage: &'a CpuStorage, layout: &Layout, order: Order) -> Result<Self> {
        let layout = &match order {
            Order::HeadsFirst => layout.clone(),
            Order::TokensFirst => layout.transpose(1, 2)?,
        };
        let dims: [usize; 4] = layout.shape().dims4()?.into();
        let all = storage.as_slice::<T>()?;
        let data = &all[layout.start_offset()..];
        let stride = layout.stride();
        let strides = [stride[0], stride[1], stride[2]];
        if stride[3] == 1 || dims[3] == 1 || dims.contains(&0) {
            return Ok(Self { data: Cow::Borrowed(data), dims, strides });
        }
        let mut copy = Vec::with_capacity(dims.iter().product());
        for b in 0..dims[0] {
            for h in 0..dims[1] {
                for t in 0..dims[2] {
                    let start = b * stride[0] + h * stride[1] + t * stride[2];
                    copy.extend((0..dims[3]).map(|i| data[start + i * stride[3]]));
                }
            }
        }
        let token = dims[3];
        Ok(Self { data: Cow::Owned(copy), dims, strides: [dims[1] * dims[2] * token, dims[2] * token, token] })
    }

    /// The kernel's view.
    pub fn heads(&self) -> Heads<'_, T> {
        let [b, h, s, d] = self.dims;
        Heads::new(&self.data, [b, h, s], self.strides, d)
    }

    /// `[B, H, S, D]`.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }
}

/// Runs `f` on the CPU storage of a tensor.
pub(crate) fn with_cpu_storage<R>(x: &Tensor, f: impl FnOnce(&CpuStorage, &Layout) -> Result<R>) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(storage, layout),
        _ => Err(Error::argument(
            "device",
            format!("{:?}", x.device()),
            "this operation runs on the CPU",
            "move it there",
        )),
    }
}
