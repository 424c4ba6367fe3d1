//! Linear layer, soft cap and cross entropy in one operator that never holds `[tokens, vocabulary]`.
//!
//! Logits exist for one chunk of labelled tokens at a time. Where a gradient is wanted it is computed in the same pass,
//! so that only the gradients of hidden states and weight are kept until backward hands them out.

mod composed;
mod pass;
mod product;

use crate::element::{Element, with_cpu_storage};
use crate::error::{Error, Result};
use crate::shard::IGNORED;
use candle_core::{CpuStorage, CustomOp2, DType, InplaceOp1, Layout, Shape, Tensor};
use half::{bf16, f16};
use pass::{Pass, Sums};
use product::Matrix;
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Bytes of logits that exist at a time by default. Each chunk reads and writes the weight's gradient once, which small
/// chunks of a large vocabulary would spend most of their time on.
const CHUNK_BYTES: usize = 256 << 20;
/// The gradient of a small vocabulary's weight is passed over seldom enough with this many.
const CHUNK_TOKENS: usize = 1024;

/// Options of [`linear_cross_entropy`].
#[derive(Debug, Clone)]
pub struct LossOptions {
    /// What the sum of the cross entropies is divided by: the labels that count, over all ranks and micro-batches. 0 gives
    /// loss 0.
    pub count: f64,
    /// Logits become `softcap * tanh(logits / softcap)` first; finite and above 0.
    pub softcap: Option<f64>,
    /// Tokens whose logits exist at a time, of those with a label; by default as many as fit 256 MiB (512
    /// MiB on other devices than the CPU), at most 1024.
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
/// `hidden` is `[.., H]`, `weight_vh` is `[V, H]` of the same type (f32, f64, bf16 or f16; sums run in f32, or f64 for
/// f64), `labels` is `[..]` i64, already shifted. A token whose label is -100 is not read: it costs nothing, its hidden
/// state may even be NaN, and its gradient is 0. Without any label the loss is 0 with the graph attached and gradients of
/// zeros.
///
/// On other devices than the CPU the same runs by Candle's tensor operations, chunk by chunk, with products in the type of
/// the arguments. Labels are read on the host: those on the CPU cost no wait for the device.
///
/// Besides the logits of one chunk, memory is what the gradients of those arguments take that are tracked. `backward`
/// hands these gradients out; calling it once more on the same loss computes them again. Candle's own `backward` then
/// adds each to zeros, so that while it does there are two more of that size.
///
/// # Errors
/// Shapes or types that do not fit, hidden states and weight on two devices, a label outside of the vocabulary, a count that is
/// negative or not finite, a soft cap that is not positive and finite.
pub fn linear_cross_entropy(
    hidden: &Tensor,
    weight_vh: &Tensor,
    labels: &Tensor,
    options: &LossOptions,
) -> Result<Tensor> {
    check_shapes(hidden, weight_vh, labels)?;
    check_dtype(hidden.dtype(), weight_vh.dtype())?;
    check_options(options)?;
    check_device(hidden, weight_vh)?;
    let vocabulary = weight_vh.dim(0)?;
    let labels = labels.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    if let Some(label) = labels.iter().find(|&&l| l != IGNORED && !(0..vocabulary as i64).contains(&l)) {
        let allowed = format!("labels are 0..{vocabulary} or {IGNORED}");
        return Err(Error::argument("label", label, allowed, "check the tokenizer against the model"));
    }
    let row_bytes = vocabulary * if hidden.dtype() == DType::F64 { 8 } else { 4 };
    let hidden = hidden.contiguous()?;
    let chunk = composed::chunk(row_bytes, hidden.device()).unwrap_or((CHUNK_BYTES / row_bytes).min(CHUNK_TOKENS));
    let pass = Pass {
        softcap: options.softcap,
        factor: if options.count == 0.0 { 0.0 } else { 1.0 / options.count },
        chunk: options.chunk_tokens.unwrap_or(chunk),
        hidden_gradient: hidden.track_op(),
        weight_gradient: weight_vh.track_op(),
    };
    if !hidden.device().is_cpu() {
        return composed::cross_entropy(&hidden, weight_vh, labels, pass);
    }
    Ok(hidden.apply_op2(weight_vh, LinearCrossEntropy { pass, labels, gradients: Mutex::new(None) })?)
}

fn check_shapes(hidden: &Tensor, weight_vh: &Tensor, labels: &Tensor) -> Result<()> {
    let (vocabulary, width) = weight_vh.dims2()?;
    if vocabulary == 0 || width == 0 {
        let given = format!("of shape {:?}", weight_vh.dims());
        return Err(Error::argument("weight", given, "it is [V, H] with V and H at least 1", "pass the head's weight"));
    }
    if hidden.dims().last() != Some(&width) {
        let (given, allowed) = (format!("of shape {:?}", hidden.dims()), format!("its last dimension is H = {width}"));
        return Err(Error::argument("hidden", given, allowed, "pass the weight of the same model"));
    }
    if hidden.elem_count() != labels.elem_count() * width {
        let given = format!("{:?} for hidden {:?}", labels.dims(), hidden.dims());
        return Err(Error::argument("labels", given, "one label per token", "shard both with the same context"));
    }
    Ok(())
}

fn check_device(hidden: &Tensor, weight_vh: &Tensor) -> Result<()> {
    if hidden.device().same_device(weight_vh.device()) {
        return Ok(());
    }
    let given = format!("{:?} of hidden and {:?} of weight", hidden.device(), weight_vh.device());
    Err(Error::argument("device", given, "both have to be on one device", "make one device and clone it"))
}

fn check_options(options: &LossOptions) -> Result<()> {
    if !(options.count >= 0.0 && options.count.is_finite()) {
        let allowed = "a count of labels is finite and not negative";
        return Err(Error::argument("count", options.count, allowed, "count them"));
    }
    match options.softcap {
        Some(cap) if !(cap > 0.0 && cap.is_finite()) => {
            Err(Error::argument("softcap", cap, "a soft cap is finite and above 0", "pass None for no cap"))
        }
        _ => Ok(()),
    }
}

fn check_dtype(hidden: DType, weight: DType) -> Result<()> {
    if hidden != weight {
        let given = format!("{hidden:?} hidden and {weight:?} weight");
        return Err(Error::argument("dtype", given, "both need the same type", "convert one of them"));
    }
    match hidden {
        DType::F32 | DType::F64 | DType::BF16 | DType::F16 => Ok(()),
        _ => Err(Error::argument("dtype", format!("{hidden:?}"), "use f32, f64, bf16 or f16", "convert both")),
    }
}

/// The operator. Forward computes the gradients as well and leaves them here for backward.
struct LinearCrossEntropy {
    pass: Pass,
    labels: Vec<i64>,
    gradients: Mutex<Option<Gradients>>,
}

/// Gradients of hidden states (in their shape) and weight; `None` for what is not tracked.
struct Gradients {
    d_hidden: Option<Tensor>,
    d_weight: Option<Tensor>,
}

impl LinearCrossEntropy {
    fn run(&self, hidden: (&CpuStorage, &Layout), weight_vh: (&CpuStorage, &Layout)) -> Result<(f64, Gradients)> {
        match hidden.0 {
            CpuStorage::F32(_) => self.run_as::<f32>(hidden, weight_vh),
            CpuStorage::F64(_) => self.run_as::<f64>(hidden, weight_vh),
            CpuStorage::BF16(_) => self.run_as::<bf16>(hidden, weight_vh),
            CpuStorage::F16(_) => self.run_as::<f16>(hidden, weight_vh),
            _ => unreachable!("types are checked before"),
        }
    }

    fn run_as<T: Element>(
        &self,
        (hidden, hidden_layout): (&CpuStorage, &Layout),
        (weight, weight_layout): (&CpuStorage, &Layout),
    ) -> Result<(f64, Gradients)> {
        let start = hidden_layout.start_offset();
        let hidden_nh = &hidden.as_slice::<T>()?[start..start + hidden_layout.shape().elem_count()];
        let (rows, columns) = weight_layout.shape().dims2()?;
        let strides = (weight_layout.stride()[0], weight_layout.stride()[1]);
        let data = &weight.as_slice::<T>()?[weight_layout.start_offset()..];
        let Sums { loss, d_hidden, d_weight } =
            self.pass.run(hidden_nh, Matrix { data, rows, columns, strides }, &self.labels);
        let tensor = |d: Option<Vec<T>>, layout: &Layout| {
            d.map(|d| Tensor::from_vec(d, layout.shape(), &candle_core::Device::Cpu)).transpose()
        };
        let gradients =
            Gradients { d_hidden: tensor(d_hidden, hidden_layout)?, d_weight: tensor(d_weight, weight_layout)? };
        Ok((loss * self.pass.factor, gradients))
    }

    fn gradients(&self) -> std::sync::MutexGuard<'_, Option<Gradients>> {
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CustomOp2 for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn cpu_fwd(
        &self,
        hidden: &CpuStorage,
        hidden_layout: &Layout,
        weight_vh: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (loss, gradients) = self.run((hidden, hidden_layout), (weight_vh, weight_layout))?;
        *self.gradients() = Some(gradients);
        let loss = match hidden {
            CpuStorage::F64(_) => CpuStorage::F64(vec![loss]),
            _ => CpuStorage::F32(vec![loss as f32]),
        };
        Ok((loss, Shape::from(())))
    }

    /// Hands the gradients out, so that no second copy stays behind; another backward over the same loss computes them
    /// again.
    fn bwd(
        &self,
        hidden: &Tensor,
        weight_vh: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let kept = self.gradients().take();
        let Gradients { d_hidden, d_weight } = match kept {
            Some(gradients) => gradients,
            None => {
                with_cpu_storage(hidden, |hidden, hidden_layout| {
                    with_cpu_storage(weight_vh, |weight, layout| self.run((hidden, hidden_layout), (weight, layout)))
                })?
                .1
            }
        };
        let factor = grad.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        if factor != 1.0 {
            for d in [&d_hidden, &d_weight].into_iter().flatten() {
                d.inplace_op1(&Scale(factor))?;
            }
        }
        // `None` is only what is not tracked: Candle needs a gradient of everything else.
        Ok((d_hidden, d_weight))
    }
}

/// Multiplies a tensor that nobody else sees yet.
struct Scale(f64);

impl Scale {
    fn run<T: Element>(&self, data: &mut [T]) {
        data.par_chunks_mut(1 << 16).for_each(|part| {
            part.iter_mut().for_each(|x| *x = T::from_f64(x.to_f64() * self.0));
        });
    }
}

impl InplaceOp1 for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        match storage {
            CpuStorage::F32(data) => self.run(data),
            CpuStorage::F64(data) => self.run(data),
            CpuStorage::BF16(data) => self.run(data),
            CpuStorage::F16(data) => self.run(data),
            _ => unreachable!("types are checked before"),
        }
        Ok(())
    }
}
