//! The text model's part of the configuration.

use super::Architecture;
use super::layers;
use super::moe::MoeConfig;
use super::rope::RopeConfig;
use candle_cp::{LayerWork, MaskRule};
use candle_cp_layers::{Error, Fields, Result};

/// Kind of attention of a decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayerKind {
    /// Sees the last `sliding_window` tokens; image blocks may be bidirectional.
    Sliding,
    /// Sees everything before it.
    Full,
}

impl LayerKind {
    /// The name in `layer_types` and in `rope_parameters`.
    pub fn name(self) -> &'static str {
        match self {
            LayerKind::Sliding => "sliding_attention",
            LayerKind::Full => "full_attention",
        }
    }
}

/// What may differ from decoder layer to decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// Sliding or full attention.
    pub kind: LayerKind,
    /// Size of a head.
    pub head_dim: usize,
    /// Number of key (and value) heads.
    pub num_key_value_heads: usize,
    /// The keys' projection also gives the values; there is no `v_proj`.
    pub keys_are_values: bool,
    /// The earlier layer whose keys and values this one reads; `None` for its own.
    pub keys_of: Option<usize>,
    /// Width inside the MLP.
    pub intermediate_size: usize,
}

/// Embeddings of the token ids that enter every decoder layer on their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerConfig {
    /// Number of token ids in their table.
    pub vocab_size: usize,
    /// Width per layer.
    pub width: usize,
}

/// The text model.
#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads, the same in all layers.
    pub num_attention_heads: usize,
    /// One entry per decoder layer.
    pub layers: Vec<LayerConfig>,
    /// Experts beside the MLP; `None` for none.
    pub moe: Option<MoeConfig>,
    /// Per-layer embeddings; `None` for none.
    pub per_layer: Option<PerLayerConfig>,
    /// Window of the sliding layers, in tokens: a query sees itself and `sliding_window - 1` tokens before it.
    pub sliding_window: usize,
    /// Tokens of an image see each other on sliding layers (`use_bidirectional_attention` is `"vision"`).
    pub bidirectional_images: bool,
    /// Where they do, they do so on full layers as well and whatever the window (unified models).
    pub whole_images: bool,
    /// The projections of attention have biases.
    pub attention_bias: bool,
    /// Soft cap of the logits; `None` for no cap.
    pub final_logit_softcapping: Option<f64>,
    /// Added to the mean square in every norm of the text model.
    pub rms_norm_eps: f64,
    /// Standard deviation that fresh matrices have at least.
    pub initializer_range: f64,
    /// Padding token; its embedding gets no gradient through the look-up.
    pub pad_token_id: Option<u32>,
    /// First token of a text.
    pub bos_token_id: Option<u32>,
    /// Rotary settings of sliding layers; `None` if there is no such layer.
    pub sliding_rope: Option<RopeConfig>,
    /// Rotary settings of full layers; `None` if there is no such layer.
    pub full_rope: Option<RopeConfig>,
}

const REQUIRED: [&str; 11] = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "rope_parameters",
    "sliding_window",
    "rms_norm_eps",
];

impl TextConfig {
    /// Names of the required fields that are absent.
    pub(super) fn missing(fields: &Fields) -> Vec<String> {
        fields.missing(&REQUIRED)
    }

    /// Reads and checks `text_config`, or the whole file of a text-only checkpoint.
    pub(super) fn read(fields: &Fields, architecture: Architecture) -> Result<Self> {
        check_supported(fields, architecture)?;
        let layers = layers::read(fields)?;
        let bidirectional_images = read_bidirectional_images(fields, architecture)?;
        let vocab_size = fields.size("vocab_size")?;
        // An absent pad token means 0, as in the library that writes these files; null means that there is none.
        let pad_token_id = fields.token_or("pad_token_id", 0)?;
        if pad_token_id.is_some_and(|id| id as usize >= vocab_size) {
            return Err(fields.refuse("pad_token_id", format!("must be below vocab_size {vocab_size}")));
        }
        Ok(Self {
            vocab_size,
            hidden_size: fields.size("hidden_size")?,
            num_hidden_layers: layers.len(),
            num_attention_heads: fields.size("num_attention_heads")?,
            sliding_rope: read_rope(fields, &layers, LayerKind::Sliding)?,
            full_rope: read_rope(fields, &layers, LayerKind::Full)?,
            layers,
            moe: MoeConfig::read(fields)?,
            per_layer: read_per_layer(fields, architecture, pad_token_id)?,
            sliding_window: fields.size("sliding_window")?,
            bidirectional_images,
            whole_images: architecture.is_unified(),
            attention_bias: fields.flag("attention_bias", false)?,
            final_logit_softcapping: fields.positive_if_present("final_logit_softcapping")?,
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            initializer_range: fields.positive_if_present("initializer_range")?.unwrap_or(0.02),
            pad_token_id,
            bos_token_id: fields.token("bos_token_id")?,
        })
    }

    /// What a layer type may see. Images are bidirectional only if the configuration says so, and then on sliding layers
    /// only, where the window cuts them. In unified models they are bidirectional on all layers, and whole.
    ///
    /// The difference is Hugging Face's: the forward pass of its unified models, which trains them, joins image blocks to
    /// finished masks (its `generate` builds those of the other models).
    pub fn mask_rule(&self, kind: LayerKind) -> MaskRule {
        let rule = match kind {
            LayerKind::Full => MaskRule::causal(),
            LayerKind::Sliding => MaskRule::sliding(self.sliding_window),
        };
        match (self.bidirectional_images, kind) {
            (false, _) => rule,
            (true, _) if self.whole_images => rule.with_whole_groups(),
            (true, LayerKind::Sliding) => rule.with_groups(),
            (true, LayerKind::Full) => rule,
        }
    }

    /// What attention costs per allowed pair, by layer type: what [`candle_cp::SequenceLayout::balanced`] evens out.
    pub fn layer_work(&self) -> Vec<LayerWork> {
        let of_kind = |kind: LayerKind| {
            let widths = self.layers.iter().filter(|layer| layer.kind == kind).map(|layer| layer.head_dim);
            let weight = (widths.sum::<usize>() * self.num_attention_heads) as f64;
            LayerWork { rule: self.mask_rule(kind), weight }
        };
        [LayerKind::Sliding, LayerKind::Full].map(of_kind).into_iter().filter(|layers| layers.weight > 0.0).collect()
    }

    /// Rotary settings of a layer type that the model has.
    pub fn rope(&self, kind: LayerKind) -> Option<&RopeConfig> {
        match kind {
            LayerKind::Sliding => self.sliding_rope.as_ref(),
            LayerKind::Full => self.full_rope.as_ref(),
        }
    }

    /// Head size of a layer type; `None` if the model has no such layer.
    pub fn head_dim(&self, kind: LayerKind) -> Option<usize> {
        self.layers.iter().find(|layer| layer.kind == kind).map(|layer| layer.head_dim)
    }
}

/// Refuses what this crate would silently get wrong.
fn check_supported(fields: &Fields, architecture: Architecture) -> Result<()> {
    fields.only("model_type", architecture.text_model_type())?;
    fields.only("hidden_activation", "gelu_pytorch_tanh")?;
    fields.refuse_feature("attention_dropout", "attention dropout is")?;
    if architecture.is_unified() {
        // The library that writes these files knows neither for this family and would ignore them.
        fields.refuse_feature("enable_moe_block", "mixtures of experts in unified models are")?;
        fields.refuse_feature("hidden_size_per_layer_input", "per-layer embeddings in unified models are")?;
    }
    Ok(())
}

/// An absent value means `"vision"` in unified models and none in others.
fn read_bidirectional_images(fields: &Fields, architecture: Architecture) -> Result<bool> {
    match fields.text("use_bidirectional_attention")? {
        None => Ok(architecture.is_unified() && !fields.contains("use_bidirectional_attention")),
        Some("vision") => Ok(true),
        Some(_) => {
            let reason = "not supported yet; allowed: null, \"vision\"";
            Err(fields.refuse("use_bidirectional_attention", reason))
        }
    }
}

/// Absent values mean the sizes of the released models, as in the library that writes these files.
fn read_per_layer(
    fields: &Fields,
    architecture: Architecture,
    pad_token_id: Option<u32>,
) -> Result<Option<PerLayerConfig>> {
    if architecture.is_unified() {
        return Ok(None);
    }
    let width = match fields.contains("hidden_size_per_layer_input") {
        true => fields.count_or_zero("hidden_size_per_layer_input")?,
        false => 256,
    };
    if width == 0 {
        return Ok(None);
    }
    let vocab_size = fields.size_if_present("vocab_size_per_layer_input")?.unwrap_or(262_144);
    match pad_token_id {
        Some(id) if id as usize >= vocab_size => {
            let reason =
                format!("must be below vocab_size_per_layer_input {vocab_size}: that table has its row as well");
            Err(fields.refuse("pad_token_id", reason))
        }
        None if !architecture.is_text_only() => {
            let reason = "a token id is needed: image and audio placeholders have its per-layer embeddings";
            Err(fields.refuse("pad_token_id", reason))
        }
        _ => Ok(Some(PerLayerConfig { vocab_size, width })),
    }
}

fn read_rope(fields: &Fields, layers: &[LayerConfig], kind: LayerKind) -> Result<Option<RopeConfig>> {
    if !layers.iter().any(|layer| layer.kind == kind) {
        return Ok(None);
    }
    let path = fields.name("rope_parameters");
    let value = fields.get("rope_parameters").unwrap_or(&serde_json::Value::Null);
    let ropes = Fields::new(&path, value)?;
    let path = ropes.name(kind.name());
    match ropes.get(kind.name()) {
        Some(value) => RopeConfig::read(&path, value).map(Some),
        None => Err(Error::MissingFields { fields: vec![path] }),
    }
}
