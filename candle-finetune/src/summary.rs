//! What a run came to.

use std::time::Duration;

use serde::Serialize;

use crate::config::Config;
use crate::job::Job;
use crate::report::History;
use crate::sample::Part;
use crate::train::Trained;

/// What a run came to; the last line of the example.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Share of held-out digits, read and repeated, whose most likely prediction was right; `None` without held-out
    /// digits.
    pub accuracy: Option<f64>,
    /// The same for digits read from a picture of the same turn.
    pub read_accuracy: Option<f64>,
    /// The same for digits repeated from earlier turns.
    pub repeat_accuracy: Option<f64>,
    /// Training loss of the last step.
    pub loss: f64,
    /// Mean cross entropy of the held-out answers.
    pub held_out_loss: Option<f64>,
    /// Lowest validation loss of the run.
    pub best_val_loss: Option<f64>,
    /// Its step.
    pub best_step: Option<usize>,
    /// Ranks that share every sequence.
    pub cp: usize,
    /// Replicas of the model.
    pub dp: usize,
    /// Layout.
    pub layout: String,
    /// Optimizer steps that are done, those of earlier parts of the run included.
    pub steps: usize,
    /// The run was stopped before its last step; `--resume` goes on.
    pub stopped: bool,
    /// Seconds of this process.
    pub seconds: f64,
    /// Training tokens per second over the steps of this process, padding not counted.
    pub tokens_per_s: f64,
    /// Trained numbers.
    pub parameters: usize,
    /// Seed.
    pub seed: u64,
    /// Samples of the data file that were left out for the length of a row.
    pub samples_dropped: usize,
    /// Samples of the data file that were cut to the length of a row.
    pub samples_cut: usize,
    /// Folder with everything that the run left.
    pub out: String,
}

impl Summary {
    pub(crate) fn new(job: &Job, config: &Config, trained: &Trained, history: &History, took: Duration) -> Self {
        let tokens: usize = trained.reports.iter().map(|report| report.tokens).sum();
        let last = history.steps.last();
        let best = history.best_validation();
        let (samples_dropped, samples_cut) = job.samples_dropped_and_cut();
        Self {
            accuracy: trained.scores.accuracy(&[Part::Read, Part::Repeat]),
            read_accuracy: trained.scores.accuracy(&[Part::Read]),
            repeat_accuracy: trained.scores.accuracy(&[Part::Repeat]),
            loss: last.map_or(0.0, |report| report.loss),
            held_out_loss: trained.scores.loss(),
            best_val_loss: best.map(|report| report.val_loss),
            best_step: best.map(|report| report.step),
            cp: config.cp,
            dp: config.replicas(),
            layout: config.layout.to_string(),
            steps: last.map_or(0, |report| report.step),
            stopped: trained.stopped,
            seconds: took.as_secs_f64(),
            tokens_per_s: trained.reports.last().map_or(0.0, |report| tokens as f64 / report.seconds),
            parameters: trained.weights.variables().values().map(|var| var.elem_count()).sum(),
            seed: config.seed,
            samples_dropped,
            samples_cut,
            out: config.out.display().to_string(),
        }
    }

    /// One line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain numbers and texts")
    }
}
