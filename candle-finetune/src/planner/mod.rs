//! Plans a run before there are machines for it: what every rank holds, sends and computes.
//!
//! Nothing here is measured. Traffic and work come from the plans that ranks make for a batch ([`candle_cp::AttentionPlan`]),
//! counts of numbers from the models' tables of tensors, memory of a pass from a walk through the operations of the model
//! as Candle does them. Tests hold all of it to the counters of small real runs.

mod advice;
mod devices;
mod graph;
mod layers;
mod memory;
mod models;
mod report;
mod request;
mod tape;
mod tower;
mod traffic;
mod work;

use self::traffic::{DecoderTraffic, Sending, Sharing};
pub use candle_cp_layers::Part;

pub use self::advice::{Advice, advise};
pub use self::devices::DeviceSpec;
pub use self::memory::{Memory, Parameters};
pub use self::models::PlannedModel;
pub use self::request::Request;
pub use self::traffic::{Flow, RankTraffic};
pub use self::work::{LayerKindPlan, LayerPass, LayoutWork};
use crate::buckets::{Bucket, Buckets};
use crate::error::Result;
use crate::family::{DecoderShape, VlmConfig};
use crate::optimizer::state_dtype;

/// The plan of a run.
#[derive(Debug, Clone)]
pub struct RunPlan {
    /// What was asked.
    pub request: Request,
    /// Numbers of the model.
    pub parameters: Parameters,
    /// Memory of the rank that needs most.
    pub memory: Memory,
    /// The same with recomputation the other way round.
    pub memory_otherwise: Memory,
    /// Tokens of the longest slice, padding included.
    pub local_tokens: usize,
    /// Attention work of a batch by layout.
    pub work: Vec<LayoutWork>,
    /// Kinds of layers.
    pub kinds: Vec<LayerKindPlan>,
    /// Traffic of every rank of a group that shares rows, in one step, without the sum of gradients.
    pub traffic: Vec<RankTraffic>,
    /// What is trained, as ranks sum it.
    pub(crate) buckets: Buckets,
    /// Operations of matrix products on one rank in a step.
    pub product_operations: f64,
    /// Operations of attention on the rank with the most, in a step.
    pub attention_operations: f64,
}

/// Plans a run.
///
/// # Errors
/// A setting that cannot be used: the flag, what is allowed and what to do.
pub fn plan(model: &PlannedModel, request: &Request) -> Result<RunPlan> {
    let config: &dyn VlmConfig = model.config.as_ref();
    let (shape, layers) = (config.decoder_shape(), config.layer_work());
    let sharing = share(config, request)?;
    let buckets = memory::buckets(config, request)?;
    let parameters = Parameters::count(config, request, &buckets);
    let (traffic, memory) = traffic_and_memory(&shape, &parameters, request, &sharing);
    let otherwise = Request { recompute: !request.recompute, ..request.clone() };
    let (_, memory_otherwise) = traffic_and_memory(&shape, &parameters, &otherwise, &sharing);
    let local_tokens = (0..request.cp).map(|rank| sharing.layout.local_len(rank)).max().unwrap_or(0);
    let work = work::by_layout(&sharing.tokens, request.cp, &layers)?;
    let step_tokens = (request.batch_rows * request.accumulate * local_tokens) as f64;
    let most = work.iter().find(|work| work.layout == request.layout).map_or(0.0, |work| work.most);
    // Forward, twice that in backward (once for what is frozen), and forward again.
    let again = f64::from(u8::from(request.recompute));
    let passes = again + if request.lora_rank.is_some() { 2.0 } else { 3.0 };
    Ok(RunPlan {
        memory,
        memory_otherwise,
        local_tokens,
        kinds: work::kinds(&shape, &sharing, &traffic, request),
        traffic: (0..request.cp).map(|rank| traffic.of_rank(rank, request.accumulate as u64)).collect(),
        product_operations: 2.0 * active_numbers(&shape, config) * step_tokens * passes,
        attention_operations: most * (3.5 + again) * request.accumulate as f64,
        work,
        buckets,
        parameters,
        request: request.clone(),
    })
}

/// Who owns what of a batch, and who needs what of whom.
fn share(config: &dyn VlmConfig, request: &Request) -> Result<Sharing> {
    request.check()?;
    let tokens = request.tokens()?;
    let layout = request.layout.layout(&tokens, request.cp, &config.layer_work())?;
    Sharing::new(&config.decoder_shape(), layout, tokens)
}

/// The decoder's traffic, and the memory of the rank that needs most.
fn traffic_and_memory(
    shape: &DecoderShape,
    parameters: &Parameters,
    request: &Request,
    sharing: &Sharing,
) -> (DecoderTraffic, Memory) {
    let sending = Sending {
        number: memory::number(request.dtype),
        batch: request.batch_rows as u64,
        recompute: request.recompute,
    };
    let traffic = DecoderTraffic::new(shape, sharing, sending);
    // Many ranks have the same sizes: those are looked at once.
    let mut works = Vec::new();
    for rank in 0..request.cp {
        let work = memory::work(request, &memory::Slices { shape, sharing, traffic: &traffic, rank });
        if !works.contains(&work) {
            works.push(work);
        }
    }
    let memory = works.iter().map(|work| memory::memory(parameters, request, shape, work));
    let memory = memory.max_by_key(Memory::peak).expect("a run has ranks");
    (traffic, memory)
}

impl RunPlan {
    /// What a rank, of all, sends for the gradients of a step, bucket by bucket: to where they are added up, and what is
    /// handed back. That is gradients in the type of the sums; with a sharded optimizer weights in their own.
    pub fn reduction_of(&self, rank: usize) -> [Flow; 2] {
        let bytes = |bucket: &Bucket| {
            let sums = memory::number(state_dtype(bucket.dtype));
            [sums, if self.request.zero { memory::number(bucket.dtype) } else { sums }]
        };
        let of = |bucket: &Bucket| traffic::reduction(bucket.count, self.request.ranks(), rank, bytes(bucket));
        self.buckets.all().iter().map(of).fold([Flow::default(); 2], |[a, b], [c, d]| [a.and(c), b.and(d)])
    }
}

/// Numbers of matrices that a token of text meets: experts as far as it goes to them, tables not at all, the head.
fn active_numbers(shape: &DecoderShape, config: &dyn VlmConfig) -> f64 {
    use candle_cp_layers::{Part, Role};
    let experts = shape.layers.iter().find_map(|layer| layer.experts);
    let share = experts.map_or(1.0, |experts| experts.top_k as f64 / experts.count as f64);
    let numbers = |spec: &candle_cp_layers::TensorSpec| {
        let all = spec.shape.iter().product::<usize>() as f64;
        match () {
            () if Part::of(&spec.name) != Part::Text || !matches!(spec.role, Role::Matrix { .. }) => 0.0,
            () if spec.name.contains("embed_tokens") => 0.0,
            () if spec.name.contains(".experts.") => all * share,
            () => all,
        }
    };
    let head = if shape.tied { (shape.vocab_size * shape.hidden_size) as f64 } else { 0.0 };
    config.tensors().iter().map(numbers).sum::<f64>() + head
}
