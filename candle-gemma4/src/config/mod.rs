//! `config.json` of a checkpoint: every setting is read from it, and what this crate cannot run is refused.
//!
//! A field that is absent takes the value that the library which writes these files gives it; sizes, rotary
//! settings and norm constants have no such default here and are required.

mod audio;
mod layers;
mod moe;
mod rope;
mod text;
mod unified;
mod vision;

use std::path::Path;

use serde_json::Value;

pub use self::audio::AudioConfig;
pub use self::moe::MoeConfig;
pub use self::rope::{RopeConfig, RopeKind};
pub use self::text::{LayerConfig, LayerKind, PerLayerConfig, TextConfig};
pub use self::unified::{FrameEmbedderConfig, PatchEmbedderConfig};
pub use self::vision::VisionConfig;
use candle_cp_layers::{CONFIG_FILE, Error, Fields, Placeholders, Result};

/// What a checkpoint holds, by its `model_type`; decides on the layout of `config.json` and on tensor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `gemma4` (`Gemma4ForConditionalGeneration`): a text model in `text_config`, towers beside it; the text model's
    /// tensors are under `model.language_model`.
    Multimodal,
    /// `gemma4_text` (`Gemma4ForCausalLM`): the file is the text model's configuration; its tensors are under `model`.
    TextOnly,
    /// `gemma4_unified` (`Gemma4UnifiedForConditionalGeneration`): as `gemma4`, but without towers: patches of images go
    /// through norms and projections into the text model.
    Unified,
    /// `gemma4_unified_text` (`Gemma4UnifiedForCausalLM`): the text model of a unified one alone.
    UnifiedTextOnly,
}

impl Architecture {
    const ALL: [Self; 4] = [Self::Multimodal, Self::TextOnly, Self::Unified, Self::UnifiedTextOnly];

    /// The `model_type` of the whole checkpoint.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Multimodal => "gemma4",
            Self::TextOnly => "gemma4_text",
            Self::Unified => "gemma4_unified",
            Self::UnifiedTextOnly => "gemma4_unified_text",
        }
    }

    /// The `model_type` of its text model.
    pub fn text_model_type(self) -> &'static str {
        match self.is_unified() {
            false => Self::TextOnly.model_type(),
            true => Self::UnifiedTextOnly.model_type(),
        }
    }

    /// Whether there is nothing but the text model.
    pub fn is_text_only(self) -> bool {
        matches!(self, Self::TextOnly | Self::UnifiedTextOnly)
    }

    /// Whether it is of the family without towers.
    pub fn is_unified(self) -> bool {
        matches!(self, Self::Unified | Self::UnifiedTextOnly)
    }
}

/// A Gemma 4 model: text decoder, and the towers it has.
///
/// Made from JSON only, so that every value has passed the checks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Text only, or with towers.
    pub architecture: Architecture,
    /// The text decoder.
    pub text: TextConfig,
    /// The vision tower; `None` for a model without one.
    pub vision: Option<VisionConfig>,
    /// What a unified model has in the place of a vision tower.
    pub patch_embedder: Option<PatchEmbedderConfig>,
    /// The audio tower; `None` for a model without one.
    pub audio: Option<AudioConfig>,
    /// What a unified model has in the place of an audio tower.
    pub frame_embedder: Option<FrameEmbedderConfig>,
    /// Placeholder of one image feature. A text-only checkpoint has no placeholders: there, all ids are text.
    pub image_token_id: u32,
    /// Placeholder of one video feature.
    pub video_token_id: Option<u32>,
    /// Placeholder of one audio feature.
    pub audio_token_id: Option<u32>,
    /// Token before an image's placeholders.
    pub boi_token_id: u32,
    /// Token after an image's placeholders.
    pub eoi_token_id: u32,
    /// Tokens that end an answer; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// The head's matrix is the embedding table.
    pub tie_word_embeddings: bool,
    json: String,
}

impl Config {
    /// Reads `config.json` in a checkpoint folder.
    ///
    /// # Errors
    /// As [`Config::from_json`], and if the file cannot be read.
    pub fn from_folder(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG_FILE);
        let text = std::fs::read_to_string(&path);
        let text = text.map_err(|cause| Error::Io { action: "read", path: path.clone(), cause })?;
        Self::parse(&path.display().to_string(), &text)
    }

    /// Reads a configuration from the text of a `config.json`.
    ///
    /// # Errors
    /// The text is not JSON, lacks required fields (all of them are named), or has a value that this crate
    /// cannot run (the field, the value and what is allowed are named).
    pub fn from_json(text: &str) -> Result<Self> {
        Self::parse("the configuration", text)
    }

    /// The text it was made from, unchanged.
    pub fn to_json(&self) -> String {
        self.json.clone()
    }

    /// What is no text.
    pub fn placeholders(&self) -> Placeholders {
        match self.architecture.is_text_only() {
            true => Placeholders::default(),
            false => Placeholders {
                image: Some(self.image_token_id),
                video: self.video_token_id,
                audio: self.audio_token_id,
                has_audio: self.audio.is_some() || self.frame_embedder.is_some(),
            },
        }
    }

    fn parse(what: &str, text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(|cause| Error::Json { what: what.to_string(), cause })?;
        let top = Fields::new("", &value)?;
        let architecture = read_architecture(&top)?;
        let (text_fields, vision_value, audio_value) = match architecture.is_text_only() {
            true => (top, None, None),
            false => {
                let missing = top.missing(&["text_config"]);
                let value = top.get("text_config").ok_or(Error::MissingFields { fields: missing })?;
                (Fields::new("text_config", value)?, top.get("vision_config"), top.get("audio_config"))
            }
        };
        let vision_fields = vision_value.map(|value| Fields::new("vision_config", value)).transpose()?;
        let audio_fields = audio_value.map(|value| Fields::new("audio_config", value)).transpose()?;

        let mut missing = TextConfig::missing(&text_fields);
        missing.extend(vision_fields.iter().flat_map(|fields| match architecture.is_unified() {
            true => PatchEmbedderConfig::missing(fields),
            false => VisionConfig::missing(fields),
        }));
        if vision_fields.is_some() {
            missing.extend(top.missing(&["image_token_id"]));
        }
        missing.extend(audio_fields.iter().flat_map(|fields| match architecture.is_unified() {
            true => FrameEmbedderConfig::missing(fields),
            false => AudioConfig::missing(fields),
        }));
        let audio_token_id = top.token_or("audio_token_id", 258_881)?;
        if audio_fields.is_some() && audio_token_id.is_none() {
            missing.push("audio_token_id".to_string());
        }
        if !missing.is_empty() {
            return Err(Error::MissingFields { fields: missing });
        }
        let eos_token_ids = match top.get("eos_token_id").is_some() {
            true => top.tokens("eos_token_id")?,
            false => text_fields.tokens("eos_token_id")?,
        };
        let (vision, audio) = (vision_fields.as_ref(), audio_fields.as_ref());
        let (tower, embedder, audio_tower, frames) = match architecture.is_unified() {
            true => (None, vision, None, audio),
            false => (vision, None, audio, None),
        };
        let token = |field: &str, default: u32| Ok::<_, Error>(top.token(field)?.unwrap_or(default));
        Ok(Self {
            architecture,
            text: TextConfig::read(&text_fields, architecture)?,
            vision: tower.map(VisionConfig::read).transpose()?,
            patch_embedder: embedder.map(PatchEmbedderConfig::read).transpose()?,
            audio: audio_tower.map(AudioConfig::read).transpose()?,
            frame_embedder: frames.map(FrameEmbedderConfig::read).transpose()?,
            image_token_id: token("image_token_id", 258_880)?,
            video_token_id: top.token_or("video_token_id", 258_884)?,
            audio_token_id,
            boi_token_id: token("boi_token_id", 255_999)?,
            eoi_token_id: token("eoi_token_id", 258_882)?,
            eos_token_ids,
            tie_word_embeddings: top.flag("tie_word_embeddings", true)?,
            json: text.to_string(),
        })
    }
}

fn read_architecture(top: &Fields) -> Result<Architecture> {
    let Some(name) = top.text("model_type")? else {
        return Err(Error::MissingFields { fields: vec!["model_type".to_string()] });
    };
    let Some(architecture) = Architecture::ALL.into_iter().find(|known| known.model_type() == name) else {
        let allowed = Architecture::ALL.map(|known| format!("\"{}\"", known.model_type())).join(", ");
        return Err(top.refuse("model_type", format!("this model family is not supported yet; allowed: {allowed}")));
    };
    for tower in ["vision_config", "audio_config"] {
        if architecture.is_text_only() && top.get(tower).is_some() {
            return Err(Error::Config {
                field: tower.to_string(),
                value: "an object".to_string(),
                reason: format!("a text-only model (model_type \"{name}\") has no tower; allowed: null"),
            });
        }
    }
    Ok(architecture)
}

/// Image group of every token of a row: a maximal run of image or video placeholders is one group; groups are
/// counted from 0 through the row; other tokens have -1.
pub fn vision_groups(ids: &[u32], config: &Config) -> Vec<i64> {
    config.placeholders().groups(ids)
}
