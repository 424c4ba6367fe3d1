//! Keys and values that travel once and are attended to several times, for models whose layers share them.
//!
//! Gathering is one operator, attending another. What was gathered is an ordinary tensor between them, so the gradients
//! of all layers that read it add up on the rank that read it, and travel back to their owners once.

use crate::attention::{check, dims4};
use crate::comm::{Communicator, Trace};
use crate::element::{Element, Operand, dispatch, with_cpu_storage};
use crate::error::{Error, Result};
use crate::gpu::{self, GpuDevice};
use crate::mask::MaskRule;
use crate::plan::{AttentionPlan, Edge};
use crate::ring::{self, Pass, Wire};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Device, Layout, Shape, Tensor, WithDType};
use candle_cp_kernels::{self as kernels, Forward, Gradients, Heads, Order, Real};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Keys and values of all ranks that this rank's queries need under one mask rule.
///
/// Made by [`CpContext::gather_keys`](crate::CpContext::gather_keys). It holds what a ring would only pass through, so it
/// takes the memory of every key in reach: a window's worth of tokens for a sliding rule, up to the whole row for a
/// causal one.
#[derive(Debug, Clone)]
pub struct GatheredKeys {
    /// This rank's own chunk, then those of the hops, each `[2, B, Hkv, keys, D]`; one dimension.
    chunks: Tensor,
    rule: MaskRule,
    /// The plan that says where the chunks are.
    plan: Arc<AttentionPlan>,
    /// `[B, Hkv, D]`.
    dims: [usize; 3],
    /// Where kernels attend to them; `None` for the CPU's own.
    device: Option<Arc<dyn GpuDevice>>,
}

impl GatheredKeys {
    /// The numbers, as a tensor of one dimension that is part of the graph: what to hand through code that keeps or
    /// replaces tensors, such as recomputation.
    pub fn tensor(&self) -> &Tensor {
        &self.chunks
    }

    /// The same keys and values held by another tensor: a detached copy, a leaf of another graph.
    ///
    /// # Errors
    /// Another shape or type than [`GatheredKeys::tensor`] has.
    pub fn with_tensor(&self, chunks: Tensor) -> Result<Self> {
        if chunks.dims() != self.chunks.dims() || chunks.dtype() != self.chunks.dtype() {
            let given = format!("{:?} {:?}", chunks.dtype(), chunks.dims());
            let allowed = format!("{:?} {:?}", self.chunks.dtype(), self.chunks.dims());
            return Err(Error::argument("chunks", given, allowed, "pass what `tensor` gave, or a copy of it"));
        }
        Ok(Self { chunks, ..self.clone() })
    }

    /// The rule under which they were gathered.
    pub fn rule(&self) -> &MaskRule {
        &self.rule
    }
}

/// Gathers `k` and `v` (`[B, S_local, Hkv, D]`) for kernels of `device`, or of the tensors' own.
pub(crate) fn gather(
    comm: &Arc<dyn Communicator>,
    plan: &Arc<AttentionPlan>,
    rule: &MaskRule,
    (k, v): (&Tensor, &Tensor),
    device: Option<Arc<dyn GpuDevice>>,
) -> Result<GatheredKeys> {
    check(plan, k, k, v, Order::TokensFirst)?;
    let [batch, heads, _, head_dim] = dims4(k, Order::TokensFirst)?;
    let device = match device {
        Some(device) => Some(device),
        None => gpu::device_of(k)?,
    };
    let chunks = match device {
        Some(_) => gpu::gather(comm, plan, (k, v))?,
        None => k.apply_op2(v, Gather { comm: comm.clone(), plan: plan.clone() })?,
    };
    Ok(GatheredKeys { chunks, rule: *rule, plan: plan.clone(), dims: [batch, heads, head_dim], device })
}

/// Attends with `q` (`[B, S_local, Hq, D]`).
pub(crate) fn attend(
    plan: &Arc<AttentionPlan>,
    q: &Tensor,
    keys: &GatheredKeys,
    scale: f64,
    trace: Trace,
) -> Result<Tensor> {
    if !Arc::ptr_eq(plan, &keys.plan) {
        let allowed = "keys that this context gathered";
        return Err(Error::argument("keys", "those of another context", allowed, "gather them once per batch"));
    }
    let [batch, key_heads, head_dim] = keys.dims;
    let [b, query_heads, queries, d] = match q.rank() {
        4 => dims4(q, Order::TokensFirst)?,
        _ => [0; 4],
    };
    let expected = plan.bounds().first().map_or(0, Vec::len);
    let fits = [b, d, queries] == [batch, head_dim, expected];
    if !fits || query_heads == 0 || query_heads % key_heads != 0 || q.dtype() != keys.chunks.dtype() {
        let given = format!("{:?} {:?}", q.dtype(), q.dims());
        let dtype = keys.chunks.dtype();
        let allowed = format!("{dtype:?} [{batch}, {expected}, a multiple of {key_heads}, {head_dim}]");
        return Err(Error::argument("q", given, allowed, "project it like the keys that were gathered"));
    }
    let shape = kernels::Shape { batch, query_heads, key_heads, queries, head_dim };
    if let Some(device) = &keys.device {
        return gpu::attend_gathered(device.clone(), plan, (q, &keys.chunks), (shape, scale), trace);
    }
    let op = AttendGathered { plan: plan.clone(), shape, scale, trace, lse: Arc::default() };
    Ok(q.apply_op2(&keys.chunks, op)?)
}

/// The chunks in the order in which they are kept: what to visit, and where in the numbers they are.
fn chunks(plan: &AttentionPlan, token: usize) -> Vec<(&Edge, Range<usize>)> {
    let received = plan.hops().iter().filter_map(|hop| hop.receive.as_ref()).map(|(_, edge)| edge);
    let mut start = 0;
    let mut place = |edge| {
        let range = start..start + 2 * Edge::key_count(edge) * token;
        start = range.end;
        (edge, range)
    };
    std::iter::once(plan.own()).chain(received).map(&mut place).collect()
}

struct Gather {
    comm: Arc<dyn Communicator>,
    plan: Arc<AttentionPlan>,
}

impl Gather {
    fn forward<T: Element>(&self, keys: &Operand<T>, values: &Operand<T>) -> Result<Vec<T>> {
        let [batch, heads, own, head_dim] = keys.dims();
        let wire = Wire { batch, heads, head_dim, dtype: T::DTYPE, gradient_dtype: T::DTYPE };
        let count = own + self.plan.keys_received();
        let mut pass = GatherPass { keys, values, numbers: Vec::with_capacity(2 * batch * heads * count * head_dim) };
        ring::run(self.comm.as_ref(), &self.plan, wire, false, &mut pass)?;
        Ok(pass.numbers)
    }

    /// Gradients of keys and values from that of the chunks: the own ones, and what comes home.
    fn backward<T: Element>(&self, keys: &Operand<T>, d_chunks: &[T]) -> Result<(Tensor, Tensor)> {
        let [batch, heads, own, head_dim] = keys.dims();
        let wire = Wire { batch, heads, head_dim, dtype: T::DTYPE, gradient_dtype: T::DTYPE };
        let chunks = chunks(&self.plan, batch * heads * head_dim);
        let (_, first) = &chunks[0];
        let mut sums: Vec<T::Acc> = d_chunks[first.clone()].iter().map(|&x| x.widen()).collect();
        let gradients = chunks[1..].iter().map(|(edge, range)| {
            let shape = (2, batch, heads, edge.key_count(), head_dim);
            Ok(Tensor::from_slice(&d_chunks[range.clone()], shape, &Device::Cpu)?)
        });
        ring::give_back(self.comm.as_ref(), &self.plan, wire, gradients, |ranges, gradient| {
            let incoming = gradient.flatten_all()?.to_vec1::<T>()?;
            ring::add_rows(&mut sums, keys.dims(), ranges, &incoming, T::widen);
            Ok(())
        })?;
        let d_values = sums.split_off(batch * heads * own * head_dim);
        let narrowed = |sums| ring::narrowed::<T>(sums, keys.dims(), Order::TokensFirst);
        Ok((narrowed(sums)?, narrowed(d_values)?))
    }
}

impl CustomOp2 for Gather {
    fn name(&self) -> &'static str {
        "gather_keys"
    }

    fn cpu_fwd(
        &self,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        dispatch!(k.dtype(), T => {
            let k = Operand::<T>::new(k, k_layout, Order::TokensFirst)?;
            let v = Operand::<T>::new(v, v_layout, Order::TokensFirst)?;
            let numbers = self.forward(&k, &v)?;
            let shape = Shape::from(numbers.len());
            Ok((T::to_cpu_storage_owned(numbers), shape))
        })
    }

    fn bwd(
        &self,
        k: &Tensor,
        _: &Tensor,
        _: &Tensor,
        d_chunks: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let d_chunks = d_chunks.contiguous()?;
        let (dk, dv) = dispatch!(k.dtype(), T => with_cpu_storage(k, |k, kl| {
            with_cpu_storage(&d_chunks, |d, dl| {
                let numbers = &d.as_slice::<T>()?[dl.start_offset()..];
                self.backward::<T>(&Operand::new(k, kl, Order::TokensFirst)?, numbers)
            })
        })?);
        Ok((Some(dk), Some(dv)))
    }
}

/// Collects the chunks as they arrive.
struct GatherPass<'a, T: Element> {
    keys: &'a Operand<'a, T>,
    values: &'a Operand<'a, T>,
    numbers: Vec<T>,
}

impl<T: Element> Pass for GatherPass<'_, T> {
    const NAME: &'static str = "gather keys";

    fn pack(&self, ranges: &[Range<usize>]) -> Result<Tensor> {
        ring::pack(self.keys, self.values, ranges)
    }

    fn own(&mut self, edge: &Edge) -> Result<()> {
        ring::pack_into(&mut self.numbers, self.keys, self.values, &edge.keys);
        Ok(())
    }

    fn chunk(&mut self, _: &Edge, key_value: &Tensor) -> Result<Option<Tensor>> {
        with_cpu_storage(key_value, |storage, layout| {
            let numbers = &storage.as_slice::<T>()?[layout.start_offset()..][..layout.shape().elem_count()];
            self.numbers.extend_from_slice(numbers);
            Ok(None)
        })
    }

    fn returned(&mut self, _: &[Range<usize>], _: &Tensor) -> Result<()> {
        unreachable!("gathering returns no gradients")
    }
}

struct AttendGathered {
    plan: Arc<AttentionPlan>,
    shape: kernels::Shape,
    scale: f64,
    trace: Trace,
    /// `[B, Hkv, S, G]` in the accumulation type, from forward.
    lse: Arc<Mutex<Option<Tensor>>>,
}

impl AttendGathered {
    /// Keys, values and what to visit, chunk by chunk.
    fn chunks<'a, T: Element>(
        &'a self,
        numbers: &'a [T],
    ) -> impl Iterator<Item = (&'a Edge, Heads<'a, T>, Heads<'a, T>)> {
        let kernels::Shape { batch, key_heads, head_dim, .. } = self.shape;
        chunks(&self.plan, batch * key_heads * head_dim).into_iter().map(move |(edge, range)| {
            let (key, value) = numbers[range.clone()].split_at(range.len() / 2);
            let heads = |x| Heads::contiguous(x, [batch, key_heads, edge.key_count()], head_dim);
            (edge, heads(key), heads(value))
        })
    }

    fn forward<T: Element>(&self, q: &Operand<T>, numbers: &[T]) -> Result<Vec<T>> {
        let scale = <T::Acc as Real>::from_f64(self.scale);
        let (q, bounds) = (q.heads(), self.plan.bounds());
        let mut state = Forward::new(self.shape);
        for (hop, (edge, key, value)) in self.chunks(numbers).enumerate() {
            let _work = ring::work(&self.trace, "attention forward", None, hop);
            kernels::forward_chunk(&mut state, (&q, &key, &value), &edge.tiles, bounds, scale);
        }
        let (out, lse) = state.finish::<T>(Order::TokensFirst);
        let lse = Tensor::from_vec(lse, self.shape.rows(), &Device::Cpu)?;
        *self.lse.lock().unwrap_or_else(PoisonError::into_inner) = Some(lse);
        Ok(out)
    }

    /// Gradients of the queries and of the chunks.
    fn backward<T: Element>(
        &self,
        q: &Operand<T>,
        numbers: &[T],
        [out, d_out]: [&Operand<T>; 2],
    ) -> Result<(Tensor, Tensor)> {
        let lse = self.lse.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let lse = lse.expect("forward ran before backward").to_vec1::<T::Acc>()?;
        let (query, d_out) = (q.heads(), d_out.heads());
        let delta = kernels::output_dot(&out.heads(), &d_out, self.shape);
        let (bounds, scale) = (self.plan.bounds(), <T::Acc as Real>::from_f64(self.scale));
        let mut d_query = Gradients::new(self.shape);
        let mut d_chunks = Vec::with_capacity(numbers.len());
        for (hop, (edge, key, value)) in self.chunks(numbers).enumerate() {
            let _work = ring::work(&self.trace, "attention backward", None, hop);
            let saved = kernels::Saved { query: &query, d_out: &d_out, lse: &lse, delta: &delta, bounds, scale };
            let (d_key, d_value) =
                kernels::backward_chunk(&mut d_query, saved, (&key, &value), edge.key_count(), &edge.tiles);
            d_chunks.extend(T::narrow_all(d_key));
            d_chunks.extend(T::narrow_all(d_value));
        }
        let [batch, heads, queries, head_dim] = q.dims();
        let dq = d_query.finish::<T>(Order::TokensFirst);
        let dq = Tensor::from_vec(dq, (batch, queries, heads, head_dim), &Device::Cpu)?;
        let length = d_chunks.len();
        Ok((dq, Tensor::from_vec(d_chunks, length, &Device::Cpu)?))
    }
}

impl CustomOp2 for AttendGathered {
    fn name(&self) -> &'static str {
        "attend_gathered"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        kv: &CpuStorage,
        kv_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let out = dispatch!(q.dtype(), T => {
            let q = Operand::<T>::new(q, q_layout, Order::TokensFirst)?;
            T::to_cpu_storage_owned(self.forward::<T>(&q, numbers(kv, kv_layout)?)?)
        });
        Ok((out, q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        kv: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let order = Order::TokensFirst;
        let (dq, d_chunks) = dispatch!(q.dtype(), T => {
            with_cpu_storage(q, |q, ql| with_cpu_storage(kv, |kv, kl| {
                with_cpu_storage(out, |o, ol| with_cpu_storage(d_out, |d, dl| self.backward::<T>(
                    &Operand::new(q, ql, order)?,
                    numbers(kv, kl)?,
                    [&Operand::new(o, ol, order)?, &Operand::new(d, dl, order)?],
                )))
            }))?
        });
        Ok((Some(dq), Some(d_chunks)))
    }
}

/// The numbers of a tensor of one dimension.
fn numbers<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => candle_core::bail!("gathered keys have to be contiguous"),
    }
}
