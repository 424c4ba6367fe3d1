//! What can go wrong, as one documented enum.

use std::fmt;
use std::path::PathBuf;

mod texts;

use crate::jsonl::counted;
use crate::optimizer::StateFault;
use crate::saves::SaveError;
use texts::{did_you_mean, fix_nothing_fits, fix_world, list, told_by, why_nothing_fits};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors name what was given, what is allowed, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),

    /// Sharding, an exchange between ranks, or a rank failed.
    #[error(transparent)]
    Cp(#[from] candle_cp::Error),

    /// What was said about this process by whoever started it.
    #[error("{0}; --comm threads reads none of these variables")]
    Launch(candle_cp::Error),

    /// MPI says something else about this process than its launcher.
    #[error(
        "{} rank {} of {}: {}, or use --comm threads",
        told_by(*launcher, *told), found.0, found.1, fix_world(*launcher)
    )]
    WorldsDiffer {
        /// Who started the process, if anybody said so.
        launcher: Option<candle_cp::Launcher>,
        /// Rank and size as the launcher told.
        told: (usize, usize),
        /// Rank and size as MPI tells.
        found: (usize, usize),
    },

    /// Processes that should train together are set up to train something else.
    #[error(
        "rank {rank}: {what} is {mine} here and {theirs} on rank {peer}; start all processes with the same settings and data"
    )]
    RanksDiffer {
        /// What differs.
        what: String,
        /// This rank.
        rank: usize,
        /// What it is here.
        mine: String,
        /// The other rank.
        peer: usize,
        /// What it is there.
        theirs: String,
    },

    /// A failure in the middle of training.
    #[error("step {step}: {cause}")]
    AtStep {
        /// The step, from 1, that was not done.
        step: usize,
        /// What went wrong.
        cause: Box<Error>,
    },

    /// The model or its checkpoint.
    #[error(transparent)]
    Model(#[from] candle_cp_layers::Error),

    /// A checkpoint of a family that the recipe does not know.
    #[error(
        "{}: model_type is \"{found}\"; allowed: Gemma 4 (gemma4, gemma4_text, gemma4_unified, gemma4_unified_text) and \
         Qwen 3.5 and 3.6 (qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text)", folder.display()
    )]
    UnknownFamily {
        /// The folder.
        folder: std::path::PathBuf,
        /// What its `config.json` says.
        found: String,
    },

    /// A model's name could not be turned into a folder.
    #[error("--model: {0}")]
    Hub(#[from] crate::hub::HubError),

    /// A data set's name or folder could not be turned into files.
    #[error("{flag}: {error}")]
    DataHub {
        /// The flag that named it, with its dashes.
        flag: &'static str,
        /// What went wrong.
        error: Box<crate::hub::HubError>,
    },

    /// A flag has a value that cannot be used.
    #[error("{flag} {value:?}: allowed is {allowed}; {fix}")]
    Flag {
        /// The flag, with its dashes.
        flag: String,
        /// What was given.
        value: String,
        /// What is allowed.
        allowed: String,
        /// What to do about it.
        fix: String,
    },

    /// A device cannot be opened.
    #[error("--device {device:?} cannot be used: {cause}; nvidia-smi lists the GPUs that the driver finds")]
    DeviceUnavailable {
        /// The device.
        device: String,
        /// What the driver says.
        cause: Box<candle_core::Error>,
    },

    /// There is no such setting.
    #[error("{flag} is no setting of this recipe; {}", did_you_mean(nearest.as_deref()))]
    UnknownFlag {
        /// What was given.
        flag: String,
        /// The flag that was most likely meant.
        nearest: Option<String>,
    },

    /// Lines of a settings file are wrong; nothing was trained.
    #[error("{}: {} cannot be used; nothing was trained{}", path.display(), counted(faults.len(), "line"), list(faults))]
    Settings {
        /// The file.
        path: PathBuf,
        /// All faults, in order of their lines.
        faults: Vec<LineFault>,
    },

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

    /// Chat template, tokenizer, image settings, or a picture that could be read before.
    #[error(transparent)]
    Processor(#[from] candle_vlm_processor::Error),

    /// A picture is not the one that was checked before training.
    #[error("{place}: {name} has changed since training began; leave the files alone until it ends")]
    PictureChanged {
        /// File and line or row, such as `data.jsonl line 7`.
        place: String,
        /// The picture.
        name: String,
    },

    /// A run cannot go on with a data file that has changed.
    #[error(
        "{} gives other samples than when the checkpoint was written; bring the file back, or begin a new run in another \
         --out", path.display()
    )]
    DataChanged {
        /// The data file.
        path: PathBuf,
    },

    /// The tokenizer and the model do not have a token that the recipe needs.
    #[error("the tokenizer has no token {token}; {reason}")]
    MissingToken {
        /// The token's text or field.
        token: String,
        /// What it is needed for.
        reason: &'static str,
    },

    /// The model cannot do the task.
    #[error("this model cannot be trained on {task}: {reason}")]
    Task {
        /// The task.
        task: &'static str,
        /// What is missing.
        reason: String,
    },

    /// Lines of a data file are wrong; nothing was trained.
    #[error("{}: {} of {} {unit}s cannot be used; nothing was trained{}", path.display(), faults.len(), lines, list(faults))]
    Data {
        /// The file, or the folder of several.
        path: PathBuf,
        /// What is counted.
        unit: Unit,
        /// Lines or rows that were checked, empty lines not counted.
        lines: usize,
        /// All faults, in order of their lines.
        faults: Vec<LineFault>,
    },

    /// A data file without a sample.
    #[error("{} has no sample; write one JSON object per line, such as {{\"prompt\": \"..\", \"completion\": \"..\"}}", path.display())]
    EmptyData {
        /// The file, or the folder of several.
        path: PathBuf,
    },

    /// A Parquet file, and a program that does not read them.
    #[error("{} is a Parquet file, which this program was built without: build it with --features parquet", path.display())]
    NoParquet {
        /// The file.
        path: PathBuf,
    },

    /// A Parquet file that cannot be opened, or whose columns have types that are not read.
    #[error("{} cannot be read as Parquet: {reason}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },

    /// A Parquet file without the columns that training data has.
    #[error(
        "{} has the columns {}; understood are {understood}. Rename or rewrite them, for example with the library datasets: \
         data.map(..) or data.rename_columns(..), then data.to_parquet(..)",
        path.display(), columns.join(", ")
    )]
    Columns {
        /// The file.
        path: PathBuf,
        /// The columns that it has.
        columns: Vec<String>,
        /// Sets of columns that make a sample.
        understood: &'static str,
    },

    /// Held-out samples would leave nothing on one side.
    #[error(
        "holding {asked} of {samples} samples out leaves {train} to train on and {held_out} to validate with; both need at \
         least 1: hold out a count from 1 to {}, or a share that comes to one", samples.saturating_sub(1)
    )]
    HeldOut {
        /// What was asked for.
        asked: String,
        /// Samples of the data.
        samples: usize,
        /// Samples that would be trained on.
        train: usize,
        /// Samples that would be held out.
        held_out: usize,
    },

    /// All samples of a data file are longer than a row, or have nothing to learn in the part that fits.
    #[error("{}: {}; the longest of {samples}, {place}, has {longest} tokens: {}", path.display(),
        why_nothing_fits(*seq_len, *truncate), fix_nothing_fits(*longest, *truncate))]
    NothingFits {
        /// The file, or the folder of several.
        path: PathBuf,
        /// Samples of the file.
        samples: usize,
        /// Where the longest sample stands, such as `line 7`.
        place: String,
        /// Tokens of the longest sample.
        longest: usize,
        /// Tokens of a row.
        seq_len: usize,
        /// Whether samples were cut.
        truncate: bool,
    },

    /// The table of digits is damaged.
    #[error("digits, line {line}: {reason}")]
    Digits {
        /// Line in the table, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },

    /// A sample is longer than a row.
    #[error(
        "a sample of {tokens} tokens does not fit a row of {seq_len}; raise --seq-len to at least {tokens} or shorten it"
    )]
    SampleTooLong {
        /// Tokens of the sample.
        tokens: usize,
        /// Tokens of a row.
        seq_len: usize,
    },

    /// Training data has fewer samples than a checkpoint says were taken.
    #[error(
        "the checkpoint was written after {taken} samples of epoch {}, but the data has {samples}; it has changed: resume \
         with the data of that time, or start a new run from the checkpoint's folder with --model", epoch + 1
    )]
    Position {
        /// The epoch, from 0.
        epoch: usize,
        /// Samples of it that were taken.
        taken: usize,
        /// Samples that it has.
        samples: usize,
    },

    /// A file does not hold the state of this optimizer.
    #[error("{}: this optimizer state cannot be used: {fault}", path.display())]
    OptimizerState {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        fault: StateFault,
    },

    /// A checkpoint was not written, or cannot be used.
    #[error(transparent)]
    Saves(#[from] SaveError),

    /// The loss or a gradient is not a number any more.
    #[error(
        "step {step}: {what} is {value}; the weights of the last step were not saved. Lower --lr, and check that data and \
         checkpoint are sound if it happens in the first steps"
    )]
    NotFinite {
        /// The step, from 1.
        step: usize,
        /// The loss, or the gradient of a named parameter.
        what: String,
        /// Its value.
        value: f64,
    },

    /// A line of a metrics file that a run goes on with.
    #[error("{} line {line} is no report of a run: {reason}; move the file away to resume without it", path.display())]
    Metrics {
        /// The file.
        path: PathBuf,
        /// Line in it, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },

    /// The picture of the loss curve could not be drawn.
    #[error("cannot draw {}: {reason}", path.display())]
    Plot {
        /// The file.
        path: PathBuf,
        /// The reason the drawing library gave.
        reason: String,
    },
}

impl Error {
    pub(crate) fn flag(
        flag: impl Into<String>,
        value: impl ToString,
        allowed: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self::Flag { flag: flag.into(), value: value.to_string(), allowed: allowed.into(), fix: fix.into() }
    }

    /// True if this is an echo of another rank's failure.
    pub fn is_peer_failure(&self) -> bool {
        match self {
            Self::AtStep { cause, .. } => cause.is_peer_failure(),
            Self::Cp(error) => error.is_peer_failure(),
            _ => false,
        }
    }

    /// The same with the step that was not done, where it does not tell by itself.
    pub(crate) fn at_step(self, step: usize) -> Self {
        match self {
            Self::AtStep { .. } | Self::NotFinite { .. } | Self::RanksDiffer { .. } => self,
            other => Self::AtStep { step, cause: Box::new(other) },
        }
    }

    /// True if the user's input has to change: a flag, the data, the checkpoint.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Flag { .. }
            | Self::Launch(_)
            | Self::WorldsDiffer { .. }
            | Self::RanksDiffer { .. }
            | Self::DeviceUnavailable { .. }
            | Self::UnknownFlag { .. }
            | Self::Settings { .. }
            | Self::Processor(_)
            | Self::PictureChanged { .. }
            | Self::DataChanged { .. }
            | Self::MissingToken { .. }
            | Self::UnknownFamily { .. }
            | Self::Task { .. }
            | Self::Data { .. }
            | Self::EmptyData { .. }
            | Self::NoParquet { .. }
            | Self::Parquet { .. }
            | Self::Columns { .. }
            | Self::HeldOut { .. }
            | Self::NothingFits { .. }
            | Self::Metrics { .. }
            | Self::SampleTooLong { .. }
            | Self::Position { .. }
            | Self::OptimizerState { .. } => true,
            Self::Cp(candle_cp::Error::RankFailed { cause, .. }) => cause.downcast_ref().is_some_and(Self::is_usage),
            Self::Saves(error) => error.is_usage(),
            Self::Hub(error) => error.is_usage(),
            Self::DataHub { error, .. } => error.is_usage(),
            Self::Model(error) => !matches!(error, candle_cp_layers::Error::Candle(_) | candle_cp_layers::Error::Cp(_)),
            Self::AtStep { cause, .. } => cause.is_usage(),
            Self::Candle(_)
            | Self::Cp(_)
            | Self::Io { .. }
            | Self::Digits { .. }
            | Self::NotFinite { .. }
            | Self::Plot { .. } => false,
        }
    }
}

/// Turns a system error into [`Error::Io`].
pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.into();
    move |cause| Error::Io { action, path, cause }
}

/// What a data file is made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Unit {
    /// Lines of a JSONL file.
    #[default]
    Line,
    /// Rows of a Parquet file.
    Row,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Line => "line",
            Self::Row => "row",
        })
    }
}

/// One line or row of a data file that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineFault {
    /// Line or row in its file, from 1; empty lines count.
    pub line: usize,
    /// Where it is, such as `line 7`; with the file if the data has several.
    pub place: String,
    /// What is wrong and what is allowed.
    pub reason: String,
}

impl fmt::Display for LineFault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_rank_keeps_its_kind() {
        let on_rank = |error: Error| Error::Cp(candle_cp::Error::RankFailed { rank: 1, cause: error.into() });
        assert!(on_rank(Error::SampleTooLong { tokens: 9, seq_len: 8 }).is_usage());
        let diverged = on_rank(Error::NotFinite { step: 3, what: "the loss".to_string(), value: f64::NAN });
        assert!(!diverged.is_usage());
        assert!(diverged.to_string().starts_with("rank 1 failed: step 3: the loss is NaN"), "{diverged}");
    }
}
