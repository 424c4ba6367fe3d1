//! What a run leaves: the model, or adapters, or both as one.

use std::path::{Path, PathBuf};

use candle_cp_layers::{SaveOptions, Weights};

use crate::checkpoint;
use crate::config::Config;
use crate::error::Result;
use crate::job::Job;
use crate::run::{ADAPTER_FOLDER, CHECKPOINT_FOLDER};
use crate::saves;

impl Job {
    /// Writes what a run goes on from: the model, or adapters alone.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write_state(&self, config: &Config, weights: &Weights, folder: &Path) -> Result<()> {
        match config.lora.rank {
            Some(_) => Ok(weights.save_adapter(folder, &self.base_name(config))?),
            None => checkpoint::write(folder, self, weights),
        }
    }

    /// Writes what a run is for: the model, or adapters, and with `lora.merge` the model with them merged.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write_outputs(&self, config: &Config, weights: &Weights) -> Result<()> {
        let model = config.out.join(CHECKPOINT_FOLDER);
        if config.lora.rank.is_none() {
            return checkpoint::save(&model, self, weights);
        }
        saves::replace(&config.out.join(ADAPTER_FOLDER), |folder| {
            Ok(weights.save_adapter(folder, &self.base_name(config))?)
        })?;
        match config.lora.merge {
            true => saves::replace(&model, |folder| {
                weights.save_merged(folder, self.model.as_ref(), &SaveOptions::default())?;
                checkpoint::write_companions(folder, self)
            }),
            false => Ok(()),
        }
    }

    /// Whether [`Job::write_outputs`] will find room: what is in the way should be told before training, not after it.
    pub(crate) fn check_outputs(&self, config: &Config) -> Result<()> {
        self.outputs(config).iter().try_for_each(|(_, folder)| saves::check_place(folder))
    }

    /// The folders that [`Job::write_outputs`] writes, by what they are.
    pub fn outputs(&self, config: &Config) -> Vec<(&'static str, PathBuf)> {
        let model = config.out.join(CHECKPOINT_FOLDER);
        match (config.lora.rank, config.lora.merge) {
            (None, _) => vec![("model", model)],
            (Some(_), false) => vec![("adapter", config.out.join(ADAPTER_FOLDER))],
            (Some(_), true) => vec![("adapter", config.out.join(ADAPTER_FOLDER)), ("merged", model)],
        }
    }

    /// What adapters belong to, as the user gave it.
    fn base_name(&self, config: &Config) -> String {
        config.model.as_ref().map(|model| model.display().to_string()).unwrap_or_default()
    }
}
