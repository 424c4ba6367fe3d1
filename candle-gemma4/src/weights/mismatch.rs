//! The differences between the tensors a configuration asks for and those a checkpoint has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::names::TensorSpec;

/// How many of each kind a message shows.
const SHOWN: usize = 5;

/// A tensor whose shape on disk is not the one the configuration gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongShape {
    /// Name of the tensor.
    pub name: String,
    /// Shape in the checkpoint.
    pub found: Vec<usize>,
    /// Shape by the configuration.
    pub expected: Vec<usize>,
}

/// All differences, each list in name order. The text shows the count and the first five of each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mismatch {
    /// Tensors that the configuration asks for and the checkpoint lacks.
    pub missing: Vec<String>,
    /// Tensors in the checkpoint that the configuration has no place for.
    pub unexpected: Vec<String>,
    /// Tensors with another shape.
    pub misshaped: Vec<WrongShape>,
}

impl Mismatch {
    pub(super) fn between(specs: &[TensorSpec], found: &BTreeMap<String, Vec<usize>>) -> Self {
        let specs: BTreeMap<&str, &[usize]> =
            specs.iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice())).collect();
        let mut mismatch = Self::default();
        for (&name, &expected) in &specs {
            match found.get(name) {
                None => mismatch.missing.push(name.to_string()),
                Some(shape) if shape != expected => mismatch.misshaped.push(WrongShape {
                    name: name.to_string(),
                    found: shape.clone(),
                    expected: expected.to_vec(),
                }),
                Some(_) => {}
            }
        }
        let known: BTreeSet<&str> = specs.keys().copied().collect();
        let unexpected = found.keys().filter(|name| !known.contains(name.as_str()));
        mismatch.unexpected = unexpected.cloned().collect();
        mismatch
    }

    /// Whether there is no difference.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.misshaped.is_empty()
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the tensors do not fit config.json")?;
        list(f, "missing", self.missing.iter().cloned())?;
        list(f, "unexpected", self.unexpected.iter().cloned())?;
        let shapes = self.misshaped.iter();
        let shapes =
            shapes.map(|wrong| format!("{} ({:?}, config.json gives {:?})", wrong.name, wrong.found, wrong.expected));
        list(f, "with a wrong shape", shapes)
    }
}

fn list(f: &mut fmt::Formatter<'_>, kind: &str, names: impl ExactSizeIterator<Item = String>) -> fmt::Result {
    let count = names.len();
    if count == 0 {
        return Ok(());
    }
    let shown: Vec<String> = names.take(SHOWN).collect();
    let more = if count > SHOWN { ", ..." } else { "" };
    write!(f, "; {count} {kind}: {}{more}", shown.join(", "))
}
