//! A whole run: prepare, train on all ranks, evaluate, write what is left behind.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::closing::Closing;
use crate::config::Config;
use crate::cpus::Cpus;
use crate::error::{Error, Result, io};
use crate::job::Job;
use crate::launch::Launch;
use crate::metrics::MetricsFile;
use crate::progress::tell;
use crate::ranks::Ranks;
use crate::recorder::Recorder;
use crate::report::History;
use crate::saves::{CHECKPOINTS_FOLDER, Latest, Save, Saves};
use crate::summary::Summary;
use crate::train::{Observed, Observer, Watcher, train_on};
use crate::transport::Transport;

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

/// Name of the file with the timeline of a step, inside of `--out`.
pub fn timeline_file(step: usize) -> String {
    format!("trace-step-{step}.json")
}

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
    run_on(config, control, &Launch::alone().ranks(config)?)
}

/// As [`run_controlled`], on ranks that [`Launch::ranks`] gave. Of several processes all call it, with the same settings.
/// Files and screen are left to that of rank 0, whose summary is the one of the whole run.
///
/// # Errors
/// As [`run`]; or another process failed or was set up for something else. All of them end.
pub fn run_on(config: &Config, control: &Control, ranks: &Ranks) -> Result<Summary> {
    let began = Instant::now();
    let config = &ranks.together(ranks.settle(config))?;
    let job = prepare(config, None, ranks)?;
    let saves = ranks.on_first(|| {
        job.check_outputs(config)?;
        fs::create_dir_all(&config.out).map_err(io("create", &config.out))?;
        let saves = open(config)?;
        if let Some(last) = saves.list()?.last() {
            let allowed = "a folder without checkpoints of an earlier run";
            let fix = format!("go on from {} with --resume, or choose another name", last.display());
            return Err(Error::flag("--out", config.out.display(), allowed, fix));
        }
        Ok(saves)
    })?;
    let start = |saves| {
        let metrics = MetricsFile::create(&config.out.join(METRICS_FILE))?;
        Recorder::start(config, &job, saves, (metrics, History::default()), control)
    };
    let recorder = ranks.together(saves.as_ref().map(start).transpose())?;
    Run { config, job: &job, from: None, control, ranks, began }.finish(recorder)
}

/// Everything that can be known before anything is written.
fn prepare(config: &Config, saved: Option<&Save>, ranks: &Ranks) -> Result<Job> {
    let job = Job::prepare_with_weights(config, saved.map(|save| save.folder.as_path()), ranks.device());
    let job = job.and_then(|job| saved.map_or(Ok(()), |save| job.check_resumable(&save.state)).map(|()| job));
    let mut job = ranks.together(job)?;
    ranks.agree(config, &job)?;
    job.cpus = Cpus::gather(&config.launch, ranks)?;
    Ok(job)
}

/// Settings in layers: those of `base`, with `resume` those of the run that goes on, a settings file, and `flags` (names and
/// values as [`Config::set`] takes them), each over the ones before. Which run goes on is `out.dir` of flags or file; only
/// the process of rank 0 puts right what a kill may have left there. `variables` are those of the environment, which say
/// who started this process: [`Config::launch`], unless ranks are threads ([`Config::comm`]).
///
/// # Errors
/// As [`Config::set_file`], [`Config::set`], [`Launch::from_vars`] and [`resumed_settings`].
pub fn layered_settings(
    base: Config,
    file: Option<&Path>,
    flags: &[(&str, &str)],
    resume: bool,
    variables: impl Fn(&str) -> Option<String>,
) -> Result<Config> {
    let given = |mut config: Config| -> Result<Config> {
        file.map_or(Ok(()), |file| config.set_file(file))?;
        flags.iter().try_for_each(|(name, value)| config.set(name, value))?;
        Ok(config)
    };
    let asked = given(base)?;
    let launch = match asked.comm {
        Transport::Threads => Launch::alone(),
        _ => Launch::from_vars(variables)?,
    };
    let config = match resume {
        true => {
            let mut last = match launch.is_first() {
                true => resumed_settings(&asked.out)?,
                false => last_settings(&asked.out, Saves::peek(&asked.out.join(CHECKPOINTS_FOLDER))?)?,
            };
            if let Some(size) = launch.size().filter(|&size| size > 1) {
                let cp = given(last.clone())?.cp;
                last = with_processes(last, size, cp);
            }
            given(last)?
        }
        false => asked,
    };
    // The run that goes on may be one of threads.
    let launch = if config.comm == Transport::Threads { Launch::alone() } else { launch };
    Ok(Config { launch, ..config })
}

/// The settings of a run that goes on with as many replicas of `cp` ranks as there are processes for now, each of which
/// accumulates as many batches as keep the number in a step.
fn with_processes(last: Config, size: usize, cp: usize) -> Config {
    let (batches, replicas) = (last.accumulate * last.replicas(), size / cp);
    let fits = size.is_multiple_of(cp) && batches.is_multiple_of(replicas);
    Config { dp: None, accumulate: if fits { batches / replicas } else { last.accumulate }, ..last }
}

/// The settings of the run in a folder, for [`resume`]; `out` is that folder.
///
/// # Errors
/// There is no checkpoint to go on from, or it cannot be read.
pub fn resumed_settings(out: &Path) -> Result<Config> {
    if !out.join(CHECKPOINTS_FOLDER).is_dir() {
        return Err(no_checkpoint(out));
    }
    last_settings(out, Saves::open(out.join(CHECKPOINTS_FOLDER), None)?.latest()?)
}

fn last_settings(out: &Path, latest: Option<Latest>) -> Result<Config> {
    let latest = latest.ok_or_else(|| no_checkpoint(out))?;
    Ok(Config { out: out.to_path_buf(), ..settings(&latest.save)? })
}

/// Goes on from the newest checkpoint in `config.out`, with settings from [`resumed_settings`], perhaps changed.
///
/// # Errors
/// As [`run`]; there is no checkpoint; data or settings are not those that the checkpoint was written with.
pub fn resume(config: &Config, control: &Control) -> Result<Summary> {
    resume_on(config, control, &Launch::alone().ranks(config)?)
}

/// As [`resume`], on ranks that [`Launch::ranks`] gave, see [`run_on`]. Every process reads the checkpoint, so that all
/// machines have to see `config.out`.
///
/// # Errors
/// As [`resume`] and [`run_on`].
pub fn resume_on(config: &Config, control: &Control, ranks: &Ranks) -> Result<Summary> {
    let began = Instant::now();
    let config = &ranks.together(ranks.settle(config))?;
    let opened = ranks.on_first(|| {
        let saves = open(config)?;
        let latest = saves.latest()?.ok_or_else(|| no_checkpoint(&config.out))?;
        Ok((saves, latest))
    })?;
    let save = ranks.together(save_of_first(config, opened.as_ref().map(|(_, latest)| &latest.save), ranks))?;
    let changes = ranks.together(settings(&save).and_then(|before| config.changes_since(&before)))?;
    let job = prepare(config, Some(&save), ranks)?;
    let recorder = opened.as_ref().map(|opened| go_on(config, &job, opened, &changes, control)).transpose();
    let recorder = ranks.together(recorder)?;
    Run { config, job: &job, from: Some(&save), control, ranks, began }.finish(recorder)
}

/// What rank 0 writes from here on.
fn go_on<'a>(
    config: &'a Config,
    job: &'a Job,
    (saves, latest): &'a (Saves, Latest),
    changes: &[String],
    control: &Control<'a>,
) -> Result<Recorder<'a>> {
    let Latest { save, skipped } = latest;
    job.check_outputs(config)?;
    let past = MetricsFile::resume(&config.out.join(METRICS_FILE), save.state.step)?;
    let recorder = Recorder::start(config, job, saves, past, control)?;
    skipped.iter().for_each(|damaged| recorder.say(&damaged.to_string()));
    changes.iter().for_each(|change| recorder.say(change));
    let passed = config.trace.filter(|&step| step <= save.state.step && !config.out.join(timeline_file(step)).exists());
    if let Some(step) = passed {
        recorder.say(&format!("step {step} is done already: there will be no timeline of it"));
    }
    recorder.say(&format!("goes on after step {} from {}", save.state.step, save.folder.display()));
    Ok(recorder)
}

/// The checkpoint that rank 0 goes on from.
fn save_of_first(config: &Config, found: Option<&Save>, ranks: &Ranks) -> Result<Save> {
    let name =
        found.and_then(|save| save.folder.file_name()).map_or(String::new(), |name| name.to_string_lossy().into());
    let name = ranks.text_of_first(&name)?;
    found.map_or_else(|| Save::open(&config.out.join(CHECKPOINTS_FOLDER).join(name)), |save| Ok(save.clone()))
}

/// A run that is prepared.
struct Run<'a> {
    config: &'a Config,
    job: &'a Job,
    from: Option<&'a Save>,
    control: &'a Control<'a>,
    ranks: &'a Ranks,
    began: Instant,
}

impl Run<'_> {
    /// Trains and writes what is left behind; `recorder` is rank 0's.
    fn finish(self, recorder: Option<Recorder>) -> Result<Summary> {
        let Self { config, job, from, control, ranks, began } = self;
        let settings = config.out.join(SETTINGS_FILE);
        ranks.on_first(|| fs::write(&settings, config.to_toml()).map_err(io("write", &settings)))?;
        let observed = Observed(control.observer);
        let watcher = recorder.as_ref().map_or(&observed as &dyn Watcher, |recorder| recorder);
        let trained = train_on(job, config, from, watcher, ranks);
        // How a run came to fail can be seen in its curve; why it failed matters more than why there is none.
        let history = recorder.map(Recorder::finish).transpose();
        let trained = trained?;
        let history = ranks.together(history)?;
        if !trained.stopped {
            ranks.on_first(|| job.write_outputs(config, &trained.weights))?;
        }
        let peaks = ranks.peak_memory()?;
        // Other processes know what they saw.
        let history = history.unwrap_or_else(|| History { steps: trained.reports.clone(), validations: Vec::new() });
        let summary = Summary::new(job, config, &trained, &history, began.elapsed());
        if ranks.is_first() {
            tell(&closing(config, job, &summary, (&history, &peaks)));
        }
        Ok(summary)
    }
}

/// What a person is told at the end.
fn closing(config: &Config, job: &Job, summary: &Summary, (history, peaks): (&History, &[u64])) -> String {
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
    Closing { history, steps: job.steps(), peaks, samples_dropped, samples_cut, files: &files }.to_string()
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
