//! `config.json` of a checkpoint: every setting is read from it, and what this crate cannot run is refused.
//!
//! A field that is absent takes the value that the library which writes these files gives it; sizes, the base of the rope
//! and norm constants have no such default here and are required.

mod delta;
mod moe;
mod rope;
mod text;
mod vision;

use std::path::Path;

use serde_json::Value;

pub use self::delta::DeltaNetConfig;
pub use self::moe::MoeConfig;
pub use self::rope::RopeConfig;
pub use self::text::{LayerKind, MlpConfig, TextConfig};
pub use self::vision::VisionConfig;
use candle_cp_layers::{CONFIG_FILE, Error, Fields, Placeholders, Result};

/// What a checkpoint holds, by its `model_type`; decides on the layout of `config.json` and on tensor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `qwen3_5` (`Qwen3_5ForConditionalGeneration`): a text model in `text_config`, a vision tower beside it; the text
    /// model's tensors are under `model.language_model`.
    Dense,
    /// `qwen3_5_text` (`Qwen3_5ForCausalLM`): the file is the text model's configuration; its tensors are under `model`.
    DenseText,
    /// `qwen3_5_moe` (`Qwen3_5MoeForConditionalGeneration`): as `qwen3_5`, with experts in place of the MLPs.
    Moe,
    /// `qwen3_5_moe_text` (`Qwen3_5MoeForCausalLM`): as `qwen3_5_text`, with experts in place of the MLPs.
    MoeText,
}

impl Architecture {
    const ALL: [Self; 4] = [Self::Dense, Self::DenseText, Self::Moe, Self::MoeText];

    /// The `model_type` of the whole checkpoint.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Dense => "qwen3_5",
            Self::DenseText => "qwen3_5_text",
            Self::Moe => "qwen3_5_moe",
            Self::MoeText => "qwen3_5_moe_text",
        }
    }

    /// The `model_type` of its text model.
    pub fn text_model_type(self) -> &'static str {
        match self.has_experts() {
            false => Self::DenseText.model_type(),
            true => Self::MoeText.model_type(),
        }
    }

    /// Whether there is nothing but the text model.
    pub fn is_text_only(self) -> bool {
        matches!(self, Self::DenseText | Self::MoeText)
    }

    /// Whether layers have experts in place of an MLP.
    pub fn has_experts(self) -> bool {
        matches!(self, Self::Moe | Self::MoeText)
    }
}

/// A Qwen 3.5 or 3.6 model: text decoder, and the vision tower if it has one.
///
/// Made from JSON only, so that every value has passed the checks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// With experts or without, text only or with a tower.
    pub architecture: Architecture,
    /// The text decoder.
    pub text: TextConfig,
    /// The vision tower; `None` for a text-only model.
    pub vision: Option<VisionConfig>,
    /// Placeholder of one image feature. A text-only checkpoint has no placeholders: there, all ids are text.
    pub image_token_id: u32,
    /// Placeholder of one video feature.
    pub video_token_id: u32,
    /// Token before an image's placeholders.
    pub vision_start_token_id: u32,
    /// Token after an image's placeholders.
    pub vision_end_token_id: u32,
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
                video: Some(self.video_token_id),
                ..Placeholders::default()
            },
        }
    }

    fn parse(what: &str, text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(|cause| Error::Json { what: what.to_string(), cause })?;
        let top = Fields::new("", &value)?;
        let architecture = read_architecture(&top)?;
        let (text_fields, vision_fields) = match architecture.is_text_only() {
            true => (top, None),
            false => {
                let missing = top.missing(&["text_config", "vision_config"]);
                let (Some(text), Some(vision)) = (top.get("text_config"), top.get("vision_config")) else {
                    return Err(Error::MissingFields { fields: missing });
                };
                (Fields::new("text_config", text)?, Some(Fields::new("vision_config", vision)?))
            }
        };
        let mut missing = TextConfig::missing(&text_fields, architecture);
        missing.extend(vision_fields.iter().flat_map(VisionConfig::missing));
        if !missing.is_empty() {
            return Err(Error::MissingFields { fields: missing });
        }
        let eos_token_ids = match top.get("eos_token_id").is_some() {
            true => top.tokens("eos_token_id")?,
            false => text_fields.tokens("eos_token_id")?,
        };
        let token = |field: &str, default: u32| Ok::<_, Error>(top.token(field)?.unwrap_or(default));
        let text_config = TextConfig::read(&text_fields, architecture)?;
        let vision = vision_fields.map(|fields| VisionConfig::read(&fields, architecture, text_config.hidden_size));
        Ok(Self {
            architecture,
            vision: vision.transpose()?,
            text: text_config,
            image_token_id: token("image_token_id", 248_056)?,
            video_token_id: token("video_token_id", 248_057)?,
            vision_start_token_id: token("vision_start_token_id", 248_053)?,
            vision_end_token_id: token("vision_end_token_id", 248_054)?,
            eos_token_ids,
            tie_word_embeddings: top.flag("tie_word_embeddings", false)?,
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
    if architecture.is_text_only() && top.get("vision_config").is_some() {
        return Err(Error::Config {
            field: "vision_config".to_string(),
            value: "an object".to_string(),
            reason: format!("a text-only model (model_type \"{name}\") has no tower; allowed: null"),
        });
    }
    Ok(architecture)
}
