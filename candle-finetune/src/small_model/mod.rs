//! The models that are trained when no checkpoint is given, and the tokenizers that go with them.

mod gemma4;
mod qwen3_5;

use serde_json::{Map, Value, json};

use crate::error::Result;
use crate::family::{Family, VlmConfig};
use std::sync::Arc;

/// The words of a tokenizer, in the order of their ids.
struct Vocabulary {
    special: &'static [&'static str],
    words: &'static [&'static str],
    unknown: &'static str,
}

impl Vocabulary {
    fn id(&self, token: &str) -> u32 {
        self.special.iter().position(|special| *special == token).expect("a token of the list") as u32
    }

    fn len(&self) -> usize {
        self.special.len() + self.words.len()
    }
}

fn vocabulary(family: Family) -> Vocabulary {
    match family {
        Family::Gemma4 => gemma4::VOCABULARY,
        Family::Qwen3_5 => qwen3_5::VOCABULARY,
    }
}

/// The configuration, as a `config.json` text.
pub fn config_json(family: Family) -> String {
    let config = match family {
        Family::Gemma4 => gemma4::config(),
        Family::Qwen3_5 => qwen3_5::config(),
    };
    format!("{config:#}\n")
}

/// The configuration.
///
/// # Errors
/// The model crate refuses it.
pub fn config(family: Family) -> Result<Arc<dyn VlmConfig>> {
    family.config(&config_json(family))
}

/// The tokenizer, as a `tokenizer.json` text: it knows the words of the digit conversations and nothing else.
pub fn tokenizer_json(family: Family) -> String {
    let Vocabulary { special, words, unknown } = vocabulary(family);
    let added: Vec<Value> = special
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
        special.iter().chain(words).enumerate().map(|(id, token)| (token.to_string(), json!(id))).collect();
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
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": unknown }
    });
    format!("{tokenizer:#}\n")
}
