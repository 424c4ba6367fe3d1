//! The training loop of all ranks.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_cp::Communicator;
use candle_cp::comm::{Mesh, Row};
use candle_cp_layers::Weights;

use crate::agreement::agree_on_weights;
use crate::config::Config;
use crate::error::Result;
use crate::evaluate::{Scores, evaluate};
use crate::job::Job;
use crate::packing::{Batch, Packer};
use crate::ranks::Ranks;
use crate::report::{StepReport, ValidationReport};
use crate::sample::Position;
use crate::saves::Save;
use crate::timeline::Timeline;
use crate::trainer::Trainer;

/// Called on every rank after every step, with the rank; an error ends the run on all ranks.
pub type Observer<'a> = dyn Fn(usize, &StepReport) -> Result<()> + Sync + 'a;

/// What goes on beside training. An error ends the run on all ranks.
pub trait Watcher: Sync {
    /// Something that a user should know, about data or weights; rank 0 only, before the first step.
    fn notice(&self, _text: &str) {}

    /// What a rank holds between steps; rank 0 only, before the first step.
    fn memory(&self, _text: &str) {}

    /// After every step, on every rank.
    ///
    /// # Errors
    /// Its own.
    fn step(&self, _rank: usize, _report: &StepReport) -> Result<()> {
        Ok(())
    }

    /// After every validation; rank 0 only.
    ///
    /// # Errors
    /// Its own.
    fn validation(&self, _report: &ValidationReport) -> Result<()> {
        Ok(())
    }

    /// After the step that [`Config::trace`] names: its timeline, as a JSON text; rank 0 only.
    ///
    /// # Errors
    /// Its own.
    fn timeline(&self, _step: usize, _json: &str) -> Result<()> {
        Ok(())
    }

    /// After every step: what to do before the next one; rank 0 only.
    fn next(&self, _step: usize) -> Next {
        Next::GoOn
    }

    /// Where [`Watcher::next`] asked for it: state of the run after the last step; rank 0 only, the others wait.
    ///
    /// # Errors
    /// Its own.
    fn save(&self, _trainer: &Trainer, _position: Position) -> Result<()> {
        Ok(())
    }
}

/// What to do after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The next step.
    GoOn,
    /// Save, then the next step.
    Save,
    /// Save, then end the run early.
    Stop,
}

/// Watches nothing but the steps.
pub(crate) struct Observed<'a>(pub &'a Observer<'a>);

impl Watcher for Observed<'_> {
    fn step(&self, rank: usize, report: &StepReport) -> Result<()> {
        (self.0)(rank, report)
    }
}

/// What training left: the same on every rank.
#[derive(Debug)]
pub struct Trained {
    /// One report per step of this process, with rank 0's clock.
    pub reports: Vec<StepReport>,
    /// Counts over the held-out batches.
    pub scores: Scores,
    /// The trained weights.
    pub weights: Weights,
    /// The run was ended before its last step.
    pub stopped: bool,
}

/// As [`train_watched`] from the beginning, with a function that sees every step.
///
/// # Errors
/// As [`train_watched`].
pub fn train(job: &Job, config: &Config, observer: &Observer) -> Result<Trained> {
    train_watched(job, config, None, &Observed(observer))
}

/// Trains on `config.ranks()` ranks, which are threads, and evaluates; writes nothing by itself. With `from` it goes on where
/// that checkpoint was written.
///
/// # Errors
/// The error of the first rank that failed, with its number; all ranks end.
pub fn train_watched(job: &Job, config: &Config, from: Option<&Save>, watcher: &dyn Watcher) -> Result<Trained> {
    train_on(job, config, from, watcher, &Ranks::Threads(config.ranks()))
}

/// As [`train_watched`], on any ranks.
pub(crate) fn train_on(
    job: &Job,
    config: &Config,
    from: Option<&Save>,
    watcher: &dyn Watcher,
    ranks: &Ranks,
) -> Result<Trained> {
    ranks.check(config)?;
    job.notices().iter().for_each(|found| watcher.notice(found));
    let rank = |comm: Arc<dyn Communicator>| {
        let mut trainer = match from {
            Some(save) => Trainer::resume(job, config, comm, save)?,
            None => Trainer::new(job, config, comm)?,
        };
        if let Ranks::Process { comm, .. } = ranks {
            agree_on_weights(comm.as_ref(), trainer.weights())?;
        }
        let mut batches = job.training(config);
        if let Some(save) = from {
            batches.seek(save.state.position)?;
        }
        if trainer.comm().rank() == 0 {
            trainer.notices().iter().for_each(|found| watcher.notice(found));
            watcher.memory(&trainer.memory());
        }
        let (reports, scores, stopped) = steps(&mut trainer, &mut batches, watcher)?;
        let scores = match scores {
            Some(scores) => scores,
            None if stopped => Scores::default(),
            None => score(&trainer)?,
        };
        Ok::<_, crate::Error>(Trained { reports, scores, weights: trainer.into_weights(), stopped })
    };
    ranks.run(config.deadline, rank)
}

/// All steps that are left: their reports, the scores if the last one was validated, and whether the run was stopped.
fn steps(
    trainer: &mut Trainer,
    batches: &mut Packer,
    watcher: &dyn Watcher,
) -> Result<(Vec<StepReport>, Option<Scores>, bool)> {
    let (mut reports, mut scores) = (Vec::new(), None);
    while trainer.optimizer().steps() < trainer.job().steps() {
        let number = trainer.optimizer().steps() + 1;
        let done = one_step(trainer, batches, watcher).map_err(|error| error.at_step(number))?;
        reports.push(done.0);
        scores = done.1;
        if done.2 == Next::Stop && number < trainer.job().steps() {
            return Ok((reports, scores, true));
        }
    }
    Ok((reports, scores, false))
}

/// The next step and all that follows on it: its report, the scores if it was validated, and what comes then.
fn one_step(
    trainer: &mut Trainer,
    batches: &mut Packer,
    watcher: &dyn Watcher,
) -> Result<(StepReport, Option<Scores>, Next)> {
    let (job, config) = (trainer.job(), trainer.config());
    let (rank, step) = (trainer.comm().rank(), trainer.optimizer().steps() + 1);
    let timeline = Timeline::start(config.trace, step, trainer.comm().as_ref());
    let data = trainer.comm().trace().span(Row::Step, "data");
    let step_batches = next_step(batches, config.accumulate, trainer.mesh())?;
    drop(data);
    let epoch = Some(epochs(batches));
    let report = StepReport { epoch, ..trainer.step(&step_batches)? };
    let json = timeline.map(|timeline| timeline.finish(trainer.comm().as_ref())).transpose()?;
    if let Some(json) = json.filter(|_| rank == 0) {
        watcher.timeline(step, &json)?;
    }
    watcher.step(rank, &report)?;

    let due = |every: usize| step.is_multiple_of(every) || step == job.steps();
    let scores = job.validate_every(config).is_some_and(due).then(|| score(trainer)).transpose()?;
    if let Some(val_loss) = scores.as_ref().and_then(Scores::loss).filter(|_| rank == 0) {
        let val_tokens = scores.as_ref().map_or(0, Scores::tokens);
        watcher.validation(&ValidationReport { step, epoch, val_loss, val_tokens, seconds: trainer.seconds() })?;
    }
    let next = after(trainer, batches.position(), watcher)?;
    Ok((report, scores, next))
}

/// Rank 0 decides, so that all ranks do the same.
fn after(trainer: &Trainer, position: Position, watcher: &dyn Watcher) -> Result<Next> {
    const WHAT: [Next; 3] = [Next::GoOn, Next::Save, Next::Stop];
    let (comm, optimizer) = (trainer.comm(), trainer.optimizer());
    let next = if comm.rank() == 0 { watcher.next(optimizer.steps()) } else { Next::GoOn };
    let number = WHAT.iter().position(|what| *what == next).expect("all are listed") as u8;
    let number = comm.broadcast(&Tensor::new(&[number], &Device::Cpu)?, 0)?.to_vec1::<u8>()?[0];
    let next = WHAT[usize::from(number)];
    match comm.rank() {
        _ if next == Next::GoOn => {}
        0 => {
            watcher.save(trainer, position)?;
            optimizer.saved()?;
        }
        _ => optimizer.serve()?,
    }
    Ok(next)
}

/// Scores of the held-out batches, of which each replica takes its part.
fn score(trainer: &Trainer) -> Result<Scores> {
    let (job, mesh) = (trainer.job(), trainer.mesh());
    evaluate(trainer, job.held_out_part(trainer.config(), mesh.replica(), mesh.replicas()))
}

/// This replica's batches of one step. Of `accumulate` batches for each replica, or what is left of the epoch, the first
/// goes to the first replica, the second to the second and so on; the last step of an epoch may leave some replicas without
/// a batch.
fn next_step(batches: &mut Packer, accumulate: usize, mesh: &Mesh) -> Result<Vec<Batch>> {
    let (replica, replicas) = (mesh.replica(), mesh.replicas());
    let mut step = Vec::new();
    batches.enter_epoch()?;
    for number in 0..accumulate * replicas {
        let there = match number % replicas == replica {
            true => batches.next_batch()?.map(|batch| step.push(batch)).is_some(),
            false => batches.skip_batch()?,
        };
        if !there {
            break;
        }
    }
    Ok(step)
}

/// Epochs that are done.
fn epochs(batches: &mut Packer) -> f64 {
    let Position { epoch, taken } = batches.position();
    epoch as f64 + taken as f64 / batches.epoch_len().max(1) as f64
}
