//! The ring, written once for forward and backward.
//!
//! At step `d` a rank sends the keys that the rank `d` places ahead needs and receives those it needs from `d` places
//! behind. The exchange of a step is posted before the chunk of the step before is computed, so that both go on at
//! once; a rank holds at most the chunk it works on and the one in flight.

use crate::comm::{Communicator, Expected, OpenSpan, Pending, Received, Row, Tag, Trace, Traffic};
use crate::element::{Element, Operand};
use crate::error::Result;
use crate::plan::{AttentionPlan, Edge, Hop};
use candle_core::{DType, Device, Tensor};
use candle_cp_kernels::{Heads, Order};
use std::ops::{AddAssign, Range};

/// What travels: shape of keys and values, apart from the number of keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wire {
    pub batch: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// Type of keys and values.
    pub dtype: DType,
    /// Type of their gradients on the way back.
    pub gradient_dtype: DType,
}

impl Wire {
    /// `[2, B, Hkv, keys, D]`: keys, then values.
    fn shape(&self, keys: usize) -> Vec<usize> {
        vec![2, self.batch, self.heads, keys, self.head_dim]
    }
}

/// What a pass does with the chunks.
pub(crate) trait Pass {
    /// What it is called in a trace.
    const NAME: &'static str;
    /// This rank's keys and values in `ranges`, `[2, B, Hkv, keys, D]`.
    fn pack(&self, ranges: &[Range<usize>]) -> Result<Tensor>;
    /// Works on this rank's own keys.
    fn own(&mut self, edge: &Edge) -> Result<()>;
    /// Works on a chunk that arrived. In backward, returns the gradient of the chunk, of the same shape.
    fn chunk(&mut self, edge: &Edge, key_value: &Tensor) -> Result<Option<Tensor>>;
    /// Adds a gradient of this rank's own keys and values in `ranges`.
    fn returned(&mut self, ranges: &[Range<usize>], gradient: &Tensor) -> Result<()>;
}

/// Takes `pass` around the ring. `backward` says that gradients come back.
pub(crate) fn run<P: Pass>(
    comm: &dyn Communicator,
    plan: &AttentionPlan,
    wire: Wire,
    backward: bool,
    pass: &mut P,
) -> Result<()> {
    let (call, trace) = (comm.next_call(), comm.trace());
    let work = |hop| work(&trace, P::NAME, Some(call), hop);
    let ring = Ring { comm, wire, call };
    let mut hops = plan.hops().iter();
    let mut ahead = hops.next().map(|hop| Ok::<_, crate::Error>((hop, ring.post(hop, pass)?))).transpose()?;
    {
        let _work = work(0);
        pass.own(plan.own())?;
    }
    let mut returning: Option<(&Hop, Box<dyn Pending>)> = None;
    while let Some((hop, posted)) = ahead.take() {
        let chunk = posted.wait()?;
        ahead = hops.next().map(|hop| Ok::<_, crate::Error>((hop, ring.post(hop, pass)?))).transpose()?;
        let gradient = match (&hop.receive, chunk) {
            (Some((_, edge)), Some(chunk)) => {
                let _work = work(hop.distance);
                pass.chunk(edge, &chunk.tensor)?
            }
            _ => None,
        };
        if backward {
            finish_return(returning.take(), pass)?;
            returning = Some((hop, ring.post_return(hop, gradient)?));
        }
    }
    finish_return(returning, pass)
}

/// A span of work on one chunk: the own one is that of hop 0. Without a call, nothing travels.
pub(crate) fn work(trace: &Trace, name: &'static str, call: Option<u64>, hop: usize) -> OpenSpan {
    let span = trace.span(Row::Compute, name);
    let span = call.into_iter().fold(span, |span, call| span.with("call", call));
    span.with("step", hop as u64)
}

/// The way back alone: `gradients` are those of the chunks that arrived in an earlier [`run`], in the order of the hops;
/// `returned` gets what comes home.
pub(crate) fn give_back(
    comm: &dyn Communicator,
    plan: &AttentionPlan,
    wire: Wire,
    gradients: impl IntoIterator<Item = Result<Tensor>>,
    mut returned: impl FnMut(&[Range<usize>], &Tensor) -> Result<()>,
) -> Result<()> {
    let call = comm.next_call();
    let ring = Ring { comm, wire, call };
    let mut gradients = gradients.into_iter();
    let mut returning: Option<(&Hop, Box<dyn Pending>)> = None;
    for hop in plan.hops() {
        let gradient = hop.receive.as_ref().and_then(|_| gradients.next()).transpose()?;
        let posted = ring.post_return(hop, gradient)?;
        take_home(returning.replace((hop, posted)), &mut returned)?;
    }
    take_home(returning, &mut returned)
}

fn finish_return(returning: Option<(&Hop, Box<dyn Pending>)>, pass: &mut impl Pass) -> Result<()> {
    take_home(returning, |ranges, gradient| pass.returned(ranges, gradient))
}

fn take_home(
    returning: Option<(&Hop, Box<dyn Pending>)>,
    returned: impl FnOnce(&[Range<usize>], &Tensor) -> Result<()>,
) -> Result<()> {
    let Some((hop, posted)) = returning else { return Ok(()) };
    match (&hop.send, posted.wait()?.as_ref()) {
        (Some((_, ranges)), Some(Received { tensor, .. })) => returned(ranges, tensor),
        _ => Ok(()),
    }
}

/// Keys and values in `ranges`, `[2, B, Hkv, keys, D]`.
pub(crate) fn pack<T: Element>(keys: &Operand<T>, values: &Operand<T>, ranges: &[Range<usize>]) -> Result<Tensor> {
    let [batch, heads, _, head_dim] = keys.dims();
    let count: usize = ranges.iter().map(Range::len).sum();
    let mut numbers = Vec::with_capacity(2 * batch * heads * count * head_dim);
    pack_into(&mut numbers, keys, values, ranges);
    Ok(Tensor::from_vec(numbers, (2, batch, heads, count, head_dim), &Device::Cpu)?)
}

/// As [`pack`], at the end of `numbers`.
pub(crate) fn pack_into<T: Element>(
    numbers: &mut Vec<T>,
    keys: &Operand<T>,
    values: &Operand<T>,
    ranges: &[Range<usize>],
) {
    let [batch, heads, ..] = keys.dims();
    for operand in [keys.heads(), values.heads()] {
        for b in 0..batch {
            for h in 0..heads {
                for token in ranges.iter().cloned().flatten() {
                    numbers.extend_from_slice(operand.token(b, h, token));
                }
            }
        }
    }
}

/// Adds what came home for `ranges` to sums of keys and values `[2, B, Hkv, keys, D]`; `dims` is `[B, Hkv, keys, D]`.
pub(crate) fn add_rows<A: AddAssign, X: Copy>(
    sums: &mut [A],
    [batch, heads, keys, head_dim]: [usize; 4],
    ranges: &[Range<usize>],
    incoming: &[X],
    widen: impl Fn(X) -> A,
) {
    let mut rows = incoming.chunks(head_dim);
    for head in 0..2 * batch * heads {
        for token in ranges.iter().cloned().flatten() {
            let start = (head * keys + token) * head_dim;
            let row = rows.next().expect("the shape of the message was checked");
            sums[start..start + head_dim].iter_mut().zip(row).for_each(|(sum, &x)| *sum += widen(x));
        }
    }
}

/// Sums `[B, H, S, D]` as a tensor of the operands' type and order.
pub(crate) fn narrowed<T: Element>(sums: Vec<T::Acc>, [b, h, s, d]: [usize; 4], order: Order) -> Result<Tensor> {
    let device = Device::Cpu;
    Ok(match order {
        Order::HeadsFirst => Tensor::from_vec(T::narrow_all(sums), (b, h, s, d), &device)?,
        Order::TokensFirst => {
            let view = Heads::contiguous(&sums, [b, h, s], d);
            let token = |row, head, token| view.token(row, head, token);
            Tensor::from_vec(order.collect([b, h, s], d, token, T::narrow), (b, s, h, d), &device)?
        }
    })
}

struct Ring<'a> {
    comm: &'a dyn Communicator,
    wire: Wire,
    call: u64,
}

impl Ring<'_> {
    fn post(&self, hop: &Hop, pass: &impl Pass) -> Result<Box<dyn Pending>> {
        let send = match &hop.send {
            Some((to, ranges)) => Some((*to, pass.pack(ranges)?)),
            None => None,
        };
        let receive = hop.receive.as_ref().map(|(from, edge)| Expected {
            from: *from,
            shape: Some(self.wire.shape(edge.key_count())),
            dtype: self.wire.dtype,
        });
        self.comm.exchange(Tag { traffic: Traffic::KeyValue, call: self.call, step: hop.distance }, send, receive)
    }

    /// The way back of a hop: what was received goes home as a gradient.
    fn post_return(&self, hop: &Hop, gradient: Option<Tensor>) -> Result<Box<dyn Pending>> {
        let send = hop.receive.as_ref().map(|(from, _)| *from).zip(gradient);
        let receive = hop.send.as_ref().map(|(to, ranges)| Expected {
            from: *to,
            shape: Some(self.wire.shape(ranges.iter().map(Range::len).sum())),
            dtype: self.wire.gradient_dtype,
        });
        self.comm.exchange(
            Tag { traffic: Traffic::KeyValueGradient, call: self.call, step: hop.distance },
            send,
            receive,
        )
    }
}
