//! The text model's part of the configuration.

use super::fields::Fields;
use super::rope::RopeConfig;
use crate::error::{Error, Result};
use candle_cp::{LayerWork, MaskRule};

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
}

/// The text model.
#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads, the same in all layers.
    pub num_attention_heads: usize,
    /// One entry per decoder layer.
    pub layers: Vec<LayerConfig>,
    /// Window of the sliding layers, in tokens: a query sees itself and `sliding_window - 1` tokens before it.
    pub sliding_window: usize,
    /// Tokens of an image see each other on sliding layers (`use_bidirectional_attention` is `"vision"`).
    pub bidirectional_images: bool,
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
    pub(super) fn read(fields: &Fields) -> Result<Self> {
        check_supported(fields)?;
        let layers = read_layers(fields)?;
        let bidirectional_images = match fields.text("use_bidirectional_attention")? {
            None => false,
            Some("vision") => true,
            Some(_) => {
                let reason = "not supported yet; allowed: null, \"vision\"";
                return Err(fields.refuse("use_bidirectional_attention", reason));
            }
        };
        let vocab_size = fields.size("vocab_size")?;
        // An absent pad token means 0, as in the library that writes these files; null means that there is none.
        let pad_token_id = fields.token_or("pad_token_id", 0)?;
        if pad_token_id.is_some_and(|id| id as usize >= vocab_size) {
            return Err(fields.refuse("pad_token_id", format!("must be below vocab_size {vocab_size}")));
        }
        Ok(Self {
            vocab_size,
            hidden_size: fields.size("hidden_size")?,
            intermediate_size: fields.size("intermediate_size")?,
            num_hidden_layers: layers.len(),
            num_attention_heads: fields.size("num_attention_heads")?,
            sliding_rope: read_rope(fields, &layers, LayerKind::Sliding)?,
            full_rope: read_rope(fields, &layers, LayerKind::Full)?,
            layers,
            sliding_window: fields.size("sliding_window")?,
            bidirectional_images,
            attention_bias: fields.flag("attention_bias", false)?,
            final_logit_softcapping: fields.positive_if_present("final_logit_softcapping")?,
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            initializer_range: fields.positive_if_present("initializer_range")?.unwrap_or(0.02),
            pad_token_id,
            bos_token_id: fields.token("bos_token_id")?,
        })
    }

    /// What a layer type may see: images are bidirectional on sliding layers only, and only if the configuration says so.
    pub fn mask_rule(&self, kind: LayerKind) -> MaskRule {
        match kind {
            LayerKind::Full => MaskRule::causal(),
            LayerKind::Sliding if self.bidirectional_images => MaskRule::sliding(self.sliding_window).with_groups(),
            LayerKind::Sliding => MaskRule::sliding(self.sliding_window),
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
fn check_supported(fields: &Fields) -> Result<()> {
    fields.only("model_type", "gemma4_text")?;
    fields.only("hidden_activation", "gelu_pytorch_tanh")?;
    fields.refuse_feature("enable_moe_block", "mixture-of-experts layers are")?;
    if !fields.contains("hidden_size_per_layer_input") {
        let reason = "an absent value means 256 per-layer embeddings, which are not supported yet; allowed: 0";
        return Err(fields.refuse("hidden_size_per_layer_input", reason));
    }
    fields.refuse_feature("hidden_size_per_layer_input", "per-layer embeddings are")?;
    fields.refuse_feature("num_kv_shared_layers", "layers that share keys and values are")?;
    fields.refuse_feature("attention_dropout", "attention dropout is")
}

fn read_layers(fields: &Fields) -> Result<Vec<LayerConfig>> {
    let kinds = read_layer_types(fields)?;
    let heads = fields.size("num_attention_heads")?;
    let head_dim = fields.size("head_dim")?;
    let key_value_heads = fields.size("num_key_value_heads")?;
    let keys_are_values = fields.flag("attention_k_eq_v", false)?;
    let mut layers: Vec<LayerConfig> = kinds
        .into_iter()
        .map(|kind| LayerConfig {
            kind,
            head_dim,
            num_key_value_heads: key_value_heads,
            keys_are_values: keys_are_values && kind == LayerKind::Full,
        })
        .collect();
    match fields.get("per_layer_config") {
        Some(value) => override_layers(fields, value, &mut layers)?,
        None => override_full_layers(fields, keys_are_values, &mut layers)?,
    }
    for (index, layer) in layers.iter().enumerate() {
        check_layer(fields, index, layer, heads, &layers)?;
    }
    Ok(layers)
}

fn read_layer_types(fields: &Fields) -> Result<Vec<LayerKind>> {
    let names = fields.texts("layer_types")?;
    let count = fields.size("num_hidden_layers")?;
    if names.len() != count {
        let reason = format!("layer_types has {} entries; the two must agree", names.len());
        return Err(fields.refuse("num_hidden_layers", reason));
    }
    let kind = |name: &&str| match *name {
        "sliding_attention" => Ok(LayerKind::Sliding),
        "full_attention" => Ok(LayerKind::Full),
        other => {
            let reason = format!(
                "layer type \"{other}\" is not supported yet; allowed: \"sliding_attention\", \"full_attention\""
            );
            Err(fields.refuse("layer_types", reason))
        }
    };
    let kinds = names.iter().map(kind).collect::<Result<Vec<_>>>()?;
    if kinds.last() != Some(&LayerKind::Full) {
        return Err(fields.refuse("layer_types", "the last layer must be \"full_attention\""));
    }
    Ok(kinds)
}

/// The newer spelling: `per_layer_config: { "<layer>": { head_dim, num_key_value_heads } }`.
fn override_layers(fields: &Fields, value: &serde_json::Value, layers: &mut [LayerConfig]) -> Result<()> {
    let path = fields.name("per_layer_config");
    for (key, settings) in Fields::new(&path, value)?.iter() {
        let count = layers.len();
        let layer = key.parse::<usize>().ok().and_then(|index| layers.get_mut(index));
        let layer = layer.ok_or_else(|| Error::Config {
            field: path.clone(),
            value: format!("\"{key}\""),
            reason: format!("a layer index from 0 to {} is needed", count - 1),
        })?;
        let path = format!("{path}.{key}");
        let settings = Fields::new(&path, settings)?;
        for (name, _) in settings.iter() {
            if !["head_dim", "num_key_value_heads"].contains(&name.as_str()) {
                return Err(settings.refuse(name, "not supported yet; allowed: head_dim, num_key_value_heads"));
            }
        }
        if let Some(head_dim) = settings.size_if_present("head_dim")? {
            layer.head_dim = head_dim;
        }
        if let Some(heads) = settings.size_if_present("num_key_value_heads")? {
            layer.num_key_value_heads = heads;
        }
    }
    Ok(())
}

/// The older spelling: `global_head_dim` and, only with `attention_k_eq_v`, `num_global_key_value_heads`.
fn override_full_layers(fields: &Fields, keys_are_values: bool, layers: &mut [LayerConfig]) -> Result<()> {
    let missing = fields.missing(&["global_head_dim"]);
    if !missing.is_empty() {
        return Err(Error::MissingFields { fields: missing });
    }
    let head_dim = fields.size("global_head_dim")?;
    let heads = match keys_are_values {
        true => fields.size_if_present("num_global_key_value_heads")?,
        false => None,
    };
    for layer in layers.iter_mut().filter(|layer| layer.kind == LayerKind::Full) {
        layer.head_dim = head_dim;
        layer.num_key_value_heads = heads.unwrap_or(layer.num_key_value_heads);
    }
    Ok(())
}

fn check_layer(fields: &Fields, index: usize, layer: &LayerConfig, heads: usize, layers: &[LayerConfig]) -> Result<()> {
    let refuse = |field: &str, value: usize, reason: String| Error::Config {
        field: fields.name(field),
        value: value.to_string(),
        reason,
    };
    if !layer.head_dim.is_multiple_of(2) {
        let reason = format!("the head size of layer {index} must be even, because dimensions turn in pairs");
        return Err(refuse("head_dim", layer.head_dim, reason));
    }
    if !heads.is_multiple_of(layer.num_key_value_heads) {
        let key_heads = layer.num_key_value_heads;
        let reason = format!("must be a multiple of the {key_heads} key heads of layer {index}");
        return Err(refuse("num_attention_heads", heads, reason));
    }
    match layers.iter().find(|other| other.kind == layer.kind) {
        Some(first) if first.head_dim != layer.head_dim => {
            let (first, kind) = (first.head_dim, layer.kind.name());
            let reason =
                format!("layer {index} differs from an earlier {kind} layer with {first}, but they share a rope");
            Err(refuse("per_layer_config", layer.head_dim, reason))
        }
        _ => Ok(()),
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
