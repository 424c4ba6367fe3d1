//! What the examples are made of. Of `parity`: case files, tolerances, reports, and runs of a model or of attention alone
//! on sharded sequences.
//!
//! A case file is a safetensors file of one input and of what another implementation computed from it. [`case`] reads
//! it, [`model`] (of the families in [`networks`]) and [`attention`] compute the same tensors here, [`tolerance`] and [`compare`] judge them, [`report`]
//! prints the result. [`cli`] is the command line.
//!
//! [`finetune`] is the command line of the examples that train, [`plan`] that of the planner.

pub mod attention;
pub mod case;
pub mod cli;
pub mod compare;
pub mod finetune;
pub mod masks;
pub mod model;
pub mod networks;
pub mod plan;
pub mod report;
pub mod tolerance;
