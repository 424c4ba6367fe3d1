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
    assert_factor(name, dtype, parts, slack * magnitude(parts.2), 2.0);
}

/// As [`assert_ratio`], with three times the error of the composed computation, and an absolute `floor`: where a gradient
/// cancels to 0 the composed computation may be exact by luck.
#[track_caller]
pub fn assert_gradient_ratio(name: &str, dtype: DType, parts: (&[f64], &[f64], &[f64]), floor: f64) {
    assert_factor(name, dtype, parts, floor, 3.0);
}

#[track_caller]
fn assert_factor(
    name: &str,
    dtype: DType,
    (actual, composed, reference): (&[f64], &[f64], &[f64]),
    floor: f64,
    factor: f64,
) {
    let (ours, theirs) = (max_difference(actual, reference), max_difference(composed, reference));
    let allowed = factor * theirs + jitter(reference, dtype) + floor;
    assert!(allowed.is_finite(), "{name}: the composed computation fails in {dtype:?}");
    assert!(ours <= allowed, "{name} in {dtype:?}: error {ours:e}, composed {theirs:e}, allowed {allowed:e}");
}

/// Attention by matrix multiplication, masking and softmax in `dtype`, on one device. Every query needs
/// a key.
pub fn composed_attention(case: &Case, data: &Data, dtype: DType) -> Result<Outcome> {
    composed(case, data, dtype, &mask(case, false)?)
}

/// `mask` is `[B, 1, S, S]`.
fn composed(case: &Case, data: &Data, dtype: DType, mask: &Tensor) -> Result<Outcome> {
    let leaf = |x: &[f64], shape: (usize, usize, usize, usize)| {
        Var::from_tensor(&Tensor::from_slice(x, shape, &Device::Cpu)?.to_dtype(dtype)?)
    };
    let (q, k, v) =
        (leaf(&data.q, case.query_shape())?, leaf(&data.k, case.key_shape())?, leaf(&data.v, case.key_shape())?);
    let (batch, key_heads, len, d) = case.key_shape();
    let repeat = |x: &Tensor| {
        let wide = x.unsqueeze(2)?.broadcast_as((batch, key_heads, case.group, len, d))?;
        wide.reshape((batch, key_heads * case.group, len, d))
    };
    let scores = (q.matmul(&repeat(&k)?.transpose(2, 3)?.contiguous()?)? * case.scale)?;
    let outside = Tensor::full(f64::NEG_INFINITY, scores.shape(), &Device::Cpu)?.to_dtype(dtype)?;
    let scores = mask.broadcast_as(scores.shape())?.where_cond(&scores, &outside)?;
    let largest = scores.max_keepdim(D::Minus1)?.detach();
    let weights = scores.broadcast_sub(&largest)?.exp()?;
    let sum = weights.sum_keepdim(D::Minus1)?;
    let out = weights.broadcast_div(&sum)?.matmul(&repeat(&v)?)?;
    let d_out = Tensor::from_slice(&data.d_out, case.query_shape(), &Device::Cpu)?.to_dtype(dtype)?;
    let gradients = (&out * d_out)?.sum_all()?.backward()?;
    let of = |x: &Tensor| numbers(x).map_err(candle_core::Error::from);
    let gradient = |x: &Var| of(gradients.get(x).expect("a leaf"));
    let lse = of(&(largest + sum.log()?)?)?;
    Ok(Outcome { out: of(&out)?, lse, dq: gradient(&q)?, dk: gradient(&k)?, dv: gradient(&v)? })
}

/// As [`composed_attention`] where queries may have no key: theirs is the result by definition, and nothing of them
/// reaches the gradients.
pub fn composed_with_keys(case: &Case, data: &Data, dtype: DType) -> Result<Outcome> {
    let (len, d) = (case.len(), case.head_dim);
    let sees = |row: usize| {
        let (b, i) = (row / len / case.query_heads(), row % len);
        (0..len).any(|k| allowed(&case.rule, &case.documents[b], &case.groups[b], i, k))
    };
    let blind: Vec<usize> = (0..data.q.len() / d).filter(|&row| !sees(row)).collect();
    let mut data = data.clone();
    blind.iter().for_each(|row| data.d_out[row * d..(row + 1) * d].fill(0.0));
    let mut outcome = composed(case, &data, dtype, &mask(case, true)?)?;
    for row in blind {
        outcome.out[row * d..(row + 1) * d].fill(0.0);
        outcome.dq[row * d..(row + 1) * d].fill(0.0);
        outcome.lse[row] = f64::NEG_INFINITY;
    }
    Ok(outcome)
}

/// `[B, 1, S, S]`, 1 where allowed; with `blind_see` a query without keys sees all, so that its softmax is finite.
fn mask(case: &Case, blind_see: bool) -> Result<Tensor> {
    let len = case.len();
    let mut all = Vec::new();
    for (documents, groups) in case.documents.iter().zip(&case.groups) {
        for q in 0..len {
            let seen: Vec<bool> = (0..len).map(|k| allowed(&case.rule, documents, groups, q, k)).collect();
            let blind = blind_see && !seen.contains(&true);
            all.extend(seen.into_iter().map(|seen| u8::from(seen || blind)));
        }
    }
    Tensor::from_vec(all, (case.batch(), 1, len, len), &Device::Cpu)
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
