//! Rates of forward and backward in bf16, timed by the driver's events.

use crate::attend::from_bytes;
use crate::check::Checked;
use crate::cuda::CudaDevice;
use crate::error::Result;
use crate::sampled::Head;
use crate::target::Target;
use candle_cp_kernels::gpu::{DeviceView, Direction, GpuElement, Grads, Kernels, Launch, State, Work, WorkList};
use candle_cp_kernels::{Bounds, KeyRun, QueryTile, Shape};
use std::time::{Duration, Instant};

/// Token counts that are measured.
pub const LENGTHS: [usize; 2] = [8192, 16384];
/// Windows that are measured; none is causal.
pub const MASKS: [Option<usize>; 2] = [None, Some(1024)];
/// Query heads, each with its own key head, as in the published figures.
const HEADS: usize = 16;

/// How long measuring may take.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// For all shapes together. Each shape gets its share, and is measured at least once.
    pub time: Duration,
    /// Repetitions of a pass, at most.
    pub repetitions: usize,
}

/// A shape and its times.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Head size.
    pub head_dim: usize,
    /// Query heads and key heads.
    pub heads: usize,
    /// Queries and keys.
    pub tokens: usize,
    /// Keys that a query sees, itself included; all before it otherwise.
    pub window: Option<usize>,
    /// Everything of forward: zeroing its state, the kernel, finishing.
    pub forward: Measured,
    /// Everything of backward: zeroing gradients, row sums, both kernels.
    pub backward: Measured,
    /// The kernels of forward, gradient of queries, gradients of keys and values, one by one.
    pub kernels: [Measured; 3],
    /// Thread blocks of those on one multiprocessor.
    pub blocks: [i32; 3],
}

/// Milliseconds of something.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Measured {
    /// Median.
    pub median: f64,
    /// The shortest.
    pub least: f64,
    /// Repetitions.
    pub repetitions: usize,
}

impl Measurement {
    /// Floating-point operations of a forward pass: two products over the pairs that are seen.
    pub fn forward_flops(&self) -> f64 {
        4.0 * (live_pairs(self.tokens, self.window) * self.head_dim * self.heads) as f64
    }

    /// TFLOP/s of forward and backward; backward counts 2.5 times forward.
    pub fn rates(&self) -> [f64; 2] {
        let forward = self.forward_flops() / 1e9;
        [forward / self.forward.median, 2.5 * forward / self.backward.median]
    }
}

/// Pairs of a query and a key that it sees, per head.
pub fn live_pairs(tokens: usize, window: Option<usize>) -> usize {
    (0..tokens).map(|query| (query + 1).min(window.unwrap_or(usize::MAX))).sum()
}

/// Measures every shape: head sizes 128, 256 and 512, [`MASKS`], `lengths`. Some rows of each are checked as well.
///
/// # Errors
/// What the driver says, too little memory among others.
pub fn measure(device: &mut CudaDevice, lengths: &[usize], budget: Budget) -> Result<(Vec<Measurement>, Vec<Checked>)> {
    let shapes = [128, 256, 512].into_iter().flat_map(|d| MASKS.map(|mask| (d, mask)));
    let shapes: Vec<_> = shapes.flat_map(|(d, mask)| lengths.iter().map(move |&tokens| (d, mask, tokens))).collect();
    let start = Instant::now();
    let (mut out, mut checked) = (Vec::new(), Vec::new());
    for (number, &(head_dim, window, tokens)) in shapes.iter().enumerate() {
        let left = budget.time.saturating_sub(start.elapsed()) / (shapes.len() - number) as u32;
        let pass = Pass::new(device, head_dim, tokens, window)?;
        out.push(pass.measure(device, Budget { time: left, ..budget }, &mut checked)?);
        device.clear()?;
    }
    Ok((out, checked))
}

/// One shape with everything it needs in device memory.
struct Pass {
    kernels: Kernels,
    shape: Shape,
    window: Option<usize>,
    scale: f32,
    /// Query, key, value, gradient of the output, output.
    views: [DeviceView; 5],
    state: State,
    grads: Grads,
    work: [Work; 3],
}

impl Pass {
    fn new(device: &mut CudaDevice, head_dim: usize, tokens: usize, window: Option<usize>) -> Result<Self> {
        let kernels = Kernels::new(GpuElement::Bf16, head_dim, device.limits())?;
        let shape = Shape { batch: 1, query_heads: HEADS, key_heads: HEADS, queries: tokens, head_dim };
        let see = |query: usize| Bounds {
            first: (query + 1).saturating_sub(window.unwrap_or(usize::MAX)) as u32,
            end: query as u32 + 1,
        };
        let bounds = [(0..tokens).map(see).collect::<Vec<_>>()];
        let words: Vec<u32> = bounds[0].iter().flat_map(|b| [b.first, b.end]).collect();
        let bounds_address = upload(device, &words)?;
        let run = KeyRun { keys: 0..tokens as u32, first_position: 0, full: 0..0 };
        let tiles = [QueryTile { row: 0, queries: 0..0, runs: vec![run] }];
        let mut work = [Work::default(); 3];
        for direction in DIRECTIONS {
            let make = if direction == Direction::BackwardKeys { WorkList::by_keys } else { WorkList::by_queries };
            let list = make(kernels.shape(direction), 1, &bounds, &tiles);
            let (tiles, entries) = (upload(device, &list.tiles)?, upload(device, &list.entries)?);
            work[direction as usize] = Work { tiles, entries, blocks: list.blocks(), bounds: bounds_address };
        }
        let mut views = [DeviceView::default(); 5];
        for (seed, view) in views.iter_mut().enumerate() {
            let address = device.upload(&numbers(seed as u64, HEADS * tokens * head_dim))?;
            *view = DeviceView::contiguous(address, HEADS, tokens, head_dim);
        }
        let mut floats = |count: usize| device.zeros(4 * count);
        let rows = shape.rows();
        let state = State { out: floats(rows * head_dim)?, max: floats(rows)?, sum: floats(rows)? };
        let grads = Grads {
            lse: floats(rows)?,
            delta: floats(rows)?,
            d_query: floats(rows * head_dim)?,
            d_key: floats(rows * head_dim)?,
            d_value: floats(rows * head_dim)?,
        };
        let scale = 1.0 / (head_dim as f32).sqrt();
        Ok(Self { kernels, shape, window, scale, views, state, grads, work })
    }

    fn main_kernel(&self, device: &mut CudaDevice, direction: Direction) -> Result<()> {
        let Self { kernels, shape, state, grads, scale, .. } = self;
        let [query, key, value, d_out, _] = self.views;
        let work = self.work[direction as usize];
        let backward = [query, key, value, d_out];
        let launch = match direction {
            Direction::Forward => Launch::forward(kernels, *shape, [query, key, value], *state, work, *scale),
            Direction::BackwardQueries => Launch::backward_queries(kernels, *shape, backward, *grads, work, *scale),
            Direction::BackwardKeys => {
                Launch::backward_keys(kernels, *shape, backward, *grads, (work, shape.queries), *scale)
            }
        };
        device.launch(kernels, &launch)
    }

    fn forward(&self, device: &mut CudaDevice) -> Result<()> {
        let (rows, state) = (self.shape.rows(), self.state);
        device.fill_zeros(state.out, 4 * rows * self.shape.head_dim)?;
        device.fill_zeros(state.max, 4 * rows)?;
        device.fill_zeros(state.sum, 4 * rows)?;
        self.main_kernel(device, Direction::Forward)?;
        let finish = Launch::finish(&self.kernels, self.shape, state, self.views[4], self.grads.lse);
        device.launch(&self.kernels, &finish)
    }

    fn backward(&self, device: &mut CudaDevice) -> Result<()> {
        let bytes = 4 * self.shape.rows() * self.shape.head_dim;
        for address in [self.grads.d_query, self.grads.d_key, self.grads.d_value] {
            device.fill_zeros(address, bytes)?;
        }
        let [.., d_out, out] = self.views;
        let dot = Launch::output_dot(&self.kernels, self.shape, out, d_out, self.grads.delta);
        device.launch(&self.kernels, &dot)?;
        self.main_kernel(device, Direction::BackwardQueries)?;
        self.main_kernel(device, Direction::BackwardKeys)
    }

    /// Everything of one head, back from the device.
    fn head(&self, device: &mut CudaDevice, head: usize) -> Result<Head<'_>> {
        let Shape { head_dim, queries: tokens, .. } = self.shape;
        let mut part = |address: u64, width: usize, element: GpuElement| -> Result<Vec<f64>> {
            let bytes = tokens * width * element.bytes();
            Ok(from_bytes(element, &device.download(address + (head * bytes) as u64, bytes)?))
        };
        let mut wide = |address, element| part(address, head_dim, element);
        let (bf16, f32, grads) = (GpuElement::Bf16, GpuElement::F32, self.grads);
        let [q, k, v, d_out, out] = self.views.map(|view| wide(view.address, bf16));
        let gradients = [grads.d_query, grads.d_key, grads.d_value].map(|address| wide(address, f32));
        let [dq, dk, dv] = gradients;
        Ok(Head {
            name: format!("head {head} of size {head_dim}, {tokens} tokens, window {:?}", self.window),
            kernels: &self.kernels,
            tokens,
            window: self.window,
            scale: f64::from(self.scale),
            operands: [q?, k?, v?, d_out?],
            out: out?,
            lse: part(grads.lse, 1, f32)?,
            delta: part(grads.delta, 1, f32)?,
            gradients: [dq?, dk?, dv?],
        })
    }

    fn measure(&self, device: &mut CudaDevice, budget: Budget, checked: &mut Vec<Checked>) -> Result<Measurement> {
        let budget = Budget { time: budget.time / 5, ..budget };
        let forward = repeated(device, budget, |device| self.forward(device))?;
        let backward = repeated(device, budget, |device| self.backward(device))?;
        // The kernels alone would add to these results.
        for head in [0, HEADS - 1] {
            checked.push(self.head(device, head)?.check());
        }
        let (mut kernels, mut blocks) = ([Measured::default(); 3], [0; 3]);
        for direction in DIRECTIONS {
            kernels[direction as usize] = repeated(device, budget, |device| self.main_kernel(device, direction))?;
            blocks[direction as usize] =
                device.blocks_per_multiprocessor(&self.kernels, self.kernels.kernel(direction))?;
        }
        let Shape { head_dim, queries: tokens, .. } = self.shape;
        Ok(Measurement { head_dim, heads: HEADS, tokens, window: self.window, forward, backward, kernels, blocks })
    }
}

const DIRECTIONS: [Direction; 3] = [Direction::Forward, Direction::BackwardQueries, Direction::BackwardKeys];

/// Twice to warm up, then as often as time allows.
fn repeated(
    device: &mut CudaDevice,
    budget: Budget,
    mut pass: impl FnMut(&mut CudaDevice) -> Result<()>,
) -> Result<Measured> {
    let start = Instant::now();
    device.timed(&mut pass)?;
    device.timed(&mut pass)?;
    let mut times = vec![device.timed(&mut pass)?];
    while times.len() < budget.repetitions && start.elapsed() < budget.time {
        times.push(device.timed(&mut pass)?);
    }
    times.sort_by(f64::total_cmp);
    Ok(Measured { median: times[times.len() / 2], least: times[0], repetitions: times.len() })
}

/// `count` numbers of bf16 between -2 and 2; the same for a seed.
fn numbers(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut number = || {
        // xorshift64*: which numbers these are does not matter, that they differ does.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let bits = state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
        half::bf16::from_f32(bits as f32 / (1u32 << 22) as f32 - 2.0).to_le_bytes()
    };
    // A prime, so that no two heads or tokens are alike.
    let pattern: Vec<[u8; 2]> = (0..999_983.min(count)).map(|_| number()).collect();
    pattern.iter().cycle().take(count).flatten().copied().collect()
}

fn upload(device: &mut CudaDevice, words: &[u32]) -> Result<u64> {
    device.upload(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
}
