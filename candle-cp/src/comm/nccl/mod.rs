//! Ranks as processes, one GPU each, over NVIDIA's NCCL (feature `nccl`).
//!
//! Every process makes a device with a stream of its own ([`candle_core::Device::new_cuda_with_stream`]) and calls
//! [`connect`]. NCCL (2.14 or newer) is opened at run time; a program that is built with this feature starts without it.
//!
//! # Streams and waits
//!
//! Messages travel on a second stream. It waits for the device's stream before it sends, and the device's stream waits for
//! it before received tensors are used, both by events. An exchange is one group with the send and the receive, behind a
//! small group with their headers.
//!
//! [`Pending::wait`] and the collectives return when the data is there: the host polls an event, NCCL's state and the
//! clock. The device does not stand still meanwhile, since an exchange is posted before the computation that hides it, and
//! the next exchange and computation are posted when the message has come. So the host is never more than one hop ahead.
//! The price is a launch per hop that is not queued in advance, some microseconds. What it buys: no number is read that did
//! not arrive, and a silent peer ends in an error here instead of hanging at some later copy to the host. Calls of NCCL do
//! not block either (`blocking = 0`), so that the deadline holds while connections are made, too.
//!
//! # Groups
//!
//! A group made by [`Communicator::split`] (NCCL 2.18 or newer; older ones are an error that says so) has a communicator and
//! a stream of its own, so its messages neither mix with those of other groups nor queue behind them. Device, counters and
//! failures belong to the rank: a failure in one group aborts the communicators of all, and errors name ranks of the world.
//!
//! NCCL wants the work of several communicators posted in the same order on all devices. Every rank makes the same calls in
//! the same order, and no call posts anything later, so that holds where one thread of a rank starts whatever is exchanged;
//! waiting may be left to others. What is started early (sums that are scattered, gathered slices) is the plain algorithm
//! over exchanges: it may be waited for in any order. [`Communicator::start_all_gather`] accepts slices of any size, so it
//! waits for the headers of all ranks.
//!
//! # What is checked
//!
//! Before each message goes a header with its tag, type and shape. The receiver compares it with what it expects, also if
//! it expects a shape of its own; for a message of any shape the host waits for the header in
//! [`Communicator::exchange`]. Collectives exchange headers among all ranks first. Any difference is
//! [`Error::Mismatch`](crate::Error::Mismatch).
//!
//! # Failing
//!
//! The first failure (a mismatch, NCCL's own fault, the deadline) aborts the communicators, and every later call says so.
//! Peers notice by NCCL's state (the connection broke) or by their deadline. A rank that fails for another reason says so
//! ([`Communicator::abort`]) over the connection by which the ranks met, which also tells that a process is gone: then
//! waits of all ranks end with [`Error::PeerFailed`](crate::Error::PeerFailed) ([`lifeline`](super::lifeline)). Dropped without failure, a
//! communicator is finalized within ten seconds or aborted.
//!
//! # Counters
//!
//! As those of rank threads: collectives count what the plain algorithm sends, whatever way NCCL takes; headers are not
//! counted. Tensors of collectives are not counted as alive.

mod calls;
mod collectives;
mod library;
mod link;
mod pending;
mod shared;
mod tensors;

use super::lifeline::Lifeline;
use super::rendezvous::Meeting;
use super::{CommStats, Communicator, Expected, Pending, Tag, Trace, Traffic};
use crate::error::{Error, Result};
use crate::launch::LaunchEnvironment;
use candle_core::{Device, Tensor};
use library::{Library, UniqueId};
use link::Link;
use shared::Shared;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How [`connect`] makes a group.
#[derive(Debug, Clone)]
pub struct Options {
    /// Longest time until all ranks have come, and again until they are connected, also in a group made by
    /// [`Communicator::split`].
    pub meeting: Duration,
    /// Longest time that a rank waits for one message, with the computation that it waits for itself.
    pub deadline: Duration,
    /// File of the NCCL library. `None`: `libnccl.so.2`, then `libnccl.so`, where the system's loader looks.
    pub library: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { meeting: Duration::from_secs(300), deadline: Duration::from_secs(120), library: None }
    }
}

/// Joins a group of processes and returns this rank's communicator. All processes have to call it.
///
/// `device` is a CUDA device of this process's own: two ranks cannot share a GPU. Tensors on it travel directly. Tensors on
/// the CPU are copied to it, and what comes back for them is on the CPU; without a sent tensor, what is received is on the
/// GPU.
///
/// Sums are NCCL's: the same bits on every rank, in NCCL's order of adding, and for narrow types in that type. So a share
/// of a sum need not have the bits of the whole sum, unlike with the other backends; those that are started early
/// ([`Communicator::start_reduce_scatter`]) are added up in rank order.
///
/// # Errors
/// [`Error::Argument`] for a device that is not a CUDA device with a stream of its own and where nothing says at which machine
/// the ranks meet, [`Error::Library`] without NCCL,
/// [`Error::Rendezvous`] if the ranks do not meet, [`Error::Nccl`] if NCCL cannot connect them before the deadline.
///
/// ```no_run
/// use candle_core::Device;
/// use candle_cp::{comm::nccl, launch_environment};
/// let place = launch_environment()?.ok_or("start one process per GPU, with RANK and so on")?;
/// let device = Device::new_cuda_with_stream(place.local_rank.unwrap_or(0))?;
/// let comm = nccl::connect(&device, &place, &nccl::Options::default())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn connect(device: &Device, place: &LaunchEnvironment, options: &Options) -> Result<Arc<dyn Communicator>> {
    /// `CU_STREAM_PER_THREAD`.
    const PER_THREAD: usize = 2;
    let refuse = |given: &str| {
        let allowed = "ranks over NCCL need a CUDA device whose stream is the same in all threads";
        Error::argument("device", given, allowed, "make it with Device::new_cuda_with_stream(LOCAL_RANK)")
    };
    let Device::Cuda(cuda) = device else { return Err(refuse("not a CUDA device")) };
    if cuda.cuda_stream().cu_stream() as usize == PER_THREAD {
        return Err(refuse("one of Device::new_cuda, with another stream in each thread"));
    }
    let library = Library::open(options.library.as_deref())?;
    let at = place.meeting()?;
    let meeting = Meeting {
        address: at.address.clone(),
        port: at.port,
        rank: place.rank,
        size: place.size,
        deadline: options.meeting,
    };
    let (id, lines) = meeting.meet_and_stay(|| {
        let id = library.unique_id().map(|id| id.0);
        id.map_err(|message| Error::Nccl {
            rank: place.rank,
            operation: "making an id for the group".into(),
            peers: format!("all {} ranks", place.size),
            bytes: 0,
            message,
        })
    })?;
    let lifeline =
        Lifeline::new(place.rank, lines).map_err(|e| meeting.error(format!("listening to the others: {e}")))?;
    let shared = Shared {
        library,
        device: cuda.clone(),
        compute: cuda.cuda_stream(),
        lifeline,
        counters: Arc::default(),
        rank: place.rank,
        size: place.size,
        meeting: options.meeting,
        deadline: options.deadline,
        state: Mutex::default(),
    };
    Ok(Arc::new(NcclRank::new(Link::join(shared, UniqueId(id))?)))
}

/// One rank of a group of processes.
struct NcclRank {
    link: Arc<Link>,
    calls: AtomicU64,
}

impl std::fmt::Debug for NcclRank {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let link = &self.link;
        write!(f, "rank {} of {} processes over {:?}", link.rank, link.size(), link.shared.library)
    }
}

impl NcclRank {
    fn new(link: Link) -> Self {
        Self { link: Arc::new(link), calls: AtomicU64::new(0) }
    }

    fn call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    fn check_rank(&self, rank: usize, itself: bool) -> Result<()> {
        let link = &self.link;
        if rank < link.size() && (itself || rank != link.rank) {
            return Ok(());
        }
        let allowed = format!("rank {} of {} can talk to the other ranks", link.rank, link.size());
        Err(Error::argument("peer", rank, allowed, "use a rank of the group"))
    }

    /// A contiguous tensor on this rank's device, without a graph.
    fn bring(&self, x: &Tensor) -> Result<Tensor> {
        let own = Device::Cuda(self.link.device().clone());
        if !x.device().is_cpu() && !x.device().same_device(&own) {
            let given = format!("{:?}", x.device().location());
            let allowed =
                format!("rank {} sends from the device it was connected with, or the CPU", self.link.shared.rank);
            return Err(Error::argument("device", given, allowed, "make one Device per process and clone it"));
        }
        Ok(x.detach().contiguous()?.to_device(&own)?)
    }
}

impl Communicator for NcclRank {
    fn rank(&self) -> usize {
        self.link.rank
    }

    fn size(&self) -> usize {
        self.link.size()
    }

    fn world_rank(&self, rank: usize) -> usize {
        self.link.world_rank(rank)
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Communicator>> {
        let link = &self.link;
        let mine = Tensor::new(&[color as i64, link.shared.library.version()], &Device::Cpu)?;
        let all =
            self.all_gather(&mine)?.iter().map(Tensor::to_vec1::<i64>).collect::<candle_core::Result<Vec<_>>>()?;
        // All ranks find the same one, so none is left alone with its attempt.
        for (rank, theirs) in all.iter().enumerate() {
            link.shared.library.check_split(link.world_rank(rank), theirs[1])?;
        }
        let ranks: Vec<usize> = (0..link.size()).filter(|&rank| all[rank][0] == color as i64).collect();
        Ok(Arc::new(Self::new(link.split(&ranks)?)))
    }

    fn next_call(&self) -> u64 {
        self.call()
    }

    fn exchange(&self, tag: Tag, send: Option<(usize, Tensor)>, receive: Option<Expected>) -> Result<Box<dyn Pending>> {
        for peer in send.iter().map(|(to, _)| *to).chain(receive.iter().map(|expected| expected.from)) {
            self.check_rank(peer, false)?;
        }
        let from_cpu = send.as_ref().is_some_and(|(_, tensor)| tensor.device().is_cpu());
        let home = from_cpu.then_some(Device::Cpu);
        let sent = send.map(|(to, tensor)| Ok::<_, Error>((to, self.bring(&tensor)?))).transpose()?;
        Ok(Box::new(pending::NcclPending::post(&self.link, tag, sent, receive, home)?))
    }

    fn stats(&self) -> CommStats {
        self.link.counters().snapshot()
    }

    fn trace(&self) -> Trace {
        self.link.counters().trace().clone()
    }

    fn abort(&self, reason: &str) {
        self.link.shared.fail(reason);
    }

    fn peer_failure(&self) -> Option<(usize, String)> {
        self.link.shared.peer_failure()
    }

    fn all_gather_uneven(&self, x: &Tensor, dim: usize, traffic: Traffic) -> Result<Vec<Tensor>> {
        match self.link.size() {
            1 => Ok(vec![x.detach().contiguous()?]),
            _ => self.gather(x, dim, traffic),
        }
    }

    fn all_reduce_sum(&self, x: &Tensor) -> Result<Tensor> {
        if self.link.size() == 1 { Ok(x.detach()) } else { self.sum(x) }
    }

    fn reduce_scatter_sum(&self, x: &Tensor) -> Result<Tensor> {
        match self.link.size() {
            1 => Ok(x.detach().contiguous()?.flatten_all()?),
            _ => self.sum_of_share(x),
        }
    }

    fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        self.check_rank(root, true)?;
        if self.link.size() == 1 { Ok(x.detach().contiguous()?) } else { self.send_from(x, root) }
    }

    fn barrier(&self) -> Result<()> {
        if self.link.size() == 1 { Ok(()) } else { self.meet() }
    }
}
