//! Input types, the type each accumulates in, and how Candle's storage is read and made.

use crate::error::{Error, Result};
use candle_core::{CpuStorage, Layout, Shape, Storage, Tensor, WithDType};
use candle_cp_kernels::{Heads, Real};
use half::{bf16, f16};
use std::borrow::Cow;

/// A type that queries, keys and values may have.
pub(crate) trait Element: WithDType {
    /// What sums run in: f32, and f64 for f64.
    type Acc: Real + WithDType;
    /// Contiguous data in the accumulation type; borrowed where it is that already.
    fn widen(data: &[Self]) -> Cow<'_, [Self::Acc]>;
    /// Back from the accumulation type.
    fn narrow(data: Vec<Self::Acc>) -> Vec<Self>;
}

macro_rules! accumulates_in_itself {
    ($($t:ty),*) => {$(
        impl Element for $t {
            type Acc = $t;
            fn widen(data: &[Self]) -> Cow<'_, [Self]> {
                Cow::Borrowed(data)
            }
            fn narrow(data: Vec<Self>) -> Vec<Self> {
                data
            }
        }
    )*};
}
accumulates_in_itself!(f32, f64);

macro_rules! accumulates_in_f32 {
    ($($t:ty),*) => {$(
        impl Element for $t {
            type Acc = f32;
            fn widen(data: &[Self]) -> Cow<'_, [f32]> {
                Cow::Owned(data.iter().map(|x| x.to_f32()).collect())
            }
            fn narrow(data: Vec<f32>) -> Vec<Self> {
                data.into_iter().map(<$t>::from_f32).collect()
            }
        }
    )*};
}
accumulates_in_f32!(bf16, f16);

/// A `[B, H, S, D]` operand in the accumulation type: borrowed with its strides, or widened.
pub(crate) struct Operand<'a, A: Clone> {
    data: Cow<'a, [A]>,
    dims: [usize; 4],
    strides: [usize; 3],
}

impl<'a, A: Real> Operand<'a, A> {
    /// Reads CPU storage. A last dimension that is not contiguous, or a broadcast one, is copied.
    pub fn new<T: Element<Acc = A>>(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let dims: [usize; 4] = layout.shape().dims4()?.into();
        let data = &storage.as_slice::<T>()?[layout.start_offset()..];
        let stride = layout.stride();
        let strides = [stride[0], stride[1], stride[2]];
        let span: usize = dims.iter().zip(stride).map(|(d, s)| d.saturating_sub(1) * s).sum::<usize>() + 1;
        let empty = dims.contains(&0);
        let dense = span <= dims.iter().product();
        if !empty && (stride[3] == 1 || dims[3] == 1) && dense {
            return Ok(Self { data: T::widen(&data[..span]), dims, strides });
        }
        let all = storage.as_slice::<T>()?;
        let mut copy = Vec::with_capacity(dims.iter().product());
        for b in 0..dims[0] {
            for h in 0..dims[1] {
                for t in 0..dims[2] {
                    let start = layout.start_offset() + b * stride[0] + h * stride[1] + t * stride[2];
                    copy.extend((0..dims[3]).map(|i| all[start + i * stride[3]]));
                }
            }
        }
        let data = Cow::Owned(T::widen(&copy).into_owned());
        let token = dims[3];
        Ok(Self { data, dims, strides: [dims[1] * dims[2] * token, dims[2] * token, token] })
    }

    /// The kernel's view.
    pub fn heads(&self) -> Heads<'_, A> {
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

/// The elements of a contiguous CPU tensor as fresh storage: what a custom operator returns when its value was computed
/// with tensor operations.
pub(crate) fn storage_of(x: &Tensor) -> Result<(CpuStorage, Shape)> {
    let x = x.contiguous()?;
    with_cpu_storage(&x, |storage, layout| {
        let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
        let storage = match storage {
            CpuStorage::F32(v) => CpuStorage::F32(v[range].to_vec()),
            CpuStorage::F64(v) => CpuStorage::F64(v[range].to_vec()),
            CpuStorage::BF16(v) => CpuStorage::BF16(v[range].to_vec()),
            CpuStorage::F16(v) => CpuStorage::F16(v[range].to_vec()),
            CpuStorage::I64(v) => CpuStorage::I64(v[range].to_vec()),
            CpuStorage::U32(v) => CpuStorage::U32(v[range].to_vec()),
            _ => {
                let given = format!("{:?}", x.dtype());
                return Err(Error::argument(
                    "dtype",
                    given,
                    "use f32, f64, bf16, f16, i64 or u32",
                    "convert the tensor",
                ));
            }
        };
        Ok((storage, layout.shape().clone()))
    })
}
