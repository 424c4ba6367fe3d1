//! The recurrence, token by token in f64 with its reverse, and the operator on rank threads.

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{CpContext, DeltaHeads, Result, SequenceLayout, Tokens};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A batch: documents of every token (negative for padding), and heads.
#[derive(Debug, Clone)]
pub struct Case {
    pub documents: Vec<Vec<i64>>,
    pub heads: DeltaHeads,
    /// Values that `g` is drawn from, times a random number in 0..1 where negative.
    pub decays: Vec<f64>,
    pub seed: u64,
}

/// Inputs and the gradient of the output, flat.
#[derive(Debug, Clone)]
pub struct Data {
    pub qkv: Vec<f64>,
    pub g: Vec<f64>,
    pub beta: Vec<f64>,
    pub d_out: Vec<f64>,
}

/// Output `[B, S, Hv, dv]` and gradients in the shapes of the inputs, flat.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    pub out: Vec<f64>,
    pub qkv: Vec<f64>,
    pub g: Vec<f64>,
    pub beta: Vec<f64>,
}

impl Outcome {
    pub fn parts(&self) -> [(&'static str, &[f64]); 4] {
        [("out", &self.out), ("d_qkv", &self.qkv), ("d_g", &self.g), ("d_beta", &self.beta)]
    }
}

/// One row of documents with the given lengths.
pub fn row(lengths: &[usize]) -> Vec<i64> {
    lengths.iter().enumerate().flat_map(|(id, &length)| std::iter::repeat_n(id as i64, length)).collect()
}

/// Two key heads, four value heads.
pub fn heads(key_dim: usize, value_dim: usize) -> DeltaHeads {
    DeltaHeads { key_heads: 2, value_heads: 4, key_dim, value_dim }
}

impl Case {
    pub fn new(documents: Vec<Vec<i64>>) -> Self {
        Self { documents, heads: heads(5, 7), decays: vec![-0.02, -0.3, -2.0], seed: 7 }
    }

    pub fn len(&self) -> usize {
        self.documents[0].len()
    }

    pub fn tokens(&self) -> Tokens {
        let groups = vec![vec![-1; self.len()]; self.documents.len()];
        Tokens::new(self.documents.clone(), groups).unwrap()
    }

    pub fn data(&self) -> Data {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let tokens = self.documents.len() * self.len();
        let DeltaHeads { value_heads, value_dim, .. } = self.heads;
        let mut spread = |count: usize| -> Vec<f64> { (0..count).map(|_| rng.random_range(-1.7..1.7)).collect() };
        let (qkv, d_out) = (spread(tokens * self.heads.width()), spread(tokens * value_heads * value_dim));
        let g = (0..tokens * value_heads).map(|_| {
            let most = self.decays[rng.random_range(0..self.decays.len())];
            most * rng.random_range(0.5..1.0)
        });
        let g = g.collect();
        let beta = (0..tokens * value_heads).map(|_| rng.random_range(0.0..1.0)).collect();
        Data { qkv, g, beta, d_out }
    }
}

/// `x / sqrt(sum of x^2 + 1e-6)` times `scale`, and the root.
fn normalise(x: &[f64], scale: f64) -> (Vec<f64>, f64) {
    let root = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    (x.iter().map(|x| scale * x / root).collect(), root)
}

/// Adds the gradient of `x` for that of `normalise(x, scale)`.
fn add_normalised(into: &mut [f64], x: &[f64], d: &[f64], root: f64, scale: f64) {
    let along: f64 = x.iter().zip(d).map(|(x, d)| x * d).sum();
    for ((into, x), d) in into.iter_mut().zip(x).zip(d) {
        *into += scale * (d / root - x * along / root.powi(3));
    }
}

type State = Vec<Vec<f64>>;

/// `S^T x`.
fn read(state: &State, x: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; state[0].len()];
    for (row, x) in state.iter().zip(x) {
        out.iter_mut().zip(row).for_each(|(out, s)| *out += x * s);
    }
    out
}

/// `S x`.
fn across(state: &State, x: &[f64]) -> Vec<f64> {
    state.iter().map(|row| row.iter().zip(x).map(|(s, x)| s * x).sum()).collect()
}

/// `S + scale * a b^T`.
fn add_outer(state: &mut State, scale: f64, a: &[f64], b: &[f64]) {
    for (row, a) in state.iter_mut().zip(a) {
        row.iter_mut().zip(b).for_each(|(s, b)| *s += scale * a * b);
    }
}

/// The truth.
pub fn recurrence(case: &Case, data: &Data) -> Outcome {
    let mut outcome = Outcome {
        out: vec![0.0; data.d_out.len()],
        qkv: vec![0.0; data.qkv.len()],
        g: vec![0.0; data.g.len()],
        beta: vec![0.0; data.beta.len()],
    };
    for row in 0..case.documents.len() {
        for head in 0..case.heads.value_heads {
            one_head(case, data, row, head, &mut outcome);
        }
    }
    outcome
}

struct Step {
    /// The state after decay, and after writing.
    decayed: State,
    after: State,
    y: Vec<f64>,
    starts: bool,
}

fn one_head(case: &Case, data: &Data, row: usize, head: usize, outcome: &mut Outcome) {
    let DeltaHeads { key_heads, value_heads, key_dim: dk, value_dim: dv } = case.heads;
    let (len, width, key_head) = (case.len(), case.heads.width(), head * key_heads / value_heads);
    let at = |t: usize| (row * len + t) * width;
    let q_at = |t: usize| at(t) + key_head * dk..at(t) + (key_head + 1) * dk;
    let k_at = |t: usize| q_at(t).start + key_heads * dk..q_at(t).end + key_heads * dk;
    let v_at = |t: usize| at(t) + 2 * key_heads * dk + head * dv..at(t) + 2 * key_heads * dk + (head + 1) * dv;
    let gate = |t: usize| (row * len + t) * value_heads + head;
    let out_at = |t: usize| gate(t) * dv..(gate(t) + 1) * dv;
    let documents = &case.documents[row];
    let scale = (dk as f64).powf(-0.5);
    let mut state = vec![vec![0.0; dv]; dk];
    let mut steps = Vec::new();
    for t in 0..len {
        let starts = t == 0 || documents[t] != documents[t - 1];
        let factor = if starts { 0.0 } else { data.g[gate(t)].exp() };
        state.iter_mut().flatten().for_each(|s| *s *= factor);
        let decayed = state.clone();
        let (k, _) = normalise(&data.qkv[k_at(t)], 1.0);
        let (q, _) = normalise(&data.qkv[q_at(t)], scale);
        let y: Vec<f64> = data.qkv[v_at(t)].iter().zip(read(&state, &k)).map(|(v, r)| v - r).collect();
        add_outer(&mut state, data.beta[gate(t)], &k, &y);
        if documents[t] >= 0 {
            outcome.out[out_at(t)].copy_from_slice(&read(&state, &q));
        }
        steps.push(Step { decayed, after: state.clone(), y, starts });
    }
    let mut d_state = vec![vec![0.0; dv]; dk];
    for (t, step) in steps.iter().enumerate().rev() {
        if documents[t] < 0 {
            d_state.iter_mut().flatten().for_each(|d| *d = 0.0);
            continue;
        }
        let (k, k_root) = normalise(&data.qkv[k_at(t)], 1.0);
        let (q, q_root) = normalise(&data.qkv[q_at(t)], scale);
        let (d_out, beta) = (&data.d_out[out_at(t)], data.beta[gate(t)]);
        let d_q = across(&step.after, d_out);
        add_outer(&mut d_state, 1.0, &q, d_out);
        let d_written = read(&d_state, &k);
        outcome.beta[gate(t)] = d_written.iter().zip(&step.y).map(|(d, y)| d * y).sum();
        let d_y: Vec<f64> = d_written.iter().map(|d| d * beta).collect();
        outcome.qkv[v_at(t)].copy_from_slice(&d_y);
        let through_write = across(&d_state, &step.y);
        let through_read = across(&step.decayed, &d_y);
        let d_k: Vec<f64> = through_write.iter().zip(&through_read).map(|(w, r)| beta * w - r).collect();
        add_outer(&mut d_state, -1.0, &k, &d_y);
        if step.starts {
            d_state.iter_mut().flatten().for_each(|d| *d = 0.0);
        } else {
            outcome.g[gate(t)] = d_state.iter().flatten().zip(step.decayed.iter().flatten()).map(|(d, s)| d * s).sum();
            let factor = data.g[gate(t)].exp();
            d_state.iter_mut().flatten().for_each(|d| *d *= factor);
        }
        add_normalised(&mut outcome.qkv[q_at(t)], &data.qkv[q_at(t)], &d_q, q_root, scale);
        add_normalised(&mut outcome.qkv[k_at(t)], &data.qkv[k_at(t)], &d_k, k_root, 1.0);
    }
}

pub fn numbers(x: &Tensor) -> candle_core::Result<Vec<f64>> {
    x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Every rank's part of the operator's results, in `dtype`; `sent` is what came of the communicator.
pub fn on_ranks<R: Send>(
    case: &Case,
    data: &Data,
    layout: &SequenceLayout,
    dtype: DType,
    look: impl Fn(&CpContext) -> R + Sync,
) -> Vec<(Outcome, R)> {
    let (batch, len) = (case.documents.len(), case.len());
    let DeltaHeads { value_heads, value_dim, .. } = case.heads;
    threads::run(layout.ranks(), &threads::Options::default(), |comm| {
        let context = CpContext::new(comm, layout.clone(), case.tokens())?;
        let local = |x: &[f64], shape: &[usize]| -> Result<Tensor> {
            let x = Tensor::from_slice(x, [&[batch, len], shape].concat(), &Device::Cpu)?.to_dtype(dtype)?;
            // Padding of the layout is not 0: nothing of it may reach the results.
            context.shard_fill(&x, 1, 0.7)
        };
        let leaf = |x: &[f64], width: usize| Ok::<_, candle_cp::Error>(Var::from_tensor(&local(x, &[width])?)?);
        let qkv = leaf(&data.qkv, case.heads.width())?;
        let (g, beta) = (leaf(&data.g, value_heads)?, leaf(&data.beta, value_heads)?);
        let out = context.delta_rule(&qkv, &g, &beta, &case.heads)?;
        assert_eq!(out.dtype(), dtype);
        let d_out = local(&data.d_out, &[value_heads, value_dim])?;
        let gradients = (&out * d_out)?.sum_all()?.backward()?;
        let of = |x: &Var| numbers(gradients.get(x).expect("a gradient"));
        let outcome = Outcome { out: numbers(&out)?, qkv: of(&qkv)?, g: of(&g)?, beta: of(&beta)? };
        Ok::<_, candle_cp::Error>((outcome, look(&context)))
    })
    .unwrap()
}

/// The rows of a `[B, S, ..]` result that a rank owns; 0 beyond the row.
fn owned(x: &[f64], case: &Case, layout: &SequenceLayout, rank: usize) -> Vec<f64> {
    let (batch, len) = (case.documents.len(), case.len());
    let width = x.len() / (batch * len);
    let zeros = vec![0.0; width];
    let token = |row: usize, i: usize| if i < len { &x[(row * len + i) * width..][..width] } else { &zeros };
    let rows = (0..batch).flat_map(|row| layout.global_indices(rank).into_iter().map(move |i| (row, i)));
    rows.flat_map(|(row, i)| token(row, i).to_vec()).collect()
}

/// Largest difference of the results of every rank to the truth, each relative to the largest true value or to 1.
pub fn differences(case: &Case, expected: &Outcome, layout: &SequenceLayout, found: &[Outcome]) -> Vec<(String, f64)> {
    let mut all = Vec::new();
    for (rank, found) in found.iter().enumerate() {
        for ((name, found), (_, expected)) in found.parts().into_iter().zip(expected.parts()) {
            let largest = expected.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
            let expected = owned(expected, case, layout, rank);
            assert_eq!(found.len(), expected.len());
            let worst = found
                .iter()
                .zip(&expected)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, |m: f64, d| if d.is_nan() || d > m { d } else { m });
            all.push((format!("{name} of rank {rank}"), worst / largest));
        }
    }
    all
}

/// Panics unless every rank's results in f64 are within 1e-11 of the recurrence.
#[track_caller]
pub fn assert_exact(case: &Case, layout: &SequenceLayout) {
    let data = case.data();
    let expected = recurrence(case, &data);
    let found: Vec<_> =
        on_ranks(case, &data, layout, DType::F64, |_| ()).into_iter().map(|(found, ())| found).collect();
    for (name, difference) in differences(case, &expected, layout, &found) {
        assert!(difference <= 1e-11, "{name} is off by {difference:e} over {layout:?}");
    }
}

/// Contiguous, head-tail, and pieces of odd lengths dealt to the ranks out of order.
pub fn layouts(len: usize, ranks: usize) -> Vec<SequenceLayout> {
    let mut ranges = vec![Vec::new(); ranks];
    let (mut next, mut number) = (0, 0);
    while next < len + 3 {
        let end = (next + 1 + (number * 7) % 11 + len / (3 * ranks)).min(len + 3);
        let of_rank: &mut Vec<_> = &mut ranges[(number * 5 + 2) % ranks];
        of_rank.insert(if number % 3 == 0 { 0 } else { of_rank.len() }, next..end);
        (next, number) = (end, number + 1);
    }
    vec![
        SequenceLayout::contiguous(len, ranks).unwrap(),
        SequenceLayout::head_tail(len, ranks).unwrap(),
        SequenceLayout::from_ranges(len, ranges).unwrap(),
    ]
}
