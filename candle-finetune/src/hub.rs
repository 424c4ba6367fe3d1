//! Models by name: from the Hugging Face Hub into the cache that Python's library shares.
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
//! Pulled are the configurations, tokenizer and templates, and the safetensors that the index names. Every file is taken
//! from one commit, goes on where an interrupted run ended, and gets its name only when its length and its hash are right.
//! The token is sent to the Hub's own address alone. A revision that is in the cache in full costs one request, offline
//! none.

mod cache;
mod client;
mod download;
mod error;
mod files;
mod hash;
mod options;
mod progress;
mod spec;

use std::path::{Path, PathBuf};

use cache::{Cache, create_parent};
use client::{Client, Info, Listed, pause};
use download::Blob;
use error::Result;
use hash::Hash;
use spec::ModelName;

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
    let name = ModelName::parse(spec)?;
    let cache = Cache::new(options.cache.as_deref().ok_or(HubError::NoCache)?, &name);
    if options.offline {
        return from_cache(&name, &cache);
    }
    let client = Client::new(options, &name)?;
    match (Pull { name: &name, cache: &cache, client: &client, options }).run(progress) {
        Err(error) if error.is_outage() => match cache.find(&name.revision) {
            Some(copy) if files::incomplete(&copy.folder).is_none() => {
                let (name, reason) = (name.to_string(), error.to_string());
                progress(&PullEvent::FromCache { name: &name, commit: &copy.commit, reason: &reason });
                Ok(copy.folder)
            }
            _ => Err(error),
        },
        other => other,
    }
}

fn from_cache(name: &ModelName, cache: &Cache) -> Result<PathBuf> {
    let found = cache.find(&name.revision);
    let reason = match &found {
        Some(copy) => files::incomplete(&copy.folder),
        None => Some("it was never pulled".to_string()),
    };
    match (found, reason) {
        (Some(copy), None) => Ok(copy.folder),
        (_, reason) => Err(HubError::Offline {
            repo: name.repo.clone(),
            revision: name.revision.clone(),
            cache: cache.root().to_path_buf(),
            reason: reason.unwrap_or_default(),
        }),
    }
}

/// One pull of one revision.
struct Pull<'a> {
    name: &'a ModelName,
    cache: &'a Cache,
    client: &'a Client<'a>,
    options: &'a HubOptions,
}

impl Pull<'_> {
    fn run(&self, progress: &mut dyn FnMut(&PullEvent)) -> Result<PathBuf> {
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
