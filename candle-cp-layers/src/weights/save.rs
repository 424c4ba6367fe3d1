//! Writing a checkpoint: which tensors go into which file, and in which order files are replaced.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::{Dtype, SafeTensorError, View};

use super::files::{INDEX_FILE, SINGLE_FILE};
use crate::error::{Error, Result};

/// What is written under one name.
pub(super) enum Content<'a> {
    /// A tensor, converted.
    Tensor { tensor: &'a Tensor, dtype: DType },
    /// A tensor that is made when it is written, and has this type and shape.
    Computed { compute: Compute<'a>, shape: Vec<usize>, dtype: DType },
    /// Bytes of other files, one run after the other.
    Bytes { dtype: Dtype, shape: Vec<usize>, runs: Vec<&'a [u8]> },
}

/// Makes a tensor.
type Compute<'a> = Box<dyn Fn() -> Result<Tensor> + 'a>;

impl Content<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Tensor { tensor, dtype } => tensor.elem_count() * dtype.size_in_bytes(),
            Self::Computed { shape, dtype, .. } => shape.iter().product::<usize>() * dtype.size_in_bytes(),
            Self::Bytes { runs, .. } => runs.iter().map(|run| run.len()).sum(),
        }
    }
}

/// Tensors by name.
pub(super) type Contents<'a> = BTreeMap<String, Content<'a>>;

/// Writes all weight files into a folder and removes those of an earlier save.
///
/// Everything is written beside its place before anything is replaced. While files are replaced, a reader finds the
/// old checkpoint, the new one or, where new shards take the names of old ones, for that moment none: never a mixture.
pub(super) fn save_weights(dir: &Path, contents: &Contents, max_shard_bytes: u64) -> Result<()> {
    let shards = divide(contents, max_shard_bytes);
    let (single, index) = (dir.join(SINGLE_FILE), dir.join(INDEX_FILE));
    if let [only] = shards.as_slice() {
        let file = Pending::tensors(&single, contents, only)?;
        // As long as there is an index it decides, so the new file counts once the index is gone.
        file.publish()?;
        remove(&index)?;
        return remove_shards(dir, &[]);
    }
    let names: Vec<String> = (1..=shards.len()).map(|n| shard_name(n, shards.len())).collect();
    let text = index_text(contents, &shards, &names)?;
    let files = shards.iter().zip(&names);
    let files = files.map(|(shard, name)| Pending::tensors(&dir.join(name), contents, shard));
    let files: Vec<Pending> = files.collect::<Result<_>>()?;
    let new_index = Pending::text(&index, &text)?;
    if index.exists() && names.iter().any(|name| dir.join(name).is_file()) {
        // With the old index, old and new shards would be taken for one checkpoint. A single file beside the index
        // was not in use, and would be read next.
        remove(&single)?;
        remove(&index)?;
    }
    files.into_iter().try_for_each(Pending::publish)?;
    new_index.publish()?;
    remove(&single)?;
    remove_shards(dir, &names)
}

/// Writes one file of tensors and a text that belongs to it; both are complete before either is moved into its place.
pub(super) fn save_pair(path: &Path, contents: &Contents, text_path: &Path, text: &str) -> Result<()> {
    let names: Vec<&str> = contents.keys().map(String::as_str).collect();
    let tensors = Pending::tensors(path, contents, &names)?;
    let text = Pending::text(text_path, text)?;
    tensors.publish()?;
    text.publish()
}

/// Writes a text file.
pub(super) fn save_text(path: &Path, text: &str) -> Result<()> {
    Pending::text(path, text)?.publish()
}

/// Names per shard, in name order: a shard ends before the tensor that would make it too large.
fn divide<'a>(contents: &'a Contents, max_shard_bytes: u64) -> Vec<Vec<&'a str>> {
    let mut shards = vec![Vec::new()];
    let mut size = 0;
    for (name, content) in contents {
        let len = content.len() as u64;
        if size + len > max_shard_bytes && shards.last().is_some_and(|shard| !shard.is_empty()) {
            shards.push(Vec::new());
            size = 0;
        }
        size += len;
        shards.last_mut().expect("there is always a shard").push(name.as_str());
    }
    shards
}

fn shard_name(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.safetensors")
}

/// Whether a file has the name of a shard, of this save or another one.
fn is_shard_name(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.and_then(|numbers| numbers.split_once("-of-")).is_some_and(|(a, b)| digits(a) && digits(b))
}

fn index_text(contents: &Contents, shards: &[Vec<&str>], names: &[String]) -> Result<String> {
    let total_size: usize = contents.values().map(Content::len).sum();
    let files = shards.iter().zip(names).flat_map(|(shard, file)| shard.iter().map(move |&tensor| (tensor, file)));
    let weight_map: BTreeMap<&str, &String> = files.collect();
    let index = serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    let text = serde_json::to_string_pretty(&index);
    let text = text.map_err(|cause| Error::Json { what: "the index of the weights".to_string(), cause })?;
    Ok(text + "\n")
}

/// A file written beside its place. Dropped unpublished, it is removed.
struct Pending {
    temporary: PathBuf,
    path: PathBuf,
}

impl Pending {
    /// Writes tensors in the format of other libraries.
    fn tensors(path: &Path, contents: &Contents, names: &[&str]) -> Result<Self> {
        let failure = RefCell::new(None);
        let views = names.iter().map(|&name| (name, ContentView { content: &contents[name], failure: &failure }));
        // Other tools refuse files that do not name the library whose layout they have.
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let written = Self::write(path, |temporary| {
            // The library leaves files that only their owner may read; a file made here has the usual permissions.
            let permissions = File::create(temporary)?.metadata()?.permissions();
            safetensors::serialize_to_file(views, Some(metadata), temporary).map_err(|error| match error {
                SafeTensorError::IoError(cause) => cause,
                other => std::io::Error::other(other),
            })?;
            std::fs::set_permissions(temporary, permissions)
        });
        match failure.into_inner() {
            Some(error) => Err(error),
            None => written,
        }
    }

    fn text(path: &Path, text: &str) -> Result<Self> {
        Self::write(path, |temporary| File::create(temporary)?.write_all(text.as_bytes()))
    }

    fn write(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        let pending = Self { temporary, path: path.to_path_buf() };
        let done = write(&pending.temporary).and_then(|()| File::open(&pending.temporary)?.sync_all());
        done.map_err(|cause| Error::Io { action: "write", path: path.to_path_buf(), cause })?;
        Ok(pending)
    }

    /// Moves the file into its place.
    fn publish(self) -> Result<()> {
        let moved = std::fs::rename(&self.temporary, &self.path);
        moved.map_err(|cause| Error::Io { action: "write", path: self.path.clone(), cause })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // After a rename there is nothing to remove. After an error that error matters; a leftover changes nothing.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

/// One tensor on its way into a file. The format's writer takes no errors from a tensor, so the first one is kept.
struct ContentView<'a> {
    content: &'a Content<'a>,
    failure: &'a RefCell<Option<Error>>,
}

impl View for ContentView<'_> {
    fn dtype(&self) -> Dtype {
        match self.content {
            Content::Tensor { dtype, .. } | Content::Computed { dtype, .. } => (*dtype).into(),
            Content::Bytes { dtype, .. } => *dtype,
        }
    }

    fn shape(&self) -> &[usize] {
        match self.content {
            Content::Tensor { tensor, .. } => tensor.dims(),
            Content::Computed { shape, .. } | Content::Bytes { shape, .. } => shape,
        }
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.content {
            Content::Bytes { runs, .. } => match runs.as_slice() {
                [run] => Cow::Borrowed(run),
                runs => Cow::Owned(runs.concat()),
            },
            Content::Tensor { tensor, dtype } => self.bytes(converted(tensor, *dtype)),
            Content::Computed { compute, dtype, .. } => {
                self.bytes(compute().and_then(|tensor| converted(&tensor, *dtype)))
            }
        }
    }

    fn data_len(&self) -> usize {
        self.content.len()
    }
}

impl ContentView<'_> {
    fn bytes(&self, tensor: Result<Tensor>) -> Cow<'_, [u8]> {
        Cow::Owned(tensor.map_or_else(
            |error| {
                self.failure.borrow_mut().get_or_insert(error);
                vec![0; self.data_len()]
            },
            |tensor| View::data(&tensor).into_owned(),
        ))
    }
}

fn converted(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    Ok(tensor.to_dtype(dtype)?.to_device(&Device::Cpu)?)
}

/// Removes the shards of earlier saves.
fn remove_shards(dir: &Path, keep: &[String]) -> Result<()> {
    let failed = |cause| Error::Io { action: "list", path: dir.to_path_buf(), cause };
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let stale = name.to_str().is_some_and(|name| is_shard_name(name) && !keep.iter().any(|kept| kept == name));
        if stale {
            remove(&dir.join(name))?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::Io { action: "remove", path: path.to_path_buf(), cause })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_shards_are_taken_for_shards() {
        for name in ["model-00001-of-00002.safetensors", "model-12345-of-99999.safetensors"] {
            assert!(is_shard_name(name), "{name}");
        }
        for name in [
            "model.safetensors",
            "model-1-of-2.safetensors",
            "model-00001-of-00002.bin",
            "model-adapter.safetensors",
            "adapter_model-00001-of-00002.safetensors",
            "model-00001-of-0000x.safetensors",
            "model-00001.safetensors",
        ] {
            assert!(!is_shard_name(name), "{name}");
        }
    }
}
