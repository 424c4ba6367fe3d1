//! One training step of the small built-in model, pictures included, on one rank.
//!
//! `cargo bench -p candle-finetune --bench step`; larger models: `benchmarks/step.rs`.

use std::sync::Arc;

use candle_cp::comm::Local;
use candle_cp::prepare_process;
use candle_finetune::{Config, Job, Trainer};
use criterion::{BenchmarkId, Criterion, Throughput};

fn step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step");
    group.sample_size(20);
    for recompute in [false, true] {
        let config = Config { cp: 1, recompute, ..Config::default() };
        let job = Job::prepare(&config).expect("the built-in model and data");
        let mut trainer = Trainer::new(&job, &config, Arc::new(Local::new())).expect("fresh weights");
        let batch = job.training(&config).next_training_batch().expect("a batch of digits");
        group.throughput(Throughput::Elements(batch.token_count() as u64));
        let name = if recompute { "recomputed" } else { "kept" };
        group.bench_function(BenchmarkId::new(name, config.seq_len), |bencher| {
            bencher.iter(|| trainer.step(std::slice::from_ref(&batch)).expect("a step"));
        });
    }
    group.finish();
}

fn main() {
    // SAFETY: nothing has started a thread yet.
    unsafe { prepare_process(1) };
    let mut criterion = Criterion::default().configure_from_args();
    step(&mut criterion);
    criterion.final_summary();
}
