//! Environment variables, and what is wrong with them.

use crate::error::{Error, Result};

/// Where variables come from.
pub(super) struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Variables<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { lookup }
    }

    /// An empty variable is what scripts leave that expand a variable they do not have.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty())
    }

    pub(super) fn any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.get(name).is_some())
    }

    /// A whole number, if the variable is set.
    pub(super) fn number(&self, name: &'static str) -> Result<Option<usize>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => {
                let fix = "set it to a number, for every process, or unset it";
                Err(Error::argument(name, format!("{text:?}"), "a whole number is expected", fix))
            }
        }
    }

    /// `NAME=value` of those that are set.
    pub(super) fn found(&self, names: &[&str]) -> String {
        let found: Vec<String> = names.iter().filter_map(|name| Some(format!("{name}={}", self.get(name)?))).collect();
        found.join(" ")
    }

    /// Whether all of `needed` are set.
    ///
    /// # Errors
    /// Some are not: what of `all` was found, which ones are missing, and what to do.
    pub(super) fn need(&self, needed: &[&'static str], all: &[&'static str]) -> Result<()> {
        let missing: Vec<&str> = needed.iter().filter(|name| self.get(name).is_none()).copied().collect();
        if missing.is_empty() {
            return Ok(());
        }
        let set: Vec<&str> = all.iter().filter(|name| self.get(name).is_some()).copied().collect();
        let verb = if missing.len() > 1 { "are" } else { "is" };
        let allowed = format!("{} {verb} missing or empty", missing.join(", "));
        let fix = format!(
            "set all of {} for every process, or none: if they are left over, unset {}",
            needed.join(", "),
            set.join(" ")
        );
        Err(Error::argument("the launch environment", self.found(all), allowed, fix))
    }
}
