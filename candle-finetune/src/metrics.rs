//! One JSON line per step.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Result, io};
use crate::report::StepReport;

/// Writes step reports as JSONL; every line is on disk before the next step begins.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Begins an empty file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).map_err(io("write", path))?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    /// Appends one line.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, report: &StepReport) -> Result<()> {
        let json = serde_json::to_string(report).map_err(std::io::Error::from);
        json.and_then(|json| writeln!(self.file, "{json}")).map_err(io("write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_one_json_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let report = StepReport {
            step: 1,
            loss: 2.5,
            grad_norm: 0.5,
            lr: 0.001,
            tokens: 100,
            label_tokens: 10,
            tokens_per_s: 50.0,
            seconds: 2.0,
        };
        let mut metrics = MetricsFile::create(&path).unwrap();
        metrics.write(&report).unwrap();
        metrics.write(&StepReport { step: 2, ..report }).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let first = r#"{"step":1,"loss":2.5,"grad_norm":0.5,"lr":0.001,"tokens":100,"label_tokens":10,"tokens_per_s":50.0,"seconds":2.0}"#;
        assert_eq!(text.lines().collect::<Vec<_>>(), [first, &first.replace("\"step\":1", "\"step\":2")]);
        assert!(MetricsFile::create(dir.path()).unwrap_err().to_string().starts_with("cannot write"));
    }
}
