//! The error type of this crate.

use std::path::PathBuf;

use crate::lora::LoraError;
use crate::weights::{FileFault, Mismatch};

/// What every fallible function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong, from reading a configuration to running the model.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),

    /// Sharding, attention or the loss failed.
    #[error(transparent)]
    Cp(#[from] candle_cp::Error),

    /// Adapters were asked for, or read, that cannot be had.
    #[error(transparent)]
    Lora(#[from] Box<LoraError>),

    /// A file could not be read or written.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// What was tried: `read`, `write`, ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The reason the system gave.
        cause: std::io::Error,
    },

    /// A JSON text could not be parsed.
    #[error("{what} is not valid JSON: {cause}")]
    Json {
        /// The file, or what the text stands for.
        what: String,
        /// Line, column and reason.
        cause: serde_json::Error,
    },

    /// Required fields of the configuration are absent or null.
    #[error("config.json lacks {} required field(s): {}", fields.len(), fields.join(", "))]
    MissingFields {
        /// Their full names, such as `text_config.hidden_size`.
        fields: Vec<String>,
    },

    /// A field of the configuration has a value that this crate cannot run.
    #[error("config.json: {field} is {value}: {reason}")]
    Config {
        /// Full name of the field, such as `text_config.head_dim`.
        field: String,
        /// The value found, as JSON.
        value: String,
        /// What is allowed instead, or which feature is missing.
        reason: String,
    },

    /// The tensors of a checkpoint are not those that its configuration asks for.
    #[error("{}: {mismatch}", path.display())]
    Mismatch {
        /// The file or the index file.
        path: PathBuf,
        /// Missing, unexpected and mis-shaped tensors.
        mismatch: Box<Mismatch>,
    },

    /// Weight files are absent or have not the length that their headers give.
    #[error(
        "{}: {} of {files} weight file(s) cannot be used: {}; copy or download them again",
        path.display(), faults.len(), faults.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    WeightFiles {
        /// The only file, or the index.
        path: PathBuf,
        /// Number of files that make up the checkpoint.
        files: usize,
        /// All that is wrong with them.
        faults: Vec<FileFault>,
    },

    /// A weight file has a broken header.
    #[error(
        "{}: not a usable safetensors file ({reason}); an error page or a Git LFS pointer may lie in its place: \
         download it again",
        path.display()
    )]
    WeightFile {
        /// The file.
        path: PathBuf,
        /// What the parser found.
        reason: String,
    },

    /// An index file and the weight files beside it disagree.
    #[error("{}: {reason}", path.display())]
    WeightIndex {
        /// The index file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A tensor on disk has a type that is not a floating point type this crate reads.
    #[error("{}: tensor {name} has type {found}; allowed: BF16, F16, F32, F64", path.display())]
    TensorType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
    },

    /// A type was asked for that the model cannot be trained in.
    #[error("weights cannot be kept as {dtype:?}; allowed: BF16, F16, F32, F64")]
    TrainingType {
        /// The type asked for.
        dtype: candle_core::DType,
    },

    /// A pattern of tensors that are to be frozen.
    #[error("freeze {pattern:?}: {reason}")]
    FreezePattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },

    /// The weights handed to the model lack a tensor, or were made for another configuration.
    #[error("weights do not fit the configuration: {name}: {reason}")]
    Weight {
        /// Name of the tensor.
        name: String,
        /// What is wrong.
        reason: String,
    },

    /// A model input has a wrong shape, or an input is missing.
    #[error("input {name}: found {found}; expected {expected}")]
    Input {
        /// The input, such as `pixel_values`.
        name: &'static str,
        /// What was given.
        found: String,
        /// What is allowed.
        expected: String,
    },

    /// A token id is outside the vocabulary.
    #[error(
        "row {row}, token {index}: id {id} is outside the vocabulary of {vocab_size} \
         ({setting} in config.json); was the text encoded with another tokenizer?"
    )]
    TokenId {
        /// Row of the batch.
        row: usize,
        /// Place in the row.
        index: usize,
        /// The id found.
        id: i64,
        /// Number of ids the model knows.
        vocab_size: usize,
        /// The field that says so: `vocab_size`, or `vocab_size_per_layer_input` where that table is the smaller one.
        setting: &'static str,
    },

    /// A placeholder of a kind that no tower of this model fills.
    #[error(
        "row {row}, token {index}: id {id} is a placeholder for {kind}, which is not supported here; only image \
         placeholders can be filled, and audio placeholders if config.json has audio_config"
    )]
    Placeholder {
        /// Row of the batch.
        row: usize,
        /// Place in the row.
        index: usize,
        /// The id found.
        id: u32,
        /// `video` or `audio`.
        kind: &'static str,
    },

    /// A run of placeholders is not as long as the images or audio clips that have to fill it.
    #[error(
        "row {row}, tokens from {start}: {placeholders} {kind} placeholder(s), but the next {kind}(s) \
         (from {kind} {item} on) give {features} feature(s); every run of placeholders must be filled \
         exactly by whole {kind}s, in order"
    )]
    Splice {
        /// Row of the batch.
        row: usize,
        /// Place in the row where the run starts.
        start: usize,
        /// Length of the run.
        placeholders: usize,
        /// `image` or `audio clip`.
        kind: &'static str,
        /// First image or clip tried for it.
        item: usize,
        /// Features of the images or clips tried for it.
        features: usize,
    },

    /// Images or audio clips are left over after the last placeholder.
    #[error(
        "{given} {kind}(s) given, but the placeholders of the batch take only {used} \
         (last {kind} placeholder in row {row})"
    )]
    UnusedMedia {
        /// `image` or `audio clip`.
        kind: &'static str,
        /// Images or clips given.
        given: usize,
        /// Those of them that found placeholders.
        used: usize,
        /// Last row with a placeholder; 0 if there is none.
        row: usize,
    },

    /// The patch positions of an image are not a grid that can be pooled.
    #[error("image {image}: {reason}")]
    PatchGrid {
        /// Index of the image in the batch.
        image: usize,
        /// What is wrong with it.
        reason: String,
    },
}

impl From<LoraError> for Error {
    fn from(error: LoraError) -> Self {
        Self::Lora(Box::new(error))
    }
}
