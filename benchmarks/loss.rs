//! `linear_cross_entropy`, forward + backward, beside the three matrix products that it consists of; one JSON line.
//!
//! The products are logits = X W^T, dX = dL W and dW = dL^T X as plain Candle matmuls over chunks of tokens, without
//! softmax, soft cap or accumulation. Both alternate, the best of the rounds counts. Memory is counted by the allocator:
//! the peak beyond what was held before, less dX and dW; `resident` is the same from the kernel's view (Linux), in the
//! first round.
//!
//! `cargo run --release -p candle-cp --example bench_loss -- [--tokens N] [--vocabulary N] [--hidden N] [--softcap X]
//! [--labelled EVERY] [--chunk N] [--products-chunk N] [--rounds N] [--threads N]`

use candle_core::{Device, Tensor, Var};
use candle_cp::{LossOptions, Result, linear_cross_entropy, prepare_process};
use std::time::Instant;

#[path = "../candle-cp/tests/common/counting.rs"]
mod counting;

use counting::{peak, reset_peak};

/// A field of `/proc/self/status` in bytes.
fn status(field: &str) -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<usize>().ok().map(|kib| kib << 10)
}

/// Resident bytes now, and makes the kernel start a new peak (`VmHWM`).
fn reset_resident_peak() -> Option<usize> {
    std::fs::write("/proc/self/clear_refs", "5").ok()?;
    status("VmRSS")
}

struct Case {
    hidden: Var,
    weight: Var,
    labels: Tensor,
    options: LossOptions,
    products_chunk: usize,
}

/// Bytes beyond what was held before and beyond the gradients.
struct Memory {
    forward: i64,
    backward: i64,
    resident: Option<i64>,
}

impl Case {
    fn gradient_bytes(&self) -> i64 {
        4 * (self.hidden.elem_count() + self.weight.elem_count()) as i64
    }

    fn loss(&self) -> Result<(f64, f64, Memory)> {
        let resident_before = reset_resident_peak();
        let before = reset_peak() as i64 + self.gradient_bytes();
        let start = Instant::now();
        let loss = linear_cross_entropy(&self.hidden, &self.weight, &self.labels, &self.options)?;
        let forward = peak() as i64 - before;
        reset_peak();
        let gradients = loss.backward()?;
        let seconds = start.elapsed().as_secs_f64();
        let backward = peak() as i64 - before;
        let beyond = |before: usize| Some(status("VmHWM")? as i64 - before as i64 - self.gradient_bytes());
        let memory = Memory { forward, backward, resident: resident_before.and_then(beyond) };
        drop(gradients);
        Ok((seconds, f64::from(loss.to_scalar::<f32>()?), memory))
    }

    fn products(&self) -> Result<f64> {
        let (hidden, weight) = (self.hidden.detach(), self.weight.detach());
        let tokens = hidden.dim(0)?;
        let start = Instant::now();
        for first in (0..tokens).step_by(self.products_chunk) {
            let x = hidden.narrow(0, first, self.products_chunk.min(tokens - first))?;
            let logits = x.matmul(&weight.t()?)?;
            let d_hidden = logits.matmul(&weight)?;
            let d_weight = logits.t()?.matmul(&x)?;
            std::hint::black_box((d_hidden, d_weight));
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

fn flag<T: std::str::FromStr>(name: &str, default: T) -> std::result::Result<T, String> {
    let args: Vec<String> = std::env::args().collect();
    let Some(i) = args.iter().position(|a| a == name) else { return Ok(default) };
    args.get(i + 1).and_then(|value| value.parse().ok()).ok_or(format!("{name} needs a number"))
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // SAFETY: nothing has started a thread yet.
    unsafe { prepare_process(1) };
    rayon::ThreadPoolBuilder::new().num_threads(flag("--threads", 2)?).build_global()?;
    let (tokens, vocabulary, width) = (flag("--tokens", 8192)?, flag("--vocabulary", 262_144)?, flag("--hidden", 512)?);
    let every: usize = flag("--labelled", 1)?.max(1);
    let label = |i: usize| if i.is_multiple_of(every) { (i * 7919 % vocabulary) as i64 } else { -100 };
    let labels: Vec<i64> = (0..tokens).map(label).collect();
    let count = labels.iter().filter(|&&l| l >= 0).count();
    let softcap: f64 = flag("--softcap", 30.0)?;
    let chunk: usize = flag("--chunk", 0)?;
    let random = |rows: usize, spread: f32| Var::randn(0f32, spread, (rows, width), &Device::Cpu);
    let case = Case {
        hidden: random(tokens, 1.0)?,
        weight: random(vocabulary, 4.0 / (width as f32).sqrt())?,
        labels: Tensor::from_vec(labels, tokens, &Device::Cpu)?,
        options: LossOptions {
            softcap: (softcap > 0.0).then_some(softcap),
            chunk_tokens: (chunk > 0).then_some(chunk),
            ..LossOptions::new(count as f64)
        },
        products_chunk: flag("--products-chunk", 512)?,
    };
    let (mut seconds, mut products, mut value) = (f64::INFINITY, f64::INFINITY, 0.0);
    let mut memory: Option<Memory> = None;
    for _ in 0..flag("--rounds", 2)? {
        let (elapsed, loss, used) = case.loss()?;
        (seconds, value) = (seconds.min(elapsed), loss);
        memory.get_or_insert(used);
        products = products.min(case.products()?);
    }
    let mib = |bytes: i64| bytes as f64 / f64::from(1 << 20);
    let Memory { forward, backward, resident } = memory.ok_or("--rounds is at least 1")?;
    let flops = 6.0 * tokens as f64 * vocabulary as f64 * width as f64;
    println!(
        "{{\"tokens\": {tokens}, \"labelled\": {count}, \"vocabulary\": {vocabulary}, \"hidden\": {width}, \
         \"softcap\": {softcap}, \"loss\": {value:.5}, \"loss_s\": {seconds:.3}, \"products_s\": {products:.3}, \
         \"ratio\": {:.3}, \"products_gflops\": {:.1}, \"peak_extra_mib\": {{\"forward\": {:.1}, \"backward\": {:.1}, \
         \"resident\": {}}}}}",
        seconds / products,
        flops / products / 1e9,
        mib(forward),
        mib(backward),
        resident.map_or("null".to_string(), |bytes| format!("{:.1}", mib(bytes))),
    );
    Ok(())
}
