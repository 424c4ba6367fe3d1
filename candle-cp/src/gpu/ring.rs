//! The ring with the kernels of a device.

use super::GpuDevice;
use super::session::{BackwardState, ForwardState, Forwarded, Operand, Session};
use crate::comm::Communicator;
use crate::error::Result;
use crate::plan::{AttentionPlan, Edge};
use crate::ring::{self, Pass, Wire};
use crate::with_backward::with_backward;
use candle_core::{DType, Tensor};
use candle_cp_kernels::{Order, Shape};
use std::ops::Range;
use std::sync::Arc;

/// As the CPU's ring attention, on tensors that were checked: output and log-sum-exp `[B, Hq, S_local]`.
pub(crate) fn ring_attention(
    device: Arc<dyn GpuDevice>,
    comm: &Arc<dyn Communicator>,
    plan: &Arc<AttentionPlan>,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    order: Order,
    scale: f64,
) -> Result<(Tensor, Tensor)> {
    let [batch, query_heads, queries, head_dim] = crate::attention::dims4(q, order)?;
    let [_, key_heads, ..] = crate::attention::dims4(k, order)?;
    let shape = Shape { batch, query_heads, key_heads, queries, head_dim };
    let session = Session::new(device, plan, (shape, order), q.dtype(), scale)?;
    let call = Call { session, comm: comm.clone(), plan: plan.clone() };
    let forwarded = call.forward(q, k, v)?;
    let lse = forwarded.lse_bhs(&call.session)?;
    let out = forwarded.out.clone();
    let attached = with_backward("ring_attention", [q, k, v], out, move |[q, k, v], d_out| {
        Ok(call.backward([q, k, v], &forwarded, d_out)?.map(Some))
    })?;
    Ok((attached, lse))
}

struct Call {
    session: Session,
    comm: Arc<dyn Communicator>,
    plan: Arc<AttentionPlan>,
}

impl Call {
    fn wire(&self) -> Wire {
        let Shape { batch, key_heads, head_dim, .. } = self.session.shape;
        Wire { batch, heads: key_heads, head_dim, dtype: self.session.dtype, gradient_dtype: DType::F32 }
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Forwarded> {
        let own = Own::new(&self.session, k, v)?;
        let mut pass = ForwardPass { own, state: ForwardState::new(&self.session, q)?, chunk: 0 };
        ring::run(self.comm.as_ref(), &self.plan, self.wire(), false, &mut pass)?;
        pass.state.finish()
    }

    fn backward(&self, [q, k, v]: [&Tensor; 3], forwarded: &Forwarded, d_out: &Tensor) -> Result<[Tensor; 3]> {
        let own = Own::new(&self.session, k, v)?;
        let state = BackwardState::new(&self.session, q, forwarded, d_out)?;
        let mut pass = BackwardPass { own, state, chunk: 0, d_key_value: None };
        ring::run(self.comm.as_ref(), &self.plan, self.wire(), true, &mut pass)?;
        let d_key_value = pass.d_key_value.take().expect("the own chunk was visited");
        let of = |i: usize| narrowed(&d_key_value.get(i)?, self.session.order, self.session.dtype);
        Ok([pass.state.finish()?, of(0)?, of(1)?])
    }
}

/// Sums `[B, H, S, D]` in the order and type of the operands.
pub(crate) fn narrowed(sums: &Tensor, order: Order, dtype: DType) -> Result<Tensor> {
    let sums = if order == Order::TokensFirst { sums.transpose(1, 2)? } else { sums.clone() };
    Ok(sums.to_dtype(dtype)?.contiguous()?)
}

/// This rank's keys and values.
pub(crate) struct Own {
    /// `[B, Hkv, S, D]`, strided.
    key: Tensor,
    value: Tensor,
    operands: [Operand; 2],
}

impl Own {
    pub fn new(session: &Session, k: &Tensor, v: &Tensor) -> Result<Self> {
        let operands = [session.operand(k)?, session.operand(v)?];
        let heads_first = |x: &Tensor| match session.order {
            Order::HeadsFirst => Ok(x.detach()),
            Order::TokensFirst => x.detach().transpose(1, 2),
        };
        Ok(Self { key: heads_first(k)?, value: heads_first(v)?, operands })
    }

    fn keys(&self) -> Result<usize> {
        Ok(self.key.dim(2)?)
    }

    fn pack(&self, ranges: &[Range<usize>]) -> Result<Tensor> {
        pack(&self.key, &self.value, ranges)
    }
}

/// Keys and values `[B, Hkv, S, D]` in `ranges`, `[2, B, Hkv, keys, D]`.
pub(crate) fn pack(key: &Tensor, value: &Tensor, ranges: &[Range<usize>]) -> Result<Tensor> {
    let part = |x: &Tensor| -> Result<Tensor> {
        let parts: Vec<_> =
            ranges.iter().map(|range| x.narrow(2, range.start, range.len())).collect::<candle_core::Result<_>>()?;
        Ok(if parts.is_empty() { x.narrow(2, 0, 0)? } else { Tensor::cat(&parts, 2)? })
    };
    Ok(Tensor::stack(&[part(key)?, part(value)?], 0)?.contiguous()?)
}

/// Adds what came home for `ranges` to sums of keys and values, `[2, B, Hkv, S, D]`.
pub(crate) fn add_rows(sums: &Tensor, ranges: &[Range<usize>], incoming: &Tensor) -> Result<Tensor> {
    if ranges.len() == 1 && ranges[0] == (0..sums.dim(3)?) {
        return Ok((sums + incoming)?);
    }
    let rows: Vec<u32> = ranges.iter().cloned().flatten().map(|i| i as u32).collect();
    let rows = Tensor::new(rows, sums.device())?;
    Ok(sums.index_add(&rows, &incoming.contiguous()?, 3)?)
}

struct ForwardPass<'a> {
    own: Own,
    state: ForwardState<'a>,
    /// Number of the chunk that comes next.
    chunk: usize,
}

impl Pass for ForwardPass<'_> {
    const NAME: &'static str = "attention forward";

    fn pack(&self, ranges: &[Range<usize>]) -> Result<Tensor> {
        self.own.pack(ranges)
    }

    fn own(&mut self, _: &Edge) -> Result<()> {
        let [key, value] = &self.own.operands;
        self.state.visit(0, key, value)
    }

    fn chunk(&mut self, _: &Edge, key_value: &Tensor) -> Result<Option<Tensor>> {
        self.chunk += 1;
        let [key, value] = Operand::pair(self.state.device(), key_value)?;
        self.state.visit(self.chunk, &key, &value)?;
        Ok(None)
    }

    fn returned(&mut self, _: &[Range<usize>], _: &Tensor) -> Result<()> {
        unreachable!("forward returns no gradients")
    }
}

struct BackwardPass<'a> {
    own: Own,
    state: BackwardState<'a>,
    chunk: usize,
    /// f32 `[2, B, Hkv, S, D]`, from the own chunk on.
    d_key_value: Option<Tensor>,
}

impl Pass for BackwardPass<'_> {
    const NAME: &'static str = "attention backward";

    fn pack(&self, ranges: &[Range<usize>]) -> Result<Tensor> {
        self.own.pack(ranges)
    }

    fn own(&mut self, _: &Edge) -> Result<()> {
        let [key, value] = &self.own.operands;
        self.d_key_value = Some(self.state.visit(0, (key, value), self.own.keys()?)?);
        Ok(())
    }

    fn chunk(&mut self, edge: &Edge, key_value: &Tensor) -> Result<Option<Tensor>> {
        self.chunk += 1;
        let [key, value] = Operand::pair(self.state.device(), key_value)?;
        Ok(Some(self.state.visit(self.chunk, (&key, &value), edge.key_count())?))
    }

    fn returned(&mut self, ranges: &[Range<usize>], gradient: &Tensor) -> Result<()> {
        let sums = self.d_key_value.take().expect("the own chunk comes first");
        self.d_key_value = Some(add_rows(&sums, ranges, gradient)?);
        Ok(())
    }
}
