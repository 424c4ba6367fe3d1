//! Trainable Qwen 3.5 and 3.6 on Candle, ready for context parallelism.
//!
//! Dense models and those with experts, images, with the names, shapes and settings of released checkpoints. Every
//! operation has a backward pass. A model is ordinary single-device code: it embeds the full sequence, and its decoder
//! runs on whatever slice of it a [`candle_cp::CpContext`] gives to this rank. What crosses ranks, keys and values of full
//! attention, states and halos of the gated delta net, crosses inside of that context.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use candle_core::{DType, Device, Tensor};
//! use candle_cp::{CpContext, Tokens};
//! use candle_qwen3_5::{Config, Inputs, Model, Weights};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = Path::new("qwen3.5");
//! let config = Config::from_folder(folder)?;
//! let weights = Weights::load(folder, &config, DType::F32, &Device::Cpu)?;
//! let model = Model::new(&config, &weights)?;
//!
//! let ids = Tensor::new(&[[300u32, 301, 302]], &Device::Cpu)?;
//! let context = CpContext::single(Tokens::single_document(1, 3))?; // one rank; `CpContext::new` for more
//! let inputs = Inputs::text(ids.clone());
//! let embeds = model.embed(&inputs, &mut ())?;
//! let local = model.shard(&embeds, inputs.position_ids_abs.as_ref(), &context)?;
//! let hidden = model.decode(&local, &context, &mut ())?;
//! let labels = context.shard_labels(&ids.to_dtype(DType::I64)?)?;
//! let gradients = model.loss(&hidden, &labels)?.backward()?;
//! # Ok(())
//! # }
//! ```

mod attention;
mod config;
mod decoder;
mod delta_net;
mod layer;
mod model;
mod moe;
mod names;
pub mod vision;

pub use candle_cp_layers::{
    CONFIG_FILE, Error, FileFault, LoadOptions, LoraError, LoraOptions, LoraReport, LoraTargets, Mismatch, ModelConfig,
    Notice, OtherPrefix, Part, Recompute, Result, Role, SaveOptions, Tap, TargetMatches, TensorSpec, Weights,
    WrongShape,
};
pub use config::{
    Architecture, Config, DeltaNetConfig, LayerKind, MlpConfig, MoeConfig, RopeConfig, TextConfig, VisionConfig,
};
pub use model::{Inputs, LocalInputs, Model};
pub use names::tensors;
