//! The same attention on NVIDIA GPUs: our own PTX, and everything about it that needs no driver.
//!
//! This module decides which kernel runs with which tile ([`Kernels`]), which tiles it visits ([`WorkList`]) and what it
//! is told ([`Launch`]). Loading PTX, memory and streams belong to the caller: a CUDA binding, or an emulator in tests.
//!
//! Between the chunks of a sequence the state of a pass lies in device memory, in f32: output, maximum and sum for
//! forward, the gradient of the queries for backward. All of it starts as zeros. Rows of the state are stacked
//! `[B, Hkv, Sq, G]`, as everywhere in this crate.

mod launch;
mod ptx;
mod tiles;
mod work;

pub use launch::{DeviceView, Grads, Launch, PARAMETER_WORDS, State, Work};
pub use ptx::{Compiled, compiled};
pub use tiles::{Direction, GpuElement, GpuLimits, Kernel, Kernels, NoKernel, TileShape};
pub use work::WorkList;
