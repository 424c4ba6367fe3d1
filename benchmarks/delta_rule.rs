//! The gated delta rule forward and backward on the CPU, one document; one JSON line per shape.
//!
//! The shapes are those of `benchmarks/torch_delta_rule.py`, which runs this beside transformers' chunked code. Seconds, best
//! of three. `fwd` and `fwd_bwd` go through Candle's graph; `kernels_fwd_bwd` is the same work without the graph. `maps` is
//! what a rank does besides if a document passes through all of its slice: its map, and the gradient of its first state.
//!
//! `cargo run --release -p candle-cp --example bench_delta_rule -- [--threads N] [--only INDEX]`

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor, Var};
use candle_cp::{CpContext, DeltaHeads, Result, Tokens, prepare_process};
use candle_cp_kernels::{
    self as kernels, DeltaBackward, DeltaBackwardRun, DeltaForward, DeltaForwardRun, DeltaInputs, DeltaRun,
};
use std::time::Instant;

/// S, key heads, value heads, dk and dv.
const SHAPES: [(usize, usize, usize, usize); 3] = [(4096, 16, 16, 128), (4096, 16, 32, 128), (1024, 16, 48, 128)];

/// A scalar whose gradient is the given one, so that nothing but the operator's own backward is measured.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
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

fn shape((s, key_heads, value_heads, d): (usize, usize, usize, usize)) -> Result<String> {
    let heads = DeltaHeads { key_heads, value_heads, key_dim: d, value_dim: d };
    let context = CpContext::single(Tokens::single_document(1, s))?;
    let random = |width: usize| Tensor::randn(0f32, 1.0, (1, s, width), &Device::Cpu);
    let (qkv, d_out) = (random(heads.width())?, random(value_heads * d)?.reshape((1, s, value_heads, d))?);
    let g = Tensor::rand(-0.5f32, 0.0, (1, s, value_heads), &Device::Cpu)?;
    let beta = Tensor::rand(0f32, 1.0, (1, s, value_heads), &Device::Cpu)?;
    let forward = best(|| context.delta_rule(&qkv, &g, &beta, &heads).map(drop))?;
    let [qkv, g, beta] = [qkv, g, beta].map(|x| Var::from_tensor(&x).expect("a float tensor"));
    let both = best(|| {
        let out = context.delta_rule(&qkv, &g, &beta, &heads)?;
        out.apply_op1(Seed(d_out.clone()))?.backward()?;
        Ok(())
    })?;
    let numbers = |x: &Tensor| x.flatten_all().and_then(|x| x.to_vec1::<f32>()).expect("f32");
    let (qkv, g, beta, d_out) = (numbers(&qkv), numbers(&g), numbers(&beta), numbers(&d_out));
    let inputs = DeltaInputs::new(heads, (1, s), &qkv, &g, &beta);
    let run = DeltaRun { row: 0, tokens: 0..s };
    let kernels = best(|| {
        let mut forward = DeltaForward::new(heads, s);
        let work = DeltaForwardRun { run: run.clone(), initial: None, keep_final: false };
        let passed = forward.run(&inputs, &[work]);
        forward.finish::<f32>();
        let (run, blocks) = (run.clone(), &passed[0].blocks);
        let mut backward = DeltaBackward::new(heads, s);
        let work = DeltaBackwardRun { run, initial: None, blocks, d_final: None, keep_initial: false };
        backward.run(&inputs, &[work], &d_out);
        backward.finish::<f32>();
        Ok(())
    })?;
    let maps = best(|| {
        kernels::delta_states(&inputs, std::slice::from_ref(&run));
        kernels::delta_transitions(&inputs, std::slice::from_ref(&run));
        kernels::delta_initial_gradients(&inputs, std::slice::from_ref(&run), &d_out);
        Ok(())
    })?;
    Ok(format!(
        "{{\"S\": {s}, \"heads\": [{key_heads}, {value_heads}], \"D\": {d}, \"fwd\": {forward:.5}, \
         \"fwd_bwd\": {both:.5}, \"kernels_fwd_bwd\": {kernels:.5}, \"maps\": {maps:.5}}}"
    ))
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
    let only = flag("--only").map(|n| n.parse::<usize>()).transpose()?;
    for (i, &case) in SHAPES.iter().enumerate() {
        if only.is_none_or(|n| n == i) {
            println!("{}", shape(case)?);
        }
    }
    Ok(())
}
