//! What is written beside the weights so that a run can go on.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{OPTIMIZER_FILE, STATE_FILE, SaveError};
use crate::error::{Result, io};
use crate::sample::Position;

/// Changes whenever an older program could misread what is written.
const FORMAT_VERSION: u64 = 1;

/// Where a run stands after a step, but for its weights and its optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Steps taken.
    pub step: usize,
    /// Where the next batch begins.
    pub position: Position,
    /// Seed of the run.
    pub seed: u64,
    /// What tells the training data from others, as the caller makes it.
    pub data: String,
    /// The resolved settings of the run, as the caller writes them.
    pub settings: String,
    /// Validation loss after this step, if it was measured; the checkpoint with the lowest one is the best. A value that
    /// is not finite is not kept.
    pub val_loss: Option<f64>,
    /// Lowest validation loss so far, also of steps that were not saved.
    pub best_val_loss: Option<f64>,
}

/// The text of the state file.
#[derive(Serialize, Deserialize)]
pub(super) struct Record {
    format_version: u64,
    /// Counts the saves of a folder: which one was written last does not depend on clocks or steps.
    pub serial: u64,
    #[serde(flatten)]
    pub state: State,
    /// Length in bytes of every other file, by its path in the folder.
    files: BTreeMap<String, u64>,
}

/// The part of the text that every version has.
#[derive(Deserialize)]
struct Version {
    format_version: u64,
}

impl Record {
    pub(super) fn new(serial: u64, state: &State, files: BTreeMap<String, u64>) -> Self {
        let finite = |loss: Option<f64>| loss.filter(|loss| loss.is_finite());
        let (val_loss, best_val_loss) = (finite(state.val_loss), finite(state.best_val_loss));
        let state = State { val_loss, best_val_loss, ..state.clone() };
        Self { format_version: FORMAT_VERSION, serial, state, files }
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain numbers and texts") + "\n"
    }
}

/// A complete checkpoint: its folder and what the state file says.
#[derive(Debug, Clone, PartialEq)]
pub struct Save {
    /// The folder; it is a model or an adapter in the layout of Hugging Face.
    pub folder: PathBuf,
    /// Where the run stood.
    pub state: State,
    pub(super) serial: u64,
}

impl Save {
    /// Opens a checkpoint that [`Saves`](super::Saves) wrote, and checks that each file is there with the length that it
    /// was written with.
    ///
    /// # Errors
    /// The folder has no state, is damaged, or was written by another version.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(STATE_FILE);
        let text = match fs::read(&path) {
            Err(cause) if cause.kind() == ErrorKind::NotFound && folder.is_dir() => {
                return Err(SaveError::NoState { folder: folder.to_path_buf() }.into());
            }
            text => text.map_err(io("read", &path))?,
        };
        let damaged = |faults| SaveError::Damaged { folder: folder.to_path_buf(), faults };
        let unreadable = |error: serde_json::Error| damaged(vec![format!("{STATE_FILE} cannot be read ({error})")]);
        let Version { format_version: found } = serde_json::from_slice(&text).map_err(unreadable)?;
        if found != FORMAT_VERSION {
            return Err(SaveError::Version { folder: folder.to_path_buf(), found, known: FORMAT_VERSION }.into());
        }
        let record: Record = serde_json::from_slice(&text).map_err(unreadable)?;
        let faults: Vec<String> = record.files.iter().filter_map(|(file, len)| fault(folder, file, *len)).collect();
        match faults.is_empty() {
            true => Ok(Self { folder: folder.to_path_buf(), state: record.state, serial: record.serial }),
            false => Err(damaged(faults).into()),
        }
    }

    /// The file for [`AdamW::load`](crate::AdamW::load).
    pub fn optimizer(&self) -> PathBuf {
        self.folder.join(OPTIMIZER_FILE)
    }
}

/// What is wrong with a file.
fn fault(folder: &Path, file: &str, len: u64) -> Option<String> {
    match fs::metadata(folder.join(file)) {
        Ok(found) if found.len() == len => None,
        Ok(found) => Some(format!("{file} has {} of {len} bytes", found.len())),
        Err(cause) if cause.kind() == ErrorKind::NotFound => Some(format!("{file} is absent")),
        Err(cause) => Some(format!("{file} cannot be read ({cause})")),
    }
}
