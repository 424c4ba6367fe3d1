//! What is Gemma 4's own: settings, the rule for sizes, patches, and the processor.

mod patches;
mod processor;
mod settings;
mod size;

pub use patches::ImagePatches;
pub use processor::{Gemma4Processor, Gemma4Sample, Request};
pub use settings::{Gemma4ImageSettings, PatchLayout};
