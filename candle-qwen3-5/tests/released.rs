//! The settings of released checkpoints: they are accepted, and the table of tensors has the published sizes.

use candle_qwen3_5::{Config, LayerKind, tensors};
use serde_json::{Value, json};

/// A released configuration: `text` on top of what all have in common.
fn config(model_type: &str, text: Value) -> Config {
    let layers = text["num_hidden_layers"].as_u64().unwrap() as usize;
    let block = ["linear_attention", "linear_attention", "linear_attention", "full_attention"];
    let mut all = json!({
        "model_type": format!("{model_type}_text"), "vocab_size": 248_320, "head_dim": 256, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true,
        "full_attention_interval": 4, "layer_types": block.repeat(layers / 4), "mamba_ssm_dtype": "float32",
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": false, "eos_token_id": 248_044, "max_position_embeddings": 262_144,
        "rope_parameters": {
            "mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
        },
    });
    all.as_object_mut().unwrap().extend(text.as_object().unwrap().clone());
    let json = json!({
        "model_type": model_type, "text_config": all, "tie_word_embeddings": false, "image_token_id": 248_056,
        "video_token_id": 248_057, "vision_start_token_id": 248_053, "vision_end_token_id": 248_054,
        "vision_config": {
            "model_type": model_type, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "num_position_embeddings": 2304, "out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [],
            "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02,
        },
    });
    Config::from_json(&json.to_string()).unwrap()
}

/// Numbers in the tensors whose name contains `part`, in billions.
fn billions(config: &Config, part: &str) -> f64 {
    let specs = tensors(config);
    let counted = specs.iter().filter(|spec| spec.name.contains(part));
    counted.map(|spec| spec.shape.iter().product::<usize>()).sum::<usize>() as f64 / 1e9
}

#[track_caller]
fn assert_text_billions(config: &Config, published: f64) {
    let found = billions(config, "language_model") + billions(config, "lm_head");
    assert!((found / published - 1.0).abs() < 0.02, "{found} billion numbers, not {published}");
    let full = config.text.layers.iter().filter(|kind| **kind == LayerKind::Full).count();
    assert_eq!(4 * full, config.text.layers.len());
    let axes: Vec<usize> = config.text.rope.pairs().into_iter().map(|(_, axis)| axis).collect();
    let of = |axis: usize| axes.iter().filter(|&&other| other == axis).count();
    assert_eq!([of(0), of(1), of(2)], [11, 11, 10]);
}

#[test]
fn dense_9b() {
    let config = config(
        "qwen3_5",
        json!({
            "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 4,
        }),
    );
    assert_text_billions(&config, 9.0);
    let vision = billions(&config, "visual");
    assert!((0.44..0.47).contains(&vision), "{vision}");
}

#[test]
fn dense_27b() {
    let config = config(
        "qwen3_5",
        json!({
            "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64, "num_attention_heads": 24,
            "num_key_value_heads": 4, "linear_num_value_heads": 48,
        }),
    );
    assert_text_billions(&config, 27.0);
}

#[test]
fn experts_35b_a3b() {
    let config = config(
        "qwen3_5_moe",
        json!({
            "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "output_router_logits": false, "router_aux_loss_coef": 0.001,
        }),
    );
    assert_text_billions(&config, 35.0);
    let active = billions(&config, "language_model") - billions(&config, ".experts.") * 248.0 / 256.0;
    assert!((2.8..3.2).contains(&active), "{active}");
}

#[test]
fn experts_122b_a10b() {
    let config = config(
        "qwen3_5_moe",
        json!({
            "hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 2,
            "linear_num_value_heads": 64, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        }),
    );
    assert_text_billions(&config, 122.0);
}
