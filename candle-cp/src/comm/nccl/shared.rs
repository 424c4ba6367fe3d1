//! What all groups of one rank have in common, failures included.

use super::library::{Library, RawComm};
use crate::comm::Counters;
use crate::comm::lifeline::Lifeline;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// NCCL may notice that a peer is gone before the peer's own word has come.
const WORD: Duration = Duration::from_secs(1);

/// One rank: its library, its device with the stream that computes, and the state of its communicators.
pub struct Shared {
    pub library: Library,
    pub device: CudaDevice,
    pub compute: Arc<CudaStream>,
    pub lifeline: Lifeline,
    pub counters: Arc<Counters>,
    /// This rank of all that were started together, and how many these are.
    pub rank: usize,
    pub size: usize,
    /// Longest time for connecting ranks.
    pub meeting: Duration,
    /// Longest time for one message.
    pub deadline: Duration,
    pub state: Mutex<State>,
}

/// The communicators of a rank. One lock around all of them: they end together.
#[derive(Default)]
pub struct State {
    /// In the order in which they were made. Null once aborted or left.
    comms: Vec<RawComm>,
    /// Why no group can be used any more.
    pub failure: Option<String>,
}

// SAFETY: NCCL's handles may be used from any thread, one at a time, which the mutex around this sees to.
unsafe impl Send for State {}

// A panic elsewhere leaves the lists and the state whole.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Takes a live communicator in and says where it is.
    pub fn add(&mut self, comm: RawComm) -> usize {
        self.comms.push(comm);
        self.comms.len() - 1
    }

    pub fn comm(&self, place: usize) -> RawComm {
        self.comms[place]
    }

    /// Takes a communicator out; null if it was aborted.
    pub fn take(&mut self, place: usize) -> RawComm {
        std::mem::replace(&mut self.comms[place], std::ptr::null_mut())
    }
}

impl Shared {
    /// Ends all groups for a failure of this rank, and tells the others.
    pub fn fail(&self, reason: &str) {
        self.lifeline.fail(reason);
        self.cut(&mut lock(&self.state), reason);
    }

    /// Aborts all communicators; only the first reason is kept.
    pub fn cut(&self, state: &mut State, reason: &str) {
        state.failure.get_or_insert_with(|| reason.to_string());
        let _ = self.compute.context().bind_to_thread();
        for comm in state.comms.iter_mut().filter(|comm| !comm.is_null()) {
            // SAFETY: alive, and null from here on.
            unsafe { self.library.abort(std::mem::replace(comm, std::ptr::null_mut())) };
        }
    }

    /// The peer that ended the groups, if it was one.
    pub fn peer_failure(&self) -> Option<(usize, String)> {
        let ended = lock(&self.state).failure.is_some();
        let failure = if ended { self.lifeline.failure_within(WORD) } else { self.lifeline.failure() };
        failure.filter(|(peer, _)| *peer != self.rank)
    }
}
