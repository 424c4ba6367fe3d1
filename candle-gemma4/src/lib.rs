//! Trainable Gemma 4 on Candle, ready for context parallelism.
//!
//! All families (dense, with experts, effective with per-layer embeddings and shared keys, unified), images and audio,
//! with the names, shapes and settings of released checkpoints. Every operation has a backward pass. A model is ordinary single-device code: it embeds
//! the full sequence, and its decoder runs on whatever slice of it a [`candle_cp::CpContext`] gives to this rank.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use candle_core::{DType, Device, Tensor};
//! use candle_cp::{CpContext, Tokens};
//! use candle_gemma4::{Config, Inputs, Model, Weights};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = Path::new("gemma-4");
//! let config = Config::from_folder(folder)?;
//! let weights = Weights::load(folder, &config, DType::F32, &Device::Cpu)?;
//! let model = Model::new(&config, &weights)?;
//!
//! let ids = Tensor::new(&[[2u32, 300, 301, 302]], &Device::Cpu)?;
//! let context = CpContext::single(Tokens::single_document(1, 4))?; // one rank; `CpContext::new` for more
//! let embeds = model.embed(&Inputs::text(ids.clone()), &mut ())?;
//! let local = model.shard(&embeds, &ids, &context)?;
//! let hidden = model.decode(&local, &context, &mut ())?;
//! let labels = context.shard_labels(&ids.to_dtype(DType::I64)?)?;
//! let gradients = model.loss(&hidden, &labels)?.backward()?;
//! # Ok(())
//! # }
//! ```

mod attention;
mod audio;
mod config;
mod decoder;
mod embed;
mod encoders;
mod frame_embedder;
mod layer;
mod model;
mod moe;
mod names;
mod patch_embedder;
mod patches;
mod per_layer;
mod vision;

pub use candle_cp_layers::{
    CONFIG_FILE, Error, FileFault, LoadOptions, LoraError, LoraOptions, LoraReport, LoraTargets, Mismatch, ModelConfig,
    Notice, OtherPrefix, Part, Recompute, Result, Role, SaveOptions, Tap, TargetMatches, TensorSpec, Weights,
    WrongShape,
};
pub use config::{
    Architecture, AudioConfig, Config, FrameEmbedderConfig, LayerConfig, LayerKind, MoeConfig, PatchEmbedderConfig,
    PerLayerConfig, RopeConfig, RopeKind, TextConfig, VisionConfig, vision_groups,
};
pub use model::{Inputs, LocalInputs, Model};
pub use names::tensors;
