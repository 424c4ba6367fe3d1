//! `linear_cross_entropy`, forward + backward, beside the three matrix products that it consists of.
//!
//! `cargo bench -p candle-cp --bench loss`

use candle_core::{Device, Tensor, Var};
use candle_cp::{LossOptions, Result, linear_cross_entropy, prepare_process};
use criterion::{Criterion, Throughput};
use std::hint::black_box;

const TOKENS: usize = 1024;
const VOCABULARY: usize = 32_768;
const WIDTH: usize = 512;

fn loss(hidden: &Var, weight: &Var, labels: &Tensor) -> Result<()> {
    let options = LossOptions { softcap: Some(30.0), ..LossOptions::new(TOKENS as f64) };
    black_box(linear_cross_entropy(hidden, weight, labels, &options)?.backward()?);
    Ok(())
}

/// Logits, gradient of the hidden states, gradient of the weight: without softmax.
fn products(hidden: &Tensor, weight: &Tensor) -> Result<()> {
    let logits = hidden.matmul(&weight.t()?)?;
    black_box((logits.matmul(weight)?, logits.t()?.matmul(hidden)?));
    Ok(())
}

fn bench(criterion: &mut Criterion) -> Result<()> {
    let hidden = Var::randn(0f32, 1.0, (TOKENS, WIDTH), &Device::Cpu)?;
    let weight = Var::randn(0f32, 0.2, (VOCABULARY, WIDTH), &Device::Cpu)?;
    let labels = |every: usize| {
        let label = |i: usize| if i.is_multiple_of(every) { (i * 31 % VOCABULARY) as i64 } else { -100 };
        Tensor::from_vec((0..TOKENS).map(label).collect(), TOKENS, &Device::Cpu)
    };
    let (all, eighth) = (labels(1)?, labels(8)?);
    let mut group = criterion.benchmark_group(format!("loss {TOKENS}x{VOCABULARY}x{WIDTH} f32"));
    group.sample_size(10).throughput(Throughput::Elements(TOKENS as u64));
    group.bench_function("every token has a label", |b| b.iter(|| loss(&hidden, &weight, &all).expect("fits")));
    group.bench_function("every 8th token has a label", |b| b.iter(|| loss(&hidden, &weight, &eighth).expect("fits")));
    let (hidden, weight) = (hidden.detach(), weight.detach());
    group.bench_function("three plain products", |b| b.iter(|| products(&hidden, &weight).expect("fits")));
    group.finish();
    Ok(())
}

fn main() -> Result<()> {
    // SAFETY: nothing has started a thread yet.
    unsafe { prepare_process(1) };
    let mut criterion = Criterion::default().configure_from_args();
    bench(&mut criterion)?;
    criterion.final_summary();
    Ok(())
}
