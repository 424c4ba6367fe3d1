//! A case through the GPU kernels: every rank's plan, chunk by chunk, with the checked-in PTX run by an emulator.

use super::case::{Case, Data};
use super::dense::Outcome;
use super::ring::{mask_rule, tokens};
use candle_core::DType;
use candle_cp::{AttentionPlan, Edge, SequenceLayout, Trim};
use candle_cp_kernels::Shape;
use candle_cp_kernels::gpu::{
    DeviceView, Direction, GpuElement, GpuLimits, Grads, Kernels, Launch, State, Work, WorkList,
};
use half::{bf16, f16};
use ptx_emulator::{CopyLanding, Memory, Module};

/// sm_90, sm_80, sm_89.
pub const DEVICES: [GpuLimits; 3] = [
    GpuLimits { capability: (9, 0), shared_bytes: 227 << 10 },
    GpuLimits { capability: (8, 0), shared_bytes: 163 << 10 },
    GpuLimits { capability: (8, 9), shared_bytes: 99 << 10 },
];

/// How operands lie in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memories {
    /// `[B, H, S, D]`.
    HeadsFirst,
    /// `[B, S, H, D]`.
    TokensFirst,
    /// `[B, S, H, D + 1]`: no row starts on 16 bytes.
    Odd,
}

pub fn dtype(element: GpuElement) -> DType {
    match element {
        GpuElement::Bf16 => DType::BF16,
        GpuElement::F16 => DType::F16,
        GpuElement::F32 => DType::F32,
    }
}

/// The kernels of one type, head size and device, and how they are run.
pub struct Gpu {
    kernels: Kernels,
    module: Module,
    pub landing: CopyLanding,
    pub memories: Memories,
}

impl Gpu {
    pub fn new(element: GpuElement, head_dim: usize, limits: GpuLimits) -> Self {
        let kernels = Kernels::new(element, head_dim, limits).expect("a kernel");
        let module = Module::parse(kernels.module().text).expect("PTX that the emulator knows");
        Self { kernels, module, landing: CopyLanding::AtWait, memories: Memories::TokensFirst }
    }

    /// The whole pass over all ranks of `layout`, forward and backward. `data` has to be representable in the type.
    pub fn pass(&self, case: &Case, data: &Data, layout: &SequenceLayout) -> Outcome {
        let d = case.head_dim;
        let mut outcome = Outcome {
            out: vec![0.0; data.q.len()],
            lse: vec![f64::NEG_INFINITY; data.q.len() / d],
            dq: vec![0.0; data.q.len()],
            dk: vec![0.0; data.k.len()],
            dv: vec![0.0; data.v.len()],
        };
        for rank in 0..layout.ranks() {
            let plan = AttentionPlan::new(layout, &tokens(case), &mask_rule(&case.rule), rank, Trim::Live).expect("a plan");
            Rank { gpu: self, case, data, layout, plan: &plan, rank, memory: Memory::new() }.run(&mut outcome);
        }
        outcome
    }

    fn bytes(&self, x: f64) -> Vec<u8> {
        match self.kernels.element() {
            GpuElement::Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
            GpuElement::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
            GpuElement::F32 => (x as f32).to_le_bytes().to_vec(),
        }
    }

    fn number(&self, bytes: &[u8]) -> f64 {
        match self.kernels.element() {
            GpuElement::Bf16 => bf16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f64(),
            GpuElement::F16 => f16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f64(),
            GpuElement::F32 => f64::from(f32::from_le_bytes(bytes.try_into().expect("four bytes"))),
        }
    }
}

struct Rank<'a> {
    gpu: &'a Gpu,
    case: &'a Case,
    data: &'a Data,
    layout: &'a SequenceLayout,
    plan: &'a AttentionPlan,
    rank: usize,
    memory: Memory,
}

/// A chunk of keys in device memory.
struct Chunk<'a> {
    edge: &'a Edge,
    /// Global index of each key.
    keys: Vec<usize>,
    key: DeviceView,
    value: DeviceView,
}

impl Rank<'_> {
    fn run(mut self, outcome: &mut Outcome) {
        let local = self.layout.global_indices(self.rank);
        let (b, hq, d) = (self.case.batch(), self.case.query_heads(), self.case.head_dim);
        let (queries, data) = (local.len(), self.data);
        let shape = Shape { batch: b, query_heads: hq, key_heads: self.case.key_heads, queries, head_dim: d };
        if queries == 0 {
            return;
        }
        let bounds = self.plan.bounds().iter().flatten().flat_map(|b| [b.first, b.end]).collect::<Vec<_>>();
        let bounds = self.upload(&bounds);
        let query = self.operand(&data.q, hq, &local);
        let d_out = self.operand(&data.d_out, hq, &local);
        let plan = self.plan;
        let received = plan.hops().iter().filter_map(|hop| hop.receive.as_ref()).map(|(from, edge)| (*from, edge));
        let chunks: Vec<_> = std::iter::once((self.rank, plan.own()))
            .chain(received)
            .map(|(owner, edge)| {
                let global = self.layout.global_indices(owner);
                let keys: Vec<usize> = edge.keys.iter().cloned().flatten().map(|i| global[i]).collect();
                let key = self.operand(&data.k, shape.key_heads, &keys);
                let value = self.operand(&data.v, shape.key_heads, &keys);
                Chunk { edge, keys, key, value }
            })
            .collect();
        let state = State { out: self.zeros(shape.rows() * d), max: self.zeros(shape.rows()), sum: self.zeros(shape.rows()) };
        for chunk in &chunks {
            let work = self.work(Direction::Forward, chunk.edge, bounds);
            let operands = [query, chunk.key, chunk.value];
            self.launch(&Launch::forward(&self.gpu.kernels, shape, operands, state, work, self.case.scale as f32));
        }
        let (out, lse) = (self.operand(&vec![0.0; data.q.len()], hq, &local), self.zeros(shape.rows()));
        self.launch(&Launch::finish(&self.gpu.kernels, shape, state, out, lse));
        let grads = Grads { lse, delta: self.zeros(shape.rows()), d_query: self.zeros(shape.rows() * d), ..Grads::default() };
        self.launch(&Launch::output_dot(&self.gpu.kernels, shape, out, d_out, grads.delta));
        for chunk in &chunks {
            self.backward(shape, chunk, (query, d_out, bounds), grads, outcome);
        }
        self.collect(shape, &local, (out, lse, grads.d_query), outcome);
    }

    fn backward(
        &mut self,
        shape: Shape,
        chunk: &Chunk,
        (query, d_out, bounds): (DeviceView, DeviceView, u64),
        grads: Grads,
        outcome: &mut Outcome,
    ) {
        let (keys, d, scale) = (chunk.keys.len(), shape.head_dim, self.case.scale as f32);
        let length = shape.batch * shape.key_heads * keys * d;
        let grads = Grads { d_key: self.zeros(length), d_value: self.zeros(length), ..grads };
        let operands = [query, chunk.key, chunk.value, d_out];
        let work = self.work(Direction::BackwardQueries, chunk.edge, bounds);
        self.launch(&Launch::backward_queries(&self.gpu.kernels, shape, operands, grads, work, scale));
        let work = self.work(Direction::BackwardKeys, chunk.edge, bounds);
        self.launch(&Launch::backward_keys(&self.gpu.kernels, shape, operands, grads, (work, keys), scale));
        for (address, sums) in [(grads.d_key, &mut outcome.dk), (grads.d_value, &mut outcome.dv)] {
            for (i, row) in self.read(address, length).chunks(d).enumerate() {
                let (head, token) = (i / keys, chunk.keys[i % keys]);
                if token < self.case.len() {
                    let start = (head * self.case.len() + token) * d;
                    sums[start..start + d].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
            }
        }
    }

    /// Local results to their places in the full row.
    fn collect(&self, shape: Shape, local: &[usize], (out, lse, d_query): (DeviceView, u64, u64), outcome: &mut Outcome) {
        let (d, group, len) = (shape.head_dim, shape.group(), self.case.len());
        let (lse, d_query) = (self.read(lse, shape.rows()), self.read(d_query, shape.rows() * d));
        for row in 0..shape.rows() {
            let (g, i) = (row % group, row / group % shape.queries);
            let head = row / group / shape.queries * group + g;
            let of_out: Vec<f64> = self.view(out, shape.query_heads, head, i);
            if local[i] >= len {
                assert!(of_out.iter().all(|&x| x == 0.0) && lse[row] == f64::NEG_INFINITY, "output of padding");
                continue;
            }
            let at = head * len + local[i];
            outcome.lse[at] = lse[row];
            outcome.out[at * d..(at + 1) * d].copy_from_slice(&of_out);
            outcome.dq[at * d..(at + 1) * d].copy_from_slice(&d_query[row * d..(row + 1) * d]);
        }
    }

    fn launch(&mut self, launch: &Launch) {
        if launch.grid.contains(&0) {
            return;
        }
        let params = launch.parameter_bytes();
        let run = ptx_emulator::Launch {
            kernel: &launch.kernel.name,
            grid: launch.grid,
            block: [launch.kernel.threads, 1, 1],
            shared_bytes: launch.kernel.shared_bytes,
            params: &params,
            copies: self.gpu.landing,
        };
        if let Err(fault) = run.run(&self.gpu.module, &mut self.memory) {
            panic!("{fault}");
        }
    }

    fn work(&mut self, direction: Direction, edge: &Edge, bounds: u64) -> Work {
        let shape = self.gpu.kernels.shape(direction);
        let make = if direction == Direction::BackwardKeys { WorkList::by_keys } else { WorkList::by_queries };
        let list = make(shape, self.case.group, self.plan.bounds(), &edge.tiles);
        let (tiles, entries) = (self.upload(&list.tiles), self.upload(&list.entries));
        Work { tiles, entries, blocks: list.blocks(), bounds }
    }

    fn upload(&mut self, words: &[u32]) -> u64 {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory.upload(&bytes)
    }

    fn zeros(&mut self, count: usize) -> u64 {
        self.memory.upload(&vec![0; 4 * count])
    }

    fn read(&self, address: u64, count: usize) -> Vec<f64> {
        let bytes = self.memory.read(address, 4 * count).expect("written");
        bytes.chunks(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().expect("four bytes")))).collect()
    }

    /// The rows `tokens` of `[B, heads, S, D]` numbers in device memory; tokens past the end are padding.
    fn operand(&mut self, numbers: &[f64], heads: usize, tokens: &[usize]) -> DeviceView {
        let (d, len, batch) = (self.case.head_dim, self.case.len(), self.case.batch());
        let strides = self.strides(heads, tokens.len());
        let size = self.gpu.kernels.element().bytes();
        let mut bytes = vec![0; (batch * strides[0] + 8) * size];
        for (b, h, i) in indices(batch, heads, tokens.len()).filter(|&(.., i)| tokens[i] < len) {
            let from = ((b * heads + h) * len + tokens[i]) * d;
            let to = (b * strides[0] + h * strides[1] + i * strides[2]) * size;
            for (k, &x) in numbers[from..from + d].iter().enumerate() {
                bytes[to + k * size..to + (k + 1) * size].copy_from_slice(&self.gpu.bytes(x));
            }
        }
        DeviceView { address: self.memory.upload(&bytes), strides }
    }

    fn strides(&self, heads: usize, tokens: usize) -> [usize; 3] {
        let d = self.case.head_dim;
        match self.gpu.memories {
            Memories::HeadsFirst => [heads * tokens * d, tokens * d, d],
            Memories::TokensFirst => [heads * tokens * d, d, heads * d],
            Memories::Odd => [heads * tokens * (d + 1), d + 1, heads * (d + 1)],
        }
    }

    /// One row of a view; `head` counts over the batch.
    fn view(&self, view: DeviceView, heads: usize, head: usize, token: usize) -> Vec<f64> {
        let size = self.gpu.kernels.element().bytes();
        let start = head / heads * view.strides[0] + head % heads * view.strides[1] + token * view.strides[2];
        let bytes = self.memory.read(view.address + (start * size) as u64, self.case.head_dim * size).expect("written");
        bytes.chunks(size).map(|x| self.gpu.number(x)).collect()
    }
}

fn indices(batch: usize, heads: usize, tokens: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..tokens).map(move |i| (b, h, i))))
}
