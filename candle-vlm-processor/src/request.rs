//! What a processor is asked for.

use std::path::Path;

use crate::error::{Error, Result};
use crate::message::Message;
use crate::picture::PictureSource;
use crate::template::TemplateInputs;

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
        Ok(self.sources()?.into_iter().cloned().collect())
    }

    /// The same, not copied.
    pub(crate) fn sources(&self) -> Result<Vec<&'a PictureSource>> {
        let messages = self.messages;
        let parts = || messages.iter().flat_map(Message::pictures);
        let unnamed = parts().filter(|source| source.is_none()).count();
        if unnamed != self.images.len() {
            return Err(Error::PictureList { parts: unnamed, pictures: self.images.len() });
        }
        let mut list = self.images.iter();
        Ok(parts().filter_map(|source| source.as_ref().or_else(|| list.next())).collect())
    }
}
