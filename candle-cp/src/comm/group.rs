//! Groups of ranks over one transport that reaches all of them.

use super::{CommStats, Communicator, Counters, Expected, Pending, Tag, Trace};
use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Keeps the messages of groups apart: between two ranks, those of one channel arrive in the order in which they were sent.
pub(super) type Channel = u32;

/// What a backend does for all groups of one rank. Ranks are those of the whole world here.
pub(super) trait Transport: Send + Sync + Debug {
    /// This rank and the number of ranks.
    fn place(&self) -> (usize, usize);

    /// As [`Communicator::exchange`]; ranks have been checked, and what is sent is contiguous and without a graph. Records, in
    /// the trace of the counters, a `transfer` of what is sent and in [`Pending::wait`] a `wait`.
    fn post(
        &self,
        channel: Channel,
        tag: Tag,
        send: Option<(usize, Tensor)>,
        receive: Option<Expected>,
    ) -> Result<Box<dyn Pending>>;

    /// Channels that there are at most.
    fn channels(&self) -> Channel {
        Channel::MAX
    }

    fn counters(&self) -> &Arc<Counters>;

    /// As [`Communicator::abort`].
    fn abort(&self, reason: &str);

    /// As [`Communicator::peer_failure`].
    fn peer_failure(&self) -> Option<(usize, String)>;
}

/// This rank in one group.
pub(super) struct Group<T> {
    transport: Arc<T>,
    /// By rank of the group: rank of the world, ascending.
    members: Vec<usize>,
    rank: usize,
    channel: Channel,
    calls: AtomicU64,
    /// The first channel that no group of this rank has, shared by all of them.
    next_channel: Arc<AtomicU32>,
}

impl<T: Transport> Group<T> {
    /// All ranks.
    pub fn world(transport: Arc<T>) -> Self {
        let (rank, size) = transport.place();
        let (members, next_channel) = ((0..size).collect(), Arc::new(AtomicU32::new(1)));
        Self { transport, members, rank, channel: 0, calls: AtomicU64::new(0), next_channel }
    }

    /// The world's number of another rank of the group.
    fn peer(&self, rank: usize) -> Result<usize> {
        match self.members.get(rank) {
            Some(&peer) if rank != self.rank => Ok(peer),
            _ => {
                let allowed = format!("rank {} of {} can talk to the other ranks", self.rank, self.members.len());
                Err(Error::argument("peer", rank, allowed, "use a rank of the group"))
            }
        }
    }
}

impl<T: Transport> Debug for Group<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "rank {} of {} over {:?}", self.rank, self.members.len(), self.transport)
    }
}

impl<T: Transport + 'static> Communicator for Group<T> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn world_rank(&self, rank: usize) -> usize {
        self.members[rank]
    }

    fn next_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    fn exchange(&self, tag: Tag, send: Option<(usize, Tensor)>, receive: Option<Expected>) -> Result<Box<dyn Pending>> {
        let send =
            send.map(|(to, tensor)| Ok::<_, Error>((self.peer(to)?, tensor.detach().contiguous()?))).transpose()?;
        let receive = receive.map(|expected| {
            let from = self.peer(expected.from)?;
            Ok::<_, Error>(Expected { from, ..expected })
        });
        self.transport.post(self.channel, tag, send, receive.transpose()?)
    }

    fn stats(&self) -> CommStats {
        self.transport.counters().snapshot()
    }

    fn trace(&self) -> Trace {
        self.transport.counters().trace().clone()
    }

    fn abort(&self, reason: &str) {
        self.transport.abort(reason);
    }

    fn peer_failure(&self) -> Option<(usize, String)> {
        self.transport.peer_failure()
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Communicator>> {
        let next = self.next_channel.load(Ordering::Relaxed);
        let all = self.all_gather(&Tensor::new(&[color as i64, i64::from(next)], &Device::Cpu)?)?;
        let all = all.iter().map(Tensor::to_vec1::<i64>).collect::<candle_core::Result<Vec<_>>>()?;
        // Two ranks may be together in several groups: each of these has a channel that is new to all of its ranks.
        let channel = all.iter().map(|theirs| theirs[1]).max().expect("a group has ranks");
        let channel = Channel::try_from(channel).ok().filter(|&channel| channel < self.transport.channels());
        let Some(channel) = channel else {
            let allowed = format!("{} groups can be told apart", self.transport.channels());
            return Err(Error::argument("split", "one more group", allowed, "make groups once and keep them"));
        };
        self.next_channel.store(channel + 1, Ordering::Relaxed);
        let mine = |rank: &usize| all[*rank][0] == color as i64;
        let members: Vec<usize> = (0..self.size()).filter(mine).map(|rank| self.members[rank]).collect();
        let rank = (0..self.rank).filter(mine).count();
        let (transport, next_channel) = (self.transport.clone(), self.next_channel.clone());
        Ok(Arc::new(Self { transport, members, rank, channel, calls: AtomicU64::new(0), next_channel }))
    }
}
