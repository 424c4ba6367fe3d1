//! One setting: its names, its text, and what is allowed.

use super::Config;
use crate::error::{Error, Result};
use crate::names;

/// One setting of a run, by key of the settings file and by flag.
#[derive(Clone, Copy)]
pub struct Setting {
    /// Section and key in the settings file, such as `train.steps`; also a flag, `--train.steps`.
    pub key: &'static str,
    /// A shorter flag, with its dashes.
    pub flag: Option<&'static str>,
    /// What the value is, for a help text; empty for a switch, which may stand without a value.
    pub value: &'static str,
    /// What it does and what it is without being given.
    pub help: &'static str,
    /// A value that can be used.
    pub(super) example: &'static str,
    /// Takes a text, or tells what is allowed.
    pub(super) set: fn(&mut Config, &str) -> std::result::Result<(), String>,
    /// The value of the moment; `None` if there is none.
    pub(super) get: fn(&Config) -> Option<toml::Value>,
}

impl std::fmt::Debug for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.key)
    }
}

impl Setting {
    /// By key, or by flag with its dashes.
    pub(super) fn find(name: &str) -> Result<&'static Self> {
        let key = name.strip_prefix("--").unwrap_or(name);
        let found = Config::SETTINGS.iter().find(|setting| setting.key == key || setting.flag == Some(name));
        found.ok_or_else(|| {
            let nearest = Self::nearest(key).map(Self::name);
            Error::UnknownFlag { flag: name.to_string(), nearest }
        })
    }

    /// The setting that was most likely meant by a key: one of that name in another section, or a name that is near.
    pub(super) fn nearest(key: &str) -> Option<&'static Self> {
        let last = key.rsplit('.').next().unwrap_or(key);
        let elsewhere =
            Config::SETTINGS.iter().find(|setting| setting.last() == last || setting.flag_name() == Some(last));
        let by_key = || {
            let keys: Vec<&str> = Config::SETTINGS.iter().map(|setting| setting.key).collect();
            names::nearest(key, &keys).and_then(|near| Config::SETTINGS.iter().find(|setting| setting.key == near))
        };
        let by_last = || {
            let lasts: Vec<&str> =
                Config::SETTINGS.iter().flat_map(|s| [Some(s.last()), s.flag_name()]).flatten().collect();
            let near = names::nearest(last, &lasts)?;
            Config::SETTINGS.iter().find(|setting| setting.last() == near || setting.flag_name() == Some(near))
        };
        elsewhere.or_else(by_key).or_else(by_last)
    }

    /// Without its section.
    fn last(&self) -> &'static str {
        self.key.rsplit('.').next().unwrap_or(self.key)
    }

    fn flag_name(&self) -> Option<&'static str> {
        self.flag.and_then(|flag| flag.strip_prefix("--"))
    }

    /// The section of the settings file, and the key in it.
    pub(super) fn section(&self) -> (&'static str, &'static str) {
        self.key.split_once('.').expect("every key has a section")
    }

    /// The name on the command line.
    pub fn name(&self) -> String {
        self.flag.map_or_else(|| format!("--{}", self.key), str::to_string)
    }

    /// Sets a value given on the command line.
    pub(super) fn set_flag(&self, config: &mut Config, text: &str) -> Result<()> {
        (self.set)(config, text).map_err(|allowed| {
            let name = self.name();
            let fix = format!("write for example {name} {}", self.example);
            Error::flag(name, text, allowed, fix)
        })
    }

    /// Sets a value of the settings file; the error is a message.
    pub(super) fn set_value(&self, config: &mut Config, value: &toml::Value) -> std::result::Result<(), String> {
        let Some(text) = text(value).filter(|_| self.takes(value)) else {
            return Err(format!("{} = {value}: {} is no value of it; {}", self.key, kind(value), self.in_file()));
        };
        let told = |allowed| format!("{} = {value}: allowed is {allowed}; {}", self.key, self.in_file());
        (self.set)(config, &text).map_err(told)
    }

    /// Whether a value is of a kind that can be meant: names are texts or lists of them, and nothing else is.
    fn takes(&self, value: &toml::Value) -> bool {
        let is_name = |value: &toml::Value| value.is_str() || value.is_array();
        !(self.get)(&self.sample()).is_some_and(|sample| is_name(&sample)) || is_name(value)
    }

    /// The line of a settings file, without its section.
    pub(super) fn line(&self, config: &Config) -> Option<String> {
        let value = match (self.get)(config)? {
            // Short, such as 1e-8.
            toml::Value::Float(number) => format!("{number:?}"),
            value => value.to_string(),
        };
        Some(format!("{} = {value}", self.section().1))
    }

    /// Settings with the example in place.
    fn sample(&self) -> Config {
        let mut sample = Config::default();
        (self.set)(&mut sample, self.example).expect("an example can be used");
        sample
    }

    fn in_file(&self) -> String {
        let (section, key) = self.section();
        let line = self.line(&self.sample()).unwrap_or_else(|| format!("{key} = {}", self.example));
        format!("write for example {line} in [{section}]")
    }
}

/// A value as the text that a command line has for it.
pub(super) fn text(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(yes) => Some(yes.to_string()),
        toml::Value::Array(values) => {
            let texts = values.iter().map(|value| value.as_str().map(str::to_string));
            Some(texts.collect::<Option<Vec<_>>>()?.join(","))
        }
        toml::Value::Datetime(_) | toml::Value::Table(_) => None,
    }
}

/// The kind of a value, for messages.
fn kind(value: &toml::Value) -> &'static str {
    match value {
        toml::Value::String(_) => "a text",
        toml::Value::Integer(_) | toml::Value::Float(_) => "a number",
        toml::Value::Boolean(_) => "true or false",
        toml::Value::Datetime(_) => "a date",
        toml::Value::Array(_) => "a list",
        toml::Value::Table(_) => "a section",
    }
}
