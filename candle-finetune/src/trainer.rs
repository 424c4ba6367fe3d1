//! One rank's part of training: forward, backward, sum over ranks, step.

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::Row;
use candle_cp::{Communicator, CpContext, ShardedLabels};
use candle_cp_layers::{LoraReport, Recompute, Weights};

use crate::comm_use::CommMeter;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::VlmModel;
use crate::gradients::Gradients;
use crate::job::Job;
use crate::memory::Memory;
use crate::optimizer::AdamW;
use crate::packing::Batch;
use crate::report::StepReport;
use crate::saves::Save;
use crate::schedule::Schedule;

/// Loss and gradients of the batches of one step, summed over ranks.
#[derive(Debug, Clone)]
pub struct BatchGradients {
    /// Mean cross entropy over the learned tokens of all batches.
    pub loss: f64,
    /// One gradient per parameter, the same on every rank.
    pub gradients: Gradients,
    /// Learned tokens of all batches.
    pub label_tokens: usize,
}

/// One rank's model, optimizer and communicator. All ranks make the same calls in the same order.
#[derive(Debug)]
pub struct Trainer<'a> {
    job: &'a Job,
    config: &'a Config,
    comm: Arc<dyn Communicator>,
    weights: Weights,
    adapters: Option<LoraReport>,
    model: Box<dyn VlmModel>,
    optimizer: AdamW,
    schedule: Schedule,
    started: Instant,
}

impl<'a> Trainer<'a> {
    /// Starts from the job's weights.
    ///
    /// # Errors
    /// The weights cannot be loaded or do not fit.
    pub fn new(job: &'a Job, config: &'a Config, comm: Arc<dyn Communicator>) -> Result<Self> {
        let (weights, adapters) = job.start(config)?;
        let optimizer = AdamW::new(weights.variables(), config.optimizer)?;
        Self::with(job, config, comm, (weights, adapters), optimizer)
    }

    /// Goes on where a checkpoint was written.
    ///
    /// # Errors
    /// As [`Trainer::new`], or weights and optimizer state do not belong together.
    pub fn resume(job: &'a Job, config: &'a Config, comm: Arc<dyn Communicator>, save: &Save) -> Result<Self> {
        let (weights, adapters) = job.goes_on(config, &save.folder)?;
        let optimizer = AdamW::load(weights.variables(), config.optimizer, &save.optimizer())?;
        Self::with(job, config, comm, (weights, adapters), optimizer)
    }

    fn with(
        job: &'a Job,
        config: &'a Config,
        comm: Arc<dyn Communicator>,
        (weights, adapters): (Weights, Option<LoraReport>),
        optimizer: AdamW,
    ) -> Result<Self> {
        let model = job.model.model(&weights)?;
        let schedule = job.schedule(config);
        Ok(Self { job, config, comm, weights, adapters, model, optimizer, schedule, started: Instant::now() })
    }

    /// The context of a batch: who owns which tokens, and what may see what.
    ///
    /// # Errors
    /// The layout cannot be made for the batch.
    pub fn context(&self, batch: &Batch) -> Result<CpContext> {
        let (tokens, layers) = (batch.tokens()?, self.job.model.layer_work());
        let layout = self.config.layout.layout(&tokens, self.comm.size(), &layers)?;
        Ok(CpContext::new(self.comm.clone(), layout, tokens)?)
    }

    /// Loss and gradients of one step's batches; nothing changes. Every learned token of all batches counts the same,
    /// however they are spread over batches, rows and ranks.
    ///
    /// # Errors
    /// A tensor operation or an exchange with another rank failed.
    pub fn gradients(&self, batches: &[Batch]) -> Result<BatchGradients> {
        let shares = batches.iter().map(|batch| {
            let context = self.context(batch)?;
            let labels = context.shard_labels(&batch.labels_bs(&Device::Cpu)?)?;
            Ok((batch, context, labels))
        });
        let shares: Vec<_> = shares.collect::<Result<_>>()?;
        let label_tokens = shares.iter().map(|(_, _, labels)| labels.count).sum();
        let mut loss = Tensor::zeros((), DType::F64, self.job.device())?;
        let mut gradients: Option<Gradients> = None;
        let first = self.optimizer.steps() * self.config.accumulate;
        for (place, (batch, context, labels)) in shares.into_iter().enumerate() {
            // Every batch drops something else.
            let dropping = self.weights.with_dropout(self.config.seed, (first + place) as u64, &context);
            let dropping = dropping.map(|weights| self.job.model.model(&weights)).transpose()?;
            let model = dropping.as_ref().unwrap_or(&self.model);
            let labels = ShardedLabels { count: label_tokens, ..labels };
            let (part, local) = self.local_gradients(model.as_ref(), batch, &context, &labels)?;
            loss = (loss + part)?;
            gradients = Some(match gradients {
                Some(sum) => sum.plus(&local)?,
                None => local,
            });
        }
        let no_batch = || Error::Task { task: "this data", reason: "a step has no batch".to_string() };
        let _span = self.comm.trace().span(Row::Step, "sums over ranks");
        let gradients = gradients.ok_or_else(no_batch)?.sum_over_ranks(self.comm.as_ref())?;
        let loss = self.comm.all_reduce_sum(&loss)?.to_scalar::<f64>()?;
        Ok(BatchGradients { loss, gradients, label_tokens })
    }

    /// This rank's share of the loss, in f64, and of the gradients. The graph ends here, before the sums over ranks
    /// need room.
    fn local_gradients(
        &self,
        model: &dyn VlmModel,
        batch: &Batch,
        context: &CpContext,
        labels: &ShardedLabels,
    ) -> Result<(Tensor, Gradients)> {
        let recompute = if self.config.recompute { Recompute::on() } else { Recompute::off() };
        let trace = self.comm.trace();
        let forward = trace.span(Row::Step, "forward");
        let hidden_bsh = model.hidden(batch, context, &recompute, self.config.dtype, self.job.device())?;
        let work = trace.span(Row::Compute, "loss");
        let loss = model.loss(&hidden_bsh, labels)?;
        drop((work, forward));
        let _span = trace.span(Row::Step, "backward");
        let gradients = Gradients::collect(&recompute.backward(&loss)?, self.weights.variables())?;
        Ok((loss.detach().to_dtype(DType::F64)?, gradients))
    }

    /// One optimizer step on one or more batches.
    ///
    /// # Errors
    /// As [`Trainer::gradients`], or a loss or gradient that is not finite: then nothing was changed.
    pub fn step(&mut self, batches: &[Batch]) -> Result<StepReport> {
        let began = Instant::now();
        let meter = CommMeter::start(self.comm.as_ref());
        let step = self.optimizer.steps() + 1;
        let lr = self.schedule.rate(step);
        let BatchGradients { loss, gradients, label_tokens } = self.gradients(batches)?;
        if !loss.is_finite() {
            return Err(Error::NotFinite { step, what: "the loss".to_string(), value: loss });
        }
        let optimizer = self.comm.trace().span(Row::Step, "optimizer");
        let grad_norm = gradients.norm()?;
        if !grad_norm.is_finite() {
            let (what, value) = match gradients.not_finite()? {
                Some((name, value)) => (format!("the gradient of {name}"), value),
                None => ("the norm of the gradients".to_string(), grad_norm),
            };
            return Err(Error::NotFinite { step, what, value });
        }
        self.optimizer.step(&gradients.clip(grad_norm, self.config.max_grad_norm)?, lr)?;
        drop(optimizer);
        let tokens: usize = batches.iter().map(Batch::token_count).sum();
        let tokens_per_s = tokens as f64 / began.elapsed().as_secs_f64();
        let seconds = self.started.elapsed().as_secs_f64();
        let (comm, memory, epoch) = (meter.read(self.comm.as_ref())?, Memory::now(), None);
        Ok(StepReport { step, epoch, loss, grad_norm, lr, tokens, label_tokens, tokens_per_s, comm, memory, seconds })
    }

    /// This rank's communicator.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// The model; it reads the weights of the moment.
    pub fn model(&self) -> &dyn VlmModel {
        self.model.as_ref()
    }

    /// What is trained on.
    pub fn job(&self) -> &'a Job {
        self.job
    }

    /// The settings.
    pub fn config(&self) -> &'a Config {
        self.config
    }

    /// The weights of the moment.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The optimizer and its state.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// What a user should know about the weights.
    pub fn notices(&self) -> Vec<String> {
        let notices = self.weights.notices().iter().map(ToString::to_string);
        let adapters =
            self.adapters.iter().flat_map(|report| report.to_string().lines().map(str::to_string).collect::<Vec<_>>());
        notices.chain(adapters).collect()
    }

    /// Seconds since this trainer was made.
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Gives the weights away.
    pub fn into_weights(self) -> Weights {
        self.weights
    }
}
