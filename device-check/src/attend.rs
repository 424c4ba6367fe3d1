//! A case on a target: every rank's queries, chunk by chunk.

use crate::case::{Case, Data, Placing};
use crate::dense::Outcome;
use crate::error::Result;
use crate::target::Target;
use candle_cp_kernels::gpu::{DeviceView, Direction, GpuElement, Grads, Kernels, Launch, State, Work, WorkList};
use candle_cp_kernels::{Bounds, KeyRun, QueryTile, Shape};
use half::{bf16, f16};

/// Forward and backward with `kernels`, whose type holds `data` exactly.
///
/// # Errors
/// What the target says.
pub fn attend(target: &mut dyn Target, kernels: &Kernels, case: &Case, data: &Data) -> Result<Outcome> {
    let mut ring = Ring { target, kernels, case, outcome: Outcome::empty(case) };
    let mut chunks = Vec::new();
    for keys in &case.key_ranks {
        chunks.push(ring.chunk(data, keys)?);
    }
    for (rank, queries) in case.query_ranks.iter().enumerate() {
        if !queries.is_empty() {
            // The own chunk first, then those of the ranks behind.
            let order: Vec<usize> = (0..chunks.len()).map(|hop| (rank + chunks.len() - hop) % chunks.len()).collect();
            ring.rank(data, queries, &chunks, &order)?;
        }
    }
    let outcome = ring.outcome;
    target.clear()?;
    Ok(outcome)
}

struct Ring<'a> {
    target: &'a mut dyn Target,
    kernels: &'a Kernels,
    case: &'a Case,
    outcome: Outcome,
}

/// Keys of one rank in device memory.
struct Chunk {
    keys: Vec<usize>,
    key: DeviceView,
    value: DeviceView,
    tiles: Vec<QueryTile>,
}

/// Queries of one rank.
struct Queries<'a> {
    tokens: &'a [usize],
    /// Queries of all ranks together.
    of_all_ranks: usize,
    shape: Shape,
    query: DeviceView,
    d_out: DeviceView,
    bounds: Vec<Vec<Bounds>>,
    bounds_address: u64,
}

impl Ring<'_> {
    fn chunk(&mut self, data: &Data, keys: &[usize]) -> Result<Chunk> {
        let case = self.case;
        let mut tiles = Vec::new();
        for b in 0..case.batch {
            let runs = runs(&case.positions[b * case.keys..(b + 1) * case.keys], keys);
            tiles.push(QueryTile { row: b as u32, queries: 0..0, runs });
        }
        let key = self.place(&data.k, (case.key_heads, case.keys), keys)?;
        let value = self.place(&data.v, (case.key_heads, case.keys), keys)?;
        Ok(Chunk { keys: keys.to_vec(), key, value, tiles })
    }

    /// Some tokens of `[B, H, S, D]` numbers in device memory.
    fn place(&mut self, x: &[f64], (heads, len): (usize, usize), tokens: &[usize]) -> Result<DeviceView> {
        let (d, element) = (self.case.head_dim, self.kernels.element());
        let (places, count) = Places::new(self.case.placing, heads, tokens.len(), d);
        let mut numbers = vec![0.0; count.max(1) * self.case.batch];
        for b in 0..self.case.batch {
            for h in 0..heads {
                for (i, token) in tokens.iter().enumerate() {
                    let from = ((b * heads + h) * len + token) * d;
                    numbers[places.of(b, h, i)..][..d].copy_from_slice(&x[from..from + d]);
                }
            }
        }
        let address = self.target.upload(&to_bytes(element, &numbers))?;
        Ok(places.view(address, element))
    }

    fn rank(&mut self, data: &Data, tokens: &[usize], chunks: &[Chunk], order: &[usize]) -> Result<()> {
        let case = self.case;
        let heads = (case.query_heads(), case.queries);
        let shape = Shape {
            batch: case.batch,
            query_heads: case.query_heads(),
            key_heads: case.key_heads,
            queries: tokens.len(),
            head_dim: case.head_dim,
        };
        let bounds: Vec<Vec<Bounds>> =
            (0..case.batch).map(|b| tokens.iter().map(|&i| bounds(case, b, i)).collect()).collect();
        let words: Vec<u32> = bounds.iter().flatten().flat_map(|b| [b.first, b.end]).collect();
        let queries = Queries {
            tokens,
            of_all_ranks: case.queries,
            shape,
            query: self.place(&data.q, heads, tokens)?,
            d_out: self.place(&data.d_out, heads, tokens)?,
            bounds,
            bounds_address: self.upload(&words)?,
        };
        let (out, lse) = self.forward(&queries, order.iter().map(|&c| &chunks[c]))?;
        self.backward(&queries, order.iter().map(|&c| &chunks[c]), (out, lse))
    }

    fn forward<'c>(&mut self, queries: &Queries, chunks: impl Iterator<Item = &'c Chunk>) -> Result<(DeviceView, u64)> {
        let (case, kernels, shape) = (self.case, self.kernels, queries.shape);
        let rows = shape.rows();
        let state = State { out: self.floats(rows * case.head_dim)?, max: self.floats(rows)?, sum: self.floats(rows)? };
        for chunk in chunks {
            let work = self.work(Direction::Forward, queries, chunk)?;
            let operands = [queries.query, chunk.key, chunk.value];
            self.run(Launch::forward(kernels, shape, operands, state, work, case.scale as f32))?;
        }
        let (places, count) = Places::new(case.placing, case.query_heads(), shape.queries, case.head_dim);
        let bytes = count * case.batch * kernels.element().bytes();
        let memory = self.target.zeros(bytes)?;
        let out = places.view(memory, kernels.element());
        let lse = self.floats(rows)?;
        self.run(Launch::finish(kernels, shape, state, out, lse))?;
        let numbers = from_bytes(kernels.element(), &self.target.download(memory, bytes)?);
        let lse_numbers = from_bytes(GpuElement::F32, &self.target.download(lse, 4 * rows)?);
        let d = case.head_dim;
        for (row, stacked, [b, h, i]) in rows_of(queries) {
            self.outcome.out[row * d..(row + 1) * d].copy_from_slice(&numbers[places.of(b, h, i)..][..d]);
            self.outcome.lse[row] = lse_numbers[stacked];
        }
        Ok((out, lse))
    }

    fn backward<'c>(
        &mut self,
        queries: &Queries,
        chunks: impl Iterator<Item = &'c Chunk>,
        (out, lse): (DeviceView, u64),
    ) -> Result<()> {
        let (case, kernels, shape) = (self.case, self.kernels, queries.shape);
        let (rows, d, scale) = (shape.rows(), case.head_dim, case.scale as f32);
        let (delta, d_query) = (self.floats(rows)?, self.floats(rows * d)?);
        self.run(Launch::output_dot(kernels, shape, out, queries.d_out, delta))?;
        for chunk in chunks {
            let length = case.batch * case.key_heads * chunk.keys.len() * d;
            let (d_key, d_value) = (self.floats(length)?, self.floats(length)?);
            let grads = Grads { lse, delta, d_query, d_key, d_value };
            let operands = [queries.query, chunk.key, chunk.value, queries.d_out];
            let work = self.work(Direction::BackwardQueries, queries, chunk)?;
            self.run(Launch::backward_queries(kernels, shape, operands, grads, work, scale))?;
            let work = (self.work(Direction::BackwardKeys, queries, chunk)?, chunk.keys.len());
            self.run(Launch::backward_keys(kernels, shape, operands, grads, work, scale))?;
            for (address, is_key) in [(d_key, true), (d_value, false)] {
                let part = from_bytes(GpuElement::F32, &self.target.download(address, 4 * length)?);
                let sums = if is_key { &mut self.outcome.dk } else { &mut self.outcome.dv };
                for (heads, part) in part.chunks(d * chunk.keys.len().max(1)).enumerate() {
                    for (key, part) in chunk.keys.iter().zip(part.chunks(d)) {
                        let at = (heads * case.keys + key) * d;
                        sums[at..at + d].iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                    }
                }
            }
        }
        let stacked_rows = from_bytes(GpuElement::F32, &self.target.download(d_query, 4 * rows * d)?);
        for (row, stacked, _) in rows_of(queries) {
            self.outcome.dq[row * d..(row + 1) * d].copy_from_slice(&stacked_rows[stacked * d..(stacked + 1) * d]);
        }
        Ok(())
    }

    fn work(&mut self, direction: Direction, queries: &Queries, chunk: &Chunk) -> Result<Work> {
        let make = if direction == Direction::BackwardKeys { WorkList::by_keys } else { WorkList::by_queries };
        let list = make(self.kernels.shape(direction), self.case.group, &queries.bounds, &chunk.tiles);
        if list.blocks() == 0 {
            return Ok(Work::default());
        }
        let (tiles, entries) = (self.upload(&list.tiles)?, self.upload(&list.entries)?);
        Ok(Work { tiles, entries, blocks: list.blocks(), bounds: queries.bounds_address })
    }

    fn run(&mut self, launch: Launch) -> Result<()> {
        if launch.grid.contains(&0) { Ok(()) } else { self.target.launch(self.kernels, &launch) }
    }

    fn floats(&mut self, count: usize) -> Result<u64> {
        self.target.zeros(4 * count)
    }

    fn upload(&mut self, words: &[u32]) -> Result<u64> {
        self.target.upload(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
    }
}

/// Row in the outcome, row in `[B, Hkv, Sq, G]`, and (batch, head, query on this rank).
fn rows_of<'a>(queries: &'a Queries) -> impl Iterator<Item = (usize, usize, [usize; 3])> + use<'a> {
    let Shape { batch, query_heads: heads, key_heads, queries: count, .. } = queries.shape;
    let (group, all) = (heads / key_heads, queries.of_all_ranks);
    (0..batch * heads * count).map(move |n| {
        let (b, h, i) = (n / count / heads, n / count % heads, n % count);
        let stacked = ((b * key_heads + h / group) * count + i) * group + h % group;
        ((b * heads + h) * all + queries.tokens[i], stacked, [b, h, i])
    })
}

/// What a query sees, as consecutive positions.
fn bounds(case: &Case, b: usize, query: usize) -> Bounds {
    let position = |key: usize| case.positions[b * case.keys + key];
    let seen: Vec<u32> = case.seen(b, query).map(position).collect();
    let (Some(&first), Some(&last)) = (seen.iter().min(), seen.iter().max()) else { return Bounds::default() };
    let between = (0..case.keys).filter(|&key| (first..=last).contains(&position(key))).count();
    assert_eq!(between, seen.len(), "{}: query {query} sees consecutive positions", case.name);
    Bounds { first, end: last + 1 }
}

/// The keys of a chunk in runs of consecutive positions.
fn runs(positions: &[u32], keys: &[usize]) -> Vec<KeyRun> {
    let mut runs: Vec<KeyRun> = Vec::new();
    for (i, &key) in keys.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if run.first_position + run.keys.len() as u32 == positions[key] => run.keys.end += 1,
            _ => runs.push(KeyRun { keys: i as u32..i as u32 + 1, first_position: positions[key], full: 0..0 }),
        }
    }
    runs
}

/// Where the rows of a tensor lie, in elements.
struct Places {
    strides: [usize; 3],
    first: usize,
}

impl Places {
    /// With the elements of one batch row.
    fn new(placing: Placing, heads: usize, tokens: usize, head_dim: usize) -> (Self, usize) {
        let width = head_dim + usize::from(placing.odd);
        let row = heads * tokens * width + usize::from(placing.odd);
        let [head, token] = if placing.tokens_first { [width, heads * width] } else { [tokens * width, width] };
        (Self { strides: [row, head, token], first: usize::from(placing.odd) }, row)
    }

    fn of(&self, b: usize, h: usize, i: usize) -> usize {
        self.first + b * self.strides[0] + h * self.strides[1] + i * self.strides[2]
    }

    fn view(&self, address: u64, element: GpuElement) -> DeviceView {
        DeviceView { address: address + (self.first * element.bytes()) as u64, strides: self.strides }
    }
}

fn to_bytes(element: GpuElement, x: &[f64]) -> Vec<u8> {
    match element {
        GpuElement::Bf16 => x.iter().flat_map(|&x| bf16::from_f64(x).to_le_bytes()).collect(),
        GpuElement::F16 => x.iter().flat_map(|&x| f16::from_f64(x).to_le_bytes()).collect(),
        GpuElement::F32 => x.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
    }
}

pub(crate) fn from_bytes(element: GpuElement, bytes: &[u8]) -> Vec<f64> {
    let pair = |x: &[u8]| [x[0], x[1]];
    match element {
        GpuElement::Bf16 => bytes.chunks_exact(2).map(|x| bf16::from_le_bytes(pair(x)).to_f64()).collect(),
        GpuElement::F16 => bytes.chunks_exact(2).map(|x| f16::from_le_bytes(pair(x)).to_f64()).collect(),
        GpuElement::F32 => {
            bytes.chunks_exact(4).map(|x| f64::from(f32::from_le_bytes([x[0], x[1], x[2], x[3]]))).collect()
        }
    }
}
