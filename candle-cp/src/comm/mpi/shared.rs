//! What the threads of one rank share: who it is, and whether its group has ended.

use crate::comm::lifeline::Lifeline;
use crate::comm::{Counters, Tag};
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// MPI may notice that a peer is gone before the peer's own word has come.
const WORD: Duration = Duration::from_secs(1);

/// This rank's part of the group.
pub struct Shared {
    pub rank: usize,
    pub size: usize,
    pub counters: Arc<Counters>,
    lifeline: Lifeline,
}

impl Shared {
    pub fn new(rank: usize, size: usize, lifeline: Lifeline) -> Self {
        Self { rank, size, counters: Arc::default(), lifeline }
    }

    /// Whether the group has ended, by whichever rank.
    pub fn is_over(&self) -> bool {
        self.lifeline.has_failed()
    }

    /// Ends the group and tells the others, unless it has ended already.
    pub fn end(&self, reason: &str) {
        self.lifeline.fail(reason);
    }

    /// Tells the others that all that this rank sends has been sent.
    pub fn leave(&self) {
        self.lifeline.leave();
    }

    /// Whether a peer sends nothing more.
    pub fn has_left(&self, peer: usize) -> bool {
        self.lifeline.has_left(peer)
    }

    /// The peer that ended the group, and what it said.
    pub fn peer_failure(&self) -> Option<(usize, String)> {
        self.lifeline.failure().filter(|(peer, _)| *peer != self.rank)
    }

    /// Nothing while the group is whole.
    ///
    /// # Errors
    /// Why it is not.
    pub fn check(&self, tag: Tag, peers: &str, bytes: usize) -> Result<()> {
        let Some((failed, reason)) = self.lifeline.failure() else { return Ok(()) };
        let operation = tag.to_string();
        if failed == self.rank {
            return Err(self.failed(&operation, peers, bytes, format!("the group has ended before: {reason}")));
        }
        Err(Error::PeerFailed { rank: self.rank, operation, peer: failed, message: reason })
    }

    /// Ends the group for a fault that MPI reports. If a peer's death is behind it, that is the better word, which may take
    /// a moment.
    pub fn fault(&self, operation: &str, peer: usize, bytes: usize, message: String) -> Error {
        let died = self.lifeline.failure_within(WORD).filter(|(peer, _)| *peer != self.rank);
        let error = match died {
            Some((peer, message)) => {
                Error::PeerFailed { rank: self.rank, operation: operation.to_string(), peer, message }
            }
            None => self.failed(operation, &format!("rank {peer}"), bytes, message),
        };
        self.end(&error.to_string());
        error
    }

    fn failed(&self, operation: &str, peers: &str, bytes: usize, message: String) -> Error {
        let (operation, peers) = (operation.to_string(), peers.to_string());
        Error::Mpi { rank: self.rank, operation, peers, bytes, message }
    }
}
