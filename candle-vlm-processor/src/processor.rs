//! A sample through template, tokenizer and image processor.

use std::path::Path;
use std::sync::Arc;

use crate::chat::{ChatEncoder, EncodedChat, check_placeholders};
use crate::error::{Error, PictureFault, Result};
use crate::image_settings::{ImageSettings, ImageTokens};
use crate::patches::ImagePatches;
use crate::picture::{Picture, PictureLimits, PictureSource};
use crate::request::Request;

/// A checkpoint's processor: from messages and pictures to token ids and patches. Nothing in it changes when it is used,
/// so threads can share it. `S` is the family's image settings, or `Box<dyn ImageSettings>` for any family.
#[derive(Debug)]
pub struct Processor<S> {
    chat: ChatEncoder,
    settings: S,
    limits: PictureLimits,
    tokens: ImageTokens,
}

/// A sample, ready for the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatSample {
    /// Text, token ids, and the way between them.
    pub chat: EncodedChat,
    /// Per token: 0 text, 1 image, 2 video, 3 audio.
    pub token_types: Vec<u8>,
    /// Soft tokens of each picture.
    pub soft_tokens: Vec<usize>,
    /// Height and width of each picture after resizing, in pixels.
    pub resized: Vec<(usize, usize)>,
    /// The patches of each picture; empty after [`Processor::check`].
    pub images: Vec<ImagePatches>,
}

/// A picture of a sample, with its name for errors.
struct Loaded {
    name: String,
    picture: Arc<Picture>,
}

impl<S: ImageSettings> Processor<S> {
    /// From parts that were made by hand.
    ///
    /// # Errors
    /// Settings that do not fit together; a token is not named.
    pub fn new(chat: ChatEncoder, settings: S) -> Result<Self> {
        settings.check()?;
        let tokens = settings.tokens(chat.tokenizer())?;
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
    pub fn settings(&self) -> &S {
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
    pub fn process(&self, request: &Request<'_>) -> Result<ChatSample> {
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
    pub fn check(&self, request: &Request<'_>) -> Result<ChatSample> {
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

    fn encode(&self, request: &Request<'_>) -> Result<(ChatSample, Vec<Loaded>)> {
        let sources = request.sources()?;
        let rendered = self.chat.render(request.messages, &request.template)?;
        check_placeholders(&rendered.text, &self.tokens.image, sources.len())?;
        let pictures = self.load(&sources, request.folder)?;
        let soft_tokens =
            per_picture(&pictures, |picture| self.settings.soft_tokens(picture.height(), picture.width()))?;
        let resized = per_picture(&pictures, |picture| self.settings.resized(picture.height(), picture.width()))?;
        let ImageTokens { image, begin, end, .. } = &self.tokens;
        let replacements: Vec<_> = soft_tokens.iter().map(|&n| format!("{begin}{}{end}", image.repeat(n))).collect();
        let chat = self.chat.encode(rendered, image, &replacements)?;
        if let Some(max_tokens) = request.max_tokens {
            check_length(&chat, max_tokens, &soft_tokens, &pictures)?;
        }
        let token_types = chat.ids.iter().map(|&id| self.token_type(id)).collect();
        Ok((ChatSample { chat, token_types, soft_tokens, resized, images: Vec::new() }, pictures))
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
