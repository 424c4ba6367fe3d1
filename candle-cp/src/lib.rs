//! Context parallelism for [Candle](https://github.com/huggingface/candle): a sequence too long for one device is cut
//! into slices, one per rank; keys and values travel around a ring while each rank attends with its own queries, and
//! gradients travel back.
//!
//! A model sees one object, the [`CpContext`]: it shards the full-sequence embeddings (differentiably), attends under a
//! [`MaskRule`], and shards labels. With one rank it is the same code.
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use candle_cp::comm::threads;
//! use candle_cp::{CpContext, MaskRule, SequenceLayout, Tokens};
//!
//! // Four ranks, as threads, share a row of 50 tokens; 4 query heads, 2 key heads.
//! let lengths = threads::run(4, &threads::Options::default(), |comm| {
//!     let tokens = Tokens::single_document(1, 50);
//!     let layout = SequenceLayout::head_tail(tokens.len(), comm.size())?;
//!     let context = CpContext::new(comm, layout, tokens)?;
//!     let x = Var::zeros((1, 50, 64), DType::F32, &Device::Cpu)?;
//!     let local = context.shard(&x, 1)?; // [1, 14, 64]
//!     let heads = |x: &Tensor, h: usize| x.reshape((1, (), h, 16))?.transpose(1, 2);
//!     let key = local.narrow(2, 0, 32)?;
//!     let out = context.attend(
//!         &heads(&local, 4)?,
//!         &heads(&key, 2)?,
//!         &heads(&key, 2)?,
//!         &MaskRule::sliding(16),
//!         0.25,
//!     )?;
//!     out.sqr()?.sum_all()?.backward()?; // every rank; gradients reach each rank's x
//!     Ok::<_, candle_cp::Error>(out.dim(2)?)
//! })?;
//! assert_eq!(lengths, [14; 4]);
//! # Ok::<(), candle_cp::Error>(())
//! ```

mod attention;
mod balance;
pub mod comm;
mod context;
mod conv;
mod coordinates;
mod delta_rule;
mod element;
mod error;
mod exchanges;
mod gathered;
pub mod gpu;
pub mod launch;
mod layout;
mod loss;
mod mask;
mod pieces;
mod plan;
mod ring;
mod shard;
mod tokens;
mod with_backward;

pub use balance::{LayerWork, live_work};
pub use candle_cp_kernels::{
    Bounds, ConvActivation, DeltaHeads, KEY_BLOCK, Order, QUERY_BLOCK, TileCount, instructions,
};
pub use comm::Communicator;
pub use context::CpContext;
pub use coordinates::{Coordinates, attend_with_coordinates};
pub use error::{Error, Result};
pub use exchanges::{StateExchange, halo_exchange, state_exchange};
pub use gathered::GatheredKeys;
pub use launch::{
    LaunchEnvironment, Launcher, launch_environment, launch_environment_from, prepare_process, prepare_rank_process,
};
pub use layout::{LayoutKind, SequenceLayout};
pub use loss::{LossOptions, linear_cross_entropy};
pub use mask::{MaskRule, TokenAt};
pub use plan::{AttentionPlan, Edge, Hop, KeyCounts, Trim};
pub use shard::{IGNORED, ShardedLabels};
pub use tokens::Tokens;
pub use with_backward::with_backward;
