//! Low-rank adapters (LoRA): what is trained in place of a frozen model.
//!
//! An adapted projection gives `base(x) + (alpha / rank) * B(A(dropout(x)))`; `A` starts with small random numbers and
//! `B` with zeros, so that training starts from the model as it is. Names, shapes, files and the choice of modules are
//! those of PEFT, so adapters go back and forth.
//!
//! - Adapters are f32 (f64 for an f64 model) and so is what they compute, whatever the type of the model.
//! - Projections that sit between bounds (`Gemma4ClippableLinear` in the towers) are adapted inside of the bounds.
//!   DIFFERENCE: a target such as `q_proj` finds them; PEFT stops at the wrapper and wants `q_proj.linear`.
//! - Embedding tables, the head and experts (stacks of matrices, no `Linear` modules) are refused as targets.
//!   DIFFERENCE: PEFT adapts the first two when they are named, and experts as `target_parameters`.

mod adapter;
pub mod config_file;
mod dropout;
mod error;
pub mod modules;
mod options;
mod report;

pub use self::adapter::Adapter;
pub use self::dropout::DropoutStep;
pub use self::error::LoraError;
pub use self::options::{LoraOptions, LoraTargets};
pub use self::report::{LoraReport, TargetMatches};
