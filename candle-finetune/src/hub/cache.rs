//! The cache that Python's library shares: `models--org--name/{blobs,refs,snapshots}`, and `datasets--` for data.

use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};

use super::error::{HubError, Result, io_at};
use super::spec::RepoName;

/// Folder of the lists of files, by commit.
const LISTS: &str = ".listed";

/// The part of the cache that belongs to one repository.
#[derive(Debug)]
pub(super) struct Cache {
    root: PathBuf,
    folder_name: String,
}

/// A commit in the cache.
#[derive(Debug)]
pub(super) struct Snapshot {
    /// The commit.
    pub(super) commit: String,
    /// Its folder.
    pub(super) folder: PathBuf,
}

impl Cache {
    pub(super) fn new(root: &Path, name: &RepoName) -> Self {
        Self {
            root: root.to_path_buf(),
            folder_name: format!("{}--{}", name.kind.plural(), name.repo.replace('/', "--")),
        }
    }

    /// The folder of the whole cache.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    fn folder(&self) -> PathBuf {
        self.root.join(&self.folder_name)
    }

    /// The place of a file's content.
    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.folder().join("blobs").join(etag)
    }

    /// The folder of a commit.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    /// Notes which files a commit has, pulled or not: offline nobody else can tell. Python's library looks at nothing in
    /// that place.
    pub(super) fn set_list(&self, commit: &str, files: &[&str]) -> Result<()> {
        let path = self.folder().join(LISTS).join(commit);
        create_parent(&path)?;
        let text: String = files.iter().filter(|file| !file.contains('\n')).map(|file| format!("{file}\n")).collect();
        fs::write(&path, text).map_err(io_at("write", &path, 0))
    }

    /// The files that a commit has, if they were noted: here, or by Python's library in its own way.
    pub(super) fn list(&self, commit: &str) -> Option<Vec<String>> {
        if let Ok(text) = fs::read_to_string(self.folder().join(LISTS).join(commit)) {
            return Some(text.lines().map(str::to_string).collect());
        }
        let text = fs::read(self.folder().join("trees").join(format!("{commit}.json"))).ok()?;
        let tree: serde_json::Value = serde_json::from_slice(&text).ok()?;
        Some(tree.get("files")?.as_object()?.keys().cloned().collect())
    }

    /// The commit that a revision is or was when it was pulled last.
    pub(super) fn find(&self, revision: &str) -> Option<Snapshot> {
        let named = fs::read_to_string(self.folder().join("refs").join(revision)).ok();
        let commit = named.map_or_else(|| revision.to_string(), |text| text.trim().to_string());
        let is_name = matches!(Path::new(&commit).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
        let folder = self.snapshot(&commit);
        (is_name && folder.is_dir()).then_some(Snapshot { commit, folder })
    }

    /// Waits until no other process writes this blob; the lock ends with the returned file. `waiting` is called once if
    /// somebody else holds it.
    pub(super) fn lock(&self, etag: &str, waiting: impl FnOnce()) -> Result<File> {
        let path = self.root.join(".locks").join(&self.folder_name).join(format!("{etag}.lock"));
        create_parent(&path)?;
        let file = File::options().create(true).append(true).open(&path).map_err(io_at("open", &path, 0))?;
        if file.try_lock().is_err() {
            waiting();
            file.lock().map_err(io_at("lock", &path, 0))?;
        }
        Ok(file)
    }

    /// Puts a file that is there in full under its name in the commit's folder.
    pub(super) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<()> {
        let name = self.snapshot(commit).join(file);
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        if fs::read_link(&name).is_ok_and(|found| found == target) {
            return Ok(());
        }
        create_parent(&name)?;
        match fs::remove_file(&name) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(io_at("replace", &name, 0)(cause)),
            _ => {}
        }
        symlink(&target, &name, &self.blob(etag)).map_err(io_at("link", &name, 0))
    }

    /// Says that the revision is this commit.
    ///
    /// DIFFERENCE: Python's library says so before it pulls. Here it comes last, so that what a revision names is whole.
    pub(super) fn set_revision(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder().join("refs").join(revision);
        if fs::read_to_string(&path).is_ok_and(|found| found == commit) {
            return Ok(());
        }
        create_parent(&path)?;
        fs::write(&path, commit).map_err(io_at("write", &path, 0))
    }
}

/// Makes the folder that a file goes to.
pub(super) fn create_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|cause| match cause.kind() {
        io::ErrorKind::StorageFull => HubError::DiskFull { path: path.to_path_buf(), missing_bytes: 0 },
        _ => HubError::Io { action: "create", path: parent.to_path_buf(), cause },
    })
}

#[cfg(unix)]
fn symlink(target: &Path, name: &Path, _blob: &Path) -> io::Result<()> {
    match std::os::unix::fs::symlink(target, name) {
        // Another process was faster with the same link.
        Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Links need a right that not every account has there; a copy is what Python's library leaves as well.
#[cfg(not(unix))]
fn symlink(_target: &Path, name: &Path, blob: &Path) -> io::Result<()> {
    fs::copy(blob, name).map(drop)
}
