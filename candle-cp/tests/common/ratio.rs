//! The rule for inexact types: the largest error may be at most twice that of the same computation composed of plain
//! tensor operations in the same type, plus that type's own rounding. Scale-free, without magic numbers.

use super::case::{Case, Data};
use super::dense::{Outcome, allowed};
use super::loss_reference::Loss;
use super::ring::numbers;
use super::{magnitude, max_difference};
use candle_core::{D, DType, Device, Result, Tensor, Var};

/// `x` rounded to `dtype` and back.
pub fn rounded(x: &[f64], dtype: DType) -> Vec<f64> {
    numbers(&Tensor::new(x, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()).unwrap()
}

pub fn rounded_data(data: &Data, dtype: DType) -> Data {
    let of = |x: &[f64]| rounded(x, dtype);
    Data { q: of(&data.q), k: of(&data.k), v: of(&data.v), d_out: of(&data.d_out) }
}

/// Twice the largest change that adding and subtracting 0.3 makes in `dtype`.
fn jitter(reference: &[f64], dtype: DType) -> f64 {
    let x = rounded(reference, dtype);
    let up = rounded(&x.iter().map(|x| x + 0.3).collect::<Vec<_>>(), dtype);
    let back = rounded(&up.iter().map(|x| x - 0.3).collect::<Vec<_>>(), dtype);
    2.0 * max_difference(&back, &x)
}

/// Panics if the first of (actual, composed, reference) breaks the rule. `slack` is a further relative error.
#[track_caller]
pub fn assert_ratio(name: &str, dtype: DType, parts: (&[f64], &[f64], &[f64]), slack: f64) {
    if let Some(text) = beyond(name, dtype, parts, slack * magnitude(parts.2), 2.0) {
        panic!("{text}");
    }
}

/// What breaks the rule in what GPU kernels found, if anything does. Gradients get three times the error of the composed
/// computation, and an absolute floor: where a gradient cancels to 0 the composed computation may be exact by luck.
pub fn kernel_deviation(
    name: &str,
    dtype: DType,
    (found, composed, reference): (&Outcome, &Outcome, &Outcome),
) -> Option<String> {
    // Backward gets its probabilities from the log-sum-exp, which f32 keeps to half a unit in the last place, and from a
    // power of two that the hardware approximates to two.
    let exact = if dtype == DType::F32 { 4.0 * f64::from(f32::EPSILON) } else { 0.0 };
    let slack = exact * magnitude(&reference.lse).max(1.0);
    // Sums in f32 of numbers up to 1, whose differences may cancel.
    let floor = 16.0 * f64::from(f32::EPSILON) + slack * magnitude(&reference.dk).max(magnitude(&reference.dv));
    let parts = found.parts().into_iter().zip(composed.parts()).zip(reference.parts());
    let mut deviations = parts.map(|(((part, found), (_, composed)), (_, reference))| {
        let name = format!("{name}: {part}");
        match part {
            "lse" => super::deviation(&name, found, reference, 1e-5),
            "out" => beyond(&name, dtype, (found, composed, reference), slack * magnitude(reference), 2.0),
            _ => beyond(&name, dtype, (found, composed, reference), floor, 3.0),
        }
    });
    deviations.find_map(|deviation| deviation)
}

/// What is wrong if the first of (actual, composed, reference) is off by more than `factor` times the error of the second.
pub fn beyond(
    name: &str,
    dtype: DType,
    (actual, composed, reference): (&[f64], &[f64], &[f64]),
    floor: f64,
    factor: f64,
) -> Option<String> {
    let (ours, theirs) = (max_difference(actual, reference), max_difference(composed, reference));
    let allowed = factor * theirs + jitter(reference, dtype) + floor;
    assert!(allowed.is_finite(), "{name}: the composed computation fails in {dtype:?}");
    let wrong = ours.is_nan() || ours > allowed;
    wrong.then(|| format!("{name} in {dtype:?}: error {ours:e}, composed {theirs:e}, allowed {allowed:e}"))
}

/// A computation of attention that need not come from a [`Case`]: queries and keys may be different tokens.
#[derive(Debug, Clone)]
pub struct Pairs {
    /// `[B, Hq, Sq, D]`.
    pub query_shape: (usize, usize, usize, usize),
    /// `[B, Hkv, Sk, D]`.
    pub key_shape: (usize, usize, usize, usize),
    /// `[B, Sq, Sk]`: which query may see which key.
    pub allowed: Vec<bool>,
    pub scale: f64,
}

impl Pairs {
    pub fn of(case: &Case) -> Self {
        let len = case.len();
        let rows = case.documents.iter().zip(&case.groups);
        let pairs = rows.flat_map(|row| (0..len * len).map(move |pair| (row, pair / len, pair % len)));
        let allowed = pairs.map(|((documents, groups), q, k)| allowed(&case.rule, documents, groups, q, k)).collect();
        Self { query_shape: case.query_shape(), key_shape: case.key_shape(), allowed, scale: case.scale }
    }

    /// Query heads per key head.
    pub fn group(&self) -> usize {
        self.query_shape.1 / self.key_shape.1
    }

    /// The keys that a query of a batch row may see, as a row of the mask.
    pub fn seen(&self, row: usize, query: usize) -> &[bool] {
        let ((.., queries, _), (.., keys, _)) = (self.query_shape, self.key_shape);
        &self.allowed[(row * queries + query) * keys..][..keys]
    }
}

/// Attention by matrix multiplication, masking and softmax in `dtype`, on one device.
pub fn composed_attention(case: &Case, data: &Data, dtype: DType) -> Result<Outcome> {
    composed_pairs(&Pairs::of(case), data, dtype)
}

/// As [`composed_attention`]. Where a query has no key, its result is that by definition, and nothing of it reaches the
/// gradients.
pub fn composed_pairs(pairs: &Pairs, data: &Data, dtype: DType) -> Result<Outcome> {
    let (batch, heads, queries, d) = pairs.query_shape;
    let is_blind = |row: usize| !pairs.seen(row / queries / heads, row % queries).contains(&true);
    let blind: Vec<usize> = (0..batch * heads * queries).filter(|&row| is_blind(row)).collect();
    let mut data = data.clone();
    blind.iter().for_each(|row| data.d_out[row * d..(row + 1) * d].fill(0.0));
    let mut outcome = composed(pairs, &data, dtype)?;
    for row in blind {
        outcome.out[row * d..(row + 1) * d].fill(0.0);
        outcome.dq[row * d..(row + 1) * d].fill(0.0);
        outcome.lse[row] = f64::NEG_INFINITY;
    }
    Ok(outcome)
}

fn composed(pairs: &Pairs, data: &Data, dtype: DType) -> Result<Outcome> {
    let leaf = |x: &[f64], shape: (usize, usize, usize, usize)| {
        Var::from_tensor(&Tensor::from_slice(x, shape, &Device::Cpu)?.to_dtype(dtype)?)
    };
    let (q, k, v) =
        (leaf(&data.q, pairs.query_shape)?, leaf(&data.k, pairs.key_shape)?, leaf(&data.v, pairs.key_shape)?);
    let (batch, key_heads, keys, d) = pairs.key_shape;
    let repeat = |x: &Tensor| {
        let wide = x.unsqueeze(2)?.broadcast_as((batch, key_heads, pairs.group(), keys, d))?;
        wide.reshape((batch, key_heads * pairs.group(), keys, d))
    };
    let scores = (q.matmul(&repeat(&k)?.transpose(2, 3)?.contiguous()?)? * pairs.scale)?;
    let outside = Tensor::full(f64::NEG_INFINITY, scores.shape(), &Device::Cpu)?.to_dtype(dtype)?;
    let scores = mask(pairs)?.broadcast_as(scores.shape())?.where_cond(&scores, &outside)?;
    let largest = scores.max_keepdim(D::Minus1)?.detach();
    let weights = scores.broadcast_sub(&largest)?.exp()?;
    let sum = weights.sum_keepdim(D::Minus1)?;
    let out = weights.broadcast_div(&sum)?.matmul(&repeat(&v)?)?;
    let d_out = Tensor::from_slice(&data.d_out, pairs.query_shape, &Device::Cpu)?.to_dtype(dtype)?;
    let gradients = (&out * d_out)?.sum_all()?.backward()?;
    let of = |x: &Tensor| numbers(x).map_err(candle_core::Error::from);
    let gradient = |x: &Var| of(gradients.get(x).expect("a leaf"));
    let lse = of(&(largest + sum.log()?)?)?;
    Ok(Outcome { out: of(&out)?, lse, dq: gradient(&q)?, dk: gradient(&k)?, dv: gradient(&v)? })
}

/// `[B, 1, Sq, Sk]`, 1 where allowed; a query without keys sees all, so that its softmax is finite.
fn mask(pairs: &Pairs) -> Result<Tensor> {
    let (batch, _, queries, _) = pairs.query_shape;
    let keys = pairs.key_shape.2;
    let rows = (0..batch * queries).map(|row| pairs.seen(row / queries, row % queries));
    let all = rows.flat_map(|seen| seen.iter().map(|&seen_one| u8::from(seen_one || !seen.contains(&true))));
    Tensor::from_vec(all.collect(), (batch, 1, queries, keys), &Device::Cpu)
}

/// Linear, soft cap and cross entropy by plain tensor operations in `dtype`.
pub fn composed_loss(
    (hidden, weight, labels): (&[f64], &[f64], &[i64]),
    count: f64,
    softcap: f64,
    dtype: DType,
) -> Result<Loss> {
    let width = hidden.len() / labels.len();
    let leaf =
        |x: &[f64]| Var::from_tensor(&Tensor::from_slice(x, (x.len() / width, width), &Device::Cpu)?.to_dtype(dtype)?);
    let (hidden, weight) = (leaf(hidden)?, leaf(weight)?);
    let logits = ((hidden.matmul(&weight.t()?)? / softcap)?.tanh()? * softcap)?;
    let vocabulary = logits.dim(1)?;
    let largest = logits.max_keepdim(1)?.detach();
    let lse = (logits.broadcast_sub(&largest)?.exp()?.sum_keepdim(1)?.log()? + largest)?;
    let hot = |value: f64| -> Vec<f64> {
        labels.iter().flat_map(|&l| (0..vocabulary).map(move |v| if v as i64 == l { value } else { 0.0 })).collect()
    };
    let target = Tensor::from_vec(hot(1.0), (labels.len(), vocabulary), &Device::Cpu)?.to_dtype(dtype)?;
    let loss = (lse.broadcast_sub(&logits)? * target)?.sum_all()?;
    let loss = (loss / count)?;
    let gradients = loss.backward()?;
    let of = |x: &Var| numbers(gradients.get(x).expect("a leaf")).map_err(candle_core::Error::from);
    Ok(Loss { loss: loss.to_dtype(DType::F64)?.to_scalar()?, d_hidden: of(&hidden)?, d_weight: of(&weight)? })
}
