//! Which files of a repository make a model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::Deserialize;

/// Weights in one file.
const WEIGHTS: &str = "model.safetensors";
/// The list of files that hold the weights together.
pub(super) const WEIGHT_INDEX: &str = "model.safetensors.index.json";
/// What every model has beside its weights.
const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];
/// Folder of further chat templates.
const TEMPLATES: &str = "additional_chat_templates/";

/// The part of an index file that matters here.
#[derive(Deserialize)]
struct Index {
    /// File name by tensor name.
    weight_map: BTreeMap<String, String>,
}

/// Configurations, tokenizer and templates among the listed files. Weights of other formats, their indices, pictures and
/// whatever lies in folders are left where they are.
pub(super) fn settings<'a>(listed: &[&'a str]) -> Vec<&'a str> {
    let wanted = |path: &str| {
        let name = path.strip_prefix(TEMPLATES).filter(|name| name.ends_with(".jinja")).unwrap_or(path);
        let kind = name.ends_with(".jinja") || name == "tokenizer.model" || name.ends_with(".json");
        is_file_name(name) && kind && (name == WEIGHT_INDEX || !name.ends_with(".index.json"))
    };
    listed.iter().copied().filter(|path| wanted(path)).collect()
}

/// The weight files: those of the index in `folder` if there is one, else the single file. An error tells what is wrong
/// with the index.
pub(super) fn weights(folder: &Path) -> Result<Vec<String>, String> {
    let text = match fs::read(folder.join(WEIGHT_INDEX)) {
        Ok(text) => text,
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(vec![WEIGHTS.to_string()]),
        Err(cause) => return Err(cause.to_string()),
    };
    let index: Index = serde_json::from_slice(&text).map_err(|error| format!("{WEIGHT_INDEX}: {error}"))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    match names.iter().find(|name| !is_file_name(name)) {
        Some(name) => Err(format!("{WEIGHT_INDEX} names {name:?}, which is not a file beside it")),
        None if names.is_empty() => Err(format!("{WEIGHT_INDEX} names no file")),
        None => Ok(names.into_iter().collect()),
    }
}

/// Needed files that a list lacks before anything of it is pulled.
pub(super) fn missing_in_list(listed: &[&str]) -> Vec<String> {
    let mut missing: Vec<String> =
        REQUIRED.iter().filter(|name| !listed.contains(name)).map(ToString::to_string).collect();
    if !listed.contains(&WEIGHT_INDEX) && !listed.contains(&WEIGHTS) {
        missing.push(WEIGHTS.to_string());
    }
    missing
}

/// What keeps a folder from being a whole model; `None` if nothing does.
pub(super) fn incomplete(folder: &Path) -> Option<String> {
    let needed = match weights(folder) {
        Ok(weights) => weights,
        Err(reason) => return Some(reason),
    };
    let needed = REQUIRED.into_iter().map(str::to_string).chain(needed);
    let missing: Vec<String> = needed.filter(|name| !folder.join(name).is_file()).collect();
    (!missing.is_empty()).then(|| format!("{} is missing", missing.join(", ")))
}

fn is_file_name(name: &str) -> bool {
    let plain = |sign: char| !sign.is_control() && !matches!(sign, '/' | '\\' | ':' | '%' | '?' | '#');
    !name.is_empty() && !name.starts_with('.') && name.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_picked_and_nothing_else() {
        let listed = [
            ".gitattributes",
            "README.md",
            "config.json",
            "chat_template.jinja",
            "tokenizer.model",
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin.index.json",
            "onnx/config.json",
            "../evil.json",
            "/etc/x.json",
            "additional_chat_templates/tool.jinja",
            "additional_chat_templates/../x.jinja",
            "a\\b.json",
            ".hidden.json",
        ];
        assert_eq!(
            settings(&listed),
            [
                "config.json",
                "chat_template.jinja",
                "tokenizer.model",
                "model.safetensors.index.json",
                "additional_chat_templates/tool.jinja"
            ]
        );
        assert_eq!(missing_in_list(&listed), ["tokenizer.json"]);
        assert_eq!(missing_in_list(&["config.json", "tokenizer.json", "x.gguf"]), ["model.safetensors"]);
    }

    #[test]
    fn the_index_decides_and_may_not_point_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        assert_eq!(weights(dir.path()), Ok(vec![WEIGHTS.to_string()]));
        write(
            WEIGHT_INDEX,
            r#"{"metadata": {}, "weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}"#,
        );
        assert_eq!(weights(dir.path()), Ok(vec!["1.safetensors".to_string(), "2.safetensors".to_string()]));
        let found = incomplete(dir.path());
        assert_eq!(found.as_deref(), Some("config.json, tokenizer.json, 1.safetensors, 2.safetensors is missing"));
        for name in ["config.json", "tokenizer.json", "1.safetensors", "2.safetensors"] {
            write(name, "");
        }
        assert_eq!(incomplete(dir.path()), None);
        for (text, part) in
            [(r#"{"weight_map": {"a": "../x"}}"#, "\"../x\""), (r#"{"weight_map": {}}"#, "no file"), ("[", "EOF")]
        {
            write(WEIGHT_INDEX, text);
            let reason = weights(dir.path()).unwrap_err();
            assert!(reason.contains(part), "{reason}");
        }
    }
}
