//! A short causal convolution across ranks, as a Candle operator with a backward pass.
//!
//! The first tokens of a piece of a rank's slice read the `K - 1` tokens before it in the row. Those come from the ranks
//! that own them (the halo), as far as they belong to the same document; backward sends their gradients home. What travels
//! does not grow with the sequence.

mod halo;

use crate::comm::{Communicator, Row};
use crate::element::{Element, dispatch, slice, with_cpu_storage};
use crate::error::{Error, Result};
use crate::layout::SequenceLayout;
use crate::tokens::Tokens;
use candle_core::{CpuStorage, CustomOp2, DType, Device, Layout, Shape, Tensor, WithDType};
use candle_cp_kernels::{CausalConv, ConvActivation, ConvRow, Real};
pub(crate) use halo::HaloPlan;
use std::sync::{Arc, Mutex, PoisonError};

/// See [`crate::CpContext::causal_conv`].
pub(crate) fn causal_conv(
    comm: &Arc<dyn Communicator>,
    layout: &SequenceLayout,
    tokens: &Tokens,
    x: &Tensor,
    weight: &Tensor,
    activation: ConvActivation,
) -> Result<Tensor> {
    let (channels, taps) = check(layout, tokens, comm.rank(), x, weight)?;
    let plan = HaloPlan::new(layout, tokens, comm.rank(), taps);
    let op = Conv { comm: comm.clone(), plan, taps, activation, halo: Mutex::new(None) };
    let weight = weight.reshape((channels, taps))?.contiguous()?;
    Ok(x.contiguous()?.apply_op2(&weight, op)?)
}

/// Returns the channels and the taps.
fn check(layout: &SequenceLayout, tokens: &Tokens, rank: usize, x: &Tensor, weight: &Tensor) -> Result<(usize, usize)> {
    let (batch, len) = (tokens.batch(), layout.local_len(rank));
    let (channels, taps) = match *weight.dims() {
        [channels, taps] | [channels, 1, taps] if channels > 0 && taps > 0 => (channels, taps),
        _ => {
            let allowed = "one filter per channel is [C, K] or [C, 1, K], with at least one tap";
            return Err(Error::argument(
                "weight",
                format!("{:?}", weight.dims()),
                allowed,
                "reshape the filters to [C, K]",
            ));
        }
    };
    if x.dims() != [batch, len, channels] {
        let allowed = format!("this rank has [{batch}, {len}, {channels}], by context and weight");
        let fix = "shard it with the context that convolves, and pass the weight of the same layer";
        return Err(Error::argument("x", format!("{:?}", x.dims()), allowed, fix));
    }
    if let Some(other) = [x, weight].into_iter().find(|x| !x.device().is_cpu()) {
        let given = format!("{:?}", other.device().location());
        let allowed = "the short convolution has no CUDA kernel yet";
        return Err(Error::argument("device", given, allowed, "run this layer on the CPU"));
    }
    if x.dtype() != weight.dtype() {
        let types = format!("{:?} x and {:?} weight", x.dtype(), weight.dtype());
        return Err(Error::argument("dtype", types, "both need the same type", "convert one of them"));
    }
    match x.dtype() {
        DType::F32 | DType::F64 | DType::BF16 | DType::F16 => Ok((channels, taps)),
        other => {
            let allowed = "the short convolution runs in f32, f64, bf16 and f16";
            Err(Error::argument("dtype", format!("{other:?}"), allowed, "convert x and weight"))
        }
    }
}

struct Conv {
    comm: Arc<dyn Communicator>,
    plan: HaloPlan,
    taps: usize,
    activation: ConvActivation,
    /// The rows of the halo, `[H, C]`, from forward.
    halo: Mutex<Option<Tensor>>,
}

impl CustomOp2 for Conv {
    fn name(&self) -> &'static str {
        "causal_conv"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let out = dispatch!(x.dtype(), T => {
            let (x, weight) = (slice::<T>(x, x_layout)?, slice::<T>(weight, weight_layout)?);
            T::to_cpu_storage_owned(self.forward(x, weight)?)
        });
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        d_out: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let d_out = d_out.contiguous()?;
        // Frozen filters need no gradient; every rank knows that and what travels is the same.
        let with_weight = weight.track_op();
        let (d_x, d_weight) = dispatch!(x.dtype(), T => {
            with_cpu_storage(x, |x, xl| with_cpu_storage(weight, |w, wl| with_cpu_storage(&d_out, |d, dl| {
                self.backward::<T>(slice(x, xl)?, slice(w, wl)?, slice(d, dl)?, with_weight)
            })))?
        });
        let d_x = d_x.reshape(x.shape())?;
        Ok((Some(d_x), d_weight.map(|d| d.reshape(weight.shape())).transpose()?))
    }
}

impl Conv {
    fn forward<T: Element>(&self, x: &[T], weight: &[T]) -> Result<Vec<T>> {
        let channels = weight.len() / self.taps;
        let halo = self.plan.fetch(self.comm.as_ref(), x, channels)?;
        let _work = self.comm.trace().span(Row::Compute, "convolution forward");
        let (x, weight, wide_halo) = (T::widen_all(x), T::widen_all(weight), T::widen_all(&halo));
        let rows = self.rows(&x, &wide_halo, channels);
        let mut out = vec![<T::Acc as Real>::ZERO; x.len()];
        let mut places = self.places(out.chunks_mut(channels), std::iter::repeat_with(|| &mut [][..]));
        CausalConv::new(&rows, &weight, self.taps, self.activation).forward(&mut places);
        let shape = (halo.len() / channels, channels);
        let halo = Tensor::from_vec(halo, shape, &Device::Cpu)?;
        *self.halo.lock().unwrap_or_else(PoisonError::into_inner) = Some(halo);
        Ok(T::narrow_all(out))
    }

    /// Gradients of `x` and, if asked, of the weight: this rank's part of it.
    fn backward<T: Element>(
        &self,
        x: &[T],
        weight: &[T],
        d_out: &[T],
        with_weight: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let channels = weight.len() / self.taps;
        let halo = self.halo.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let halo = halo.expect("forward ran before backward").flatten_all()?.to_vec1::<T>()?;
        let work = self.comm.trace().span(Row::Compute, "convolution backward");
        let (x, weight, halo) = (T::widen_all(x), T::widen_all(weight), T::widen_all(&halo));
        let (rows, d_out) = (self.rows(&x, &halo, channels), T::widen_all(d_out));
        let [mut d_x, mut d_halo] = [x.len(), halo.len()].map(|len| vec![<T::Acc as Real>::ZERO; len]);
        let d_out = self.places(d_out.chunks(channels), std::iter::repeat(&[][..]));
        let mut places = self.places(d_x.chunks_mut(channels), d_halo.chunks_mut(channels));
        let conv = CausalConv::new(&rows, &weight, self.taps, self.activation);
        let d_weight = conv.backward(&d_out, &mut places, with_weight);
        drop(work);
        self.plan.give_back(self.comm.as_ref(), &d_halo, &mut d_x, channels)?;
        let tensor = |sums: Vec<T::Acc>| {
            let count = sums.len();
            Tensor::from_vec(T::narrow_all(sums), count, &Device::Cpu)
        };
        Ok((tensor(d_x)?, d_weight.map(tensor).transpose()?))
    }

    /// What is given for the local tokens and the rows of the halo, in the order in which the kernel goes through them:
    /// batch row by batch row, the pieces in local order, each after its halo.
    fn places<R>(&self, local: impl IntoIterator<Item = R>, halo: impl IntoIterator<Item = R>) -> Vec<R> {
        let (mut local, mut halo) = (local.into_iter(), halo.into_iter());
        let mut all = Vec::new();
        for run in self.plan.runs() {
            all.extend(halo.by_ref().take(run.halo));
            all.extend(local.by_ref().take(run.reach.len()));
        }
        all
    }

    fn rows<'a, A>(&self, x: &'a [A], halo: &'a [A], channels: usize) -> Vec<ConvRow<'a, A>> {
        let reach = self.plan.runs().iter().flat_map(|run| &run.reach);
        let local = x.chunks(channels).zip(reach).map(|(x, &reach)| ConvRow { x, reach });
        self.places(local, halo.chunks(channels).map(|x| ConvRow { x, reach: None }))
    }
}
