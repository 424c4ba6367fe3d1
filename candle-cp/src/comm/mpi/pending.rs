//! An exchange on its way, between the thread that waits for it and the one that talks to MPI.

use super::landing::Landing;
use super::shared::Shared;
use crate::comm::{Alive, Expected, Pending, Received, Tag};
use crate::error::{Error, Result};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A wait looks this often whether the group has ended, should MPI itself hang.
const LOOK: Duration = Duration::from_millis(20);
/// What a peer has sent before it left comes within this time.
const GRACE: Duration = Duration::from_secs(1);

/// A message that has come: its memory, all of it written, and its dimensions.
type Arrived = (Landing, Vec<usize>);

#[derive(Default)]
struct Progress {
    sent: Option<Result<()>>,
    received: Option<Result<Arrived>>,
}

/// How far an exchange is.
#[derive(Default)]
pub struct Ticket {
    progress: Mutex<Progress>,
    changed: Condvar,
}

impl Ticket {
    // Each field is written at once: a panic elsewhere leaves it whole.
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn sent(&self, result: Result<()>) {
        self.lock().sent = Some(result);
        self.changed.notify_all();
    }

    pub fn received(&self, result: Result<Arrived>) {
        self.lock().received = Some(result);
        self.changed.notify_all();
    }
}

pub struct MpiPending {
    pub shared: Arc<Shared>,
    pub deadline: Duration,
    pub tag: Tag,
    pub ticket: Arc<Ticket>,
    /// Receiver, and the guard of what was sent.
    pub sent: Option<(usize, Alive)>,
    pub receive: Option<Expected>,
}

impl MpiPending {
    fn take(&self) -> Result<Option<Received>> {
        let received = match &self.receive {
            Some(expected) => {
                let elements = expected.shape.as_ref().map_or(0, |shape| shape.iter().product());
                let bytes = elements * expected.dtype.size_in_bytes();
                let (landing, dims) = self.until(expected.from, bytes, |progress| progress.received.take())?;
                // SAFETY: the engine hands on what has come whole.
                let tensor = unsafe { landing.into_tensor(&dims) }?;
                let alive = Alive::new(&self.shared.counters, self.tag.traffic, &tensor);
                Some(Received { tensor, _alive: Box::new(alive) })
            }
            None => None,
        };
        if let Some((to, _alive)) = &self.sent {
            self.until(*to, 0, |progress| progress.sent.take())?;
        }
        Ok(received)
    }

    fn until<T>(&self, peer: usize, bytes: usize, ready: impl Fn(&mut Progress) -> Option<Result<T>>) -> Result<T> {
        let start = Instant::now();
        let mut progress = self.ticket.lock();
        let mut left_at = None;
        loop {
            if let Some(result) = ready(&mut progress) {
                return result;
            }
            self.shared.check(self.tag, &format!("rank {peer}"), bytes)?;
            if self.shared.has_left(peer) && left_at.get_or_insert_with(Instant::now).elapsed() > GRACE {
                // What follows writes to other ranks, which the thread that talks to MPI need not wait for.
                drop(progress);
                let (rank, operation) = (self.shared.rank, self.tag.to_string());
                return Err(self.end(Error::PeerLeft { rank, operation, peer }));
            }
            let Some(left) = self.deadline.checked_sub(start.elapsed()) else {
                drop(progress);
                let (rank, operation, waited) = (self.shared.rank, self.tag.to_string(), self.deadline);
                return Err(self.end(Error::Timeout { rank, operation, peer, waited, bytes }));
            };
            let waited = self.ticket.changed.wait_timeout(progress, left.min(LOOK));
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl MpiPending {
    /// Ends the group for what this rank has found out.
    fn end(&self, error: Error) -> Error {
        self.shared.end(&error.to_string());
        error
    }
}

impl Pending for MpiPending {
    fn wait(self: Box<Self>) -> Result<Option<Received>> {
        let (from, to) = (self.receive.as_ref().map(|e| e.from), self.sent.as_ref().map(|(to, _)| *to));
        let _span = self.shared.counters.trace().wait(self.tag, from, to);
        let start = Instant::now();
        let received = self.take();
        self.shared.counters.waited(self.tag.traffic, start.elapsed());
        received
    }
}
