//! The loss by tensor operations, for devices that our own kernels do not run on.
//!
//! Nothing is read back: losses and gradients stay on the device until somebody asks for them. Products run in the type
//! of the inputs, so that 16-bit types use the device's matrix units; what is between them, and sums over chunks, is f32
//! (f64 for f64). The CPU's own way widens the inputs of products as well.

use super::pass::Pass;
use crate::error::Result;
use crate::shard::IGNORED;
use crate::with_backward::with_backward;
use candle_core::{DType, Device, Tensor};
use std::sync::{Mutex, PoisonError};

/// Rows of the weight whose gradient is summed as one tensor: each addition of a chunk's share needs room for one more.
const WEIGHT_ROWS: usize = 1 << 15;

/// As [`super::linear_cross_entropy`], whose checks have passed; `labels` in the order of the rows of `hidden`.
pub(super) fn cross_entropy(hidden: &Tensor, weight_vh: &Tensor, labels: Vec<i64>, pass: Pass) -> Result<Tensor> {
    let run = move |hidden: &Tensor, weight_vh: &Tensor| {
        let hidden_nh = hidden.detach().reshape(((), weight_vh.dim(1)?))?;
        let weight_vh = weight_vh.detach().contiguous()?;
        Run { pass: &pass, hidden_nh: &hidden_nh, weight_vh: &weight_vh, labels: &labels }.all()
    };
    let (loss, sums) = run(hidden, weight_vh)?;
    let kept = Mutex::new(Some(sums));
    let backward = move |[hidden, weight_vh]: [&Tensor; 2], grad: &Tensor| {
        // Handed out, so that no second copy stays behind; another backward computes them again.
        let kept = kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        let sums = match kept {
            Some(sums) => sums,
            None => run(hidden, weight_vh)?.1,
        };
        let d_hidden = sums.d_hidden.map(|sum| sum.finish(hidden.dtype(), grad)?.reshape(hidden.shape()));
        let d_weight = sums.d_weight.map(|sum| sum.finish(weight_vh.dtype(), grad));
        Ok([d_hidden.transpose()?, d_weight.transpose()?])
    };
    Ok(with_backward("linear_cross_entropy", [hidden, weight_vh], loss, backward)?)
}

/// Gradients that are wanted.
struct Sums {
    d_hidden: Option<Gradient>,
    d_weight: Option<Gradient>,
}

/// The rows of a gradient, in the type of sums and without the factor.
struct Gradient {
    /// In order, `[.., H]` each; never empty.
    parts: Vec<Tensor>,
    factor: f64,
    /// The row of `parts` that each row of the result is; a row behind the last one is 0. `None`: they are the result.
    rows: Option<Tensor>,
}

impl Gradient {
    /// `[N, H]`, for the gradient `grad` of the loss. Parts are scaled before they are narrowed.
    fn finish(self, dtype: DType, grad: &Tensor) -> candle_core::Result<Tensor> {
        let wide = self.parts[0].dtype();
        let scale = (grad.to_dtype(wide)? * self.factor)?;
        let narrow = |part: Tensor| part.broadcast_mul(&scale)?.to_dtype(dtype);
        let parts = self.parts.into_iter().map(narrow).collect::<candle_core::Result<Vec<_>>>()?;
        let all = Tensor::cat(&parts, 0)?;
        drop(parts);
        match &self.rows {
            Some(rows) => all.pad_with_zeros(0, 0, 1)?.index_select(rows, 0),
            None => Ok(all),
        }
    }
}

struct Run<'a> {
    pass: &'a Pass,
    /// `[N, H]`.
    hidden_nh: &'a Tensor,
    /// `[V, H]`, contiguous.
    weight_vh: &'a Tensor,
    labels: &'a [i64],
}

impl Run<'_> {
    /// The loss, a scalar in the type of sums, and gradients.
    fn all(&self) -> candle_core::Result<(Tensor, Sums)> {
        let wide = wide(self.hidden_nh.dtype());
        let (device, width) = (self.hidden_nh.device(), self.weight_vh.dim(1)?);
        let tokens: Vec<u32> = (0..).zip(self.labels).filter(|(_, label)| **label != IGNORED).map(|(i, _)| i).collect();
        let mut loss = Tensor::zeros((), DType::F64, device)?;
        let mut hidden_parts = Vec::new();
        let mut weight_parts = Vec::new();
        for tokens in tokens.chunks(self.pass.chunk.max(1)) {
            let chunk = self.chunk(tokens)?;
            loss = (loss + &chunk.loss)?;
            if self.pass.hidden_gradient {
                hidden_parts.push(chunk.d_logits_nv.matmul(self.weight_vh)?.to_dtype(wide)?);
            }
            if self.pass.weight_gradient {
                self.add_weight_gradient(&chunk, &mut weight_parts)?;
            }
        }
        let gradient = |mut parts: Vec<Tensor>, rows: Option<Tensor>, count| {
            if parts.is_empty() {
                parts.push(Tensor::zeros((count, width), wide, device)?);
            }
            Ok::<_, candle_core::Error>(Gradient { parts, factor: self.pass.factor, rows })
        };
        let d_hidden = self.pass.hidden_gradient.then(|| match self.hidden_nh.dim(0)? {
            0 => gradient(hidden_parts, None, 0),
            _ => gradient(hidden_parts, Some(self.rows(&tokens)?), 1),
        });
        let d_weight = self.pass.weight_gradient.then(|| gradient(weight_parts, None, self.weight_vh.dim(0)?));
        let sums = Sums { d_hidden: d_hidden.transpose()?, d_weight: d_weight.transpose()? };
        Ok(((loss * self.pass.factor)?.to_dtype(wide)?, sums))
    }

    /// For each of all tokens its place among the labelled ones, or the place behind the last.
    fn rows(&self, tokens: &[u32]) -> candle_core::Result<Tensor> {
        let mut rows = vec![tokens.len().max(1) as u32; self.labels.len()];
        (0..).zip(tokens).for_each(|(place, &token)| rows[token as usize] = place);
        Tensor::new(rows, self.hidden_nh.device())
    }

    fn chunk(&self, tokens: &[u32]) -> candle_core::Result<Chunk> {
        let (device, dtype) = (self.hidden_nh.device(), self.hidden_nh.dtype());
        let hidden_nh = self.hidden_nh.index_select(&Tensor::new(tokens, device)?, 0)?;
        let labels: Vec<u32> = tokens.iter().map(|&token| self.labels[token as usize] as u32).collect();
        let labels_n1 = Tensor::from_vec(labels, (tokens.len(), 1), device)?;
        let logits_nv = hidden_nh.matmul(&self.weight_vh.t()?)?.to_dtype(wide(dtype))?;
        let logits_nv = match self.pass.softcap {
            Some(cap) => ((logits_nv / cap)?.tanh()? * cap)?,
            None => logits_nv,
        };
        let largest_n1 = logits_nv.max_keepdim(1)?;
        let shares_nv = logits_nv.broadcast_sub(&largest_n1)?.exp()?;
        let sums_n1 = shares_nv.sum_keepdim(1)?;
        let losses_n1 = ((sums_n1.log()? + largest_n1)? - logits_nv.gather(&labels_n1, 1)?)?;
        let loss = losses_n1.to_dtype(DType::F64)?.sum_all()?;
        if !self.pass.hidden_gradient && !self.pass.weight_gradient {
            return Ok(Chunk { loss, hidden_nh, d_logits_nv: shares_nv });
        }
        let d_logits_nv = shares_nv.broadcast_div(&sums_n1)?;
        drop(shares_nv);
        d_logits_nv.scatter_add_set(&labels_n1, &sums_n1.ones_like()?.neg()?, 1)?;
        let d_logits_nv = match self.pass.softcap {
            Some(cap) => (d_logits_nv * (logits_nv / cap)?.sqr()?.affine(-1.0, 1.0)?)?,
            None => d_logits_nv,
        };
        Ok(Chunk { loss, hidden_nh, d_logits_nv: d_logits_nv.to_dtype(dtype)? })
    }

    fn add_weight_gradient(&self, chunk: &Chunk, sums: &mut Vec<Tensor>) -> candle_core::Result<()> {
        let vocabulary = self.weight_vh.dim(0)?;
        for (place, start) in (0..vocabulary).step_by(WEIGHT_ROWS).enumerate() {
            let words = WEIGHT_ROWS.min(vocabulary - start);
            let d_logits_nw = chunk.d_logits_nv.narrow(1, start, words)?.contiguous()?;
            let part = d_logits_nw.t()?.matmul(&chunk.hidden_nh)?.to_dtype(wide(chunk.hidden_nh.dtype()))?;
            match sums.get_mut(place) {
                Some(sum) => *sum = (&*sum + part)?,
                None => sums.push(part),
            }
        }
        Ok(())
    }
}

struct Chunk {
    /// Sum of the cross entropies, an f64 scalar.
    loss: Tensor,
    hidden_nh: Tensor,
    /// Without the factor, in the type of the inputs; anything where no gradient is wanted.
    d_logits_nv: Tensor,
}

fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Bytes of logits that exist at a time on a device: fewer passes over the weight's gradient than on the CPU.
const CHUNK_BYTES: usize = 512 << 20;

/// Tokens of a chunk, unless they are given.
pub(super) fn chunk(row_bytes: usize, device: &Device) -> Option<usize> {
    (!device.is_cpu()).then(|| (CHUNK_BYTES / row_bytes).clamp(1, 1024))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Result, Var};

    const TOKENS: usize = 11;

    fn leaf(dims: (usize, usize), dtype: DType, seed: f64) -> Result<Var> {
        let x = (0..dims.0 * dims.1).map(|i| ((i as f64 + seed) * 12.9898).sin() * 2.0).collect();
        Var::from_tensor(&Tensor::from_vec(x, dims, &Device::Cpu)?.to_dtype(dtype)?)
    }

    fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) -> Result<()> {
        assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()), "{what}");
        let difference = (found.to_dtype(DType::F64)? - expected.to_dtype(DType::F64)?)?;
        let worst = difference.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
        assert!(worst <= tolerance, "{what} is off by {worst:e}");
        Ok(())
    }

    #[test]
    fn agrees_with_the_kernels_on_the_cpu() -> Result<()> {
        // More words than one part of the weight's gradient takes.
        let vocabulary = WEIGHT_ROWS + 7;
        let some: Vec<i64> = (0..TOKENS as i64).map(|i| if i % 4 == 1 { IGNORED } else { i * 3100 }).collect();
        let last = vec![vocabulary as i64 - 1; TOKENS];
        let none = vec![IGNORED; TOKENS];
        // Products in bf16 round what the kernels keep in f32: 2^-8 of logits of about 16, and of gradients below 2.
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-4), (DType::BF16, 0.05)] {
            let (hidden, weight) = (leaf((TOKENS, 5), dtype, 0.2)?, leaf((vocabulary, 5), dtype, 0.7)?);
            for (labels, softcap, chunk) in
                [(&some, None, None), (&some, Some(3.0), Some(3)), (&last, Some(30.0), Some(0)), (&none, None, Some(4))]
            {
                let labels_n = Tensor::new(labels.as_slice(), &Device::Cpu)?;
                let options = crate::LossOptions { count: 7.0, softcap, chunk_tokens: chunk };
                let shaped = hidden.reshape((1, TOKENS, 5))?;
                let expected = crate::linear_cross_entropy(&shaped, &weight, &labels_n, &options)?;
                let pass = |hidden_gradient| Pass {
                    softcap,
                    factor: 1.0 / 7.0,
                    chunk: chunk.unwrap_or(TOKENS),
                    hidden_gradient,
                    weight_gradient: true,
                };
                let found = cross_entropy(&shaped, &weight, labels.clone(), pass(true))?;
                assert_close("loss", &found, &expected, tolerance)?;
                let expected = (expected * 2.5)?.backward()?;
                // Twice: the second one computes again.
                for _ in 0..2 {
                    let found = (&found * 2.5)?.backward()?;
                    for x in [&hidden, &weight] {
                        assert_close("gradient", found.get(x).unwrap(), expected.get(x).unwrap(), tolerance)?;
                    }
                }
                let frozen = hidden.detach();
                let store = cross_entropy(&frozen, &weight, labels.clone(), pass(false))?.backward()?;
                assert!(store.get(&frozen).is_none() && store.get(&weight).is_some());
            }
        }
        Ok(())
    }

    #[test]
    fn what_has_no_label_is_not_read() -> Result<()> {
        let (hidden, weight) = (leaf((3, 5), DType::F64, 0.2)?, leaf((9, 5), DType::F64, 0.7)?);
        let poison = Tensor::new(&[[1f64], [f64::NAN], [1.0]], &Device::Cpu)?;
        let poisoned = Var::from_tensor(&hidden.broadcast_mul(&poison)?)?;
        let run = |hidden: &Var| {
            let pass = Pass { softcap: None, factor: 0.5, chunk: 2, hidden_gradient: true, weight_gradient: true };
            cross_entropy(hidden, &weight, vec![4, IGNORED, 8], pass)
        };
        let (found, expected) = (run(&poisoned)?.backward()?, run(&hidden)?.backward()?);
        assert_close("d hidden", found.get(&poisoned).unwrap(), expected.get(&hidden).unwrap(), 0.0)?;
        assert_close("d weight", found.get(&weight).unwrap(), expected.get(&weight).unwrap(), 0.0)
    }

    #[test]
    fn no_token_is_a_loss_of_zero() -> Result<()> {
        let weight = leaf((9, 5), DType::F64, 0.7)?;
        let hidden = Var::zeros((0, 5), DType::F64, &Device::Cpu)?;
        let pass = Pass { softcap: None, factor: 0.5, chunk: 2, hidden_gradient: true, weight_gradient: true };
        let loss = cross_entropy(&hidden, &weight, Vec::new(), pass)?;
        assert_eq!(loss.to_scalar::<f64>()?, 0.0);
        assert_eq!(loss.backward()?.get(&weight).unwrap().sqr()?.sum_all()?.to_scalar::<f64>()?, 0.0);
        Ok(())
    }
}
