//! The type that `config.json` names.
//!
//! transformers loads all weights in the type of the top-level field `dtype`, whatever the files hold. So a saved
//! folder has to name the type of the trained tensors, or they would be rounded on the way in.

use candle_core::DType;
use serde_json::Value;

use crate::error::{Error, Result};

/// The field, and its name in older files.
const FIELDS: [&str; 2] = ["dtype", "torch_dtype"];

/// The configuration with this type at the top and in every part that names a type. Unchanged if that is so already.
pub(super) fn with_dtype(text: &str, dtype: DType) -> Result<String> {
    let name = match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::F32 => "float32",
        DType::F64 => "float64",
        dtype => return Err(Error::TrainingType { dtype }),
    };
    let cause = |cause| Error::Json { what: "the configuration".to_string(), cause };
    let mut json: Value = serde_json::from_str(text).map_err(cause)?;
    let before = json.clone();
    if let Some(top) = json.as_object_mut() {
        if !FIELDS.iter().any(|field| top.contains_key(*field)) {
            top.insert(FIELDS[0].to_string(), Value::Null);
        }
        let parts = top.iter_mut().filter(|(field, _)| field.ends_with("_config"));
        for part in parts.filter_map(|(_, part)| part.as_object_mut()) {
            set(part, name);
        }
        set(top, name);
    }
    match json == before {
        true => Ok(text.to_string()),
        false => serde_json::to_string_pretty(&json).map(|text| text + "\n").map_err(cause),
    }
}

fn set(object: &mut serde_json::Map<String, Value>, name: &str) {
    for field in FIELDS {
        if let Some(value) = object.get_mut(field) {
            *value = Value::from(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_in_the_text_is_replaced_and_a_missing_one_is_added() {
        let text = r#"{"dtype": "bfloat16", "text_config": {"dtype": null, "x": 1e-06}, "vision_config": null}"#;
        let found: Value = serde_json::from_str(&with_dtype(text, DType::F32).unwrap()).unwrap();
        let expected =
            r#"{"dtype": "float32", "text_config": {"dtype": "float32", "x": 1e-06}, "vision_config": null}"#;
        assert_eq!(found, serde_json::from_str::<Value>(expected).unwrap());
        let old = with_dtype(r#"{"torch_dtype": "float32"}"#, DType::BF16).unwrap();
        assert_eq!(old, "{\n  \"torch_dtype\": \"bfloat16\"\n}\n");
        assert_eq!(with_dtype("{}", DType::F16).unwrap(), "{\n  \"dtype\": \"float16\"\n}\n");
        let same = r#"{ "dtype" : "float64", "audio_config": {} }"#;
        assert_eq!(with_dtype(same, DType::F64).unwrap(), same);
    }
}
