//! What can be known about the GPU kernels without a GPU: prints Markdown tables of registers, shared memory, occupancy,
//! traffic per tile, and the rate that these allow on an H200 and an A100.
//!
//! Traffic and instructions are counted by running the checked-in PTX in the emulator, one thread block over 2 and over 6
//! full tiles: the difference is a tile, the rest is what a block does once. `device.rs` has every assumption, and prints
//! them.
//!
//! `cargo run --release -p candle-cp-device-check --example bench_gpu_figures`

mod counted;
mod device;
mod model;

use candle_cp_kernels::gpu::{GpuElement, Kernels};
use counted::{Counted, DIRECTIONS, GLOBAL, INSTRUCTIONS, MMA, SHARED_BYTES, count_all, module, registers};
use device::{DEVICES, Device, assumptions, resident};
use device_check::{ELEMENTS, HEADS, live_pairs};
use model::{Clocks, QUERY_HEADS, Seconds, seconds};

fn main() {
    let counted = count_all();
    assumptions();
    static_table(&counted);
    rows_table();
    predictions(&counted);
}

fn static_table(counted: &[Counted]) {
    println!("## Kernels\n");
    println!(
        "Registers per thread and blocks (warps) that a multiprocessor holds on sm_80 and sm_90; per full tile of rows x \
         columns: `mma` instructions, instructions of warps, bytes of shared memory (read and written by lanes) and of \
         global memory; their ratios. f32 has no `mma`; its lanes read the same words of shared memory, so that its bytes \
         are an upper bound.\n"
    );
    println!(
        "| type | D | kernel | threads | registers | shared bytes | blocks (warps) sm_80 | sm_90 | mma | instructions | \
         shared KiB | global KiB | mma per shared KiB | mma per global KiB | once per block: instructions | global KiB |"
    );
    println!("|{}", " --- |".repeat(16));
    for c in counted {
        let blocks =
            |device: &Device| match resident(device, c.registers(device.sm), c.kernel.threads, c.kernel.shared_bytes) {
                0 => "does not fit".to_string(),
                n => format!("{n} ({})", n * c.warps() as usize),
            };
        let (shared, global) = (c.both(SHARED_BYTES) / 1024.0, c.both(GLOBAL) / 1024.0);
        let mma = c.per_tile[MMA];
        println!(
            "| {:?} | {} | {} | {} | {}, {} | {} | {} | {} | {mma} | {} | {shared:.1} | {global:.1} | {:.2} | {:.1} | {} | \
             {:.1} |",
            c.element,
            c.head,
            c.kernel.name,
            c.kernel.threads,
            c.registers("80"),
            c.registers("90"),
            c.kernel.shared_bytes,
            blocks(&DEVICES[1]),
            blocks(&DEVICES[0]),
            c.per_tile[INSTRUCTIONS],
            mma / shared,
            mma / global,
            c.once[INSTRUCTIONS],
            (c.once[GLOBAL[0]] + c.once[GLOBAL[1]]) / 1024.0,
        );
    }
}

/// `finish` and `output_dot`: 256 threads, a warp to each row, no shared memory.
fn rows_table() {
    println!(
        "\n`finish` and `output_dot` (256 threads, a warp to each row, no shared memory), registers on sm_80 and sm_90:\n"
    );
    println!("| type | D | finish | output_dot | blocks sm_80 | sm_90 |\n| --- | --- | --- | --- | --- | --- |");
    for element in ELEMENTS {
        for [head, ..] in HEADS {
            let of = |kernel: &str, sm: &str| registers(&module(element, head), kernel, sm);
            let pair = |kernel: &str| format!("{}, {}", of(kernel, "80"), of(kernel, "90"));
            let blocks = |device: &Device| {
                ["finish", "output_dot"]
                    .map(|kernel| resident(device, of(kernel, device.sm), 256, 0).to_string())
                    .join(", ")
            };
            let (finish, dot) = (pair("finish"), pair("output_dot"));
            println!("| {element:?} | {head} | {finish} | {dot} | {} | {} |", blocks(&DEVICES[1]), blocks(&DEVICES[0]));
        }
    }
}

/// Head size, forward or not, window, TFLOP/s; all at 8192 tokens.
const TARGETS: [(usize, bool, Option<usize>, f64); 5] = [
    (256, true, None, 300.0),
    (512, true, None, 347.0),
    (512, false, None, 217.0),
    (128, true, Some(1024), 257.0),
    (256, true, Some(1024), 257.0),
];

fn predictions(counted: &[Counted]) {
    for device in &DEVICES {
        println!("\n## {}: clocks of a multiprocessor per tile\n", device.name);
        println!("By unit, and by phase for the blocks that it holds; what a block does once is per block.\n");
        println!(
            "| D | kernel | tensor cores | shared memory | issue | exponentials | L2 | busiest | products | the rest | once \
             per block |\n|{}",
            " --- |".repeat(11)
        );
        let chosen: Vec<(usize, [&Counted; 3])> = HEADS.map(|of| (of[0], choose(device, counted, of[0]))).to_vec();
        for (head, kernels) in &chosen {
            for c in kernels {
                let clocks = Clocks::new(device, c);
                let Clocks { tensor, shared, issue, exponentials, l2, products, rest, once } = clocks;
                println!(
                    "| {head} | {} | {tensor:.0} | {shared:.0} | {issue:.0} | {exponentials:.0} | {l2:.0} | {} | \
                     {products:.0} | {rest:.0} | {once:.0} |",
                    c.kernel.name,
                    clocks.busiest().0,
                );
            }
        }
        println!("\n## {}: rates\n", device.name);
        println!(
            "bf16, {QUERY_HEADS} heads with keys of their own, TFLOP/s on pairs that are seen. `at most` counts the busiest \
             unit alone, `expected` the phases in turn; both add what blocks do once and the passes over rows. The last \
             columns are shares of the expected time.\n\n\
             | D | tokens | window | pass | at most | expected | target | | products | the rest | once | rows |\n|{}",
            " --- |".repeat(12)
        );
        for (head, kernels) in &chosen {
            for (tokens, window) in [(8192, None), (16384, None), (8192, Some(1024))] {
                shape(device, *head, kernels, (tokens, window));
            }
        }
    }
}

/// The bf16 kernels that a device runs.
fn choose<'a>(device: &Device, counted: &'a [Counted], head: usize) -> [&'a Counted; 3] {
    let kernels = Kernels::new(GpuElement::Bf16, head, device.limits).expect("kernels");
    DIRECTIONS.map(|direction| {
        let is =
            |c: &&Counted| c.element == GpuElement::Bf16 && c.head == head && c.kernel == *kernels.kernel(direction);
        counted.iter().find(is).expect("every kernel is counted")
    })
}

fn shape(device: &Device, head: usize, kernels: &[&Counted; 3], (tokens, window): (usize, Option<usize>)) {
    let forward_flops = (4 * live_pairs(tokens, window) * head * QUERY_HEADS) as f64;
    // Bytes per number of an operand. Forward: sums are zeroed, finish reads them and writes the output. Backward: three
    // gradients are zeroed, output_dot reads two operands.
    let elements = (tokens * head * QUERY_HEADS) as f64;
    let [forward_rows, backward_rows] = [10.0, 16.0].map(|bytes| bytes * elements / device.memory);
    let [forward, queries, keys] = kernels.map(|c| seconds(device, c, tokens, window));
    let parts = std::array::from_fn(|i| queries.parts[i] + keys.parts[i]);
    let backward = Seconds { least: queries.least + keys.least, parts };
    for (is_forward, flops, seconds, rows) in
        [(true, forward_flops, forward, forward_rows), (false, 2.5 * forward_flops, backward, backward_rows)]
    {
        let whole = seconds.parts.iter().sum::<f64>() + rows;
        let [most, expected] = [seconds.least + rows, whole].map(|seconds| flops / seconds / 1e12);
        let is = |t: &&(usize, bool, Option<usize>, f64)| (t.0, t.1, t.2) == (head, is_forward, window);
        let target = TARGETS.iter().find(is).filter(|_| device.name == "H200" && tokens == 8192).map(|t| t.3);
        let verdict = match target {
            Some(target) if expected >= target => "reached",
            Some(target) if most >= target => "missed",
            Some(_) => "out of reach of these tiles",
            None => "",
        };
        let [products, rest, once] = seconds.parts.map(|part| 100.0 * part / whole);
        println!(
            "| {head} | {tokens} | {} | {} | {most:.0} | {expected:.0} | {} | {verdict} | {products:.0} % | {rest:.0} % | \
             {once:.0} % | {:.0} % |",
            window.map_or("-".into(), |w| w.to_string()),
            if is_forward { "forward" } else { "backward" },
            target.map_or("-".into(), |t| t.to_string()),
            100.0 * rows / whole,
        );
    }
}
