//! A sample through template, tokenizer and image processor.

use std::path::Path;
use std::sync::Arc;

use super::patches::ImagePatches;
use super::settings::Gemma4ImageSettings;
use crate::chat::{ChatEncoder, EncodedChat, check_placeholders};
use crate::error::{Error, PictureFault, Result};
use crate::message::Message;
use crate::picture::{Picture, PictureLimits, PictureSource};
use crate::template::TemplateInputs;

/// Gemma 4's processor: from messages and pictures to token ids and patches. Nothing in it changes when it is used, so
/// threads can share it.
#[derive(Debug)]
pub struct Gemma4Processor {
    chat: ChatEncoder,
    settings: Gemma4ImageSettings,
    limits: PictureLimits,
    tokens: Tokens,
}

/// The tokens around and for pictures.
#[derive(Debug)]
struct Tokens {
    image: String,
    begin: String,
    end: String,
    image_id: u32,
    video_id: Option<u32>,
    audio_id: Option<u32>,
}

/// One sample. Only messages are needed.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Name of the sample for errors, such as `train.jsonl line 7`.
    pub name: &'a str,
    /// The chat.
    pub messages: &'a [Message],
    /// Pictures for the image parts that name none, in order.
    pub images: &'a [PictureSource],
    /// The folder where relative paths of pictures start; empty: the current one.
    pub folder: &'a Path,
    /// What else the chat template gets.
    pub template: TemplateInputs,
    /// Most tokens that the sample may have.
    pub max_tokens: Option<usize>,
}

impl<'a> Request<'a> {
    /// A request with nothing but messages.
    pub fn new(name: &'a str, messages: &'a [Message]) -> Self {
        let (images, folder, template) = (&[][..], Path::new(""), TemplateInputs::default());
        Self { name, messages, images, folder, template, max_tokens: None }
    }

    /// The pictures of the sample in the order of its image parts.
    ///
    /// # Errors
    /// `images` has another number of pictures than there are image parts that name none.
    pub fn pictures(&self) -> Result<Vec<PictureSource>> {
        Ok(sources(self)?.into_iter().cloned().collect())
    }
}

/// A sample, ready for the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4Sample {
    /// Text, token ids, and the way between them.
    pub chat: EncodedChat,
    /// Per token: 0 text, 1 image, 2 video, 3 audio.
    pub token_types: Vec<u8>,
    /// Soft tokens of each picture.
    pub soft_tokens: Vec<usize>,
    /// Height and width of each picture after resizing, in pixels.
    pub resized: Vec<(usize, usize)>,
    /// The patches of each picture; empty after [`Gemma4Processor::check`].
    pub images: Vec<ImagePatches>,
}

/// A picture of a sample, with its name for errors.
struct Loaded {
    name: String,
    picture: Arc<Picture>,
}

impl Gemma4Processor {
    /// Reads template, tokenizer and image settings of a checkpoint folder.
    ///
    /// # Errors
    /// A file is absent or broken, a setting is not supported, or a token is not named.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Self::new(ChatEncoder::from_folder(folder)?, Gemma4ImageSettings::from_folder(folder)?)
    }

    /// From parts that were made by hand.
    ///
    /// # Errors
    /// Settings that do not fit together; a token is not named.
    pub fn new(chat: ChatEncoder, settings: Gemma4ImageSettings) -> Result<Self> {
        settings.check()?;
        let tokenizer = chat.tokenizer();
        let (image, image_id) = tokenizer.named_token("image_token")?;
        let tokens = Tokens {
            image,
            begin: tokenizer.named_token("boi_token")?.0,
            end: tokenizer.named_token("eoi_token")?.0,
            image_id,
            video_id: tokenizer.id("<|video|>"), // fixed in transformers as well, no file names it
            audio_id: tokenizer.named_token("audio_token").ok().map(|(_, id)| id),
        };
        Ok(Self { chat, settings, limits: PictureLimits::default(), tokens })
    }

    /// The same processor with other limits for pictures.
    pub fn with_limits(self, limits: PictureLimits) -> Self {
        Self { limits, ..self }
    }

    /// Template and tokenizer.
    pub fn chat(&self) -> &ChatEncoder {
        &self.chat
    }

    /// How pictures are cut.
    pub fn settings(&self) -> &Gemma4ImageSettings {
        &self.settings
    }

    /// The text that stands for a picture in a rendered chat.
    pub fn image_token(&self) -> &str {
        &self.tokens.image
    }

    /// Id of the token that each soft token of a picture takes the place of.
    pub fn image_token_id(&self) -> u32 {
        self.tokens.image_id
    }

    /// Encodes a sample: ids, and the patches of its pictures.
    ///
    /// # Errors
    /// Everything that is wrong with the sample, with its name and that of the picture: a picture that cannot be read
    /// or is too large, another number of placeholders than pictures, more tokens than allowed, a failing template.
    pub fn process(&self, request: &Request<'_>) -> Result<Gemma4Sample> {
        let run = || {
            let (mut sample, pictures) = self.encode(request)?;
            sample.images = per_picture(&pictures, |picture| self.settings.patches(picture))?;
            Ok(sample)
        };
        run().map_err(|cause: Error| cause.of_sample(request.name))
    }

    /// Does all of [`Self::process`] but the resizing: finds every fault of a sample, its pictures decoded in full.
    ///
    /// # Errors
    /// As [`Self::process`].
    pub fn check(&self, request: &Request<'_>) -> Result<Gemma4Sample> {
        self.encode(request).map(|(sample, _)| sample).map_err(|cause| cause.of_sample(request.name))
    }

    /// The patches of pictures alone, such as those that [`Request::pictures`] lists.
    ///
    /// # Errors
    /// A picture that cannot be read or is too large, with its place and name.
    pub fn patches(&self, pictures: &[PictureSource], folder: &Path) -> Result<Vec<ImagePatches>> {
        let load = |(index, source): (usize, &PictureSource)| {
            let patches = source.load(folder, &self.limits).and_then(|picture| self.settings.patches(&picture));
            patches.map_err(|fault| Error::Picture { index: index + 1, name: source.name(), fault })
        };
        pictures.iter().enumerate().map(load).collect()
    }

    fn encode(&self, request: &Request<'_>) -> Result<(Gemma4Sample, Vec<Loaded>)> {
        let sources = sources(request)?;
        let rendered = self.chat.render(request.messages, &request.template)?;
        check_placeholders(&rendered.text, &self.tokens.image, sources.len())?;
        let pictures = self.load(&sources, request.folder)?;
        let soft_tokens =
            per_picture(&pictures, |picture| self.settings.soft_tokens(picture.height(), picture.width()))?;
        let resized = per_picture(&pictures, |picture| self.settings.resized(picture.height(), picture.width()))?;
        let Tokens { image, begin, end, .. } = &self.tokens;
        let replacements: Vec<_> = soft_tokens.iter().map(|&n| format!("{begin}{}{end}", image.repeat(n))).collect();
        let chat = self.chat.encode(rendered, image, &replacements)?;
        if let Some(max_tokens) = request.max_tokens {
            check_length(&chat, max_tokens, &soft_tokens, &pictures)?;
        }
        let token_types = chat.ids.iter().map(|&id| self.token_type(id)).collect();
        Ok((Gemma4Sample { chat, token_types, soft_tokens, resized, images: Vec::new() }, pictures))
    }

    fn load(&self, sources: &[&PictureSource], folder: &Path) -> Result<Vec<Loaded>> {
        let load = |(index, source): (usize, &&PictureSource)| {
            let name = source.name();
            match source.load(folder, &self.limits) {
                Ok(picture) => Ok(Loaded { name, picture }),
                Err(fault) => Err(Error::Picture { index: index + 1, name, fault }),
            }
        };
        sources.iter().enumerate().map(load).collect()
    }

    fn token_type(&self, id: u32) -> u8 {
        match id {
            id if id == self.tokens.image_id => 1,
            id if Some(id) == self.tokens.video_id => 2,
            id if Some(id) == self.tokens.audio_id => 3,
            _ => 0,
        }
    }
}

/// The pictures of a sample in the order of its image parts.
fn sources<'a>(request: &Request<'a>) -> Result<Vec<&'a PictureSource>> {
    let parts = || request.messages.iter().flat_map(Message::pictures);
    let unnamed = parts().filter(|source| source.is_none()).count();
    if unnamed != request.images.len() {
        return Err(Error::PictureList { parts: unnamed, pictures: request.images.len() });
    }
    let mut list = request.images.iter();
    Ok(parts().filter_map(|source| source.as_ref().or_else(|| list.next())).collect())
}

/// Does something with each picture; a fault gets the picture's name.
fn per_picture<T>(pictures: &[Loaded], act: impl Fn(&Picture) -> Result<T, PictureFault>) -> Result<Vec<T>> {
    let named = |(index, loaded): (usize, &Loaded)| {
        let fault = |fault| Error::Picture { index: index + 1, name: loaded.name.clone(), fault };
        act(&loaded.picture).map_err(fault)
    };
    pictures.iter().enumerate().map(named).collect()
}

/// Fails if the sample is too long, and names the first picture that does not fit.
fn check_length(chat: &EncodedChat, max_tokens: usize, soft_tokens: &[usize], pictures: &[Loaded]) -> Result<()> {
    let total = chat.ids.len();
    if total <= max_tokens {
        return Ok(());
    }
    for (index, (loaded, &soft_tokens)) in pictures.iter().zip(soft_tokens).enumerate() {
        let end = chat.tokens_of_picture(index).end;
        if end > max_tokens {
            let name = loaded.name.clone();
            return Err(Error::PictureTooLong { index: index + 1, name, soft_tokens, end, max_tokens, total });
        }
    }
    Err(Error::TooLong { total, max_tokens })
}
