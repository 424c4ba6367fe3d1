//! Reading the files of a checkpoint folder.

use std::io::ErrorKind;
use std::path::Path;

use crate::error::{Error, Result};

/// The text of a file, or `None` where there is no such file.
pub(crate) fn text(folder: &Path, name: &str) -> Result<Option<String>> {
    let path = folder.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(Error::Io { path, cause }),
    }
}

/// The JSON value in a file, or `None` where there is no such file.
pub(crate) fn json(folder: &Path, name: &str) -> Result<Option<serde_json::Value>> {
    let Some(text) = text(folder, name)? else { return Ok(None) };
    let value = serde_json::from_str(&text);
    value.map(Some).map_err(|cause| Error::Json { what: folder.join(name).display().to_string(), cause })
}
