//! Memory of one rank.

use candle_core::DType;
use candle_cp_layers::{LoraOptions, Part, Role, TensorSpec, Weights};

use super::graph::{Work, pass_memory};
use super::layers::{Numbers, WIDE};
use super::request::Request;
use super::traffic::{DecoderTraffic, Sharing};
use crate::buckets::{Bucket, Buckets, ON_THE_WAY};
use crate::error::Result;
use crate::family::{DecoderShape, KeyRole, Mixer, VlmConfig};

/// What the names of an adapter's matrices have before and behind the path of their module.
const ADAPTER_PREFIX: &str = "base_model.model.";
const ADAPTER_ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// Numbers in the tensors of a model, by what happens to them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Loaded, in the model's type.
    pub loaded: u64,
    /// Of these, trained.
    pub trained: u64,
    /// In adapters, f32; trained.
    pub adapters: u64,
    /// In the vision tower and its projection; loaded, trained or not.
    pub vision: u64,
    /// In the largest trained tensor.
    pub largest: u64,
    /// In the largest bucket of trained tensors that is summed over ranks at a time.
    pub largest_bucket: u64,
    /// In the largest bucket of a decoder layer.
    pub layer_bucket: u64,
}

impl Parameters {
    /// Counts the table of tensors of a model; `buckets` is what is trained.
    pub(super) fn count(config: &dyn VlmConfig, request: &Request, buckets: &Buckets) -> Self {
        let mut counted = Self::default();
        for spec in config.tensors().iter().filter(|spec| spec.role != Role::Unused) {
            let numbers = spec.shape.iter().map(|&size| size as u64).product::<u64>();
            counted.loaded += numbers;
            counted.vision += if Part::of(&spec.name) == Part::Vision { numbers } else { 0 };
        }
        let numbers = buckets.all().iter().map(|bucket| bucket.count as u64).sum();
        match request.lora_rank {
            Some(_) => counted.adapters = numbers,
            None => counted.trained = numbers,
        }
        let tensors = buckets.all().iter().flat_map(|bucket| &bucket.parameters);
        counted.largest = tensors.map(|(_, place)| place.len() as u64).max().unwrap_or(0);
        let largest = |buckets: &mut dyn Iterator<Item = &Bucket>| buckets.map(|bucket| bucket.count as u64).max();
        counted.largest_bucket = largest(&mut buckets.all().iter()).unwrap_or(0);
        counted.layer_bucket = largest(&mut buckets.all().iter().filter(|b| b.layer.is_some())).unwrap_or(0);
        counted
    }

    /// Numbers that are trained, adapters included.
    pub fn all_trained(&self) -> u64 {
        self.trained + self.adapters
    }
}

/// The buckets that a trainer makes of what is trained.
///
/// # Errors
/// Adapters do not fit.
pub(super) fn buckets(config: &dyn VlmConfig, request: &Request) -> Result<Buckets> {
    let layer_of = |name: &str| config.decoder_layer(name);
    let Some(rank) = request.lora_rank else {
        let is_trained = |spec: &TensorSpec| spec.is_trained() && !request.freeze.contains(&Part::of(&spec.name));
        let tensors = config.tensors().into_iter().filter(is_trained);
        let parameters = tensors.map(|spec| (spec.name, request.dtype, spec.shape.iter().product())).collect();
        return Ok(Buckets::of(parameters, layer_of));
    };
    let shapes = Weights::lora_shapes(config, &LoraOptions::new(rank, rank as f64))?;
    let adapter = |(matrix, shapes): (String, [[usize; 2]; 2])| {
        let path = matrix.strip_suffix(".weight").unwrap_or(&matrix).to_string();
        let numbers = shapes.map(|[rows, columns]| rows * columns);
        ADAPTER_ENDS
            .into_iter()
            .zip(numbers)
            .map(move |(end, numbers)| (format!("{ADAPTER_PREFIX}{path}{end}"), DType::F32, numbers))
    };
    Ok(Buckets::of(shapes.into_iter().flat_map(adapter).collect(), layer_of))
}

/// Bytes that one rank needs, by what they are for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// Weights and adapters.
    pub parameters: u64,
    /// The two moments, f32.
    pub moments: u64,
    /// Copies of short weights in f32.
    pub masters: u64,
    /// Summed gradients in f32 that the optimizer takes: all, or this rank's share.
    pub gradients: u64,
    /// What forward keeps for backward; with and without recomputation in the plan's other values.
    pub kept: u64,
    /// Of these, the embeddings of the full rows and the slice of them.
    pub embeddings: u64,
    /// Of these, the vision tower.
    pub vision: u64,
    /// The logits of a chunk and what the loss computes with them, the head's gradient included.
    pub loss: u64,
    /// Keys, values and their gradients of other ranks, the most at a time.
    pub in_flight: u64,
    /// The most that a pass needs beside parameters and optimizer: what is kept, gradients, and what is being worked on.
    pub pass: u64,
    /// Where in the pass that is.
    pub pass_peak: String,
    /// Gradients in the type of the weights at that moment.
    pub pass_gradients: u64,
    /// The most that summing gradients and the optimizer need beside parameters and optimizer state.
    pub update: u64,
}

impl Memory {
    /// What stays between steps.
    pub fn resident(&self) -> u64 {
        self.parameters + self.moments + self.masters
    }

    /// The most at a time.
    pub fn peak(&self) -> u64 {
        self.resident() + self.pass.max(self.update)
    }
}

/// What memory depends on beside model and request.
pub(super) struct Slices<'a> {
    pub shape: &'a DecoderShape,
    pub sharing: &'a Sharing,
    pub traffic: &'a DecoderTraffic,
    pub rank: usize,
}

/// Bytes of a number of this type.
pub(super) fn number(dtype: DType) -> u64 {
    dtype.size_in_bytes() as u64
}

/// Memory of a rank with this work.
pub(super) fn memory(parameters: &Parameters, request: &Request, shape: &DecoderShape, work: &Work) -> Memory {
    let number = number(request.dtype);
    let pass = pass_memory(shape, work, ON_THE_WAY as u64 * parameters.layer_bucket * WIDE);
    let trained = parameters.all_trained();
    let shards = if request.zero { request.ranks() as u64 } else { 1 };
    let short = if number < WIDE { parameters.trained } else { 0 };
    // Short gradients and their f32 copies exist side by side while the last batch's graph is still there; sums of
    // earlier batches are held all the time.
    let late = pass.weight_gradients / work.gradient_number() * WIDE;
    let copies = if work.gradient_number() < WIDE { late } else { 0 };
    let collected = pass.kept + pass.weight_gradients + copies + pass.shares;
    let earlier = if request.accumulate > 1 { trained * WIDE } else { 0 };
    let ranks = request.ranks() as u64;
    // A bucket end to end and what comes of it from other ranks.
    let [largest, largest_bucket] = [parameters.largest, parameters.largest_bucket].map(|numbers| numbers * WIDE);
    let bucket = if ranks > 1 { 2 * largest_bucket } else { largest_bucket };
    // One rank's share is all there is.
    let (gathered, from_share) = if ranks > 1 { (largest_bucket, (trained * WIDE).div_ceil(ranks)) } else { (0, 0) };
    let share = (trained * WIDE).div_ceil(ranks);
    let gradients = if request.zero { share } else { trained * WIDE };
    // The last sums; then an update takes three tensors of a parameter's size. Two buckets
    // of new weights on their way are no more than one of sums with what comes from other ranks.
    let update = match request.zero {
        true => share + (late + bucket).max(3 * largest.min(share)),
        false => (from_share + (late + bucket).max(gradients + gathered)).max(gradients + 3 * largest),
    };
    Memory {
        parameters: parameters.loaded * number + parameters.adapters * WIDE,
        moments: 2 * (trained * WIDE).div_ceil(shards),
        masters: (short * WIDE).div_ceil(shards),
        gradients,
        kept: pass.kept,
        embeddings: pass.before_decoder - pass.vision,
        vision: pass.vision,
        loss: pass.loss,
        in_flight: work.remote.iter().flatten().copied().max().unwrap_or(0),
        pass: pass.peak.bytes.max(collected) + earlier,
        pass_peak: if collected > pass.peak.bytes { "gradients, collected".to_string() } else { pass.peak.place },
        pass_gradients: pass.peak.weight_gradients,
        update,
    }
}

fn in_flight(traffic: &super::traffic::RankTraffic) -> u64 {
    traffic.values().map(|flow| flow.peak).sum()
}

/// What the rank of these slices works on.
pub(super) fn work(request: &Request, slices: &Slices) -> Work {
    let batch = request.batch_rows as u64;
    let layout = &slices.sharing.layout;
    let pieces: Vec<u64> = layout.ranges(slices.rank).iter().map(|range| batch * range.len() as u64).collect();
    let layers = slices.shape.layers.iter().zip(&slices.traffic.layers);
    let gathered = |mixer: &Mixer| match mixer {
        Mixer::Attention(attention) if attention.keys == KeyRole::Lends => {
            let hops = &slices.sharing.plans[&attention.rule].hops[slices.rank];
            batch * hops.iter().map(|[_, received]| *received as u64).sum::<u64>()
        }
        _ => 0,
    };
    Work {
        numbers: Numbers { number: number(request.dtype), cpu: request.device.is_cpu },
        local_tokens: pieces.iter().sum(),
        full_tokens: batch * request.seq_len as u64,
        padded_tokens: batch * layout.padded_len() as u64,
        pieces,
        soft_tokens: request.soft_tokens() as u64,
        text_trained: !request.freeze.contains(&Part::Text),
        vision_trained: request.lora_rank.is_none() && !request.freeze.contains(&Part::Vision),
        lora_rank: request.lora_rank.map(|rank| rank as u64),
        recompute: request.recompute,
        ranks: request.ranks() as u64,
        gathered_keys: layers.clone().map(|(layer, _)| gathered(&layer.mixer)).collect(),
        remote: layers.map(|(_, traffic)| [0, 1].map(|pass| in_flight(&traffic[slices.rank][pass]))).collect(),
        batch,
    }
}
