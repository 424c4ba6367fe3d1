//! What `--model` may say: a name on the Hub, with or without a revision.

use std::fmt;

use super::error::{HubError, Result};

/// Longest part of a name, as on the Hub.
const MAX_PART: usize = 96;
/// The revision if none is given.
const DEFAULT_REVISION: &str = "main";

/// A model on the Hub and the revision of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModelName {
    /// `org/name`.
    pub(super) repo: String,
    /// Branch, tag or commit.
    pub(super) revision: String,
}

impl ModelName {
    /// Reads `org/name` or `org/name@revision`. Both become parts of paths, so nothing else passes.
    pub(super) fn parse(given: &str) -> Result<Self> {
        let wrong = |reason: &str| HubError::Spec { given: given.to_string(), reason: reason.to_string() };
        let (repo, revision) = given.split_once('@').unwrap_or((given, DEFAULT_REVISION));
        let parts: Vec<&str> = repo.split('/').collect();
        match parts[..] {
            [org, name] if is_part(org) && is_part(name) => {}
            [_, _] => return Err(wrong("a part is empty, too long, or has signs that no name has")),
            _ => return Err(wrong("a name has exactly one '/'")),
        }
        if !is_revision(revision) {
            return Err(wrong("what follows '@' is no branch, tag or commit"));
        }
        Ok(Self { repo: repo.to_string(), revision: revision.to_string() })
    }

    /// The revision as one segment of a URL.
    pub(super) fn revision_segment(&self) -> String {
        self.revision.replace('/', "%2F")
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}@{}", self.repo, self.revision)
    }
}

fn is_part(part: &str) -> bool {
    let ends_badly = |end: &[char]| part.starts_with(end) || part.ends_with(end);
    !part.is_empty()
        && part.len() <= MAX_PART
        && part.chars().all(is_plain)
        && !ends_badly(&['.', '-'])
        && !part.contains("..")
        && !part.contains("--")
}

fn is_revision(revision: &str) -> bool {
    let segment = |segment: &str| !segment.is_empty() && segment.chars().all(is_plain) && !segment.starts_with('.');
    revision.len() <= 255 && revision.split('/').all(segment)
}

/// Signs of names, revisions and hashes.
pub(super) fn is_plain(sign: char) -> bool {
    sign.is_ascii_alphanumeric() || matches!(sign, '.' | '_' | '-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_and_without_revision() {
        for (given, repo, revision) in [
            ("google/gemma-4-E2B-it", "google/gemma-4-E2B-it", "main"),
            ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
            ("a/b_c.d@v1.0", "a/b_c.d", "v1.0"),
        ] {
            let name = ModelName::parse(given).unwrap();
            assert_eq!((name.repo.as_str(), name.revision.as_str()), (repo, revision));
        }
        assert_eq!(ModelName::parse("org/name@refs/pr/3").unwrap().revision_segment(), "refs%2Fpr%2F3");
    }

    #[test]
    fn anything_else_is_refused_with_both_kinds_named() {
        let long = format!("a/{}", "b".repeat(97));
        for given in [
            "gemma",
            "",
            "a/",
            "/b",
            "a/b/c",
            "./b",
            "../b",
            "a/..",
            "a/b@",
            "a/b@../x",
            "a/b@/x",
            "a/b@x//y",
            "a/b c",
            "~/m",
            "a/-b",
            "a/b--c",
            "a/b@x@y",
            "a\\b/c",
            "a/b@.git",
            "https://huggingface.co/a/b",
            &long,
        ] {
            let error = ModelName::parse(given).unwrap_err();
            let text = error.to_string();
            assert!(
                error.is_usage() && text.contains("existing folder") && text.contains("org/name@revision"),
                "{text}"
            );
        }
    }
}
