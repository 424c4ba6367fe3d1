//! From chats and texts to samples, with what a checkpoint folder has for that.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_cp_layers::Placeholders;
use candle_vlm_processor::{
    AnswerFinder, ChatEncoder, ChatTemplate, EncodedChat, ImageSettings, Message, PictureSource, Processor, Request,
    TemplateInputs, TemplateValue, TextTokenizer,
};

use crate::error::{Error, Result};
use crate::family::{TokenIds, VlmConfig};
use crate::parquet::Cell;
use crate::sample::{Part, Token};

/// Stands for no picture: a code point that no text may hold.
const NO_PLACEHOLDER: &str = "\u{fdd0}";

/// Reads chats and texts as a checkpoint's own template, tokenizer and image settings tell.
#[derive(Debug)]
pub struct Encoder {
    reads: Reads,
    config: Arc<dyn VlmConfig>,
    finder: Option<AnswerFinder>,
}

/// A processor of any family.
pub(crate) type AnyProcessor = Processor<Box<dyn ImageSettings>>;

/// What a checkpoint folder has.
#[derive(Debug)]
enum Reads {
    /// Chats with pictures.
    Pictures(Box<AnyProcessor>),
    /// Chats; why there are no pictures.
    Chats(Box<ChatEncoder>, String),
    /// Texts; why there are no chats.
    Texts(Box<TextTokenizer>, String),
}

/// One chat, before it is encoded.
#[derive(Debug)]
pub(crate) struct Chat<'a> {
    pub(crate) messages: Vec<Message>,
    /// Pictures for the image parts that name none.
    pub(crate) images: Vec<PictureSource>,
    pub(crate) tools: Option<TemplateValue>,
    /// Where relative paths start.
    pub(crate) folder: &'a Path,
}

/// A sample with its pictures yet to be read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<Token>,
    pub(crate) pictures: Vec<Stored>,
    /// Of each picture.
    pub(crate) soft_tokens: Vec<usize>,
    /// The tokens of each picture, the opening and the closing one among them.
    pub(crate) blocks: Vec<Range<usize>>,
}

/// Where a picture is between its check and its use.
#[derive(Debug, Clone)]
pub(crate) enum Stored {
    Source(PictureSource),
    Cell(Cell),
}

impl Stored {
    /// A name for errors.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Source(source) => source.name(),
            Self::Cell(cell) => cell.name.clone(),
        }
    }
}

/// A value, or the reason why a sample cannot be used.
pub(crate) type Fault<T> = std::result::Result<T, String>;

impl Encoder {
    /// Reads tokenizer, chat template and image settings of a checkpoint folder. Without a template, or without image
    /// settings, it reads what is left; chats or pictures are refused with the reason when they come.
    ///
    /// # Errors
    /// There is no tokenizer, a file is broken, or the image settings are not those of the model.
    pub fn from_folder(folder: &Path, config: Arc<dyn VlmConfig>) -> Result<Self> {
        let tokenizer = TextTokenizer::from_folder(folder)?;
        let reads = match or_missing(ChatTemplate::from_folder(folder))? {
            Err(reason) => Reads::Texts(Box::new(tokenizer), reason),
            Ok(template) => {
                let chat = ChatEncoder::new(template, tokenizer);
                match config.read_image_settings(folder)? {
                    Err(reason) => Reads::Chats(Box::new(chat), reason),
                    Ok(settings) => Reads::Pictures(Box::new(Processor::new(chat, settings)?)),
                }
            }
        };
        let mut encoder = Self { reads, config, finder: None };
        encoder.check_image_token()?;
        encoder.finder = encoder.chat_encoder().map(AnswerFinder::new).ok();
        Ok(encoder)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &TextTokenizer {
        match &self.reads {
            Reads::Pictures(processor) => processor.chat().tokenizer(),
            Reads::Chats(chat, _) => chat.tokenizer(),
            Reads::Texts(tokenizer, _) => tokenizer,
        }
    }

    /// What cuts pictures.
    ///
    /// # Errors
    /// The reason why there are none.
    pub(crate) fn processor(&self) -> Fault<&AnyProcessor> {
        match &self.reads {
            Reads::Pictures(processor) => Ok(processor),
            Reads::Chats(_, reason) | Reads::Texts(_, reason) => Err(format!("pictures cannot be used: {reason}")),
        }
    }

    fn chat_encoder(&self) -> Fault<&ChatEncoder> {
        match &self.reads {
            Reads::Pictures(processor) => Ok(processor.chat()),
            Reads::Chats(chat, _) => Ok(chat),
            Reads::Texts(_, reason) => Err(format!("chats cannot be used: {reason}")),
        }
    }

    /// The text that stands for a picture; `None` if there are no pictures.
    pub(crate) fn image_token(&self) -> Option<&str> {
        self.processor().ok().map(AnyProcessor::image_token)
    }

    /// A prompt without the tokens around the placeholders of pictures: processor or template write them again.
    pub(crate) fn bare_pictures<'a>(&self, prompt: &'a str) -> Cow<'a, str> {
        let (open, close) = self.config.around_picture();
        match (self.tokenizer().token(open), self.image_token(), self.tokenizer().token(close)) {
            (Some(open), Some(image), Some(close)) => prompt.replace(&format!("{open}{image}{close}"), image).into(),
            _ => prompt.into(),
        }
    }

    fn check_image_token(&self) -> Result<()> {
        let Reads::Pictures(processor) = &self.reads else { return Ok(()) };
        let expected = self.config.placeholders().image;
        match Some(processor.image_token_id()) == expected {
            true => Ok(()),
            false => Err(Error::Task {
                task: "pictures",
                reason: format!(
                    "{} is token {} of the tokenizer, but image_token_id of config.json is {}; take both files from one \
                     checkpoint",
                    processor.image_token(),
                    processor.image_token_id(),
                    expected.map_or("absent".to_string(), |id| id.to_string())
                ),
            }),
        }
    }

    /// A plain text: all of it is learned, and the token that ends a text.
    pub(crate) fn text(&self, text: &str) -> Fault<Encoded> {
        let absent = |field| format!("config.json has no {field}, which plain texts need");
        let TokenIds { bos, needs_bos, eos, .. } = self.config.token_ids();
        if needs_bos && bos.is_none() {
            return Err(absent("text_config.bos_token_id"));
        }
        let eos = eos.ok_or_else(|| absent("eos_token_id"))?;
        let ids = self.tokenizer().encode(text, false).map_err(|e| e.to_string())?.ids;
        self.refuse(&ids, self.config.placeholders())?;
        let learned = |id, part| Token { id, learned: Some(part) };
        let mut tokens = Vec::with_capacity(ids.len() + 2);
        if let Some(bos) = bos.filter(|bos| ids.first() != Some(bos)) {
            tokens.push(Token { id: bos, learned: None });
        }
        tokens.extend(ids.into_iter().map(|id| learned(id, Part::Text)));
        tokens.push(learned(eos, Part::End));
        Ok(Encoded { tokens, pictures: Vec::new(), soft_tokens: Vec::new(), blocks: Vec::new() })
    }

    /// A chat: what the assistant wrote is learned, and the token that ends it. Its pictures are checked in full.
    pub(crate) fn chat(&self, chat: &Chat<'_>) -> Fault<Encoded> {
        let encoder = self.chat_encoder()?;
        let inputs = TemplateInputs { tools: chat.tools.clone(), ..TemplateInputs::default() };
        let with_pictures = !chat.images.is_empty() || chat.messages.iter().any(|message| message.image_parts() > 0);
        let (encoded, pictures, soft_tokens) = match &self.reads {
            Reads::Pictures(processor) => self.with_pictures(processor, chat, &inputs)?,
            _ if with_pictures => return Err(self.processor().map(|_| String::new()).unwrap_or_else(|reason| reason)),
            _ => {
                let rendered = encoder.render(&chat.messages, &inputs).map_err(reason)?;
                (encoder.encode(rendered, NO_PLACEHOLDER, &[]).map_err(reason)?, Vec::new(), Vec::new())
            }
        };
        let placeholders = self.config.placeholders();
        let image = placeholders.image.filter(|_| self.image_token().is_none());
        self.refuse(&encoded.ids, Placeholders { image, ..placeholders })?;
        let blocks: Vec<_> = (0..encoded.expansions.len())
            .map(|picture| {
                with_neighbours(&encoded.ids, encoded.tokens_of_picture(picture), self.config.around_picture())
            })
            .collect();
        self.refuse_touching(&encoded.ids, &blocks)?;
        let tokens = self.learned(encoder, chat, &inputs, &encoded, &blocks)?;
        let pictures = pictures.into_iter().map(Stored::Source).collect();
        Ok(Encoded { tokens, pictures, soft_tokens, blocks })
    }

    fn with_pictures(
        &self,
        processor: &AnyProcessor,
        chat: &Chat<'_>,
        inputs: &TemplateInputs,
    ) -> Fault<(EncodedChat, Vec<PictureSource>, Vec<usize>)> {
        let request = Request {
            images: &chat.images,
            folder: chat.folder,
            template: inputs.clone(),
            ..Request::new("the chat", &chat.messages)
        };
        let pictures = request.pictures().map_err(reason)?;
        let sample = processor.check(&request).map_err(reason)?;
        for (index, (&size, picture)) in sample.resized.iter().zip(&pictures).enumerate() {
            self.config
                .check_picture(size)
                .map_err(|reason| format!("picture {} ({}): {reason}", index + 1, picture.name()))?;
        }
        Ok((sample.chat, pictures, sample.soft_tokens))
    }

    /// The tokens of a chat, those of the assistant learned. Pictures are never learned: no model writes them.
    fn learned(
        &self,
        encoder: &ChatEncoder,
        chat: &Chat<'_>,
        inputs: &TemplateInputs,
        encoded: &EncodedChat,
        blocks: &[Range<usize>],
    ) -> Fault<Vec<Token>> {
        let Some(finder) = &self.finder else { return Err("chats cannot be used".to_string()) };
        let answers = finder.find(encoder, &chat.messages, inputs, encoded).map_err(reason)?;
        let mut tokens: Vec<Token> = encoded.ids.iter().map(|&id| Token { id, learned: None }).collect();
        for answer in answers {
            for (bytes, part) in [(answer.text, Part::Text), (answer.end, Part::End)] {
                tokens[encoded.tokens_of(bytes)].iter_mut().for_each(|token| token.learned = Some(part));
            }
        }
        for block in blocks {
            tokens[block.clone()].iter_mut().for_each(|token| token.learned = None);
        }
        match tokens.iter().any(|token| token.learned.is_some()) {
            true => Ok(tokens),
            false => Err("nothing to learn: the template writes no answer of an assistant".to_string()),
        }
    }

    /// Fails if nothing parts the placeholders of two pictures: the model could not tell where the first one ends.
    fn refuse_touching(&self, ids: &[u32], blocks: &[Range<usize>]) -> Fault<()> {
        let image = self.config.placeholders().image;
        let touch = |pair: &[Range<usize>]| {
            pair[0].end == pair[1].start && [pair[0].end - 1, pair[1].start].iter().all(|&at| Some(ids[at]) == image)
        };
        let Some(first) = blocks.windows(2).position(touch) else { return Ok(()) };
        let (open, close) = self.config.around_picture();
        let word = |id| self.tokenizer().token(id).unwrap_or_else(|| format!("id {id}"));
        Err(format!(
            "nothing is between pictures {} and {}; write {}{}{} for each",
            first + 1,
            first + 2,
            word(open),
            self.image_token().unwrap_or_default(),
            word(close)
        ))
    }

    /// Fails if a text holds a token that only a picture, a video or a sound may give.
    fn refuse(&self, ids: &[u32], placeholders: Placeholders) -> Fault<()> {
        match ids.iter().find(|&&id| placeholders.contains(id)) {
            None => Ok(()),
            Some(&id) => Err(format!(
                "the text holds {}, which stands for a picture, a video or a sound that is not given; remove it",
                self.tokenizer().token(id).unwrap_or_else(|| format!("id {id}"))
            )),
        }
    }
}

/// The tokens of a picture with those around it. Some processors write these, then they are in the range; of other families
/// the template or the text does.
fn with_neighbours(ids: &[u32], range: Range<usize>, (open, close): (u32, u32)) -> Range<usize> {
    let before = range.start > 0 && ids[range.start] != open && ids[range.start - 1] == open;
    let behind = ids[range.end - 1] != close && ids.get(range.end) == Some(&close);
    range.start - usize::from(before)..range.end + usize::from(behind)
}

/// The inner error is the reason why a file that may lack does lack.
pub(crate) fn or_missing<T>(result: candle_vlm_processor::Result<T>) -> Result<Fault<T>> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(error @ candle_vlm_processor::Error::MissingFile { .. }) => Ok(Err(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// What is wrong with a sample, without a name: the line is told elsewhere.
fn reason(error: candle_vlm_processor::Error) -> String {
    match error {
        candle_vlm_processor::Error::Sample { cause, .. } => reason(*cause),
        other => other.to_string(),
    }
}
