//! Released models by short names.

use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::family::{Family, VlmConfig};

/// Short name, full name, family and sizes.
const RELEASED: [(&str, &str, Family, &str); 8] = [
    ("e2b", "Gemma 4 E2B", Family::Gemma4, include_str!("configs/gemma-4-e2b.json")),
    ("e4b", "Gemma 4 E4B", Family::Gemma4, include_str!("configs/gemma-4-e4b.json")),
    ("26b-a4b", "Gemma 4 26B-A4B", Family::Gemma4, include_str!("configs/gemma-4-26b-a4b.json")),
    ("31b", "Gemma 4 31B", Family::Gemma4, include_str!("configs/gemma-4-31b.json")),
    ("qwen-9b", "Qwen 3.5 9B", Family::Qwen3_5, include_str!("configs/qwen-3.5-9b.json")),
    ("qwen-27b", "Qwen 3.5 27B", Family::Qwen3_5, include_str!("configs/qwen-3.5-27b.json")),
    ("qwen-35b-a3b", "Qwen 3.5 35B-A3B", Family::Qwen3_5, include_str!("configs/qwen-3.5-35b-a3b.json")),
    ("qwen-122b-a10b", "Qwen 3.5 122B-A10B", Family::Qwen3_5, include_str!("configs/qwen-3.5-122b-a10b.json")),
];

/// A model to plan for.
#[derive(Debug, Clone)]
pub struct PlannedModel {
    /// For people.
    pub name: String,
    /// Its sizes.
    pub config: Arc<dyn VlmConfig>,
}

impl PlannedModel {
    /// Short names of released models.
    pub fn names() -> impl Iterator<Item = &'static str> {
        RELEASED.iter().map(|(short, ..)| *short)
    }

    /// A released model by its short name, else the model of a checkpoint folder or of a `config.json`.
    ///
    /// # Errors
    /// There is no such name or file, or the model crate refuses the configuration.
    pub fn find(name: &str) -> Result<Self> {
        if let Some((_, title, family, json)) = RELEASED.iter().find(|(short, ..)| *short == name) {
            return Ok(Self { name: (*title).to_string(), config: family.config(json)? });
        }
        let path = Path::new(name);
        if path.is_file() {
            let failed = |cause| candle_cp_layers::Error::Io { action: "read", path: path.to_path_buf(), cause };
            let config = Family::of_config(&std::fs::read_to_string(path).map_err(failed)?, path)?;
            return Ok(Self { name: config.title(), config });
        }
        if !path.is_dir() {
            let names: Vec<&str> = Self::names().collect();
            let allowed = format!("{}, a checkpoint folder, or a config.json", names.join(", "));
            return Err(Error::flag("--model", name, allowed, "name a released model or a folder that exists"));
        }
        let config = Family::read(path)?;
        Ok(Self { name: config.title(), config })
    }
}
