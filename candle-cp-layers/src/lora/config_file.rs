//! `adapter_config.json`, as PEFT writes it.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::error::LoraError;
use super::options::{LoraOptions, LoraTargets};
use crate::error::Error;

/// The file's name.
pub const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";

/// Fields that say nothing about the result. `target_modules` and what narrows it choose modules, which the tensors tell.
const OF_NO_EFFECT: [&str; 14] = [
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Fields that narrow the choice of `target_modules`.
const NARROWING: [&str; 3] = ["exclude_modules", "layers_pattern", "layers_to_transform"];

/// What the file says.
#[derive(Debug)]
pub struct AdapterConfig {
    pub options: LoraOptions,
    /// The targets, where they are a list that nothing narrows.
    pub listed: Option<Vec<String>>,
}

/// Reads the file of a folder.
pub fn read(dir: &Path) -> Result<AdapterConfig, Error> {
    let path = dir.join(ADAPTER_CONFIG_FILE);
    let text = std::fs::read_to_string(&path);
    let text = text.map_err(|cause| Error::Io { action: "read", path: path.clone(), cause })?;
    let what = || path.display().to_string();
    let fields: Map<String, Value> =
        serde_json::from_str(&text).map_err(|cause| Error::Json { what: what(), cause })?;
    Ok(Fields { path: &path, fields: &fields }.parse()?)
}

struct Fields<'a> {
    path: &'a Path,
    fields: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn parse(&self) -> Result<AdapterConfig, LoraError> {
        match self.fields.get("peft_type") {
            Some(Value::String(kind)) if kind == "LORA" => {}
            _ => return Err(self.wrong("peft_type", "must be \"LORA\"")),
        }
        self.check_unsupported()?;
        let rank = self.fields.get("r").and_then(Value::as_u64).filter(|rank| *rank > 0);
        let rank = rank.ok_or_else(|| self.wrong("r", "must be a whole number from 1 on"))?;
        let alpha = self.number("lora_alpha")?.ok_or_else(|| self.wrong("lora_alpha", "must be a number"))?;
        let dropout = self.number("lora_dropout")?.unwrap_or(0.0);
        let names = self.target_list()?;
        let narrowed = NARROWING.iter().any(|field| !self.fields.get(*field).is_none_or(is_neutral));
        let targets = names.clone().map_or(LoraTargets::AllLinear, LoraTargets::Names);
        let options = LoraOptions::new(rank as usize, alpha).dropout(dropout).targets(targets);
        options.check()?;
        Ok(AdapterConfig { options, listed: names.filter(|_| !narrowed) })
    }

    /// Everything that PEFT can do and this crate cannot has a field of its own, which says no by null, false or empty.
    /// So a field that is not known here is refused if it says something else.
    fn check_unsupported(&self) -> Result<(), LoraError> {
        for (field, value) in self.fields {
            let reason = match field.as_str() {
                "peft_type" | "r" | "lora_alpha" | "lora_dropout" => continue,
                field if OF_NO_EFFECT.contains(&field) => continue,
                "bias" if value == "none" => continue,
                "bias" => "trained biases are not supported, only \"none\"",
                "init_lora_weights" if value.is_boolean() || value == "gaussian" => continue,
                "init_lora_weights" => {
                    "starts that change the base model are not supported, only true, false, \"gaussian\""
                }
                _ if is_neutral(value) => continue,
                _ => "not supported; only plain LoRA is",
            };
            return Err(self.wrong(field, reason));
        }
        Ok(())
    }

    /// `None` if the targets are a pattern.
    fn target_list(&self) -> Result<Option<Vec<String>>, LoraError> {
        let expected = "must be a list of names or a pattern";
        match self.fields.get("target_modules") {
            Some(Value::String(_)) => Ok(None),
            Some(Value::Array(names)) if !names.is_empty() => {
                let names = names.iter().map(|name| name.as_str().map(str::to_string)).collect::<Option<Vec<_>>>();
                Ok(Some(names.ok_or_else(|| self.wrong("target_modules", expected))?))
            }
            _ => Err(self.wrong("target_modules", expected)),
        }
    }

    fn number(&self, field: &'static str) -> Result<Option<f64>, LoraError> {
        match self.fields.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => Ok(Some(value.as_f64().ok_or_else(|| self.wrong(field, "must be a number"))?)),
        }
    }

    fn wrong(&self, field: &str, reason: &str) -> LoraError {
        let value = self.fields.get(field).map_or("absent".to_string(), Value::to_string);
        LoraError::Config { path: self.path.to_path_buf(), field: field.to_string(), value, reason: reason.to_string() }
    }
}

/// Null, false or empty.
fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Number(_) => false,
    }
}

/// The error for a module that has an adapter without being a target.
pub fn unlisted(dir: &Path, module: &str, targets: &[String]) -> LoraError {
    LoraError::Config {
        path: dir.join(ADAPTER_CONFIG_FILE),
        field: "target_modules".to_string(),
        value: json!(targets).to_string(),
        reason: format!("the file of adapters has one for {module}, which is not among them"),
    }
}

/// The text of the file for these modules.
pub fn text(options: &LoraOptions, paths: &BTreeSet<&str>, base_model: &str) -> Result<String, Error> {
    // PEFT takes alpha for a whole number.
    let alpha = match options.alpha {
        alpha if alpha.fract() == 0.0 && alpha < 1e15 => json!(alpha as u64),
        alpha => json!(alpha),
    };
    // PEFT has a field of its own for the revision, and takes no name with one behind it.
    let (base_model, revision) = match base_model.split_once('@') {
        Some((name, revision)) if !Path::new(base_model).is_dir() => (name, Some(revision)),
        _ => (base_model, None),
    };
    let json = json!({
        "alpha_pattern": {},
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_bias": false,
        "lora_dropout": options.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": options.rank,
        "rank_pattern": {},
        "revision": revision,
        "target_modules": paths,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    });
    let cause = |cause| Error::Json { what: ADAPTER_CONFIG_FILE.to_string(), cause };
    Ok(serde_json::to_string_pretty(&json).map_err(cause)? + "\n")
}
