//! Runs PTX kernels on the CPU and reports what is wrong with their use of memory and barriers.
mod access;
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
