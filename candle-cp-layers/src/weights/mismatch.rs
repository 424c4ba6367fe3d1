//! The differences between the tensors a configuration asks for and those a checkpoint has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::pieces::Piece;

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

/// Names that would fit if they began otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherPrefix {
    /// How the names in the checkpoint begin.
    pub found: String,
    /// What the configuration's names have in its place.
    pub expected: String,
    /// Number of missing tensors that would be found.
    pub count: usize,
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
    /// Which unexpected tensor is named most like a missing one, for the first five missing tensors, where one is
    /// similar.
    pub nearest: BTreeMap<String, String>,
    /// Set if most of the missing tensors are there with another beginning of their names.
    pub other_prefix: Option<OtherPrefix>,
}

impl Mismatch {
    /// Compares what is wanted with what was found; names in `unread` may be there or not, in any shape.
    pub(super) fn between(wanted: &[Piece], unread: &BTreeSet<&str>, found: &BTreeMap<String, Vec<usize>>) -> Self {
        let wanted: BTreeMap<&str, &[usize]> =
            wanted.iter().map(|piece| (piece.name.as_str(), piece.shape.as_slice())).collect();
        let mut mismatch = Self::default();
        for (&name, &expected) in &wanted {
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
        let unknown = |name: &&String| !wanted.contains_key(name.as_str()) && !unread.contains(name.as_str());
        mismatch.unexpected = found.keys().filter(unknown).cloned().collect();
        mismatch.explain();
        mismatch
    }

    /// Whether there is no difference.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.misshaped.is_empty()
    }

    /// Looks for the missing tensors among the unexpected ones.
    fn explain(&mut self) {
        self.other_prefix = other_prefix(&self.missing, &self.unexpected);
        if self.other_prefix.is_none() {
            let pairs = self.missing.iter().take(SHOWN);
            let pairs = pairs.filter_map(|name| Some((name.clone(), nearest(name, &self.unexpected)?.clone())));
            self.nearest = pairs.collect();
        }
    }
}

/// The other beginning that explains most of the missing names, if it explains at least half of them.
fn other_prefix(missing: &[String], unexpected: &[String]) -> Option<OtherPrefix> {
    let present: BTreeSet<&str> = unexpected.iter().map(String::as_str).collect();
    let explained = |found: &str, expected: &str| {
        let renamed = |name: &&String| {
            let rest = name.strip_prefix(expected);
            rest.is_some_and(|rest| present.contains(format!("{found}{rest}").as_str()))
        };
        missing.iter().filter(renamed).count()
    };
    // Parts of a model may begin differently, so names from all over the list are tried.
    let step = missing.len().div_ceil(SHOWN).max(1);
    let candidates = missing.iter().step_by(step).filter_map(|name| {
        let twin = unexpected.iter().max_by_key(|other| common_end(name, other).len())?;
        let end = common_end(name, twin);
        let (found, expected) = (twin.strip_suffix(end)?, name.strip_suffix(end)?);
        let count = explained(found, expected);
        Some(OtherPrefix { found: found.to_string(), expected: expected.to_string(), count })
    });
    candidates.max_by_key(|prefix| prefix.count).filter(|prefix| prefix.count > 1 && 2 * prefix.count >= missing.len())
}

/// The segments that two names end with in common.
fn common_end<'a>(a: &'a str, b: &str) -> &'a str {
    let mut end = "";
    for (start, _) in a.rmatch_indices('.').map(|(dot, _)| (dot + 1, ())).chain([(0, ())]) {
        let starts_segment = |rest: &str| rest.is_empty() || rest.ends_with('.');
        match b.strip_suffix(&a[start..]) {
            Some(rest) if starts_segment(rest) => end = &a[start..],
            Some(_) => {}
            None => break,
        }
    }
    end
}

/// The name that takes the fewest edits, if they touch at most a third of it.
fn nearest<'a>(name: &str, others: &'a [String]) -> Option<&'a String> {
    let (distance, other) = others.iter().map(|other| (strsim::levenshtein(name, other), other)).min()?;
    (3 * distance <= name.len().max(other.len())).then_some(other)
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the tensors do not fit config.json")?;
        if let Some(OtherPrefix { found, expected, count }) = &self.other_prefix {
            write!(f, ": names begin with \"{found}\" where \"{expected}\" is expected ({count} would fit)")?;
        }
        let missing = self.missing.iter().map(|name| match self.nearest.get(name) {
            Some(nearest) => format!("{name} (nearest name in the checkpoint: {nearest})"),
            None => name.clone(),
        });
        list(f, "missing", missing)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_ends_are_whole_segments() {
        assert_eq!(common_end("model.norm.weight", "x.model.norm.weight"), "model.norm.weight");
        assert_eq!(common_end("a.q_norm.weight", "a.b.norm.weight"), "weight");
        assert_eq!(common_end("norm.weight", "q_norm.weight"), "weight");
        assert_eq!(common_end("a.bias", "a.weight"), "");
    }
}
