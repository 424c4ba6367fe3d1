//! Reading typed fields out of one JSON object, with errors that name the field in full.

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Upper bound of every size in a configuration: keeps products of two sizes inside 64 bits.
const MAX_SIZE: u64 = i32::MAX as u64;

/// Upper bound of what has tensors of its own, one by one: keeps the list of their names in memory.
const MAX_LISTED: usize = 4096;

/// One JSON object and the name it has in the file.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    path: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The object that `value` is, at `path` in the file, which is empty for the whole file.
    ///
    /// # Errors
    /// It is no object.
    pub fn new(path: &'a str, value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other => Err(Error::Config {
                field: if path.is_empty() { "the file".into() } else { path.into() },
                value: other.to_string(),
                reason: "an object is needed".into(),
            }),
        }
    }

    /// Full name of a field of this object.
    pub fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_string() } else { format!("{}.{field}", self.path) }
    }

    /// The field's value; absent and null are the same.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Whether the field is in the file, even as null.
    pub fn contains(&self, field: &str) -> bool {
        self.map.contains_key(field)
    }

    /// All fields and their values.
    pub fn iter(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    /// The names out of `required` that this object lacks, in full.
    pub fn missing(&self, required: &[&str]) -> Vec<String> {
        let absent = required.iter().filter(|field| self.get(field).is_none());
        absent.map(|field| self.name(field)).collect()
    }

    /// An error about a field that is there.
    pub fn refuse(&self, field: &str, reason: impl Into<String>) -> Error {
        Error::Config {
            field: self.name(field),
            value: self.map.get(field).map_or("absent".into(), Value::to_string),
            reason: reason.into(),
        }
    }

    fn require(&self, field: &str) -> Result<&'a Value> {
        let absent = || Error::MissingFields { fields: vec![self.name(field)] };
        self.get(field).ok_or_else(absent)
    }

    /// A required whole number of at least 1.
    pub fn size(&self, field: &str) -> Result<usize> {
        self.as_size(field, self.require(field)?)
    }

    /// A required number of layers or experts, at least 1.
    pub fn listed(&self, field: &str) -> Result<usize> {
        match self.size(field)? {
            count @ ..=MAX_LISTED => Ok(count),
            _ => Err(self.refuse(field, format!("a whole number from 1 to {MAX_LISTED} is needed"))),
        }
    }

    /// A whole number of at least 1, if the field is there.
    pub fn size_if_present(&self, field: &str) -> Result<Option<usize>> {
        self.get(field).map(|value| self.as_size(field, value)).transpose()
    }

    /// A whole number of at least 0; 0 if the field is absent.
    pub fn count_or_zero(&self, field: &str) -> Result<usize> {
        match self.get(field).map(Value::as_u64) {
            None => Ok(0),
            Some(Some(count @ 0..=MAX_SIZE)) => Ok(count as usize),
            Some(_) => Err(self.refuse(field, format!("a whole number from 0 to {MAX_SIZE} is needed"))),
        }
    }

    /// A required whole number of at least 0.
    pub fn count(&self, field: &str) -> Result<usize> {
        match self.require(field)?.as_u64() {
            Some(count @ 0..=MAX_SIZE) => Ok(count as usize),
            _ => Err(self.refuse(field, format!("a whole number from 0 to {MAX_SIZE} is needed"))),
        }
    }

    /// A required list of `N` whole numbers of at least 1.
    pub fn sizes<const N: usize>(&self, field: &str) -> Result<[usize; N]> {
        let one = |value: &Value| value.as_u64().filter(|size| (1..=MAX_SIZE).contains(size)).map(|size| size as usize);
        let list = self.require(field)?.as_array();
        let sizes = list.and_then(|list| list.iter().map(one).collect::<Option<Vec<_>>>());
        sizes
            .and_then(|sizes| sizes.try_into().ok())
            .ok_or_else(|| self.refuse(field, format!("a list of {N} whole numbers from 1 to {MAX_SIZE} is needed")))
    }

    fn as_size(&self, field: &str, value: &Value) -> Result<usize> {
        match value.as_u64() {
            Some(size @ 1..=MAX_SIZE) => Ok(size as usize),
            _ => Err(self.refuse(field, format!("a whole number from 1 to {MAX_SIZE} is needed"))),
        }
    }

    /// A token id, if the field is there.
    pub fn token(&self, field: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => Ok(Some(id)),
            None => Err(self.refuse(field, "a token id (a whole number of at least 0) is needed")),
        }
    }

    /// A token id; `default` if the field is absent, none if it is null.
    pub fn token_or(&self, field: &str, default: u32) -> Result<Option<u32>> {
        match self.map.contains_key(field) {
            true => self.token(field),
            false => Ok(Some(default)),
        }
    }

    /// One token id or a list of them; empty if the field is absent.
    pub fn tokens(&self, field: &str) -> Result<Vec<u32>> {
        let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = match self.get(field) {
            None => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(value) => one(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.refuse(field, "a token id or a list of token ids is needed"))
    }

    /// A required number above 0.
    pub fn positive(&self, field: &str) -> Result<f64> {
        self.as_positive(field, self.require(field)?)
    }

    /// A number above 0, if the field is there.
    pub fn positive_if_present(&self, field: &str) -> Result<Option<f64>> {
        self.get(field).map(|value| self.as_positive(field, value)).transpose()
    }

    /// A number that f32 can hold, if the field is there.
    pub fn number(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.abs() <= f64::from(f32::MAX) => Ok(Some(number)),
            _ => Err(self.refuse(field, "a number in the range of f32 is needed")),
        }
    }

    fn as_positive(&self, field: &str, value: &Value) -> Result<f64> {
        match value.as_f64() {
            Some(number) if number > 0.0 && number.is_finite() => Ok(number),
            _ => Err(self.refuse(field, "a number above 0 is needed")),
        }
    }

    /// A switch; `default` if absent.
    pub fn flag(&self, field: &str, default: bool) -> Result<bool> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(on)) => Ok(*on),
            Some(_) => Err(self.refuse(field, "true or false is needed")),
        }
    }

    /// A text, if the field is there.
    pub fn text(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.refuse(field, "a text is needed")),
        }
    }

    /// A required list of texts.
    pub fn texts(&self, field: &str) -> Result<Vec<&'a str>> {
        let list = self.require(field)?.as_array();
        let texts = list.and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        texts.ok_or_else(|| self.refuse(field, "a list of texts is needed"))
    }

    /// Refuses a feature of the architecture that this crate does not have: the field must be absent, null,
    /// false or 0.
    pub fn refuse_feature(&self, field: &str, feature: &str) -> Result<()> {
        let off = match self.get(field) {
            None => true,
            Some(Value::Bool(on)) => !on,
            Some(Value::Number(number)) => number.as_f64() == Some(0.0),
            Some(_) => false,
        };
        if off {
            return Ok(());
        }
        let reason = format!("{feature} not supported yet; allowed: null, false or 0");
        Err(self.refuse(field, reason))
    }

    /// Refuses every text but the one allowed; an absent field passes.
    pub fn only(&self, field: &str, allowed: &str) -> Result<()> {
        match self.text(field)? {
            None => Ok(()),
            Some(text) if text == allowed => Ok(()),
            Some(_) => Err(self.refuse(field, format!("not supported yet; allowed: \"{allowed}\""))),
        }
    }
}
