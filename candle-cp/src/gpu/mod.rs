//! Ring attention by the GPU kernels.
//!
//! What a pass needs of a device is the trait [`GpuDevice`]: memory, and a way to run a [`Launch`]. CUDA devices have it
//! (feature `cuda`), and so does an emulator in the tests, which takes the very same path from the plan to the kernels.

#[cfg(feature = "cuda")]
mod cuda;
mod gathered;
mod ring;
mod session;
mod work;

#[cfg(feature = "cuda")]
pub(crate) use cuda::CudaGpu;
pub(crate) use gathered::{attend_gathered, gather};
pub(crate) use ring::ring_attention;
pub(crate) use work::WorkCache;

use crate::error::{Error, Result};
use candle_core::{DType, Shape, Tensor};
pub use candle_cp_kernels::gpu::{GpuElement, GpuLimits, Kernels, Launch};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// Device memory. It stays allocated while this or a clone lives.
#[derive(Debug, Clone)]
pub struct DeviceBuffer {
    /// Address of the first element.
    pub address: u64,
    /// Whatever keeps the memory allocated.
    pub owner: Arc<dyn Any + Send + Sync>,
}

/// Where kernels run. Work is in the order of the calls; none of them needs to wait for the device.
pub trait GpuDevice: Send + Sync + Debug {
    /// Tells devices apart whose memory cannot be shared.
    fn id(&self) -> String;

    /// What it offers to kernels.
    fn limits(&self) -> GpuLimits;

    /// The memory of a tensor as it lies, strides included; the address is that of its first element.
    ///
    /// # Errors
    /// A tensor of another device.
    fn import(&self, x: &Tensor) -> Result<DeviceBuffer>;

    /// `count` zeros.
    ///
    /// # Errors
    /// No memory left.
    fn zeros(&self, count: usize, dtype: DType) -> Result<DeviceBuffer>;

    /// A copy of `words`.
    ///
    /// # Errors
    /// No memory left.
    fn upload(&self, words: &[u32]) -> Result<DeviceBuffer>;

    /// The numbers of a buffer from [`GpuDevice::zeros`], of this type and as many as `shape` has, as a contiguous tensor.
    ///
    /// # Errors
    /// Those of the device.
    fn export(&self, buffer: &DeviceBuffer, dtype: DType, shape: Shape) -> Result<Tensor>;

    /// Runs a kernel of `kernels`' module.
    ///
    /// # Errors
    /// Those of the device, with kernel, head size, type and architecture.
    fn launch(&self, kernels: &Kernels, launch: &Launch) -> Result<()>;
}

/// The kernels for tensors of this type and head size.
pub(crate) fn kernels(device: &dyn GpuDevice, dtype: DType, head_dim: usize) -> Result<Kernels> {
    let element = match dtype {
        DType::BF16 => GpuElement::Bf16,
        DType::F16 => GpuElement::F16,
        DType::F32 => GpuElement::F32,
        other => {
            let allowed = "GPU kernels exist for bf16, f16 and f32";
            return Err(Error::argument("dtype", format!("{other:?}"), allowed, "convert q, k, v, or use the CPU"));
        }
    };
    Kernels::new(element, head_dim, device.limits()).map_err(Error::NoKernel)
}

/// The device of a tensor, if kernels run there; `None` for the CPU.
///
/// # Errors
/// A device without kernels.
pub(crate) fn device_of(x: &Tensor) -> Result<Option<Arc<dyn GpuDevice>>> {
    match x.device() {
        candle_core::Device::Cpu => Ok(None),
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(device) => Ok(Some(Arc::new(CudaGpu::new(device)?))),
        other => Err(Error::argument(
            "device",
            format!("{other:?}"),
            "attention runs on the CPU, and on CUDA devices with the feature `cuda`",
            "move q, k and v, or build with the feature",
        )),
    }
}
