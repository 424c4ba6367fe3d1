//! The weight files of a checkpoint: one file, or several behind an index.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;

use super::file::{FileFault, Opened, WeightFile, file_name};
use super::options::Notice;
use crate::error::{Error, Result};

/// Weights in one file.
pub(super) const SINGLE_FILE: &str = "model.safetensors";
/// The list of files that hold the weights together.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Elements that are converted at a time.
const CHUNK: usize = 1 << 22;

/// The part of an index file that matters here.
#[derive(Deserialize)]
struct Index {
    /// File name by tensor name.
    weight_map: BTreeMap<String, String>,
}

/// The opened weight files of a checkpoint.
#[derive(Debug)]
pub(super) struct WeightFiles {
    path: PathBuf,
    files: Vec<WeightFile>,
    /// Which file holds a tensor.
    place: BTreeMap<String, usize>,
    notices: Vec<Notice>,
}

impl WeightFiles {
    /// Opens the files of the index if there is one, else `model.safetensors`.
    ///
    /// DIFFERENCE: transformers takes `model.safetensors` where both exist. Such a file is what an earlier save or a
    /// second download left behind, and nothing says that it belongs to the shards' configuration.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let single = dir.join(SINGLE_FILE);
        let index = dir.join(INDEX_FILE);
        match (index.exists(), single.exists()) {
            (true, _) => Self::open_index(dir, index),
            (false, true) => Self::open_single(single),
            (false, false) => {
                let cause = std::io::Error::new(
                    std::io::ErrorKind::NotFound,
                    format!("neither {SINGLE_FILE} nor {INDEX_FILE} is in this folder"),
                );
                Err(Error::Io { action: "read weights from", path: dir.to_path_buf(), cause })
            }
        }
    }

    /// Opens one file.
    pub(super) fn open_single(path: PathBuf) -> Result<Self> {
        match WeightFile::open(path.clone())? {
            Opened::Faulty(fault) => Err(Error::WeightFiles { path, files: 1, faults: vec![fault] }),
            Opened::Whole(file) => {
                let place = file.names().into_iter().map(|name| (name, 0)).collect();
                Ok(Self { path, files: vec![file], place, notices: Vec::new() })
            }
        }
    }

    fn open_index(dir: &Path, path: PathBuf) -> Result<Self> {
        let index = Index::read(&path)?;
        let names: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
        let wrong = |reason: String| Error::WeightIndex { path: path.clone(), reason };
        let no_file = |name: &&&str| Path::new(name).file_name() != Some(name.as_ref()) || name.contains('\0');
        if let Some(name) = names.iter().find(no_file) {
            return Err(wrong(format!("{name:?} is not the name of a file in the same folder")));
        }
        let files = open_all(dir, &path, &index, &names)?;

        let mut place: BTreeMap<String, usize> = BTreeMap::new();
        for (number, file) in files.iter().enumerate() {
            for tensor in file.names() {
                if let Some(other) = place.insert(tensor.clone(), number) {
                    let (other, this) = (file_name(files[other].path()), file_name(file.path()));
                    return Err(wrong(format!("tensor {tensor} is both in {other} and in {this}")));
                }
            }
        }
        for (tensor, name) in &index.weight_map {
            if place.get(tensor).is_none_or(|&number| file_name(files[number].path()) != *name) {
                return Err(wrong(format!("tensor {tensor} should be in {name} but is not")));
            }
        }
        let single = dir.join(SINGLE_FILE);
        let stray = single.exists() && !names.contains(SINGLE_FILE);
        let notices = stray.then(|| Notice::StrayFile { file: single, index: path.clone() }).into_iter().collect();
        Ok(Self { path, files, place, notices })
    }

    /// The file or the index, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What the user should know about the files.
    pub(super) fn notices(&self) -> &[Notice] {
        &self.notices
    }

    /// Shape of every tensor in all files.
    pub(super) fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let shape = |name: &String| Some((name.clone(), self.info(name)?.shape.clone()));
        self.place.keys().filter_map(shape).collect()
    }

    /// Type, shape and place of one tensor.
    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.files[*self.place.get(name)?].info(name)
    }

    /// The bytes of one tensor and what they are.
    pub(super) fn bytes(&self, name: &str) -> Option<(&TensorInfo, &[u8])> {
        let file = &self.files[*self.place.get(name)?];
        let info = file.info(name)?;
        Some((info, file.bytes(info)))
    }

    /// Type of a tensor that is to be converted.
    pub(super) fn dtype(&self, name: &str) -> Result<DType> {
        let number = self.place.get(name).copied().ok_or_else(|| missing(name))?;
        let file = &self.files[number];
        match file.info(name).ok_or_else(|| missing(name))?.dtype {
            Dtype::BF16 => Ok(DType::BF16),
            Dtype::F16 => Ok(DType::F16),
            Dtype::F32 => Ok(DType::F32),
            Dtype::F64 => Ok(DType::F64),
            other => {
                let (path, found) = (file.path().to_path_buf(), format!("{other:?}"));
                Err(Error::TensorType { path, name: name.to_string(), found })
            }
        }
    }

    /// Fills a contiguous tensor with the elements of these tensors, one after the other, converted to its type.
    ///
    /// Little by little, so that a conversion needs no room of the size of the tensor.
    pub(super) fn fill<'a>(&self, target: &Tensor, names: impl Iterator<Item = &'a str>) -> Result<()> {
        let flat = target.flatten_all()?;
        let mut offset = 0;
        for name in names {
            let dtype = self.dtype(name)?;
            let (_, bytes) = self.bytes(name).ok_or_else(|| missing(name))?;
            for chunk in bytes.chunks(CHUNK * dtype.size_in_bytes()) {
                let count = chunk.len() / dtype.size_in_bytes();
                let chunk = Tensor::from_raw_buffer(chunk, dtype, &[count], &Device::Cpu)?;
                let chunk = chunk.to_dtype(flat.dtype())?.to_device(flat.device())?;
                flat.slice_set(&chunk, 0, offset)?;
                offset += count;
            }
        }
        Ok(())
    }
}

impl Index {
    fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|cause| Error::Io { action: "read", path: path.to_path_buf(), cause })?;
        serde_json::from_str(&text).map_err(|cause| Error::Json { what: path.display().to_string(), cause })
    }

    /// How many tensors are placed in a file.
    fn tensors_in(&self, file: &str) -> usize {
        self.weight_map.values().filter(|name| *name == file).count()
    }
}

/// Opens every file of an index, or reports all that are absent or have a wrong length.
fn open_all(dir: &Path, path: &Path, index: &Index, names: &BTreeSet<&str>) -> Result<Vec<WeightFile>> {
    let (mut files, mut faults) = (Vec::with_capacity(names.len()), Vec::new());
    for &name in names {
        match WeightFile::open(dir.join(name)) {
            Ok(Opened::Whole(file)) => files.push(file),
            Ok(Opened::Faulty(fault)) => faults.push(fault),
            Err(Error::Io { cause, .. }) if cause.kind() == std::io::ErrorKind::NotFound => {
                faults.push(FileFault::Absent { file: name.to_string(), tensors: index.tensors_in(name) });
            }
            Err(error) => return Err(error),
        }
    }
    match faults.is_empty() {
        true => Ok(files),
        false => Err(Error::WeightFiles { path: path.to_path_buf(), files: names.len(), faults }),
    }
}

fn missing(name: &str) -> Error {
    Error::Weight { name: name.to_string(), reason: "it is missing".to_string() }
}
