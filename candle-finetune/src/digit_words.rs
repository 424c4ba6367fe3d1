//! The ids that conversations about digits are put together from. They are placed by hand, because the built-in model
//! has no chat template.

use candle_vlm_processor::TextTokenizer;

use crate::error::{Error, Result};
use crate::family::{Turns, VlmConfig};

/// Ids by what they stand for.
#[derive(Debug, Clone)]
pub(crate) struct DigitWords {
    /// Begins every conversation, where the family has such a token.
    pub(crate) bos: Option<u32>,
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
    pub(crate) fn new(config: &dyn VlmConfig, tokenizer: &TextTokenizer) -> Result<Self> {
        let missing = |token: &str, reason| Error::MissingToken { token: token.to_string(), reason };
        let id = |token: &str, reason| tokenizer.id(token).ok_or_else(|| missing(token, reason));
        let turn = "it begins and ends the turns of a conversation";
        let bos = "text_config.bos_token_id of config.json";
        let tokens = config.token_ids();
        if tokens.needs_bos && tokens.bos.is_none() {
            return Err(missing(bos, "every sample begins with it"));
        }
        let Turns { open, close, assistant } = config.turns();
        let encode = |text: &str| Ok::<_, Error>(tokenizer.encode(text, false)?.ids);
        let open = id(open, turn)?;
        let header = |role: &str| Ok::<_, Error>([vec![open], encode(&format!("{role}\n"))?].concat());
        let (boi, eoi) = config.around_picture();
        let image = config.placeholders().image;
        let image = image.ok_or_else(|| missing("image_token_id of config.json", "it stands for a picture"))?;
        let mut digits = [0; 10];
        for (value, digit) in digits.iter_mut().enumerate() {
            *digit = id(&value.to_string(), "answers consist of digits")?;
        }
        Ok(Self {
            bos: tokens.bos,
            user: header("user")?,
            model: header(assistant)?,
            turn_close: id(close, turn)?,
            newline: encode("\n")?,
            read: encode("read")?,
            repeat: encode("repeat")?,
            digits,
            image,
            boi,
            eoi,
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
    use crate::family::Family;
    use crate::small_model;

    fn words(family: Family) -> Result<(TextTokenizer, DigitWords)> {
        let tokenizer = TextTokenizer::from_json("built in", &small_model::tokenizer_json(family))?;
        let words = DigitWords::new(small_model::config(family)?.as_ref(), &tokenizer)?;
        Ok((tokenizer, words))
    }

    #[test]
    fn the_built_in_tokenizers_give_one_token_per_word_and_digit() -> Result<()> {
        for (family, [open, role, close], [begin, image, end], bos) in [
            (Family::Gemma4, ["<|turn>", "model", "<turn|>"], ["<|image>", "<|image|>", "<image|>"], Some("<bos>")),
            (
                Family::Qwen3_5,
                ["<|im_start|>", "assistant", "<|im_end|>"],
                ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
                None,
            ),
        ] {
            let (tokenizer, words) = words(family)?;
            let texts = |ids: &[u32]| ids.iter().map(|&id| tokenizer.token(id).unwrap()).collect::<Vec<_>>();
            assert_eq!(texts(&words.model), [open, role, "\n"]);
            assert_eq!(texts(&words.user), [open, "user", "\n"]);
            assert_eq!(texts(&words.image(2)), [begin, image, image, end]);
            assert_eq!(texts(&[words.turn_close]), [close]);
            assert_eq!(words.bos.map(|id| tokenizer.token(id).unwrap()).as_deref(), bos);
            assert_eq!(texts(&[&words.read[..], &words.repeat, &words.newline].concat()), ["read", "repeat", "\n"]);
            assert_eq!(texts(&words.digits).concat(), "0123456789");
        }
        Ok(())
    }

    #[test]
    fn a_tokenizer_without_turns_is_refused() -> Result<()> {
        let json = small_model::tokenizer_json(Family::Gemma4).replace("<|turn>", "<|other>");
        let tokenizer = TextTokenizer::from_json("t.json", &json)?;
        let error = DigitWords::new(small_model::config(Family::Gemma4)?.as_ref(), &tokenizer).unwrap_err();
        let expected = "the tokenizer has no token <|turn>; it begins and ends the turns of a conversation";
        assert_eq!(error.to_string(), expected);
        Ok(())
    }
}
