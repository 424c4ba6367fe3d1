//! A whole run: prepare, train on all ranks, evaluate, write what is left behind.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::closing::Closing;
use crate::config::Config;
use crate::error::{Error, Result, io};
use crate::job::Job;
use crate::metrics::MetricsFile;
use crate::progress::tell;
use crate::recorder::Recorder;
use crate::report::History;
use crate::saves::{CHECKPOINTS_FOLDER, Save, Saves};
use crate::summary::Summary;
use crate::train::{Observer, train_watched};

/// Name of the folder with the trained model, inside of `--out`.
pub const CHECKPOINT_FOLDER: &str = "checkpoint";
/// Name of the folder with the trained adapters, inside of `--out`.
pub const ADAPTER_FOLDER: &str = "adapter";
/// Name of the metrics file, inside of `--out`.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// Name of the loss curve, inside of `--out`.
pub const LOSS_CURVE_FILE: &str = "loss.svg";
/// Name of the folder with event files for TensorBoard, inside of `--out`.
pub const TENSORBOARD_FOLDER: &str = "tensorboard";
/// Name of the file with all settings of the run, inside of `--out`.
pub const SETTINGS_FILE: &str = "settings.toml";

/// How a program that starts a run stays in touch with it.
#[derive(Clone, Copy)]
pub struct Control<'a> {
    /// Called on every rank after every step.
    pub observer: &'a Observer<'a>,
    /// Once true, the run saves after the step of the moment and ends.
    pub stop: &'a AtomicBool,
}

/// A whole run from the beginning. Progress goes to standard error, everything else to `config.out`.
///
/// # Errors
/// A setting, the checkpoint or the data cannot be used, `config.out` holds checkpoints of another run, a rank failed, or
/// a file cannot be written.
pub fn run(config: &Config, observer: &Observer) -> Result<Summary> {
    run_controlled(config, &Control { observer, stop: &AtomicBool::new(false) })
}

/// As [`run`], under control.
///
/// # Errors
/// As [`run`].
pub fn run_controlled(config: &Config, control: &Control) -> Result<Summary> {
    let began = Instant::now();
    let job = Job::prepare_with_weights(config, None)?;
    job.check_outputs(config)?;
    fs::create_dir_all(&config.out).map_err(io("create", &config.out))?;
    let saves = open(config)?;
    if let Some(last) = saves.list()?.last() {
        let allowed = "a folder without checkpoints of an earlier run";
        let fix = format!("go on from {} with --resume, or choose another name", last.display());
        return Err(Error::flag("--out", config.out.display(), allowed, fix));
    }
    let metrics = MetricsFile::create(&config.out.join(METRICS_FILE))?;
    let recorder = Recorder::start(config, &job, &saves, (metrics, History::default()), control)?;
    finish(config, &job, None, recorder, began)
}

/// Settings in layers: defaults, with `resume` those of the run that goes on, a settings file, and `flags` (names and
/// values as [`Config::set`] takes them), each over the ones before. Which run goes on is `out.dir` of flags or file.
///
/// # Errors
/// As [`Config::set_file`], [`Config::set`] and [`resumed_settings`].
pub fn layered_settings(file: Option<&Path>, flags: &[(&str, &str)], resume: bool) -> Result<Config> {
    let given = |mut config: Config| {
        file.map_or(Ok(()), |file| config.set_file(file))?;
        flags.iter().try_for_each(|(name, value)| config.set(name, value))?;
        Ok(config)
    };
    let config = given(Config::default())?;
    match resume {
        true => given(resumed_settings(&config.out)?),
        false => Ok(config),
    }
}

/// The settings of the run in a folder, for [`resume`]; `out` is that folder.
///
/// # Errors
/// There is no checkpoint to go on from, or it cannot be read.
pub fn resumed_settings(out: &Path) -> Result<Config> {
    if !out.join(CHECKPOINTS_FOLDER).is_dir() {
        return Err(no_checkpoint(out));
    }
    let saves = Saves::open(out.join(CHECKPOINTS_FOLDER), None)?;
    let latest = saves.latest()?.ok_or_else(|| no_checkpoint(out))?;
    Ok(Config { out: out.to_path_buf(), ..settings(&latest.save)? })
}

/// Goes on from the newest checkpoint in `config.out`, with settings from [`resumed_settings`], perhaps changed.
///
/// # Errors
/// As [`run`]; there is no checkpoint; data or settings are not those that the checkpoint was written with.
pub fn resume(config: &Config, control: &Control) -> Result<Summary> {
    let began = Instant::now();
    let saves = open(config)?;
    let latest = saves.latest()?.ok_or_else(|| no_checkpoint(&config.out))?;
    let Save { state, .. } = &latest.save;
    let changes = config.changes_since(&settings(&latest.save)?)?;
    let job = Job::prepare_with_weights(config, Some(&latest.save.folder))?;
    job.check_resumable(state)?;
    job.check_outputs(config)?;
    let past = MetricsFile::resume(&config.out.join(METRICS_FILE), state.step)?;
    let recorder = Recorder::start(config, &job, &saves, past, control)?;
    latest.skipped.iter().for_each(|damaged| recorder.say(&damaged.to_string()));
    changes.iter().for_each(|change| recorder.say(change));
    recorder.say(&format!("goes on after step {} from {}", state.step, latest.save.folder.display()));
    finish(config, &job, Some(&latest.save), recorder, began)
}

fn finish(config: &Config, job: &Job, from: Option<&Save>, recorder: Recorder, began: Instant) -> Result<Summary> {
    fs::write(config.out.join(SETTINGS_FILE), config.to_toml()).map_err(io("write", config.out.join(SETTINGS_FILE)))?;
    let trained = train_watched(job, config, from, &recorder);
    // How a run came to fail can be seen in its curve; why it failed matters more than why there is none.
    let history = recorder.finish();
    let (trained, history) = (trained?, history?);
    if !trained.stopped {
        job.write_outputs(config, &trained.weights)?;
    }
    let summary = Summary::new(job, config, &trained, &history, began.elapsed());
    tell(&closing(config, job, &summary, &history));
    Ok(summary)
}

/// What a person is told at the end.
fn closing(config: &Config, job: &Job, summary: &Summary, history: &History) -> String {
    let mut files = match summary.stopped {
        true => vec![("checkpoints", config.out.join(CHECKPOINTS_FOLDER))],
        false => job.outputs(config),
    };
    files.push(("metrics", config.out.join(METRICS_FILE)));
    files.push(("loss curve", config.out.join(LOSS_CURVE_FILE)));
    if config.tensorboard {
        files.push(("TensorBoard", config.out.join(TENSORBOARD_FOLDER)));
    }
    let Summary { samples_dropped, samples_cut, .. } = *summary;
    Closing { history, steps: job.steps(), samples_dropped, samples_cut, files: &files }.to_string()
}

fn open(config: &Config) -> Result<Saves> {
    Saves::open(config.out.join(CHECKPOINTS_FOLDER), NonZeroUsize::new(config.keep))
}

/// The settings a checkpoint was written with.
fn settings(save: &Save) -> Result<Config> {
    let mut config = Config::default();
    config.set_toml(&save.state.settings, &save.folder)?;
    Ok(config)
}

fn no_checkpoint(out: &Path) -> Error {
    let allowed = "a folder with checkpoints of an earlier run";
    let fix = "checkpoints are written with --save-every N; without one the run has to begin again";
    Error::flag("--out", out.display(), allowed, fix)
}
