//! Ring attention as a Candle operator with a backward pass.

use crate::comm::Communicator;
use crate::element::{Element, Operand, dispatch, with_cpu_storage};
use crate::error::{Error, Result};
use crate::gpu;
use crate::plan::{AttentionPlan, Edge};
use crate::ring::{self, Pass, Wire};
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Tensor, WithDType};
use candle_cp_kernels::{self as kernels, Bounds, Forward, Gradients, Heads, Order, QueryTile, Real};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Attention of this rank's queries over the keys of all ranks.
///
/// `q_bhsd` is `[B, Hq, S_local, D]`, `k_bhsd` and `v_bhsd` are `[B, Hkv, S_local, D]` with `Hq` a multiple of `Hkv`;
/// query head `h` reads key head `h / (Hq / Hkv)`. Types: f32, f64, bf16, f16, the same for all three; sums run in f32
/// (f64 for f64) throughout. Returns the output `[B, Hq, S_local, D]` and the natural log of the sum of
/// `exp(scale * q.k)` over the allowed keys, `[B, Hq, S_local]` in the accumulation type and without a graph.
///
/// A query without any key gets output 0, log-sum-exp -inf and gradient 0. A NaN in a query or key reaches the outputs
/// of the queries that may see it; a NaN or infinity in a value, and in backward any NaN, may also reach other queries of
/// the same tile.
pub(crate) fn ring_attention(
    comm: &Arc<dyn Communicator>,
    plan: &Arc<AttentionPlan>,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    order: Order,
    scale: f64,
) -> Result<(Tensor, Tensor)> {
    check(plan, q, k, v, order)?;
    if let Some(device) = gpu::device_of(q)? {
        return gpu::ring_attention(device, comm, plan, (q, k, v), order, scale);
    }
    let lse = Arc::new(Mutex::new(None));
    let op = RingAttention { comm: comm.clone(), plan: plan.clone(), order, scale, lse: lse.clone() };
    let out = q.apply_op3(k, v, op)?;
    let lse = lse.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    let stacked = lse.expect("forward stores the log-sum-exp");
    let ([b, hq, s, _], [_, hkv, ..]) = (dims4(q, order)?, dims4(k, order)?);
    let lse = stacked.reshape((b, hkv, s, hq / hkv))?.transpose(2, 3)?.reshape((b, hq, s))?;
    Ok((out, lse))
}

/// `[B, H, S, D]`.
pub(crate) fn dims4(x: &Tensor, order: Order) -> Result<[usize; 4]> {
    let (b, first, second, d) = x.dims4()?;
    Ok(match order {
        Order::HeadsFirst => [b, first, second, d],
        Order::TokensFirst => [b, second, first, d],
    })
}

pub(crate) fn check(plan: &AttentionPlan, q: &Tensor, k: &Tensor, v: &Tensor, order: Order) -> Result<()> {
    let shapes = format!("q {:?}, k {:?}, v {:?}", q.dims(), k.dims(), v.dims());
    let fail = |allowed: String, fix: &str| Err(Error::argument("q, k, v", shapes.clone(), allowed, fix));
    if q.rank() != 4 || k.rank() != 4 || v.dims() != k.dims() {
        let form = if order == Order::HeadsFirst { "[B, H, S, D]" } else { "[B, S, H, D]" };
        return fail(format!("they are {form}, and k and v have one shape"), "project and transpose them so");
    }
    let ([b, hq, s, d], [kb, hkv, ks, kd]) = (dims4(q, order)?, dims4(k, order)?);
    if b != kb || d != kd || d == 0 {
        return fail("q and k have the same batch and head size".into(), "check the projections");
    }
    if hkv == 0 || hq % hkv != 0 || hq == 0 {
        return fail(
            "the query heads are a multiple of the key heads".into(),
            "check the head counts of the configuration",
        );
    }
    let (rows, queries, keys) =
        (plan.bounds().len(), plan.bounds().first().map_or(0, Vec::len), plan.own().key_count());
    if b != rows || s != queries || ks != keys {
        let allowed = format!("this rank has {rows} rows of {queries} queries and {keys} keys");
        return fail(allowed, "shard the tensors with the context that attends");
    }
    if q.dtype() != k.dtype() || q.dtype() != v.dtype() {
        let types = format!("{:?}, {:?}, {:?}", q.dtype(), k.dtype(), v.dtype());
        return Err(Error::argument("dtype", types, "q, k and v need the same type", "convert them"));
    }
    match q.dtype() {
        DType::F32 | DType::F64 | DType::BF16 | DType::F16 => Ok(()),
        other => Err(Error::argument(
            "dtype",
            format!("{other:?}"),
            "attention runs in f32, f64, bf16 and f16",
            "convert q, k, v",
        )),
    }
}

struct RingAttention {
    comm: Arc<dyn Communicator>,
    plan: Arc<AttentionPlan>,
    order: Order,
    scale: f64,
    /// `[B, Hkv, S, G]` in the accumulation type, from forward.
    lse: Arc<Mutex<Option<Tensor>>>,
}

impl CustomOp3 for RingAttention {
    fn name(&self) -> &'static str {
        "ring_attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let out = dispatch!(q.dtype(), T => {
            let q = Operand::<T>::new(q, q_layout, self.order)?;
            let k = Operand::<T>::new(k, k_layout, self.order)?;
            let v = Operand::<T>::new(v, v_layout, self.order)?;
            T::to_cpu_storage_owned(self.forward::<T>(&q, &k, &v)?)
        });
        Ok((out, q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dq, dk, dv) = dispatch!(q.dtype(), T => {
            let order = self.order;
            with_cpu_storage(q, |q, ql| with_cpu_storage(k, |k, kl| with_cpu_storage(v, |v, vl| {
                with_cpu_storage(out, |o, ol| with_cpu_storage(d_out, |d, dl| self.backward::<T>(
                    [&Operand::new(q, ql, order)?, &Operand::new(k, kl, order)?, &Operand::new(v, vl, order)?],
                    [&Operand::new(o, ol, order)?, &Operand::new(d, dl, order)?],
                )))
            })))?
        });
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

impl RingAttention {
    fn forward<T: Element>(&self, q: &Operand<T>, k: &Operand<T>, v: &Operand<T>) -> Result<Vec<T>> {
        let shape = shape(q, k);
        let scale = <T::Acc as Real>::from_f64(self.scale);
        let common = Common { keys: k, values: v, bounds: self.plan.bounds(), scale };
        let mut pass = ForwardPass::<T> { common, q: q.heads(), state: Forward::new(shape) };
        ring::run(self.comm.as_ref(), &self.plan, wire::<T>(k), false, &mut pass)?;
        let (out, lse) = pass.state.finish::<T>(self.order);
        let lse = Tensor::from_vec(lse, shape.rows(), &candle_core::Device::Cpu)?;
        *self.lse.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(lse);
        Ok(out)
    }

    fn backward<T: Element>(
        &self,
        [q, k, v]: [&Operand<T>; 3],
        [out, d_out]: [&Operand<T>; 2],
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let shape = shape(q, k);
        let lse = self.lse.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let lse = lse.expect("forward ran before backward").to_vec1::<T::Acc>()?;
        let d_out = d_out.heads();
        let delta = kernels::output_dot(&out.heads(), &d_out, shape);
        let scale = <T::Acc as Real>::from_f64(self.scale);
        let common = Common { keys: k, values: v, bounds: self.plan.bounds(), scale };
        let length: usize = k.dims().iter().product();
        let mut pass = BackwardPass::<T> {
            common,
            q: q.heads(),
            d_out,
            lse: &lse,
            delta: &delta,
            d_query: Gradients::new(shape),
            d_key_value: vec![<T::Acc as Real>::ZERO; 2 * length],
        };
        ring::run(self.comm.as_ref(), &self.plan, wire::<T>(k), true, &mut pass)?;
        let mut d_key = pass.d_key_value;
        let d_value = d_key.split_off(length);
        let [b, h, s, d] = q.dims();
        let q_dims = match self.order {
            Order::HeadsFirst => (b, h, s, d),
            Order::TokensFirst => (b, s, h, d),
        };
        let dq = Tensor::from_vec(pass.d_query.finish::<T>(self.order), q_dims, &candle_core::Device::Cpu)?;
        let dk = ring::narrowed::<T>(d_key, k.dims(), self.order)?;
        let dv = ring::narrowed::<T>(d_value, k.dims(), self.order)?;
        Ok((dq, dk, dv))
    }
}

fn shape<T: Element>(q: &Operand<T>, k: &Operand<T>) -> kernels::Shape {
    let [batch, query_heads, queries, head_dim] = q.dims();
    kernels::Shape { batch, query_heads, key_heads: k.dims()[1], queries, head_dim }
}

fn wire<T: Element>(k: &Operand<T>) -> Wire {
    let [batch, heads, _, head_dim] = k.dims();
    Wire { batch, heads, head_dim, dtype: T::DTYPE, gradient_dtype: <T::Acc as WithDType>::DTYPE }
}

/// What both passes need.
struct Common<'a, T: Element> {
    keys: &'a Operand<'a, T>,
    values: &'a Operand<'a, T>,
    bounds: &'a [Vec<Bounds>],
    scale: T::Acc,
}

/// Hands `f` the keys and values of a chunk `[2, B, Hkv, keys, D]`.
fn with_chunk<T: Element, R>(chunk: &Tensor, f: impl FnOnce(Heads<T>, Heads<T>, usize) -> R) -> Result<R> {
    let dims = chunk.dims();
    let (batch, heads, keys, d) = (dims[1], dims[2], dims[3], dims[4]);
    with_cpu_storage(chunk, |storage, layout| {
        let length = batch * heads * keys * d;
        let data = &storage.as_slice::<T>()?[layout.start_offset()..][..2 * length];
        let (k, v) = data.split_at(length);
        let dims = [batch, heads, keys];
        Ok(f(Heads::contiguous(k, dims, d), Heads::contiguous(v, dims, d), keys))
    })
}

struct ForwardPass<'a, T: Element> {
    common: Common<'a, T>,
    q: Heads<'a, T>,
    state: Forward<T::Acc>,
}

impl<T: Element> ForwardPass<'_, T> {
    fn visit(&mut self, key: Heads<T>, value: Heads<T>, tiles: &[QueryTile]) {
        let Common { bounds, scale, .. } = self.common;
        kernels::forward_chunk(&mut self.state, (&self.q, &key, &value), tiles, bounds, scale);
    }
}

impl<T: Element> Pass for ForwardPass<'_, T> {
    const NAME: &'static str = "attention forward";

    fn pack(&self, ranges: &[Range<usize>]) -> Result<Tensor> {
        ring::pack(self.common.keys, self.common.values, ranges)
    }

    fn own(&mut self, edge: &Edge) -> Result<()> {
        let (keys, values) = (self.common.keys, self.common.values);
        self.visit(keys.heads(), values.heads(), &edge.tiles);
        Ok(())
    }

    fn chunk(&mut self, edge: &Edge, key_value: &Tensor) -> Result<Option<Tensor>> {
        with_chunk::<T, _>(key_value, |key, value, _| self.visit(key, value, &edge.tiles))?;
        Ok(None)
    }

    fn returned(&mut self, _: &[Range<usize>], _: &Tensor) -> Result<()> {
        unreachable!("forward returns no gradients")
    }
}

struct BackwardPass<'a, T: Element> {
    common: Common<'a, T>,
    q: Heads<'a, T>,
    d_out: Heads<'a, T>,
    lse: &'a [T::Acc],
    delta: &'a [T::Acc],
    d_query: Gradients<T::Acc>,
    /// `[2, B, Hkv, S_local, D]`.
    d_key_value: Vec<T::Acc>,
}

impl<T: Element> BackwardPass<'_, T> {
    fn visit(
        &mut self,
        key: Heads<T>,
        value: Heads<T>,
        keys: usize,
        tiles: &[QueryTile],
    ) -> (Vec<T::Acc>, Vec<T::Acc>) {
        let Common { bounds, scale, .. } = self.common;
        let (lse, delta) = (self.lse, self.delta);
        let saved = kernels::Saved { query: &self.q, d_out: &self.d_out, lse, delta, bounds, scale };
        kernels::backward_chunk(&mut self.d_query, saved, (&key, &value), keys, tiles)
    }
}

impl<T: Element> Pass for BackwardPass<'_, T> {
    const NAME: &'static str = "attention backward";

    fn pack(&self, ranges: &[Range<usize>]) -> Result<Tensor> {
        ring::pack(self.common.keys, self.common.values, ranges)
    }

    fn own(&mut self, edge: &Edge) -> Result<()> {
        let (keys, values) = (self.common.keys, self.common.values);
        let (mut d_key, d_value) = self.visit(keys.heads(), values.heads(), keys.dims()[2], &edge.tiles);
        d_key.extend(d_value);
        self.d_key_value = d_key;
        Ok(())
    }

    fn chunk(&mut self, edge: &Edge, key_value: &Tensor) -> Result<Option<Tensor>> {
        let gradient = with_chunk::<T, _>(key_value, |key, value, keys| self.visit(key, value, keys, &edge.tiles))?;
        let (mut d_key, d_value) = gradient;
        d_key.extend(d_value);
        Ok(Some(Tensor::from_vec(d_key, key_value.dims(), &candle_core::Device::Cpu)?))
    }

    fn returned(&mut self, ranges: &[Range<usize>], gradient: &Tensor) -> Result<()> {
        let incoming = gradient.flatten_all()?.to_vec1::<T::Acc>()?;
        ring::add_rows(&mut self.d_key_value, self.common.keys.dims(), ranges, &incoming, |x| x);
        Ok(())
    }
}
