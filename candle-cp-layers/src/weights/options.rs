//! How weights are loaded and saved, and what a load has to say.

use std::fmt;
use std::path::PathBuf;

use candle_core::DType;

use super::freeze::Freeze;
use super::part::Part;
use crate::error::Result;

/// How weights are loaded. The default trains every tensor that can be trained.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    pub(super) freeze: Freeze,
}

impl LoadOptions {
    /// The default.
    pub fn new() -> Self {
        Self::default()
    }

    /// Loads these parts frozen as well: their tensors are constants of the model, not variables. They get no
    /// gradient, and [`crate::Weights::save`] writes them back as they were in the files.
    #[must_use]
    pub fn freeze(mut self, parts: impl IntoIterator<Item = Part>) -> Self {
        self.freeze.parts.extend(parts);
        self
    }

    /// The same for tensors whose whole name matches one of some patterns: `*` stands for any letters, dots included.
    ///
    /// # Errors
    /// A pattern cannot be read. One that matches no tensor is found when the weights are loaded.
    pub fn freeze_matching<'a>(mut self, patterns: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        for pattern in patterns {
            self.freeze.patterns.push(Freeze::pattern(pattern)?);
        }
        Ok(self)
    }
}

/// How weights are saved. The default writes one file up to 50 GB, trained tensors in the type they have.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    pub(super) max_shard_bytes: u64,
    pub(super) dtype: Option<DType>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        // The limit at which transformers starts another file.
        Self { max_shard_bytes: 50_000_000_000, dtype: None }
    }
}

impl SaveOptions {
    /// The default.
    pub fn new() -> Self {
        Self::default()
    }

    /// Largest size of the tensors in one file, in bytes; a tensor that is larger gets a file of its own. Where all
    /// tensors together stay within it, there is one file and no index.
    #[must_use]
    pub fn max_shard_bytes(mut self, bytes: u64) -> Self {
        self.max_shard_bytes = bytes;
        self
    }

    /// Type in which trained tensors are written: BF16, F16, F32 or F64.
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }
}

/// Something about a loaded checkpoint that its user should know and that is no error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// A weight file lies beside an index that does not name it. It was not read.
    StrayFile {
        /// The file.
        file: PathBuf,
        /// The index that decided.
        index: PathBuf,
    },
    /// A part that was to be frozen has no tensor in this model.
    NothingToFreeze {
        /// The part.
        part: Part,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StrayFile { file, index } => write!(
                f,
                "{} was not read: {} decides which files hold the weights, and does not name it",
                file.display(),
                index.display()
            ),
            Self::NothingToFreeze { part } => write!(f, "this model has no {part} part that could be frozen"),
        }
    }
}
