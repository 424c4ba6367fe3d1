//! One attention call on a device: its operands, state and launches, chunk by chunk.

use super::work::{PlanWork, work};
use super::{DeviceBuffer, GpuDevice, kernels};
use crate::error::Result;
use crate::plan::AttentionPlan;
use candle_core::{D, DType, Tensor};
use candle_cp_kernels::gpu::{DeviceView, Direction, Grads, Kernels, Launch, State};
use candle_cp_kernels::{Order, Shape};
use std::sync::Arc;

/// A tensor `[B, H, S, D]` (in either order) in device memory.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub view: DeviceView,
    _memory: DeviceBuffer,
}

impl Operand {
    pub fn new(device: &dyn GpuDevice, x: &Tensor, order: Order) -> Result<Self> {
        let dense = x.dim(D::Minus1)? <= 1 || x.stride().last() == Some(&1);
        let x = if dense { x.detach() } else { x.detach().contiguous()? };
        let stride = x.stride();
        let strides = match order {
            Order::HeadsFirst => [stride[0], stride[1], stride[2]],
            Order::TokensFirst => [stride[0], stride[2], stride[1]],
        };
        let memory = device.import(&x)?;
        Ok(Self { view: DeviceView { address: memory.address, strides }, _memory: memory })
    }

    /// Keys and values of a chunk `[2, B, Hkv, keys, D]`.
    pub fn pair(device: &dyn GpuDevice, chunk: &Tensor) -> Result<[Self; 2]> {
        let part = |i| Self::new(device, &chunk.get(i)?, Order::HeadsFirst);
        Ok([part(0)?, part(1)?])
    }
}

/// What both passes of a call share.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    pub device: Arc<dyn GpuDevice>,
    pub kernels: Kernels,
    pub shape: Shape,
    pub order: Order,
    scale: f32,
    work: Arc<PlanWork>,
    pub dtype: DType,
}

/// Results of forward that backward reads.
#[derive(Debug, Clone)]
pub(crate) struct Forwarded {
    /// In the order of the session.
    pub out: Tensor,
    /// `[B, Hkv, Sq, G]`.
    pub lse: DeviceBuffer,
}

impl Session {
    pub fn new(
        device: Arc<dyn GpuDevice>,
        plan: &AttentionPlan,
        (shape, order): (Shape, Order),
        dtype: DType,
        scale: f64,
    ) -> Result<Self> {
        let kernels = kernels(device.as_ref(), dtype, shape.head_dim)?;
        let work = work(device.as_ref(), plan, shape.group(), &kernels)?;
        Ok(Self { device, kernels, shape, order, scale: scale as f32, work, dtype })
    }

    pub fn operand(&self, x: &Tensor) -> Result<Operand> {
        Operand::new(self.device.as_ref(), x, self.order)
    }

    fn zeros(&self, count: usize) -> Result<DeviceBuffer> {
        self.device.zeros(count, DType::F32)
    }

    fn run(&self, launch: Launch) -> Result<()> {
        if launch.grid.contains(&0) { Ok(()) } else { self.device.launch(&self.kernels, &launch) }
    }

    /// Dimensions of the queries in the order of the session.
    fn query_dims(&self) -> [usize; 4] {
        let Shape { batch, query_heads, queries, head_dim, .. } = self.shape;
        match self.order {
            Order::HeadsFirst => [batch, query_heads, queries, head_dim],
            Order::TokensFirst => [batch, queries, query_heads, head_dim],
        }
    }
}

/// The running state of forward.
pub(crate) struct ForwardState<'a> {
    session: &'a Session,
    query: Operand,
    _buffers: [DeviceBuffer; 3],
    state: State,
}

impl<'a> ForwardState<'a> {
    pub fn new(session: &'a Session, q: &Tensor) -> Result<Self> {
        let rows = session.shape.rows();
        let buffers = [session.zeros(rows * session.shape.head_dim)?, session.zeros(rows)?, session.zeros(rows)?];
        let [out, max, sum] = [0, 1, 2].map(|i: usize| buffers[i].address);
        Ok(Self { session, query: session.operand(q)?, _buffers: buffers, state: State { out, max, sum } })
    }

    pub fn device(&self) -> &dyn GpuDevice {
        self.session.device.as_ref()
    }

    /// Continues with chunk number `chunk` of the plan.
    pub fn visit(&mut self, chunk: usize, key: &Operand, value: &Operand) -> Result<()> {
        let Session { kernels, shape, scale, work, .. } = self.session;
        let operands = [self.query.view, key.view, value.view];
        let work = work.of(chunk, Direction::Forward);
        self.session.run(Launch::forward(kernels, *shape, operands, self.state, work, *scale))
    }

    pub fn finish(self) -> Result<Forwarded> {
        let session = self.session;
        let (shape, dims) = (session.shape, session.query_dims());
        let memory = session.device.zeros(dims.iter().product(), session.dtype)?;
        let [_, first, second, d] = dims;
        let strides = match session.order {
            Order::HeadsFirst => [first * second * d, second * d, d],
            Order::TokensFirst => [first * second * d, d, second * d],
        };
        let lse = session.zeros(shape.rows())?;
        let view = DeviceView { address: memory.address, strides };
        session.run(Launch::finish(&session.kernels, shape, self.state, view, lse.address))?;
        Ok(Forwarded { out: session.device.export(&memory, session.dtype, dims.to_vec().into())?, lse })
    }
}

impl Forwarded {
    /// `[B, Hq, Sq]`.
    pub fn lse_bhs(&self, session: &Session) -> Result<Tensor> {
        let Shape { batch, query_heads, key_heads, queries, .. } = session.shape;
        let stacked = (batch, key_heads, queries, query_heads / key_heads);
        let lse = session.device.export(&self.lse, DType::F32, stacked.into())?;
        Ok(lse.transpose(2, 3)?.reshape((batch, query_heads, queries))?)
    }
}

/// The running state of backward.
pub(crate) struct BackwardState<'a> {
    session: &'a Session,
    query: Operand,
    d_out: Operand,
    grads: Grads,
    _buffers: [DeviceBuffer; 2],
    d_query: DeviceBuffer,
}

impl<'a> BackwardState<'a> {
    pub fn new(session: &'a Session, q: &Tensor, forwarded: &Forwarded, d_out: &Tensor) -> Result<Self> {
        let (shape, rows) = (session.shape, session.shape.rows());
        let (query, d_out, out) = (session.operand(q)?, session.operand(d_out)?, session.operand(&forwarded.out)?);
        let (delta, d_query) = (session.zeros(rows)?, session.zeros(rows * shape.head_dim)?);
        let lse = forwarded.lse.clone();
        let grads = Grads { lse: lse.address, delta: delta.address, d_query: d_query.address, ..Grads::default() };
        session.run(Launch::output_dot(&session.kernels, shape, out.view, d_out.view, grads.delta))?;
        Ok(Self { session, query, d_out, grads, _buffers: [lse, delta], d_query })
    }

    pub fn device(&self) -> &dyn GpuDevice {
        self.session.device.as_ref()
    }

    /// Adds to the gradient of the queries; returns that of the chunk's `keys` keys and values, f32
    /// `[2, B, Hkv, keys, D]`.
    pub fn visit(&mut self, chunk: usize, (key, value): (&Operand, &Operand), keys: usize) -> Result<Tensor> {
        let Session { device, kernels, shape, scale, work, .. } = self.session;
        let length = shape.batch * shape.key_heads * keys * shape.head_dim;
        let memory = self.session.zeros(2 * length)?;
        let grads = Grads { d_key: memory.address, d_value: memory.address + 4 * length as u64, ..self.grads };
        let operands = [self.query.view, key.view, value.view, self.d_out.view];
        let by_queries = work.of(chunk, Direction::BackwardQueries);
        self.session.run(Launch::backward_queries(kernels, *shape, operands, grads, by_queries, *scale))?;
        let by_keys = (work.of(chunk, Direction::BackwardKeys), keys);
        self.session.run(Launch::backward_keys(kernels, *shape, operands, grads, by_keys, *scale))?;
        device.export(&memory, DType::F32, (2, shape.batch, shape.key_heads, keys, shape.head_dim).into())
    }

    /// The gradient of the queries in the session's order and type.
    pub fn finish(self) -> Result<Tensor> {
        let session = self.session;
        let Shape { batch, key_heads, queries, head_dim, .. } = session.shape;
        let stacked = (batch, key_heads, queries, session.shape.group(), head_dim);
        let sums = session.device.export(&self.d_query, DType::F32, stacked.into())?;
        let sums = match session.order {
            Order::HeadsFirst => sums.permute((0, 1, 3, 2, 4))?,
            Order::TokensFirst => sums.permute((0, 2, 1, 3, 4))?,
        };
        Ok(sums.contiguous()?.reshape(session.query_dims().to_vec())?.to_dtype(session.dtype)?)
    }
}
