//! What can go wrong with checkpoint folders.

use std::path::PathBuf;

/// Faults that a message names; the rest is counted.
const SHOWN: usize = 5;

/// Why a checkpoint was not written or cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// Writing failed. Nothing of it is left, and what was complete before still is.
    #[error("checkpoint {} was not written, earlier ones are as they were: {cause}", folder.display())]
    NotWritten {
        /// The folder that should have been made.
        folder: PathBuf,
        /// The reason.
        cause: Box<crate::Error>,
    },

    /// Files of a checkpoint are absent or not as they were written.
    #[error("checkpoint {} is damaged: {}; copy it again, or delete it and resume from an earlier one", folder.display(),
        listed(faults))]
    Damaged {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with which file.
        faults: Vec<String>,
    },

    /// All checkpoints of a run are damaged.
    #[error("no checkpoint in {} can be used: {}", folder.display(),
        damaged.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NoneWhole {
        /// The folder of all checkpoints.
        folder: PathBuf,
        /// What is wrong with each.
        damaged: Vec<SaveError>,
    },

    /// A folder without training state, such as a model that was not trained here.
    #[error(
        "{} has no {}, so no run can be resumed from it; to start a new run from its weights, give it to --model",
        folder.display(), super::STATE_FILE
    )]
    NoState {
        /// The folder.
        folder: PathBuf,
    },

    /// Another version of this program wrote the checkpoint.
    #[error(
        "checkpoint {} has format version {found}, this program reads {known}; resume with the program that wrote it, or \
         start a new run from its weights with --model", folder.display()
    )]
    Version {
        /// The folder.
        folder: PathBuf,
        /// The version found.
        found: u64,
        /// The version that is read.
        known: u64,
    },

    /// Another run writes into the same folder.
    #[error("another run is writing to {}; wait until it ends, or choose another --out", folder.display())]
    InUse {
        /// The folder.
        folder: PathBuf,
    },

    /// Something that is no checkpoint has the name of the folder that should be written.
    #[error(
        "{} is there and is no checkpoint folder, so it is not replaced; move it away, or choose another --out",
        path.display()
    )]
    InTheWay {
        /// The file or folder.
        path: PathBuf,
    },
}

impl SaveError {
    /// True if the user has to choose other folders or settings.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::NotWritten { cause, .. } => matches!(**cause, crate::Error::Saves(_)),
            _ => true,
        }
    }
}

fn listed(faults: &[String]) -> String {
    let shown = faults.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match faults.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
