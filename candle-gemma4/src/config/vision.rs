//! The vision tower's part of the configuration.

use candle_cp_layers::{Error, Fields, Result};

/// The vision tower.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionConfig {
    /// Width of the tower's residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of encoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// Size of a head; a multiple of 4.
    pub head_dim: usize,
    /// Added to the mean square in every norm of the tower and in the norm before the projection.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies, of both axes.
    pub rope_theta: f64,
    /// Side of a patch, in pixels.
    pub patch_size: usize,
    /// Side of the square of patches that becomes one soft token.
    pub pooling_kernel_size: usize,
    /// Rows of each axis' table of positions.
    pub position_embedding_size: usize,
    /// Inputs and outputs of the layers' projections are cut to bounds from the checkpoint.
    pub use_clipped_linears: bool,
    /// The pooled features are shifted and scaled by `std_bias` and `std_scale`.
    pub standardize: bool,
    /// Standard deviation that fresh matrices have at least.
    pub initializer_range: f64,
}

const REQUIRED: [&str; 11] = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "patch_size",
    "pooling_kernel_size",
    "position_embedding_size",
];

impl VisionConfig {
    /// Names of the required fields that are absent.
    pub(super) fn missing(fields: &Fields) -> Vec<String> {
        fields.missing(&REQUIRED)
    }

    /// Reads and checks `vision_config`.
    pub(super) fn read(fields: &Fields) -> Result<Self> {
        fields.only("model_type", "gemma4_vision")?;
        fields.only("hidden_activation", "gelu_pytorch_tanh")?;
        fields.refuse_feature("attention_bias", "biases in the vision tower are")?;
        fields.refuse_feature("attention_dropout", "attention dropout is")?;
        let config = Self {
            hidden_size: fields.size("hidden_size")?,
            intermediate_size: fields.size("intermediate_size")?,
            num_hidden_layers: fields.listed("num_hidden_layers")?,
            num_attention_heads: fields.size("num_attention_heads")?,
            num_key_value_heads: fields.size("num_key_value_heads")?,
            head_dim: fields.size("head_dim")?,
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            rope_theta: read_rope_theta(fields)?,
            patch_size: fields.size("patch_size")?,
            pooling_kernel_size: fields.size("pooling_kernel_size")?,
            position_embedding_size: fields.size("position_embedding_size")?,
            use_clipped_linears: fields.flag("use_clipped_linears", false)?,
            standardize: fields.flag("standardize", false)?,
            initializer_range: fields.positive_if_present("initializer_range")?.unwrap_or(0.02),
        };
        if !config.head_dim.is_multiple_of(4) {
            let reason = "must be a multiple of 4: each half of a head turns in pairs";
            return Err(fields.refuse("head_dim", reason));
        }
        if !config.num_attention_heads.is_multiple_of(config.num_key_value_heads) {
            let reason = format!("must be a multiple of num_key_value_heads {}", config.num_key_value_heads);
            return Err(fields.refuse("num_attention_heads", reason));
        }
        Ok(config)
    }

    /// Numbers in one patch: three colours of `patch_size` x `patch_size` pixels.
    pub fn patch_len(&self) -> usize {
        3 * self.patch_size * self.patch_size
    }

    /// Angle per position of each pair of dimensions of *half* a head (one axis): `[head_dim / 4]`.
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        let axis_dim = self.head_dim / 2;
        let frequency = |pair: usize| self.rope_theta.powf(-((2 * pair) as f64) / axis_dim as f64);
        (0..axis_dim / 2).map(frequency).collect()
    }
}

fn read_rope_theta(fields: &Fields) -> Result<f64> {
    let path = fields.name("rope_parameters");
    let value = fields.get("rope_parameters").unwrap_or(&serde_json::Value::Null);
    let rope = Fields::new(&path, value)?;
    let missing = rope.missing(&["rope_theta"]);
    if !missing.is_empty() {
        return Err(Error::MissingFields { fields: missing });
    }
    // "default" is the older name of the same two-axis rope.
    if let Some("default" | "axial") | None = rope.text("rope_type")? {
        return rope.positive("rope_theta");
    }
    Err(rope.refuse("rope_type", "not supported yet; allowed: \"axial\", \"default\""))
}
