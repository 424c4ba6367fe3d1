//! Planned traffic is what communicators count in real runs, byte for byte.

mod planner_run;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{CommStats, Traffic, threads};
use candle_cp::{CpContext, LayoutKind};
use candle_cp_layers::LoadOptions;
use candle_finetune::planner::{Flow, Request, RunPlan, plan};
use candle_finetune::{Config, Job, Trainer};
use planner_run::{batch, local_gradients, model, request, weights};

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

/// Counters of every rank after one step: a pass over the batch and the sum of its gradients.
fn step(name: &str, request: &Request) -> Vec<CommStats> {
    let config = model(name).config;
    let batch = batch(config.as_ref(), request);
    let layout = request.layout.layout(&batch.tokens().unwrap(), request.cp, &config.layer_work()).unwrap();
    let run = threads::run(request.cp, &threads::Options::default(), |comm| {
        let weights = weights(name, config.as_ref(), &LoadOptions::new());
        let model = config.model(&weights)?;
        let context = CpContext::new(comm.clone(), layout.clone(), batch.tokens()?)?;
        let gradients = local_gradients((model.as_ref(), &weights), &batch, &context, request.recompute)?;
        let numbers = gradients.named().values().map(Tensor::elem_count).sum::<usize>();
        comm.all_reduce_sum(&Tensor::zeros(numbers, DType::F32, &Device::Cpu)?)?;
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
        let [reduce, gather] = planned.reduction_of(rank);
        let found = counted(stats, Traffic::AllReduce);
        let sums = [reduce.messages + gather.messages, reduce.sent + gather.sent, reduce.received + gather.received];
        assert_eq!(sums, [found.messages, found.sent, found.received], "gradients, {}", what(rank));
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

/// A step's sum is over all replicas: every number leaves and arrives once per half, but for the rank's own part.
#[test]
fn gradients_are_summed_over_replicas_as_well() {
    let request = Request { dp: 3, ..request(300, 2) };
    let model = model("gemma4-dense");
    let planned = plan(&model, &request).unwrap();
    let numbers = planned.parameters.trained as usize;
    let stats = threads::run(6, &threads::Options::default(), |comm| {
        comm.all_reduce_sum(&Tensor::zeros(numbers, DType::F32, &Device::Cpu)?)?;
        comm.barrier()?;
        Ok::<_, candle_cp::Error>(comm.stats())
    });
    for (rank, stats) in stats.unwrap().iter().enumerate() {
        let [reduce, gather] = planned.reduction_of(rank);
        let found = counted(stats, Traffic::AllReduce);
        assert_eq!((reduce.sent + gather.sent, reduce.messages + gather.messages), (found.sent, found.messages));
    }
    // With sharded state the second half hands out weights, in their type.
    let sharded = plan(&model, &Request { zero: true, dtype: DType::BF16, ..request }).unwrap();
    assert_eq!(sharded.reduction_of(0)[1].sent * 2, planned.reduction_of(0)[1].sent);
    assert_eq!(sharded.reduction_of(0)[0], planned.reduction_of(0)[0]);
}
