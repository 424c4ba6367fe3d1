//! Runs PTX kernels on the CPU, without a GPU or a driver, and reports what is wrong with their use of memory and
//! barriers: accesses out of bounds or misaligned, reads of bytes that nobody wrote, races between warps on shared
//! memory, barriers that not all threads reach, diverged warps where a whole one is needed.
//!
//! It takes the PTX that NVRTC and nvcc write for compute capability 8.0, tensor-core instructions (`mma`, `ldmatrix`)
//! and asynchronous copies (`cp.async`) included. Instructions that it does not know are errors at [`Module::parse`],
//! with their line.
//!
//! ```
//! use ptx_emulator::{CopyLanding, Launch, Memory, Module};
//!
//! let text = "
//!     .version 8.4
//!     .target sm_80
//!     .address_size 64
//!     .visible .entry double(.param .u64 values, .param .u32 count)
//!     {
//!         .reg .pred %p<2>;
//!         .reg .b32 %r<4>;
//!         .reg .b64 %rd<3>;
//!         ld.param.u64 %rd1, [values];
//!         ld.param.u32 %r1, [count];
//!         mov.u32 %r2, %tid.x;
//!         setp.ge.u32 %p1, %r2, %r1;
//!         @%p1 bra DONE;
//!         mad.wide.u32 %rd2, %r2, 4, %rd1;
//!         ld.global.u32 %r3, [%rd2];
//!         shl.b32 %r3, %r3, 1;
//!         st.global.u32 [%rd2], %r3;
//!     DONE:
//!         ret;
//!     }";
//! let module = Module::parse(text)?;
//! let mut memory = Memory::new();
//! let values = memory.upload(&[1, 0, 0, 0, 5, 0, 0, 0]);
//! let run = |count: u32, memory: &mut Memory| {
//!     let mut params = values.to_le_bytes().to_vec();
//!     params.extend(count.to_le_bytes());
//!     Launch {
//!         kernel: "double",
//!         grid: [1, 1, 1],
//!         block: [32, 1, 1],
//!         shared_bytes: 0,
//!         params: &params,
//!         copies: CopyLanding::AtWait,
//!     }
//!     .run(&module, memory)
//! };
//! let counts = run(2, &mut memory)?;
//! assert_eq!(memory.read(values, 8)?, [2, 0, 0, 0, 10, 0, 0, 0]);
//! assert_eq!(counts.global_read, 8);
//!
//! // A count that is too large is a fault of the third lane.
//! let fault = run(3, &mut memory).unwrap_err().to_string();
//! assert!(fault.contains("lane 2: line 16 `ld.global.u32 %r3, [%rd2];`: global read of 4 bytes"), "{fault}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it runs
//!
//! A module is decoded once, to one closure per instruction that works on all lanes of a warp. The lanes of a warp run
//! in lock-step; where they diverge, both sides run one after the other and meet at the branch's immediate
//! post-dominator. The warps of a thread block take turns, each up to its next barrier. Thread blocks run on all cores,
//! unless the kernel has atomics on global memory, whose order would change results.
//!
//! Whether two warps race on shared memory is decided by the barriers between them alone, with a clock per warp, and
//! not by the order in which they happen to run. Bytes of a `cp.async` are the copy's own from its issue until its
//! group was waited for; other warps need a barrier after that. [`CopyLanding`] chooses when the bytes appear.
//!
//! # What it does not model
//!
//! - The rounding inside of tensor cores: `mma` adds products to `c` one by one with ascending k, each sum rounded to
//!   f32. Devices differ in the last bits.
//! - Approximate functions (`ex2.approx`, `rcp.approx`, …) are as exact as the host's; NaN payloads are the host's.
//! - Races between lanes of one warp, and races on global memory. Blocks that read what other blocks write have no
//!   defined result; a warp that spins until another one writes never ends and is stopped after a number of instructions.
//! - Registers that were never set: they are zeros.
//! - Scheduling, caches, bank conflicts, the weakness of the memory model, time.
//! - Device functions and calls, textures, warp-group instructions (`wgmma`), TMA, clusters.
//! - Module variables (`.global`, `.const`) start with their initial values in every launch.

mod access;
mod ast;
mod atomics;
mod collective;
mod convert;
mod copies;
mod cta;
mod decode;
mod error;
mod float;
mod flow;
mod integer;
mod launch;
mod logic;
mod matrix;
mod memory;
mod module;
mod operands;
mod registers;
mod shared;
mod syntax;
mod token;
mod types;
mod warp;

pub use error::{Error, Fault, MemoryError};
pub use launch::{CopyLanding, Counts, Launch};
pub use memory::Memory;
pub use module::Module;
