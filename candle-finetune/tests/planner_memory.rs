//! Planned memory is what real runs hold: tensors exactly, passes within a factor of what an allocator counts.

#[path = "../../candle-cp/tests/common/counting.rs"]
mod counting;
mod planner_run;

use std::path::Path;
use std::sync::Mutex;

use candle_core::{Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{Communicator, CpContext, Tokens};
use candle_cp_layers::{LoadOptions, LoraOptions, Part, Weights};
use candle_finetune::planner::{Request, plan};
use candle_finetune::{AdamW, AdamWConfig, Config, Job, Result, Trainer};
use planner_run::{batch, checkpoint, local_gradients, model, request, weights, with_tokenizer};

/// The allocator counts the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn bytes<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> u64 {
    tensors.map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64).sum()
}

/// Weights as a run has them: with adapters or frozen parts.
fn start(name: &str, request: &Request) -> Weights {
    let config = model(name).config;
    let Some(rank) = request.lora_rank else {
        return weights(name, config.as_ref(), &LoadOptions::new().freeze(request.freeze.iter().copied()));
    };
    let mut weights = weights(name, config.as_ref(), &LoadOptions::new());
    weights.add_lora(config.as_ref(), &LoraOptions::new(rank, rank as f64), 1).unwrap();
    weights
}

#[test]
fn parameters_gradients_and_optimizer_are_the_sums_of_their_tensors() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for name in ["gemma4-dense", "gemma4-moe", "gemma4-effective", "gemma4-unified", "qwen3_5-dense", "qwen3_5-moe"] {
        for (freeze, lora_rank) in [(None, None), (Some(Part::Vision), None), (None, Some(3))] {
            let request = Request { lora_rank, freeze: freeze.into_iter().collect(), ..request(64, 1) };
            let planned = plan(&model(name), &request).unwrap();
            let weights = start(name, &request);
            let what = format!("{name}, {freeze:?}, {lora_rank:?}");
            let trained = bytes(weights.variables().values().map(|variable| variable.as_tensor()));
            assert_eq!(planned.parameters.all_trained() * 4, trained, "{what}");
            let loaded: u64 = all_tensors(name).iter().map(|(_, numbers)| numbers * 4).sum();
            let adapters = if lora_rank.is_some() { trained } else { 0 };
            assert_eq!(planned.memory.parameters, loaded + adapters, "{what}");
            assert_eq!(planned.memory.gradients, trained, "{what}");
            let optimizer = AdamW::new(weights.variables(), AdamWConfig::default()).unwrap();
            let moments = bytes(optimizer.moments().flat_map(|(_, moments)| [&moments.mean, &moments.square]));
            assert_eq!((planned.memory.moments, planned.memory.masters), (moments, 0), "{what}");
        }
    }
}

/// Names and numbers of what a model reads, from the file and not from the table that the planner counts.
fn all_tensors(name: &str) -> Vec<(String, u64)> {
    let bytes = std::fs::read(checkpoint(name).join("model.safetensors")).unwrap();
    let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
    let read: Vec<String> = model(name)
        .config
        .tensors()
        .into_iter()
        .filter(|spec| spec.role != candle_cp_layers::Role::Unused)
        .map(|spec| spec.name)
        .collect();
    let stem = |name: &str| name.split(".experts.").next().unwrap_or(name).to_string();
    let is_read = |name: &String| {
        read.iter().any(|other| other == name || (name.contains(".experts.") && stem(other) == stem(name)))
    };
    tensors
        .into_iter()
        .filter(|(name, _)| is_read(name))
        .map(|(name, tensor)| (name, tensor.elem_count() as u64))
        .collect()
}

/// The most bytes beyond those held before that all ranks need for it; rank 0 knows.
fn peak_of_all(comm: &dyn Communicator, run: impl FnOnce() -> Result<()>) -> Result<u64> {
    comm.barrier()?;
    let held = if comm.rank() == 0 { counting::reset_peak() } else { 0 };
    comm.barrier()?;
    run()?;
    comm.barrier()?;
    Ok((counting::peak() - held) as u64)
}

/// The most bytes beyond those held before that forward, backward and the collection of gradients take on all ranks, which
/// are threads.
fn measured(name: &str, request: &Request) -> u64 {
    let config = model(name).config;
    let batch = batch(config.as_ref(), request);
    let run = threads::run(request.cp, &threads::Options::default(), |comm| {
        let weights = start(name, request);
        let model = config.model(&weights)?;
        let tokens: Tokens = batch.tokens()?;
        let layout = request.layout.layout(&tokens, request.cp, &config.layer_work())?;
        let context = CpContext::new(comm.clone(), layout, tokens)?;
        let pass = || local_gradients((model.as_ref(), &weights), &batch, &context, request.recompute);
        pass()?; // plans and pools are made the first time
        peak_of_all(comm.as_ref(), || pass().map(drop))
    });
    run.unwrap()[0]
}

#[test]
fn passes_need_what_was_planned() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut table = String::new();
    let mut worst: f64 = 1.0;
    for name in ["gemma4-dense", "gemma4-moe", "gemma4-effective", "gemma4-unified", "qwen3_5-dense", "qwen3_5-moe"] {
        for (seq_len, cp, recompute, pictures, lora_rank) in [
            (640, 1, false, 0, None),
            (640, 1, true, 0, None),
            (1920, 1, false, 0, None),
            (1920, 1, true, 0, None),
            (960, 1, false, 16, None),
            (960, 1, false, 0, Some(4)),
            (960, 1, true, 0, Some(4)),
            (1920, 2, false, 0, None),
            (2880, 3, false, 16, None),
            (3840, 4, false, 0, Some(4)),
        ] {
            let picture_tokens = if pictures > 0 { 4 } else { 0 };
            let request = Request { recompute, pictures, picture_tokens, lora_rank, ..request(seq_len, cp) };
            let planned = plan(&model(name), &request).unwrap().memory;
            let found = measured(name, &request) / cp as u64;
            let ratio = planned.pass as f64 / found as f64;
            worst = worst.max(ratio).max(1.0 / ratio);
            table += &format!(
                "{name}, {seq_len} tokens, {cp} ranks, recompute {recompute}, {pictures} pictures, lora {lora_rank:?}: planned {:.2} MiB ({}, kept \
                 {:.2}), measured {:.2}: {ratio:.3}\n",
                planned.pass as f64 / 1048576.0,
                planned.pass_peak,
                planned.kept as f64 / 1048576.0,
                found as f64 / 1048576.0,
            );
        }
    }
    assert!(worst <= 1.15, "off by a factor of {worst:.3}:\n{table}");
}

/// The most bytes beyond those held between steps that a step of the trainer takes on all ranks.
fn measured_step(checkpoint: &Path, name: &str, request: &Request) -> u64 {
    let settings = Config {
        model: Some(checkpoint.to_path_buf()),
        cp: request.cp,
        dp: Some(request.dp),
        // Of the job's own data, which is not used here.
        seq_len: 512,
        batch_rows: 1,
        accumulate: request.accumulate,
        zero: usize::from(request.zero),
        recompute: request.recompute,
        ..Config::default()
    };
    let job = Job::prepare(&settings).unwrap();
    let batches = vec![batch(model(name).config.as_ref(), request); request.accumulate];
    let run = threads::run(request.ranks(), &threads::Options::default(), |comm| {
        let mut trainer = Trainer::new(&job, &settings, comm.clone())?;
        trainer.step(&batches)?; // plans and pools are made the first time
        peak_of_all(comm.as_ref(), || trainer.step(&batches).map(drop))
    });
    run.unwrap()[0]
}

/// Threads that recompute come to their peaks one after another, and what they receive is the memory of the sender: together
/// they need less than was planned for each.
#[test]
fn steps_need_what_was_planned() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (mut table, mut off) = (String::new(), 0);
    for name in ["gemma4-dense", "gemma4-moe", "qwen3_5-dense", "qwen3_5-moe"] {
        let folder = with_tokenizer(name);
        for (cp, dp, recompute, zero, accumulate, most) in [
            (1, 1, false, false, 2, 1.15),
            (1, 1, true, true, 2, 1.15),
            (2, 1, false, true, 1, 1.15),
            (2, 1, true, false, 2, 1.7),
            (2, 2, false, false, 2, 1.15),
            (2, 2, true, true, 1, 1.7),
        ] {
            let request = Request { dp, recompute, zero, accumulate, ..request(480, cp) };
            let planned = plan(&model(name), &request).unwrap().memory;
            let found = measured_step(folder.path(), name, &request) / request.ranks() as u64;
            let ratio = planned.pass.max(planned.update) as f64 / found as f64;
            off += usize::from(!(1.0 / 1.15..=most).contains(&ratio));
            table += &format!(
                "{name}, {cp} x {dp} ranks, recompute {recompute}, zero {zero}, {accumulate} batches: planned {:.2} MiB, measured \
                 {:.2}: {ratio:.3}\n",
                planned.pass.max(planned.update) as f64 / 1048576.0,
                found as f64 / 1048576.0,
            );
        }
    }
    assert!(off == 0, "{off} plans are off:\n{table}");
}
