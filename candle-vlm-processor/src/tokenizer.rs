//! Text to token ids, as transformers gives them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::files;

const CONFIG: &str = "tokenizer_config.json";

/// The special tokens that transformers hands to chat templates.
const STANDARD: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The tokenizer of a checkpoint with the names of its special tokens.
#[derive(Debug)]
pub struct TextTokenizer {
    tokenizer: tokenizers::Tokenizer,
    special_tokens: BTreeMap<String, String>,
    config: Value,
    /// The tokens that `tokenizer.json` calls special, longest first.
    controls: Vec<String>,
}

/// A text as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextTokens {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The bytes of the text that each token stands for; empty for tokens that were added to the text.
    pub offsets: Vec<Range<usize>>,
}

impl TextTokenizer {
    /// Reads `tokenizer.json`, and the names of special tokens from `tokenizer_config.json`, else from
    /// `special_tokens_map.json`.
    ///
    /// # Errors
    /// `tokenizer.json` is absent or broken; a file is not JSON.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let Some(text) = files::text(folder, "tokenizer.json")? else {
            return Err(Error::MissingFile {
                folder: folder.into(),
                files: vec!["tokenizer.json"],
                fix: "copy it from the released checkpoint, or save the tokenizer with transformers",
            });
        };
        let what = folder.join("tokenizer.json").display().to_string();
        let config = files::json(folder, CONFIG)?.unwrap_or_default();
        let older = files::json(folder, "special_tokens_map.json")?.unwrap_or_default();
        let token = |name: &str| token_text(&config[name]).or_else(|| token_text(&older[name]));
        let special_tokens = STANDARD.iter().filter_map(|name| Some(((*name).to_owned(), token(name)?))).collect();
        Ok(Self { special_tokens, config, ..Self::from_json(&what, &text)? })
    }

    /// Reads the text of a `tokenizer.json`; `what` names it in errors. No special token has a name.
    ///
    /// # Errors
    /// The text is broken.
    pub fn from_json(what: &str, json: &str) -> Result<Self> {
        let fault = |e: tokenizers::Error| Error::Tokenizer { what: what.into(), reason: e.to_string() };
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(json).map_err(fault)?;
        // A saved tokenizer may cut or pad; neither belongs into training data.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(fault)?;
        let added = tokenizer.get_added_tokens_decoder();
        let mut controls: Vec<_> =
            added.into_values().filter(|token| token.special && !token.content.is_empty()).map(|t| t.content).collect();
        controls.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        Ok(Self { tokenizer, special_tokens: BTreeMap::new(), config: Value::Null, controls })
    }

    /// Special tokens by the names that templates use, such as `bos_token`.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.special_tokens
    }

    /// The id of a token of the vocabulary.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// The text of a token of the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// The token that a text starts with, if `tokenizer.json` calls it special.
    pub(crate) fn special_at_start(&self, text: &str) -> Option<&str> {
        self.controls.iter().find(|token| text.starts_with(token.as_str())).map(String::as_str)
    }

    /// The token that a text ends with, if `tokenizer.json` calls it special.
    pub(crate) fn special_at_end(&self, text: &str) -> Option<&str> {
        self.controls.iter().find(|token| text.ends_with(token.as_str())).map(String::as_str)
    }

    /// The tokens of a text. With `add_special`, the tokens that the tokenizer puts around every text are added.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<TextTokens> {
        let encoding = self
            .tokenizer
            .encode(text, add_special)
            .map_err(|e| Error::Tokenizer { what: "the text cannot be encoded".into(), reason: e.to_string() })?;
        let offsets = encoding.get_offsets().iter().map(|&(start, end)| start..end).collect();
        Ok(TextTokens { ids: encoding.get_ids().to_vec(), offsets })
    }

    /// The tokens of a rendered chat: special tokens are added unless the text already starts with `bos_token`.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode_chat(&self, text: &str) -> Result<TextTokens> {
        let starts = self.special_tokens.get("bos_token").is_some_and(|bos| text.starts_with(bos));
        self.encode(text, !starts)
    }

    /// The text of token ids.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.tokenizer
            .decode(ids, skip_special)
            .map_err(|e| Error::Tokenizer { what: "the ids cannot be decoded".into(), reason: e.to_string() })
    }

    /// A token that `tokenizer_config.json` names in a field of the model's own, such as `image_token`, and its id.
    ///
    /// # Errors
    /// The field is absent, or its value is not one token.
    pub fn named_token(&self, field: &'static str) -> Result<(String, u32)> {
        let Some(token) = self.config_token(field) else {
            let reason = "tokenizer_config.json must name it";
            return Err(Error::SpecialToken { field, token: None, reason });
        };
        match self.id(&token) {
            Some(id) if self.encode(&token, false)?.ids == [id] => Ok((token, id)),
            _ => Err(Error::SpecialToken {
                field,
                token: Some(token),
                reason: "it is not one token of tokenizer.json; add it there as a special token",
            }),
        }
    }

    fn config_token(&self, field: &str) -> Option<String> {
        let sections = ["model_specific_special_tokens", "extra_special_tokens"];
        token_text(&self.config[field]).or_else(|| sections.iter().find_map(|s| token_text(&self.config[*s][field])))
    }
}

/// A token is a text, or an object with its text in `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}
