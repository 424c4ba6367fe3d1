//! Messages to token ids, with room for pictures: what all families share.

use std::ops::Range;
use std::path::Path;

use crate::error::{Error, Result};
use crate::message::Message;
use crate::template::{ChatTemplate, Rendered, TemplateInputs};
use crate::tokenizer::TextTokenizer;

/// Template and tokenizer of a checkpoint.
#[derive(Debug)]
pub struct ChatEncoder {
    template: ChatTemplate,
    tokenizer: TextTokenizer,
}

/// A chat as token ids, with the way back to its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedChat {
    /// The text that the template wrote, one placeholder per picture.
    pub rendered: String,
    /// Byte ranges of `rendered` inside `{% generation %}` blocks; empty if the template has none.
    pub generated: Vec<Range<usize>>,
    /// The text that was encoded: every placeholder replaced by those of its soft tokens.
    pub expanded: String,
    /// One entry per picture: where its placeholder was, and what became of it.
    pub expansions: Vec<Expansion>,
    /// Token ids of `expanded`.
    pub ids: Vec<u32>,
    /// The bytes of `expanded` that each token stands for; a token may be a part of a character.
    pub offsets: Vec<Range<usize>>,
}

/// Where the placeholder of a picture was, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expansion {
    /// Bytes of the placeholder in the rendered text.
    pub rendered: Range<usize>,
    /// Bytes of its replacement in the expanded text.
    pub expanded: Range<usize>,
}

impl ChatEncoder {
    /// Reads template and tokenizer of a checkpoint folder.
    ///
    /// # Errors
    /// A file is absent or broken.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Ok(Self { template: ChatTemplate::from_folder(folder)?, tokenizer: TextTokenizer::from_folder(folder)? })
    }

    /// From parts that were made by hand.
    pub fn new(template: ChatTemplate, tokenizer: TextTokenizer) -> Self {
        Self { template, tokenizer }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// The chat templates.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Renders messages.
    ///
    /// # Errors
    /// The template fails.
    pub fn render(&self, messages: &[Message], inputs: &TemplateInputs) -> Result<Rendered> {
        self.template.render(messages, inputs, self.tokenizer.special_tokens())
    }

    /// Replaces the n-th `placeholder` of a rendered chat by `replacements[n]` and encodes the text.
    ///
    /// # Errors
    /// Another number of placeholders than replacements; the tokenizer fails.
    pub fn encode(&self, chat: Rendered, placeholder: &str, replacements: &[String]) -> Result<EncodedChat> {
        check_placeholders(&chat.text, placeholder, replacements.len())?;
        let (expanded, expansions) = expand(&chat.text, placeholder, replacements);
        let tokens = self.tokenizer.encode_chat(&expanded)?;
        let Rendered { text: rendered, generated } = chat;
        Ok(EncodedChat { rendered, generated, expanded, expansions, ids: tokens.ids, offsets: tokens.offsets })
    }
}

/// Fails if a text has another number of placeholders than there are pictures.
pub(crate) fn check_placeholders(text: &str, token: &str, pictures: usize) -> Result<()> {
    let placeholders = text.matches(token).count();
    if placeholders != pictures {
        return Err(Error::PlaceholderCount { placeholders, pictures, token: token.into() });
    }
    Ok(())
}

fn expand(text: &str, placeholder: &str, replacements: &[String]) -> (String, Vec<Expansion>) {
    let mut expanded = String::with_capacity(text.len() + replacements.iter().map(String::len).sum::<usize>());
    let mut expansions = Vec::with_capacity(replacements.len());
    let mut end = 0;
    for ((at, found), replacement) in text.match_indices(placeholder).zip(replacements) {
        expanded.push_str(&text[end..at]);
        let start = expanded.len();
        expanded.push_str(replacement);
        end = at + found.len();
        expansions.push(Expansion { rendered: at..end, expanded: start..expanded.len() });
    }
    expanded.push_str(&text[end..]);
    (expanded, expansions)
}

impl EncodedChat {
    /// The tokens that overlap a byte range of the rendered text, as Hugging Face finds assistant tokens.
    pub fn tokens_of(&self, rendered: Range<usize>) -> Range<usize> {
        let bytes = self.to_expanded(rendered.start)..self.to_expanded(rendered.end);
        self.tokens_at(bytes)
    }

    /// The tokens of the n-th picture, its opening and closing tokens among them.
    ///
    /// # Panics
    /// There is no such picture.
    pub fn tokens_of_picture(&self, n: usize) -> Range<usize> {
        self.tokens_at(self.expansions[n].expanded.clone())
    }

    /// A place in the rendered text as a place in the expanded one.
    fn to_expanded(&self, at: usize) -> usize {
        let before = self.expansions.partition_point(|e| e.rendered.end <= at);
        match before.checked_sub(1).map(|last| &self.expansions[last]) {
            Some(last) => at - last.rendered.end + last.expanded.end,
            None => at,
        }
    }

    fn tokens_at(&self, bytes: Range<usize>) -> Range<usize> {
        let overlaps = |token: &Range<usize>| token.start < bytes.end && token.end > bytes.start;
        let start = self.offsets.iter().position(overlaps).unwrap_or(0);
        let end = self.offsets.iter().rposition(overlaps).map_or(start, |last| last + 1);
        start..end
    }
}
