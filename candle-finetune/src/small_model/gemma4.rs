//! A very small Gemma 4 with everything that matters.

use serde_json::{Value, json};

use super::Vocabulary;

/// Special tokens have the names that they have in released tokenizers; a digit is one token.
pub(super) const VOCABULARY: Vocabulary = Vocabulary {
    special: &[
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<|turn>",
        "<turn|>",
        "<|image>",
        "<|image|>",
        "<image|>",
        "<|video|>",
        "<|audio|>",
        "<mask>",
    ],
    words: &["\n", " ", "user", "model", "read", "repeat", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"],
    unknown: "<unk>",
};

/// Sliding layers with a window that is shorter than most turns, full
/// layers whose keys are values, image blocks that see both ways, a soft cap, tied embeddings, a standardized tower.
pub(super) fn config() -> Value {
    json!({
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "float32",
        "audio_config": null,
        "boi_token_id": VOCABULARY.id("<|image>"),
        "image_token_id": VOCABULARY.id("<|image|>"),
        "eoi_token_id": VOCABULARY.id("<image|>"),
        "video_token_id": VOCABULARY.id("<|video|>"),
        "audio_token_id": VOCABULARY.id("<|audio|>"),
        "eos_token_id": [VOCABULARY.id("<eos>"), VOCABULARY.id("<turn|>")],
        "tie_word_embeddings": true,
        "text_config": text_config(),
        "vision_config": vision_config(),
        "vision_soft_tokens_per_image": 4
    })
}

fn text_config() -> Value {
    json!({
        "model_type": "gemma4_text",
        "dtype": "float32",
        "vocab_size": VOCABULARY.len(),
        "vocab_size_per_layer_input": VOCABULARY.len(),
        "pad_token_id": VOCABULARY.id("<pad>"),
        "bos_token_id": VOCABULARY.id("<bos>"),
        "eos_token_id": VOCABULARY.id("<eos>"),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 32,
        "attention_k_eq_v": true,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": false,
        "use_double_wide_mlp": false,
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": { "rope_type": "default", "rope_theta": 10000.0 },
            "full_attention": { "rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25 }
        }
    })
}

fn vision_config() -> Value {
    json!({
        "model_type": "gemma4_vision",
        "dtype": "float32",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "global_head_dim": 12,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": { "rope_type": "default", "rope_theta": 100.0 },
        "patch_size": 2,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
        "standardize": true,
        "use_clipped_linears": false
    })
}
