//! What can go wrong between a name on the Hub and files, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Result of this module.
pub(super) type Result<T> = std::result::Result<T, HubError>;

/// Errors of the Hub say what was asked of whom, what came back, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// Neither a folder nor a name of the Hub.
    #[error(
        "{given:?} is neither an existing folder nor a model's name on the Hub, which is org/name or org/name@revision \
         (letters, digits, '.', '_' and '-'): {reason}; check the path, or write for example google/gemma-4-E2B-it"
    )]
    Spec {
        /// What was given.
        given: String,
        /// Why it is not a name.
        reason: String,
    },

    /// Neither files nor a name of the Hub.
    #[error(
        "{given:?} cannot be used: {reason}; data is a .jsonl or .parquet file, a folder of them, or a data set of the Hub as \
         hub:ORG/NAME, hub:ORG/NAME@REVISION, either with :SPLIT, :FOLDER or :FILE behind it (hub:ORG/NAME:test)"
    )]
    DataSpec {
        /// What was given.
        given: String,
        /// Why it cannot be used.
        reason: String,
    },

    /// A data set or folder without the files that were asked for.
    #[error("{source_name} {reason}")]
    DataFiles {
        /// `org/name@revision`, or the folder.
        source_name: String,
        /// What is missing, what there is, and what to do.
        reason: String,
    },

    /// The settings name an address that cannot be used.
    #[error("{what} {given:?} cannot be used: {reason}; an address is for example https://huggingface.co")]
    Address {
        /// Which setting.
        what: &'static str,
        /// What was given.
        given: String,
        /// Why not.
        reason: String,
    },

    /// There is no place for downloads.
    #[error("no folder for downloads is known: set HF_HOME or HF_HUB_CACHE to one (HOME is not set either)")]
    NoCache,

    /// The licence has to be accepted first.
    #[error(
        "{repo} is gated: log in, accept its licence at {page}, then {}",
        if *token_sent {
            "try again; the token in use has no access yet (a fine-grained token also needs the permission to read \
             gated repositories)"
        } else {
            "set HF_TOKEN to a token of that account or run `hf auth login`; no token is set"
        }
    )]
    Gated {
        /// The repository.
        repo: String,
        /// Its page.
        page: String,
        /// Whether a token was sent.
        token_sent: bool,
    },

    /// The Hub does not take the token.
    #[error(
        "the Hub refused the token ({status}): it is wrong, expired or may not read {repo}; make one at {page} and set HF_TOKEN"
    )]
    Token {
        /// The repository.
        repo: String,
        /// Status of the answer.
        status: u16,
        /// Page where tokens are made.
        page: String,
    },

    /// No such model or data set, or a private one.
    #[error(
        "there is no {} at {endpoint} that {} may see; check the spelling at {page}, \
         and if it is private set HF_TOKEN to a token of an account that may read it",
        if *is_data { format!("data set {repo}") } else { format!("folder {repo}, and no model of this name") },
        if *token_sent { "the account of the token in use" } else { "someone without a token" }
    )]
    RepoNotFound {
        /// The model or data set.
        repo: String,
        /// Whether it was a data set.
        is_data: bool,
        /// The Hub that was asked.
        endpoint: String,
        /// Its page.
        page: String,
        /// Whether a token was sent.
        token_sent: bool,
    },

    /// No such branch, tag or commit.
    #[error("{repo} has no revision {revision:?}; {}; leave @{revision} out to take main", known(names))]
    RevisionNotFound {
        /// The repository.
        repo: String,
        /// The revision.
        revision: String,
        /// Branches and tags that exist, as far as the Hub told.
        names: Vec<String>,
    },

    /// A file that was listed is not there.
    #[error(
        "{repo} at {revision} has no file {file}, though its own list names it; try again, or take another revision"
    )]
    FileNotFound {
        /// The repository.
        repo: String,
        /// Revision or commit.
        revision: String,
        /// The file.
        file: String,
    },

    /// The repository is no model that can be used here.
    #[error("{repo} at {revision} has no {}; it has {}. {fix}", missing.join(", no "), shown(has))]
    Incomplete {
        /// The repository.
        repo: String,
        /// Revision or commit.
        revision: String,
        /// Files that are needed.
        missing: Vec<String>,
        /// Files that are there.
        has: Vec<String>,
        /// What to do.
        fix: &'static str,
    },

    /// Nothing may be asked of the Hub, and the cache does not have it all.
    #[error(
        "offline, and {} does not hold {repo} at {revision}: {reason}; unset HF_HUB_OFFLINE to pull it, or pull it on \
         another machine and copy the folder",
        cache.display()
    )]
    Offline {
        /// The repository.
        repo: String,
        /// The revision.
        revision: String,
        /// The cache.
        cache: PathBuf,
        /// What is missing.
        reason: String,
    },

    /// No connection.
    #[error(
        "{url} cannot be reached: {cause}; check the network, proxy (HTTPS_PROXY) and HF_ENDPOINT; what was \
         pulled before also works with HF_HUB_OFFLINE=1"
    )]
    Network {
        /// What was asked for.
        url: String,
        /// The reason the system gave.
        cause: String,
    },

    /// The Hub or its storage answers with an error that is not about this repository.
    #[error("{url} answered {status}{}; {}", said(body), advice(*status))]
    Status {
        /// What was asked for.
        url: String,
        /// Status of the answer.
        status: u16,
        /// First line of the answer.
        body: String,
    },

    /// An answer that is not the Hub's.
    #[error("{url} does not answer as the Hub does: {reason}; check HF_ENDPOINT and the proxy")]
    Answer {
        /// What was asked for.
        url: String,
        /// What is wrong.
        reason: String,
    },

    /// A file came shorter or longer than announced.
    #[error("{file}: {found} bytes came of {expected}, in {attempts} attempts; run again to go on from there")]
    Length {
        /// The file.
        file: String,
        /// Bytes announced.
        expected: u64,
        /// Bytes received.
        found: u64,
        /// Requests made.
        attempts: usize,
    },

    /// A file of the right length with the wrong content.
    #[error(
        "{file} has the right length but not the content that the Hub announced ({kind} {expected}, found {found}); it was \
         deleted. Run again; if it happens again, a proxy or mirror damages it"
    )]
    Content {
        /// The file.
        file: String,
        /// Kind of hash.
        kind: &'static str,
        /// Hash announced.
        expected: String,
        /// Hash of what came.
        found: String,
    },

    /// No room.
    #[error(
        "no space is left for {} ({missing_bytes} bytes to go); free some, or set HF_HOME to a folder on another disk; what \
         was received is kept",
        path.display()
    )]
    DiskFull {
        /// The file.
        path: PathBuf,
        /// Bytes that were still to come; 0 if unknown.
        missing_bytes: u64,
    },

    /// A file of the cache could not be read or written.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The reason the system gave.
        cause: io::Error,
    },
}

impl HubError {
    /// True if the user's input has to change: name, revision, token, settings.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Spec { .. }
            | Self::DataSpec { .. }
            | Self::DataFiles { .. }
            | Self::Address { .. }
            | Self::NoCache
            | Self::Gated { .. }
            | Self::Token { .. }
            | Self::RepoNotFound { .. }
            | Self::RevisionNotFound { .. }
            | Self::Incomplete { .. }
            | Self::Offline { .. } => true,
            Self::FileNotFound { .. }
            | Self::Network { .. }
            | Self::Status { .. }
            | Self::Answer { .. }
            | Self::Length { .. }
            | Self::Content { .. }
            | Self::DiskFull { .. }
            | Self::Io { .. } => false,
        }
    }

    /// True if the Hub is out of reach or unwell, so that a complete copy in the cache may stand in.
    pub(super) fn is_outage(&self) -> bool {
        match self {
            Self::Network { .. } => true,
            Self::Status { status, .. } => *status == 429 || *status >= 500,
            _ => false,
        }
    }
}

/// Turns a system error into [`HubError::Io`], a full disk into [`HubError::DiskFull`].
pub(super) fn io_at(action: &'static str, path: &Path, missing_bytes: u64) -> impl FnOnce(io::Error) -> HubError {
    let path = path.to_path_buf();
    move |cause| match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => HubError::DiskFull { path, missing_bytes },
        _ => HubError::Io { action, path, cause },
    }
}

/// Names that a message shows; the rest is counted.
const SHOWN: usize = 8;

fn shown(names: &[String]) -> String {
    let mut text = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => text += "no file at all",
        count if count > SHOWN => text += &format!(" and {} more", count - SHOWN),
        _ => {}
    }
    text
}

fn known(names: &[String]) -> String {
    match names.is_empty() {
        true => "give a branch, a tag or a whole commit hash that it has".to_string(),
        false => format!("there are {}, and every whole commit hash", shown(names)),
    }
}

fn advice(status: u16) -> &'static str {
    match status {
        401 | 403 => "access is forbidden: set HF_TOKEN to a token that may read it, or ask who runs the proxy",
        429 => "too many requests: wait some minutes, or set HF_TOKEN for a higher limit",
        _ => "try again later; what was received so far is kept",
    }
}

fn said(body: &str) -> String {
    if body.is_empty() { String::new() } else { format!(" ({body})") }
}
