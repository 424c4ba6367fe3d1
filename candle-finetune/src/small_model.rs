//! The model that is trained when no checkpoint is given: a very small Gemma 4 with everything that matters, and the
//! tokenizer that goes with it.

use candle_gemma4::Config;
use serde_json::{Map, Value, json};

use crate::error::Result;

/// Special tokens in the order of their ids; the same names as in released tokenizers.
const SPECIAL: [&str; 12] = [
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
];

/// Words of the conversations; a digit is one token.
const WORDS: [&str; 16] =
    ["\n", " ", "user", "model", "read", "repeat", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];

fn special_id(token: &str) -> u32 {
    SPECIAL.iter().position(|special| *special == token).expect("a token of the list") as u32
}

/// The configuration, as a `config.json` text: sliding layers with a window that is shorter than most turns, full
/// layers whose keys are values, image blocks that see both ways, a soft cap, tied embeddings, a standardized tower.
pub fn config_json() -> String {
    let config = json!({
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "float32",
        "audio_config": null,
        "boi_token_id": special_id("<|image>"),
        "image_token_id": special_id("<|image|>"),
        "eoi_token_id": special_id("<image|>"),
        "video_token_id": special_id("<|video|>"),
        "audio_token_id": special_id("<|audio|>"),
        "eos_token_id": [special_id("<eos>"), special_id("<turn|>")],
        "tie_word_embeddings": true,
        "text_config": text_config(),
        "vision_config": vision_config(),
        "vision_soft_tokens_per_image": 4
    });
    format!("{config:#}\n")
}

fn text_config() -> Value {
    json!({
        "model_type": "gemma4_text",
        "dtype": "float32",
        "vocab_size": SPECIAL.len() + WORDS.len(),
        "vocab_size_per_layer_input": SPECIAL.len() + WORDS.len(),
        "pad_token_id": special_id("<pad>"),
        "bos_token_id": special_id("<bos>"),
        "eos_token_id": special_id("<eos>"),
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

/// The configuration.
///
/// # Errors
/// The model crate refuses it.
pub fn config() -> Result<Config> {
    Ok(Config::from_json(&config_json())?)
}

/// The tokenizer, as a `tokenizer.json` text: it knows the words of the digit conversations and nothing else.
pub fn tokenizer_json() -> String {
    let added: Vec<Value> = SPECIAL
        .iter()
        .enumerate()
        .map(|(id, token)| {
            json!({
                "id": id, "content": token, "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
            })
        })
        .collect();
    let vocabulary: Map<String, Value> =
        SPECIAL.iter().chain(&WORDS).enumerate().map(|(id, token)| (token.to_string(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": { "Regex": "[a-z]+|[^a-z]" },
            "behavior": "Isolated",
            "invert": false
        },
        "post_processor": null,
        "decoder": { "type": "Fuse" },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>" }
    });
    format!("{tokenizer:#}\n")
}
