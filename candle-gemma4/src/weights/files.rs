//! Reading and writing safetensors files: one file, or several behind an index.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use memmap2::Mmap;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::Deserialize;

use crate::error::{Error, Result};

/// Weights in one file.
pub(super) const SINGLE_FILE: &str = "model.safetensors";
/// The list of files that hold the weights together.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Bytes before the header: its length.
const LENGTH_FIELD: usize = size_of::<u64>();

/// The part of an index file that matters here.
#[derive(Deserialize)]
struct Index {
    /// File name by tensor name.
    weight_map: BTreeMap<String, String>,
}

/// The opened weight files of a checkpoint.
pub(super) struct WeightFiles {
    path: PathBuf,
    files: Vec<WeightFile>,
    /// Which file holds a tensor.
    place: BTreeMap<String, usize>,
}

impl WeightFiles {
    /// Opens `model.safetensors` if there is one, else the files of the index.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let single = dir.join(SINGLE_FILE);
        let index = dir.join(INDEX_FILE);
        if single.exists() {
            let file = WeightFile::open(single.clone())?;
            let place = file.names().into_iter().map(|name| (name, 0)).collect();
            return Ok(Self { path: single, files: vec![file], place });
        }
        match index.exists() {
            true => Self::open_index(dir, index),
            false => {
                let cause = std::io::Error::new(
                    std::io::ErrorKind::NotFound,
                    format!("neither {SINGLE_FILE} nor {INDEX_FILE} is in this folder"),
                );
                Err(Error::Io { action: "read weights from", path: dir.to_path_buf(), cause })
            }
        }
    }

    fn open_index(dir: &Path, path: PathBuf) -> Result<Self> {
        let text = std::fs::read_to_string(&path);
        let text = text.map_err(|cause| Error::Io { action: "read", path: path.clone(), cause })?;
        let index: Index =
            serde_json::from_str(&text).map_err(|cause| Error::Json { what: path.display().to_string(), cause })?;
        let wrong = |reason: String| Error::WeightIndex { path: path.clone(), reason };

        let names: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
        let mut files = Vec::with_capacity(names.len());
        let mut place = BTreeMap::new();
        for (number, name) in names.iter().enumerate() {
            if Path::new(name).file_name() != Some(name.as_ref()) {
                return Err(wrong(format!("\"{name}\" is not the name of a file in the same folder")));
            }
            let file = WeightFile::open(dir.join(name))?;
            for tensor in file.names() {
                if let Some(other) = place.insert(tensor.clone(), number) {
                    let other = names.iter().nth(other).copied().unwrap_or_default();
                    return Err(wrong(format!("tensor {tensor} is both in {other} and in {name}")));
                }
            }
            files.push(file);
        }
        for (tensor, name) in &index.weight_map {
            if !place.contains_key(tensor) {
                return Err(wrong(format!("tensor {tensor} should be in {name} but is not")));
            }
        }
        Ok(Self { path, files, place })
    }

    /// The file or the index, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Shape of every tensor in all files.
    pub(super) fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let shape = |(name, &file): (&String, &usize)| (name.clone(), self.files[file].shape(name));
        self.place.iter().map(shape).collect()
    }

    /// One tensor, converted.
    pub(super) fn tensor(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let number = self
            .place
            .get(name)
            .copied()
            .ok_or_else(|| Error::Weight { name: name.to_string(), reason: "it is missing".to_string() })?;
        self.files[number].tensor(name, dtype, device)
    }
}

/// One mapped file whose header has been checked against its length.
struct WeightFile {
    path: PathBuf,
    map: Mmap,
    header: Metadata,
    /// Where the tensors' bytes start.
    data_start: usize,
}

impl WeightFile {
    fn open(path: PathBuf) -> Result<Self> {
        let failed = |cause| Error::Io { action: "read", path: path.clone(), cause };
        let file = File::open(&path).map_err(failed)?;
        // SAFETY: the map is only read. As with every mapped file, another process that cuts the file short while
        // it is being loaded can end this one; loading is documented as reading a finished checkpoint.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        match SafeTensors::read_metadata(&map) {
            Ok((header_len, header)) => Ok(Self { path, map, header, data_start: header_len + LENGTH_FIELD }),
            Err(error) => Err(Error::WeightFile { path, reason: error.to_string() }),
        }
    }

    fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.header.info(name).map(|info| info.shape.clone()).unwrap_or_default()
    }

    fn tensor(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let info = self
            .header
            .info(name)
            .ok_or_else(|| Error::Weight { name: name.to_string(), reason: "it is missing".to_string() })?;
        let on_disk = match info.dtype {
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            Dtype::F32 => DType::F32,
            Dtype::F64 => DType::F64,
            other => {
                let found = format!("{other:?}");
                return Err(Error::TensorType { path: self.path.clone(), name: name.to_string(), found });
            }
        };
        let (start, end) = info.data_offsets;
        let bytes = &self.map[self.data_start + start..self.data_start + end];
        let tensor = Tensor::from_raw_buffer(bytes, on_disk, &info.shape, &Device::Cpu)?;
        Ok(tensor.to_dtype(dtype)?.to_device(device)?)
    }
}

/// Writes tensors in the layout that other libraries expect.
pub(super) fn save_tensors<'a>(path: &Path, tensors: impl Iterator<Item = (&'a str, &'a Tensor)>) -> Result<()> {
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    replace(path, |temporary| {
        // The library leaves files that only their owner may read; a file made here has the usual permissions.
        let permissions = File::create(temporary)?.metadata()?.permissions();
        safetensors::serialize_to_file(tensors, Some(metadata), temporary).map_err(|error| match error {
            SafeTensorError::IoError(cause) => cause,
            other => std::io::Error::other(other),
        })?;
        std::fs::set_permissions(temporary, permissions)
    })
}

/// Writes a text file.
pub(super) fn save_text(path: &Path, text: &str) -> Result<()> {
    replace(path, |temporary| File::create(temporary)?.write_all(text.as_bytes()))
}

/// Writes beside the path, flushes to disk, then moves into place.
fn replace(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let done = write(&temporary)
        .and_then(|()| File::open(&temporary)?.sync_all())
        .and_then(|()| std::fs::rename(&temporary, path));
    done.map_err(|cause| {
        // The error that matters is the first one; a leftover that cannot be removed either changes nothing.
        let _ = std::fs::remove_file(&temporary);
        Error::Io { action: "write", path: path.to_path_buf(), cause }
    })
}
