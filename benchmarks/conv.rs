//! The short causal convolution with SiLU, forward and backward on the CPU, f32; one JSON line.
//!
//! S = 4096 tokens of C = 6144 channels, K = 4 taps: what `benchmarks/compare_conv.py` runs beside PyTorch. Seconds, best of
//! five. `fwd_bwd` goes through Candle's graph, which adds every gradient to a tensor of zeros; `kernels_fwd_bwd` is the same
//! work without the graph.
//!
//! `cargo run --release -p candle-cp --example bench_conv -- [--threads N]`

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};
use candle_cp::{ConvActivation, CpContext, Result, Tokens, prepare_process};
use candle_cp_kernels::{CausalConv, ConvRow};
use std::time::Instant;

const TOKENS: usize = 4096;
const CHANNELS: usize = 6144;
const TAPS: usize = 4;

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
    for _ in 0..5 {
        let start = Instant::now();
        f()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Seconds of forward + backward on plain slices.
fn on_slices([x, weight, gradient]: [&Tensor; 3]) -> Result<f64> {
    let [x, weight, gradient] = [x, weight, gradient].map(|x| x.flatten_all().and_then(|x| x.to_vec1::<f32>()));
    let (x, weight, gradient) = (x?, weight?, gradient?);
    best(|| {
        let row = |(i, x)| ConvRow { x, reach: Some(i) };
        let rows: Vec<_> = x.chunks(CHANNELS).enumerate().map(row).collect();
        let conv = CausalConv::new(&rows, &weight, TAPS, ConvActivation::Silu);
        let [mut out, mut d_x] = [(); 2].map(|()| vec![0.0; x.len()]);
        conv.forward(&mut out.chunks_mut(CHANNELS).collect::<Vec<_>>());
        let d_out: Vec<_> = gradient.chunks(CHANNELS).collect();
        conv.backward(&d_out, &mut d_x.chunks_mut(CHANNELS).collect::<Vec<_>>(), true);
        Ok(())
    })
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // SAFETY: nothing has started a thread yet.
    unsafe { prepare_process(1) };
    let args: Vec<String> = std::env::args().collect();
    let threads = args.iter().position(|a| a == "--threads").and_then(|i| args.get(i + 1));
    let threads = threads.map_or(Ok(2), |n| n.parse())?;
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    let context = CpContext::single(Tokens::single_document(1, TOKENS))?;
    let random = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?.to_dtype(DType::F32);
    let (x, gradient) = (random(&[1, TOKENS, CHANNELS])?, random(&[1, TOKENS, CHANNELS])?);
    let weight = random(&[CHANNELS, TAPS])?;
    let forward = best(|| context.causal_conv(&x, &weight, ConvActivation::Silu).map(drop))?;
    let kernels = on_slices([&x, &weight, &gradient])?;
    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    let both = best(|| {
        let out = context.causal_conv(&x, &weight, ConvActivation::Silu)?;
        out.apply_op1(Seed(gradient.clone()))?.backward()?;
        Ok(())
    })?;
    println!("{{\"fwd\": {forward:.5}, \"fwd_bwd\": {both:.5}, \"kernels_fwd_bwd\": {kernels:.5}}}");
    Ok(())
}
