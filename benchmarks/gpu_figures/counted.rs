//! What kernels do, counted by running them in the emulator.

use crate::device::SHARED;
use candle_cp_kernels::gpu::{
    DeviceView, Direction, GpuElement, GpuLimits, Grads, Kernel, Kernels, Launch, State, TileShape, Work, WorkList,
};
use candle_cp_kernels::{Bounds, KeyRun, QueryTile, Shape};
use device_check::{ELEMENTS, HEADS};
use ptx_emulator::{CopyLanding, Counts, Memory, Module};

const REGISTERS: &str = include_str!("../../candle-cp-kernels/ptx/registers.txt");
/// All directions.
pub const DIRECTIONS: [Direction; 3] = [Direction::Forward, Direction::BackwardQueries, Direction::BackwardKeys];

/// A kernel with what it does per tile, and once per thread block.
pub struct Counted {
    pub element: GpuElement,
    pub head: usize,
    pub direction: Direction,
    pub tile: TileShape,
    pub kernel: Kernel,
    pub per_tile: [f64; 7],
    pub once: [f64; 7],
}

/// Indices of [`numbers`].
pub const INSTRUCTIONS: usize = 0;
pub const MMA: usize = 1;
pub const LDMATRIX: usize = 2;
pub const GLOBAL: [usize; 2] = [3, 4];
pub const SHARED_BYTES: [usize; 2] = [5, 6];

pub fn numbers(c: &Counts) -> [f64; 7] {
    let all = [c.instructions, c.mma, c.ldmatrix, c.global_read, c.global_written, c.shared_read, c.shared_written];
    all.map(|x| x as f64)
}

impl Counted {
    pub fn both(&self, [a, b]: [usize; 2]) -> f64 {
        self.per_tile[a] + self.per_tile[b]
    }

    pub fn warps(&self) -> f64 {
        f64::from(self.kernel.threads / 32)
    }

    pub fn registers(&self, sm: &str) -> usize {
        registers(&module(self.element, self.head), &self.kernel.name, sm)
    }
}

pub fn module(element: GpuElement, head: usize) -> String {
    format!("{}_{head}", format!("{element:?}").to_lowercase())
}

/// From the table of what the assembler says.
pub fn registers(module: &str, kernel: &str, sm: &str) -> usize {
    let found = REGISTERS.lines().find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        (columns[..3] == [module, kernel, sm]).then(|| columns[3].parse().expect("a number"))
    });
    found.unwrap_or_else(|| panic!("{module} {kernel} for sm_{sm} is not in the table"))
}

/// Every kernel that some device runs.
pub fn count_all() -> Vec<Counted> {
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
pub fn count(kernels: &Kernels, direction: Direction, tiles: usize) -> Counts {
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
pub fn plan(keys: usize) -> QueryTile {
    QueryTile { row: 0, queries: 0..0, runs: vec![KeyRun { keys: 0..keys as u32, first_position: 0, full: 0..0 }] }
}

pub fn run(kernels: &Kernels, launch: &Launch, memory: &mut Memory) -> Counts {
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
