//! What can be known about the GPU kernels without a GPU: prints Markdown tables of registers, shared memory, occupancy,
//! traffic per tile, and the rate that these allow on an H200 and an A100.
//!
//! Traffic and instructions are counted by running the checked-in PTX in the emulator, one thread block over 2 and over 6
//! full tiles: the difference is a tile, the rest is what a block does once. `Device` and `Model` hold every assumption;
//! the text that is printed repeats them.
//!
//! `cargo run --release -p candle-cp-device-check --example bench_gpu_figures`

use candle_cp_kernels::gpu::{
    DeviceView, Direction, GpuElement, GpuLimits, Grads, Kernel, Kernels, Launch, State, TileShape, Work, WorkList,
};
use candle_cp_kernels::{Bounds, KeyRun, QueryTile, Shape};
use device_check::{ELEMENTS, HEADS, live_pairs};
use ptx_emulator::{CopyLanding, Counts, Memory, Module};

const REGISTERS: &str = include_str!("../candle-cp-kernels/ptx/registers.txt");
const DIRECTIONS: [Direction; 3] = [Direction::Forward, Direction::BackwardQueries, Direction::BackwardKeys];
/// Shared memory of a thread block on sm_90, sm_80 and sm_89.
const SHARED: [usize; 3] = [227 << 10, 163 << 10, 99 << 10];
/// Heads of the predicted shapes, each with its own keys.
const QUERY_HEADS: usize = 16;

/// A device, by its maker's documents except where it says assumed.
struct Device {
    name: &'static str,
    limits: GpuLimits,
    /// Column of the table of registers.
    sm: &'static str,
    multiprocessors: f64,
    /// Hz: the published tensor peak divided by the operations per clock.
    clock: f64,
    /// Bytes of shared memory of a multiprocessor.
    shared: usize,
    /// Floating-point operations of dense bf16 products per clock and multiprocessor.
    tensor: f64,
    /// Share of that which `mma.sync` reaches; assumed for Hopper.
    mma_share: f64,
    /// Bytes per clock from L2, all multiprocessors together; assumed for Hopper.
    l2: f64,
    /// Bytes per second of device memory.
    memory: f64,
}

const DEVICES: [Device; 2] = [
    Device {
        name: "H200",
        limits: GpuLimits { capability: (9, 0), shared_bytes: SHARED[0] },
        sm: "90",
        multiprocessors: 132.0,
        clock: 1.83e9,
        shared: 228 << 10,
        tensor: 4096.0,
        mma_share: 0.62,
        l2: 5120.0,
        memory: 4.8e12,
    },
    Device {
        name: "A100",
        limits: GpuLimits { capability: (8, 0), shared_bytes: SHARED[1] },
        sm: "80",
        multiprocessors: 108.0,
        clock: 1.41e9,
        shared: 164 << 10,
        tensor: 2048.0,
        mma_share: 1.0,
        l2: 5120.0,
        memory: 2.039e12,
    },
];

/// Bytes of shared memory per clock and multiprocessor.
const SHARED_WIDTH: f64 = 128.0;
/// Instructions of warps that a multiprocessor issues per clock, one for each scheduler.
const ISSUE: f64 = 4.0;
/// `ex2` results per clock and multiprocessor.
const EXPONENTIALS: f64 = 16.0;
/// Clocks from a load of shared memory to its use, and from an `mma` to the next one that needs its sums: assumed.
const LATENCY: f64 = 33.0 + 33.0;
/// Floating-point operations of an `mma.m16n8k16`.
const MMA_FLOPS: f64 = 4096.0;

fn main() {
    let counted = count_all();
    assumptions();
    static_table(&counted);
    rows_table();
    predictions(&counted);
}

/// A kernel with what it does per tile, and once per thread block.
struct Counted {
    element: GpuElement,
    head: usize,
    direction: Direction,
    tile: TileShape,
    kernel: Kernel,
    per_tile: [f64; 7],
    once: [f64; 7],
}

/// Indices of [`numbers`].
const INSTRUCTIONS: usize = 0;
const MMA: usize = 1;
const LDMATRIX: usize = 2;
const GLOBAL: [usize; 2] = [3, 4];
const SHARED_BYTES: [usize; 2] = [5, 6];

fn numbers(c: &Counts) -> [f64; 7] {
    let all = [c.instructions, c.mma, c.ldmatrix, c.global_read, c.global_written, c.shared_read, c.shared_written];
    all.map(|x| x as f64)
}

impl Counted {
    fn both(&self, [a, b]: [usize; 2]) -> f64 {
        self.per_tile[a] + self.per_tile[b]
    }

    fn warps(&self) -> f64 {
        f64::from(self.kernel.threads / 32)
    }

    fn registers(&self, sm: &str) -> usize {
        registers(&module(self.element, self.head), &self.kernel.name, sm)
    }
}

fn module(element: GpuElement, head: usize) -> String {
    format!("{}_{head}", format!("{element:?}").to_lowercase())
}

/// From the table of what the assembler says.
fn registers(module: &str, kernel: &str, sm: &str) -> usize {
    let found = REGISTERS.lines().find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        (columns[..3] == [module, kernel, sm]).then(|| columns[3].parse().expect("a number"))
    });
    found.unwrap_or_else(|| panic!("{module} {kernel} for sm_{sm} is not in the table"))
}

/// Every kernel that some device runs.
fn count_all() -> Vec<Counted> {
    let mut all: Vec<Counted> = Vec::new();
    for element in ELEMENTS {
        for [head, ..] in HEADS {
            for shared_bytes in SHARED {
                let limits = GpuLimits { capability: (9, 0), shared_bytes };
                let Ok(kernels) = Kernels::new(element, head, limits) else { continue };
                for direction in DIRECTIONS {
                    let kernel = kernels.kernel(direction).clone();
                    let known = |c: &Counted| c.element == element && c.head == head && c.kernel == kernel;
                    if !all.iter().any(known) {
                        let [two, six] = [2, 6].map(|tiles| numbers(&count(&kernels, direction, tiles)));
                        let per_tile: [f64; 7] = std::array::from_fn(|i| (six[i] - two[i]) / 4.0);
                        let once = std::array::from_fn(|i| two[i] - 2.0 * per_tile[i]);
                        let tile = kernels.shape(direction);
                        all.push(Counted { element, head, direction, tile, kernel, per_tile, once });
                    }
                }
            }
        }
    }
    all
}

/// One thread block over full tiles.
fn count(kernels: &Kernels, direction: Direction, tiles: usize) -> Counts {
    let (d, tile) = (kernels.head_dim(), kernels.shape(direction));
    let other = tiles * tile.columns;
    let (queries, keys) = if direction == Direction::BackwardKeys { (other, tile.rows) } else { (tile.rows, other) };
    let bounds = [vec![Bounds { first: 0, end: keys as u32 }; queries]];
    let plan = [plan(keys)];
    let make = if direction == Direction::BackwardKeys { WorkList::by_keys } else { WorkList::by_queries };
    let list = make(tile, 1, &bounds, &plan);
    assert_eq!((list.blocks(), list.live().full), (1, tiles), "one block over full tiles");

    let mut memory = Memory::new();
    let mut words = |words: &[u32]| memory.upload(&words.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    let bounds: Vec<u32> = bounds[0].iter().flat_map(|b| [b.first, b.end]).collect();
    let work = Work { tiles: words(&list.tiles), entries: words(&list.entries), blocks: 1, bounds: words(&bounds) };
    let mut zeros = |bytes: usize| memory.upload(&vec![0; bytes]);
    let bytes = d * kernels.element().bytes();
    let mut view = |rows: usize| DeviceView::contiguous(zeros(rows * bytes), 1, rows, d);
    let [query, d_out, key, value] = [view(queries), view(queries), view(keys), view(keys)];
    let mut floats = |count: usize| zeros(4 * count);
    let state = State { out: floats(queries * d), max: floats(queries), sum: floats(queries) };
    let (lse, delta, d_query) = (floats(queries), floats(queries), floats(queries * d));
    let grads = Grads { lse, delta, d_query, d_key: floats(keys * d), d_value: floats(keys * d) };
    let shape = Shape { batch: 1, query_heads: 1, key_heads: 1, queries, head_dim: d };
    let all = [query, key, value, d_out];
    let launch = match direction {
        Direction::Forward => Launch::forward(kernels, shape, [query, key, value], state, work, 1.0),
        Direction::BackwardQueries => Launch::backward_queries(kernels, shape, all, grads, work, 1.0),
        Direction::BackwardKeys => Launch::backward_keys(kernels, shape, all, grads, (work, keys), 1.0),
    };
    run(kernels, &launch, &mut memory)
}

/// Keys at their positions.
fn plan(keys: usize) -> QueryTile {
    QueryTile { row: 0, queries: 0..0, runs: vec![KeyRun { keys: 0..keys as u32, first_position: 0, full: 0..0 }] }
}

fn run(kernels: &Kernels, launch: &Launch, memory: &mut Memory) -> Counts {
    let module = Module::parse(kernels.module().text).expect("known instructions");
    let emulated = ptx_emulator::Launch {
        kernel: &launch.kernel.name,
        grid: launch.grid,
        block: [launch.kernel.threads, 1, 1],
        shared_bytes: launch.kernel.shared_bytes,
        params: &launch.parameter_bytes(),
        copies: CopyLanding::AtWait,
    };
    emulated.run(&module, memory).expect("the kernels run")
}

/// Thread blocks that a multiprocessor holds at a time. Registers are given to warps in units of 256, to four warps at a
/// time; a block's shared memory in units of 128 bytes, with 1 KiB on top; at most 64 warps and 32 blocks.
fn resident(device: &Device, registers: usize, threads: u32, shared_bytes: u32) -> usize {
    let warps = threads as usize / 32;
    let of_warp = (registers * 32).next_multiple_of(256);
    let by_registers = 65536 / of_warp / 4 * 4 / warps;
    let by_shared = device.shared / ((shared_bytes as usize).next_multiple_of(128) + 1024);
    let fits = shared_bytes as usize <= device.limits.shared_bytes;
    if fits { by_registers.min(by_shared).min(64 / warps).min(32) } else { 0 }
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

/// Clocks of a multiprocessor for one tile.
struct Clocks {
    /// By unit.
    tensor: f64,
    shared: f64,
    issue: f64,
    exponentials: f64,
    l2: f64,
    /// By phase, which barriers keep apart: products with their latency, and everything else. Thread blocks that run at a
    /// time share them.
    products: f64,
    rest: f64,
    /// Of a thread block, not of a tile.
    once: f64,
}

impl Clocks {
    fn new(device: &Device, c: &Counted) -> Self {
        let blocks = resident(device, c.registers(device.sm), c.kernel.threads, c.kernel.shared_bytes) as f64;
        let rate = device.tensor * device.mma_share / MMA_FLOPS;
        let l2_width = device.l2 / device.multiprocessors;
        let shared = c.both(SHARED_BYTES) / SHARED_WIDTH;
        let exponentials = (c.tile.rows * c.tile.columns) as f64 / EXPONENTIALS;
        let others = (c.per_tile[INSTRUCTIONS] - c.per_tile[MMA] - c.per_tile[LDMATRIX]) / ISSUE;
        // A warp loads its operands of a step of 16, then multiplies: its scheduler's tensor core idles for the latency
        // unless other warps fill it.
        let scheduler_warps = c.warps() / 4.0;
        let products = steps(c).into_iter().map(|(steps, mma)| {
            let busy = mma / (rate / 4.0);
            steps * (scheduler_warps * busy).max(LATENCY + busy)
        });
        let once = (c.once[INSTRUCTIONS] / ISSUE).max((c.once[GLOBAL[0]] + c.once[GLOBAL[1]]) / l2_width);
        Self {
            tensor: c.per_tile[MMA] / rate,
            shared,
            issue: c.per_tile[INSTRUCTIONS] / ISSUE,
            exponentials,
            l2: c.both(GLOBAL) / l2_width,
            products: products.sum::<f64>().max(shared) / blocks,
            rest: others.max(exponentials) / blocks,
            once,
        }
    }

    /// The unit that is busiest, and its clocks.
    fn busiest(&self) -> (&'static str, f64) {
        let units = [
            ("tensor cores", self.tensor),
            ("shared memory", self.shared),
            ("issue", self.issue),
            ("exponentials", self.exponentials),
            ("L2", self.l2),
        ];
        units.into_iter().fold(("", 0.0), |a, b| if b.1 > a.1 { b } else { a })
    }
}

/// Of each product of a tile, for one warp: steps of 16 in the inner dimension, and `mma` per step.
fn steps(c: &Counted) -> Vec<(f64, f64)> {
    let TileShape { rows, columns, warps: (down, across) } = c.tile;
    let blocks = |n: usize| (rows / down / 16 * (n / across / 8)) as f64;
    let scores = ((c.head / 16) as f64, blocks(columns));
    let sums = ((columns / 16) as f64, blocks(c.head));
    let products = match c.direction {
        Direction::Forward => vec![scores, sums],
        Direction::BackwardQueries => vec![scores, scores, sums],
        Direction::BackwardKeys => vec![scores, scores, sums, sums],
    };
    let all: f64 = products.iter().map(|(steps, mma)| steps * mma).sum::<f64>() * c.warps();
    assert_eq!(all, c.per_tile[MMA], "{}: what the emulator counts", c.kernel.name);
    products
}

/// Seconds of a kernel over a shape.
#[derive(Clone, Copy)]
struct Seconds {
    /// If only the busiest unit counted.
    least: f64,
    /// Products, everything else in the tiles, what blocks do once.
    parts: [f64; 3],
}

fn seconds(device: &Device, c: &Counted, tokens: usize, window: Option<usize>) -> Seconds {
    let see = |query: usize| Bounds {
        first: (query + 1).saturating_sub(window.unwrap_or(usize::MAX)) as u32,
        end: query as u32 + 1,
    };
    let bounds = [(0..tokens).map(see).collect::<Vec<_>>()];
    let make = if c.direction == Direction::BackwardKeys { WorkList::by_keys } else { WorkList::by_queries };
    let list = make(c.tile, 1, &bounds, &[plan(tokens)]);
    let clocks = Clocks::new(device, c);
    let of_clock = QUERY_HEADS as f64 / device.multiprocessors / device.clock;
    let [tiles, blocks] = [list.live().live(), list.blocks()].map(|n| n as f64 * of_clock);
    let (busiest, in_turn) = (clocks.busiest().1, clocks.products + clocks.rest);
    // Several blocks hide each other's phases, but no unit does more than it can.
    let stretched = (busiest / in_turn).max(1.0) * tiles;
    let once = blocks * clocks.once;
    Seconds { least: tiles * busiest + once, parts: [stretched * clocks.products, stretched * clocks.rest, once] }
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

fn assumptions() {
    println!("## What is assumed\n");
    for Device { name, multiprocessors, clock, tensor, mma_share, l2, memory, shared, .. } in &DEVICES {
        println!(
            "- {name}: {multiprocessors} multiprocessors with {} KiB of shared memory and 65,536 registers at {:.2} GHz; {} \
             TFLOP/s of dense bf16, of which `mma.sync` reaches {:.0} %; {l2} bytes per clock from L2; {:.2} TB/s of memory.",
            shared >> 10,
            clock / 1e9,
            (multiprocessors * clock * tensor / 1e12).round(),
            100.0 * mma_share,
            memory / 1e12,
        );
    }
    println!(
        "- Sizes, clocks, peaks and memory are the maker's figures. The share of `mma.sync` on Hopper is what microbenchmarks \
         report (60 to 65 %; the peak needs `wgmma`); the maker gives L2's width for the A100, the H200's is taken to be the \
         same.\n\
         - Per clock and multiprocessor: {SHARED_WIDTH} bytes of shared memory without bank conflicts, {ISSUE} instructions \
         of warps, {EXPONENTIALS} exponentials.\n\
         - A warp waits {LATENCY} clocks in every step of 16 of a product: 33 for the load of its operands, 33 for the sums. \
         Nothing overlaps inside a warp; other warps of the scheduler fill the gap.\n\
         - A PTX instruction is one instruction of the device.\n\
         - All global traffic of the tiles comes from L2. Zeroing and the kernels over rows move their bytes at the rate of \
         the memory, and overlap with nothing.\n\
         - Multiprocessors are evenly loaded; a tile that is seen in part costs a whole one; no power limit, no launch times.\n"
    );
}
