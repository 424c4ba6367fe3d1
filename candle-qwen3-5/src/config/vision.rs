//! The vision tower's part of the configuration.

use serde_json::Value;

use super::Architecture;
use crate::vision::VisionShape;
use candle_cp_layers::{Activation, Fields, Result};

/// Base of the rotary embedding where the file does not say so.
const THETA: f64 = 10_000.0;

/// The vision tower.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionConfig {
    /// Sizes and settings.
    pub shape: VisionShape,
    /// Standard deviation that fresh matrices have at least.
    pub initializer_range: f64,
}

const REQUIRED: [&str; 10] = [
    "depth",
    "hidden_size",
    "num_heads",
    "intermediate_size",
    "in_channels",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "num_position_embeddings",
    "out_hidden_size",
];

impl VisionConfig {
    /// Names of the required fields that are absent.
    pub(super) fn missing(fields: &Fields) -> Vec<String> {
        fields.missing(&REQUIRED)
    }

    /// Reads and checks `vision_config` of a model whose text part is `text_hidden` wide.
    pub(super) fn read(fields: &Fields, architecture: Architecture, text_hidden: usize) -> Result<Self> {
        // Released files have the type of the whole checkpoint here.
        let released = architecture.model_type();
        if fields.text("model_type")? != Some(released) {
            fields.only("model_type", &format!("{released}_vision"))?;
        }
        fields.only("hidden_act", "gelu_pytorch_tanh")?;
        let is_empty = |list: &Value| list.as_array().is_some_and(Vec::is_empty);
        if fields.get("deepstack_visual_indexes").is_some_and(|list| !is_empty(list)) {
            let reason = "features of inner layers are not supported yet; allowed: null or an empty list";
            return Err(fields.refuse("deepstack_visual_indexes", reason));
        }
        let shape = VisionShape {
            depth: fields.listed("depth")?,
            hidden_size: fields.size("hidden_size")?,
            num_heads: fields.size("num_heads")?,
            intermediate_size: fields.size("intermediate_size")?,
            activation: Activation::GeluTanh,
            patch_size: fields.size("patch_size")?,
            temporal_patch_size: fields.size("temporal_patch_size")?,
            spatial_merge_size: fields.size("spatial_merge_size")?,
            num_position_embeddings: fields.size("num_position_embeddings")?,
            out_hidden_size: fields.size("out_hidden_size")?,
            in_channels: fields.size("in_channels")?,
            rope_theta: read_theta(fields)?,
        };
        if shape.out_hidden_size != text_hidden {
            let reason = format!("must be the text model's hidden_size {text_hidden}: its tokens are replaced");
            return Err(fields.refuse("out_hidden_size", reason));
        }
        let initializer_range = fields.positive_if_present("initializer_range")?.unwrap_or(0.02);
        Ok(Self { shape, initializer_range })
    }
}

fn read_theta(fields: &Fields) -> Result<f64> {
    let Some(value) = fields.get("rope_parameters") else { return Ok(THETA) };
    let path = fields.name("rope_parameters");
    let rope = Fields::new(&path, value)?;
    match rope.text("rope_type")? {
        // "default" is the older name of the same two-axis rope.
        None | Some("default" | "axial") => Ok(rope.positive_if_present("rope_theta")?.unwrap_or(THETA)),
        Some(_) => Err(rope.refuse("rope_type", "not supported yet; allowed: \"axial\", \"default\"")),
    }
}
