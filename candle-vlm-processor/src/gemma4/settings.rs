//! The image settings of a checkpoint.

use std::fmt::Display;
use std::path::Path;

use serde_json::Value;

use super::size;
use crate::error::{Error, PictureFault, Result};
use crate::fields::Fields;
use crate::files;
use crate::image_settings::{ImageSettings, ImageTokens, check_not_empty, check_sides};
use crate::patches::ImagePatches;
use crate::picture::Picture;
use crate::tokenizer::TextTokenizer;

/// Which patches the model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchLayout {
    /// One patch of `patch_size` per position; the vision tower pools them into soft tokens.
    Tower,
    /// Each soft token's patches merged into one of `patch_size * pooling_kernel_size` (the models without a tower,
    /// `gemma4_unified`).
    Merged,
}

/// How Gemma 4 cuts pictures into patches. Read from a checkpoint, or set by hand.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4ImageSettings {
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Patches per soft token along each side.
    pub pooling_kernel_size: usize,
    /// Most soft tokens of a picture: 70, 140, 280, 560 or 1120.
    pub max_soft_tokens: usize,
    /// Samples are multiplied with this; 1 / 255 brings them to 0..1.
    pub rescale_factor: f64,
    /// Mean and standard deviation per channel, applied after that; `None` where `do_normalize` is false.
    pub normalize: Option<([f32; 3], [f32; 3])>,
    /// Which patches the model takes.
    pub layout: PatchLayout,
}

/// The budgets that transformers allows.
const SOFT_TOKENS: [u64; 5] = [70, 140, 280, 560, 1120];

impl Gemma4ImageSettings {
    /// Reads the settings of a checkpoint folder: the section `image_processor` of `processor_config.json`, else
    /// `preprocessor_config.json`. Absent fields have the values that transformers gives them (patch 16, pooling 3, 280
    /// soft tokens).
    ///
    /// DIFFERENCE: a `gemma4_unified` folder without either file takes patch size, pooling and soft tokens from its
    /// `config.json`; transformers cannot load a processor from such a folder.
    ///
    /// # Errors
    /// No such file; a field with a value that is not supported, by name and value.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let unified = || -> Result<bool> {
            let config = files::json(folder, "config.json")?.unwrap_or_default();
            Ok(config["model_type"].as_str().is_some_and(|t| t.starts_with("gemma4_unified")))
        };
        match Fields::of_images(folder)? {
            Some(fields) => settings(&fields, unified()?),
            None if unified()? => Self::from_unified_config(&files::json(folder, "config.json")?.unwrap_or_default()),
            None => Err(Fields::missing(folder)),
        }
    }

    /// The settings that a unified model's own configuration implies.
    fn from_unified_config(config: &Value) -> Result<Self> {
        let mut values = config["vision_config"].as_object().cloned().unwrap_or_default();
        values.retain(|key, _| key == "patch_size" || key == "pooling_kernel_size");
        if let Some(soft) = config.get("vision_soft_tokens_per_image") {
            values.insert("max_soft_tokens".into(), soft.clone());
        }
        let fields = Fields { file: "config.json", prefix: "vision_config.", values, processor_class: None };
        settings(&fields, true)
    }

    /// Most patches of `patch_size` of a picture.
    pub fn max_patches(&self) -> usize {
        self.max_soft_tokens * self.pooling_kernel_size * self.pooling_kernel_size
    }
}

impl ImageSettings for Gemma4ImageSettings {
    fn check(&self) -> Result<()> {
        let fault = |field: &str, value: &dyn Display, reason: &str| Error::Setting {
            file: "image settings".into(),
            field: field.into(),
            value: value.to_string(),
            reason: reason.into(),
        };
        if self.patch_size == 0 || self.patch_size > 1024 {
            return Err(fault("patch_size", &self.patch_size, "1 to 1024 are allowed"));
        }
        if self.pooling_kernel_size == 0 || self.pooling_kernel_size > 64 {
            return Err(fault("pooling_kernel_size", &self.pooling_kernel_size, "1 to 64 are allowed"));
        }
        if !SOFT_TOKENS.contains(&(self.max_soft_tokens as u64)) {
            return Err(fault("max_soft_tokens", &self.max_soft_tokens, "70, 140, 280, 560 or 1120 are allowed"));
        }
        Ok(())
    }

    fn tokens(&self, tokenizer: &TextTokenizer) -> Result<ImageTokens> {
        let (image, image_id) = tokenizer.named_token("image_token")?;
        Ok(ImageTokens {
            image,
            image_id,
            begin: tokenizer.named_token("boi_token")?.0,
            end: tokenizer.named_token("eoi_token")?.0,
            video_id: tokenizer.id("<|video|>"), // fixed in transformers as well, no file names it
            audio_id: tokenizer.named_token("audio_token").ok().map(|(_, id)| id),
        })
    }

    fn soft_token_side(&self) -> usize {
        self.patch_size * self.pooling_kernel_size
    }

    fn padded_patches(&self) -> Option<usize> {
        Some(match self.layout {
            PatchLayout::Tower => self.max_patches(),
            PatchLayout::Merged => self.max_soft_tokens,
        })
    }

    fn resized(&self, height: usize, width: usize) -> Result<(usize, usize), PictureFault> {
        check_not_empty(height, width)?;
        size::resized(height, width, self)
    }

    fn patches_as_is(&self, picture: &Picture) -> Result<ImagePatches, PictureFault> {
        check_sides(picture, self.soft_token_side(), "patch_size x pooling_kernel_size")?;
        let (height, width) = (picture.height(), picture.width());
        if (height / self.patch_size) * (width / self.patch_size) > self.max_patches() {
            let reason = format!("at most {} patches are allowed", self.max_patches());
            return Err(PictureFault::Shape { width, height, reason });
        }
        Ok(self.cut(picture))
    }
}

fn settings(fields: &Fields, unified_model: bool) -> Result<Gemma4ImageSettings> {
    let layout = layout(fields, unified_model)?;
    fields.needs(&["do_resize", "do_rescale", "do_convert_rgb"])?;
    fields.needs_bicubic()?;
    let normalize = match fields.flag("do_normalize")?.unwrap_or(false) {
        true => Some(fields.mean_and_std([0.0; 3], [1.0; 3])?),
        false => None,
    };
    let settings = Gemma4ImageSettings {
        patch_size: fields.number("patch_size")?.unwrap_or(16) as usize,
        pooling_kernel_size: fields.number("pooling_kernel_size")?.unwrap_or(3) as usize,
        max_soft_tokens: fields.number("max_soft_tokens")?.unwrap_or(280) as usize,
        rescale_factor: fields.rescale_factor()?,
        normalize,
        layout,
    };
    settings.check().map_err(|fault| fields.located(fault))?;
    Ok(settings)
}

/// The class of the image processor decides, else that of the processor, else the model.
fn layout(fields: &Fields, unified_model: bool) -> Result<PatchLayout> {
    let class = fields.values.get("image_processor_type").and_then(Value::as_str);
    match class.or(fields.processor_class.as_deref()) {
        Some(name) if name.starts_with("Gemma4Unified") => Ok(PatchLayout::Merged),
        Some(name) if name.starts_with("Gemma4") => Ok(PatchLayout::Tower),
        None if unified_model => Ok(PatchLayout::Merged),
        None => Ok(PatchLayout::Tower),
        Some(_) => Err(fields.fault(
            if class.is_some() { "image_processor_type" } else { "processor_class" },
            "only Gemma 4's processors are supported here (Gemma4ImageProcessor, Gemma4UnifiedImageProcessor)",
        )),
    }
}
