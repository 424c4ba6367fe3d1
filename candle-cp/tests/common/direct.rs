//! GPU kernels one launch after the other on emulated memory: what candle-cp's operators cannot express, such as masks
//! that come from elsewhere, kernels with a fault in them, and rows of numbers that lie gigabytes apart.

#![allow(dead_code, reason = "every test file uses a part of it")]

use crate::common::case::Data;
use crate::common::dense::Outcome;
use crate::common::ratio::Pairs;
use candle_cp_kernels::gpu::{
    DeviceView, Direction, GpuElement, GpuLimits, Grads, Kernels, Launch, State, Work, WorkList,
};
use candle_cp_kernels::{Bounds, KeyRun, QueryTile, Shape};
use half::{bf16, f16};
use ptx_emulator::{CopyLanding, Fault, Memory, Module};
use std::ops::Range;

/// Attention of queries over keys that come in chunks.
#[derive(Debug, Clone)]
pub struct Problem {
    pub pairs: Pairs,
    /// `[B][Sk]`: where the keys of a row stand, so that what a query may see is one interval; `None` for padding.
    pub places: Vec<Vec<Option<u32>>>,
    /// Key indices, in order; together all of them.
    pub chunks: Vec<Range<usize>>,
}

impl Problem {
    fn shape(&self) -> Shape {
        let (batch, query_heads, queries, head_dim) = self.pairs.query_shape;
        Shape { batch, query_heads, key_heads: self.pairs.key_shape.1, queries, head_dim }
    }

    /// What each query sees, `[B][Sq]`, from the pairs.
    fn bounds(&self) -> Vec<Vec<Bounds>> {
        let of_query = |row: usize, query: usize| {
            let places = self.places[row].iter().zip(self.pairs.seen(row, query));
            let seen: Vec<u32> =
                places.clone().filter(|(_, seen)| **seen).map(|(at, _)| at.expect("a token")).collect();
            let Some(&first) = seen.iter().min() else { return Bounds::default() };
            let end = seen.iter().max().expect("not empty") + 1;
            let inside = places.filter(|(at, _)| at.is_some_and(|at| first <= at && at < end));
            assert!(inside.clone().all(|(_, seen)| *seen), "row {row}: what query {query} sees is no interval");
            Bounds { first, end }
        };
        let queries = self.shape().queries;
        (0..self.places.len()).map(|row| (0..queries).map(|query| of_query(row, query)).collect()).collect()
    }

    /// The runs of consecutive keys of a chunk, for all queries.
    fn tiles(&self, chunk: &Range<usize>) -> Vec<QueryTile> {
        let of_row = |(row, places): (usize, &Vec<Option<u32>>)| {
            let mut runs: Vec<KeyRun> = Vec::new();
            for (key, place) in (0u32..).zip(&places[chunk.clone()]) {
                let Some(place) = *place else { continue };
                match runs.last_mut() {
                    Some(run) if run.keys.end == key && run.first_position + run.keys.len() as u32 == place => {
                        run.keys.end = key + 1;
                    }
                    _ => runs.push(KeyRun { keys: key..key + 1, first_position: place, full: 0..0 }),
                }
            }
            QueryTile { row: row as u32, queries: 0..self.shape().queries as u32, runs }
        };
        self.places.iter().enumerate().map(of_row).collect()
    }
}

/// Where operands lie, and what number the first batch row has.
#[derive(Debug, Clone, Copy, Default)]
pub struct Placing {
    /// Elements from one batch row, head and token to the next; without them rows of numbers are dense.
    pub strides: Option<[usize; 3]>,
    /// Batch rows before the first one, which nobody has.
    pub rows_before: usize,
}

/// A problem in emulated memory.
pub struct Direct {
    kernels: Kernels,
    problem: Problem,
    pub landing: CopyLanding,
    rows_before: usize,
    memory: Memory,
    /// Query, key, value, gradient of the output, output.
    views: [DeviceView; 5],
    bounds: u64,
    /// f32 `[B, Hkv, Sq, G]`, from forward.
    lse: u64,
    delta: u64,
}

impl Direct {
    pub fn new(
        (element, limits): (GpuElement, GpuLimits),
        problem: Problem,
        data: &Data,
        Placing { strides, rows_before }: Placing,
    ) -> Self {
        let shape = problem.shape();
        let kernels = Kernels::new(element, shape.head_dim, limits).expect("a kernel");
        let mut memory = Memory::new();
        let zeros = vec![0.0; data.q.len()];
        let mut number = 0;
        let views = [&data.q, &data.k, &data.v, &data.d_out, &zeros].map(|numbers| {
            let ((_, query_heads, queries, _), (_, key_heads, keys, _)) =
                (problem.pairs.query_shape, problem.pairs.key_shape);
            let of_keys = number == 1 || number == 2;
            let (heads, tokens) = if of_keys { (key_heads, keys) } else { (query_heads, queries) };
            let room = strides.map(|strides| (strides, number));
            number += 1;
            place(&mut memory, element, (numbers, [heads, tokens, shape.head_dim]), room)
        });
        let bounds: Vec<u32> = problem.bounds().iter().flatten().flat_map(|b| [b.first, b.end]).collect();
        let bounds = memory.upload(&words(&bounds));
        let [lse, delta] = [0, 1].map(|_| memory.alloc(4 * shape.rows()));
        let landing = CopyLanding::AtWait;
        Self { kernels, problem, landing, rows_before, memory, views, bounds, lse, delta }
    }

    /// Text of the kernels' module.
    pub fn text(&self) -> &'static str {
        self.kernels.module().text
    }

    pub fn module(&self) -> Module {
        Module::parse(self.text()).expect("PTX that the emulator knows")
    }

    /// Everything by the kernels of one module.
    pub fn outcome(&mut self, module: &Module) -> Result<Outcome, Fault> {
        let (out, lse) = self.forward(module, module)?;
        let dq = self.gradient_of_queries(module)?;
        let [dk, dv] = self.gradients_of_keys(module)?;
        Ok(Outcome { out, lse, dq, dk, dv })
    }

    /// Output `[B, Hq, Sq, D]` and log-sum-exp `[B, Hq, Sq]`, with `forward` from one module and the rest from another.
    pub fn forward(&mut self, module: &Module, rest: &Module) -> Result<(Vec<f64>, Vec<f64>), Fault> {
        let shape = self.shape();
        let rows = self.problem.shape().rows();
        let [out, max, sum] = [rows * shape.head_dim, rows, rows].map(|count| self.zeros(count));
        let (of_rows, of_numbers) = (self.shift(1), self.shift(shape.head_dim));
        let far =
            State { out: out.wrapping_sub(of_numbers), max: max.wrapping_sub(of_rows), sum: sum.wrapping_sub(of_rows) };
        let scale = self.problem.pairs.scale as f32;
        for chunk in self.problem.chunks.clone() {
            let Some(work) = self.work(&chunk, Direction::Forward) else { continue };
            let [query, key, value, ..] = self.chunk_views(&chunk);
            self.run(module, Launch::forward(&self.kernels, shape, [query, key, value], far, work, scale))?;
        }
        // The kernels of single rows go through all of them, so theirs have their true numbers.
        let shape = self.problem.shape();
        let [.., d_out, view] = self.views;
        self.run(rest, Launch::finish(&self.kernels, shape, State { out, max, sum }, view, self.lse))?;
        self.run(rest, Launch::output_dot(&self.kernels, shape, view, d_out, self.delta))?;
        let lse = self.stacked(self.lse, 1);
        Ok((self.output(), lse))
    }

    /// `[B, Hq, Sq, D]`; forward has to have run.
    pub fn gradient_of_queries(&mut self, module: &Module) -> Result<Vec<f64>, Fault> {
        let shape = self.shape();
        let d_query = self.zeros(self.problem.shape().rows() * shape.head_dim);
        let grads = Grads { d_query: d_query.wrapping_sub(self.shift(shape.head_dim)), ..self.saved() };
        let scale = self.problem.pairs.scale as f32;
        for chunk in self.problem.chunks.clone() {
            let Some(work) = self.work(&chunk, Direction::BackwardQueries) else { continue };
            let operands = self.chunk_views(&chunk);
            self.run(module, Launch::backward_queries(&self.kernels, shape, operands, grads, work, scale))?;
        }
        Ok(self.stacked(d_query, shape.head_dim))
    }

    /// Of keys and of values, `[B, Hkv, Sk, D]`; forward has to have run.
    pub fn gradients_of_keys(&mut self, module: &Module) -> Result<[Vec<f64>; 2], Fault> {
        let shape = self.shape();
        let (batch, heads, keys, d) = self.problem.pairs.key_shape;
        let scale = self.problem.pairs.scale as f32;
        let mut results = [0, 1].map(|_| vec![0.0; batch * heads * keys * d]);
        for chunk in self.problem.chunks.clone() {
            let Some(work) = self.work(&chunk, Direction::BackwardKeys) else { continue };
            let count = batch * heads * chunk.len() * d;
            let sums = [0, 1].map(|_| self.zeros(count));
            let before = (4 * self.rows_before * heads * chunk.len() * d) as u64;
            let [d_key, d_value] = sums.map(|sums| sums.wrapping_sub(before));
            let grads = Grads { d_key, d_value, ..self.saved() };
            let operands = self.chunk_views(&chunk);
            let work = (work, chunk.len());
            self.run(module, Launch::backward_keys(&self.kernels, shape, operands, grads, work, scale))?;
            for (result, sums) in results.iter_mut().zip(sums) {
                let sums = self.floats(sums, count);
                for (line, sums) in result.chunks_mut(keys * d).zip(sums.chunks(chunk.len() * d)) {
                    line[chunk.start * d..chunk.end * d].copy_from_slice(sums);
                }
            }
        }
        Ok(results)
    }

    /// As the kernels are told.
    fn shape(&self) -> Shape {
        let shape = self.problem.shape();
        Shape { batch: shape.batch + self.rows_before, ..shape }
    }

    /// Bytes of f32 statistics of the batch rows before the first one.
    fn shift(&self, width: usize) -> u64 {
        let Shape { query_heads, queries, .. } = self.problem.shape();
        (4 * self.rows_before * query_heads * queries * width) as u64
    }

    fn saved(&self) -> Grads {
        let before = self.shift(1);
        let [lse, delta] = [self.lse, self.delta].map(|address| address.wrapping_sub(before));
        Grads { lse, delta, ..Grads::default() }
    }

    /// Query, key, value, gradient of the output; keys and values of a chunk.
    fn chunk_views(&self, chunk: &Range<usize>) -> [DeviceView; 4] {
        let bytes = self.kernels.element().bytes();
        std::array::from_fn(|i| {
            let DeviceView { address, strides } = self.views[i];
            let first = if i == 1 || i == 2 { chunk.start * strides[2] * bytes } else { 0 };
            let before = self.rows_before * strides[0] * bytes;
            DeviceView { address: (address + first as u64).wrapping_sub(before as u64), strides }
        })
    }

    fn work(&mut self, chunk: &Range<usize>, direction: Direction) -> Option<Work> {
        let make = match direction {
            Direction::BackwardKeys => WorkList::by_keys,
            _ => WorkList::by_queries,
        };
        let (bounds, tiles) = (self.problem.bounds(), self.problem.tiles(chunk));
        let mut list = make(self.kernels.shape(direction), self.problem.pairs.group(), &bounds, &tiles);
        let blocks = list.blocks();
        // The first of six words of a tile is its batch row.
        list.tiles.iter_mut().step_by(6).for_each(|row| *row += self.rows_before as u32);
        let [tiles, entries] = [&list.tiles, &list.entries].map(|list| self.memory.upload(&words(list)));
        let before = (8 * self.rows_before * self.problem.shape().queries) as u64;
        (blocks > 0).then_some(Work { tiles, entries, blocks, bounds: self.bounds.wrapping_sub(before) })
    }

    fn run(&mut self, module: &Module, launch: Launch) -> Result<(), Fault> {
        let run = ptx_emulator::Launch {
            kernel: &launch.kernel.name,
            grid: launch.grid,
            block: [launch.kernel.threads, 1, 1],
            shared_bytes: launch.kernel.shared_bytes,
            params: &launch.parameter_bytes(),
            copies: self.landing,
        };
        run.run(module, &mut self.memory).map(|_| ())
    }

    fn zeros(&mut self, count: usize) -> u64 {
        self.memory.upload(&vec![0; 4 * count])
    }

    fn floats(&self, address: u64, count: usize) -> Vec<f64> {
        let bytes = self.memory.read(address, 4 * count).expect("written");
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")).into()).collect()
    }

    /// Statistics `[B, Hkv, Sq, G, width]` as `[B, Hq, Sq, width]`.
    fn stacked(&self, address: u64, width: usize) -> Vec<f64> {
        let Shape { query_heads, queries, .. } = self.problem.shape();
        let group = self.problem.pairs.group();
        let numbers = self.floats(address, self.problem.shape().rows() * width);
        let mut out = Vec::with_capacity(numbers.len());
        for row in 0..numbers.len() / width {
            let (head, query) = (row / queries % query_heads, row % queries);
            let key_head = row / queries / query_heads * (query_heads / group) + head / group;
            let from = (key_head * queries + query) * group + head % group;
            out.extend(&numbers[from * width..][..width]);
        }
        out
    }

    /// `[B, Hq, Sq, D]`.
    fn output(&self) -> Vec<f64> {
        let Shape { batch, query_heads, queries, head_dim, .. } = self.problem.shape();
        let (element, DeviceView { address, strides }) = (self.kernels.element(), self.views[4]);
        let rows = (0..batch * query_heads * queries).flat_map(|row| {
            let at = [row / queries / query_heads, row / queries % query_heads, row % queries];
            let at: usize = at.iter().zip(strides).map(|(i, stride)| i * stride).sum();
            let bytes = self.memory.read(address + (at * element.bytes()) as u64, head_dim * element.bytes());
            decode(element, &bytes.expect("written"))
        });
        rows.collect()
    }
}

/// A module's text with one of its kernels only, the first one whose name begins so.
pub fn kernel_alone(text: &str, kernel: &str) -> String {
    let head = &text[..text.find(".visible .entry").expect("a kernel")];
    let from = text.find(&format!(".visible .entry {kernel}")).expect("the kernel");
    let len = text[from..].find("\n}\n").expect("its end") + 3;
    format!("{head}{}", &text[from..from + len])
}

/// Puts `[.., heads, tokens, D]` into memory; with strides, into the room of that number.
fn place(
    memory: &mut Memory,
    element: GpuElement,
    (numbers, [heads, tokens, d]): (&[f64], [usize; 3]),
    far: Option<([usize; 3], u64)>,
) -> DeviceView {
    let Some((strides, number)) = far else {
        let address = memory.upload(&encode(element, numbers));
        return DeviceView::contiguous(address, heads, tokens, d);
    };
    // Five rooms of 200 GiB in the tebibyte that can be chosen from.
    let address = (1 << 40) + (1 << 32) + number * (200 << 30);
    for (row, numbers) in numbers.chunks(d).enumerate() {
        let at = [row / tokens / heads, row / tokens % heads, row % tokens];
        let at: usize = at.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        let bytes = encode(element, numbers);
        memory.upload_at(address + (at * element.bytes()) as u64, &bytes).expect("room of its own");
    }
    DeviceView { address, strides }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn encode(element: GpuElement, numbers: &[f64]) -> Vec<u8> {
    match element {
        GpuElement::Bf16 => numbers.iter().flat_map(|&x| bf16::from_f64(x).to_le_bytes()).collect(),
        GpuElement::F16 => numbers.iter().flat_map(|&x| f16::from_f64(x).to_le_bytes()).collect(),
        GpuElement::F32 => numbers.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
    }
}

fn decode(element: GpuElement, bytes: &[u8]) -> Vec<f64> {
    let two = |bytes: &[u8]| [bytes[0], bytes[1]];
    match element {
        GpuElement::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes(two(b)).to_f64()).collect(),
        GpuElement::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes(two(b)).to_f64()).collect(),
        GpuElement::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into()).collect(),
    }
}
