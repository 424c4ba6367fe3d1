//! What is Gemma 4's own: settings, the rule for sizes, patches.

mod patches;
mod settings;
mod size;

use std::path::Path;

pub use settings::{Gemma4ImageSettings, PatchLayout};

use crate::chat::ChatEncoder;
use crate::error::Result;
use crate::processor::Processor;

/// Gemma 4's processor.
pub type Gemma4Processor = Processor<Gemma4ImageSettings>;

impl Gemma4Processor {
    /// Reads template, tokenizer and image settings of a checkpoint folder.
    ///
    /// # Errors
    /// A file is absent or broken, a setting is not supported, or a token is not named.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Self::new(ChatEncoder::from_folder(folder)?, Gemma4ImageSettings::from_folder(folder)?)
    }
}
