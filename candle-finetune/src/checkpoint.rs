//! The trained model as a checkpoint folder: weights and configuration in the usual layout, tokenizer beside them.

use std::fs;
use std::path::{Path, PathBuf};

use candle_cp_layers::Weights;

use crate::error::{Result, io};
use crate::job::Job;
use crate::{saves, small_model};

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

/// Writes a folder that `--model` takes, or replaces an older one as a whole: see [`saves::replace`] for what a kill can
/// leave. It may be the folder that training began from.
///
/// # Errors
/// A file cannot be read or written, or something that is no checkpoint is in the way; then nothing has changed.
pub fn save(dir: &Path, job: &Job, weights: &Weights) -> Result<()> {
    saves::replace(dir, |folder| write(folder, job, weights))
}

/// The files of [`save`], into a folder that the caller publishes.
///
/// # Errors
/// A file cannot be read or written.
pub fn write(folder: &Path, job: &Job, weights: &Weights) -> Result<()> {
    weights.save(folder, job.model.as_ref())?;
    write_companions(folder, job)
}

/// The files beside the weights: tokenizer, chat templates, settings of the processor and of generation.
///
/// # Errors
/// A file cannot be read or written.
pub fn write_companions(folder: &Path, job: &Job) -> Result<()> {
    let Some(from) = job.folder() else {
        let path = folder.join(TOKENIZER_FILE);
        return fs::write(&path, small_model::tokenizer_json(job.family())).map_err(io("write", path));
    };
    for name in COMPANIONS.iter().filter(|name| from.join(name).is_file()) {
        copy(&from.join(name), &folder.join(name))?;
    }
    copy_templates(&from.join(TEMPLATES_FOLDER), &folder.join(TEMPLATES_FOLDER))
}

fn copy_templates(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(to).map_err(io("create", to))?;
    for entry in fs::read_dir(from).map_err(io("read", from))? {
        let path: PathBuf = entry.map_err(io("read", from))?.path();
        if let Some(name) = path.file_name().filter(|_| path.is_file()) {
            copy(&path, &to.join(name))?;
        }
    }
    Ok(())
}

/// Copies the bytes only: the copy of a file that may not be written may be written.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::write(to, fs::read(from).map_err(io("read", from))?).map_err(io("write", to))
}
