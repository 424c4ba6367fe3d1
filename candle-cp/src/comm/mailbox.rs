//! Mailboxes between rank threads.

use super::group::Channel;
use super::{Expected, OpenSpan, Tag};
use crate::error::{Error, Result};
use candle_core::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Receiver, sender, channel.
type Way = (usize, usize, Channel);

/// Set when the receiver has taken the message: in any wait after it has posted the receive. If that took the wait for this
/// very message, two ranks that wait for two exchanges in opposite order would block each other.
pub(super) type Taken = Arc<AtomicBool>;

struct Message {
    tag: Tag,
    tensor: Tensor,
    taken: Taken,
    /// On its way, until it is taken.
    transfer: Option<OpenSpan>,
}

impl Message {
    /// Whether it was not taken before.
    fn take(&mut self) -> bool {
        self.transfer = None;
        // Under the lock: between a sender's look at the flag and its sleep, the wake-up would be lost.
        !self.taken.swap(true, Ordering::AcqRel)
    }
}

/// Messages of one way. The n-th that is sent is for the n-th receive that is posted, whichever is waited for first.
#[derive(Default)]
struct Lane {
    sent: u64,
    posted: u64,
    messages: BTreeMap<u64, Message>,
    /// Receives that were given up before their message was sent.
    dropped: BTreeSet<u64>,
}

/// A receive that was posted; dropped, it gives up its message.
pub(super) struct Slot {
    world: Arc<World>,
    way: Way,
    number: u64,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.world.lock();
        let lane = state.lanes.entry(self.way).or_default();
        // Nothing is left to do where it was received: then it has been sent and is gone.
        let mut unwanted = lane.messages.remove(&self.number);
        if self.number >= lane.sent {
            lane.dropped.insert(self.number);
        }
        let taken = unwanted.as_mut().is_some_and(Message::take);
        // A tensor's memory is given back without the lock.
        drop(state);
        drop(unwanted);
        if taken {
            self.world.changed[self.way.1].notify_all();
        }
    }
}

#[derive(Default)]
struct State {
    lanes: BTreeMap<Way, Lane>,
    /// The first rank that failed, and its error.
    failure: Option<(usize, String)>,
    /// Ranks that have returned.
    left: Vec<bool>,
}

/// What the ranks of one group share.
pub(super) struct World {
    state: Mutex<State>,
    /// One per rank, so that a message wakes its receiver only.
    changed: Vec<Condvar>,
    pub deadline: Duration,
}

/// Who waits for whom, for error texts.
pub(super) struct Wait<'a> {
    pub rank: usize,
    pub peer: usize,
    pub tag: Tag,
    pub expected: Option<&'a Expected>,
}

impl World {
    pub fn new(size: usize, deadline: Duration) -> Self {
        let state = State { left: vec![false; size], ..State::default() };
        let changed = (0..size).map(|_| Condvar::new()).collect();
        Self { state: Mutex::new(state), changed, deadline }
    }

    // The state is consistent between statements, so a panicking rank does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Marks the group as failed; only the first call counts.
    pub fn fail(&self, rank: usize, message: String) {
        self.lock().failure.get_or_insert((rank, message));
        self.changed.iter().for_each(Condvar::notify_all);
    }

    /// Marks a rank as returned.
    pub fn leave(&self, rank: usize) {
        self.lock().left[rank] = true;
        self.changed.iter().for_each(Condvar::notify_all);
    }

    /// The rank that failed first, and its error.
    pub fn failure(&self) -> Option<(usize, String)> {
        self.lock().failure.clone()
    }

    /// Puts a message on its way.
    pub fn send(&self, way: Way, tag: Tag, tensor: Tensor, transfer: OpenSpan) -> Result<Taken> {
        let (to, from, _) = way;
        let taken = Taken::default();
        let mut message = Message { tag, tensor, taken: taken.clone(), transfer: Some(transfer) };
        let mut state = self.lock();
        check_failure(&state, &Wait { rank: from, peer: to, tag, expected: None })?;
        let lane = state.lanes.entry(way).or_default();
        let number = lane.sent;
        lane.sent += 1;
        if lane.dropped.remove(&number) {
            message.take();
        } else {
            lane.messages.insert(number, message);
        }
        drop(state);
        self.changed[to].notify_all();
        Ok(taken)
    }

    /// Posts a receive.
    pub fn post(self: &Arc<Self>, way: Way) -> Slot {
        let mut state = self.lock();
        let lane = state.lanes.entry(way).or_default();
        let number = lane.posted;
        lane.posted += 1;
        drop(state);
        Slot { world: self.clone(), way, number }
    }

    /// The message of a receive, checked against the tag and what was expected.
    pub fn receive(&self, wait: &Wait, slot: &Slot) -> Result<Tensor> {
        let Message { tag, tensor, .. } =
            self.wait_for(wait, |state| state.lanes.get_mut(&slot.way)?.messages.remove(&slot.number))?;
        check_message(wait, tag, &tensor)?;
        Ok(tensor)
    }

    /// Waits until the receiver has taken a message.
    pub fn wait_taken(&self, wait: &Wait, taken: &Taken) -> Result<()> {
        self.wait_for(wait, |_| taken.load(Ordering::Acquire).then_some(()))
    }

    /// Takes what has come for a rank's posted receives.
    fn take_posted(&self, state: &mut State, rank: usize) {
        for ((_, from, _), lane) in state.lanes.range_mut((rank, 0, 0)..(rank + 1, 0, 0)) {
            let posted = lane.messages.range_mut(..lane.posted);
            if posted.fold(false, |any, (_, message)| message.take() || any) {
                self.changed[*from].notify_all();
            }
        }
    }

    fn wait_for<T>(&self, wait: &Wait, mut ready: impl FnMut(&mut State) -> Option<T>) -> Result<T> {
        let start = Instant::now();
        let mut state = self.lock();
        loop {
            self.take_posted(&mut state, wait.rank);
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            check_failure(&state, wait)?;
            if state.left[wait.peer] {
                return Err(Error::PeerLeft { rank: wait.rank, operation: wait.tag.to_string(), peer: wait.peer });
            }
            let Some(left) = self.deadline.checked_sub(start.elapsed()) else {
                let expected = wait.expected;
                let elements = expected.and_then(|e| e.shape.as_ref()).map_or(0, |s| s.iter().product());
                return Err(Error::Timeout {
                    rank: wait.rank,
                    operation: wait.tag.to_string(),
                    peer: wait.peer,
                    waited: self.deadline,
                    bytes: elements * expected.map_or(0, |e| e.dtype.size_in_bytes()),
                });
            };
            let waited = self.changed[wait.rank].wait_timeout(state, left);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

fn check_failure(state: &State, wait: &Wait) -> Result<()> {
    match &state.failure {
        Some((peer, message)) => Err(Error::PeerFailed {
            rank: wait.rank,
            operation: wait.tag.to_string(),
            peer: *peer,
            message: message.clone(),
        }),
        None => Ok(()),
    }
}

fn check_message(wait: &Wait, sent: Tag, tensor: &Tensor) -> Result<()> {
    let expected = wait.expected.expect("a receive knows what it expects");
    let shape_fits = expected.shape.as_deref().is_none_or(|shape| shape == tensor.dims());
    if sent == wait.tag && shape_fits && expected.dtype == tensor.dtype() {
        return Ok(());
    }
    let describe = |tag: Tag, dtype, shape: &dyn std::fmt::Debug| format!("{tag} with {dtype:?} {shape:?}");
    let any: &dyn std::fmt::Debug = &"of any shape";
    let shape = expected.shape.as_ref().map_or(any, |s| s as &dyn std::fmt::Debug);
    Err(Error::Mismatch {
        rank: wait.rank,
        operation: wait.tag.to_string(),
        peer: wait.peer,
        expected: describe(wait.tag, expected.dtype, shape),
        sent: describe(sent, tensor.dtype(), &tensor.dims()),
    })
}
