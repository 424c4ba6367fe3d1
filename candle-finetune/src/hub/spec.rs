//! Names on the Hub, with or without a revision: what `--model` and `--data` may say.

use std::fmt;

use super::error::{HubError, Result};

/// What `--data` begins with if it names a data set of the Hub.
const DATA_PREFIX: &str = "hub:";
/// Longest part of a name, as on the Hub.
const MAX_PART: usize = 96;
/// The revision if none is given.
const DEFAULT_REVISION: &str = "main";

/// The two kinds of repository that are pulled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Model,
    Data,
}

impl Kind {
    /// In addresses of the Hub's interface and in names of the cache.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Data => "datasets",
        }
    }

    /// Before the name in addresses of pages and files.
    pub(super) fn page_prefix(self) -> &'static str {
        match self {
            Self::Model => "",
            Self::Data => "datasets/",
        }
    }
}

/// A repository on the Hub and the revision of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RepoName {
    pub(super) kind: Kind,
    /// `org/name`.
    pub(super) repo: String,
    /// Branch, tag or commit.
    pub(super) revision: String,
}

impl RepoName {
    /// Reads a model's `org/name` or `org/name@revision`.
    pub(super) fn model(given: &str) -> Result<Self> {
        Self::parse(Kind::Model, given).map_err(|reason| HubError::Spec { given: given.to_string(), reason })
    }

    /// Reads `hub:org/name`, `hub:org/name@revision`, either with `:selector` behind it; `None` if it does not begin so.
    pub(super) fn data(given: &str) -> Option<Result<(Self, Option<&str>)>> {
        let rest = given.strip_prefix(DATA_PREFIX)?;
        let (name, selector) = match rest.split_once(':') {
            Some((name, selector)) => (name, Some(selector)),
            None => (rest, None),
        };
        let wrong = |reason: String| HubError::DataSpec { given: given.to_string(), reason };
        if selector.is_some_and(|selector| selector.is_empty() || selector.contains(':')) {
            return Some(Err(wrong("what follows the second ':' is no split, folder or file".to_string())));
        }
        Some(Self::parse(Kind::Data, name).map(|name| (name, selector)).map_err(wrong))
    }

    /// Both parts become parts of paths, so nothing but plain names passes.
    fn parse(kind: Kind, given: &str) -> std::result::Result<Self, String> {
        let (repo, revision) = given.split_once('@').unwrap_or((given, DEFAULT_REVISION));
        let parts: Vec<&str> = repo.split('/').collect();
        match parts[..] {
            [org, name] if is_part(org) && is_part(name) => {}
            [_, _] => return Err("a part is empty, too long, or has signs that no name has".to_string()),
            _ => return Err("a name has exactly one '/'".to_string()),
        }
        if !is_revision(revision) {
            return Err("what follows '@' is no branch, tag or commit".to_string());
        }
        Ok(Self { kind, repo: repo.to_string(), revision: revision.to_string() })
    }

    /// The revision as one segment of a URL.
    pub(super) fn revision_segment(&self) -> String {
        self.revision.replace('/', "%2F")
    }
}

impl fmt::Display for RepoName {
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
            let name = RepoName::model(given).unwrap();
            assert_eq!((name.repo.as_str(), name.revision.as_str()), (repo, revision));
        }
        assert_eq!(RepoName::model("org/name@refs/pr/3").unwrap().revision_segment(), "refs%2Fpr%2F3");
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
            let error = RepoName::model(given).unwrap_err();
            let text = error.to_string();
            assert!(
                error.is_usage() && text.contains("existing folder") && text.contains("org/name@revision"),
                "{text}"
            );
        }
    }

    #[test]
    fn data_sets_with_and_without_selector() {
        for (given, repo, revision, selector) in [
            ("hub:org/name", "org/name", "main", None),
            ("hub:org/name@v1", "org/name", "v1", None),
            ("hub:org/name:test", "org/name", "main", Some("test")),
            ("hub:org/name@refs/pr/3:data/a b.jsonl", "org/name", "refs/pr/3", Some("data/a b.jsonl")),
        ] {
            let (name, found) = RepoName::data(given).unwrap().unwrap();
            assert_eq!((name.kind, name.repo.as_str(), name.revision.as_str()), (Kind::Data, repo, revision));
            assert_eq!(found, selector);
        }
        assert!(RepoName::data("org/name").is_none());
        for given in ["hub:name", "hub:", "hub:../x", "hub:a/b@", "hub:a/b:", "hub:a/b:c:d"] {
            let error = RepoName::data(given).unwrap().unwrap_err();
            let text = error.to_string();
            assert!(error.is_usage() && text.contains("hub:ORG/NAME") && text.contains(given), "{text}");
        }
    }
}
