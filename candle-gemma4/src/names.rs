//! The one table of a model's tensors: name in a checkpoint, shape, and what it is.

pub(crate) mod moe;

use crate::audio;
use crate::config::{Architecture, Config, LayerConfig, PatchEmbedderConfig, TextConfig, VisionConfig};
use candle_cp_layers::{ModelConfig, Role, Table, TensorSpec, clip};

pub(crate) use candle_cp_layers::LM_HEAD;

pub(crate) const VISION_PROJECTION: &str = "model.embed_vision.embedding_projection.weight";
pub(crate) const AUDIO_PROJECTION: &str = "model.embed_audio.embedding_projection.weight";
pub(crate) const PATCH_PROJECTION: &str = "model.vision_tower.patch_embedder.input_proj.weight";
pub(crate) const POSITION_TABLE: &str = "model.vision_tower.patch_embedder.position_embedding_table";
/// Prefix of what a unified model has in the place of a vision tower.
pub(crate) const PATCH_EMBEDDER: &str = "model.vision_embedder";
pub(crate) const PER_LAYER_GATE: &str = "per_layer_input_gate";
pub(crate) const PER_LAYER_PROJECTION: &str = "per_layer_projection";
pub(crate) const POST_PER_LAYER_NORM: &str = "post_per_layer_input_norm";
pub(crate) const STD_BIAS: &str = "model.vision_tower.std_bias";
pub(crate) const STD_SCALE: &str = "model.vision_tower.std_scale";

/// Prefix of the text model's tensors.
fn text_prefix(config: &Config) -> &'static str {
    match config.architecture {
        Architecture::Multimodal | Architecture::Unified => "model.language_model",
        Architecture::TextOnly | Architecture::UnifiedTextOnly => "model",
    }
}

/// The embedding table.
pub(crate) fn embed_tokens(config: &Config) -> String {
    format!("{}.embed_tokens.weight", text_prefix(config))
}

/// The table of per-layer embeddings.
pub(crate) fn embed_tokens_per_layer(config: &Config) -> String {
    format!("{}.embed_tokens_per_layer.weight", text_prefix(config))
}

/// The projection of merged embeddings to those of all layers.
pub(crate) fn per_layer_projection(config: &Config) -> String {
    format!("{}.per_layer_model_projection.weight", text_prefix(config))
}

/// The norm over a layer's part of that projection.
pub(crate) fn per_layer_norm(config: &Config) -> String {
    format!("{}.per_layer_projection_norm.weight", text_prefix(config))
}

/// The weight of the norm after the last decoder layer.
pub(crate) fn final_norm(config: &Config) -> String {
    format!("{}.norm.weight", text_prefix(config))
}

/// Prefix of a decoder layer's tensors.
pub(crate) fn text_layer(config: &Config, index: usize) -> String {
    format!("{}.layers.{index}", text_prefix(config))
}

impl Config {
    /// The decoder layer, counted from 0, that a tensor or an adapter belongs to by its name.
    pub fn decoder_layer(&self, name: &str) -> Option<usize> {
        // Adapters are named as PEFT does.
        let name = name.strip_prefix("base_model.model.").unwrap_or(name);
        let rest = name.strip_prefix(text_prefix(self))?.strip_prefix(".layers.")?;
        rest.split_once('.')?.0.parse().ok()
    }
}

/// Prefix of a vision layer's tensors.
pub(crate) fn vision_layer(index: usize) -> String {
    format!("model.vision_tower.encoder.layers.{index}")
}

impl ModelConfig for Config {
    fn tensors(&self) -> Vec<TensorSpec> {
        tensors(self)
    }

    fn to_json(&self) -> String {
        Config::to_json(self)
    }

    /// That of the checkpoint, but for the vision embedder of unified models.
    fn module_path(&self, name: &str) -> String {
        if self.architecture != Architecture::Unified {
            return name.to_string();
        }
        if let Some(rest) = name.strip_prefix(PATCH_EMBEDDER) {
            return format!("model.embed_vision{rest}");
        }
        match VISION_PROJECTION.strip_suffix(".weight") {
            Some(projection) if projection == name => {
                name.replace(".embed_vision.", ".embed_vision.multimodal_embedder.")
            }
            _ => name.to_string(),
        }
    }
}

/// Every tensor that a checkpoint with this configuration has or may have, in no particular order.
pub fn tensors(config: &Config) -> Vec<TensorSpec> {
    let text = &config.text;
    let mut table = Table::new(text.initializer_range);
    table.matrix(embed_tokens(config), &[text.vocab_size, text.hidden_size]);
    if !config.tie_word_embeddings {
        table.matrix(LM_HEAD, &[text.vocab_size, text.hidden_size]);
    }
    if let Some(per_layer) = &text.per_layer {
        let total = text.layers.len() * per_layer.width;
        table.matrix(embed_tokens_per_layer(config), &[per_layer.vocab_size, total]);
        table.matrix(per_layer_projection(config), &[total, text.hidden_size]);
        table.push(per_layer_norm(config), &[per_layer.width], Role::Norm);
    }
    for (index, layer) in text.layers.iter().enumerate() {
        decoder_layer(&mut table, &text_layer(config, index), text, layer);
    }
    table.push(final_norm(config), &[text.hidden_size], Role::Norm);
    if let Some(vision) = &config.vision {
        table.range = vision.initializer_range;
        vision_tower(&mut table, vision);
        table.matrix(VISION_PROJECTION, &[text.hidden_size, vision.hidden_size]);
    }
    if let Some(embedder) = &config.patch_embedder {
        table.range = embedder.initializer_range;
        patch_embedder(&mut table, embedder);
        table.matrix(VISION_PROJECTION, &[text.hidden_size, embedder.width]);
    }
    if let Some(embedder) = &config.frame_embedder {
        table.range = embedder.initializer_range;
        table.matrix(AUDIO_PROJECTION, &[text.hidden_size, embedder.width]);
    }
    if let Some(audio) = &config.audio {
        table.specs.extend(audio::tensors(audio, text.hidden_size));
    }
    table.specs
}

fn decoder_layer(table: &mut Table, prefix: &str, text: &TextConfig, layer: &LayerConfig) {
    let hidden = text.hidden_size;
    let query_width = text.num_attention_heads * layer.head_dim;
    let key_width = layer.num_key_value_heads * layer.head_dim;
    let mut projections = vec![("q_proj", query_width, hidden), ("k_proj", key_width, hidden)];
    if !layer.keys_are_values {
        projections.push(("v_proj", key_width, hidden));
    }
    projections.push(("o_proj", hidden, query_width));
    let first = table.specs.len();
    for (name, outputs, inputs) in projections {
        table.matrix(format!("{prefix}.self_attn.{name}.weight"), &[outputs, inputs]);
        if text.attention_bias {
            table.push(format!("{prefix}.self_attn.{name}.bias"), &[outputs], Role::Bias);
        }
    }
    for name in ["q_norm", "k_norm"] {
        table.push(format!("{prefix}.self_attn.{name}.weight"), &[layer.head_dim], Role::HeadNorm);
    }
    if layer.keys_of.is_some() {
        // Released files carry them although the layer reads the keys and values of another one.
        let fillers = ["k_proj", "v_proj", "k_norm"].map(|name| format!("{prefix}.self_attn.{name}."));
        let is_filler = |spec: &&mut TensorSpec| fillers.iter().any(|filler| spec.name.starts_with(filler));
        table.specs[first..].iter_mut().filter(is_filler).for_each(|spec| spec.role = Role::Unused);
    }
    mlp(table, prefix, "weight", hidden, layer.intermediate_size);
    norms(table, prefix, hidden);
    if let Some(moe) = &text.moe {
        table.specs.extend(moe::tensors(prefix, hidden, moe, table.range));
    }
    if let Some(per_layer) = &text.per_layer {
        table.matrix(format!("{prefix}.{PER_LAYER_GATE}.weight"), &[per_layer.width, hidden]);
        table.matrix(format!("{prefix}.{PER_LAYER_PROJECTION}.weight"), &[hidden, per_layer.width]);
        table.push(format!("{prefix}.{POST_PER_LAYER_NORM}.weight"), &[hidden], Role::Norm);
    }
    table.push(format!("{prefix}.layer_scalar"), &[1], Role::Buffer { fresh: 1.0 });
}

fn vision_tower(table: &mut Table, vision: &VisionConfig) {
    let hidden = vision.hidden_size;
    table.matrix(PATCH_PROJECTION, &[hidden, vision.patch_len()]);
    table.matrix(POSITION_TABLE, &[2, vision.position_embedding_size, hidden]);
    let query_width = vision.num_attention_heads * vision.head_dim;
    let key_width = vision.num_key_value_heads * vision.head_dim;
    for index in 0..vision.num_hidden_layers {
        let prefix = vision_layer(index);
        for (name, outputs, inputs) in [
            ("q_proj", query_width, hidden),
            ("k_proj", key_width, hidden),
            ("v_proj", key_width, hidden),
            ("o_proj", hidden, query_width),
        ] {
            table.matrix(format!("{prefix}.self_attn.{name}.linear.weight"), &[outputs, inputs]);
        }
        mlp(table, &prefix, "linear.weight", hidden, vision.intermediate_size);
        if vision.use_clipped_linears {
            for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
                bounds(table, &format!("{prefix}.self_attn.{name}"));
            }
            for name in ["gate_proj", "up_proj", "down_proj"] {
                bounds(table, &format!("{prefix}.mlp.{name}"));
            }
        }
        norms(table, &prefix, hidden);
        for name in ["q_norm", "k_norm"] {
            table.push(format!("{prefix}.self_attn.{name}.weight"), &[vision.head_dim], Role::HeadNorm);
        }
    }
    if vision.standardize {
        table.push(STD_BIAS, &[hidden], Role::Buffer { fresh: 0.0 });
        table.push(STD_SCALE, &[hidden], Role::Buffer { fresh: 1.0 });
    }
}

/// The bounds of a clipped projection.
fn bounds(table: &mut Table, projection: &str) {
    for (name, fresh) in clip::BOUNDS {
        table.push(format!("{projection}.{name}"), &[], Role::Buffer { fresh });
    }
}

/// What a unified model has in the place of a vision tower.
fn patch_embedder(table: &mut Table, embedder: &PatchEmbedderConfig) {
    let (width, patch_len) = (embedder.width, embedder.patch_len());
    let name = |part: &str| format!("{PATCH_EMBEDDER}.{part}");
    table.matrix(name("patch_dense.weight"), &[width, patch_len]);
    table.push(name("patch_dense.bias"), &[width], Role::Bias);
    table.matrix(name("pos_embedding"), &[embedder.position_embedding_size, 2, width]);
    for (norm, width) in [("patch_ln1", patch_len), ("patch_ln2", width), ("pos_norm", width)] {
        table.push(name(&format!("{norm}.weight")), &[width], Role::Norm);
        table.push(name(&format!("{norm}.bias")), &[width], Role::Bias);
    }
}

fn mlp(table: &mut Table, prefix: &str, suffix: &str, hidden: usize, width: usize) {
    table.matrix(format!("{prefix}.mlp.gate_proj.{suffix}"), &[width, hidden]);
    table.matrix(format!("{prefix}.mlp.up_proj.{suffix}"), &[width, hidden]);
    table.matrix(format!("{prefix}.mlp.down_proj.{suffix}"), &[hidden, width]);
}

fn norms(table: &mut Table, prefix: &str, hidden: usize) {
    for name in
        ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    {
        table.push(format!("{prefix}.{name}.weight"), &[hidden], Role::Norm);
    }
}
