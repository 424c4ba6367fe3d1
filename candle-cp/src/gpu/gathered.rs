//! Gathered keys with the kernels of a device: gathering by tensor operations, attending by kernels.

use super::GpuDevice;
use super::ring::{add_rows, narrowed, pack};
use super::session::{BackwardState, ForwardState, Forwarded, Operand, Session};
use super::work::edges;
use crate::comm::{Communicator, Trace};
use crate::error::Result;
use crate::plan::{AttentionPlan, Edge};
use crate::ring::{self, Pass, Wire};
use crate::with_backward::with_backward;
use candle_core::{DType, Tensor};
use candle_cp_kernels::{Order, Shape};
use std::ops::Range;
use std::sync::Arc;

/// The chunks of `k` and `v` (`[B, S, Hkv, D]`, checked) one after the other, in one dimension.
pub(crate) fn gather(
    comm: &Arc<dyn Communicator>,
    plan: &Arc<AttentionPlan>,
    (k, v): (&Tensor, &Tensor),
) -> Result<Tensor> {
    let (batch, _, heads, head_dim) = k.dims4()?;
    let wire = Wire { batch, heads, head_dim, dtype: k.dtype(), gradient_dtype: k.dtype() };
    let [key, value] = [k.detach().transpose(1, 2)?, v.detach().transpose(1, 2)?];
    let mut pass = GatherPass { key, value, chunks: Vec::new() };
    ring::run(comm.as_ref(), plan, wire, false, &mut pass)?;
    let chunks = Tensor::cat(&pass.chunks, 0)?;
    let (comm, plan) = (comm.clone(), plan.clone());
    Ok(with_backward("gather_keys", [k, v], chunks, move |[k, _], d_chunks| {
        let [dk, dv] = home(&comm, &plan, wire, d_chunks)?;
        let of = |sums: &Tensor| narrowed(sums, Order::TokensFirst, k.dtype());
        Ok([Some(of(&dk)?), Some(of(&dv)?)])
    })?)
}

/// Gradients `[B, Hkv, S, D]` in f32 of this rank's keys and values from those of the chunks.
fn home(comm: &Arc<dyn Communicator>, plan: &AttentionPlan, wire: Wire, d_chunks: &Tensor) -> Result<[Tensor; 2]> {
    let mut chunks = split(plan, wire, d_chunks).into_iter();
    let mut sums = chunks.next().expect("the own chunk")?.to_dtype(DType::F32)?;
    ring::give_back(comm.as_ref(), plan, wire, chunks, |ranges, gradient| {
        sums = add_rows(&sums, ranges, &gradient.to_dtype(DType::F32)?)?;
        Ok(())
    })?;
    Ok([sums.get(0)?, sums.get(1)?])
}

/// Every chunk `[2, B, Hkv, keys, D]` of the numbers in one dimension.
fn split(plan: &AttentionPlan, wire: Wire, numbers: &Tensor) -> Vec<Result<Tensor>> {
    let Wire { batch, heads, head_dim, .. } = wire;
    let mut start = 0;
    edges(plan)
        .map(|edge| {
            let shape = (2, batch, heads, edge.key_count(), head_dim);
            let length = 2 * batch * heads * edge.key_count() * head_dim;
            start += length;
            Ok(numbers.detach().narrow(0, start - length, length)?.reshape(shape)?)
        })
        .collect()
}

struct GatherPass {
    key: Tensor,
    value: Tensor,
    /// In one dimension each.
    chunks: Vec<Tensor>,
}

impl Pass for GatherPass {
    const NAME: &'static str = "gather keys";

    fn pack(&self, ranges: &[Range<usize>]) -> Result<Tensor> {
        pack(&self.key, &self.value, ranges)
    }

    fn own(&mut self, edge: &Edge) -> Result<()> {
        self.chunks.push(pack(&self.key, &self.value, &edge.keys)?.flatten_all()?);
        Ok(())
    }

    fn chunk(&mut self, _: &Edge, key_value: &Tensor) -> Result<Option<Tensor>> {
        self.chunks.push(key_value.flatten_all()?);
        Ok(None)
    }

    fn returned(&mut self, _: &[Range<usize>], _: &Tensor) -> Result<()> {
        unreachable!("gathering returns no gradients")
    }
}

/// Attends with `q` (`[B, S, Hq, D]`, checked) to gathered `chunks`.
pub(crate) fn attend_gathered(
    device: Arc<dyn GpuDevice>,
    plan: &Arc<AttentionPlan>,
    (q, chunks): (&Tensor, &Tensor),
    (shape, scale): (Shape, f64),
    trace: Trace,
) -> Result<Tensor> {
    let session = Session::new(device, plan, (shape, Order::TokensFirst), q.dtype(), scale)?;
    let call = Call { session, plan: plan.clone(), trace };
    let forwarded = call.forward(q, chunks)?;
    let out = forwarded.out.clone();
    Ok(with_backward("attend_gathered", [q, chunks], out, move |[q, chunks], d_out| {
        Ok(call.backward(q, chunks, &forwarded, d_out)?.map(Some))
    })?)
}

struct Call {
    session: Session,
    plan: Arc<AttentionPlan>,
    trace: Trace,
}

impl Call {
    fn chunks(&self, numbers: &Tensor) -> Result<Vec<[Operand; 2]>> {
        let Shape { batch, key_heads, head_dim, .. } = self.session.shape;
        let dtype = self.session.dtype;
        let wire = Wire { batch, heads: key_heads, head_dim, dtype, gradient_dtype: dtype };
        let chunks = split(&self.plan, wire, numbers).into_iter();
        chunks.map(|chunk| Operand::pair(self.session.device.as_ref(), &chunk?)).collect()
    }

    fn forward(&self, q: &Tensor, numbers: &Tensor) -> Result<Forwarded> {
        let mut state = ForwardState::new(&self.session, q)?;
        for (i, [key, value]) in self.chunks(numbers)?.iter().enumerate() {
            let _work = ring::work(&self.trace, "attention forward", None, i);
            state.visit(i, key, value)?;
        }
        state.finish()
    }

    fn backward(&self, q: &Tensor, numbers: &Tensor, forwarded: &Forwarded, d_out: &Tensor) -> Result<[Tensor; 2]> {
        let mut state = BackwardState::new(&self.session, q, forwarded, d_out)?;
        let mut d_chunks = Vec::new();
        for (i, ([key, value], edge)) in self.chunks(numbers)?.iter().zip(edges(&self.plan)).enumerate() {
            let _work = ring::work(&self.trace, "attention backward", None, i);
            let gradient = state.visit(i, (key, value), edge.key_count())?;
            d_chunks.push(gradient.flatten_all()?.to_dtype(self.session.dtype)?);
        }
        Ok([state.finish()?, Tensor::cat(&d_chunks, 0)?])
    }
}
