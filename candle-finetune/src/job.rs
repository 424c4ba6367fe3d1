//! What a run works on: model and data, checked and loaded before any rank starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use candle_cp_layers::{LoadOptions, LoraReport, Part, Weights};
use candle_vlm_processor::TextTokenizer;

use crate::config::Config;
use crate::cpus::Cpus;
use crate::digit_task::DigitTask;
use crate::encoder::Encoder;
use crate::error::{Error, Result};
use crate::family::{Family, VlmConfig};
use crate::jsonl::{HeldOut, Lines, counted};
use crate::packing::{Batch, Packer};
use crate::plan::{EpochPlan, Plan};
use crate::sample::Source;
use crate::saves::State;
use crate::schedule::Schedule;
use crate::small_model;

/// Seed of the held-out conversations: the same in every run, so that accuracies compare.
const HELD_OUT_SEED: u64 = 0x0d19_1757;

/// Most steps of the warm-up, unless it is given.
const LONGEST_WARMUP: usize = 30;

#[derive(Debug)]
enum Data {
    Digits(Box<DigitTask>),
    Lines(Box<Samples>),
}

/// A data file.
#[derive(Debug)]
struct Samples {
    train: Lines,
    /// Held out.
    validation: Option<Lines>,
    plan: Plan,
    /// Of what is trained on.
    fingerprint: String,
    /// Of what is held out.
    held_out: Option<String>,
}

/// Model and data of a run; ranks share it.
#[derive(Debug)]
pub struct Job {
    /// Configuration of the model.
    pub model: Arc<dyn VlmConfig>,
    family: Family,
    device: Device,
    folder: Option<PathBuf>,
    data: Data,
    steps: usize,
    /// Of the processes of all ranks.
    pub(crate) cpus: Cpus,
}

impl Job {
    /// Reads and checks everything that a run needs but the weights.
    ///
    /// # Errors
    /// A setting, the checkpoint folder or the data cannot be used.
    pub fn prepare(config: &Config) -> Result<Self> {
        config.validate()?;
        Self::read(config, model(config)?, None)
    }

    /// The same, after a look at the headers of the weights: what is wrong with them, with what is frozen or with where
    /// adapters go should be told before long work and before anything is written. `saved` is the checkpoint that the
    /// run goes on from; `device` is open already.
    pub(crate) fn prepare_with_weights(config: &Config, saved: Option<&Path>, device: Option<&Device>) -> Result<Self> {
        config.validate()?;
        let model = model(config)?;
        check_weights(config, model.as_ref(), saved)?;
        Self::read(config, model, device)
    }

    fn read(config: &Config, model: Arc<dyn VlmConfig>, device: Option<&Device>) -> Result<Self> {
        check_device(config, model.as_ref())?;
        let device = device.map_or_else(|| config.device.open(), |device| Ok(device.clone()))?;
        let data = match (config.model_folder(), &config.data) {
            (Some(folder), Some(_)) => {
                let encoder = Arc::new(Encoder::from_folder(folder, model.clone())?);
                Data::Lines(Box::new(Samples::read(encoder, config)?))
            }
            (Some(folder), None) => Data::digits(config, model.as_ref(), &TextTokenizer::from_folder(folder)?)?,
            (None, _) => {
                let tokenizer =
                    TextTokenizer::from_json("built-in tokenizer", &small_model::tokenizer_json(config.family))?;
                Data::digits(config, model.as_ref(), &tokenizer)?
            }
        };
        let steps = match (&data, config.steps) {
            (_, Some(steps)) => steps,
            (Data::Lines(samples), None) => samples.plan.steps(),
            (Data::Digits(_), None) => Config::DIGIT_STEPS,
        };
        config.check_steps(steps)?;
        Ok(Self {
            model,
            family: config.family,
            device,
            folder: config.model_folder().map(Path::to_path_buf),
            data,
            steps,
            cpus: Cpus::of_this_process(&config.launch),
        })
    }

    /// The starting weights on the job's device, the same numbers on every rank. What `config.freeze` names is constant, and beside
    /// adapters everything else.
    ///
    /// # Errors
    /// The checkpoint's tensors are not those of its configuration, all of them are frozen, or adapters fit nowhere.
    pub fn weights(&self, config: &Config) -> Result<Weights> {
        Ok(self.start(config)?.0)
    }

    /// The same, and where adapters went.
    pub(crate) fn start(&self, config: &Config) -> Result<(Weights, Option<LoraReport>)> {
        match &self.folder {
            None => Ok((Weights::random(self.model.as_ref(), config.dtype, &self.device, config.seed)?, None)),
            Some(folder) => self.load(config, folder, None),
        }
    }

    /// The weights in a folder that [`Job::write_state`] wrote.
    pub(crate) fn goes_on(&self, config: &Config, saved: &Path) -> Result<(Weights, Option<LoraReport>)> {
        match (&self.folder, config.lora.rank) {
            (Some(folder), Some(_)) => self.load(config, folder, Some(saved)),
            _ => self.load(config, saved, None),
        }
    }

    fn load(&self, config: &Config, folder: &Path, adapter: Option<&Path>) -> Result<(Weights, Option<LoraReport>)> {
        let load = |options: &LoadOptions| {
            Weights::load_with(folder, self.model.as_ref(), config.dtype, &self.device, options)
        };
        let Some(lora) = config.lora.options() else {
            let weights = load(&freeze(&config.freeze)?)?;
            return match weights.variables().is_empty() {
                true => Err(all_frozen(config)),
                false => Ok((weights, None)),
            };
        };
        let mut weights = load(&LoadOptions::new().freeze_matching(["*"])?)?;
        let report = match adapter {
            Some(adapter) => weights.load_lora(adapter, self.model.as_ref())?,
            None => weights.add_lora(self.model.as_ref(), &lora, config.seed)?,
        };
        Ok((weights, Some(report)))
    }

    /// The stream of training batches; the same on every rank.
    pub fn training(&self, config: &Config) -> Packer<'_> {
        let source: Box<dyn Source> = match &self.data {
            Data::Digits(task) => Box::new(task.training(config.seed)),
            Data::Lines(samples) => Box::new(samples.train.training(config.seed)),
        };
        Packer::new(source, self.model.as_ref(), config.batch_rows, config.seq_len)
    }

    /// Family of the built-in model, where that is trained.
    pub(crate) fn family(&self) -> Family {
        self.family
    }

    /// Where the model runs; opened once.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Optimizer steps of the run.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The learning rate of every step.
    pub fn schedule(&self, config: &Config) -> Schedule {
        let warmup = config.warmup.unwrap_or(LONGEST_WARMUP.min(self.steps.div_ceil(10)));
        Schedule { kind: config.schedule, peak: config.rate(), warmup, steps: self.steps, floor: config.rate_floor }
    }

    /// Steps between two validations; `None` if no sample of a data file is held out.
    pub fn validate_every(&self, config: &Config) -> Option<usize> {
        self.lines()?.validation.as_ref().map(|_| config.validate_every.unwrap_or(self.steps.div_ceil(10)))
    }

    /// All held-out batches, made as they are asked for: of the digits each one once per round, of a data file what is
    /// held out of it. A batch is an error if a picture cannot be read any more.
    pub fn held_out<'a>(&'a self, config: &Config) -> impl Iterator<Item = Result<Batch>> + use<'a> {
        self.held_out_part(config, 0, 1)
    }

    /// Of all held-out batches every `parts`th, beginning with number `part`.
    pub(crate) fn held_out_part<'a>(
        &'a self,
        config: &Config,
        part: usize,
        parts: usize,
    ) -> impl Iterator<Item = Result<Batch>> + use<'a> {
        let source: Option<Box<dyn Source + 'a>> = match &self.data {
            Data::Digits(task) => Some(Box::new(task.held_out(HELD_OUT_SEED))),
            Data::Lines(samples) => {
                samples.validation.as_ref().map(|lines| Box::new(lines.in_order()) as Box<dyn Source>)
            }
        };
        let mut rounds = match (&self.data, &source) {
            (_, None) => 0,
            (Data::Digits(_), _) => config.held_out_rounds,
            (Data::Lines(_), _) => 1,
        };
        let mut packer =
            source.map(|source| Packer::new(source, self.model.as_ref(), config.batch_rows, config.seq_len));
        let mut number = 0;
        std::iter::from_fn(move || {
            let packer = packer.as_mut()?;
            while rounds > 0 {
                let there = match number % parts == part {
                    false => packer.skip_batch(),
                    true => match packer.next_batch().transpose() {
                        None => Ok(false),
                        found => {
                            number += 1;
                            return found;
                        }
                    },
                };
                match there {
                    Ok(true) => number += 1,
                    Ok(false) => rounds -= 1,
                    Err(error) => return Some(Err(error)),
                }
            }
            None
        })
    }

    /// The checkpoint folder that training began from.
    pub fn folder(&self) -> Option<&PathBuf> {
        self.folder.as_ref()
    }

    /// What a user should know about machines and data: CPUs that lie idle or are fought over, samples that were left out
    /// or cut, fields that are not read.
    pub fn notices(&self) -> Vec<String> {
        let mut notices = self.cpus.notices();
        let Some(samples) = self.lines() else { return notices };
        let held_out = samples.validation.iter().flat_map(|lines| lines.notices());
        notices.extend(samples.train.notices());
        notices.extend(held_out.map(|notice| format!("held out: {notice}")));
        notices
    }

    /// Tells training data apart: all tokens of all samples and what is learned of them.
    pub fn fingerprint(&self) -> &str {
        match &self.data {
            Data::Digits(_) => "digits",
            Data::Lines(samples) => &samples.fingerprint,
        }
    }

    /// The same of held-out data; empty if there is none.
    pub(crate) fn held_out_fingerprint(&self) -> &str {
        self.lines().and_then(|samples| samples.held_out.as_deref()).unwrap_or_default()
    }

    /// Whether a run can go on with this data.
    pub(crate) fn check_resumable(&self, state: &State) -> Result<()> {
        match &self.data {
            Data::Lines(samples) if samples.fingerprint != state.data => {
                Err(Error::DataChanged { path: samples.train.path().to_path_buf() })
            }
            _ if self.steps < state.step => {
                let allowed = format!("at least {}, the steps that are done", state.step);
                let fix = "leave --steps out to end with the steps that were wanted, or give more to train on";
                Err(Error::flag("--steps", self.steps, allowed, fix))
            }
            _ => Ok(()),
        }
    }

    /// Samples left out and samples cut, for the length of a row.
    pub fn samples_dropped_and_cut(&self) -> (usize, usize) {
        self.lines().map_or((0, 0), |samples| {
            let fitted = samples.train.fitted();
            (fitted.dropped(), fitted.cut.len())
        })
    }

    fn lines(&self) -> Option<&Samples> {
        match &self.data {
            Data::Digits(_) => None,
            Data::Lines(samples) => Some(samples),
        }
    }

    /// What is trained on, in a line: samples, rows after packing, batches and steps.
    pub fn data_summary(&self, config: &Config) -> String {
        match &self.data {
            Data::Digits(task) => {
                let digits = task.digits();
                format!("{} digits ({} held out)", digits.train.len(), digits.held_out.len())
            }
            Data::Lines(samples) => samples.summary(config),
        }
    }
}

impl Samples {
    fn read(encoder: Arc<Encoder>, config: &Config) -> Result<Self> {
        let read = |files: &[PathBuf]| Lines::read_all(files, encoder.clone())?.fit(config.seq_len, config.truncate);
        let all = read(&config.train_files())?;
        let (train, validation) = match (config.validation_files().as_slice(), config.validation_share) {
            ([], None) => (all, None),
            ([], Some(share)) => {
                let (train, held_out) = all.split(HeldOut::Share(share), config.seed)?;
                (train, Some(held_out))
            }
            (files, _) => (all, Some(read(files)?)),
        };
        let plan = Plan::make(&train, config);
        let fingerprint = train.fingerprint();
        let held_out = validation.as_ref().map(Lines::fingerprint);
        Ok(Self { train, validation, plan, fingerprint, held_out })
    }

    fn summary(&self, config: &Config) -> String {
        let EpochPlan { samples, batches, rows, tokens, steps } = self.plan.first();
        let held_out = self.validation.as_ref().map_or(String::new(), |lines| format!(", {} held out", lines.len()));
        format!(
            "{}{held_out}; an epoch packs them into {} of {} tokens ({:.0} % full): {} of {}, {} of {}",
            counted(samples, "sample"),
            counted(rows, "row"),
            config.seq_len,
            100.0 * tokens as f64 / (rows * config.seq_len).max(1) as f64,
            counted(batches, "batch"),
            counted(config.batch_rows, "row"),
            counted(steps, "step"),
            counted(config.accumulate, "batch")
        )
    }
}

impl Data {
    fn digits(config: &Config, model: &dyn VlmConfig, tokenizer: &TextTokenizer) -> Result<Self> {
        let task = DigitTask::new(model, tokenizer)?;
        let longest = task.longest();
        match config.seq_len < longest {
            true => Err(Error::flag(
                "--seq-len",
                config.seq_len,
                format!("at least {longest}, the longest conversation about digits"),
                format!("use --seq-len {} or more", longest.next_multiple_of(64)),
            )),
            false => Ok(Self::Digits(Box::new(task))),
        }
    }
}

pub(crate) fn model(config: &Config) -> Result<Arc<dyn VlmConfig>> {
    match config.model_folder() {
        Some(folder) => Family::read(folder),
        None => small_model::config(config.family),
    }
}

pub(crate) fn check_device(config: &Config, model: &dyn VlmConfig) -> Result<()> {
    model.check_device(config.device).map_err(|reason| {
        let fix = "leave --device out to train on the CPU";
        Error::flag("--device", config.device, format!("cpu for this model: {reason}"), fix)
    })
}

fn check_weights(config: &Config, model: &dyn VlmConfig, saved: Option<&Path>) -> Result<()> {
    let lora = config.lora.options();
    // A checkpoint of a run with adapters has nothing else: the weights are those that the run began with.
    let folder = match (config.model_folder(), saved) {
        (Some(folder), Some(_)) if lora.is_some() => folder,
        (_, Some(saved)) => saved,
        (Some(folder), None) => folder,
        (None, None) => return Ok(()),
    };
    let trained = freeze(&config.freeze).and_then(|options| Ok(Weights::check(folder, model, &options)?));
    let trained = trained.map_err(|error| match error {
        Error::Model(candle_cp_layers::Error::FreezePattern { pattern, reason }) => {
            Error::flag("--freeze", pattern, "text, vision, audio, embeddings, or patterns of tensor names", reason)
        }
        error => error,
    })?;
    match lora {
        Some(lora) => Ok(Weights::check_lora(model, &lora)?),
        None if trained == 0 => Err(all_frozen(config)),
        None => Ok(()),
    }
}

fn all_frozen(config: &Config) -> Error {
    let allowed = "what leaves a part of the model to train";
    Error::flag("--freeze", config.freeze.join(","), allowed, "leave a part out")
}

/// Parts by their names, `embeddings`, and patterns of tensor names.
fn freeze(names: &[String]) -> Result<LoadOptions> {
    let part = |name: &str| Part::ALL.into_iter().find(|part| part.to_string() == name);
    let patterns = names.iter().filter(|name| part(name).is_none()).map(|name| match name.as_str() {
        "embeddings" => "*embed_tokens*",
        pattern => pattern,
    });
    Ok(LoadOptions::new().freeze(names.iter().filter_map(|name| part(name))).freeze_matching(patterns)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Told before data is looked for: there is none.
    #[test]
    fn a_device_that_the_model_has_no_kernels_for_is_refused() {
        let config = |family| Config {
            device: "cuda:1".parse().unwrap(),
            model: Some(PathBuf::from("missing")),
            data: Some(PathBuf::from("missing.jsonl")),
            ..Config::of_family(family)
        };
        let read = |family| {
            let model = small_model::config(family).unwrap();
            Job::read(&config(family), model, Some(&Device::Cpu)).unwrap_err()
        };
        let error = read(Family::Qwen3_5);
        let text = error.to_string();
        assert!(error.is_usage() && text.starts_with("--device \"cuda:1\": allowed is cpu for this model: "), "{text}");
        assert!(text.contains("delta rule") && text.contains("no CUDA kernels yet; leave --device out"), "{text}");
        let text = read(Family::Gemma4).to_string();
        assert!(!text.contains("--device") && text.contains("missing"), "{text}");
    }
}
