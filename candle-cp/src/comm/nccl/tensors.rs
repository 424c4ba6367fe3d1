//! Tensors as NCCL sees them: a place in the device's memory, a number of elements and their type.

use super::calls::Elements;
use super::library::DataType;
use crate::error::{Error, Result};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use candle_core::cuda_backend::{CudaDevice, CudaStorage, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::{DType, Storage, Tensor};

/// NCCL's name of a type; those that a header admits.
fn data_type(dtype: DType) -> Result<DataType> {
    Ok(match dtype {
        DType::U8 => DataType::U8,
        DType::U32 => DataType::U32,
        DType::I64 => DataType::I64,
        DType::F16 => DataType::F16,
        DType::BF16 => DataType::BF16,
        DType::F32 => DataType::F32,
        DType::F64 => DataType::F64,
        other => return Err(unsupported(other)),
    })
}

fn unsupported(dtype: DType) -> Error {
    let allowed = "NCCL carries U8, U32, I64, F16, BF16, F32 and F64";
    Error::argument("dtype", format!("{dtype:?}"), allowed, "convert the tensor first")
}

/// Calls `$body` with the typed slice of a storage that can travel.
macro_rules! with_slice {
    ($storage:expr, $dtype:expr, $slice:ident => $body:expr) => {
        match $storage {
            CudaStorageSlice::U8($slice) => $body,
            CudaStorageSlice::U32($slice) => $body,
            CudaStorageSlice::I64($slice) => $body,
            CudaStorageSlice::F16($slice) => $body,
            CudaStorageSlice::BF16($slice) => $body,
            CudaStorageSlice::F32($slice) => $body,
            CudaStorageSlice::F64($slice) => $body,
            _ => Err(unsupported($dtype)),
        }
    };
}

/// Calls `post` with the elements of a contiguous tensor, which `stream` reads.
pub fn reading<R>(tensor: &Tensor, stream: &CudaStream, post: impl FnOnce(Elements) -> Result<R>) -> Result<R> {
    fn read<T, R>(s: &CudaSlice<T>, at: usize, stream: &CudaStream, post: impl FnOnce(u64) -> Result<R>) -> Result<R> {
        // The guard notes the reading in the stream when it is dropped: after the call is posted.
        let (pointer, _read) = s.device_ptr(stream);
        post(pointer + (at * std::mem::size_of::<T>()) as u64)
    }
    let (count, kind) = (tensor.elem_count(), data_type(tensor.dtype())?);
    let post = |at| post(Elements { at, count, kind });
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(cuda) = &*storage else {
        return Err(Error::argument("device", "the CPU", "NCCL reads the GPU's memory", "move the tensor first"));
    };
    with_slice!(&cuda.slice, tensor.dtype(), slice => read(slice, layout.start_offset(), stream, post))
}

/// Memory that a message is received into.
pub struct Landing {
    slice: CudaStorageSlice,
    device: CudaDevice,
    dtype: DType,
    elements: usize,
}

impl Landing {
    /// Room for `elements` on the device's own stream: another stream has to wait for that one before it writes.
    pub fn new(device: &CudaDevice, dtype: DType, elements: usize) -> Result<Self> {
        // SAFETY: nobody reads it before a message has been received into all of it.
        let slice = unsafe {
            match dtype {
                DType::U8 => CudaStorageSlice::U8(device.alloc(elements)?),
                DType::U32 => CudaStorageSlice::U32(device.alloc(elements)?),
                DType::I64 => CudaStorageSlice::I64(device.alloc(elements)?),
                DType::F16 => CudaStorageSlice::F16(device.alloc(elements)?),
                DType::BF16 => CudaStorageSlice::BF16(device.alloc(elements)?),
                DType::F32 => CudaStorageSlice::F32(device.alloc(elements)?),
                DType::F64 => CudaStorageSlice::F64(device.alloc(elements)?),
                other => return Err(unsupported(other)),
            }
        };
        Ok(Self { slice, device: device.clone(), dtype, elements })
    }

    /// Calls `post` with the room there is, which `stream` writes to.
    pub fn writing<R>(&mut self, stream: &CudaStream, post: impl FnOnce(Elements) -> Result<R>) -> Result<R> {
        fn write<T, R>(s: &mut CudaSlice<T>, stream: &CudaStream, post: impl FnOnce(u64) -> Result<R>) -> Result<R> {
            let (pointer, _written) = s.device_ptr_mut(stream);
            post(pointer)
        }
        let (count, kind) = (self.elements, data_type(self.dtype)?);
        let post = |at| post(Elements { at, count, kind });
        with_slice!(&mut self.slice, self.dtype, slice => write(slice, stream, post))
    }

    /// The tensor that has arrived.
    pub fn into_tensor(self, dims: &[usize]) -> Tensor {
        let storage = Storage::Cuda(CudaStorage { slice: self.slice, device: self.device });
        Tensor::from_storage(storage, dims, BackpropOp::none(), false)
    }
}
