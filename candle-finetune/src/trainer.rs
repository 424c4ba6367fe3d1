//! One rank's part of training: forward, backward, sum over ranks, step.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{Mesh, Row, Traffic};
use candle_cp::{Communicator, CpContext, ShardedLabels};
use candle_cp_layers::{LoraReport, Recompute, Weights};
use indicatif::BinaryBytes;

use crate::agreement::{Totals, agree};
use crate::buckets::Buckets;
use crate::comm_use::CommMeter;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::VlmModel;
use crate::gradients::Gradients;
use crate::job::Job;
use crate::jsonl::counted;
use crate::memory::Memory;
use crate::optimizer::{AdamW, Optimizer, Spread};
use crate::packing::Batch;
use crate::report::StepReport;
use crate::saves::Save;
use crate::schedule::Schedule;
use crate::sums::{Layers, Shares, Sums};

/// Loss and gradients of the batches of one step, summed over ranks.
#[derive(Debug, Clone)]
pub struct BatchGradients {
    /// Mean cross entropy over the learned tokens of all batches.
    pub loss: f64,
    /// One gradient per parameter, the same on every rank.
    pub gradients: Gradients,
    /// Learned tokens of all batches, over all replicas.
    pub label_tokens: usize,
}

/// The same with gradients that are still spread over ranks.
struct StepSums {
    loss: f64,
    shares: Shares,
    totals: Totals,
}

/// One rank's model, optimizer and communicators. All ranks make the same calls in the same order.
#[derive(Debug)]
pub struct Trainer<'a> {
    job: &'a Job,
    config: &'a Config,
    mesh: Mesh,
    /// All ranks once more, for the sums of gradients that are on their way while ranks talk otherwise.
    sums: Arc<dyn Communicator>,
    buckets: Arc<Buckets>,
    weights: Weights,
    adapters: Option<LoraReport>,
    model: Box<dyn VlmModel>,
    optimizer: Optimizer,
    schedule: Schedule,
    started: Instant,
}

impl<'a> Trainer<'a> {
    /// Starts from the job's weights. The ranks of `world` are as many replicas of the model as there are times
    /// `config.cp` ranks.
    ///
    /// # Errors
    /// The weights cannot be loaded or do not fit, or the ranks are no multiple of `config.cp`.
    pub fn new(job: &'a Job, config: &'a Config, world: Arc<dyn Communicator>) -> Result<Self> {
        Self::with(job, config, world, job.start(config)?, None)
    }

    /// Goes on where a checkpoint was written, by any number of ranks.
    ///
    /// # Errors
    /// As [`Trainer::new`], or weights and optimizer state do not belong together.
    pub fn resume(job: &'a Job, config: &'a Config, world: Arc<dyn Communicator>, save: &Save) -> Result<Self> {
        Self::with(job, config, world, job.goes_on(config, &save.folder)?, Some(&save.optimizer()))
    }

    fn with(
        job: &'a Job,
        config: &'a Config,
        world: Arc<dyn Communicator>,
        (weights, adapters): (Weights, Option<LoraReport>),
        state: Option<&Path>,
    ) -> Result<Self> {
        let mesh = Mesh::new(world, config.cp)?;
        let sums = mesh.world().split(0)?;
        let variables = weights.variables();
        let buckets = Arc::new(Buckets::new(variables, |name| job.model.decoder_layer(name)));
        let (settings, spread) = (config.optimizer, (sums.clone(), buckets.clone()));
        let optimizer = match (config.zero, state) {
            (0, None) => Optimizer::Whole(AdamW::new(variables, settings)?),
            (0, Some(path)) => Optimizer::Whole(AdamW::load(variables, settings, path)?),
            (_, None) => Optimizer::Spread(Spread::new(spread.0, spread.1, variables, settings)?),
            (_, Some(path)) => Optimizer::Spread(Spread::load(spread.0, spread.1, variables, settings, path)?),
        };
        let model = job.model.model(&weights)?;
        let schedule = job.schedule(config);
        let started = Instant::now();
        Ok(Self { job, config, mesh, sums, buckets, weights, adapters, model, optimizer, schedule, started })
    }

    /// The context of a batch: who owns which tokens, and what may see what.
    ///
    /// # Errors
    /// The layout cannot be made for the batch.
    pub fn context(&self, batch: &Batch) -> Result<CpContext> {
        let (tokens, layers) = (batch.tokens()?, self.job.model.layer_work());
        let layout = self.config.layout.layout(&tokens, self.mesh.context().size(), &layers)?;
        Ok(CpContext::new(self.mesh.context().clone(), layout, tokens)?)
    }

    /// Loss and gradients of one step; nothing changes. `batches` are those of this rank's replica, which may be none if
    /// another one has some. Every learned token of all batches of all replicas counts the same, however they are spread
    /// over replicas, batches, rows and ranks.
    ///
    /// # Errors
    /// Ranks of a replica have different batches, or a tensor operation or an exchange with another rank failed.
    pub fn gradients(&self, batches: &[Batch]) -> Result<BatchGradients> {
        let StepSums { loss, shares, totals } = self.sums(batches)?;
        let gradients = shares.whole(self.weights.variables())?;
        Ok(BatchGradients { loss, gradients, label_tokens: totals.label_tokens })
    }

    fn sums(&self, batches: &[Batch]) -> Result<StepSums> {
        let shares = batches.iter().map(|batch| {
            let context = self.context(batch)?;
            let labels = context.shard_labels(&batch.labels_bs(&Device::Cpu)?)?;
            Ok((batch, context, labels))
        });
        let shares: Vec<_> = shares.collect::<Result<_>>()?;
        let mine = shares.iter().map(|(_, _, labels)| labels.count).sum();
        let totals = agree(&self.mesh, self.optimizer.steps() + 1, batches, mine)?;
        let mut loss = Tensor::zeros((), DType::F64, self.job.device())?;
        let sums = Arc::new(self.empty_sums());
        let replicas = self.mesh.replicas();
        for (place, (batch, context, labels)) in shares.into_iter().enumerate() {
            // Every batch of all replicas drops something else, the same whatever the number of replicas.
            let number = (self.optimizer.steps() * self.config.accumulate + place) * replicas + self.mesh.replica();
            let dropping = self.weights.with_dropout(self.config.seed, number as u64, &context);
            let dropping = dropping.map(|weights| self.job.model.model(&weights)).transpose()?;
            let model = dropping.as_ref().unwrap_or(&self.model).as_ref();
            let labels = ShardedLabels { count: totals.label_tokens, ..labels };
            let recompute = match self.config.recompute {
                false => Recompute::off(),
                true => Recompute::into_sink(Arc::new(Layers { sums: sums.clone(), last: place + 1 == batches.len() })),
            };
            loss = (loss + self.add_gradients(model, batch, &context, &labels, (&recompute, &sums))?)?;
        }
        let _span = self.comm().trace().span(Row::Step, "sums over ranks");
        let shares = sums.finish()?;
        let loss = self.mesh.world().all_reduce_sum(&loss)?.to_scalar::<f64>()?;
        Ok(StepSums { loss, shares, totals })
    }

    fn empty_sums(&self) -> Sums {
        let traffic = match self.optimizer {
            Optimizer::Whole(_) => Traffic::AllReduce,
            Optimizer::Spread(_) => Traffic::ReduceScatter,
        };
        let (comm, buckets) = (self.sums.clone(), self.buckets.clone());
        Sums::new(comm, buckets, self.weights.variables(), traffic, self.job.device())
    }

    /// This rank's share of a batch's loss, in f64; its gradients go to the sums. The graph ends here.
    fn add_gradients(
        &self,
        model: &dyn VlmModel,
        batch: &Batch,
        context: &CpContext,
        labels: &ShardedLabels,
        (recompute, sums): (&Recompute, &Sums),
    ) -> Result<Tensor> {
        let trace = self.comm().trace();
        let forward = trace.span(Row::Step, "forward");
        let hidden_bsh = model.hidden(batch, context, recompute, self.config.dtype, self.job.device())?;
        let work = trace.span(Row::Compute, "loss");
        let loss = model.loss(&hidden_bsh, labels)?;
        drop((work, forward));
        let _span = trace.span(Row::Step, "backward");
        sums.add(&recompute.backward(&loss)?, self.weights.variables())?;
        Ok(loss.detach().to_dtype(DType::F64)?)
    }

    /// One optimizer step on the batches of this rank's replica; none, if another one has some.
    ///
    /// # Errors
    /// As [`Trainer::gradients`], or a loss or gradient that is not finite: then nothing was changed.
    pub fn step(&mut self, batches: &[Batch]) -> Result<StepReport> {
        let began = Instant::now();
        let comm = self.mesh.world().clone();
        let meter = CommMeter::start(comm.as_ref());
        let step = self.optimizer.steps() + 1;
        let lr = self.schedule.rate(step);
        let StepSums { loss, shares, totals } = self.sums(batches)?;
        if !loss.is_finite() {
            return Err(Error::NotFinite { step, what: "the loss".to_string(), value: loss });
        }
        let optimizer = comm.trace().span(Row::Step, "optimizer");
        let grad_norm = shares.norm()?;
        if !grad_norm.is_finite() {
            let (what, value) = match shares.not_finite()? {
                Some((name, value)) => (format!("the gradient of {name}"), value),
                None => ("the norm of the gradients".to_string(), grad_norm),
            };
            return Err(Error::NotFinite { step, what, value });
        }
        let shares = shares.clip(grad_norm, self.config.max_grad_norm)?;
        match &mut self.optimizer {
            Optimizer::Whole(optimizer) => {
                let whole = shares.whole(self.weights.variables())?;
                drop(shares);
                optimizer.step(&whole, lr)?;
            }
            Optimizer::Spread(spread) => spread.step(&shares.own()?, lr)?,
        }
        drop(optimizer);
        let Totals { tokens, label_tokens } = totals;
        let tokens_per_s = tokens as f64 / began.elapsed().as_secs_f64();
        let seconds = self.started.elapsed().as_secs_f64();
        let (comm, memory, epoch) = (meter.read(comm.as_ref())?, Memory::now(), None);
        Ok(StepReport { step, epoch, loss, grad_norm, lr, tokens, label_tokens, tokens_per_s, comm, memory, seconds })
    }

    /// The ranks of the run.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// All ranks.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        self.mesh.world()
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
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// What a user should know about the weights.
    pub fn notices(&self) -> Vec<String> {
        let notices = self.weights.notices().iter().map(ToString::to_string);
        let adapters =
            self.adapters.iter().flat_map(|report| report.to_string().lines().map(str::to_string).collect::<Vec<_>>());
        notices.chain(adapters).collect()
    }

    /// What this rank holds between steps, for people.
    pub(crate) fn memory(&self) -> String {
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        let variables = self.weights.variables().values().map(|var| var.as_tensor());
        let weights: usize =
            variables.chain(self.weights.buffers().values()).chain(self.weights.frozen().values()).map(bytes).sum();
        let state = self.optimizer.own().state_bytes();
        let share = match self.optimizer {
            Optimizer::Whole(_) => String::new(),
            Optimizer::Spread(_) => format!(", its share among {}", counted(self.mesh.world().size(), "rank")),
        };
        format!(
            "memory of a rank between steps: {} of weights, {} of optimizer state{share}",
            BinaryBytes(weights as u64),
            BinaryBytes(state as u64)
        )
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
