//! The trained model as a checkpoint folder: weights and configuration in the usual layout, tokenizer beside them.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gemma4::Weights;

use crate::error::{Result, io};
use crate::job::Job;
use crate::vocabulary::TOKENIZER_FILE;

/// Files that are taken over from the checkpoint that training began from, where it has them.
const COMPANIONS: [&str; 6] = [
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "chat_template.jinja",
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
        return write(&dir.join(TOKENIZER_FILE), job.vocabulary.to_json()?.as_bytes());
    };
    for name in COMPANIONS {
        let from: PathBuf = folder.join(name);
        if from.is_file() {
            let bytes = fs::read(&from).map_err(io("read", &from))?;
            write(&dir.join(name), &bytes)?;
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
