//! How ranks talk: a small trait, one rank alone, ranks as threads, and how ranks that are processes meet.

mod local;
mod mailbox;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod rendezvous;
pub mod threads;

pub use local::Local;

use crate::error::{Error, Result};
use candle_core::{DType, Tensor};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a message is for. Counters are kept per kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Traffic {
    /// Keys and values on their way to the ranks that need them.
    KeyValue,
    /// Gradients of keys and values on their way back to their owner.
    KeyValueGradient,
    /// What pieces of a sequence do to the state of a recurrence.
    State,
    /// Gradients of the state of a recurrence.
    StateGradient,
    /// Tokens before a piece of a sequence, for an operator that looks a few tokens back.
    Halo,
    /// Gradients of those tokens on their way back to their owner.
    HaloGradient,
    /// Sums over ranks.
    AllReduce,
    /// Gathered slices.
    Gather,
    /// From one rank to all.
    Broadcast,
    /// No payload.
    Barrier,
}

/// Identifies one exchange, so that ranks which are out of step notice instead of mixing data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// What the message is for.
    pub traffic: Traffic,
    /// Number of the call; the same on all ranks.
    pub call: u64,
    /// Step inside the call.
    pub step: usize,
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:?} (call {}, step {})", self.traffic, self.call, self.step)
    }
}

/// A message that this rank expects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Sender.
    pub from: usize,
    /// Shape of the tensor; `None` accepts any.
    pub shape: Option<Vec<usize>>,
    /// Type of the tensor.
    pub dtype: DType,
}

/// A received tensor. While it lives its bytes count as alive on this rank.
#[derive(Debug)]
pub struct Received {
    /// The data: contiguous, without a graph.
    pub tensor: Tensor,
    /// Released on drop.
    pub(crate) _alive: Box<dyn Any + Send>,
}

/// An exchange that was posted.
pub trait Pending {
    /// Waits until the expected message is here and the sent one has been taken. `None` if nothing was expected.
    ///
    /// # Errors
    /// A peer that failed, left, sent something else, or stayed silent past the deadline.
    fn wait(self: Box<Self>) -> Result<Option<Received>>;
}

/// Bytes, messages and waits of one kind of traffic, since the communicator was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counter {
    /// Messages sent by this rank.
    pub messages_sent: usize,
    /// Bytes sent by this rank.
    pub bytes_sent: usize,
    /// Bytes received by this rank.
    pub bytes_received: usize,
    /// Bytes of received tensors and of sent ones not yet taken, now.
    pub bytes_alive: usize,
    /// The largest value that `bytes_alive` had.
    pub peak_bytes_alive: usize,
    /// Time in [`Pending::wait`]: this rank could not go on for want of its peers.
    pub waited: Duration,
}

/// Counters by kind of traffic.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CommStats(BTreeMap<Traffic, Counter>);

impl CommStats {
    /// Counter of one kind; zeros if there was no such traffic.
    pub fn of(&self, traffic: Traffic) -> Counter {
        self.0.get(&traffic).copied().unwrap_or_default()
    }

    /// Bytes sent, all kinds.
    pub fn bytes_sent(&self) -> usize {
        self.0.values().map(|c| c.bytes_sent).sum()
    }

    /// Time in [`Pending::wait`], all kinds: point to point, collectives and barriers.
    pub fn waited(&self) -> Duration {
        self.0.values().map(|c| c.waited).sum()
    }

    fn entry(&mut self, traffic: Traffic) -> &mut Counter {
        self.0.entry(traffic).or_default()
    }
}

/// A group of ranks. Every rank has to make the same calls in the same order.
///
/// Collectives are built on [`Communicator::exchange`]; a backend may replace them by its own.
pub trait Communicator: Send + Sync + Debug {
    /// This rank, `0..size`.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn size(&self) -> usize;

    /// A number for the next call, the same on all ranks.
    fn next_call(&self) -> u64;

    /// Posts a send and a receive and returns at once. Sent tensors are contiguous and must not change until the
    /// exchange is waited for.
    ///
    /// # Errors
    /// A peer outside of the group, or a group that has already failed.
    fn exchange(&self, tag: Tag, send: Option<(usize, Tensor)>, receive: Option<Expected>) -> Result<Box<dyn Pending>>;

    /// Counters since the start.
    fn stats(&self) -> CommStats;

    /// Slices of all ranks, in rank order; they may differ in size along `dim` only.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    fn all_gather_uneven(&self, x: &Tensor, dim: usize, traffic: Traffic) -> Result<Vec<Tensor>> {
        let (rank, size, call) = (self.rank(), self.size(), self.next_call());
        let x = x.detach().contiguous()?;
        let mut pending = Vec::with_capacity(size);
        for step in 1..size {
            let from = (rank + size - step) % size;
            let expected = Expected { from, shape: None, dtype: x.dtype() };
            let tag = Tag { traffic, call, step };
            let exchange = self.exchange(tag, Some(((rank + step) % size, x.clone())), Some(expected))?;
            pending.push((tag, from, exchange));
        }
        let mut slices = vec![x.clone(); size];
        for (tag, from, exchange) in pending {
            let received = exchange.wait()?.expect("a message was expected").tensor;
            let same = |t: &Tensor| t.dims().iter().enumerate().filter(|(i, _)| *i != dim).map(|(_, &n)| n).collect();
            let (mine, theirs): (Vec<usize>, Vec<usize>) = (same(&x), same(&received));
            if mine != theirs || x.rank() != received.rank() {
                return Err(Error::Mismatch {
                    rank,
                    operation: tag.to_string(),
                    peer: from,
                    expected: match dim < x.rank() {
                        true => format!("{:?} up to dimension {dim}", x.dims()),
                        false => format!("{:?}", x.dims()),
                    },
                    sent: format!("{:?}", received.dims()),
                });
            }
            slices[from] = received;
        }
        Ok(slices)
    }

    /// Tensors of one shape from all ranks, in rank order.
    ///
    /// # Errors
    /// As [`Pending::wait`]; shapes that differ.
    fn all_gather(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        self.all_gather_uneven(x, usize::MAX, Traffic::Gather)
    }

    /// The sum over ranks, the same bits on every rank: each element is added up once, in rank order.
    ///
    /// # Errors
    /// As [`Communicator::all_gather`].
    fn all_reduce_sum(&self, x: &Tensor) -> Result<Tensor> {
        let (rank, size) = (self.rank(), self.size());
        if size == 1 {
            return Ok(x.detach());
        }
        let flat = x.detach().contiguous()?.flatten_all()?;
        let count = flat.elem_count();
        let part = |r: usize| (r * count / size, (r + 1) * count / size - r * count / size);
        let call = self.next_call();
        let mut pending = Vec::with_capacity(size);
        for step in 1..size {
            let (to, from) = ((rank + step) % size, (rank + size - step) % size);
            let ((start, len), expected) = (part(to), vec![part(rank).1]);
            let send = flat.narrow(0, start, len)?.contiguous()?;
            let expected = Expected { from, shape: Some(expected), dtype: x.dtype() };
            let tag = Tag { traffic: Traffic::AllReduce, call, step };
            pending.push((from, self.exchange(tag, Some((to, send)), Some(expected))?));
        }
        let (start, len) = part(rank);
        let mut parts = vec![flat.narrow(0, start, len)?; size];
        for (from, exchange) in pending {
            parts[from] = exchange.wait()?.expect("a message was expected").tensor;
        }
        let mut sum = parts[0].clone();
        for part in &parts[1..] {
            sum = (&sum + part)?;
        }
        let sums = self.all_gather_uneven(&sum, 0, Traffic::AllReduce)?;
        Ok(Tensor::cat(&sums, 0)?.reshape(x.shape())?)
    }

    /// The tensor of rank `root`, which all ranks get; the others pass one of the same shape and type.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        let (rank, call) = (self.rank(), self.next_call());
        let x = x.detach().contiguous()?;
        let tag = Tag { traffic: Traffic::Broadcast, call, step: 0 };
        if rank == root {
            let others = (0..self.size()).filter(|&r| r != root);
            let posted =
                others.map(|to| self.exchange(tag, Some((to, x.clone())), None)).collect::<Result<Vec<_>>>()?;
            for exchange in posted {
                exchange.wait()?;
            }
            return Ok(x);
        }
        let expected = Expected { from: root, shape: Some(x.dims().to_vec()), dtype: x.dtype() };
        let received = self.exchange(tag, None, Some(expected))?.wait()?;
        Ok(received.expect("a message was expected").tensor)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    fn barrier(&self) -> Result<()> {
        let token = Tensor::zeros(1, DType::U8, &candle_core::Device::Cpu)?;
        self.all_gather_uneven(&token, usize::MAX, Traffic::Barrier)?;
        Ok(())
    }
}

/// Counters shared with the guards of received tensors.
#[derive(Debug, Default)]
pub(crate) struct Counters(Mutex<CommStats>);

impl Counters {
    pub fn snapshot(&self) -> CommStats {
        self.lock().clone()
    }

    pub fn sent(&self, traffic: Traffic, bytes: usize) {
        let mut stats = self.lock();
        let counter = stats.entry(traffic);
        counter.messages_sent += 1;
        counter.bytes_sent += bytes;
    }

    pub fn received(&self, traffic: Traffic, bytes: usize) {
        self.lock().entry(traffic).bytes_received += bytes;
    }

    pub fn waited(&self, traffic: Traffic, time: Duration) {
        self.lock().entry(traffic).waited += time;
    }

    pub fn grow(&self, traffic: Traffic, bytes: usize) {
        let mut stats = self.lock();
        let counter = stats.entry(traffic);
        counter.bytes_alive += bytes;
        counter.peak_bytes_alive = counter.peak_bytes_alive.max(counter.bytes_alive);
    }

    pub fn shrink(&self, traffic: Traffic, bytes: usize) {
        self.lock().entry(traffic).bytes_alive -= bytes;
    }

    // Plain numbers: a panic elsewhere cannot leave them half-written in a way that matters.
    fn lock(&self) -> std::sync::MutexGuard<'_, CommStats> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Counts a tensor's bytes as alive until it is dropped.
pub(crate) struct Alive {
    counters: Arc<Counters>,
    traffic: Traffic,
    bytes: usize,
}

impl Alive {
    pub fn new(counters: &Arc<Counters>, traffic: Traffic, tensor: &Tensor) -> Self {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        counters.grow(traffic, bytes);
        Self { counters: counters.clone(), traffic, bytes }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.counters.shrink(self.traffic, self.bytes);
    }
}
