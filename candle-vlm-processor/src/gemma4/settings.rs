//! The image settings of a checkpoint.

use std::fmt::Display;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::files;

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
/// Pillow's number for bicubic.
const BICUBIC: u64 = 3;

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
        if let Some(config) = files::json(folder, "processor_config.json")?
            && let Some(section) = config["image_processor"].as_object()
        {
            let class = config["processor_class"].as_str().map(str::to_owned);
            return Fields { file: "processor_config.json", prefix: "image_processor.", values: section }
                .settings(class.as_deref(), unified()?);
        }
        if let Some(config) = files::json(folder, "preprocessor_config.json")?
            && let Some(values) = config.as_object()
        {
            let class = config["processor_class"].as_str();
            return Fields { file: "preprocessor_config.json", prefix: "", values }.settings(class, unified()?);
        }
        if unified()? {
            return Self::from_unified_config(&files::json(folder, "config.json")?.unwrap_or_default());
        }
        Err(Error::MissingFile {
            folder: folder.into(),
            files: vec!["processor_config.json with a section `image_processor`", "preprocessor_config.json"],
            fix: "copy it from the released checkpoint",
        })
    }

    /// The settings that a unified model's own configuration implies.
    fn from_unified_config(config: &Value) -> Result<Self> {
        let mut values = config["vision_config"].as_object().cloned().unwrap_or_default();
        values.retain(|key, _| key == "patch_size" || key == "pooling_kernel_size");
        if let Some(soft) = config.get("vision_soft_tokens_per_image") {
            values.insert("max_soft_tokens".into(), soft.clone());
        }
        Fields { file: "config.json", prefix: "vision_config.", values: &values }.settings(None, true)
    }

    /// Most patches of `patch_size` of a picture.
    pub fn max_patches(&self) -> usize {
        self.max_soft_tokens * self.pooling_kernel_size * self.pooling_kernel_size
    }

    /// Fails on values that do not fit together, so that settings made by hand are checked like those of files.
    pub(super) fn check(&self) -> Result<()> {
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
}

/// One JSON object of settings and where it stands.
struct Fields<'a> {
    file: &'a str,
    prefix: &'a str,
    values: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn settings(&self, processor_class: Option<&str>, unified_model: bool) -> Result<Gemma4ImageSettings> {
        let layout = self.layout(processor_class, unified_model)?;
        for (field, needed) in [("do_resize", true), ("do_rescale", true), ("do_convert_rgb", true)] {
            if self.flag(field)?.unwrap_or(needed) != needed {
                return Err(self.fault(field, "only true is supported"));
            }
        }
        if self.number("resample")?.unwrap_or(BICUBIC) != BICUBIC {
            return Err(self.fault("resample", "only 3 (bicubic) is supported"));
        }
        let normalize = match self.flag("do_normalize")?.unwrap_or(false) {
            true => Some((self.channels("image_mean", 0.0)?, self.channels("image_std", 1.0)?)),
            false => None,
        };
        if normalize.is_some_and(|(_, std)| std.contains(&0.0)) {
            return Err(self.fault("image_std", "must not be 0"));
        }
        let rescale_factor = match self.values.get("rescale_factor").filter(|v| !v.is_null()) {
            None => 1.0 / 255.0,
            Some(value) => value.as_f64().ok_or_else(|| self.fault("rescale_factor", "must be a number"))?,
        };
        let settings = Gemma4ImageSettings {
            patch_size: self.number("patch_size")?.unwrap_or(16) as usize,
            pooling_kernel_size: self.number("pooling_kernel_size")?.unwrap_or(3) as usize,
            max_soft_tokens: self.number("max_soft_tokens")?.unwrap_or(280) as usize,
            rescale_factor,
            normalize,
            layout,
        };
        settings.check().map_err(|fault| match fault {
            Error::Setting { field, reason, .. } => self.fault(&field, &reason),
            other => other,
        })?;
        Ok(settings)
    }

    /// The class of the image processor decides, else that of the processor, else the model.
    fn layout(&self, processor_class: Option<&str>, unified_model: bool) -> Result<PatchLayout> {
        let class = self.values.get("image_processor_type").and_then(Value::as_str);
        match class.or(processor_class) {
            Some(name) if name.starts_with("Gemma4Unified") => Ok(PatchLayout::Merged),
            Some(name) if name.starts_with("Gemma4") => Ok(PatchLayout::Tower),
            None if unified_model => Ok(PatchLayout::Merged),
            None => Ok(PatchLayout::Tower),
            Some(_) => Err(self.fault(
                if class.is_some() { "image_processor_type" } else { "processor_class" },
                "only Gemma 4's processors are supported here (Gemma4ImageProcessor, Gemma4UnifiedImageProcessor)",
            )),
        }
    }

    fn fault(&self, field: &str, reason: &str) -> Error {
        Error::Setting {
            file: self.file.into(),
            field: format!("{}{field}", self.prefix),
            value: self.values.get(field).unwrap_or(&Value::Null).to_string(),
            reason: reason.into(),
        }
    }

    fn flag(&self, field: &str) -> Result<Option<bool>> {
        match self.values.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.fault(field, "must be true or false")),
        }
    }

    fn number(&self, field: &str) -> Result<Option<u64>> {
        match self.values.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                value.as_u64().map(Some).ok_or_else(|| self.fault(field, "must be a whole number, not negative"))
            }
        }
    }

    fn channels(&self, field: &str, absent: f32) -> Result<[f32; 3]> {
        let Some(value) = self.values.get(field).filter(|v| !v.is_null()) else {
            return Ok([absent; 3]);
        };
        let numbers: Option<Vec<f32>> =
            value.as_array().map(|list| list.iter().filter_map(Value::as_f64).map(|x| x as f32).collect());
        numbers
            .and_then(|list| <[f32; 3]>::try_from(list).ok())
            .ok_or_else(|| self.fault(field, "must be a list of three numbers"))
    }
}
