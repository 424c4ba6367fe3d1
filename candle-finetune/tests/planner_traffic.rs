//! Planned traffic is what communicators count in real runs, byte for byte.

mod planner_run;

use candle_core::DType;
use candle_cp::comm::{CommStats, Traffic, threads};
use candle_cp::{CpContext, LayoutKind};
use candle_cp_layers::LoadOptions;
use candle_finetune::planner::{Flow, Request, RunPlan, plan};
use candle_finetune::{Config, Job, Trainer};
use planner_run::{batch, local_gradients, model, request, weights, with_tokenizer};

const KINDS: [Traffic; 6] = [
    Traffic::KeyValue,
    Traffic::KeyValueGradient,
    Traffic::State,
    Traffic::StateGradient,
    Traffic::Halo,
    Traffic::HaloGradient,
];

fn counted(stats: &CommStats, kind: Traffic) -> Flow {
    let counter = stats.of(kind);
    Flow {
        messages: counter.messages_sent as u64,
        sent: counter.bytes_sent as u64,
        received: counter.bytes_received as u64,
        peak: counter.peak_bytes_alive as u64,
    }
}

/// Counters of every rank after a pass over the batch.
fn step(name: &str, request: &Request) -> Vec<CommStats> {
    let config = model(name).config;
    let batch = batch(config.as_ref(), request);
    let layout = request.layout.layout(&batch.tokens().unwrap(), request.cp, &config.layer_work()).unwrap();
    let run = threads::run(request.cp, &threads::Options::default(), |comm| {
        let weights = weights(name, config.as_ref(), &LoadOptions::new());
        let model = config.model(&weights)?;
        let context = CpContext::new(comm.clone(), layout.clone(), batch.tokens()?)?;
        local_gradients((model.as_ref(), &weights), &batch, &context, request.recompute)?;
        // A rank is done when its peers have taken what it sent.
        comm.barrier()?;
        Ok::<_, candle_finetune::Error>(comm.stats())
    });
    run.unwrap()
}

fn assert_traffic(name: &str, request: &Request) -> RunPlan {
    let planned = plan(&model(name), request).unwrap();
    let what = |rank: usize| {
        let Request { cp, layout, documents, pictures, batch_rows, recompute, .. } = request;
        format!(
            "{name}, rank {rank} of {cp}, {layout}, {batch_rows} x {documents} documents, {pictures} pictures, {recompute}"
        )
    };
    for (rank, stats) in step(name, request).iter().enumerate() {
        for kind in KINDS {
            let expected = planned.traffic[rank].get(&kind).copied().unwrap_or_default();
            assert_eq!(expected, counted(stats, kind), "{kind:?}, {}", what(rank));
        }
    }
    planned
}

/// Every number of ranks, with layouts, recomputation, documents, pictures and rows in turn.
fn assert_all(name: &str) {
    for (case, cp) in [1, 2, 4, 8, 16, 2, 4, 8].into_iter().enumerate() {
        let pictured = case % 4 == 3;
        let request = Request {
            layout: LayoutKind::ALL[case % 3],
            recompute: case % 2 == 1,
            documents: [1, 3][case / 2 % 2],
            pictures: if pictured { 3 } else { 0 },
            picture_tokens: if pictured { 4 } else { 0 },
            batch_rows: 1 + usize::from(case == 2),
            // Not a multiple of the ranks: the layout pads.
            ..request(if cp > 4 { 2203 } else { 1201 }, cp)
        };
        let planned = assert_traffic(name, &request);
        let sent: u64 = planned.traffic.iter().flat_map(|rank| rank.values()).map(|flow| flow.sent).sum();
        assert_eq!(sent > 0, cp > 1, "{name}, {cp} ranks");
    }
}

#[test]
fn gemma_dense() {
    assert_all("gemma4-dense");
}

#[test]
fn gemma_with_experts() {
    assert_all("gemma4-moe");
}

#[test]
fn gemma_effective() {
    assert_all("gemma4-effective");
}

#[test]
fn gemma_unified() {
    assert_all("gemma4-unified");
}

#[test]
fn qwen_dense() {
    assert_all("qwen3_5-dense");
}

#[test]
fn qwen_with_experts() {
    assert_all("qwen3_5-moe");
}

/// The trainer itself: two batches of a step, built-in model.
#[test]
fn a_step_of_the_trainer() {
    for family in candle_finetune::family::Family::ALL {
        let settings =
            Config { cp: 3, seq_len: 700, batch_rows: 2, accumulate: 2, recompute: true, ..Config::of_family(family) };
        let job = Job::prepare(&settings).unwrap();
        let planned_model =
            candle_finetune::planner::PlannedModel { name: "built-in".to_string(), config: job.model.clone() };
        let request = Request {
            documents: 5,
            batch_rows: 2,
            accumulate: 2,
            recompute: true,
            layout: settings.layout,
            ..request(settings.seq_len, settings.cp)
        };
        let planned = plan(&planned_model, &request).unwrap();
        let mut batch = batch(job.model.as_ref(), &request);
        let small = |id: &mut u32| *id = 20 + *id % 4;
        batch.ids.iter_mut().flatten().for_each(small);
        batch.labels.iter_mut().flatten().for_each(|label| *label = 20 + *label % 4);
        let stats = threads::run(settings.cp, &threads::Options::default(), |comm| {
            let trainer = Trainer::new(&job, &settings, comm.clone())?;
            trainer.gradients(&[batch.clone(), batch.clone()])?;
            comm.barrier()?;
            Ok::<_, candle_finetune::Error>(comm.stats())
        });
        for (rank, stats) in stats.unwrap().iter().enumerate() {
            for kind in KINDS {
                let expected = planned.traffic[rank].get(&kind).copied().unwrap_or_default();
                assert_eq!(expected, counted(stats, kind), "{family}, {kind:?}, rank {rank}");
            }
        }
    }
}

/// What a step of a trainer sends and receives in addition to the sums of its gradients, by hand: the ranks' counts of the
/// batch, and the loss and the norm, each of 1 number of 8 bytes, which the last of 4 ranks adds up.
fn small(kind: Traffic, rank: usize) -> [u64; 3] {
    let (others, last) = (3, rank == 3);
    match kind {
        Traffic::Gather => {
            // Before the step what batches have; behind it bytes and seconds by kind of traffic, for the report.
            let bytes = (7 + 2 * Traffic::ALL.len() as u64) * 8;
            [2 * others, others * bytes, others * bytes]
        }
        // Two sums of two halves: one number goes to the last rank, which hands the sum to all others.
        Traffic::AllReduce if last => [2 * 2 * others, 2 * others * 8, 2 * others * 8],
        Traffic::AllReduce => [2 * 2 * others, 2 * 8, 2 * 8],
        _ => [0; 3],
    }
}

/// A step of the trainer at cp 2 x dp 2: sums of gradients and what is handed back, message by message.
fn assert_sums(name: &str, dtype: DType, recompute: bool, zero: bool, lora_rank: Option<usize>) {
    let folder = with_tokenizer(name);
    let mut settings = Config {
        model: Some(folder.path().to_path_buf()),
        cp: 2,
        dp: Some(2),
        // Of the job's own data, which is not used here.
        seq_len: 512,
        batch_rows: 1,
        zero: usize::from(zero),
        dtype,
        recompute,
        ..Config::default()
    };
    settings.lora.rank = lora_rank;
    let request = Request { dp: 2, recompute, zero, lora_rank, dtype, ..request(120, 2) };
    let planned_model = model(name);
    let planned = plan(&planned_model, &request).unwrap();
    let batch = batch(planned_model.config.as_ref(), &request);
    let job = Job::prepare(&settings).unwrap();
    let stats = threads::run(4, &threads::Options::default(), |comm| {
        let mut trainer = Trainer::new(&job, &settings, comm.clone())?;
        comm.barrier()?;
        let before = comm.stats();
        trainer.step(std::slice::from_ref(&batch))?;
        comm.barrier()?;
        Ok::<_, candle_finetune::Error>([before, comm.stats()])
    });
    for (rank, [before, after]) in stats.unwrap().iter().enumerate() {
        let found = |kind| {
            let [a, b] = [before, after].map(|stats| counted(stats, kind));
            let all = [b.messages - a.messages, b.sent - a.sent, b.received - a.received];
            let small = small(kind, rank);
            [0, 1, 2].map(|place| all[place] - small[place])
        };
        let [reduce, handed] = planned.reduction_of(rank).map(|flow| [flow.messages, flow.sent, flow.received]);
        let both = [0, 1, 2].map(|place| reduce[place] + handed[place]);
        let expected = if zero { [reduce, [0; 3], handed] } else { [[0; 3], both, [0; 3]] };
        let found = [Traffic::ReduceScatter, Traffic::AllReduce, Traffic::Gather].map(found);
        let what = format!("{name}, {dtype:?}, recompute {recompute}, zero {zero}, lora {lora_rank:?}, rank {rank}");
        assert_eq!(found, expected, "reduce-scatter, all-reduce, gather of {what}");
        assert!(reduce[0] > 3 || lora_rank.is_some(), "there are several buckets: {what}");
    }
}

#[test]
fn gradients_are_summed_as_planned() {
    for name in ["gemma4-dense", "qwen3_5-dense", "gemma4-moe", "qwen3_5-moe"] {
        for (recompute, zero) in [(false, false), (true, false), (false, true), (true, true)] {
            assert_sums(name, DType::F32, recompute, zero, None);
        }
    }
}

/// With sharded state weights are handed out in their own type, adapters always in f32.
#[test]
fn short_weights_and_adapters_are_summed_as_planned() {
    for zero in [false, true] {
        assert_sums("gemma4-dense", DType::BF16, true, zero, None);
        assert_sums("gemma4-dense", DType::F32, false, zero, Some(3));
        assert_sums("qwen3_5-dense", DType::BF16, true, zero, Some(3));
    }
}
