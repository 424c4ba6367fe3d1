//! The parts of a model that can be loaded frozen.

use std::fmt;

/// A part of a model, told by the names of its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The decoder: embedding tables, layers, final norm, head.
    Text,
    /// The vision tower and the projection of its features; of a model without a tower, the embedder of patches.
    Vision,
    /// The audio tower and the projection of its features; of a model without a tower, the projection of frames.
    Audio,
}

impl Part {
    /// All parts.
    pub const ALL: [Self; 3] = [Self::Text, Self::Vision, Self::Audio];

    /// The part that a tensor belongs to, by its name in a checkpoint.
    pub fn of(name: &str) -> Self {
        let told = name.split('.').find_map(|segment| match segment {
            "vision_tower" | "embed_vision" | "vision_embedder" | "visual" => Some(Self::Vision),
            "audio_tower" | "embed_audio" => Some(Self::Audio),
            _ => None,
        });
        told.unwrap_or(Self::Text)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Vision => "vision",
            Self::Audio => "audio",
        })
    }
}
