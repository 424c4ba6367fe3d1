//! CUDA devices, on the stream that Candle's device has.

use super::{DeviceBuffer, GpuDevice};
use crate::error::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg, sys};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice};
use candle_core::{DType, Device, Shape, Storage, Tensor};
use candle_cp_kernels::gpu::{GpuLimits, Kernels, Launch, PARAMETER_WORDS};
use std::sync::Arc;

/// A CUDA device of Candle.
#[derive(Debug)]
pub(crate) struct CudaGpu {
    device: CudaDevice,
    limits: GpuLimits,
}

/// The parameter of every kernel.
#[repr(transparent)]
struct Parameter([u64; PARAMETER_WORDS]);

// SAFETY: plain words, laid out as the kernels' struct.
unsafe impl DeviceRepr for Parameter {}

impl CudaGpu {
    /// # Errors
    /// A driver that does not tell what the device has.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        use sys::CUdevice_attribute as Attribute;
        let stream = device.cuda_stream();
        let context = stream.context();
        let of = |attribute| context.attribute(attribute).map_err(|e| failed("asking for a device attribute", e));
        let major = of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let shared = of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let limits = GpuLimits { capability: (major as u32, minor as u32), shared_bytes: shared as usize };
        Ok(Self { device: device.clone(), limits })
    }
}

fn failed(what: &str, error: impl std::fmt::Debug) -> Error {
    Error::Candle(candle_core::Error::Msg(format!("{what} failed: {error:?}")))
}

/// Address of the first element of a tensor.
fn address(x: &Tensor) -> Result<u64> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        let given = format!("{:?}", x.device());
        return Err(Error::argument("device", given, "all tensors of a call are on one CUDA device", "move it there"));
    };
    let stream = storage.device().cuda_stream();
    // The pointer stays good after the guard is gone: the tensor lives until the launches that use it are queued, and
    // its memory is freed, and written by others, in the order of this stream. A communicator makes its own stream wait
    // for this one and the other way round.
    macro_rules! first {
        ($($kind:ident),*) => {
            match &storage.slice {
                $(CudaStorageSlice::$kind(slice) => slice.device_ptr(&stream).0,)*
                _ => return Err(Error::argument("dtype", format!("{:?}", x.dtype()), "f32, bf16, f16 or u32", "convert it")),
            }
        };
    }
    let base = first!(F32, BF16, F16, U32);
    Ok(base + (layout.start_offset() * x.dtype().size_in_bytes()) as u64)
}

impl GpuDevice for CudaGpu {
    fn id(&self) -> String {
        format!("{:?}", self.device.id())
    }

    fn limits(&self) -> GpuLimits {
        self.limits
    }

    fn import(&self, x: &Tensor) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer { address: address(x)?, owner: Arc::new(x.clone()) })
    }

    fn zeros(&self, count: usize, dtype: DType) -> Result<DeviceBuffer> {
        self.import(&Tensor::zeros(count, dtype, &Device::Cuda(self.device.clone()))?)
    }

    fn upload(&self, words: &[u32]) -> Result<DeviceBuffer> {
        self.import(&Tensor::new(words, &Device::Cuda(self.device.clone()))?)
    }

    fn export(&self, buffer: &DeviceBuffer, dtype: DType, shape: Shape) -> Result<Tensor> {
        let tensor = buffer.owner.downcast_ref::<Tensor>().expect("buffers of this device are tensors");
        assert_eq!(tensor.dtype(), dtype, "a buffer has one type");
        Ok(tensor.reshape(shape)?)
    }

    fn launch(&self, kernels: &Kernels, launch: &Launch) -> Result<()> {
        let (kernel, module) = (&launch.kernel, kernels.module());
        let (major, minor) = self.limits.capability;
        let what = || {
            let (head, element) = (kernels.head_dim(), kernels.element());
            format!("kernel {} for head size {head}, {element:?} on sm_{major}{minor}", kernel.name)
        };
        let function = self.device.get_or_load_custom_func(&kernel.name, module.name, module.text);
        let function = function.map_err(|e| failed(&format!("loading {}", what()), e))?;
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
        function.set_attribute(SHARED, kernel.shared_bytes as i32).map_err(|e| failed(&what(), e))?;
        let parameter = Parameter(launch.parameter);
        let mut builder = function.builder();
        builder.arg(&parameter);
        let [x, y, z] = launch.grid;
        let config = LaunchConfig {
            grid_dim: (x, y, z),
            block_dim: (kernel.threads, 1, 1),
            shared_mem_bytes: kernel.shared_bytes,
        };
        // SAFETY: the kernel takes this parameter; its addresses are those of buffers and tensors that live until the
        // launch is queued, with the sizes that the shapes give.
        unsafe { builder.launch(config) }.map_err(|e| failed(&what(), e))?;
        Ok(())
    }
}
