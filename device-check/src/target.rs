//! What kernels run on.

use crate::error::Result;
use candle_cp_kernels::gpu::{GpuLimits, Kernels, Launch};

/// Memory and launches of a device, or of what stands for one. Calls take effect in their order.
pub trait Target {
    /// What the device offers.
    fn limits(&self) -> GpuLimits;

    /// Allocates memory that holds `bytes`; the address is a multiple of 16.
    ///
    /// # Errors
    /// Out of memory.
    fn upload(&mut self, bytes: &[u8]) -> Result<u64>;

    /// Allocates `count` bytes of zeros.
    ///
    /// # Errors
    /// Out of memory.
    fn zeros(&mut self, count: usize) -> Result<u64>;

    /// Copies `count` bytes from `address` on, after everything before has run.
    ///
    /// # Errors
    /// A launch that failed, among others.
    fn download(&mut self, address: u64, count: usize) -> Result<Vec<u8>>;

    /// Queues a launch of `kernels`.
    ///
    /// # Errors
    /// A kernel that cannot be loaded or launched.
    fn launch(&mut self, kernels: &Kernels, launch: &Launch) -> Result<()>;

    /// Frees all memory.
    ///
    /// # Errors
    /// A launch that failed.
    fn clear(&mut self) -> Result<()>;
}
