//! What a rank has sent, received and waited for.

use super::{Clock, Trace, Traffic};
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

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
    /// Time in [`Pending::wait`](super::Pending::wait): this rank could not go on for want of its peers.
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

    /// Time in [`Pending::wait`](super::Pending::wait), all kinds: point to point, collectives and barriers.
    pub fn waited(&self) -> Duration {
        self.0.values().map(|c| c.waited).sum()
    }

    fn entry(&mut self, traffic: Traffic) -> &mut Counter {
        self.0.entry(traffic).or_default()
    }
}

/// Counters shared with the guards of received tensors, and the trace beside them: one of each for all groups of a rank.
#[derive(Debug)]
pub(crate) struct Counters {
    stats: Mutex<CommStats>,
    trace: Trace,
}

impl Default for Counters {
    fn default() -> Self {
        Self::with_clock(Clock::start())
    }
}

impl Counters {
    /// With the clock of other ranks of this process.
    pub fn with_clock(clock: Clock) -> Self {
        Self { stats: Mutex::default(), trace: Trace::new(clock) }
    }

    pub fn trace(&self) -> &Trace {
        &self.trace
    }

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
        self.stats.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
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
