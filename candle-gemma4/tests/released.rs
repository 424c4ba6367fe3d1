//! The settings of released checkpoints: they are accepted, and the table of tensors has the published sizes.

use candle_gemma4::{Config, LayerKind, Role, tensors};
use serde_json::{Value, json};

/// `sliding` sliding layers and a full one, `times` times.
fn pattern(sliding: usize, times: usize) -> Vec<&'static str> {
    let block = [vec!["sliding_attention"; sliding], vec!["full_attention"]].concat();
    block.repeat(times)
}

/// What all text models have in common, with `own` on top.
fn text(layer_types: Vec<&str>, own: Value) -> Value {
    let mut text = json!({
        "model_type": "gemma4_text", "vocab_size": 262_144, "head_dim": 256, "global_head_dim": 512,
        "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
        "num_hidden_layers": layer_types.len(), "layer_types": layer_types,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    });
    text.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    text
}

fn vision(own: Value) -> Value {
    let mut vision = json!({
        "model_type": "gemma4_vision", "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10_240,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    });
    vision.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    vision
}

fn large_vision() -> Value {
    vision(json!({
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 72, "standardize": true,
    }))
}

fn config(text: Value, vision: Value, audio: Value) -> Config {
    let json = json!({
        "model_type": "gemma4", "image_token_id": 258_880, "text_config": text, "vision_config": vision,
        "audio_config": audio,
    });
    Config::from_json(&json.to_string()).unwrap()
}

/// Numbers in the tensors whose name contains `part`, in billions; without those that no layer reads.
fn billions(config: &Config, part: &str) -> f64 {
    let specs = tensors(config);
    let counted = specs.iter().filter(|spec| spec.name.contains(part) && spec.role != Role::Unused);
    counted.map(|spec| spec.shape.iter().product::<usize>()).sum::<usize>() as f64 / 1e9
}

#[track_caller]
fn assert_billions(config: &Config, part: &str, published: f64) {
    let found = billions(config, part);
    assert!((found / published - 1.0).abs() < 0.01, "{part:?} has {found} billion numbers, not {published}");
}

#[test]
fn e2b() {
    let own = json!({
        "hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 1,
        "sliding_window": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
        "num_kv_shared_layers": 20, "use_double_wide_mlp": true,
    });
    let vision = vision(json!({
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
        "num_key_value_heads": 12, "head_dim": 64, "use_clipped_linears": true,
    }));
    let audio = json!({
        "model_type": "gemma4_audio", "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8,
        "subsampling_conv_channels": [128, 32], "conv_kernel_size": 5, "attention_chunk_size": 12,
        "attention_context_left": 13, "attention_context_right": 0, "output_proj_dims": 1536, "residual_weight": 0.5,
        "use_clipped_linears": true, "rms_norm_eps": 1e-6,
    });
    let config = config(text(pattern(4, 7), own), vision, audio);
    // 5.1 billion with embeddings, 2.3 without the table of per-layer embeddings and without the towers.
    assert_billions(&config, "", 5.1);
    let effective = billions(&config, "language_model") - billions(&config, "embed_tokens_per_layer");
    assert!((2.2..2.4).contains(&effective), "{effective}");
    for (index, layer) in config.text.layers.iter().enumerate() {
        let source = match layer.kind {
            _ if index < 15 => None,
            LayerKind::Sliding => Some(13),
            LayerKind::Full => Some(14),
        };
        assert_eq!(layer.keys_of, source, "layer {index}");
    }
}

#[test]
fn a26b_a4b() {
    let own = json!({
        "hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "attention_k_eq_v": true, "sliding_window": 1024, "enable_moe_block": true,
        "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    });
    let config = config(text(pattern(5, 5), own), large_vision(), Value::Null);
    assert_billions(&config, "language_model", 25.2);
    // Of the experts, 8 of 128 work on a token: 3.8 billion are active, the embedding table's rows not counted twice.
    let experts = billions(&config, ".experts.");
    let active = billions(&config, "language_model") - experts * 120.0 / 128.0;
    assert!((3.7..3.9).contains(&active), "{active}");
}

#[test]
fn a31b() {
    let own = json!({
        "hidden_size": 5376, "intermediate_size": 21_504, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": true, "sliding_window": 1024,
    });
    let config = config(text(pattern(5, 10), own), large_vision(), Value::Null);
    assert_billions(&config, "language_model", 30.7);
    let vision = billions(&config, "vision");
    assert!((0.55..0.6).contains(&vision), "{vision}"); // "about 550 million"
}
