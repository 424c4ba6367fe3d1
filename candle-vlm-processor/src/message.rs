//! Chat messages in the forms that Hugging Face's processors take.

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::{Deserialize, Deserializer};

use crate::error::{Error, Result};
use crate::picture::PictureSource;

/// A chat message: a role, a content (a text, or a list of text and image parts), and whatever else a template reads
/// (`tool_calls`, `reasoning_content`, ...). The order of keys is kept, and fields that are null count as absent.
///
/// An image part names its picture in `image`, `url`, `path` or `base64`, or is `{"type": "image_url", "image_url":
/// {"url": ...}}`; without any of these it takes the next picture of the request's list.
///
/// ```
/// use candle_vlm_processor::Message;
///
/// let json = r#"[{"role": "user", "content": [{"type": "image", "image": "cat.jpg"}, {"type": "text", "text": "What?"}]},
///                {"role": "assistant", "content": "A cat."}]"#;
/// let messages = Message::list_from_json(json)?;
/// assert_eq!(messages[0].image_parts(), 1);
/// assert_eq!(messages[1].role(), "assistant");
/// # Ok::<(), candle_vlm_processor::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Message {
    role: String,
    value: Value,
    /// The source of each image part; `None`: the next picture of the request's list.
    pictures: Vec<Option<PictureSource>>,
}

/// One part of a message's content.
#[derive(Clone, Debug)]
pub enum Part {
    /// A text.
    Text(String),
    /// A picture.
    Image(PictureSource),
}

/// Fields of an image part that name its picture.
const SOURCES: [&str; 4] = ["image", "url", "path", "base64"];
/// Fields that a model's reasoning is kept in; templates read the first, older ones the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

impl Message {
    /// A message that is a text.
    pub fn text(role: &str, content: &str) -> Self {
        let value = Value::from_pairs([("role", Value::from(role)), ("content", Value::from(content))]);
        Self { role: role.into(), value, pictures: Vec::new() }
    }

    /// A message of several parts.
    pub fn parts(role: &str, parts: impl IntoIterator<Item = Part>) -> Self {
        let mut pictures = Vec::new();
        let content: Value = parts
            .into_iter()
            .map(|part| match part {
                Part::Text(text) => Value::from_pairs([("type", "text"), ("text", text.as_str())]),
                Part::Image(source) => {
                    pictures.push(Some(source));
                    Value::from_pairs([("type", "image")])
                }
            })
            .collect();
        let value = Value::from_pairs([("role", Value::from(role)), ("content", content)]);
        Self { role: role.into(), value, pictures }
    }

    /// Reads a JSON list of messages.
    ///
    /// # Errors
    /// The text is not JSON, or a message has another form, with its place in the list.
    pub fn list_from_json(json: &str) -> Result<Vec<Self>> {
        let values: Vec<Value> =
            serde_json::from_str(json).map_err(|cause| Error::Json { what: "the list of messages".into(), cause })?;
        Self::list(values)
    }

    /// Messages from JSON values.
    ///
    /// # Errors
    /// A message has another form, with its place in the list.
    pub fn list(values: impl IntoIterator<Item = Value>) -> Result<Vec<Self>> {
        let parse = |(index, value)| Self::parse(&value).map_err(|reason| Error::Message { index, reason });
        values.into_iter().enumerate().map(parse).collect()
    }

    /// The role, such as `user`.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// Number of image parts.
    pub fn image_parts(&self) -> usize {
        self.pictures.len()
    }

    /// What the template sees.
    pub(crate) fn template_value(&self) -> &Value {
        &self.value
    }

    /// The source of each image part; `None`: the next picture of the request's list.
    pub(crate) fn pictures(&self) -> &[Option<PictureSource>] {
        &self.pictures
    }

    /// The same message with text put around its own, inside of the blanks at its ends; `None` if it has no text.
    pub(crate) fn around(&self, open: &str, close: &str) -> Option<Self> {
        let mut fields = entries(&self.value)?;
        let (_, content) = fields.iter_mut().find(|(name, _)| name == "content")?;
        *content = match content.kind() {
            ValueKind::String => around(content.as_str()?, open, close)?.into(),
            _ => around_parts(content, open, close)?,
        };
        Some(Self { value: Value::from_pairs(fields), ..self.clone() })
    }

    /// Whether any text in the message, tool calls and reasoning among them, holds this one.
    pub(crate) fn holds(&self, text: &str) -> bool {
        fn any(value: &Value, text: &str) -> bool {
            match value.kind() {
                ValueKind::String => value.as_str().is_some_and(|s| s.contains(text)),
                ValueKind::Seq => value.try_iter().is_ok_and(|mut items| items.any(|item| any(&item, text))),
                ValueKind::Map => entries(value)
                    .is_some_and(|fields| fields.iter().any(|(key, value)| key.contains(text) || any(value, text))),
                _ => false,
            }
        }
        any(&self.value, text)
    }

    fn parse(value: &Value) -> Result<Self, String> {
        let mut fields = entries(value).ok_or("must be an object with `role` and `content`")?;
        fields.retain(|(_, value)| !value.is_none());
        let field = |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        let role = field("role").ok_or_else(|| match field("from") {
            Some(_) => "has no `role`: messages in the form {from, value} must be rewritten as {role, content}",
            None => "has no `role`",
        })?;
        let role = role.as_str().ok_or("`role` must be a text")?.to_owned();
        let mut pictures = Vec::new();
        for (name, value) in &mut fields {
            if name == "content" {
                *value = content(value, &mut pictures)?;
            }
        }
        name_reasoning(&mut fields);
        Ok(Self { role, value: Value::from_pairs(fields), pictures })
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// Key and value of each entry of an object.
fn entries(value: &Value) -> Option<Vec<(String, Value)>> {
    if value.kind() != ValueKind::Map {
        return None;
    }
    let entry = |key: Value| Some((key.as_str()?.to_owned(), value.get_item(&key).ok()?));
    value.try_iter().ok()?.map(entry).collect()
}

/// The content as templates expect it; the sources of its pictures are added to `pictures`.
fn content(value: &Value, pictures: &mut Vec<Option<PictureSource>>) -> Result<Value, String> {
    match value.kind() {
        ValueKind::String => Ok(value.clone()),
        ValueKind::Seq => {
            let parts = value.try_iter().map_err(|e| e.to_string())?.enumerate();
            parts
                .map(|(index, part)| self::part(&part, pictures).map_err(|reason| format!("content[{index}] {reason}")))
                .collect::<Result<Value, String>>()
        }
        kind => Err(format!("`content` must be a text or a list of parts, not {kind}")),
    }
}

fn part(value: &Value, pictures: &mut Vec<Option<PictureSource>>) -> Result<Value, String> {
    let fields = entries(value).ok_or("must be an object with a `type`")?;
    let field = |name: &str| fields.iter().find(|(key, v)| key == name && !v.is_none()).map(|(_, v)| v);
    let kind = field("type").and_then(Value::as_str).ok_or("has no `type`")?;
    match kind {
        "text" => match field("text").map(Value::kind) {
            Some(ValueKind::String) => Ok(value.clone()),
            _ => Err("is of type text but has no `text`".into()),
        },
        "image_url" => {
            let url =
                field("image_url").map(|v| v.get_attr("url").ok().filter(|u| !u.is_undefined()).unwrap_or(v.clone()));
            let url =
                url.as_ref().and_then(Value::as_str).ok_or("is of type image_url but has no address in `image_url`")?;
            pictures.push(Some(PictureSource::from_text(url)));
            Ok(Value::from_pairs([("type", "image"), ("url", url)]))
        }
        "image" => {
            let named: Vec<_> = SOURCES.iter().filter_map(|name| Some((*name, field(name)?))).collect();
            match named[..] {
                [] => pictures.push(None),
                [(name, source)] => {
                    let text = source.as_str().ok_or_else(|| format!("must name its picture in `{name}` by a text"))?;
                    pictures.push(Some(match name {
                        "base64" => PictureSource::Base64(text.into()),
                        "path" => PictureSource::Path(text.into()),
                        _ => PictureSource::from_text(text),
                    }));
                }
                _ => return Err(format!("names its picture twice, in `{}` and in `{}`", named[0].0, named[1].0)),
            }
            Ok(value.clone())
        }
        other => Err(format!("is of type {other:?}; only text, image and image_url are supported")),
    }
}

/// `None` for nothing but blanks.
fn around(text: &str, open: &str, close: &str) -> Option<String> {
    let inner = text.trim();
    let start = text.len() - text.trim_start().len();
    let (head, tail) = (&text[..start], &text[start + inner.len()..]);
    (!inner.is_empty()).then(|| format!("{head}{open}{inner}{close}{tail}"))
}

/// Opens in the first text part and closes in the last one.
fn around_parts(content: &Value, open: &str, close: &str) -> Option<Value> {
    let mut parts: Vec<Value> = content.try_iter().ok()?.collect();
    let text = |part: &Value| part.get_attr("text").ok().filter(|text| part_is_text(part) && around_is_some(text));
    let first = parts.iter().position(|part| text(part).is_some())?;
    let last = parts.iter().rposition(|part| text(part).is_some())?;
    for (at, open, close) in [(first, open, ""), (last, "", close)] {
        let mut fields = entries(&parts[at])?;
        let (_, text) = fields.iter_mut().find(|(name, _)| name == "text")?;
        *text = around(text.as_str()?, open, close)?.into();
        parts[at] = Value::from_pairs(fields);
    }
    Some(parts.into_iter().collect())
}

fn part_is_text(part: &Value) -> bool {
    part.get_attr("type").is_ok_and(|kind| kind.as_str() == Some("text"))
}

fn around_is_some(text: &Value) -> bool {
    text.as_str().is_some_and(|text| !text.trim().is_empty())
}

/// Puts the reasoning into the fields that templates read, whichever it came in.
fn name_reasoning(fields: &mut Vec<(String, Value)>) {
    let find = |fields: &[(String, Value)], name: &str| fields.iter().position(|(key, _)| key == name);
    let Some(at) = REASONING.iter().find_map(|name| find(fields, name)) else { return };
    let reasoning = fields[at].1.clone();
    if find(fields, "thinking").is_none() {
        fields.insert(0, ("thinking".into(), reasoning.clone()));
    }
    match find(fields, "reasoning_content") {
        Some(at) => fields[at].1 = reasoning,
        None => fields.push(("reasoning_content".into(), reasoning)),
    }
}
