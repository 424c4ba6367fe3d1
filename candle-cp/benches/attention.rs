//! The operator on one rank: a sliding and a full layer of Gemma 4's shapes, 1024 tokens in two documents.
//!
//! `bench_attention` (see `benchmarks/`) measures longer rows beside PyTorch.

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::{CpContext, MaskRule, Result, Tokens};
use criterion::{Criterion, criterion_group, criterion_main};

const LEN: usize = 1024;

/// Heads of query and key, head size, rule.
type Layer = (usize, usize, usize, MaskRule);

fn layers() -> [(&'static str, Layer); 2] {
    [("sliding", (8, 4, 256, MaskRule::sliding(1024).with_groups())), ("full", (8, 2, 512, MaskRule::causal()))]
}

fn context() -> Result<CpContext> {
    let document = |i: usize| i64::from(i >= LEN / 3);
    let group = |i: usize| if (LEN / 2..LEN / 2 + 256).contains(&i) { 0 } else { -1 };
    CpContext::single(Tokens::new(vec![(0..LEN).map(document).collect()], vec![(0..LEN).map(group).collect()])?)
}

fn layer(criterion: &mut Criterion, name: &str, (query_heads, key_heads, d, rule): Layer, dtype: DType) -> Result<()> {
    let context = context()?;
    let random = |heads: usize| -> Result<Var> {
        let x = Tensor::randn(0f32, 1.0, (1, heads, LEN, d), &Device::Cpu)?.to_dtype(dtype)?;
        Ok(Var::from_tensor(&x)?)
    };
    let (q, k, v) = (random(query_heads)?, random(key_heads)?, random(key_heads)?);
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| context.attend(q, k, v, &rule, 1.0 / (d as f64).sqrt());
    let detached = (q.as_detached_tensor(), k.as_detached_tensor(), v.as_detached_tensor());
    let label = |pass: &str| format!("attention/{name}/{}/{pass}", dtype.as_str());
    criterion.bench_function(&label("forward"), |bencher| {
        bencher.iter(|| attend(&detached.0, &detached.1, &detached.2).expect("attention"));
    });
    criterion.bench_function(&label("forward and backward"), |bencher| {
        bencher.iter(|| {
            let out = attend(&q, &k, &v).expect("attention");
            out.sum_all().and_then(|sum| sum.backward()).expect("gradients")
        });
    });
    Ok(())
}

fn benches(criterion: &mut Criterion) {
    for dtype in [DType::F32, DType::BF16] {
        for (name, shapes) in layers() {
            layer(criterion, name, shapes, dtype).expect("a layer");
        }
    }
}

criterion_group! {
    name = all;
    config = Criterion::default().sample_size(10);
    targets = benches
}
criterion_main!(all);
