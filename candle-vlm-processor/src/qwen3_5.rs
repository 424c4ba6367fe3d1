//! What is Qwen 3.5's own: image settings, the rule for sizes, the order of patches, and positions.
//!
//! The positions are index arithmetic without tensors, so that a model and a training recipe can both use them.

mod grid;
mod patches;
mod positions;
mod settings;
mod size;

use std::path::Path;

pub use positions::{image_runs, mrope_positions};
pub use settings::Qwen3_5ImageSettings;

use crate::chat::ChatEncoder;
use crate::error::Result;
use crate::processor::Processor;

/// Qwen 3.5's processor.
pub type Qwen3_5Processor = Processor<Qwen3_5ImageSettings>;

impl Qwen3_5Processor {
    /// Reads template, tokenizer and image settings of a checkpoint folder.
    ///
    /// # Errors
    /// A file is absent or broken, a setting is not supported, or a token is not in the vocabulary.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Self::new(ChatEncoder::from_folder(folder)?, Qwen3_5ImageSettings::from_folder(folder)?)
    }
}
