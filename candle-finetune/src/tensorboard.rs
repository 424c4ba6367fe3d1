//! Event files for TensorBoard's scalars.

mod event;
mod record;

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Result, io};
use crate::report::{StepReport, ValidationReport};

/// Stands where other writers put the machine's name, which a folder that is passed on should not tell.
const WRITER: &str = "candle-finetune";
/// Bytes of a GiB.
const GIB: f64 = (1u64 << 30) as f64;

/// One event file of a run. TensorBoard shows all files of a folder as one run.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Begins a file of its own in `folder`, which is created if need be, for the steps after `done` (0 for a new run).
    /// It tells TensorBoard to forget what older files of the folder say about those steps.
    ///
    /// # Errors
    /// The folder or file cannot be written.
    pub fn create(folder: &Path, time: SystemTime, done: usize) -> Result<Self> {
        fs::create_dir_all(folder).map_err(io("create", folder))?;
        let (path, file) = new_file(folder, time)?;
        let mut events = Self { path, file };
        events.append(&event::version(seconds(time)))?;
        // A new run forgets step 0 as well, where a validation may be.
        let first = if done == 0 { 0 } else { done + 1 };
        events.append(&event::session_start(seconds(time), first))?;
        Ok(events)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a step: `train/*`, `memory/*` (GiB) and, where ranks talk, `ranks/*`, also by kind of traffic, as
    /// `ranks/key_value/sent_gib`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn step(&mut self, time: SystemTime, report: &StepReport) -> Result<()> {
        let gib = |bytes: u64| bytes as f64 / GIB;
        let scalars = [
            ("train/loss", Some(report.loss)),
            ("train/grad_norm", Some(report.grad_norm)),
            ("train/lr", Some(report.lr)),
            ("train/epoch", report.epoch),
            ("train/tokens", Some(report.tokens as f64)),
            ("train/label_tokens", Some(report.label_tokens as f64)),
            ("train/tokens_per_s", Some(report.tokens_per_s)),
            ("memory/now_gib", report.memory.memory_bytes.map(gib)),
            ("memory/peak_gib", report.memory.peak_memory_bytes.map(gib)),
            ("ranks/sent_gib", Some(gib(report.comm.bytes_sent))),
            ("ranks/waited_s", Some(report.comm.waited_s)),
            ("ranks/waited_max_s", Some(report.comm.waited_max_s)),
        ];
        let mut known: Vec<(&str, f64)> = scalars.into_iter().filter_map(|(tag, value)| Some((tag, value?))).collect();
        let by_kind = report.comm.operations.iter().flat_map(|(kind, used)| {
            let scalars =
                [("sent_gib", gib(used.bytes_sent)), ("waited_s", used.waited_s), ("waited_max_s", used.waited_max_s)];
            scalars.map(|(what, value)| (format!("ranks/{}/{what}", kind.name()), value))
        });
        let by_kind: Vec<(String, f64)> = by_kind.collect();
        known.extend(by_kind.iter().map(|(tag, value)| (tag.as_str(), *value)));
        self.scalars(time, report.step, &known)
    }

    /// Appends a validation: `val/loss`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn validation(&mut self, time: SystemTime, report: &ValidationReport) -> Result<()> {
        self.scalars(time, report.step, &[("val/loss", report.val_loss)])
    }

    /// Appends numbers of a step by their tags; what is before the last `/` of a tag is the group that TensorBoard shows
    /// it in. Numbers are kept in f32.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn scalars(&mut self, time: SystemTime, step: usize, scalars: &[(&str, f64)]) -> Result<()> {
        self.append(&event::scalars(seconds(time), step, scalars))
    }

    /// In one call, so that a kill leaves whole records but for the last.
    fn append(&mut self, event: &[u8]) -> Result<()> {
        self.file.write_all(&record::frame(event)).map_err(io("write", &self.path))
    }
}

/// A file that did not exist. TensorBoard reads files in the order of their names: by second, then by number.
fn new_file(folder: &Path, time: SystemTime) -> Result<(PathBuf, File)> {
    let mut number = 0;
    loop {
        let path = folder.join(format!("events.out.tfevents.{:010}.{WRITER}.{number:03}", seconds(time) as u64));
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            file => return file.map_err(io("create", &path)).map(|file| (path, file)),
        }
    }
}

/// Since 1970; a clock before that counts as 1970.
fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
