//! Linear layer, soft cap and cross entropy in one operator that never holds `[tokens, vocabulary]`.
//!
//! Logits exist for one chunk of tokens at a time. Where a gradient is wanted it is computed in the same pass, so that
//! only the gradients of hidden states and weight are kept until backward scales them.

use crate::element::storage_of;
use crate::error::{Error, Result};
use crate::shard::IGNORED;
use candle_core::{CpuStorage, CustomOp2, DType, InplaceOp1, Layout, Shape, Tensor};
use candle_cp_kernels::{CrossEntropy, Real, cross_entropy_row};
use rayon::prelude::*;
use std::sync::Mutex;

/// Options of [`linear_cross_entropy`].
#[derive(Debug, Clone)]
pub struct LossOptions {
    /// What the sum of the cross entropies is divided by: the labels that count, over all ranks and micro-batches. 0 gives
    /// loss 0.
    pub count: f64,
    /// Logits become `softcap * tanh(logits / softcap)` first.
    pub softcap: Option<f64>,
    /// Tokens whose logits exist at a time; by default as many as fit 64 MiB.
    pub chunk_tokens: Option<usize>,
}

impl LossOptions {
    /// No soft cap, default chunks.
    pub fn new(count: f64) -> Self {
        Self { count, softcap: None, chunk_tokens: None }
    }
}

/// Sum of the cross entropies of `hidden . weight^T` against `labels`, divided by `options.count`: a scalar in f32 (f64
/// for f64).
///
/// `hidden` is `[.., H]`, `weight_vh` is `[V, H]` of the same type, `labels` is `[..]` i64, already shifted; -100 is
/// ignored. Without any label the loss is 0 with the graph attached and gradients of zeros.
///
/// # Errors
/// Shapes or types that do not fit, a label outside of the vocabulary, a count that is negative or not finite.
pub fn linear_cross_entropy(
    hidden: &Tensor,
    weight_vh: &Tensor,
    labels: &Tensor,
    options: &LossOptions,
) -> Result<Tensor> {
    let (vocabulary, width) = weight_vh.dims2()?;
    if vocabulary == 0 || width == 0 {
        let given = format!("of shape {:?}", weight_vh.dims());
        return Err(Error::argument("weight", given, "it is [V, H] with V and H at least 1", "pass the head's weight"));
    }
    let tokens = labels.elem_count();
    let hidden_nh = hidden.reshape(((), width))?;
    if hidden_nh.dim(0)? != tokens {
        let given = format!("{:?} for hidden {:?}", labels.dims(), hidden.dims());
        return Err(Error::argument("labels", given, "one label per token", "shard both with the same context"));
    }
    if hidden.dtype() != weight_vh.dtype() {
        let given = format!("{:?} hidden and {:?} weight", hidden.dtype(), weight_vh.dtype());
        return Err(Error::argument("dtype", given, "both need the same type", "convert one of them"));
    }
    if !(options.count >= 0.0 && options.count.is_finite()) {
        return Err(Error::argument(
            "count",
            options.count,
            "a count of labels is finite and not negative",
            "count them",
        ));
    }
    let labels = labels.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    if let Some(label) = labels.iter().find(|&&l| l != IGNORED && !(0..vocabulary as i64).contains(&l)) {
        let allowed = format!("labels are 0..{vocabulary} or {IGNORED}");
        return Err(Error::argument("label", label, allowed, "check the tokenizer against the model"));
    }
    let chunk = options.chunk_tokens.unwrap_or((64 << 20) / (4 * vocabulary)).max(1);
    let wanted = hidden_nh.track_op() || weight_vh.track_op();
    let job = Job { softcap: options.softcap, count: options.count, chunk, wanted };
    let computed = job.run(&hidden_nh.detach(), &weight_vh.detach(), &labels)?;
    Ok(hidden_nh.contiguous()?.apply_op2(weight_vh, computed)?)
}

struct Job {
    softcap: Option<f64>,
    count: f64,
    chunk: usize,
    /// Whether gradients are wanted.
    wanted: bool,
}

impl Job {
    fn run(&self, hidden_nh: &Tensor, weight_vh: &Tensor, labels: &[i64]) -> Result<Computed> {
        let acc = if hidden_nh.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let device = hidden_nh.device();
        let inverse = if self.count == 0.0 { 0.0 } else { 1.0 / self.count };
        let mut loss = 0.0;
        let mut d_hidden = Vec::new();
        let mut d_weight = Tensor::zeros(weight_vh.shape(), acc, device)?;
        let (tokens, width) = hidden_nh.dims2()?;
        for start in (0..tokens).step_by(self.chunk) {
            let len = self.chunk.min(tokens - start);
            let labels = &labels[start..start + len];
            let d_chunk = if labels.iter().all(|&l| l == IGNORED) {
                Tensor::zeros((len, width), hidden_nh.dtype(), device)?
            } else {
                let x = hidden_nh.narrow(0, start, len)?;
                let logits = x.matmul(&weight_vh.t()?)?.to_dtype(acc)?;
                let op = SoftmaxGradient {
                    labels: labels.to_vec(),
                    row: CrossEntropy { softcap: self.softcap, factor: inverse, gradient: self.wanted },
                    loss: Mutex::new(0.0),
                };
                logits.inplace_op1(&op)?;
                loss += *op.loss.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                if self.wanted {
                    let d_logits = logits.to_dtype(hidden_nh.dtype())?;
                    d_weight = (d_weight + d_logits.t()?.matmul(&x)?.to_dtype(acc)?)?;
                    d_logits.matmul(weight_vh)?
                } else {
                    continue;
                }
            };
            d_hidden.push(d_chunk);
        }
        let loss = Tensor::new(loss * inverse, device)?.to_dtype(acc)?;
        if !self.wanted || tokens == 0 {
            let gradients = if self.wanted { Some((hidden_nh.zeros_like()?, weight_vh.zeros_like()?)) } else { None };
            return Ok(Computed { loss, gradients });
        }
        let d_weight = d_weight.to_dtype(weight_vh.dtype())?;
        Ok(Computed { loss, gradients: Some((Tensor::cat(&d_hidden, 0)?, d_weight)) })
    }
}

/// Loss and gradients, computed outside of the graph and hung onto it.
struct Computed {
    loss: Tensor,
    gradients: Option<(Tensor, Tensor)>,
}

impl CustomOp2 for Computed {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok(storage_of(&self.loss)?)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let (d_hidden, d_weight) =
            self.gradients.as_ref().expect("an input tracks gradients, else there is no backward");
        let scaled = |d: &Tensor| d.broadcast_mul(&grad.to_dtype(d.dtype())?);
        Ok((Some(scaled(d_hidden)?), Some(scaled(d_weight)?)))
    }
}

/// Turns logits `[tokens, V]` into their gradient in place and adds up the cross entropies.
struct SoftmaxGradient {
    labels: Vec<i64>,
    row: CrossEntropy,
    loss: Mutex<f64>,
}

impl SoftmaxGradient {
    fn run<T: Real>(&self, logits: &mut [T], vocabulary: usize) {
        let rows = logits.par_chunks_mut(vocabulary).zip(&self.labels);
        let losses: Vec<f64> = rows
            .map(|(row, &label)| {
                if label == IGNORED {
                    row.fill(T::ZERO);
                    return 0.0;
                }
                cross_entropy_row(self.row, row, label as usize)
            })
            .collect();
        *self.loss.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = losses.iter().sum();
    }
}

impl InplaceOp1 for SoftmaxGradient {
    fn name(&self) -> &'static str {
        "softmax_gradient"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (_, vocabulary) = layout.shape().dims2()?;
        assert!(layout.is_contiguous() && layout.start_offset() == 0, "logits are a fresh tensor");
        match storage {
            CpuStorage::F32(logits) => self.run(logits, vocabulary),
            CpuStorage::F64(logits) => self.run(logits, vocabulary),
            _ => candle_core::bail!("logits are f32 or f64: checked before"),
        }
        Ok(())
    }
}
