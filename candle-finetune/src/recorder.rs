//! What a run writes while it goes on: metrics, checkpoints, the screen.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::config::Config;
use crate::error::{Result, io};
use crate::job::Job;
use crate::metrics::MetricsFile;
use crate::plot;
use crate::progress::Progress;
use crate::report::{History, StepReport, ValidationReport};
use crate::run::{Control, LOSS_CURVE_FILE, TENSORBOARD_FOLDER, timeline_file};
use crate::sample::Position;
use crate::saves::{OPTIMIZER_FILE, Saves, State};
use crate::tensorboard::EventFile;
use crate::train::{Next, Observer, Watcher};
use crate::trainer::Trainer;

/// Records one run. Only rank 0 writes, so a lock that is poisoned means that rank 0 is already gone.
pub(crate) struct Recorder<'a> {
    config: &'a Config,
    job: &'a Job,
    saves: &'a Saves,
    observer: &'a Observer<'a>,
    stop: &'a AtomicBool,
    progress: Progress,
    /// Seconds of earlier parts of the run.
    before: f64,
    files: Mutex<Files>,
}

struct Files {
    metrics: MetricsFile,
    events: Option<EventFile>,
    history: History,
}

impl<'a> Recorder<'a> {
    /// Begins, after the `past` of a run that goes on.
    pub(crate) fn start(
        config: &'a Config,
        job: &'a Job,
        saves: &'a Saves,
        past: (MetricsFile, History),
        control: &Control<'a>,
    ) -> Result<Self> {
        let (metrics, history) = past;
        let (done, before) = history.steps.last().map_or((0, 0.0), |report| (report.step, report.seconds));
        let events = match config.tensorboard {
            true => Some(EventFile::create(&config.out.join(TENSORBOARD_FOLDER), SystemTime::now(), done)?),
            false => None,
        };
        let progress = Progress::start(job.steps(), done, &job.header(config));
        let Control { observer, stop } = *control;
        let files = Mutex::new(Files { metrics, events, history });
        Ok(Self { config, job, saves, observer, stop, progress, before, files })
    }

    /// Tells the user something.
    pub(crate) fn say(&self, text: &str) {
        self.progress.notice(text);
    }

    /// Draws the loss curve of the steps that were done and gives the reports of the whole run.
    pub(crate) fn finish(self) -> Result<History> {
        self.progress.finish();
        // Rank 0 may have failed.
        let history = self.files.into_inner().unwrap_or_else(PoisonError::into_inner).history;
        if !history.steps.is_empty() {
            plot::loss_curve(&self.config.out.join(LOSS_CURVE_FILE), "Loss", &history)?;
        }
        Ok(history)
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().expect("rank 0 is alive")
    }
}

impl Watcher for Recorder<'_> {
    fn notice(&self, text: &str) {
        self.say(text);
    }

    fn memory(&self, text: &str) {
        self.say(text);
    }

    fn step(&self, rank: usize, report: &StepReport) -> Result<()> {
        if rank == 0 {
            let report = StepReport { seconds: self.before + report.seconds, ..*report };
            let mut files = self.files();
            files.metrics.write(&report)?;
            files.events.as_mut().map_or(Ok(()), |events| events.step(SystemTime::now(), &report))?;
            files.history.steps.push(report);
            self.progress.step(&report);
        }
        (self.observer)(rank, report)
    }

    fn validation(&self, report: &ValidationReport) -> Result<()> {
        let report = ValidationReport { seconds: self.before + report.seconds, ..*report };
        let mut files = self.files();
        files.metrics.write_validation(&report)?;
        files.events.as_mut().map_or(Ok(()), |events| events.validation(SystemTime::now(), &report))?;
        files.history.validations.push(report);
        self.progress.validation(&report);
        Ok(())
    }

    fn timeline(&self, step: usize, json: &str) -> Result<()> {
        let path = self.config.out.join(timeline_file(step));
        fs::write(&path, json).map_err(io("write", &path))?;
        self.say(&format!("timeline of step {step} written to {}", path.display()));
        Ok(())
    }

    fn next(&self, step: usize) -> Next {
        let due = |every: usize| step.is_multiple_of(every) || step == self.job.steps();
        match self.config.save_every.is_some_and(due) {
            _ if self.stop.load(Ordering::Relaxed) => Next::Stop,
            true => Next::Save,
            false => Next::GoOn,
        }
    }

    fn save(&self, trainer: &Trainer, position: Position) -> Result<()> {
        let step = trainer.optimizer().steps();
        let state = {
            let history = &self.files().history;
            let val_loss =
                history.validations.last().filter(|report| report.step == step).map(|report| report.val_loss);
            State {
                step,
                position,
                seed: self.config.seed,
                data: self.job.fingerprint().to_string(),
                settings: self.config.to_toml(),
                val_loss,
                best_val_loss: history.best_validation().map(|report| report.val_loss),
            }
        };
        let saved = self.saves.save(&state, |folder| {
            self.job.write_state(self.config, trainer.weights(), folder)?;
            trainer.optimizer().save(&folder.join(OPTIMIZER_FILE))
        })?;
        self.progress.notice(&format!("step {step} saved as {}", saved.display()));
        Ok(())
    }
}
