//! Checkpoints of a run in one folder, each complete or not there: `step-00000050` and so on.
//!
//! A checkpoint is what the caller writes (a model or an adapter in the layout of Hugging Face, and the optimizer) and
//! [`STATE_FILE`], which is written last and lists the length of every other file. It is written beside its place,
//! brought to the disk, and moved there. Names with a dot in front are no checkpoints: what a killed process left behind
//! is ignored by readers and put right by the next [`Saves::open`].

mod error;
mod folder;
mod record;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

pub use self::error::SaveError;
use self::folder::Lock;
pub(crate) use self::folder::check_place;
pub use self::folder::replace;
use self::record::Record;
pub use self::record::{Save, State};
use crate::error::{Error, Result, io};

/// Folder of a run's checkpoints within its output folder.
pub const CHECKPOINTS_FOLDER: &str = "checkpoints";
/// What only training needs, within a checkpoint's folder.
const TRAINING_FOLDER: &str = "training";
/// The optimizer's state within a checkpoint's folder.
pub const OPTIMIZER_FILE: &str = "training/optimizer.safetensors";
/// Step, place in the data and settings within a checkpoint's folder.
pub const STATE_FILE: &str = "training/state.json";
/// Says which checkpoint is the best one: `{"folder": "step-00000050", "step": 50, "val_loss": 1.25}`.
pub const BEST_FILE: &str = "best.json";

const LOCK_FILE: &str = ".lock";
const PREFIX: &str = "step-";
/// Digits of a step in a name; a step with more has more.
const DIGITS: usize = 8;

/// The checkpoints of one run. Only one of these exists for a folder at any time, in any process.
#[derive(Debug)]
pub struct Saves {
    folder: PathBuf,
    keep: Option<NonZeroUsize>,
    /// Held as long as this lives.
    _lock: Lock,
}

/// The checkpoint to go on from.
#[derive(Debug)]
pub struct Latest {
    /// The one that was written last and is whole.
    pub save: Save,
    /// Folders that cannot be used; the user should be told.
    pub skipped: Vec<SaveError>,
}

impl Saves {
    /// Opens a folder, which is made if need be, and puts right what killed processes left there. Of the checkpoints, the
    /// last `keep` and the best one are kept; all with `None`.
    ///
    /// # Errors
    /// Another run has the folder open, it cannot be written, or it has checkpoints of another version.
    pub fn open(folder: impl Into<PathBuf>, keep: Option<NonZeroUsize>) -> Result<Self> {
        let folder = folder.into();
        fs::create_dir_all(&folder).map_err(io("create", &folder))?;
        let lock = Lock::take(&folder.join(LOCK_FILE), &folder)?;
        folder::recover(&folder, |name| step_of(name).is_some() || name == BEST_FILE, &lock)?;
        let saves = Self { folder, keep, _lock: lock };
        saves.mark_best(&saves.scan()?.0)?;
        Ok(saves)
    }

    /// Writes a checkpoint: `write` gets a folder with an empty folder `training` in it. The name is taken over from an
    /// older checkpoint of the same step when the new one is complete. Then the best one is marked, and those that are
    /// not to be kept are deleted.
    ///
    /// # Errors
    /// What `write` returns, or a file cannot be written, both as [`SaveError::NotWritten`]: nothing of the new
    /// checkpoint is left and no other one was touched. Or, when it is complete, others cannot be deleted.
    pub fn save(&self, state: &State, write: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let place = self.folder.join(format!("{PREFIX}{:0DIGITS$}", state.step));
        let serial = 1 + self.scan()?.0.iter().map(|save| save.serial).max().unwrap_or(0);
        let written = folder::publish(&place, |folder| {
            let training = folder.join(TRAINING_FOLDER);
            fs::create_dir(&training).map_err(io("create", &training))?;
            write(folder)?;
            // Only what is on the disk may be listed.
            let record = Record::new(serial, state, folder::sync(folder)?);
            let path = folder.join(STATE_FILE);
            fs::write(&path, record.to_json()).map_err(io("write", &path))
        });
        folder::discard_replaced(written, &place)?;
        let (saves, _) = self.scan()?;
        self.mark_best(&saves)?;
        self.prune(saves)?;
        Ok(place)
    }

    /// The checkpoint that was written last and is whole; `None` if there is none at all. After a run went on from an
    /// older checkpoint, that is not the one with the most steps.
    ///
    /// # Errors
    /// There are checkpoints and all are damaged, or one is of another version.
    pub fn latest(&self) -> Result<Option<Latest>> {
        latest(&self.folder)
    }

    /// What [`Saves::latest`] would find, without opening the folder: another process may have it open. Nothing is changed,
    /// so a replacement that a kill interrupted is not seen.
    ///
    /// # Errors
    /// As [`Saves::latest`].
    pub fn peek(folder: &Path) -> Result<Option<Latest>> {
        if folder.is_dir() { latest(folder) } else { Ok(None) }
    }

    /// The checkpoint with the lowest validation loss; the earlier one of equals.
    ///
    /// # Errors
    /// A checkpoint is of another version.
    pub fn best(&self) -> Result<Option<Save>> {
        Ok(best(&self.scan()?.0).cloned())
    }

    /// All folders with the name of a checkpoint, by step.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn list(&self) -> Result<Vec<PathBuf>> {
        list(&self.folder)
    }

    fn scan(&self) -> Result<(Vec<Save>, Vec<SaveError>)> {
        scan(&self.folder)
    }

    /// Writes which one is the best. A kill before this leaves the mark of the former best, which is still there because
    /// pruning comes later; a reader of the checkpoints themselves finds the right one.
    fn mark_best(&self, saves: &[Save]) -> Result<()> {
        let path = self.folder.join(BEST_FILE);
        match best(saves) {
            Some(Save { folder, state: State { step, val_loss, .. }, .. }) => {
                let name = folder.file_name().unwrap_or_default().to_string_lossy();
                let text = serde_json::json!({ "folder": name, "step": step, "val_loss": val_loss });
                folder::write_text(&path, &format!("{text:#}\n"))
            }
            None if path.exists() => fs::remove_file(&path).map_err(io("remove", &path)),
            None => Ok(()),
        }
    }

    /// Deletes all whole checkpoints but the last ones and the best one.
    fn prune(&self, mut saves: Vec<Save>) -> Result<()> {
        let Some(keep) = self.keep else { return Ok(()) };
        let best = best(&saves).cloned();
        saves.sort_by_key(|save| Reverse(save.serial));
        let superfluous = saves.into_iter().skip(keep.get()).filter(|save| Some(save) != best.as_ref());
        superfluous.into_iter().try_for_each(|save| folder::discard(&save.folder))
    }
}

fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = || io("read", folder);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed())? {
        let path = entry.map_err(failed())?.path();
        let step = path.file_name().and_then(|name| name.to_str()).and_then(step_of);
        found.extend(step.filter(|_| path.is_dir()).map(|step| (step, path)));
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Whole checkpoints by step, and what is wrong with the others.
fn scan(folder: &Path) -> Result<(Vec<Save>, Vec<SaveError>)> {
    let (mut saves, mut damaged) = (Vec::new(), Vec::new());
    for folder in list(folder)? {
        match Save::open(&folder) {
            Ok(save) => saves.push(save),
            Err(Error::Saves(error @ (SaveError::Damaged { .. } | SaveError::NoState { .. }))) => damaged.push(error),
            Err(error) => return Err(error),
        }
    }
    Ok((saves, damaged))
}

fn latest(folder: &Path) -> Result<Option<Latest>> {
    let (saves, skipped) = scan(folder)?;
    match saves.into_iter().max_by_key(|save| save.serial) {
        Some(save) => Ok(Some(Latest { save, skipped })),
        None if skipped.is_empty() => Ok(None),
        None => Err(SaveError::NoneWhole { folder: folder.to_path_buf(), damaged: skipped }.into()),
    }
}

/// The lowest validation loss; the earlier one of equals.
fn best(saves: &[Save]) -> Option<&Save> {
    let measured = saves.iter().filter_map(|save| Some((save.state.val_loss?, save)));
    let better = |a: &(f64, &Save), b: &(f64, &Save)| a.0.total_cmp(&b.0).then(a.1.serial.cmp(&b.1.serial));
    measured.min_by(better).map(|(_, save)| save)
}

/// The step in the name of a checkpoint.
fn step_of(name: &str) -> Option<usize> {
    let digits = name.strip_prefix(PREFIX)?;
    let plain = digits.len() >= DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| plain)
}
