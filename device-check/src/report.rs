//! The result as Markdown, and as JSON for the script that runs the peers.

use crate::check::{ELEMENTS, PARTS, Report};
use crate::cuda::CudaDevice;
use crate::draw::HEADS;
use crate::measure::Measurement;
use crate::target::Target;
use candle_cp_kernels::gpu::compiled;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Everything that was found on a device.
pub fn markdown(device: &CudaDevice, report: &Report, measured: &[Measurement]) -> String {
    let (limits, (major, minor)) = (device.limits(), device.version());
    let mut text = format!(
        "Device: {}, compute capability {}.{}, {} multiprocessors, {} KiB of shared memory per thread block; the driver \
         speaks CUDA {major}.{minor}.\n",
        device.name(),
        limits.capability.0,
        limits.capability.1,
        device.multiprocessors(),
        limits.shared_bytes >> 10,
    );
    text.push_str(&correctness(report));
    if !measured.is_empty() {
        text.push_str(&rates(measured));
    }
    text
}

/// Counts, and the largest share of the allowed error by type and head size.
pub(crate) fn correctness(report: &Report) -> String {
    let failed = report.failures().count();
    let mut text = format!(
        "\n## Correctness\n\n{} checks, {failed} failed; {} of {} kernels ran. Largest error as a share of what the \
         error-ratio rule allows:\n\n| type | head size | checks | {} |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n",
        report.cases.len(),
        report.kernels.len(),
        shipped(),
        PARTS.join(" | "),
    );
    let mut groups: BTreeMap<(String, usize), (usize, [f64; 5])> = BTreeMap::new();
    for case in report.cases.iter().filter(|case| !case.name.ends_with("the reference")) {
        let key = (format!("{:?}", case.element), case.padded_head);
        let (count, worst) = groups.entry(key).or_insert((0, [0.0; 5]));
        *count += 1;
        worst.iter_mut().zip(case.used).for_each(|(worst, used)| {
            if used.is_nan() || used > *worst {
                *worst = used;
            }
        });
    }
    for ((element, head), (count, worst)) in groups {
        let worst = worst.map(|x| format!("{x:.2}")).join(" | ");
        let _ = writeln!(text, "| {element} | {head} | {count} | {worst} |");
    }
    for case in report.failures() {
        let _ = writeln!(text, "\n- **failed**: {}: {}", case.name, case.failure.as_deref().unwrap_or_default());
    }
    text
}

/// Kernels of all modules; a device with less shared memory runs fewer.
fn shipped() -> usize {
    let modules = ELEMENTS.into_iter().flat_map(|element| HEADS.map(|of| compiled(element, of[0])));
    modules.flatten().map(|module| module.text.matches(".visible .entry ").count()).sum()
}

fn rates(measured: &[Measurement]) -> String {
    let mut text = String::from(
        "\n## Rates\n\nbf16, one batch row, as many key heads as query heads, median of the repetitions after two to warm \
         up. Forward counts 4 * seen pairs * head size * heads, backward 2.5 times that; both include zeroing their sums \
         and the kernels over rows. The kernels alone are in the last columns, with the thread blocks that one \
         multiprocessor runs at a time.\n\n\
         | D | tokens | heads | window | forward ms | TFLOP/s | backward ms | TFLOP/s | repetitions | forward alone | by \
         queries alone | by keys alone | blocks |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for m in measured {
        let [forward, backward] = m.rates();
        let [alone, by_queries, by_keys] = m.kernels.map(|kernel| kernel.median);
        let blocks = m.blocks.map(|n| n.to_string()).join(", ");
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {:.3} | {forward:.0} | {:.3} | {backward:.0} | {}, {} | {alone:.3} | {by_queries:.3} | \
             {by_keys:.3} | {blocks} |",
            m.head_dim,
            m.tokens,
            m.heads,
            window(m),
            m.forward.median,
            m.backward.median,
            m.forward.repetitions,
            m.backward.repetitions,
        );
    }
    text
}

fn window(m: &Measurement) -> String {
    m.window.map_or("-".into(), |window| window.to_string())
}

/// Shapes and times, as `scripts/device_peers.py` reads them.
pub fn json(measured: &[Measurement]) -> String {
    let entry = |m: &Measurement| {
        json!({
            "head_dim": m.head_dim,
            "heads": m.heads,
            "tokens": m.tokens,
            "window": m.window,
            "forward_flops": m.forward_flops(),
            "forward_ms": m.forward.median,
            "backward_ms": m.backward.median,
        })
    };
    serde_json::Value::from_iter(measured.iter().map(entry)).to_string()
}
