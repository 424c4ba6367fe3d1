//! Checks and measures the attention kernels of `candle-cp-kernels` on an NVIDIA GPU.
//!
//! Needs the driver's library and nothing else: no tensor library, no CUDA toolkit, no linking against either. The
//! program `device-check` runs it; `scripts/device-check` adds PyTorch as a peer and files the result.
//!
//! A [`Target`] is what kernels run on: a device ([`CudaDevice`]), or the PTX emulator in this crate's tests, which run
//! the very code that a device is checked with.
//!
//! - [`golden`] and [`draw`] give [`Case`]s: tensors, a mask, and how queries and keys are dealt out to ranks.
//! - [`attend`] runs a case on a target, rank by rank and chunk by chunk, forward and backward.
//! - [`dense`] is the reference, plain loops in f64; [`composed`] is a plain computation in the type of the operands.
//! - [`check`] compares them by the error-ratio rule.
//! - [`measure`] times launches with the driver's events, and checks some rows of those long sequences.

mod attend;
mod case;
mod check;
mod composed;
mod cuda;
mod dense;
mod draw;
mod driver;
mod error;
mod golden;
mod measure;
mod report;
mod sampled;
mod target;

pub use attend::attend;
pub use case::{Case, Data, Placing};
pub use check::{Checked, ELEMENTS, Report, check, check_case};
pub use composed::{composed, rounded};
pub use cuda::CudaDevice;
pub use dense::{Outcome, dense};
pub use draw::{HEADS, Sizes, draw};
pub use driver::DRIVER;
pub use error::{Error, Result};
pub use golden::golden;
pub use measure::{Budget, LENGTHS, MASKS, Measured, Measurement, live_pairs, measure};
pub use report::{json, markdown};
pub use target::Target;
