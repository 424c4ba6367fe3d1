//! One line or row as named fields.

use std::collections::BTreeSet;
use std::fmt;

use candle_vlm_processor::TemplateValue;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::encoder::Fault;
use crate::names;

/// The kinds of line, for messages.
pub(super) const ALLOWED: &str = "allowed are {\"messages\": [..], \"images\": [..], \"tools\": [..]}, \
                                  {\"prompt\": .., \"completion\": .., \"images\": [..]}, {\"texts\": [{\"user\": .., \
                                  \"assistant\": ..}], \"images\": [..]} and {\"text\": ..}";

/// Sets of columns that make a sample, for messages.
#[cfg(feature = "parquet")]
pub(crate) const COLUMNS: &str = "messages (with images or image, and tools), prompt and completion (with images or image), \
                                  texts of user and assistant (with images or image), and text";

/// The fields that are read.
pub(crate) const KNOWN: [&str; 7] = ["messages", "images", "tools", "prompt", "completion", "texts", "text"];

/// Fields of one line or row; those that are null count as absent.
#[derive(Debug)]
pub(super) struct Fields(Vec<(String, TemplateValue)>);

impl Fields {
    /// Parses a line.
    pub(super) fn parse(line: &[u8]) -> Fault<Self> {
        let text = std::str::from_utf8(line)
            .map_err(|e| format!("not UTF-8 at byte offset {} of the line; save the file as UTF-8", e.valid_up_to()))?;
        let value = json(text).map_err(|reason| format!("not valid JSON: {reason}"))?;
        if kind(&value) != "an object" {
            return Err(format!("{} instead of an object; {ALLOWED}", kind(&value)));
        }
        let field = |key: TemplateValue| Some((key.as_str()?.to_string(), value.get_item(&key).ok()?));
        Self::new(value.try_iter().map_err(|e| e.to_string())?.filter_map(field).collect())
    }

    /// Takes fields whose names are all different.
    pub(super) fn new(mut fields: Vec<(String, TemplateValue)>) -> Fault<Self> {
        fields.retain(|(_, value)| !value.is_none());
        let fields = Self(fields);
        fields.check()?;
        Ok(fields)
    }

    /// Names of the fields that nothing is taken from.
    pub(super) fn unread(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str()).filter(|name| !KNOWN.contains(name))
    }

    fn check(&self) -> Fault<()> {
        let has = |name| self.get(name).is_some();
        match has("messages") || has("texts") || has("text") || (has("prompt") && has("completion")) {
            true => self.check_spelling()?,
            false => self.explain_no_kind()?,
        }
        let beside = |name: &str, allowed: &[&str]| match self.get(name) {
            Some(_) => {
                KNOWN.iter().find(|&&other| other != name && !allowed.contains(&other) && self.get(other).is_some())
            }
            None => None,
        };
        for (name, allowed) in [("text", &[][..]), ("messages", &["images", "tools"]), ("texts", &["images"])] {
            if let Some(other) = beside(name, allowed) {
                return Err(format!("\"{name}\" beside \"{other}\": a line is of one kind; {ALLOWED}"));
            }
        }
        Ok(())
    }

    /// Fails if a field looks like one that may lack: what it holds would be missed without a word.
    fn check_spelling(&self) -> Fault<()> {
        let may_lack = match (self.get("text"), self.get("messages")) {
            (Some(_), _) => &[][..],
            (None, Some(_)) => &["images", "tools"],
            (None, None) => &["images"],
        };
        for &name in may_lack.iter().filter(|name| self.get(name).is_none()) {
            if let Some(other) = self.unread().find(|other| strsim::osa_distance(&other.to_lowercase(), name) <= 1) {
                return Err(format!(
                    "unknown field \"{other}\" and no \"{name}\": write \"{name}\", or call it otherwise if it is not meant to be read"
                ));
            }
        }
        Ok(())
    }

    /// Fails with the most helpful reason if the fields are of no kind of line and there is more to say than which one
    /// is absent.
    fn explain_no_kind(&self) -> Fault<()> {
        if self.get("conversations").is_some() {
            return Err(format!("\"conversations\" with from and value: rewrite it as \"messages\"; {ALLOWED}"));
        }
        let absent: Vec<&str> = KNOWN.into_iter().filter(|name| self.get(name).is_none()).collect();
        if let Some((other, name)) = self.unread().find_map(|other| Some((other, names::nearest(other, &absent)?))) {
            return Err(format!("unknown field \"{other}\"; is \"{name}\" meant? {ALLOWED}"));
        }
        match self.unread().next() {
            Some(other) if self.0.iter().all(|(name, _)| !KNOWN.contains(&name.as_str())) => {
                Err(format!("no field to learn from; \"{other}\" is unknown; {ALLOWED}"))
            }
            _ => Ok(()),
        }
    }

    /// A field, if it is there and not null.
    pub(super) fn get(&self, name: &str) -> Option<&TemplateValue> {
        self.0.iter().find(|(field, _)| field == name).map(|(_, value)| value)
    }

    /// A field that is a text.
    pub(super) fn text(&self, name: &str) -> Fault<&str> {
        let value = self.get(name).ok_or_else(|| format!("no \"{name}\"; {ALLOWED}"))?;
        value.as_str().ok_or_else(|| format!("\"{name}\" is {}; a string is needed", kind(value)))
    }

    /// A field that is a list.
    pub(super) fn list(&self, name: &str) -> Fault<Option<Vec<TemplateValue>>> {
        match self.get(name) {
            None => Ok(None),
            Some(value) if kind(value) == "a list" => Ok(Some(value.try_iter().map_err(|e| e.to_string())?.collect())),
            Some(value) => Err(format!("\"{name}\" is {}; a list is needed", kind(value))),
        }
    }
}

/// Whether columns or fields of these names can make a sample.
#[cfg(feature = "parquet")]
pub(crate) fn has_a_sample(names: &[String]) -> bool {
    let has = |name: &str| names.iter().any(|other| other == name);
    has("messages") || has("texts") || has("text") || (has("prompt") && has("completion"))
}

/// A JSON text as a value; no key may stand twice in one object.
pub(crate) fn json(text: &str) -> Fault<TemplateValue> {
    serde_json::from_str::<KeysOnce>(text).map_err(|error| error.to_string())?;
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// The kind of a JSON value, for messages.
pub(super) fn kind(value: &TemplateValue) -> &'static str {
    match value.kind().to_string().as_str() {
        "none" => "null",
        "bool" => "true or false",
        "number" => "a number",
        "string" => "a string",
        "map" => "an object",
        _ => "a list",
    }
}

/// Fails if a key stands twice in one object, at any depth: one of the values would be lost without a word.
struct KeysOnce;

impl<'de> Deserialize<'de> for KeysOnce {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KeysOnceVisitor)
    }
}

struct KeysOnceVisitor;

impl<'de> Visitor<'de> for KeysOnceVisitor {
    type Value = KeysOnce;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<KeysOnce, A::Error> {
        let mut keys = BTreeSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if keys.contains(&key) {
                return Err(A::Error::custom(format!("the key \"{key}\" stands twice in one object")));
            }
            keys.insert(key);
            map.next_value::<KeysOnce>()?;
        }
        Ok(KeysOnce)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<KeysOnce, A::Error> {
        while list.next_element::<KeysOnce>()?.is_some() {}
        Ok(KeysOnce)
    }

    fn visit_bool<E>(self, _: bool) -> Result<KeysOnce, E> {
        Ok(KeysOnce)
    }

    fn visit_i64<E>(self, _: i64) -> Result<KeysOnce, E> {
        Ok(KeysOnce)
    }

    fn visit_u64<E>(self, _: u64) -> Result<KeysOnce, E> {
        Ok(KeysOnce)
    }

    fn visit_f64<E>(self, _: f64) -> Result<KeysOnce, E> {
        Ok(KeysOnce)
    }

    fn visit_str<E>(self, _: &str) -> Result<KeysOnce, E> {
        Ok(KeysOnce)
    }

    fn visit_unit<E>(self) -> Result<KeysOnce, E> {
        Ok(KeysOnce)
    }
}
