//! Attention forward and backward on the CPU under Gemma masks; one JSON line per shape.
//!
//! The shapes, masks and flop counts are those of `benchmarks/compare_torch.py`, which runs this beside PyTorch:
//! a row of S tokens, two documents cut at S / 3; with a window also two image blocks of 256 tokens, at 64 and at S / 2.
//! Forward counts 4 * live pairs * D * heads, forward + backward 3.5 times that. Best of three.
//!
//! `fwd` and `fwd_bwd` go through Candle's graph, which adds every gradient to a tensor of zeros; `kernels_fwd_bwd` is
//! the same work without the graph.
//!
//! `cargo run --release -p candle-cp --example bench_attention -- [--threads N] [--dtypes f32,bf16] [--only INDEX]`

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var, WithDType};
use candle_cp::{AttentionPlan, CpContext, MaskRule, Result, Tokens, prepare_process};
use candle_cp_kernels::{self as kernels, Element, Forward, Gradients, Heads, Order, Real, Saved};
use half::bf16;
use std::time::Instant;

/// S, D, query heads, key heads, window (0: none).
const SHAPES: [(usize, usize, usize, usize, usize); 4] =
    [(2048, 256, 8, 4, 1024), (2048, 512, 8, 2, 0), (4096, 256, 8, 4, 1024), (4096, 512, 8, 2, 0)];

/// A scalar whose gradient is the given one, so that nothing but the operator's own backward is measured.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let zero = match storage {
            CpuStorage::BF16(_) => CpuStorage::BF16(vec![Default::default()]),
            _ => CpuStorage::F32(vec![0.0]),
        };
        Ok((zero, Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

fn best(mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    f()?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        f()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn tokens(s: usize) -> Result<Tokens> {
    let document = |i: usize| i64::from(i >= s / 3);
    let group = |i: usize| match i {
        _ if (64..320).contains(&i) => 0,
        _ if (s / 2..s / 2 + 256).contains(&i) => 1,
        _ => -1,
    };
    Tokens::new(vec![(0..s).map(document).collect()], vec![(0..s).map(group).collect()])
}

fn shape(dtype: DType, (s, d, hq, hkv, window): (usize, usize, usize, usize, usize)) -> Result<String> {
    let rule = if window > 0 { MaskRule::sliding(window).with_groups() } else { MaskRule::causal() };
    let tokens = tokens(s)?;
    let start = Instant::now();
    let plan = CpContext::single(tokens.clone())?.plan(&rule)?;
    let planning = start.elapsed().as_secs_f64();
    let context = CpContext::single(tokens)?;
    let random = |h: usize| Tensor::randn(0f32, 1.0, (1, h, s, d), &Device::Cpu)?.to_dtype(dtype);
    let (q, k, v, g) = (random(hq)?, random(hkv)?, random(hkv)?, random(hq)?);
    let scale = 1.0 / (d as f64).sqrt();
    let forward = best(|| context.attend(&q, &k, &v, &rule, scale).map(drop))?;
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).expect("a float tensor"));
    let both = best(|| {
        let out = context.attend(&q, &k, &v, &rule, scale)?;
        out.apply_op1(Seed(g.clone()))?.backward()?;
        Ok(())
    })?;
    let shape = kernels::Shape { batch: 1, query_heads: hq, key_heads: hkv, queries: s, head_dim: d };
    let operands = [q.as_tensor(), k.as_tensor(), v.as_tensor(), &g];
    let kernels = match dtype {
        DType::F32 => on_slices::<f32>(operands, &plan, shape, scale)?,
        _ => on_slices::<bf16>(operands, &plan, shape, scale)?,
    };
    let live = plan.live_pairs()[0];
    let flops = 4.0 * live as f64 * (d * hq) as f64;
    Ok(format!(
        "{{\"S\": {s}, \"D\": {d}, \"heads\": [{hq}, {hkv}], \"window\": {window}, \"dtype\": \"{}\", \"live\": {:.3}, \
         \"plan_s\": {planning:.6}, \"fwd\": {{\"s\": {forward:.5}, \"gflops\": {:.1}}}, \
         \"fwd_bwd\": {{\"s\": {both:.5}, \"gflops\": {:.1}}}, \
         \"kernels_fwd_bwd\": {{\"s\": {kernels:.5}, \"gflops\": {:.1}}}}}",
        if dtype == DType::F32 { "float32" } else { "bfloat16" },
        live as f64 / (s * s) as f64,
        flops / forward / 1e9,
        3.5 * flops / both / 1e9,
        3.5 * flops / kernels / 1e9,
    ))
}

/// Seconds of forward + backward on plain slices.
fn on_slices<T: Element + WithDType>(
    [q, k, v, g]: [&Tensor; 4],
    plan: &AttentionPlan,
    shape: kernels::Shape,
    scale: f64,
) -> Result<f64> {
    let [q, k, v, g] = [q, k, v, g].map(|x| x.flatten_all().and_then(|x| x.to_vec1::<T>()).expect("a tensor of T"));
    let heads = |heads: usize| [shape.batch, heads, shape.queries];
    let queries = |data| Heads::contiguous(data, heads(shape.query_heads), shape.head_dim);
    let keys = |data| Heads::contiguous(data, heads(shape.key_heads), shape.head_dim);
    let (query, key, value, d_out) = (queries(&q), keys(&k), keys(&v), queries(&g));
    let (tiles, bounds, scale) = (&plan.own().tiles, plan.bounds(), T::Acc::from_f64(scale));
    best(|| {
        let mut state = Forward::new(shape);
        kernels::forward_chunk(&mut state, (&query, &key, &value), tiles, bounds, scale);
        let (out, lse) = state.finish::<T>(Order::HeadsFirst);
        let delta =
            kernels::output_dot(&Heads::contiguous(&out, heads(shape.query_heads), shape.head_dim), &d_out, shape);
        let saved = Saved { query: &query, d_out: &d_out, lse: &lse, delta: &delta, bounds, scale };
        let mut gradients = Gradients::new(shape);
        kernels::backward_chunk(&mut gradients, saved, (&key, &value), shape.queries, tiles);
        gradients.finish::<T>(Order::HeadsFirst);
        Ok(())
    })
}

fn flag(name: &str) -> Option<String> {
    let args: Vec<String> = std::env::args().collect();
    args.iter().position(|a| a == name).and_then(|i| args.get(i + 1).cloned())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // SAFETY: nothing has started a thread yet.
    unsafe { prepare_process(1) };
    let threads = flag("--threads").map_or(Ok(2), |n| n.parse())?;
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    let x = Tensor::randn(0f32, 1.0, (2048, 2048), &Device::Cpu)?;
    let seconds = best(|| Ok(x.matmul(&x).map(drop)?))?;
    println!("{{\"matmul_f32_gflops\": {:.1}}}", 2.0 * 2048f64.powi(3) / seconds / 1e9);
    let only = flag("--only").map(|n| n.parse::<usize>()).transpose()?;
    for dtype in flag("--dtypes").unwrap_or("f32".into()).split(',') {
        let dtype = match dtype {
            "f32" => DType::F32,
            "bf16" => DType::BF16,
            other => return Err(format!("--dtypes is {other}, but f32 and bf16 are measured").into()),
        };
        for (i, &case) in SHAPES.iter().enumerate() {
            if only.is_none_or(|n| n == i) {
                println!("{}", shape(dtype, case)?);
            }
        }
    }
    Ok(())
}
