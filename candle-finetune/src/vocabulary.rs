//! Text to token ids, and the ids of the tokens that shape a conversation.

use std::path::Path;

use candle_gemma4::Config;
use tokenizers::Tokenizer;

use crate::error::{Error, Result};

/// Name of the tokenizer's file in a checkpoint folder.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// A tokenizer and the special tokens that the recipe places itself.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    tokenizer: Tokenizer,
    what: String,
    /// Begins every sample.
    pub bos: u32,
    /// Ends a plain text.
    pub eos: u32,
    /// Fills the tail of a row.
    pub pad: u32,
    /// Text that stands for an image in a prompt.
    pub placeholder: String,
    turn_open: u32,
    turn_close: u32,
    newline: Vec<u32>,
    image: u32,
    boi: u32,
    eoi: u32,
    /// Ids that only images (videos, audio clips) may give.
    reserved: Vec<u32>,
}

impl Vocabulary {
    /// Loads `tokenizer.json` of a checkpoint folder.
    ///
    /// # Errors
    /// The file is absent or damaged, or does not fit the model's configuration.
    pub fn from_folder(dir: &Path, config: &Config) -> Result<Self> {
        let path = dir.join(TOKENIZER_FILE);
        let bytes = std::fs::read(&path).map_err(crate::error::io("read", &path))?;
        Self::from_json(&path.display().to_string(), &bytes, config)
    }

    /// Reads the text of a `tokenizer.json`; `what` names it in errors.
    ///
    /// # Errors
    /// The text is damaged, or does not fit the model's configuration.
    pub fn from_json(what: &str, json: &[u8], config: &Config) -> Result<Self> {
        let tokenizer = Tokenizer::from_bytes(json)
            .map_err(|e| Error::Tokenizer { what: what.to_string(), reason: e.to_string() })?;
        let missing =
            |token: &str, reason| Error::MissingToken { what: what.to_string(), token: token.to_string(), reason };
        let id = |token: &str, reason| tokenizer.token_to_id(token).ok_or_else(|| missing(token, reason));
        let field = |id: Option<u32>, field: &str, reason| id.ok_or_else(|| missing(field, reason));
        let placeholder = tokenizer.id_to_token(config.image_token_id);
        let placeholder = placeholder
            .ok_or_else(|| missing("image_token_id of config.json", "it stands for the images in a prompt"))?;
        let turn = "it begins and ends the turns of a conversation";
        let mut vocabulary = Self {
            bos: field(
                config.text.bos_token_id,
                "text_config.bos_token_id of config.json",
                "every sample begins with it",
            )?,
            eos: field(config.eos_token_ids.first().copied(), "eos_token_id of config.json", "texts end with it")?,
            pad: config.text.pad_token_id.unwrap_or(0),
            placeholder,
            turn_open: id("<|turn>", turn)?,
            turn_close: id("<turn|>", turn)?,
            newline: Vec::new(),
            image: config.image_token_id,
            boi: config.boi_token_id,
            eoi: config.eoi_token_id,
            reserved: [Some(config.image_token_id), config.video_token_id, config.audio_token_id]
                .into_iter()
                .flatten()
                .collect(),
            what: what.to_string(),
            tokenizer,
        };
        vocabulary.newline = vocabulary.encode("\n")?;
        Ok(vocabulary)
    }

    /// Ids of a text, without any token that the text does not have.
    ///
    /// # Errors
    /// The tokenizer failed.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self.tokenizer.encode(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(Error::Tokenizer { what: self.what.clone(), reason: e.to_string() }),
        }
    }

    /// The one id of a text that has to be a single token.
    ///
    /// # Errors
    /// It is not one token.
    pub fn single(&self, text: &str, reason: &'static str) -> Result<u32> {
        let missing = || Error::MissingToken { what: self.what.clone(), token: format!("{text:?}"), reason };
        self.tokenizer.token_to_id(text).ok_or_else(missing)
    }

    /// What begins a turn of `role` (`user` or `model`).
    ///
    /// # Errors
    /// The tokenizer failed.
    pub fn open_turn(&self, role: &str) -> Result<Vec<u32>> {
        let mut ids = vec![self.turn_open];
        ids.extend(self.encode(&format!("{role}\n"))?);
        Ok(ids)
    }

    /// The token that ends a turn; an answer learns it.
    pub fn turn_close(&self) -> u32 {
        self.turn_close
    }

    /// What follows the end of a turn.
    pub fn newline(&self) -> &[u32] {
        &self.newline
    }

    /// An image of `soft_tokens` features.
    pub fn image(&self, soft_tokens: usize) -> Vec<u32> {
        let mut ids = vec![self.boi];
        ids.resize(1 + soft_tokens, self.image);
        ids.push(self.eoi);
        ids
    }

    /// The first id that only an image, a video or an audio clip may give.
    pub fn first_reserved(&self, ids: &[u32]) -> Option<u32> {
        ids.iter().copied().find(|id| self.reserved.contains(id))
    }

    /// The text of a token.
    pub fn token(&self, id: u32) -> String {
        self.tokenizer.id_to_token(id).unwrap_or_else(|| format!("id {id}"))
    }

    /// The tokenizer as the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// The tokenizer failed.
    pub fn to_json(&self) -> Result<String> {
        let failed = |e: tokenizers::Error| Error::Tokenizer { what: self.what.clone(), reason: e.to_string() };
        self.tokenizer.to_string(true).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small_model;

    fn vocabulary() -> Result<Vocabulary> {
        Vocabulary::from_json("built in", small_model::tokenizer_json().as_bytes(), &small_model::config()?)
    }

    #[test]
    fn the_built_in_tokenizer_gives_one_token_per_word_and_digit() -> Result<()> {
        let vocabulary = vocabulary()?;
        let texts = |ids: &[u32]| ids.iter().map(|&id| vocabulary.token(id)).collect::<Vec<_>>();
        let ids = vocabulary.encode("<|turn>user\nread<turn|>\n07 what")?;
        assert_eq!(texts(&ids), ["<|turn>", "user", "\n", "read", "<turn|>", "\n", "0", "7", " ", "<unk>"]);
        assert_eq!(texts(&vocabulary.open_turn("model")?), ["<|turn>", "model", "\n"]);
        assert_eq!(texts(&vocabulary.image(2)), ["<|image>", "<|image|>", "<|image|>", "<image|>"]);
        assert_eq!(texts(&[vocabulary.bos, vocabulary.eos, vocabulary.pad]), ["<bos>", "<eos>", "<pad>"]);
        assert_eq!(vocabulary.placeholder, "<|image|>");
        assert_eq!(vocabulary.first_reserved(&ids), None);
        assert_eq!(vocabulary.first_reserved(&vocabulary.image(1)), Some(vocabulary.image(1)[1]));
        Ok(())
    }

    #[test]
    fn it_survives_being_written() -> Result<()> {
        let vocabulary = vocabulary()?;
        let again = Vocabulary::from_json("again", vocabulary.to_json()?.as_bytes(), &small_model::config()?)?;
        let text = "<bos><|turn>model\n3 5<turn|>";
        assert_eq!(again.encode(text)?, vocabulary.encode(text)?);
        Ok(())
    }

    #[test]
    fn a_tokenizer_without_turns_is_refused() -> Result<()> {
        let json = small_model::tokenizer_json().replace("<|turn>", "<|other>");
        let error = Vocabulary::from_json("t.json", json.as_bytes(), &small_model::config()?).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tokenizer t.json: <|turn> is not one token; it begins and ends the turns of a conversation"
        );
        let error = Vocabulary::from_json("t.json", b"{", &small_model::config()?).unwrap_err();
        assert!(error.to_string().starts_with("tokenizer t.json: "), "{error}");
        Ok(())
    }
}
