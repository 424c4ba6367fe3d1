//! The trained model as a checkpoint folder: weights and configuration in the usual layout, tokenizer beside them.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gemma4::Weights;

use crate::error::{Result, io};
use crate::job::Job;
use crate::small_model;

const TOKENIZER_FILE: &str = "tokenizer.json";
/// Named chat templates, one file each.
const TEMPLATES_FOLDER: &str = "additional_chat_templates";

/// Files that are taken over from the checkpoint that training began from, where it has them.
const COMPANIONS: [&str; 10] = [
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
];

/// Writes a folder that `--model` takes. Files are moved into place when they are complete.
///
/// # Errors
/// A file cannot be read or written.
pub fn save(dir: &Path, job: &Job, weights: &Weights) -> Result<()> {
    weights.save(dir, &job.model)?;
    let Some(folder) = job.folder() else {
        return write(&dir.join(TOKENIZER_FILE), small_model::tokenizer_json().as_bytes());
    };
    for name in COMPANIONS {
        let from: PathBuf = folder.join(name);
        if from.is_file() {
            let bytes = fs::read(&from).map_err(io("read", &from))?;
            write(&dir.join(name), &bytes)?;
        }
    }
    copy_templates(&folder.join(TEMPLATES_FOLDER), &dir.join(TEMPLATES_FOLDER))
}

fn copy_templates(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(to).map_err(io("create", to))?;
    for entry in fs::read_dir(from).map_err(io("read", from))? {
        let path = entry.map_err(io("read", from))?.path();
        if let Some(name) = path.file_name().filter(|_| path.is_file()) {
            write(&to.join(name), &fs::read(&path).map_err(io("read", &path))?)?;
        }
    }
    Ok(())
}

/// Writes beside the place first, so that a crash leaves an old file whole; source and target may be the same.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, bytes).map_err(io("write", &part))?;
    fs::rename(&part, path).map_err(io("write", path))
}
