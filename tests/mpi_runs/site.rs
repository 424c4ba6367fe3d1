//! The files of one case, and runs by threads to compare with.

use crate::job::Job;
use candle_finetune::{CHECKPOINT_FOLDER, Config, Control, METRICS_FILE, resume, resumed_settings, run};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

/// Nothing, or what is wrong.
pub type Found = Result<(), String>;

/// Flags of one run, and their values.
pub type Flags<'a> = [(&'a str, &'a str)];

pub const STEPS: usize = 6;
/// Two replicas of two ranks.
pub const DP_2_CP_2: &Flags = &[("--cp", "2"), ("--dp", "2")];

pub struct Site {
    dir: TempDir,
}

pub fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

impl Site {
    pub fn new() -> Result<Self, String> {
        let site = Self { dir: tempfile::tempdir().map_err(text)? };
        fs::write(site.data(), samples("Say")).map_err(text)?;
        Ok(site)
    }

    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    fn data(&self) -> PathBuf {
        self.path("data.jsonl")
    }

    /// Settings of a short run that is saved and validated on the way; `flags` over them.
    fn flags(&self, out: &str, flags: &Flags) -> Vec<(String, String)> {
        let [model, data, out] = [fixture("gemma4-dense/checkpoint"), self.data(), self.path(out)];
        let [model, data, out] = [model, data, out].map(|path| path.display().to_string());
        let steps = STEPS.to_string();
        let common = [
            ("--model", model.as_str()),
            ("--data", &data),
            ("--out", &out),
            ("--steps", &steps),
            ("--warmup", "1"),
            ("--batch-rows", "1"),
            ("--seq-len", "64"),
            ("--lr", "1e-3"),
            ("--save-every", "2"),
            ("--validation-share", "0.2"),
            ("--validate-every", "3"),
            ("--deadline", "300"),
        ];
        common.iter().chain(flags).map(|(flag, value)| (flag.to_string(), value.to_string())).collect()
    }

    /// A job that trains; a folder of its own for each `name`.
    pub fn job(&self, name: &str, size: usize, flags: &Flags) -> Job {
        let flags = self.flags(name, flags);
        let flags: Vec<_> = flags.iter().map(|(flag, value)| (flag.as_str(), value.as_str())).collect();
        Job::new(self.path(format!("{name}-job")), size, &flags)
    }

    /// A job that goes on with a run.
    pub fn resuming(&self, name: &str, size: usize, flags: &Flags) -> Job {
        let out = self.path(name).display().to_string();
        let flags = [&[("--out", out.as_str())], flags].concat();
        Job::new(self.path(format!("{name}-resuming-{size}")), size, &flags).resume()
    }

    /// The same training on rank threads of this process.
    pub fn threads(&self, name: &str, flags: &Flags) -> Result<PathBuf, String> {
        let mut config = Config::default();
        for (flag, value) in self.flags(name, flags) {
            config.set(&flag, &value).map_err(text)?;
        }
        run(&config, &|_, _| Ok(())).map_err(text)?;
        Ok(config.out)
    }

    /// Goes on with a copy of a run, on rank threads of this process.
    pub fn threads_go_on(&self, name: &str, flags: &Flags) -> Result<PathBuf, String> {
        let copy = self.path(format!("{name}-copy"));
        copy_folder(&self.path(name), &copy)?;
        let mut config = resumed_settings(&copy).map_err(text)?;
        flags.iter().try_for_each(|(flag, value)| config.set(flag, value)).map_err(text)?;
        resume(&config, &Control { observer: &|_, _| Ok(()), stop: &AtomicBool::new(false) }).map_err(text)?;
        Ok(copy)
    }

    /// Whether a run has no finished model, and the checkpoints of these steps and no others.
    pub fn has_checkpoints(&self, name: &str, steps: &[usize]) -> Found {
        let out = self.path(name);
        let entries = fs::read_dir(out.join("checkpoints")).map_err(text)?.flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut found: Vec<_> = names.filter(|name| name.starts_with("step-")).collect();
        found.sort();
        let wanted: Vec<_> = steps.iter().map(|step| format!("step-{step:08}")).collect();
        match found == wanted && !out.join(CHECKPOINT_FOLDER).exists() {
            true => Ok(()),
            false => Err(format!("checkpoints {found:?}, where {wanted:?} and no finished model are expected")),
        }
    }
}

/// Samples of different lengths: two replicas have batches in all of the steps.
pub fn samples(answer: &str) -> String {
    let line =
        |i: usize| format!("{{\"prompt\": \"{}\", \"completion\": \"{answer} {i}.\"}}\n", "and on ".repeat(i % 4));
    (0..40).map(line).collect()
}

pub fn copy_folder(from: &Path, to: &Path) -> Found {
    fs::create_dir_all(to).map_err(text)?;
    for entry in fs::read_dir(from).map_err(text)?.flatten() {
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() { copy_folder(&from, &to)? } else { fs::copy(&from, &to).map(drop).map_err(text)? }
    }
    Ok(())
}

/// What a metrics file says that does not depend on clocks, memory or how long messages took.
fn metrics(out: &Path) -> Result<Vec<BTreeMap<String, Value>>, String> {
    const KEPT: [&str; 9] =
        ["step", "epoch", "loss", "grad_norm", "lr", "tokens", "label_tokens", "val_loss", "val_tokens"];
    let lines = fs::read_to_string(out.join(METRICS_FILE)).map_err(text)?;
    let line = |line: &str| {
        let mut all: BTreeMap<String, Value> = serde_json::from_str(line).map_err(text)?;
        all.retain(|name, _| KEPT.contains(&name.as_str()));
        Ok(all)
    };
    lines.lines().map(line).collect()
}

/// Whether two runs have the same metrics and ended with the same weights, bit by bit.
pub fn same(found: &Path, expected: &Path) -> Found {
    let (ours, theirs) = (metrics(found)?, metrics(expected)?);
    if theirs.iter().filter(|line| line.contains_key("loss")).count() < STEPS
        || !theirs.iter().any(|line| line.contains_key("val_loss"))
    {
        return Err(format!("{} is no whole run: {theirs:#?}", expected.display()));
    }
    if ours != theirs {
        return Err(format!("other metrics: {ours:#?} where {theirs:#?} is expected"));
    }
    let weights = |out: &Path| fs::read(out.join(CHECKPOINT_FOLDER).join("model.safetensors")).map_err(text);
    match weights(found)? == weights(expected)? {
        true => Ok(()),
        false => Err("other weights".to_string()),
    }
}

/// Whether two runs have the same losses, up to the order of sums.
pub fn close(found: &Path, expected: &Path) -> Found {
    let losses = |out: &Path| {
        let lines = metrics(out)?.into_iter();
        Ok::<Vec<f64>, String>(lines.filter_map(|line| line.get("loss")?.as_f64()).collect())
    };
    let (ours, theirs) = (losses(found)?, losses(expected)?);
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b.abs();
    match ours.len() == theirs.len() && ours.iter().zip(&theirs).all(near) {
        true => Ok(()),
        false => Err(format!("losses {ours:?} where {theirs:?} are expected")),
    }
}
