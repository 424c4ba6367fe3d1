//! A group of one rank.

use super::{Clock, CommStats, Communicator, Expected, Pending, Tag, Trace};
use crate::error::{Error, Result};
use candle_core::Tensor;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One rank alone: collectives return their input, there is nobody to exchange with.
#[derive(Debug)]
pub struct Local {
    calls: AtomicU64,
    trace: Trace,
}

impl Local {
    /// A group of one.
    pub fn new() -> Self {
        Self { calls: AtomicU64::new(0), trace: Trace::new(Clock::start()) }
    }
}

impl Default for Local {
    fn default() -> Self {
        Self::new()
    }
}

impl Communicator for Local {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn world_rank(&self, rank: usize) -> usize {
        assert_eq!(rank, 0, "a group of one");
        0
    }

    fn split(&self, _color: usize) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self { calls: AtomicU64::new(0), trace: self.trace.clone() }))
    }

    fn next_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    fn exchange(&self, tag: Tag, send: Option<(usize, Tensor)>, receive: Option<Expected>) -> Result<Box<dyn Pending>> {
        let peer = send.map(|(to, _)| to).or(receive.map(|e| e.from));
        let given = peer.map_or("no peer".to_string(), |p| format!("rank {p} in {tag}"));
        Err(Error::argument("peer", given, "a group of one rank has nobody to exchange with", "use more ranks"))
    }

    fn stats(&self) -> CommStats {
        CommStats::default()
    }

    fn trace(&self) -> Trace {
        self.trace.clone()
    }
}
