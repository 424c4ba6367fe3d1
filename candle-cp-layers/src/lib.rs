//! What the model crates share: layers with a backward pass, adapters, weight files, recomputation.
//!
//! Nothing here knows a model by name. A model crate describes its tensors by a [`ModelConfig`], gets them from
//! [`Weights`], and puts its layers together from the parts below.

pub mod clip;
mod embed;
mod error;
mod features;
mod fields;
mod fused;
mod head;
mod linear;
mod lora;
mod mlp;
pub mod moe;
mod norm;
mod random;
mod recompute;
mod rope;
mod spec;
mod tap;
mod weights;

pub use embed::{Embedding, EmbeddingSettings, Placeholders, table_scale};
pub use error::{Error, Result};
pub use features::{Features, Media, read_frame_mask};
pub use fields::Fields;
pub use fused::{Activation, testing};
pub use head::Head;
pub use linear::{Linear, project};
pub use lora::{Adapter, DropoutStep, LoraError, LoraOptions, LoraReport, LoraTargets, TargetMatches};
pub use mlp::{Mlp, activate, gated};
pub use norm::{LayerNorm, RmsNorm, wide};
pub use recompute::{GradientSink, Recompute};
pub use rope::Rope;
pub use spec::{CONFIG_FILE, LM_HEAD, ModelConfig, Role, Table, TensorSpec};
pub use tap::{Tap, record_numbered};
pub use weights::{FileFault, LoadOptions, Mismatch, Notice, OtherPrefix, Part, SaveOptions, Weights, WrongShape};
