//! The one table of a model's tensors: name in a checkpoint, shape, and what it is.

use crate::config::{Config, DeltaNetConfig, LayerKind, MlpConfig, MoeConfig, TextConfig};
use crate::vision;
use candle_cp_layers::{ModelConfig, Role, Table, TensorSpec};

pub(crate) use candle_cp_layers::LM_HEAD;

/// How the names of the head for several tokens at once begin, which released files have: it is kept, and not trained.
const UNREAD: &[&str] = &["mtp."];

/// Prefix of the text model's tensors.
fn text_prefix(config: &Config) -> &'static str {
    match config.architecture.is_text_only() {
        false => "model.language_model",
        true => "model",
    }
}

/// The embedding table.
pub(crate) fn embed_tokens(config: &Config) -> String {
    format!("{}.embed_tokens.weight", text_prefix(config))
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

impl ModelConfig for Config {
    fn tensors(&self) -> Vec<TensorSpec> {
        tensors(self)
    }

    fn to_json(&self) -> String {
        Config::to_json(self)
    }

    fn unread_prefixes(&self) -> &'static [&'static str] {
        UNREAD
    }
}

/// Every tensor of a model with this configuration, in no particular order. Files may have more, which are kept unread:
/// `mtp.*`.
pub fn tensors(config: &Config) -> Vec<TensorSpec> {
    let text = &config.text;
    let mut table = Table::new(text.initializer_range);
    // A look-up sums one row; as the head's matrix, where they are tied, it sums over the width.
    let fan_in = if config.tie_word_embeddings { text.hidden_size } else { 1 };
    let role = Role::Matrix { fan_in, range: table.range };
    table.push(embed_tokens(config), &[text.vocab_size, text.hidden_size], role);
    if !config.tie_word_embeddings {
        table.matrix(LM_HEAD, &[text.vocab_size, text.hidden_size]);
    }
    for (index, kind) in text.layers.iter().enumerate() {
        let prefix = text_layer(config, index);
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            centred_norm(&mut table, format!("{prefix}.{norm}"), text.hidden_size);
        }
        match kind {
            LayerKind::Linear => delta_net(&mut table, &format!("{prefix}.linear_attn"), text),
            LayerKind::Full => attention(&mut table, &format!("{prefix}.self_attn"), text),
        }
        match &text.mlp {
            MlpConfig::Dense(width) => mlp(&mut table, &format!("{prefix}.mlp"), text.hidden_size, *width),
            MlpConfig::Moe(moe) => experts(&mut table, &format!("{prefix}.mlp"), text.hidden_size, moe),
        }
    }
    let norm = final_norm(config);
    centred_norm(&mut table, norm.trim_end_matches(".weight").to_string(), text.hidden_size);
    if let Some(tower) = &config.vision {
        table.range = tower.initializer_range;
        vision::push_tensors(&mut table, &tower.shape);
    }
    table.specs
}

/// A norm that multiplies by one plus its weight: fresh weights are 0.
fn centred_norm(table: &mut Table, name: String, width: usize) {
    table.push(format!("{name}.weight"), &[width], Role::Bias);
}

fn attention(table: &mut Table, prefix: &str, text: &TextConfig) {
    let hidden = text.hidden_size;
    let query_width = text.num_attention_heads * text.head_dim;
    let key_width = text.num_key_value_heads * text.head_dim;
    for (name, outputs, inputs) in [
        ("q_proj", 2 * query_width, hidden),
        ("k_proj", key_width, hidden),
        ("v_proj", key_width, hidden),
        ("o_proj", hidden, query_width),
    ] {
        table.matrix(format!("{prefix}.{name}.weight"), &[outputs, inputs]);
        if text.attention_bias {
            table.push(format!("{prefix}.{name}.bias"), &[outputs], Role::Bias);
        }
    }
    for name in ["q_norm", "k_norm"] {
        centred_norm(table, format!("{prefix}.{name}"), text.head_dim);
    }
}

fn delta_net(table: &mut Table, prefix: &str, text: &TextConfig) {
    let (hidden, delta) = (text.hidden_size, &text.delta_net);
    let DeltaNetConfig { value_heads, value_dim, kernel, .. } = *delta;
    for (name, outputs) in [
        ("in_proj_qkv", delta.channels()),
        ("in_proj_z", delta.value_width()),
        ("in_proj_b", value_heads),
        ("in_proj_a", value_heads),
    ] {
        table.matrix(format!("{prefix}.{name}.weight"), &[outputs, hidden]);
    }
    table.matrix(format!("{prefix}.conv1d.weight"), &[delta.channels(), 1, kernel]);
    table.push(format!("{prefix}.A_log"), &[value_heads], Role::LogUniform { low: 0.01, high: 16.0 });
    // Starts at 1, like the weight of the norm.
    table.push(format!("{prefix}.dt_bias"), &[value_heads], Role::Norm);
    table.push(format!("{prefix}.norm.weight"), &[value_dim], Role::Norm);
    table.matrix(format!("{prefix}.out_proj.weight"), &[hidden, delta.value_width()]);
}

fn mlp(table: &mut Table, prefix: &str, hidden: usize, width: usize) {
    table.matrix(format!("{prefix}.gate_proj.weight"), &[width, hidden]);
    table.matrix(format!("{prefix}.up_proj.weight"), &[width, hidden]);
    table.matrix(format!("{prefix}.down_proj.weight"), &[hidden, width]);
}

fn experts(table: &mut Table, prefix: &str, hidden: usize, moe: &MoeConfig) {
    let (experts, width) = (moe.num_experts, moe.intermediate_size);
    table.matrix(format!("{prefix}.gate.weight"), &[experts, hidden]);
    table.matrix(format!("{prefix}.experts.gate_up_proj"), &[experts, 2 * width, hidden]);
    table.matrix(format!("{prefix}.experts.down_proj"), &[experts, hidden, width]);
    mlp(table, &format!("{prefix}.shared_expert"), hidden, moe.shared_intermediate_size);
    table.matrix(format!("{prefix}.shared_expert_gate.weight"), &[1, hidden]);
}
