//! What the recipe asks of a model family, and the families that it knows.
//!
//! A family of one's own is a [`VlmConfig`] and a [`VlmModel`]; all of the recipe works on these two.

pub mod gemma4;
pub mod qwen3_5;
mod shape;

use std::fmt::{self, Debug};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_cp::{CpContext, LayerWork, ShardedLabels};
use candle_cp_layers::{CONFIG_FILE, ModelConfig, Placeholders, Recompute, Weights};
use candle_vlm_processor::ImageSettings;

pub use self::shape::{AttentionShape, DecoderLayerShape, DecoderShape, ExpertsShape, KeyRole, Mixer, VisionShape};
use crate::device::ComputeDevice;
use crate::error::{Error, Result};
use crate::packing::Batch;

/// A family that the recipe knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Gemma 4: dense, with experts, effective, unified.
    Gemma4,
    /// Qwen 3.5 and 3.6: dense and with experts.
    Qwen3_5,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 2] = [Self::Gemma4, Self::Qwen3_5];

    /// Name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gemma4 => "gemma4",
            Self::Qwen3_5 => "qwen3_5",
        }
    }

    /// Name for people.
    pub fn title(self) -> &'static str {
        match self {
            Self::Gemma4 => "Gemma 4",
            Self::Qwen3_5 => "Qwen 3.5",
        }
    }

    /// A configuration from the text of a `config.json` of this family.
    ///
    /// # Errors
    /// The model crate refuses it.
    pub fn config(self, json: &str) -> Result<Arc<dyn VlmConfig>> {
        Ok(match self {
            Self::Gemma4 => Arc::new(candle_gemma4::Config::from_json(json)?),
            Self::Qwen3_5 => Arc::new(candle_qwen3_5::Config::from_json(json)?),
        })
    }

    /// The family of a checkpoint folder, by the `model_type` of its configuration. What names none is left to the model
    /// crate of Gemma 4, whose messages list the types that it has.
    ///
    /// # Errors
    /// It is of no family that the recipe knows.
    pub fn of_folder(folder: &Path) -> Result<Self> {
        Self::of_text(&std::fs::read_to_string(folder.join(CONFIG_FILE)).unwrap_or_default(), folder)
    }

    /// A configuration from the text of a `config.json` of any family, see [`Family::of_folder`]; `path` is where it is.
    ///
    /// # Errors
    /// It is of no family that the recipe knows, or the model crate refuses it.
    pub fn of_config(text: &str, path: &Path) -> Result<Arc<dyn VlmConfig>> {
        Self::of_text(text, path)?.config(text)
    }

    fn of_text(text: &str, path: &Path) -> Result<Self> {
        let json: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
        match json.get("model_type").and_then(serde_json::Value::as_str) {
            Some(name) if name.starts_with("qwen3_5") => Ok(Self::Qwen3_5),
            Some(name) if !name.starts_with("gemma4") => {
                Err(Error::UnknownFamily { folder: path.to_path_buf(), found: name.to_string() })
            }
            _ => Ok(Self::Gemma4),
        }
    }

    /// Reads the configuration of a checkpoint folder, see [`Family::of_folder`].
    ///
    /// # Errors
    /// There is none, it is of no family that the recipe knows, or the model crate refuses it.
    pub fn read(folder: &Path) -> Result<Arc<dyn VlmConfig>> {
        Ok(match Self::of_folder(folder)? {
            Self::Gemma4 => Arc::new(candle_gemma4::Config::from_folder(folder)?),
            Self::Qwen3_5 => Arc::new(candle_qwen3_5::Config::from_folder(folder)?),
        })
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Family {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Self::ALL.into_iter().find(|family| family.name() == text).ok_or_else(|| "gemma4 or qwen3_5".to_string())
    }
}

/// Ids that the recipe puts into rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenIds {
    /// Fills rows behind the last document; 0 if the model names none, where no document counts.
    pub pad: u32,
    /// Begins a text; `None` if the family's texts begin with their first word.
    pub bos: Option<u32>,
    /// The family's texts begin with a token, which must be named.
    pub needs_bos: bool,
    /// Ends a text; `None` if the model names none.
    pub eos: Option<u32>,
}

/// Words around the turns of a chat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turns {
    /// Begins a turn; the role follows.
    pub open: &'static str,
    /// Ends a turn.
    pub close: &'static str,
    /// The role of answers.
    pub assistant: &'static str,
}

/// A family's configuration, as the recipe needs it.
pub trait VlmConfig: ModelConfig + Debug + Send + Sync {
    /// Name and sizes, such as "Gemma 4, 4 layers of width 64".
    fn title(&self) -> String;

    /// Ids that are put into rows.
    fn token_ids(&self) -> TokenIds;

    /// Ids that stand for something else than text.
    fn placeholders(&self) -> Placeholders;

    /// Tokens before and behind the placeholders of a picture.
    fn around_picture(&self) -> (u32, u32);

    /// The words that put a chat without a template together.
    fn turns(&self) -> Turns;

    /// What attention costs, for layouts that even it out.
    fn layer_work(&self) -> Vec<LayerWork>;

    /// The decoder layer, counted from 0, that a weight or an adapter belongs to by its name. Backward comes to the layers
    /// from the last to the first, and to a layer's weights in no other place; with recomputation the layer is told by
    /// [`Recompute::of_layer`].
    fn decoder_layer(&self, name: &str) -> Option<usize>;

    /// What memory and traffic of a run depend on, for [`crate::planner`].
    fn decoder_shape(&self) -> DecoderShape;

    /// How the model itself says that pictures are cut; `None` if it takes none.
    fn image_settings(&self) -> Option<Box<dyn ImageSettings>>;

    /// The image settings of a checkpoint folder, after a check that they are those of this model. The inner error is the
    /// reason why there are none.
    ///
    /// # Errors
    /// A file is broken, or is of another model.
    fn read_image_settings(&self, folder: &Path) -> Result<std::result::Result<Box<dyn ImageSettings>, String>>;

    /// Fails, with the reason, if the model cannot take a picture of this height and width in pixels.
    ///
    /// # Errors
    /// The reason, such as "is 640 x 32 pixels after resizing, which ...".
    fn check_picture(&self, size: (usize, usize)) -> std::result::Result<(), String>;

    /// Fails, with the reason, if the model cannot be trained on this device.
    ///
    /// # Errors
    /// The reason, such as "has no kernels for ...".
    fn check_device(&self, device: ComputeDevice) -> std::result::Result<(), String> {
        // A model made of Candle's and candle-cp's operations runs wherever they do.
        let _ = device;
        Ok(())
    }

    /// The model of these weights.
    ///
    /// # Errors
    /// They do not fit.
    fn model(&self, weights: &Weights) -> Result<Box<dyn VlmModel>>;
}

/// A family's model, as the recipe needs it.
pub trait VlmModel: Debug + Send + Sync {
    /// Final hidden states `[rows, local tokens, hidden]` of a batch: the full rows are embedded, the decoder works on
    /// this rank's slice. Pixels come in `dtype` to `device`.
    ///
    /// # Errors
    /// A tensor operation or an exchange with another rank failed.
    fn hidden(
        &self,
        batch: &Batch,
        context: &CpContext,
        recompute: &Recompute,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor>;

    /// This rank's share of the mean cross entropy.
    ///
    /// # Errors
    /// Shapes that do not fit.
    fn loss(&self, hidden_bsh: &Tensor, labels: &ShardedLabels) -> Result<Tensor>;

    /// Logits `[.., vocabulary]`.
    ///
    /// # Errors
    /// Another hidden size.
    fn logits(&self, hidden: &Tensor) -> Result<Tensor>;
}

/// Fails if a processor's files say something else about patches than the model's configuration, both told as text.
fn check_settings(processor: String, model: String) -> Result<()> {
    match processor == model {
        true => Ok(()),
        false => Err(Error::Task {
            task: "pictures",
            reason: format!(
                "the processor's files say {processor}, but config.json says {model}; take both from one checkpoint"
            ),
        }),
    }
}
