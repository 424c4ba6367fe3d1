//! How ranks talk: a small trait; one rank alone, ranks as threads, and as processes over MPI or NCCL; groups of them.

mod collectives;
mod counters;
mod group;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod header;
#[cfg(any(test, feature = "mpi"))]
mod invitation;
pub mod lifeline;
mod local;
mod mailbox;
mod mesh;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod rendezvous;
pub mod threads;
mod trace;

pub use collectives::{Gathering, Reducing, share};
pub(crate) use counters::{Alive, Counters};
pub use counters::{CommStats, Counter};
pub use local::Local;
pub use mesh::Mesh;
pub(crate) use trace::Clock;
pub use trace::{OpenSpan, Row, Span, Trace};

use crate::error::Result;
use candle_core::{DType, Tensor};
use std::any::Any;
use std::fmt::{self, Debug};
use std::sync::Arc;

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
    /// Sums over ranks of which each rank keeps its share.
    ReduceScatter,
    /// Gathered slices.
    Gather,
    /// From one rank to all.
    Broadcast,
    /// No payload.
    Barrier,
}

impl Traffic {
    /// All kinds. A kind travels between processes as its place here, so that those of one run have to be of one build.
    pub const ALL: [Self; 11] = [
        Self::KeyValue,
        Self::KeyValueGradient,
        Self::State,
        Self::StateGradient,
        Self::Halo,
        Self::HaloGradient,
        Self::AllReduce,
        Self::ReduceScatter,
        Self::Gather,
        Self::Broadcast,
        Self::Barrier,
    ];

    /// A name for files, such as `key_value_gradient`.
    pub fn name(self) -> &'static str {
        match self {
            Self::KeyValue => "key_value",
            Self::KeyValueGradient => "key_value_gradient",
            Self::State => "state",
            Self::StateGradient => "state_gradient",
            Self::Halo => "halo",
            Self::HaloGradient => "halo_gradient",
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::Gather => "gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
        }
    }

    /// Its place in [`Traffic::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
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

/// An exchange that was posted. Exchanges may be waited for in any order, another one on each rank; one that is dropped
/// without a wait takes nothing from the others.
pub trait Pending: Send {
    /// Waits until the expected message is here and the sent one has been taken, for which its receiver has to have posted
    /// its part but not to wait for this exchange. `None` if nothing was expected.
    ///
    /// # Errors
    /// A peer that failed, left, sent something else, or stayed silent past the deadline.
    fn wait(self: Box<Self>) -> Result<Option<Received>>;
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

    /// Posts a send and a receive and returns at once. A sent tensor must not change in place until the exchange has been
    /// waited for; between threads, where what is received is the sender's own memory, not as long as the receiver uses it
    /// either. A tensor that is not contiguous is copied first; its graph stays here.
    ///
    /// # Errors
    /// A peer outside of the group, or a group that has already failed.
    fn exchange(&self, tag: Tag, send: Option<(usize, Tensor)>, receive: Option<Expected>) -> Result<Box<dyn Pending>>;

    /// Counters since the start.
    fn stats(&self) -> CommStats;

    /// Where this rank records what it does, shared by all of its groups; off at first. By default nothing is recorded.
    fn trace(&self) -> Trace {
        Trace::default()
    }

    /// Ends the group for a failure of this rank: `reason` is told to the peers as far as the backend can, and their waits
    /// end. A rank thread that returns an error does so anyway. By default nothing happens: there is nobody to tell.
    fn abort(&self, _reason: &str) {}

    /// The rank whose failure has ended the group, and what it said, as far as this rank was told; not its own. Errors of
    /// an operator's inside have lost their type, so that they do not tell.
    fn peer_failure(&self) -> Option<(usize, String)> {
        None
    }

    /// Number of a rank of this group among all ranks that were started together; error texts use it.
    ///
    /// # Panics
    /// The group has no such rank.
    fn world_rank(&self, rank: usize) -> usize;

    /// Cuts the group into smaller ones: ranks that give the same `color` are together, in the order of their ranks here.
    /// Messages of different groups do not get in each other's way, even between the same two ranks; counters and failures
    /// are those of the rank as a whole, shared by all of its groups. Every rank has to call it.
    ///
    /// # Errors
    /// As [`Communicator::all_gather`].
    fn split(&self, color: usize) -> Result<Arc<dyn Communicator>>;

    /// Starts to collect the slices of all ranks; they may differ in size along `dim` only.
    ///
    /// # Errors
    /// A group that has already failed.
    fn start_all_gather(&self, x: &Tensor, dim: usize, traffic: Traffic) -> Result<Gathering> {
        Gathering::start(self, x, dim, traffic)
    }

    /// Slices of all ranks, in rank order; they may differ in size along `dim` only.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    fn all_gather_uneven(&self, x: &Tensor, dim: usize, traffic: Traffic) -> Result<Vec<Tensor>> {
        self.start_all_gather(x, dim, traffic)?.finish()
    }

    /// Tensors of one shape from all ranks, in rank order.
    ///
    /// # Errors
    /// As [`Pending::wait`]; shapes that differ.
    fn all_gather(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        self.all_gather_uneven(x, usize::MAX, Traffic::Gather)
    }

    /// Starts a sum over ranks of which this rank gets its [`share`] of the elements, in one dimension. The sums have the
    /// bits of [`Communicator::all_reduce_sum`].
    ///
    /// # Errors
    /// A group that has already failed.
    fn start_reduce_scatter(&self, x: &Tensor, traffic: Traffic) -> Result<Reducing> {
        Reducing::start(self, x, traffic)
    }

    /// This rank's [`share`] of the sum over ranks, in one dimension, as [`Communicator::start_reduce_scatter`].
    ///
    /// # Errors
    /// As [`Pending::wait`]. Ranks have to pass tensors of one shape; what is noticed is another number of elements in a
    /// share.
    fn reduce_scatter_sum(&self, x: &Tensor) -> Result<Tensor> {
        self.start_reduce_scatter(x, Traffic::ReduceScatter)?.finish()
    }

    /// The sum over ranks, the same bits on every rank: each element is added up once, in rank order.
    ///
    /// # Errors
    /// As [`Pending::wait`]. Ranks have to pass tensors of one shape; what is noticed is another number of elements in a
    /// share.
    fn all_reduce_sum(&self, x: &Tensor) -> Result<Tensor> {
        if self.size() == 1 {
            return Ok(x.detach());
        }
        let sum = self.start_reduce_scatter(x, Traffic::AllReduce)?.finish()?;
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
