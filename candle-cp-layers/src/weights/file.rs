//! One mapped safetensors file whose length has been checked against its header.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{SafeTensorError, SafeTensors};

use crate::error::{Error, Result};

/// Bytes before the header: its length.
const LENGTH_FIELD: usize = size_of::<u64>();

/// A weight file that is absent or has not the length it should have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileFault {
    /// The index names a file that is not in the folder.
    #[error("{file} is absent ({tensors} tensor(s) should be in it)")]
    Absent {
        /// Name of the file.
        file: String,
        /// How many tensors the index places in it.
        tensors: usize,
    },
    /// The file ends within its header.
    #[error("{file} is cut short ({found} bytes found, its header alone takes {expected})")]
    CutHeader {
        /// Name of the file.
        file: String,
        /// Bytes up to the end of the header.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// The file is shorter or longer than its header says.
    #[error("{file} is {} ({expected} bytes expected by its header, {found} found)",
        if found < expected { "cut short" } else { "too long" })]
    Length {
        /// Name of the file.
        file: String,
        /// Bytes of the length field, the header and all tensors.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
}

/// What came of opening a file.
pub(super) enum Opened {
    Whole(WeightFile),
    Faulty(FileFault),
}

/// An open file.
#[derive(Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    map: Mmap,
    header: Metadata,
    /// Where the tensors' bytes start.
    data_start: usize,
}

impl WeightFile {
    /// Maps a file and checks its header and length. Nothing past the header is touched: reading a page that a short
    /// file does not have would end the process.
    pub(super) fn open(path: PathBuf) -> Result<Opened> {
        let failed = |cause| Error::Io { action: "read", path: path.clone(), cause };
        let file = File::open(&path).map_err(failed)?;
        // SAFETY: the map is only read. As with every mapped file, another process that cuts the file short while
        // it is in use can end this one; loading is documented as reading a finished checkpoint.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        match SafeTensors::read_metadata(&map) {
            Ok((header_len, header)) => {
                Ok(Opened::Whole(Self { path, map, header, data_start: header_len + LENGTH_FIELD }))
            }
            Err(error) => match length_fault(&path, &map, &error) {
                Some(fault) => Ok(Opened::Faulty(fault)),
                None => Err(Error::WeightFile { path, reason: error.to_string() }),
            },
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors, in the order of their bytes.
    pub(super) fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// The bytes of one tensor, row-major and little-endian.
    pub(super) fn bytes(&self, info: &TensorInfo) -> &[u8] {
        let (start, end) = info.data_offsets;
        &self.map[self.data_start + start..self.data_start + end]
    }
}

/// The lengths behind a parser's error, if it is about lengths.
fn length_fault(path: &Path, bytes: &[u8], error: &SafeTensorError) -> Option<FileFault> {
    let file = file_name(path);
    let found = bytes.len() as u64;
    let header_len = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
    // A file that is no safetensors file may begin with any number.
    let header_end = (LENGTH_FIELD as u64).saturating_add(header_len.unwrap_or(0));
    match error {
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            Some(FileFault::CutHeader { file, expected: header_end, found })
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            let header = bytes.get(LENGTH_FIELD..usize::try_from(header_end).ok()?)?;
            let header: Metadata = serde_json::from_slice(header).ok()?;
            Some(FileFault::Length { file, expected: header_end + header.data_len() as u64, found })
        }
        _ => None,
    }
}

/// Last component of a path, for messages.
pub(super) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
