//! Which tensors are loaded frozen.

use std::collections::BTreeSet;

use glob::Pattern;
use strsim::osa_distance;

use super::options::Notice;
use super::part::Part;
use crate::error::{Error, Result};
use crate::spec::TensorSpec;

/// Parts of a model, and patterns of tensor names.
#[derive(Debug, Clone, Default)]
pub(super) struct Freeze {
    pub(super) parts: BTreeSet<Part>,
    pub(super) patterns: Vec<Pattern>,
}

impl Freeze {
    /// A pattern from its text.
    pub(super) fn pattern(text: &str) -> Result<Pattern> {
        let wrong = |error: glob::PatternError| Error::FreezePattern {
            pattern: text.to_string(),
            reason: format!("{} at character {}; allowed are *, ? and [abc] among letters", error.msg, error.pos + 1),
        };
        Pattern::new(text).map_err(wrong)
    }

    /// Whether a tensor that could be trained is frozen.
    pub(super) fn covers(&self, name: &str) -> bool {
        self.parts.contains(&Part::of(name)) || self.patterns.iter().any(|pattern| pattern.matches(name))
    }

    /// What there is to say about a model. A part that it does not have is no mistake, a pattern that means nothing is.
    pub(super) fn check(&self, specs: &[TensorSpec]) -> Result<Vec<Notice>> {
        let names = || specs.iter().filter(|spec| spec.is_trained()).map(|spec| spec.name.as_str());
        if let Some(pattern) = self.patterns.iter().find(|pattern| !names().any(|name| pattern.matches(name))) {
            let nearest = names().min_by_key(|name| osa_distance(name, pattern.as_str())).unwrap_or("absent");
            return Err(Error::FreezePattern {
                pattern: pattern.to_string(),
                reason: format!(
                    "no trained tensor of this model has such a name; a pattern is for whole names, the nearest is {nearest}"
                ),
            });
        }
        let lacking = self.parts.iter().filter(|&&part| !specs.iter().any(|spec| Part::of(&spec.name) == part));
        Ok(lacking.map(|&part| Notice::NothingToFreeze { part }).collect())
    }
}
