//! The ids that conversations about digits are put together from. They are placed by hand, because the built-in model
//! has no chat template.

use candle_gemma4::Config;
use candle_vlm_processor::TextTokenizer;

use crate::error::{Error, Result};

/// Ids by what they stand for.
#[derive(Debug, Clone)]
pub(crate) struct DigitWords {
    /// Begins every conversation.
    pub(crate) bos: u32,
    /// Begins a question.
    pub(crate) user: Vec<u32>,
    /// Begins an answer.
    pub(crate) model: Vec<u32>,
    /// Ends a turn; an answer learns it.
    pub(crate) turn_close: u32,
    /// Follows the end of a turn.
    pub(crate) newline: Vec<u32>,
    /// The question for the digits in pictures.
    pub(crate) read: Vec<u32>,
    /// The question for all digits so far.
    pub(crate) repeat: Vec<u32>,
    /// 0 to 9.
    pub(crate) digits: [u32; 10],
    image: u32,
    boi: u32,
    eoi: u32,
}

impl DigitWords {
    /// Looks all of them up.
    ///
    /// # Errors
    /// The tokenizer or the configuration lacks a token that the conversations need.
    pub(crate) fn new(config: &Config, tokenizer: &TextTokenizer) -> Result<Self> {
        let missing = |token: &str, reason| Error::MissingToken { token: token.to_string(), reason };
        let id = |token: &str, reason| tokenizer.id(token).ok_or_else(|| missing(token, reason));
        let turn = "it begins and ends the turns of a conversation";
        let bos = "text_config.bos_token_id of config.json";
        let bos = config.text.bos_token_id.ok_or_else(|| missing(bos, "every sample begins with it"))?;
        let encode = |text: &str| Ok::<_, Error>(tokenizer.encode(text, false)?.ids);
        let open = id("<|turn>", turn)?;
        let header = |role: &str| Ok::<_, Error>([vec![open], encode(&format!("{role}\n"))?].concat());
        let mut digits = [0; 10];
        for (value, digit) in digits.iter_mut().enumerate() {
            *digit = id(&value.to_string(), "answers consist of digits")?;
        }
        Ok(Self {
            bos,
            user: header("user")?,
            model: header("model")?,
            turn_close: id("<turn|>", turn)?,
            newline: encode("\n")?,
            read: encode("read")?,
            repeat: encode("repeat")?,
            digits,
            image: config.image_token_id,
            boi: config.boi_token_id,
            eoi: config.eoi_token_id,
        })
    }

    /// An image of `soft_tokens` features.
    pub(crate) fn image(&self, soft_tokens: usize) -> Vec<u32> {
        let mut ids = vec![self.boi];
        ids.resize(1 + soft_tokens, self.image);
        ids.push(self.eoi);
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small_model;

    #[test]
    fn the_built_in_tokenizer_gives_one_token_per_word_and_digit() -> Result<()> {
        let tokenizer = TextTokenizer::from_json("built in", &small_model::tokenizer_json())?;
        let words = DigitWords::new(&small_model::config()?, &tokenizer)?;
        let texts = |ids: &[u32]| ids.iter().map(|&id| tokenizer.token(id).unwrap()).collect::<Vec<_>>();
        assert_eq!(texts(&words.model), ["<|turn>", "model", "\n"]);
        assert_eq!(texts(&words.image(2)), ["<|image>", "<|image|>", "<|image|>", "<image|>"]);
        assert_eq!(texts(&[words.bos, words.turn_close]), ["<bos>", "<turn|>"]);
        assert_eq!(texts(&[&words.read[..], &words.repeat, &words.newline].concat()), ["read", "repeat", "\n"]);
        assert_eq!(texts(&words.digits).concat(), "0123456789");
        Ok(())
    }

    #[test]
    fn a_tokenizer_without_turns_is_refused() -> Result<()> {
        let json = small_model::tokenizer_json().replace("<|turn>", "<|other>");
        let tokenizer = TextTokenizer::from_json("t.json", &json)?;
        let error = DigitWords::new(&small_model::config()?, &tokenizer).unwrap_err();
        let expected = "the tokenizer has no token <|turn>; it begins and ends the turns of a conversation";
        assert_eq!(error.to_string(), expected);
        Ok(())
    }
}
