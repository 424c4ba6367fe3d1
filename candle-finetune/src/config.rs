//! Settings of a run. Every one has a key in the settings file and a flag; checks name it, the value, what is allowed
//! and what to do.

mod changes;
mod check;
mod file;
mod setting;
mod table;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::DType;
use candle_cp::LayoutKind;
use candle_cp_layers::{LoraOptions, LoraTargets, Part};

pub use self::setting::Setting;
use crate::device::ComputeDevice;
use crate::error::{Error, Result};
use crate::family::Family;
use crate::hub::{HubOptions, PullEvent, resolve_data, resolve_model};
use crate::launch::Launch;
use crate::optimizer::AdamWConfig;
use crate::schedule::ScheduleKind;
use crate::transport::Transport;

/// Most ranks that share a sequence.
const MAX_RANKS: usize = 4096;
/// Most replicas of a model.
const MAX_REPLICAS: usize = 4096;
/// Longest deadline in seconds, ten days: clocks can still add it up.
const MAX_DEADLINE: usize = 864_000;
/// Longest row.
const MAX_SEQ_LEN: usize = 1 << 24;

/// Settings of a run; [`Config::SETTINGS`] tells what each is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `model.path`: a checkpoint folder, or a name on the Hub for [`Config::resolve`]; `None` trains the small built-in
    /// model from nothing.
    pub model: Option<PathBuf>,
    /// `model.family`: of the small built-in model.
    pub family: Family,
    /// `model.dtype`: one of [`Config::DTYPES`].
    pub dtype: DType,
    /// `model.freeze`: parts and name patterns of a checkpoint that are left as they are; their gradients are never
    /// computed.
    pub freeze: Vec<String>,
    /// `model.recompute`: decoder layers run again in backward instead of keeping what happened inside of them.
    pub recompute: bool,
    /// `lora`: adapters in place of the weights.
    pub lora: LoraSettings,
    /// `data.train`: a data file; `None` trains on the built-in digits.
    pub data: Option<PathBuf>,
    /// `data.validation`: a data file that is never trained on.
    pub validation: Option<PathBuf>,
    /// `data.validation_share`: share of the samples of `data` that is held out instead.
    pub validation_share: Option<f64>,
    /// `data.seq_len`: tokens of a row.
    pub seq_len: usize,
    /// `data.truncate`: samples that are longer than a row are cut, not left out.
    pub truncate: bool,
    /// `train.steps`: optimizer steps; `None` goes by epochs, or [`Config::DIGIT_STEPS`].
    pub steps: Option<usize>,
    /// `train.epochs`: passes over the samples; `None` is [`Config::DEFAULT_EPOCHS`] if there are no steps either.
    pub epochs: Option<usize>,
    /// `train.batch_rows`: rows of a batch.
    pub batch_rows: usize,
    /// `train.accumulate`: batches of a step.
    pub accumulate: usize,
    /// `train.learning_rate`: the highest one; `None` takes one of the defaults, see [`Config::rate`].
    pub lr: Option<f64>,
    /// `train.schedule`: the learning rate after the warm-up.
    pub schedule: ScheduleKind,
    /// `train.warmup`: steps of the warm-up; `None` is a tenth of the steps, at most 30.
    pub warmup: Option<usize>,
    /// `train.rate_floor`: lowest learning rate at the end, as a share of the highest.
    pub rate_floor: f64,
    /// `train.max_grad_norm`: largest norm of the gradients; longer ones are scaled down.
    pub max_grad_norm: f64,
    /// `train.seed`: of fresh weights, adapters, dropout and of the order of the data.
    pub seed: u64,
    /// `train.validate_every`: steps between two validations; `None` is a tenth of the steps.
    pub validate_every: Option<usize>,
    /// `optimizer`: betas, eps and weight decay.
    pub optimizer: AdamWConfig,
    /// `parallel.device`: where the model runs.
    pub device: ComputeDevice,
    /// `parallel.cp`: ranks that share every sequence.
    pub cp: usize,
    /// `parallel.dp`: replicas of the model, each of `cp` ranks; `None` is as many as there are processes for, or 1.
    pub dp: Option<usize>,
    /// `parallel.zero`: 1 if the optimizer's state is spread over all ranks (ZeRO stage 1), 0 if every rank has all of it.
    pub zero: usize,
    /// `parallel.deadline`: longest time that a rank waits for another one.
    pub deadline: Duration,
    /// `parallel.comm`: what ranks are, and over what they talk.
    pub comm: Transport,
    /// `parallel.layout`: which tokens each rank owns.
    pub layout: LayoutKind,
    /// `out.dir`: folder for everything that the run leaves.
    pub out: PathBuf,
    /// `out.save_every`: steps between two checkpoints; `None` saves the finished model only.
    pub save_every: Option<usize>,
    /// `out.keep`: checkpoints that are kept.
    pub keep: usize,
    /// `out.tensorboard`: event files are written.
    pub tensorboard: bool,
    /// `out.trace`: the step whose timeline is written.
    pub trace: Option<usize>,
    /// Where model and data are on this machine; [`Config::resolve`] fills it in. Not a setting.
    pub sources: Sources,
    /// Who started this process; [`layered_settings`](crate::layered_settings) fills it in. Not a setting.
    pub launch: Launch,
    /// How often each held-out digit is read at the end, in other conversations each time; 0 leaves the test out. Not a
    /// setting of users.
    pub held_out_rounds: usize,
}

/// Where model and data are on this machine. What is empty is where its setting says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// The checkpoint's folder.
    pub model: Option<PathBuf>,
    /// Files with training samples.
    pub train: Vec<PathBuf>,
    /// Files with held-out samples.
    pub validation: Vec<PathBuf>,
}

/// Settings of adapters.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSettings {
    /// `lora.rank`; `None` trains the weights themselves.
    pub rank: Option<usize>,
    /// `lora.alpha`; `None` is twice the rank.
    pub alpha: Option<f64>,
    /// `lora.dropout`: share of an adapter's inputs that a step leaves out.
    pub dropout: f64,
    /// `lora.targets`: module names as PEFT matches them; empty is `all-linear`.
    pub targets: Vec<String>,
    /// `lora.parts`: parts in which targets are looked for; empty is the text model.
    pub parts: Vec<Part>,
    /// `lora.merge`: the merged checkpoint is written as well.
    pub merge: bool,
}

impl LoraSettings {
    /// As the model takes them; `None` without a rank.
    pub fn options(&self) -> Option<LoraOptions> {
        let rank = self.rank?;
        let options = LoraOptions::new(rank, self.alpha.unwrap_or(2.0 * rank as f64)).dropout(self.dropout);
        let options = match self.targets.as_slice() {
            [] => options,
            [all] if all == "all-linear" => options,
            names => options.targets(LoraTargets::Names(names.to_vec())),
        };
        Some(if self.parts.is_empty() { options } else { options.parts(self.parts.iter().copied()) })
    }
}

impl Default for Config {
    fn default() -> Self {
        let lora = LoraSettings {
            rank: None,
            alpha: None,
            dropout: 0.0,
            targets: Vec::new(),
            parts: Vec::new(),
            merge: false,
        };
        Self {
            model: None,
            family: Family::Gemma4,
            dtype: DType::F32,
            freeze: Vec::new(),
            recompute: false,
            lora,
            data: None,
            validation: None,
            validation_share: None,
            seq_len: 256,
            truncate: false,
            steps: None,
            epochs: None,
            batch_rows: 2,
            accumulate: 1,
            lr: None,
            schedule: ScheduleKind::Cosine,
            warmup: None,
            rate_floor: 0.05,
            max_grad_norm: 1.0,
            seed: 0,
            validate_every: None,
            optimizer: AdamWConfig::default(),
            device: ComputeDevice::Cpu,
            cp: 2,
            dp: None,
            zero: 0,
            deadline: Self::DEADLINE,
            comm: Transport::Auto,
            layout: LayoutKind::HeadTail,
            out: PathBuf::from("runs/finetune_gemma4"),
            save_every: None,
            keep: 2,
            tensorboard: false,
            trace: None,
            sources: Sources::default(),
            launch: Launch::alone(),
            held_out_rounds: 2,
        }
    }
}

impl Config {
    /// Types of weights.
    pub const DTYPES: [DType; 2] = [DType::F32, DType::BF16];
    /// Learning rate of fresh weights, unless one is given.
    pub const DEFAULT_RATE_FRESH: f64 = 2e-3;
    /// Learning rate of a checkpoint, unless one is given.
    pub const DEFAULT_RATE_CHECKPOINT: f64 = 1e-4;
    /// Learning rate of adapters, unless one is given.
    pub const DEFAULT_RATE_LORA: f64 = 2e-4;
    /// Steps on the digits, unless they are given.
    pub const DIGIT_STEPS: usize = 1500;
    /// Passes over a data file, unless steps or epochs are given.
    pub const DEFAULT_EPOCHS: usize = 3;
    /// Longest time that a rank waits for another one, unless it is given. Rank 0 may write a large checkpoint meanwhile; a
    /// rank that fails is noticed sooner.
    pub const DEADLINE: Duration = Duration::from_secs(3600);

    /// Replicas of the model; 1 where that is left to the number of processes and these are not known.
    pub fn replicas(&self) -> usize {
        self.dp.unwrap_or(1)
    }

    /// Ranks of the run.
    pub fn ranks(&self) -> usize {
        self.cp * self.replicas()
    }

    /// The defaults of the program that trains this family.
    pub fn of_family(family: Family) -> Self {
        Self { family, out: PathBuf::from(format!("runs/finetune_{family}")), ..Self::default() }
    }

    /// Sets one value from its text, by flag (`--steps`) or key (`train.steps`).
    ///
    /// # Errors
    /// There is no such setting, or the value cannot be used.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        Setting::find(name)?.set_flag(self, value)
    }

    /// The highest learning rate.
    pub fn rate(&self) -> f64 {
        let default = match (&self.model, self.lora.rank) {
            (_, Some(_)) => Self::DEFAULT_RATE_LORA,
            (Some(_), None) => Self::DEFAULT_RATE_CHECKPOINT,
            (None, None) => Self::DEFAULT_RATE_FRESH,
        };
        self.lr.unwrap_or(default)
    }

    /// Finds out what the names of model and data mean on this machine, as [`resolve_model`] and [`resolve_data`] do;
    /// pulls from the Hub what is not here. The other settings are checked first: a wrong one should not be told after a
    /// long pull.
    ///
    /// # Errors
    /// A setting that cannot be used; a model or a data set that cannot be had.
    pub fn resolve(&mut self, options: &HubOptions, progress: &mut dyn FnMut(&PullEvent)) -> Result<()> {
        self.validate_all_but_files()?;
        let mut sources = Sources::default();
        if let Some(model) = &self.model {
            sources.model = Some(match model.is_dir() {
                true => model.clone(),
                false => resolve_model(&model.to_string_lossy(), options, progress)?,
            });
        }
        let mut data = |flag: &'static str, path: &Option<PathBuf>| match path {
            Some(path) => resolve_data(&path.to_string_lossy(), options, progress)
                .map_err(|error| Error::DataHub { flag, error: error.into() }),
            None => Ok(Vec::new()),
        };
        sources.train = data("--data", &self.data)?;
        sources.validation = data("--validation", &self.validation)?;
        self.sources = sources;
        Ok(())
    }

    /// The folder of the checkpoint.
    pub fn model_folder(&self) -> Option<&Path> {
        self.sources.model.as_deref().or(self.model.as_deref())
    }

    /// The files with training samples.
    pub fn train_files(&self) -> Vec<PathBuf> {
        Self::files(&self.sources.train, &self.data)
    }

    /// The files with held-out samples.
    pub fn validation_files(&self) -> Vec<PathBuf> {
        Self::files(&self.sources.validation, &self.validation)
    }

    fn files(resolved: &[PathBuf], given: &Option<PathBuf>) -> Vec<PathBuf> {
        match resolved {
            [] => given.iter().cloned().collect(),
            resolved => resolved.to_vec(),
        }
    }
}
