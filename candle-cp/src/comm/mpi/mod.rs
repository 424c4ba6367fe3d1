//! Ranks as processes over an MPI library, with tensors on the CPU (feature `mpi`).
//!
//! Every process that a launcher (`mpirun`, `srun`) has started calls [`connect`]. Any library with the C interface that
//! the crate `mpi` finds when it is built will do; it needs no support for threads beyond `MPI_THREAD_FUNNELED`.
//!
//! # Threads and waits
//!
//! One thread of its own makes all calls of MPI, from the first to the last. Ranks hand their exchanges to it and wait at a
//! condition variable, so that a wait has its deadline whatever MPI does, and messages travel while the rank computes, also
//! large ones and those through shared memory, which MPI moves only while it is called. The thread polls: without a pause
//! for 50 us after something has happened, then with pauses of up to 0.1 ms while tensors travel and 0.5 ms while only
//! headers are waited for. With nothing on its way it still calls MPI, every millisecond for a second and every 10 ms from
//! then on, since MPI may have work of its own left, such as the end of a message that counts as sent.
//!
//! An exchange is complete when what was expected is here and MPI is done with what was sent: small messages may still lie
//! in a buffer of MPI's then.
//!
//! # Messages
//!
//! A header with tag, type and shape, then the tensor's bytes in pieces, both in the order of sending per channel. The
//! receiver makes room when the header has come and fits; MPI writes to the memory of the tensor directly, and reads that of
//! the sent one in place. Any difference between header and what is expected is
//! [`Error::Mismatch`] and ends the group. Machines of one byte order only.
//!
//! # Failing
//!
//! MPI itself cannot tell a rank that is slow from one that is gone. The ranks therefore also keep TCP connections to rank 0
//! ([`lifeline`](super::lifeline)), whose address MPI hands out. The first failure (a mismatch, a fault of MPI's, the
//! deadline, [`Communicator::abort`], a panic, a process that was killed) ends waits and later calls of all ranks at once
//! with [`Error::PeerFailed`]. From then on MPI is not called any more, not even to finalize it,
//! which would hang: the process is expected to end with an error.
//!
//! Launchers kill the other processes when one ends without having finalized MPI; OpenMPI's `mpirun` sends them SIGTERM and
//! a second later SIGKILL, at once if another process ends meanwhile. A program that wants to say why it ends has to live
//! through the SIGTERM, and to stay for a moment after it has said so, for the sake of the others.
//!
//! Dropped without failure, the group is finalized, which waits for the other ranks to do so, for the time of one message at
//! most. Ranks that wait for one that has left get [`Error::PeerLeft`].

mod calls;
mod engine;
mod landing;
mod pending;
mod shared;

use super::group::{Channel, Group, Transport};
use super::header::Header;
use super::invitation::{INVITATION_BYTES, Invitation};
use super::lifeline::Lifeline;
use super::{Alive, Communicator, Counters, Expected, Pending, Tag};
use crate::error::{Error, Result};
use calls::Mpi;
use candle_core::Tensor;
use engine::{Engine, Post};
use pending::{MpiPending, Ticket};
use shared::Shared;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest time that messages nobody waited for have when a rank leaves.
const LEAVING: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);

/// How [`connect`] makes a group.
#[derive(Debug, Clone)]
pub struct Options {
    /// Longest time until all ranks have come.
    pub meeting: Duration,
    /// Longest time that a rank waits for one message, and for the others when it leaves.
    pub deadline: Duration,
    /// Largest single message of MPI, in bytes, `1..2^31`; longer tensors travel in pieces. The same on all ranks.
    pub piece_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { meeting: Duration::from_secs(300), deadline: Duration::from_secs(120), piece_bytes: 1 << 30 }
    }
}

/// Starts MPI and returns this rank's communicator. All processes of the job have to call it, each once. A process that no
/// launcher has started is a group of one.
///
/// Results have the bits of [`threads`](super::threads), whose collectives are the same code.
///
/// # Errors
/// [`Error::Argument`] for `piece_bytes`, [`Error::MpiStart`] if MPI is in use already, has been finalized or does not start
/// in time, [`Error::Rendezvous`] if the ranks do not meet.
///
/// ```no_run
/// use candle_cp::comm::mpi;
/// let comm = mpi::connect(&mpi::Options::default())?;
/// println!("rank {} of {}", comm.rank(), comm.size());
/// # Ok::<(), candle_cp::Error>(())
/// ```
pub fn connect(options: &Options) -> Result<Arc<dyn Communicator>> {
    let largest = i32::MAX as usize;
    if options.piece_bytes == 0 || options.piece_bytes > largest {
        let allowed = format!("one message of MPI has 1 to {largest} bytes");
        return Err(Error::argument("piece_bytes", options.piece_bytes, allowed, "use the default, 2^30"));
    }
    let start = |message: String| Error::MpiStart { message };
    let (begun, beginning) = channel();
    let (begin, group) = channel();
    let (posts, posted) = channel();
    let piece_bytes = options.piece_bytes;
    let work = move || {
        let mpi = match open() {
            Ok((mpi, place)) => begun.send(Ok(place)).map(|()| mpi),
            Err(error) => return drop(begun.send(Err(error))),
        };
        // Without a group the ranks did not meet; then MPI is left as it is.
        if let (Ok(mpi), Ok(shared)) = (mpi, group.recv()) {
            Engine::new(mpi, shared, piece_bytes).run(&posted, LEAVING);
        }
    };
    let thread = std::thread::Builder::new().name("mpi".into()).spawn(work);
    let thread = thread.map_err(|e| start(format!("the system gives no thread for it: {e}")))?;
    let place = beginning.recv_timeout(options.meeting).map_err(|e| match e {
        RecvTimeoutError::Timeout => start(format!("not all ranks came within {:?}", options.meeting)),
        RecvTimeoutError::Disconnected => start("its thread has panicked".into()),
    })??;
    let Place { rank, size, channels, invitation, listener } = place;
    let lines = match size {
        1 => Vec::new(),
        _ => invitation.meet((rank, size), listener, options.meeting)?,
    };
    let lifeline = Lifeline::new(rank, lines).map_err(|e| start(format!("listening to the other ranks: {e}")))?;
    let shared = Arc::new(Shared::new(rank, size, lifeline));
    // The thread waits for it.
    let _ = begin.send(shared.clone());
    let deadline = options.deadline;
    Ok(Arc::new(Group::world(Arc::new(MpiRank { shared, deadline, channels, posts: Some(posts), thread }))))
}

/// What is known once MPI has started.
struct Place {
    rank: usize,
    size: usize,
    channels: Channel,
    invitation: Invitation,
    /// On rank 0.
    listener: Option<TcpListener>,
}

/// On the thread that talks to MPI: starts it, and hands out where rank 0 listens.
fn open() -> Result<(Mpi, Place)> {
    let start = |message: String| Error::MpiStart { message };
    let mpi = Mpi::start().map_err(start)?;
    let (rank, size) = (mpi.rank, mpi.size);
    let (mut bytes, mut listener) = ([0; INVITATION_BYTES], None);
    let mut refused = None;
    if rank == 0 {
        match Invitation::issue() {
            Ok((bound, invitation)) => (bytes, listener) = (invitation.encode(), Some(bound)),
            // The others wait for a broadcast; one without an invitation ends them, too.
            Err(e) => refused = Some(start(format!("rank 0 cannot listen for the others: {e}"))),
        }
    }
    mpi.broadcast(&mut bytes).map_err(start)?;
    let invitation = Invitation::decode(&bytes).ok_or_else(|| {
        let text = "rank 0 tells of no address to meet at; its own output may say why, or it runs another version";
        refused.unwrap_or_else(|| start(text.to_string()))
    })?;
    // Two tags each: a channel's headers and payloads.
    let channels = Channel::try_from(mpi.largest_tag.div_ceil(2)).unwrap_or(Channel::MAX);
    Ok((mpi, Place { rank, size, channels, invitation, listener }))
}

/// One rank of a group of processes.
struct MpiRank {
    shared: Arc<Shared>,
    deadline: Duration,
    channels: Channel,
    /// Taken away to end the thread that talks to MPI.
    posts: Option<Sender<Post>>,
    thread: JoinHandle<()>,
}

impl std::fmt::Debug for MpiRank {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "process {} of {} over MPI", self.shared.rank, self.shared.size)
    }
}

impl Transport for MpiRank {
    fn place(&self) -> (usize, usize) {
        (self.shared.rank, self.shared.size)
    }

    fn post(
        &self,
        channel: Channel,
        tag: Tag,
        send: Option<(usize, Tensor)>,
        receive: Option<Expected>,
    ) -> Result<Box<dyn Pending>> {
        let peer = send.as_ref().map(|(to, _)| *to).or(receive.as_ref().map(|expected| expected.from));
        let peers = peer.map_or(String::new(), |peer| format!("rank {peer}"));
        if let Some(expected) = &receive {
            Header::new(tag, expected.dtype, expected.shape.as_deref().unwrap_or_default())?;
        }
        let mut sent = None;
        let send = match send {
            Some((to, tensor)) => {
                let header = Header::new(tag, tensor.dtype(), tensor.dims())?;
                if !tensor.device().is_cpu() {
                    let (given, allowed) =
                        (format!("{:?}", tensor.device().location()), "over MPI travel tensors on the CPU");
                    return Err(Error::argument(
                        "device",
                        given,
                        allowed,
                        "bring it there first, or use the feature nccl",
                    ));
                }
                self.shared.check(tag, &peers, header.bytes())?;
                let alive = Alive::new(&self.shared.counters, tag.traffic, &tensor);
                self.shared.counters.sent(tag.traffic, alive.bytes());
                let transfer = self.shared.counters.trace().transfer(tag, to, alive.bytes());
                sent = Some((to, alive));
                Some((to, tensor, header, transfer))
            }
            None => {
                self.shared.check(tag, &peers, 0)?;
                None
            }
        };
        let ticket = Arc::new(Ticket::default());
        let post = Post { channel, tag, send, receive: receive.clone(), ticket: ticket.clone() };
        if self.posts.as_ref().is_none_or(|posts| posts.send(post).is_err()) {
            // The thread is gone because the group is over, which the wait finds out.
            self.shared.end("the thread that talks to MPI has ended");
        }
        let (shared, deadline) = (self.shared.clone(), self.deadline);
        Ok(Box::new(MpiPending { shared, deadline, tag, ticket, sent, receive }))
    }

    fn channels(&self) -> Channel {
        self.channels
    }

    fn counters(&self) -> &Arc<Counters> {
        &self.shared.counters
    }

    fn abort(&self, reason: &str) {
        self.shared.end(reason);
    }

    fn peer_failure(&self) -> Option<(usize, String)> {
        self.shared.peer_failure()
    }
}

impl Drop for MpiRank {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.end("panicked");
        }
        self.posts = None;
        let (start, limit) = (Instant::now(), self.deadline.saturating_add(LEAVING));
        while !self.thread.is_finished() {
            if self.shared.is_over() {
                return;
            }
            if start.elapsed() >= limit {
                self.shared.end("the other ranks did not leave the group in time");
            }
            std::thread::sleep(PAUSE);
        }
    }
}
