//! One training step (forward, backward, AdamW) of a text-only Gemma 4 checkpoint on the CPU; prints one JSON line.
//!
//! `FOLDER` is a checkpoint with `batch.safetensors` beside it: `input_ids` and `position_ids`, i64 `[1, S]`; a document
//! starts where the position is 0. A token is never scored against the first token of another document, so S tokens in
//! D documents have S - D labels (`label_tokens`). One step to warm up, then `--steps`; `tokens_per_s` is of the fastest,
//! and so are the phases, on rank 0. `peak_rss_gib` is of the whole process, `state_gib` what weights and optimizer take
//! in all ranks. `live_work` is the attention of each rank, as a share of all: query-key pairs times query width, over
//! all layers; `balance` is the largest over the mean.
//!
//! `cargo run --release -p candle-finetune --example bench_step -- FOLDER [--steps N] [--threads N] [--ranks N]
//! [--layout head-tail|contiguous|balanced] [--recompute]`

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{Communicator, CpContext, LayerWork, LayoutKind, Tokens, live_work, prepare_process};
use candle_finetune::{AdamW, AdamWConfig, Gradients};
use candle_gemma4::{Config, Inputs, Model, Recompute, Weights};
use serde_json::{Value, json};

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, BoxError>;

/// PyTorch's defaults for AdamW, and a rate for all steps.
const OPTIMIZER: AdamWConfig = AdamWConfig { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
const RATE: f64 = 1e-4;

const GIB: f64 = (1u64 << 30) as f64;
const PHASES: [&str; 6] = ["embed", "forward", "loss", "backward", "all_reduce", "optimizer"];

struct Options {
    folder: PathBuf,
    steps: usize,
    threads: usize,
    ranks: usize,
    layout: LayoutKind,
    recompute: bool,
}

impl Options {
    fn parse() -> Result<Self> {
        let mut args = std::env::args().skip(1);
        let folder = args.next().filter(|first| !first.starts_with("--"));
        let folder =
            folder.ok_or("usage: bench_step FOLDER [flags]; FOLDER holds config.json and batch.safetensors")?;
        let layout = LayoutKind::HeadTail;
        let mut options = Self { folder: folder.into(), steps: 3, threads: 2, ranks: 1, layout, recompute: false };
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or(format!("{flag} needs a value"));
            match flag.as_str() {
                "--steps" => options.steps = value()?.parse()?,
                "--threads" => options.threads = value()?.parse()?,
                "--ranks" => options.ranks = value()?.parse()?,
                "--layout" => options.layout = value()?.parse()?,
                "--recompute" => options.recompute = true,
                other => return Err(format!("unknown flag {other}; see the top of benchmarks/step.rs").into()),
            }
        }
        match options.steps.min(options.threads).min(options.ranks) {
            0 => Err("--steps, --threads and --ranks are at least 1".into()),
            _ => Ok(options),
        }
    }
}

/// The one row, as every rank needs it.
struct Row {
    input_ids_bs: Tensor,
    tokens: Tokens,
}

impl Row {
    fn load(folder: &Path) -> Result<Self> {
        let tensors = candle_core::safetensors::load(folder.join("batch.safetensors"), &Device::Cpu)?;
        let get = |name: &str| tensors.get(name).ok_or(format!("batch.safetensors has no {name}"));
        let input_ids_bs = get("input_ids")?.clone();
        let positions = get("position_ids")?.to_vec2::<i64>()?;
        let mut documents = Vec::with_capacity(positions.len());
        for row in &positions {
            let starts = row.iter().scan(-1, |document, &position| {
                *document += i64::from(position == 0);
                Some(*document)
            });
            documents.push(starts.collect::<Vec<i64>>());
        }
        let groups = positions.iter().map(|row| vec![-1; row.len()]).collect();
        Ok(Self { input_ids_bs, tokens: Tokens::new(documents, groups)? })
    }

    fn token_count(&self) -> usize {
        self.input_ids_bs.elem_count()
    }
}

/// What one rank trains with.
struct Rank {
    comm: Arc<dyn Communicator>,
    layout: LayoutKind,
    layers: Vec<LayerWork>,
    recompute: bool,
    weights: Weights,
    model: Model,
    optimizer: AdamW,
}

/// One step on one rank.
struct Step {
    loss: f64,
    label_tokens: usize,
    seconds: f64,
    /// By [`PHASES`].
    phases: [f64; PHASES.len()],
}

impl Rank {
    fn step(&mut self, row: &Row) -> Result<Step> {
        self.comm.barrier()?;
        let start = Instant::now();
        let mut marks = vec![0.0];
        let mark = |marks: &mut Vec<f64>| marks.push(start.elapsed().as_secs_f64());
        let context = context(&self.comm, self.layout, row, &self.layers)?;
        let embeds_bsh = self.model.embed(&Inputs::text(row.input_ids_bs.clone()), &mut ())?;
        let input = self.model.shard(&embeds_bsh, &row.input_ids_bs, &context)?;
        mark(&mut marks);
        let recompute = if self.recompute { Recompute::on() } else { Recompute::off() };
        let hidden_bsh = self.model.decode_with(&input, &context, &recompute, &mut ())?;
        mark(&mut marks);
        let labels = context.shard_labels(&row.input_ids_bs)?;
        let loss = self.model.loss(&hidden_bsh, &labels)?;
        mark(&mut marks);
        let local = Gradients::collect(&recompute.backward(&loss)?, self.weights.variables())?;
        let local_loss = loss.detach().to_dtype(DType::F64)?;
        drop((embeds_bsh, input, hidden_bsh, loss)); // the graph
        mark(&mut marks);
        let gradients = local.sum_over_ranks(self.comm.as_ref())?;
        let loss = self.comm.all_reduce_sum(&local_loss)?.to_scalar::<f64>()?;
        mark(&mut marks);
        self.optimizer.step(&gradients, RATE)?;
        self.comm.barrier()?;
        mark(&mut marks);
        let phases = std::array::from_fn(|i| marks[i + 1] - marks[i]);
        Ok(Step { loss, label_tokens: labels.count, seconds: marks[PHASES.len()], phases })
    }
}

fn context(comm: &Arc<dyn Communicator>, layout: LayoutKind, row: &Row, layers: &[LayerWork]) -> Result<CpContext> {
    let layout = layout.layout(&row.tokens, comm.size(), layers)?;
    Ok(CpContext::new(comm.clone(), layout, row.tokens.clone())?)
}

/// The most memory this process has had, in GiB; `None` where the system does not tell.
fn peak_rss_gib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<f64>().ok()? * 1024.0 / GIB)
}

fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

fn run(options: &Options) -> Result<Value> {
    let config = Config::from_folder(&options.folder)?;
    let row = Row::load(&options.folder)?;
    let results = threads::run(options.ranks, &threads::Options::default(), |comm| {
        let weights = Weights::load(&options.folder, &config, DType::F32, &Device::Cpu)?;
        let model = Model::new(&config, &weights)?;
        let optimizer = AdamW::new(weights.variables(), OPTIMIZER)?;
        let (layout, layers, recompute) = (options.layout, config.text.layer_work(), options.recompute);
        let mut rank = Rank { comm, layout, layers, recompute, weights, model, optimizer };
        let steps = (0..=options.steps).map(|_| rank.step(&row)).collect::<Result<Vec<_>>>()?;
        let parameters: usize = rank.weights.variables().values().map(|var| var.elem_count()).sum();
        let context = context(&rank.comm, layout, &row, &rank.layers)?;
        let work = live_work(context.layout(), &row.tokens, &rank.layers)?;
        Ok::<_, BoxError>((steps, parameters, work))
    })?;
    let (steps, parameters, work) = results.into_iter().next().ok_or("no rank")?;
    let timed = &steps[1..];
    let best = timed.iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds)).ok_or("no step")?;
    let phases = PHASES.iter().zip(best.phases).map(|(name, seconds)| (name.to_string(), rounded(seconds, 3).into()));
    let all: f64 = work.iter().sum();
    let balance = work.iter().fold(0.0, |a: f64, &b| a.max(b)) * work.len() as f64 / all;
    // Weights, and the optimizer's master copy and two means, 4 bytes each.
    let state = (options.ranks * parameters * 4 * 4) as f64 / GIB;
    Ok(json!({
        "who": "candle-cp",
        "seq": row.token_count(),
        "params_m": rounded(parameters as f64 / 1e6, 1),
        "threads": options.threads,
        "ranks": options.ranks,
        "layout": options.layout.to_string(),
        "recompute": options.recompute,
        "tokens_per_s": rounded(row.token_count() as f64 / best.seconds, 1),
        "step_s": rounded(best.seconds, 3),
        "labels": "inside documents",
        "label_tokens": best.label_tokens,
        "first_loss": steps[0].loss,
        "last_loss": timed[timed.len() - 1].loss,
        "peak_rss_gib": peak_rss_gib().map(|gib| rounded(gib, 3)),
        "state_gib": rounded(state, 3),
        "phases": phases.collect::<serde_json::Map<String, Value>>(),
        "live_work": work.iter().map(|&work| rounded(work / all, 4)).collect::<Vec<_>>(),
        "balance": rounded(balance, 3),
    }))
}

fn main() -> Result<()> {
    let options = Options::parse()?;
    // SAFETY: nothing has started a thread yet.
    unsafe {
        prepare_process(options.ranks);
        // Read by Candle's matrix products and by rayon's pool, which attention runs on.
        std::env::set_var("RAYON_NUM_THREADS", options.threads.to_string());
    }
    println!("{}", run(&options)?);
    Ok(())
}
