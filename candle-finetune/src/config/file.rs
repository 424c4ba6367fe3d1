//! Settings as TOML: one section per part of a run, one line per setting.

use std::path::Path;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::Config;
use super::setting::Setting;
use crate::error::{Error, LineFault, Result, io};

impl Config {
    /// Sets what a settings file says; everything else stays as it is.
    ///
    /// # Errors
    /// The file cannot be read, or as [`Config::set_toml`].
    pub fn set_file(&mut self, path: &Path) -> Result<()> {
        if !path.exists() || path.is_dir() {
            let fix = "check the path; without --config all settings have their defaults";
            return Err(Error::flag("--config", path.display(), "an existing file of settings in TOML", fix));
        }
        let bytes = std::fs::read(path).map_err(io("read", path))?;
        let text = std::str::from_utf8(&bytes).map_err(|error| {
            let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
            let reason = "this is not UTF-8; save the file as UTF-8".to_string();
            Error::Settings { path: path.to_path_buf(), faults: vec![fault(line, reason)] }
        })?;
        self.set_toml(text.strip_prefix('\u{feff}').unwrap_or(text), path)
    }

    /// The same from a text; `path` is for messages.
    ///
    /// # Errors
    /// The text is no TOML, or has keys that are no settings or values that cannot be used: all of them are listed with
    /// their lines, and nothing is set.
    pub fn set_toml(&mut self, text: &str, path: &Path) -> Result<()> {
        let line = |start: usize| 1 + text[..start.min(text.len())].bytes().filter(|&byte| byte == b'\n').count();
        let fail = |faults: Vec<LineFault>| Err(Error::Settings { path: path.to_path_buf(), faults });
        let table = match DeTable::parse(text) {
            Ok(table) => table.into_inner(),
            Err(error) => {
                let line = line(error.span().map_or(0, |span| span.start));
                return fail(vec![fault(line, error.message().to_string())]);
            }
        };
        let mut changed = self.clone();
        let mut faults = Vec::new();
        for (section, value) in &table {
            let keys = match value.get_ref() {
                DeValue::Table(keys)
                    if Self::SETTINGS.iter().any(|setting| setting.section().0 == section.get_ref().as_ref()) =>
                {
                    keys
                }
                DeValue::Table(_) => {
                    let reason =
                        format!("[{}] is no section; the sections are {}", section.get_ref(), sections().join(", "));
                    faults.push(fault(line(section.span().start), reason));
                    continue;
                }
                _ => {
                    faults.push(fault(line(section.span().start), unknown(section.get_ref())));
                    continue;
                }
            };
            for (key, value) in keys {
                let name = format!("{}.{}", section.get_ref(), key.get_ref());
                let set = match Self::SETTINGS.iter().find(|setting| setting.key == name) {
                    Some(setting) => plain(value).and_then(|value| setting.set_value(&mut changed, &value)),
                    None => Err(unknown(&name)),
                };
                if let Err(reason) = set {
                    faults.push(fault(line(key.span().start), reason));
                }
            }
        }
        if !faults.is_empty() {
            faults.sort_by_key(|fault| fault.line);
            return fail(faults);
        }
        *self = changed;
        Ok(())
    }

    /// All settings that have a value, one line per section, for a person to read.
    pub fn to_lines(&self) -> Vec<String> {
        self.lines().map(|(section, lines)| format!("[{section}] {}", lines.join(", "))).collect()
    }

    /// The same as a settings file that gives the same run.
    pub fn to_toml(&self) -> String {
        let section = |(section, lines): (&str, Vec<String>)| format!("[{section}]\n{}\n", lines.join("\n"));
        self.lines().map(section).collect::<Vec<_>>().join("\n")
    }

    /// The lines of every section that has any.
    fn lines(&self) -> impl Iterator<Item = (&'static str, Vec<String>)> {
        let lines = |section: &str| {
            let keys = Self::SETTINGS.iter().filter(|setting| setting.section().0 == section);
            keys.filter_map(|setting| setting.line(self)).collect::<Vec<_>>()
        };
        sections().into_iter().map(move |section| (section, lines(section))).filter(|(_, lines)| !lines.is_empty())
    }
}

/// The sections, in the order of their settings.
pub(super) fn sections() -> Vec<&'static str> {
    let mut sections: Vec<&str> = Config::SETTINGS.iter().map(|setting| setting.section().0).collect();
    sections.dedup();
    sections
}

fn fault(line: usize, reason: String) -> LineFault {
    LineFault { line, place: format!("line {line}"), reason }
}

/// What is said of a key that is no setting.
fn unknown(key: &str) -> String {
    match Setting::nearest(key) {
        Some(setting) => {
            let (section, name) = setting.section();
            format!("{key} is no setting; the nearest is {name} in [{section}]")
        }
        None => format!("{key} is no setting; --help lists all of them"),
    }
}

/// A value without its place in the text.
fn plain(value: &Spanned<DeValue>) -> std::result::Result<toml::Value, String> {
    toml::Value::deserialize(ValueDeserializer::from(value.clone())).map_err(|error| error.message().to_string())
}
