//! One line as a sample.

use std::path::Path;

use candle_vlm_processor::{Message, Part, PictureSource, TemplateValue};

use super::fields::{ALLOWED, Fields, kind};
use crate::encoder::{Chat, Encoded, Encoder, Fault};

/// What is needed to turn one line into a sample.
pub(super) struct Reader<'a> {
    pub(super) encoder: &'a Encoder,
    /// Where relative paths of pictures start.
    pub(super) folder: &'a Path,
}

impl Reader<'_> {
    /// The sample, and the names of the fields that are not read.
    pub(super) fn read(&self, line: &[u8]) -> Fault<(Encoded, Vec<String>)> {
        let fields = Fields::parse(line)?;
        let encoded = match (fields.get("text"), fields.get("messages")) {
            (Some(_), _) => self.text(fields.text("text")?)?,
            (None, Some(_)) => self.encoder.chat(&self.messages(&fields)?)?,
            (None, None) => self.encoder.chat(&self.pair(&fields)?)?,
        };
        Ok((encoded, fields.unread().map(str::to_string).collect()))
    }

    fn text(&self, text: &str) -> Fault<Encoded> {
        match text.is_empty() {
            true => Err("\"text\" is empty; leave the line out".to_string()),
            false => self.encoder.text(text),
        }
    }

    fn messages(&self, fields: &Fields) -> Fault<Chat<'_>> {
        let messages = fields.list("messages")?.unwrap_or_default();
        if messages.is_empty() {
            return Err("\"messages\" has no message; leave the line out".to_string());
        }
        let messages = Message::list(messages).map_err(|e| e.to_string())?;
        if !messages.iter().any(|message| message.role() == "assistant") {
            return Err("nothing to learn: \"messages\" has no turn of the role assistant".to_string());
        }
        let tools = fields.list("tools")?.map(TemplateValue::from);
        Ok(Chat { messages, images: images(fields)?, tools, folder: self.folder })
    }

    /// A prompt with its pictures, and the answer: one turn each.
    fn pair(&self, fields: &Fields) -> Fault<Chat<'_>> {
        let (prompt, completion) = (fields.text("prompt")?, fields.text("completion")?);
        if completion.trim().is_empty() {
            return Err("\"completion\" is empty; there is nothing to learn from this line".to_string());
        }
        if fields.get("tools").is_some() {
            return Err(format!("\"tools\" beside \"prompt\"; {ALLOWED}"));
        }
        let images = images(fields)?;
        let user = match self.encoder.image_token() {
            Some(placeholder) => prompt_parts(prompt, images, placeholder)?,
            None if images.is_empty() => Message::text("user", prompt),
            None => Message::parts("user", images.into_iter().map(Part::Image)),
        };
        let placeholder = self.encoder.image_token();
        if let Some(placeholder) = placeholder.filter(|placeholder| completion.contains(placeholder)) {
            return Err(format!("{placeholder} in \"completion\"; pictures are allowed in \"prompt\" only"));
        }
        let messages = vec![user, Message::text("assistant", completion)];
        Ok(Chat { messages, images: Vec::new(), tools: None, folder: self.folder })
    }
}

/// The message of a prompt in which each placeholder stands for the next picture.
fn prompt_parts(prompt: &str, images: Vec<PictureSource>, placeholder: &str) -> Fault<Message> {
    let mut pieces = prompt.split(placeholder);
    let found = prompt.matches(placeholder).count();
    if found != images.len() {
        return Err(format!(
            "{found} placeholders {placeholder} in \"prompt\", but {} images; every image needs one placeholder, in order",
            images.len()
        ));
    }
    if found == 0 {
        return Ok(Message::text("user", prompt));
    }
    let text = |piece: Option<&str>| piece.filter(|text| !text.is_empty()).map(|text| Part::Text(text.to_string()));
    let mut parts: Vec<Part> = text(pieces.next()).into_iter().collect();
    for image in images {
        parts.push(Part::Image(image));
        parts.extend(text(pieces.next()));
    }
    Ok(Message::parts("user", parts))
}

/// `images`: paths or data URLs in a list, or a single one.
fn images(fields: &Fields) -> Fault<Vec<PictureSource>> {
    if let Some(one) = fields.get("images").and_then(TemplateValue::as_str) {
        return Ok(vec![PictureSource::from_text(one)]);
    }
    let source = |item: &TemplateValue| {
        let text = item.as_str().ok_or_else(|| format!("{} in \"images\"; paths are strings", kind(item)))?;
        Ok(PictureSource::from_text(text))
    };
    fields.list("images")?.unwrap_or_default().iter().map(source).collect()
}
