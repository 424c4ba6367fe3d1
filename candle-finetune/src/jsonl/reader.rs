//! One line or row as a sample.

use std::path::Path;

use candle_vlm_processor::{Message, Part, PictureSource, TemplateValue};

use super::fields::{ALLOWED, Fields, kind};
use crate::encoder::{Chat, Encoded, Encoder, Fault, Stored};
use crate::parquet::Row;

/// What is needed to turn one line or row into a sample.
pub(super) struct Reader<'a> {
    pub(super) encoder: &'a Encoder,
    /// Where relative paths of pictures start.
    pub(super) folder: &'a Path,
}

impl Reader<'_> {
    /// The sample of a line, and the names of the fields that are not read.
    pub(super) fn line(&self, line: &[u8]) -> Fault<(Encoded, Vec<String>)> {
        self.sample(&Fields::parse(line)?)
    }

    /// The sample of a row, and the names of the columns that are not read.
    pub(super) fn row(&self, row: Row) -> Fault<(Encoded, Vec<String>)> {
        let Row { columns, cells } = row;
        let read = Fields::new(columns).and_then(|fields| self.sample(&fields));
        // Within the row a picture is a text of its content; outside it is the cell that holds the content.
        let cell = |text: &str| cells.iter().find(|(content, _)| content == text).map(|(_, cell)| cell.clone());
        match read {
            Ok((mut encoded, unread)) => {
                for picture in &mut encoded.pictures {
                    if let Stored::Source(PictureSource::Base64(text)) = picture
                        && let Some(cell) = cell(text)
                    {
                        *picture = Stored::Cell(cell);
                    }
                }
                Ok((encoded, unread))
            }
            Err(reason) => Err(cells.iter().fold(reason, |reason, (content, cell)| {
                reason.replace(&PictureSource::from_text(content).name(), &cell.name)
            })),
        }
    }

    fn sample(&self, fields: &Fields) -> Fault<(Encoded, Vec<String>)> {
        let has = |name| fields.get(name).is_some();
        let encoded = if has("text") {
            self.text(fields.text("text")?)?
        } else if has("messages") {
            self.encoder.chat(&self.messages(fields)?)?
        } else if has("texts") {
            self.encoder.chat(&self.texts(fields)?)?
        } else {
            self.encoder.chat(&self.pair(fields)?)?
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

    /// Pairs of a user's and an assistant's text; all pictures come before the first text.
    fn texts(&self, fields: &Fields) -> Fault<Chat<'_>> {
        let pairs = fields.list("texts")?.unwrap_or_default();
        if pairs.is_empty() {
            return Err("\"texts\" has no pair of user and assistant; leave it out".to_string());
        }
        let mut images = images(fields)?;
        let mut messages = Vec::with_capacity(2 * pairs.len());
        for (place, pair) in pairs.iter().enumerate() {
            let text = |name: &str| {
                let value = pair.get_attr(name).ok().filter(|value| !value.is_none() && !value.is_undefined());
                let value = value.ok_or_else(|| format!("texts[{place}] has no \"{name}\"; {ALLOWED}"))?;
                let text = value.as_str().map(str::to_string);
                text.ok_or_else(|| format!("\"{name}\" of texts[{place}] is {}; a string is needed", kind(&value)))
            };
            let (user, assistant) = (text("user")?, text("assistant")?);
            if assistant.trim().is_empty() {
                return Err(format!("\"assistant\" of texts[{place}] is empty; there is nothing to learn from it"));
            }
            messages.push(match images.is_empty() {
                true => Message::text("user", &user),
                false => Message::parts("user", images.drain(..).map(Part::Image).chain([Part::Text(user)])),
            });
            messages.push(Message::text("assistant", &assistant));
        }
        Ok(Chat { messages, images, tools: None, folder: self.folder })
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
            Some(placeholder) => prompt_parts(&self.encoder.bare_pictures(prompt), images, placeholder)?,
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
