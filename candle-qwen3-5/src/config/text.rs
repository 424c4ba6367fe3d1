//! The text model's part of the configuration.

use super::Architecture;
use super::delta::{self, DeltaNetConfig};
use super::moe::{self, MoeConfig};
use super::rope::RopeConfig;
use candle_cp::{LayerWork, MaskRule};
use candle_cp_layers::{Fields, Result};

/// What mixes the tokens in a decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// The gated delta net: a recurrence with a state.
    Linear,
    /// Gated attention to everything before.
    Full,
}

impl LayerKind {
    /// The name in `layer_types`.
    pub fn name(self) -> &'static str {
        match self {
            LayerKind::Linear => "linear_attention",
            LayerKind::Full => "full_attention",
        }
    }
}

/// The second half of every decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpConfig {
    /// A gated MLP of this width.
    Dense(usize),
    /// Experts.
    Moe(MoeConfig),
}

/// The text model.
#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// One entry per decoder layer.
    pub layers: Vec<LayerKind>,
    /// Number of query heads of full attention.
    pub num_attention_heads: usize,
    /// Number of key and value heads of full attention.
    pub num_key_value_heads: usize,
    /// Size of a head of full attention.
    pub head_dim: usize,
    /// The projections of full attention have biases.
    pub attention_bias: bool,
    /// Rotary settings of full attention.
    pub rope: RopeConfig,
    /// The gated delta net of linear layers.
    pub delta_net: DeltaNetConfig,
    /// What follows in every layer.
    pub mlp: MlpConfig,
    /// Added to the mean square in every norm of the text model.
    pub rms_norm_eps: f64,
    /// Standard deviation that fresh matrices have at least.
    pub initializer_range: f64,
    /// Padding token, if there is one; its embedding gets no gradient through the look-up.
    pub pad_token_id: Option<u32>,
    /// First token of a text.
    pub bos_token_id: Option<u32>,
}

const REQUIRED: [&str; 8] = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "rms_norm_eps",
];

/// Every how many layers there is a full one if `layer_types` is absent.
const FULL_INTERVAL: usize = 4;

impl TextConfig {
    /// Names of the required fields that are absent.
    pub(super) fn missing(fields: &Fields, architecture: Architecture) -> Vec<String> {
        let of_mlp: &[&str] = match architecture.has_experts() {
            true => &moe::REQUIRED,
            false => &["intermediate_size"],
        };
        fields.missing(&[&REQUIRED[..], &delta::REQUIRED, of_mlp].concat())
    }

    /// Reads and checks `text_config`, or the whole file of a text-only checkpoint.
    pub(super) fn read(fields: &Fields, architecture: Architecture) -> Result<Self> {
        check_supported(fields, architecture)?;
        let (heads, key_heads) = (fields.size("num_attention_heads")?, fields.size("num_key_value_heads")?);
        if !heads.is_multiple_of(key_heads) {
            let reason = format!("must be a multiple of num_key_value_heads {key_heads}");
            return Err(fields.refuse("num_attention_heads", reason));
        }
        let (vocab_size, head_dim) = (fields.size("vocab_size")?, fields.size("head_dim")?);
        let pad_token_id = fields.token("pad_token_id")?;
        if pad_token_id.is_some_and(|id| id as usize >= vocab_size) {
            return Err(fields.refuse("pad_token_id", format!("must be below vocab_size {vocab_size}")));
        }
        Ok(Self {
            vocab_size,
            hidden_size: fields.size("hidden_size")?,
            layers: read_layers(fields)?,
            num_attention_heads: heads,
            num_key_value_heads: key_heads,
            head_dim,
            attention_bias: fields.flag("attention_bias", false)?,
            rope: RopeConfig::read(fields, head_dim)?,
            delta_net: DeltaNetConfig::read(fields)?,
            mlp: match architecture.has_experts() {
                true => MlpConfig::Moe(MoeConfig::read(fields)?),
                false => MlpConfig::Dense(fields.size("intermediate_size")?),
            },
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            initializer_range: fields.positive_if_present("initializer_range")?.unwrap_or(0.02),
            pad_token_id,
            bos_token_id: fields.token("bos_token_id")?,
        })
    }

    /// What a token sees in full attention layers: everything before it in its document.
    pub fn mask_rule(&self) -> MaskRule {
        MaskRule::causal()
    }

    /// What attention costs per allowed pair: what [`candle_cp::SequenceLayout::balanced`] evens out. The gated delta net
    /// costs the same per token everywhere, but for the maps of pieces that a document passes through: many small pieces
    /// cost more. A model of nothing else is as even with any weight.
    pub fn layer_work(&self) -> Vec<LayerWork> {
        let full = self.layers.iter().filter(|kind| **kind == LayerKind::Full).count();
        let weight = (full.max(1) * self.num_attention_heads * self.head_dim) as f64;
        vec![LayerWork { rule: self.mask_rule(), weight }]
    }
}

/// Refuses what this crate would silently get wrong.
fn check_supported(fields: &Fields, architecture: Architecture) -> Result<()> {
    fields.only("model_type", architecture.text_model_type())?;
    fields.only("hidden_act", "silu")?;
    fields.only("mamba_ssm_dtype", "float32")?;
    fields.refuse_feature("attention_dropout", "attention dropout is")?;
    match fields.flag("attn_output_gate", true)? {
        true => Ok(()),
        false => Err(fields.refuse("attn_output_gate", "attention has an output gate here; allowed: true")),
    }
}

fn read_layers(fields: &Fields) -> Result<Vec<LayerKind>> {
    let count = fields.listed("num_hidden_layers")?;
    if fields.get("layer_types").is_none() {
        let interval = fields.size_if_present("full_attention_interval")?.unwrap_or(FULL_INTERVAL);
        let kind = |layer: usize| if layer.is_multiple_of(interval) { LayerKind::Full } else { LayerKind::Linear };
        return Ok((1..=count).map(kind).collect());
    }
    let names = fields.texts("layer_types")?;
    if names.len() != count {
        let reason = format!("layer_types has {} entries; the two must agree", names.len());
        return Err(fields.refuse("num_hidden_layers", reason));
    }
    let kind = |name: &&str| {
        let known = [LayerKind::Linear, LayerKind::Full].into_iter().find(|kind| kind.name() == *name);
        known.ok_or_else(|| {
            let allowed = "\"linear_attention\", \"full_attention\"";
            fields.refuse("layer_types", format!("layer type \"{name}\" is not supported yet; allowed: {allowed}"))
        })
    };
    names.iter().map(kind).collect()
}
