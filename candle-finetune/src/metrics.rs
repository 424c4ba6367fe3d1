//! One JSON line per step and per validation.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Error, Result, io};
use crate::report::{History, StepReport, ValidationReport};

/// Writes reports as JSONL; every line is handed to the system before the next step begins.
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

    /// Goes on after `step`, and returns what the file says up to there. Lines of later steps and a half-written last line
    /// are cut; the file is replaced as a whole, so that a kill leaves the old or the new one. Without a file it begins
    /// one.
    ///
    /// # Errors
    /// The file cannot be read or written, or a whole line up to there is no report.
    pub fn resume(path: &Path, step: usize) -> Result<(Self, History)> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(io("read", path)(error)),
        };
        let (kept, history) =
            keep(&bytes, step).map_err(|(line, reason)| Error::Metrics { path: path.to_path_buf(), line, reason })?;
        let part = path.with_extension("part");
        let written = File::create(&part).and_then(|mut file| file.write_all(&kept).and_then(|()| file.sync_all()));
        written.map_err(io("write", &part))?;
        fs::rename(&part, path).map_err(io("write", path))?;
        let file = OpenOptions::new().append(true).open(path).map_err(io("write", path))?;
        Ok((Self { path: path.to_path_buf(), file }, history))
    }

    /// Appends a step.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, report: &StepReport) -> Result<()> {
        self.append(report)
    }

    /// Appends a validation.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_validation(&mut self, report: &ValidationReport) -> Result<()> {
        self.append(report)
    }

    fn append(&mut self, report: &impl Serialize) -> Result<()> {
        let json = serde_json::to_string(report).map_err(std::io::Error::from);
        // One call, so that a kill leaves whole lines but for the last.
        json.and_then(|json| self.file.write_all(format!("{json}\n").as_bytes())).map_err(io("write", &self.path))
    }
}

/// The whole lines up to a step and what they say; or the number of a line, from 1, that says nothing, and why.
fn keep(bytes: &[u8], step: usize) -> std::result::Result<(Vec<u8>, History), (usize, String)> {
    let (mut kept, mut history) = (Vec::new(), History::default());
    for (index, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        if !line.ends_with(b"\n") {
            break;
        }
        let at_line = |reason: String| (index + 1, reason);
        let value: Value = serde_json::from_slice(line).map_err(|error| at_line(error.to_string()))?;
        match value.get("step").and_then(Value::as_u64) {
            None => return Err(at_line("it has no \"step\"".to_string())),
            Some(found) if found > step as u64 => continue,
            Some(_) if value.get("val_loss").is_some() => history.validations.push(report(value).map_err(at_line)?),
            Some(_) => history.steps.push(report(value).map_err(at_line)?),
        }
        kept.extend_from_slice(line);
    }
    Ok((kept, history))
}

fn report<T: DeserializeOwned>(value: Value) -> std::result::Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use crate::report::tests::{step_report, validation_report};

    const STEP: &str = concat!(
        r#"{"step":1,"epoch":0.25,"loss":2.5,"grad_norm":0.5,"lr":0.001,"tokens":100,"label_tokens":10,"#,
        r#""tokens_per_s":50.0,"bytes_sent":4096,"waited_s":0.5,"waited_max_s":0.75,"#,
        r#""operations":{"key_value":{"bytes_sent":4096,"waited_s":0.5,"waited_max_s":0.75}},"#,
        r#""memory_bytes":1073741824,"peak_memory_bytes":3221225472,"seconds":2.0}"#
    );

    fn lines(path: &Path) -> Vec<String> {
        let text = fs::read_to_string(path).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'), "{text:?}");
        text.lines().map(str::to_string).collect()
    }

    #[test]
    fn a_report_is_one_json_line_without_what_is_not_known() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let report = step_report(1, 2.5);
        let mut metrics = MetricsFile::create(&path).unwrap();
        metrics.write(&report).unwrap();
        metrics.write(&StepReport { step: 2, epoch: None, memory: Memory::default(), ..report }).unwrap();
        metrics.write_validation(&validation_report(2, 1.5)).unwrap();
        let bare = STEP.replace("\"step\":1,\"epoch\":0.25", "\"step\":2");
        let bare = bare.replace("\"memory_bytes\":1073741824,\"peak_memory_bytes\":3221225472,", "");
        let validation = r#"{"step":2,"val_loss":1.5,"val_tokens":40,"seconds":3.0}"#;
        assert_eq!(lines(&path), [STEP, &bare, validation]);
        assert!(MetricsFile::create(dir.path()).unwrap_err().to_string().starts_with("cannot write"));
    }

    #[test]
    fn a_resumed_file_keeps_what_was_before_the_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        // A loss that needs all its digits.
        let loss = |step: usize| 1.0 / 3.0 + step as f64;
        let mut metrics = MetricsFile::create(&path).unwrap();
        metrics.write_validation(&validation_report(0, 9.0)).unwrap();
        for step in 1..=5 {
            metrics.write(&step_report(step, loss(step))).unwrap();
            metrics.write_validation(&validation_report(step, loss(step))).unwrap();
        }
        let unbroken = lines(&path);
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(br#"{"step":6,"lo"#).unwrap();

        let (mut metrics, history) = MetricsFile::resume(&path, 3).unwrap();
        assert_eq!(lines(&path), unbroken[..7]);
        assert_eq!(history.steps, (1..=3).map(|step| step_report(step, loss(step))).collect::<Vec<_>>());
        let validations = (0..=3).map(|step| validation_report(step, if step == 0 { 9.0 } else { loss(step) }));
        assert_eq!(history.validations, validations.collect::<Vec<_>>());
        for step in 4..=5 {
            metrics.write(&step_report(step, loss(step))).unwrap();
            metrics.write_validation(&validation_report(step, loss(step))).unwrap();
        }
        assert_eq!(lines(&path), unbroken, "as if it had not been broken");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_file_from_before_there_were_kinds_of_traffic_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let (before, after) = (STEP.find("\"operations\"").unwrap(), STEP.find("\"memory_bytes\"").unwrap());
        let old = format!("{}{}\n", &STEP[..before], &STEP[after..]);
        fs::write(&path, &old).unwrap();
        let (_, history) = MetricsFile::resume(&path, 1).unwrap();
        let report = step_report(1, 2.5);
        let comm = crate::CommUse { operations: Default::default(), ..report.comm };
        assert_eq!(history.steps, [StepReport { comm, ..report }]);
        assert_eq!(fs::read_to_string(&path).unwrap(), old);
    }

    #[test]
    fn a_validation_that_is_not_finite_is_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut metrics = MetricsFile::create(&path).unwrap();
        for (step, val_loss) in [(1, f64::NAN), (2, 1.5), (3, f64::INFINITY)] {
            metrics.write_validation(&validation_report(step, val_loss)).unwrap();
        }
        let before = lines(&path);
        let (_, history) = MetricsFile::resume(&path, 3).unwrap();
        assert_eq!(lines(&path), before);
        let found = history.validations.iter().map(|report| (report.step, report.val_loss.is_nan()));
        assert_eq!(found.collect::<Vec<_>>(), [(1, true), (2, false), (3, true)]);
        assert_eq!(history.best_validation().map(|report| report.step), Some(2));
    }

    #[test]
    fn a_file_can_be_cut_anywhere_and_be_absent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let (mut metrics, history) = MetricsFile::resume(&path, 7).unwrap();
        assert_eq!(history, History::default());
        metrics.write(&step_report(1, 2.5)).unwrap();
        metrics.write(&step_report(2, 2.5)).unwrap();
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let (_, history) = MetricsFile::resume(&path, 7).unwrap();
            let complete = whole[..length].iter().filter(|&&byte| byte == b'\n').count();
            assert_eq!((lines(&path).len(), history.steps.len()), (complete, complete), "{length} bytes");
        }
    }

    #[test]
    fn a_line_that_is_no_report_is_named_and_the_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        for (line, reason) in [
            ("hello", "expected value"),
            ("[1]", "no \"step\""),
            ("{\"step\":-1}", "no \"step\""),
            ("{\"step\":2}", "missing field `loss`"),
            ("{\"step\":2,\"val_loss\":\"low\"}", "expected f64"),
        ] {
            let text = format!("{STEP}\n{line}\n");
            fs::write(&path, &text).unwrap();
            let error = MetricsFile::resume(&path, 3).unwrap_err();
            let told = error.to_string();
            assert!(told.contains("metrics.jsonl line 2 is no report of a run: ") && told.contains(reason), "{told}");
            assert!(told.ends_with("; move the file away to resume without it") && error.is_usage(), "{told}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert!(MetricsFile::resume(dir.path(), 3).unwrap_err().to_string().starts_with("cannot read"));
    }
}
