//! A whole run: prepare, train on all ranks, evaluate, write what is left behind.

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use candle_cp::Communicator;
use candle_cp::comm::threads;
use candle_gemma4::Weights;
use serde::Serialize;

use crate::checkpoint;
use crate::config::Config;
use crate::error::{Result, io};
use crate::evaluate::{Scores, evaluate};
use crate::job::Job;
use crate::metrics::MetricsFile;
use crate::plot;
use crate::progress::Progress;
use crate::report::{History, StepReport};
use crate::sample::Part;
use crate::trainer::Trainer;

/// Name of the folder with the trained model, inside of `--out`.
pub const CHECKPOINT_FOLDER: &str = "checkpoint";
/// Name of the metrics file, inside of `--out`.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// Name of the loss curve, inside of `--out`.
pub const LOSS_CURVE_FILE: &str = "loss.svg";

/// Called on every rank after every step, with the rank; an error ends the run on all ranks.
pub type Observer<'a> = dyn Fn(usize, &StepReport) -> Result<()> + Sync + 'a;

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
    /// Ranks.
    pub cp: usize,
    /// Layout.
    pub layout: String,
    /// Optimizer steps.
    pub steps: usize,
    /// Seconds of the whole run.
    pub seconds: f64,
    /// Training tokens per second over all steps, padding not counted.
    pub tokens_per_s: f64,
    /// Trained numbers of the model.
    pub parameters: usize,
    /// Seed.
    pub seed: u64,
    /// Samples of the data file that were left out for the length of a row.
    pub samples_dropped: usize,
    /// Samples of the data file that were cut to the length of a row.
    pub samples_cut: usize,
    /// Folder with metrics, loss curve and checkpoint.
    pub out: String,
}

impl Summary {
    /// One line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain numbers and texts")
    }
}

/// What training left: the same on every rank.
#[derive(Debug)]
pub struct Trained {
    /// One report per step, with rank 0's clock.
    pub reports: Vec<StepReport>,
    /// Counts over the held-out batches.
    pub scores: Scores,
    /// The trained weights.
    pub weights: Weights,
}

/// As [`train_with`]; nobody is told what the checkpoint has to say.
///
/// # Errors
/// As [`train_with`].
pub fn train(job: &Job, config: &Config, observer: &Observer) -> Result<Trained> {
    train_with(job, config, &|_| (), observer)
}

/// Trains on `config.cp` ranks, which are threads, and evaluates; writes nothing. `notice` is called once with everything
/// about the data, and then about the loaded weights, that a user should know, before the first step.
///
/// # Errors
/// The error of the first rank that failed, with its number; all ranks end.
pub fn train_with(job: &Job, config: &Config, notice: &(dyn Fn(&str) + Sync), observer: &Observer) -> Result<Trained> {
    let held_out = job.held_out(config)?;
    job.notices().iter().for_each(|found| notice(found));
    let rank = |comm: Arc<dyn Communicator>| {
        let rank = comm.rank();
        let mut trainer = Trainer::new(job, config, comm)?;
        if rank == 0 {
            trainer.weights().notices().iter().for_each(|found| notice(&found.to_string()));
        }
        let mut batches = job.training(config);
        let mut reports = Vec::with_capacity(config.steps);
        for _ in 0..config.steps {
            let report = trainer.step(&batches.next_training_batch()?)?;
            observer(rank, &report)?;
            reports.push(report);
        }
        let scores = evaluate(&trainer, &held_out)?;
        Ok::<_, crate::Error>(Trained { reports, scores, weights: trainer.into_weights() })
    };
    let mut ranks = threads::run(config.cp, &threads::Options::default(), rank)?;
    Ok(ranks.swap_remove(0))
}

/// A whole run. Progress goes to standard error; metrics, loss curve and checkpoint go to `config.out`.
///
/// # Errors
/// A setting, the checkpoint or the data cannot be used, a rank failed, or a file cannot be written.
pub fn run(config: &Config, observer: &Observer) -> Result<Summary> {
    let began = Instant::now();
    let job = Job::prepare(config)?;
    fs::create_dir_all(&config.out).map_err(io("create", &config.out))?;
    let metrics = Mutex::new(MetricsFile::create(&config.out.join(METRICS_FILE))?);
    let progress = Progress::start(config.steps, 0, &[("run", headline(&job, config))]);
    let notice = |text: &str| progress.notice(text);
    let trained = train_with(&job, config, &notice, &|rank, report| {
        if rank == 0 {
            // Only rank 0 locks it, so a poisoned lock means that rank 0 is already gone.
            metrics.lock().expect("rank 0 is alive").write(report)?;
            progress.step(report);
        }
        observer(rank, report)
    })?;
    progress.finish();
    checkpoint::save(&config.out.join(CHECKPOINT_FOLDER), &job, &trained.weights)?;
    let history = History { steps: trained.reports.clone(), validations: Vec::new() };
    plot::loss_curve(&config.out.join(LOSS_CURVE_FILE), "Loss", &history)?;
    Ok(summary(&job, config, &trained, began))
}

fn headline(job: &Job, config: &Config) -> String {
    let text = &job.model.text;
    format!(
        "Gemma 4 with {} layers of width {} on {}; {} rank{} ({}), {} steps of {} x {} tokens",
        text.num_hidden_layers,
        text.hidden_size,
        job.data_summary(),
        config.cp,
        if config.cp == 1 { "" } else { "s" },
        config.layout,
        config.steps,
        config.batch_rows,
        config.seq_len
    )
}

fn summary(job: &Job, config: &Config, trained: &Trained, began: Instant) -> Summary {
    let reports = &trained.reports;
    let tokens: usize = reports.iter().map(|report| report.tokens).sum();
    let last = reports.last();
    let (samples_dropped, samples_cut) = job.samples_dropped_and_cut();
    Summary {
        accuracy: trained.scores.accuracy(&[Part::Read, Part::Repeat]),
        read_accuracy: trained.scores.accuracy(&[Part::Read]),
        repeat_accuracy: trained.scores.accuracy(&[Part::Repeat]),
        loss: last.map_or(0.0, |report| report.loss),
        held_out_loss: trained.scores.loss(),
        cp: config.cp,
        layout: config.layout.to_string(),
        steps: config.steps,
        seconds: began.elapsed().as_secs_f64(),
        tokens_per_s: last.map_or(0.0, |report| tokens as f64 / report.seconds),
        parameters: trained.weights.variables().values().map(|var| var.elem_count()).sum(),
        seed: config.seed,
        samples_dropped,
        samples_cut,
        out: config.out.display().to_string(),
    }
}
