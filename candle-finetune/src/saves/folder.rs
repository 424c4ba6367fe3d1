//! A folder that appears under its name complete or not at all.
//!
//! It is written beside its place as `.NAME.PID.tmp` and moved there. One that is replaced waits as `.NAME.PID.old` while
//! the new one is moved in; one that is deleted is `.NAME.PID.gone` before its first file goes. If the process is killed,
//! the folder under the name is the old one or the new one; only between the two moves of a replacement is there none
//! under the name: then both are whole beside it, and [`recover`] ends the replacement.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::{STATE_FILE, SaveError};
use crate::error::{Result, io};

/// Files that tell a checkpoint folder.
const MARKS: [&str; 3] = ["config.json", "adapter_config.json", STATE_FILE];

/// Replaces a checkpoint folder as a whole by what `write` puts into the folder that it is given. A kill at any moment
/// leaves the old folder or the new one; if it comes between moving the old one away and moving the new one in, they are
/// `.NAME.PID.old` and `.NAME.PID.tmp` beside, both complete, and the next call puts the new one into its place.
///
/// # Errors
/// What `write` returns; a file cannot be written; or something at the place is no checkpoint. Then the old folder is as
/// it was, and of the new one nothing is left.
pub fn replace(place: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    // Where a link stands in the place, the folder that it leads to is replaced.
    let place = fs::canonicalize(place).unwrap_or_else(|_| place.to_path_buf());
    let Some(name) = place.file_name().and_then(|name| name.to_str()) else {
        return Err(SaveError::InTheWay { path: place }.into());
    };
    replaces(&place)?;
    let parent = parent(&place);
    fs::create_dir_all(parent).map_err(io("create", parent))?;
    let lock = Lock::take(&parent.join(format!(".{name}.lock")), &place)?;
    recover(parent, |found| found == name, &lock)?;
    discard_replaced(publish(&place, write), &place)
}

/// Writes a folder and moves it into its place; where an older one was moved away from it, returns where to. The caller
/// holds the lock.
pub(super) fn publish(place: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<Option<PathBuf>> {
    let replaces = replaces(place)?;
    let temporary = Temporary::create(place)?;
    write(&temporary.path)?;
    sync(&temporary.path)?;
    if !replaces {
        return rename(&temporary.path, place).map(|()| None);
    }
    let old = free(beside(place, Kind::Old))?;
    rename(place, &old)?;
    if let Err(error) = rename(&temporary.path, place) {
        // The first error is the one to tell; the next call tries again.
        let _ = fs::rename(&old, place);
        return Err(error);
    }
    Ok(Some(old))
}

/// Whether [`replace`] can put a folder there; nothing is changed.
///
/// # Errors
/// Something at the place is no checkpoint.
pub(crate) fn check_place(place: &Path) -> Result<()> {
    replaces(&fs::canonicalize(place).unwrap_or_else(|_| place.to_path_buf())).map(drop)
}

/// What comes after [`publish`]: its error is told with the place, or the older folder is deleted.
pub(super) fn discard_replaced(published: Result<Option<PathBuf>>, place: &Path) -> Result<()> {
    match published {
        Err(cause) => Err(SaveError::NotWritten { folder: place.to_path_buf(), cause: Box::new(cause) }.into()),
        Ok(Some(old)) => remove_as(&old, beside(place, Kind::Gone)),
        Ok(None) => Ok(()),
    }
}

/// Deletes a folder; what a kill leaves of it does not have its name.
pub(super) fn discard(place: &Path) -> Result<()> {
    remove_as(place, beside(place, Kind::Gone))
}

fn remove_as(folder: &Path, gone: PathBuf) -> Result<()> {
    let gone = free(gone)?;
    rename(folder, &gone)?;
    remove(&gone)
}

/// A path of this process beside a place, after what an earlier failure may have left there was removed.
fn free(path: PathBuf) -> Result<PathBuf> {
    if exists(&path) {
        remove(&path)?;
    }
    Ok(path)
}

fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.map_err(io("remove", path))
}

/// Writes a small file in one piece: a reader finds the old text or the new one.
pub(super) fn write_text(place: &Path, text: &str) -> Result<()> {
    let temporary = beside(place, Kind::Temporary);
    let written = fs::write(&temporary, text).and_then(|()| File::open(&temporary)?.sync_all());
    let moved = written.map_err(io("write", place)).and_then(|()| rename(&temporary, place));
    if moved.is_err() {
        // The error says why there may be nothing to remove.
        let _ = fs::remove_file(&temporary);
    }
    moved
}

/// Ends what a killed process began in a folder, for the names that `ours` knows: an interrupted replacement is
/// completed; what was not complete, and what was being deleted, is removed.
///
/// Who holds the lock is the only one who writes, so all such leftovers are of processes that have ended. On a file
/// system without locks only those of this process's number are, because no other process has it.
pub(super) fn recover(folder: &Path, ours: impl Fn(&str) -> bool, lock: &Lock) -> Result<()> {
    let mut leftovers = Vec::new();
    for entry in fs::read_dir(folder).map_err(io("read", folder))? {
        let name = entry.map_err(io("read", folder))?.file_name();
        let leftover = name.to_str().and_then(Leftover::parse);
        leftovers.extend(leftover.filter(|leftover| ours(&leftover.name) && lock.has_ended(leftover.pid)));
    }
    for old in leftovers.iter().filter(|leftover| leftover.kind == Kind::Old) {
        let place = folder.join(&old.name);
        if exists(&place) {
            continue;
        }
        // The old folder is moved away only when the new one is complete.
        let new = Leftover { kind: Kind::Temporary, ..old.clone() };
        let whole = if leftovers.contains(&new) { new } else { old.clone() };
        rename(&whole.path(folder), &place)?;
    }
    for path in leftovers.iter().map(|leftover| leftover.path(folder)).filter(|path| exists(path)) {
        remove(&path)?;
    }
    Ok(())
}

/// Brings all files below a folder to the disk. Returns their lengths in bytes by relative path, with `/` between the
/// parts; names that are not UTF-8 are left out.
pub(super) fn sync(folder: &Path) -> Result<BTreeMap<String, u64>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(io("read", folder))? {
        let path = entry.map_err(io("read", folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if path.is_dir() {
            let inside = sync(&path)?;
            files.extend(inside.into_iter().filter_map(|(file, len)| Some((format!("{}/{file}", name?), len))));
            continue;
        }
        let synced = File::open(&path).and_then(|file| file.sync_all().and_then(|()| file.metadata()));
        let len = synced.map_err(io("write", &path))?.len();
        files.extend(name.map(|name| (name.to_string(), len)));
    }
    sync_entries(folder);
    Ok(files)
}

/// Brings the names in a folder to the disk. Some systems cannot; then a crash of the machine, not of the process, may
/// undo a move.
fn sync_entries(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(io("write", to))?;
    sync_entries(parent(to));
    Ok(())
}

/// Whether there is a folder to be replaced; an error if that would delete something else than a checkpoint.
fn replaces(place: &Path) -> Result<bool> {
    if !exists(place) {
        return Ok(false);
    }
    let is_empty = || fs::read_dir(place).is_ok_and(|mut entries| entries.next().is_none());
    match place.is_dir() && (MARKS.iter().any(|mark| place.join(mark).is_file()) || is_empty()) {
        true => Ok(true),
        false => Err(SaveError::InTheWay { path: place.to_path_buf() }.into()),
    }
}

/// Whether there is anything, be it a link that leads nowhere.
fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn beside(place: &Path, kind: Kind) -> PathBuf {
    let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Leftover { name, pid: std::process::id(), kind }.path(parent(place))
}

/// Why something lies beside its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It is being written.
    Temporary,
    /// It is being replaced.
    Old,
    /// It is being deleted.
    Gone,
}

impl Kind {
    const ALL: [(Kind, &'static str); 3] = [(Kind::Temporary, ".tmp"), (Kind::Old, ".old"), (Kind::Gone, ".gone")];
}

/// What a name beside a place says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Leftover {
    /// The name of the place.
    name: String,
    /// The process that wrote it.
    pid: u32,
    kind: Kind,
}

impl Leftover {
    fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix('.')?;
        let (kind, text) = Kind::ALL.iter().find_map(|(kind, ending)| Some((*kind, text.strip_suffix(ending)?)))?;
        let (name, pid) = text.rsplit_once('.')?;
        Some(Self { name: name.to_string(), pid: pid.parse().ok()?, kind })
    }

    fn path(&self, folder: &Path) -> PathBuf {
        let (_, ending) = Kind::ALL.iter().find(|(kind, _)| *kind == self.kind).expect("all kinds are listed");
        folder.join(format!(".{}.{}{ending}", self.name, self.pid))
    }
}

/// A folder that is being written. Dropped before it was moved, it is removed.
struct Temporary {
    path: PathBuf,
}

impl Temporary {
    fn create(place: &Path) -> Result<Self> {
        let path = free(beside(place, Kind::Temporary))?;
        fs::create_dir(&path).map_err(io("create", &path))?;
        Ok(Self { path })
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // After the move there is nothing to remove. After an error that error matters, and the next save removes it.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The right to write, which ends with the process at the latest.
#[derive(Debug)]
pub(super) struct Lock {
    /// `None` where the file system has no locks.
    file: Option<File>,
}

impl Lock {
    /// Takes the lock of a file, which is made if need be; `folder` is what an error names.
    pub(super) fn take(path: &Path, folder: &Path) -> Result<Self> {
        let file = File::create(path).map_err(io("write", path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { file: Some(file) }),
            Err(TryLockError::WouldBlock) => Err(SaveError::InUse { folder: folder.to_path_buf() }.into()),
            Err(TryLockError::Error(cause)) if cause.kind() == io::ErrorKind::Unsupported => Ok(Self { file: None }),
            Err(TryLockError::Error(cause)) => Err(io("lock", path)(cause)),
        }
    }

    /// Whether what a process left behind is surely of one that has ended.
    fn has_ended(&self, pid: u32) -> bool {
        self.file.is_some() || pid == std::process::id()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beside_a_place_are_told_from_others() {
        for kind in [Kind::Temporary, Kind::Old, Kind::Gone] {
            let path = beside(Path::new("runs/step-00000050"), kind);
            let name = path.file_name().unwrap().to_str().unwrap();
            let leftover = Leftover { name: "step-00000050".to_string(), pid: std::process::id(), kind };
            assert_eq!(Leftover::parse(name), Some(leftover.clone()));
            assert_eq!(leftover.path(Path::new("runs")), path);
        }
        for name in ["step-00000050", ".step-00000050.tmp", ".a.x.tmp", "a.1.tmp", ".a.1.tmp2", ".lock", ".a.-1.old"] {
            assert_eq!(Leftover::parse(name), None, "{name}");
        }
    }

    #[test]
    fn without_locks_only_leftovers_of_the_own_number_are_removed() -> Result<()> {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let names = [format!(".a.{own}.tmp"), format!(".a.{}.tmp", own + 1)];
        names.iter().for_each(|name| fs::create_dir(dir.path().join(name)).unwrap());
        recover(dir.path(), |_| true, &Lock { file: None })?;
        assert_eq!(names.map(|name| dir.path().join(name).exists()), [false, true]);
        Ok(())
    }
}
