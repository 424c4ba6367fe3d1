//! Models and data sets by name: from the Hugging Face Hub into the cache that Python's library shares.
//!
//! ```no_run
//! use candle_finetune::hub::{HubOptions, PullBar, resolve_model};
//!
//! let options = HubOptions::from_vars(|name| std::env::var(name).ok());
//! let mut bar = PullBar::default();
//! let folder = resolve_model("google/gemma-4-E2B-it", &options, &mut |event| bar.show(event))?;
//! # Ok::<(), candle_finetune::hub::HubError>(())
//! ```
//!
//! Pulled are of a model the configurations, tokenizer and templates, and the safetensors that the index names; of a data
//! set the JSONL or Parquet files of one split, and the pictures that its lines name by relative paths. Every file is taken
//! from one commit, goes on where an interrupted run ended, and gets its name only when its length and its hash are right.
//! The token is sent to the Hub's own address alone. A revision that is in the cache in full costs one request, offline
//! none.

mod cache;
mod client;
mod data;
mod download;
mod error;
mod files;
mod hash;
mod options;
mod progress;
mod spec;

use std::path::{Path, PathBuf};

use cache::{Cache, Snapshot, create_parent};
use client::{Client, Info, Listed, pause};
use download::Blob;
use error::Result;
use hash::Hash;
use spec::RepoName;

pub use error::HubError;
pub use options::HubOptions;
pub use progress::{PullBar, PullEvent};

/// The folder of a model: an existing folder as it is, or else `org/name` or `org/name@revision` from the cache or the Hub.
///
/// If the Hub is out of reach and the cache has the revision in full, that copy is taken and
/// [`PullEvent::FromCache`] says so.
///
/// # Errors
/// `spec` is neither; the Hub does not have it or does not give it; the network, the disk or what came is not in order.
pub fn resolve_model(
    spec: &str,
    options: &HubOptions,
    progress: &mut dyn FnMut(&PullEvent),
) -> std::result::Result<PathBuf, HubError> {
    if Path::new(spec).is_dir() {
        return Ok(PathBuf::from(spec));
    }
    if Path::new(spec).exists() {
        return Err(HubError::Spec {
            given: spec.to_string(),
            reason: "it is a file; give the folder it is in".to_string(),
        });
    }
    let name = RepoName::model(spec)?;
    let whole = |_: &Cache, copy: &Snapshot| match files::incomplete(&copy.folder) {
        Some(reason) => Err(reason),
        None => Ok(copy.folder.clone()),
    };
    resolve(&name, options, progress, |pull, progress| pull.model(progress), whole)
}

/// The files of training data: an existing file as it is; the files of a folder or of a data set of the Hub,
/// `hub:org/name` or `hub:org/name@revision`, that its split `train` has. Behind `hub:org/name:` another split, a folder, a
/// folder and a split (`ocr/test`), or one file may be named.
///
/// Splits are told by the names of files as on the Hub (`data/train-00000-of-00003.parquet`, `train.jsonl`,
/// `train/a.jsonl`); if no name tells one, all files are `train`. Relative paths of pictures in JSONL files of the Hub are
/// pulled too. What is out of reach is taken from the cache as [`resolve_model`] does.
///
/// # Errors
/// `spec` is none of these; there is no such split, or several sets of files that could be meant; the files are Parquet,
/// which this build does not read; the Hub does not have or does not give it; the network, the disk or what came is not in
/// order.
pub fn resolve_data(
    spec: &str,
    options: &HubOptions,
    progress: &mut dyn FnMut(&PullEvent),
) -> std::result::Result<Vec<PathBuf>, HubError> {
    let Some(named) = RepoName::data(spec) else { return local_data(spec) };
    let (name, selector) = named?;
    let whole = |cache: &Cache, copy: &Snapshot| {
        let listed = cache.list(&copy.commit).unwrap_or_else(|| data::files_below(&copy.folder));
        let listed: Vec<&str> = listed.iter().map(String::as_str).collect();
        let picked = data::pick(&listed, selector).map_err(|reason| format!("the copy there {reason}"))?;
        match data::incomplete(&copy.folder, &picked, &listed) {
            Some(reason) => Err(reason),
            None => Ok(data::in_folder(&copy.folder, &picked)),
        }
    };
    resolve(&name, options, progress, |pull, progress| pull.data(selector, progress), whole)
}

fn local_data(spec: &str) -> Result<Vec<PathBuf>> {
    let path = Path::new(spec);
    if path.is_dir() {
        let listed = data::files_below(path);
        let listed: Vec<&str> = listed.iter().map(String::as_str).collect();
        let picked = data::pick(&listed, None).map_err(|reason| HubError::DataFiles {
            source_name: spec.to_string(),
            reason: match reason.split_once(data::HINT) {
                Some((reason, _)) => format!("{reason}; give the file or the folder that is meant"),
                None => reason,
            },
        })?;
        return Ok(data::in_folder(path, &picked));
    }
    if path.exists() {
        return Ok(vec![path.to_path_buf()]);
    }
    let reason = match RepoName::model(spec) {
        Ok(_) => format!("there is no such file or folder; if a data set of the Hub is meant, write hub:{spec}"),
        Err(_) => "there is no such file or folder".to_string(),
    };
    Err(HubError::DataSpec { given: spec.to_string(), reason })
}

/// Pulls, or takes what the cache has. `whole` gives what is asked for out of a copy in the cache, or tells what it lacks.
fn resolve<T>(
    name: &RepoName,
    options: &HubOptions,
    progress: &mut dyn FnMut(&PullEvent),
    pull: impl Fn(&Pull<'_>, &mut dyn FnMut(&PullEvent)) -> Result<T>,
    whole: impl Fn(&Cache, &Snapshot) -> std::result::Result<T, String>,
) -> Result<T> {
    let cache = Cache::new(options.cache.as_deref().ok_or(HubError::NoCache)?, name);
    if options.offline {
        let found = cache.find(&name.revision).ok_or_else(|| "it was never pulled".to_string());
        return found.and_then(|copy| whole(&cache, &copy)).map_err(|reason| HubError::Offline {
            repo: name.repo.clone(),
            revision: name.revision.clone(),
            cache: cache.root().to_path_buf(),
            reason,
        });
    }
    let client = Client::new(options, name)?;
    match pull(&Pull { name, cache: &cache, client: &client, options }, progress) {
        Err(error) if error.is_outage() => {
            let found = cache.find(&name.revision).and_then(|copy| Some((whole(&cache, &copy).ok()?, copy.commit)));
            let Some((copy, commit)) = found else { return Err(error) };
            let (name, reason) = (name.to_string(), error.to_string());
            progress(&PullEvent::FromCache { name: &name, commit: &commit, reason: &reason });
            Ok(copy)
        }
        other => other,
    }
}

/// One pull of one revision.
struct Pull<'a> {
    name: &'a RepoName,
    cache: &'a Cache,
    client: &'a Client<'a>,
    options: &'a HubOptions,
}

impl Pull<'_> {
    fn model(&self, progress: &mut dyn FnMut(&PullEvent)) -> Result<PathBuf> {
        let info = self.client.info()?;
        progress(&PullEvent::Found { name: &self.name.to_string(), commit: &info.commit });
        let listed: Vec<&str> = info.siblings.iter().map(|file| file.path.as_str()).collect();
        let missing = files::missing_in_list(&listed);
        if !missing.is_empty() {
            let fix = "Take a repository of the original model with safetensors, not a conversion or an adapter";
            return Err(self.incomplete(missing, &listed, fix));
        }
        let folder = self.cache.snapshot(&info.commit);
        for file in files::settings(&listed) {
            self.file(&info, file, progress)?;
        }
        // The index is there now; it tells which of the weights belong to the model.
        let wrong =
            |reason| self.incomplete(vec![format!("usable list of weights ({reason})")], &listed, "Tell its owner");
        let weights = files::weights(&folder).map_err(wrong)?;
        let absent: Vec<String> = weights.iter().filter(|name| !listed.contains(&name.as_str())).cloned().collect();
        if !absent.is_empty() {
            return Err(self.incomplete(
                absent,
                &listed,
                "The index names files that were never uploaded: take another revision",
            ));
        }
        for file in &weights {
            self.file(&info, file, progress)?;
        }
        self.cache.set_revision(&self.name.revision, &info.commit)?;
        Ok(folder)
    }

    fn data(&self, selector: Option<&str>, progress: &mut dyn FnMut(&PullEvent)) -> Result<Vec<PathBuf>> {
        let info = self.client.info()?;
        progress(&PullEvent::Found { name: &self.name.to_string(), commit: &info.commit });
        let listed: Vec<&str> = info.siblings.iter().map(|file| file.path.as_str()).collect();
        let fault = |reason| HubError::DataFiles { source_name: self.name.to_string(), reason };
        let picked = data::pick(&listed, selector).map_err(fault)?;
        let tables = picked.iter().filter(|file| file.ends_with(".parquet")).count();
        if tables > 0 && !cfg!(feature = "parquet") {
            return Err(fault(format!(
                "has this data as Parquet ({tables} files, {} the first), which this program was built without: build it \
                 with --features parquet; nothing was pulled",
                picked[0]
            )));
        }
        let folder = self.cache.snapshot(&info.commit);
        for file in &picked {
            self.file(&info, file, progress)?;
        }
        for file in picked.iter().filter(|file| !file.ends_with(".parquet")) {
            let path = folder.join(file);
            let text = std::fs::read(&path).map_err(error::io_at("read", &path, 0))?;
            let pictures = data::pictures(&text, file);
            for picture in info.siblings.iter().filter(|listed| pictures.contains(&listed.path)) {
                self.file(&info, &picture.path, progress)?;
            }
        }
        self.cache.set_list(&info.commit, &listed)?;
        self.cache.set_revision(&self.name.revision, &info.commit)?;
        Ok(data::in_folder(&folder, &picked))
    }

    fn incomplete(&self, missing: Vec<String>, listed: &[&str], fix: &'static str) -> HubError {
        HubError::Incomplete {
            repo: self.name.repo.clone(),
            revision: self.name.revision.clone(),
            missing,
            has: listed.iter().map(ToString::to_string).collect(),
            fix,
        }
    }

    /// Brings one file into the snapshot, unless it is there.
    fn file(&self, info: &Info, file: &str, progress: &mut dyn FnMut(&PullEvent)) -> Result<()> {
        let (commit, listed) = (&info.commit, info.siblings.iter().find(|listed| listed.path == file));
        let size = listed.and_then(|listed| listed.size);
        let there = std::fs::metadata(self.cache.snapshot(commit).join(file));
        if there.is_ok_and(|found| found.is_file() && size.is_none_or(|size| size == found.len())) {
            return Ok(());
        }
        let head = self.head(commit, file)?;
        let Some(size) = head.size.or(size) else {
            let reason = format!("the size of {file} is nowhere told");
            return Err(HubError::Answer { url: self.options.endpoint.clone(), reason });
        };
        let hash = Hash::parse(&head.etag).or_else(|| listed_hash(listed?));
        let blob = Blob { commit, file, size, hash, path: self.cache.blob(&head.etag) };
        create_parent(&blob.path)?;
        let lock = self.cache.lock(&head.etag, || progress(&PullEvent::Waiting { file }))?;
        if !blob.is_there() {
            progress(&PullEvent::File { file, size });
            blob.pull(self.client, self.options, progress)?;
            progress(&PullEvent::Stored { file });
        }
        self.cache.link(commit, file, &head.etag)?;
        drop(lock);
        Ok(())
    }

    fn head(&self, commit: &str, file: &str) -> Result<client::FileHead> {
        let mut attempt = 0;
        loop {
            match self.client.head(commit, file) {
                Err(error) if error.is_outage() && attempt < self.options.retries => {
                    attempt += 1;
                    pause(self.options.retry_pause, attempt);
                }
                other => return other,
            }
        }
    }
}

/// The hash that the list tells, where the file's own headers do not.
fn listed_hash(listed: &Listed) -> Option<Hash> {
    match &listed.lfs {
        Some(lfs) => Hash::parse(lfs.sha256.as_deref()?),
        None => Hash::parse(listed.git_hash.as_deref()?),
    }
}
