//! The image section of a checkpoint's processor files.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::files;

/// Pillow's number for bicubic.
const BICUBIC: u64 = 3;

/// One JSON object of settings and where it stands.
#[derive(Default)]
pub(crate) struct Fields {
    pub(crate) file: &'static str,
    pub(crate) prefix: &'static str,
    pub(crate) values: Map<String, Value>,
    /// The class of the processor that the file names.
    pub(crate) processor_class: Option<String>,
}

impl Fields {
    /// The section `image_processor` of `processor_config.json`, else `preprocessor_config.json`, else nothing.
    pub(crate) fn of_images(folder: &Path) -> Result<Option<Self>> {
        let class = |config: &Value| config["processor_class"].as_str().map(str::to_owned);
        if let Some(mut config) = files::json(folder, "processor_config.json")? {
            let processor_class = class(&config);
            if let Some(Value::Object(values)) = config.get_mut("image_processor").map(Value::take) {
                let (file, prefix) = ("processor_config.json", "image_processor.");
                return Ok(Some(Self { file, prefix, values, processor_class }));
            }
        }
        if let Some(config) = files::json(folder, "preprocessor_config.json")? {
            let processor_class = class(&config);
            if let Value::Object(values) = config {
                return Ok(Some(Self { file: "preprocessor_config.json", prefix: "", values, processor_class }));
            }
        }
        Ok(None)
    }

    /// What [`Self::of_images`] did not find.
    pub(crate) fn missing(folder: &Path) -> Error {
        Error::MissingFile {
            folder: folder.into(),
            files: vec!["processor_config.json with a section `image_processor`", "preprocessor_config.json"],
            fix: "copy it from the released checkpoint",
        }
    }

    /// Fails with a field of these values.
    pub(crate) fn fault(&self, field: &str, reason: &str) -> Error {
        Error::Setting {
            file: self.file.into(),
            field: format!("{}{field}", self.prefix),
            value: self.values.get(field).unwrap_or(&Value::Null).to_string(),
            reason: reason.into(),
        }
    }

    /// A fault of settings made by hand as one of this file.
    pub(crate) fn located(&self, fault: Error) -> Error {
        match fault {
            Error::Setting { field, reason, .. } => self.fault(&field, &reason),
            other => other,
        }
    }

    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>> {
        match self.values.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.fault(field, "must be true or false")),
        }
    }

    /// Fails if a switch that is on by default is off.
    pub(crate) fn needs(&self, switches: &[&str]) -> Result<()> {
        for field in switches {
            if !self.flag(field)?.unwrap_or(true) {
                return Err(self.fault(field, "only true is supported"));
            }
        }
        Ok(())
    }

    /// Fails if pictures are to be resized by another method.
    pub(crate) fn needs_bicubic(&self) -> Result<()> {
        match self.number("resample")?.unwrap_or(BICUBIC) {
            BICUBIC => Ok(()),
            _ => Err(self.fault("resample", "only 3 (bicubic) is supported")),
        }
    }

    pub(crate) fn number(&self, field: &str) -> Result<Option<u64>> {
        match self.values.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                value.as_u64().map(Some).ok_or_else(|| self.fault(field, "must be a whole number, not negative"))
            }
        }
    }

    /// What 8-bit levels are multiplied with.
    pub(crate) fn rescale_factor(&self) -> Result<f64> {
        match self.values.get("rescale_factor").filter(|v| !v.is_null()) {
            None => Ok(1.0 / 255.0),
            Some(value) => value.as_f64().ok_or_else(|| self.fault("rescale_factor", "must be a number")),
        }
    }

    /// Mean and standard deviation per channel, with the values for absent fields.
    pub(crate) fn mean_and_std(&self, mean: [f32; 3], std: [f32; 3]) -> Result<([f32; 3], [f32; 3])> {
        let (mean, std) = (self.channels("image_mean", mean)?, self.channels("image_std", std)?);
        match std.contains(&0.0) {
            true => Err(self.fault("image_std", "must not be 0")),
            false => Ok((mean, std)),
        }
    }

    fn channels(&self, field: &str, absent: [f32; 3]) -> Result<[f32; 3]> {
        let Some(value) = self.values.get(field).filter(|v| !v.is_null()) else {
            return Ok(absent);
        };
        let number = |value: &Value| value.as_f64().map(|x| x as f32).filter(|x| x.is_finite());
        let numbers = match value {
            Value::Array(list) => list.iter().map(number).collect::<Option<Vec<_>>>(),
            one => number(one).map(|x| vec![x; 3]),
        };
        numbers
            .and_then(|list| <[f32; 3]>::try_from(list).ok())
            .ok_or_else(|| self.fault(field, "must be a number or a list of three numbers"))
    }
}
