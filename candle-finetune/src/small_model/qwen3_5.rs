//! A very small Qwen 3.5 with everything that matters.

use serde_json::{Value, json};

use super::Vocabulary;

/// Special tokens have the names that they have in released tokenizers; a digit is one token.
pub(super) const VOCABULARY: Vocabulary = Vocabulary {
    special: &[
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ],
    words: &["\n", " ", "user", "assistant", "read", "repeat", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"],
    unknown: "<|endoftext|>",
};

/// Layers with a state and layers with attention by turns (released models have three of the first for one of the second;
/// repeating what stands far back takes two of the second); rope over three axes and half of the head; a head of its own;
/// a tower that merges four patches.
pub(super) fn config() -> Value {
    json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "float32",
        "image_token_id": VOCABULARY.id("<|image_pad|>"),
        "video_token_id": VOCABULARY.id("<|video_pad|>"),
        "vision_start_token_id": VOCABULARY.id("<|vision_start|>"),
        "vision_end_token_id": VOCABULARY.id("<|vision_end|>"),
        "tie_word_embeddings": false,
        "text_config": text_config(),
        "vision_config": vision_config()
    })
}

fn text_config() -> Value {
    json!({
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "vocab_size": VOCABULARY.len(),
        "eos_token_id": VOCABULARY.id("<|im_end|>"),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attn_output_gate": true,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": true,
            "mrope_section": [3, 3, 2]
        },
        "tie_word_embeddings": false
    })
}

fn vision_config() -> Value {
    json!({
        "model_type": "qwen3_5",
        "dtype": "float32",
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "initializer_range": 0.02,
        "patch_size": 2,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": []
    })
}
