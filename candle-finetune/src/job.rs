//! What a run works on: model and data, checked and loaded before any rank starts.

use std::path::PathBuf;

use candle_core::{DType, Device};
use candle_gemma4::{LoadOptions, Weights};
use candle_vlm_processor::TextTokenizer;

use crate::config::Config;
use crate::digit_task::DigitTask;
use crate::encoder::Encoder;
use crate::error::{Error, Result};
use crate::jsonl::Lines;
use crate::packing::{Batch, Packer};
use crate::sample::Source;
use crate::small_model;

/// Seed of the held-out conversations: the same in every run, so that accuracies compare.
const HELD_OUT_SEED: u64 = 0x0d19_1757;

#[derive(Debug)]
enum Data {
    Digits(Box<DigitTask>),
    Lines(Box<Lines>),
}

/// Model and data of a run; ranks share it.
#[derive(Debug)]
pub struct Job {
    /// Configuration of the model.
    pub model: candle_gemma4::Config,
    folder: Option<PathBuf>,
    data: Data,
}

impl Job {
    /// Reads and checks everything that a run needs but the weights.
    ///
    /// # Errors
    /// A setting, the checkpoint folder or the data cannot be used.
    pub fn prepare(config: &Config) -> Result<Self> {
        config.validate()?;
        let model = match &config.model {
            Some(folder) => candle_gemma4::Config::from_folder(folder)?,
            None => small_model::config()?,
        };
        let data = match (&config.model, &config.data) {
            (Some(folder), Some(path)) => {
                let encoder = Encoder::from_folder(folder, &model)?;
                Data::Lines(Box::new(Lines::read(path, encoder)?.fit(config.seq_len, config.truncate)?))
            }
            (Some(folder), None) => Data::digits(config, &model, &TextTokenizer::from_folder(folder)?)?,
            (None, _) => {
                let tokenizer = TextTokenizer::from_json("built-in tokenizer", &small_model::tokenizer_json())?;
                Data::digits(config, &model, &tokenizer)?
            }
        };
        Ok(Self { model, folder: config.model.clone(), data })
    }

    /// The starting weights, in f32 on the CPU; the same numbers on every rank. Parts in `config.freeze` are constants.
    ///
    /// # Errors
    /// The checkpoint's tensors are not those of its configuration, or all of them are frozen.
    pub fn weights(&self, config: &Config) -> Result<Weights> {
        let Some(folder) = &self.folder else {
            return Ok(Weights::random(&self.model, DType::F32, &Device::Cpu, config.seed)?);
        };
        let options = LoadOptions::new().freeze(config.freeze.iter().copied());
        let weights = Weights::load_with(folder, &self.model, DType::F32, &Device::Cpu, &options)?;
        match weights.variables().is_empty() {
            true => Err(Error::flag(
                "--freeze",
                config.frozen_names(),
                "what leaves a part of the model to train",
                "leave a part out",
            )),
            false => Ok(weights),
        }
    }

    /// The stream of training batches; the same on every rank.
    pub fn training(&self, config: &Config) -> Packer<'_> {
        let source: Box<dyn Source> = match &self.data {
            Data::Digits(task) => Box::new(task.training(config.seed)),
            Data::Lines(lines) => Box::new(lines.training(config.seed)),
        };
        Packer::new(source, &self.model, config.batch_rows, config.seq_len)
    }

    /// All held-out batches, each held-out digit once per round; empty for a JSONL file.
    ///
    /// # Errors
    /// A conversation does not fit a row.
    pub fn held_out(&self, config: &Config) -> Result<Vec<Batch>> {
        let Data::Digits(task) = &self.data else { return Ok(Vec::new()) };
        let source = Box::new(task.held_out(HELD_OUT_SEED));
        let mut packer = Packer::new(source, &self.model, config.batch_rows, config.seq_len);
        let mut batches = Vec::new();
        for _ in 0..config.held_out_rounds {
            while let Some(batch) = packer.next_batch()? {
                batches.push(batch);
            }
        }
        Ok(batches)
    }

    /// The checkpoint folder that training began from.
    pub fn folder(&self) -> Option<&PathBuf> {
        self.folder.as_ref()
    }

    /// What a user should know about the data: samples that were left out or cut, fields that are not read.
    pub fn notices(&self) -> Vec<String> {
        self.lines().map(Lines::notices).unwrap_or_default()
    }

    /// Samples left out and samples cut, for the length of a row.
    pub fn samples_dropped_and_cut(&self) -> (usize, usize) {
        self.lines().map_or((0, 0), |lines| (lines.fitted().dropped(), lines.fitted().cut.len()))
    }

    fn lines(&self) -> Option<&Lines> {
        match &self.data {
            Data::Digits(_) => None,
            Data::Lines(lines) => Some(lines),
        }
    }

    /// What is trained on, in a few words.
    pub fn data_summary(&self) -> String {
        match &self.data {
            Data::Digits(task) => {
                let digits = task.digits();
                format!("{} digits ({} held out)", digits.train.len(), digits.held_out.len())
            }
            Data::Lines(lines) => format!("{} samples", lines.len()),
        }
    }
}

impl Data {
    fn digits(config: &Config, model: &candle_gemma4::Config, tokenizer: &TextTokenizer) -> Result<Self> {
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
