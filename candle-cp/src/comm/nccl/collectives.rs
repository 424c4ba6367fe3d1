//! Collectives: all ranks agree on what they do, then NCCL does it.

use super::NcclRank;
use super::calls::Elements;
use super::library::SUCCESS;
use super::link::About;
use super::tensors::{self, Landing};
use crate::comm::header::{self, Header};
use crate::comm::{Tag, Traffic, share};
use crate::error::Result;
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::time::Instant;

impl NcclRank {
    /// Exchanges headers among all ranks and compares them with this rank's. Blocks the host, for a short while: headers
    /// do not queue behind computation.
    pub(super) fn agree(&self, mine: &Header, fits: impl Fn(&Header) -> bool, want: &str) -> Result<Vec<Header>> {
        let (link, tag) = (&self.link, mine.tag);
        let about = About { operation: &tag, peer: None, bytes: mine.bytes() };
        let mut slot = link.slot(&about)?;
        let posted = link.post_all_headers(&about, &mut slot, mine).and_then(|mark| {
            self.waiting(tag.traffic, || link.wait(&about, &mark))?;
            link.headers(&about, &slot)?.take(link.size()).map(|numbers| Ok(Header::decode(numbers))).collect()
        });
        let headers: Vec<Option<Header>> = match posted {
            Ok(headers) => headers,
            Err(e) => {
                link.retire(slot);
                return Err(e);
            }
        };
        link.give_back(slot);
        let check = |(peer, theirs): (usize, Option<Header>)| match theirs {
            Some(theirs) if theirs.tag == tag && theirs.dtype == mine.dtype && fits(&theirs) => Ok(theirs),
            other => {
                let expected = format!("{tag} with {:?} {want}", mine.dtype);
                Err(link.end(header::mismatch(
                    link.world_rank(link.rank),
                    link.world_rank(peer),
                    tag,
                    expected,
                    other.as_ref(),
                )))
            }
        };
        headers.into_iter().enumerate().map(check).collect()
    }

    /// Runs what blocks the host, on the clock.
    fn waiting<T>(&self, traffic: Traffic, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let result = f();
        self.link.counters().waited(traffic, start.elapsed());
        result
    }

    /// Waits until the device is through with what `post` posts behind the computation so far.
    fn complete(&self, about: &About, traffic: Traffic, post: impl FnOnce() -> Result<()>) -> Result<()> {
        let link = &self.link;
        link.after_compute(about)?;
        let posted = post().and_then(|()| link.mark(about));
        let waited = posted.and_then(|mark| self.waiting(traffic, || link.wait(about, &mark)));
        // In any case: memory goes back to the device's own stream.
        link.cuda(about, link.compute().join(&link.stream))?;
        waited
    }

    /// A tensor where the one that was handed in came from.
    fn home(&self, tensor: Tensor, like: &Tensor) -> Result<Tensor> {
        Ok(if like.device().is_cpu() { tensor.to_device(&Device::Cpu)? } else { tensor })
    }

    pub(super) fn gather(&self, x: &Tensor, dim: usize, traffic: Traffic) -> Result<Vec<Tensor>> {
        let tag = Tag { traffic, call: self.call(), step: 0 };
        let (link, mine) = (&self.link, self.bring(x)?);
        let header = Header::new(tag, x.dtype(), x.dims())?;
        let same = |theirs: &Header| {
            let fits = |(i, (a, b)): (usize, (&usize, &usize))| i == dim || a == b;
            theirs.dims.len() == x.rank() && theirs.dims.iter().zip(x.dims()).enumerate().all(fits)
        };
        let want = match dim < x.rank() {
            true => format!("{:?} up to dimension {dim}", x.dims()),
            false => format!("{:?}", x.dims()),
        };
        let headers = self.agree(&header, same, &want)?;
        let about = About { operation: &tag, peer: None, bytes: headers.iter().map(Header::bytes).sum() };
        let mut slices = Vec::with_capacity(link.size());
        let count = header.elements();
        if headers.iter().all(|theirs| theirs.elements() == count) && count > 0 {
            let mut landing = Landing::new(link.device(), x.dtype(), count * link.size())?;
            self.complete(&about, traffic, || {
                tensors::reading(&mine, &link.stream, |data| {
                    landing.writing(&link.stream, |into| {
                        // SAFETY: room for as many per rank as `data` has; both are kept until it is complete.
                        link.post(&about, |way| unsafe { way.all_gather(data, into.at) })
                    })
                })
            })?;
            let all = self.home(landing.into_tensor(&[count * link.size()]), x)?;
            for (rank, theirs) in headers.iter().enumerate() {
                slices.push(all.narrow(0, rank * count, count)?.reshape(theirs.dims.as_slice())?);
            }
        } else {
            // Sizes differ: each rank in turn sends its own to all.
            for (root, theirs) in headers.iter().enumerate() {
                let about = About { bytes: theirs.bytes(), ..about };
                slices.push(self.home(self.send_to_all(&mine, theirs, root, &about)?, x)?);
            }
        }
        for theirs in headers.iter().enumerate().filter(|(rank, _)| *rank != link.rank).map(|(_, header)| header) {
            self.link.counters().sent(traffic, header.bytes());
            self.link.counters().received(traffic, theirs.bytes());
        }
        Ok(slices)
    }

    pub(super) fn sum(&self, x: &Tensor) -> Result<Tensor> {
        let (link, traffic) = (&self.link, Traffic::AllReduce);
        let tag = Tag { traffic, call: self.call(), step: 0 };
        let header = Header::new(tag, x.dtype(), x.dims())?;
        let mine = self.bring(x)?;
        self.agree(&header, |theirs| theirs.dims == x.dims(), &format!("{:?}", x.dims()))?;
        let count = header.elements();
        if count == 0 {
            return Ok(x.detach());
        }
        let about = About { operation: &tag, peer: None, bytes: header.bytes() };
        let mut landing = Landing::new(link.device(), x.dtype(), count)?;
        self.complete(&about, traffic, || {
            tensors::reading(&mine, &link.stream, |data| {
                landing.writing(&link.stream, |into| {
                    // SAFETY: room for as many as `data` has; both are kept until it is complete.
                    link.post(&about, |way| unsafe { way.all_reduce_sum(data, into.at) })
                })
            })
        })?;
        // As the plain algorithm: each rank adds up its share, which then goes to all.
        self.count_shares(&header, true);
        self.home(landing.into_tensor(x.dims()), x)
    }

    /// This rank's share of a sum. NCCL scatters equal shares in one call. Where they differ by an element, each is summed
    /// for its rank, all in one group of calls: nothing has to be copied to make room for padding.
    pub(super) fn sum_of_share(&self, x: &Tensor) -> Result<Tensor> {
        let (link, traffic) = (&self.link, Traffic::ReduceScatter);
        let tag = Tag { traffic, call: self.call(), step: 0 };
        let header = Header::new(tag, x.dtype(), x.dims())?;
        let mine = self.bring(x)?;
        self.agree(&header, |theirs| theirs.dims == x.dims(), &format!("{:?}", x.dims()))?;
        let (count, size) = (header.elements(), link.size());
        let part = share(count, size, link.rank).len();
        if count == 0 {
            return Ok(x.detach().flatten_all()?);
        }
        let about = About { operation: &tag, peer: None, bytes: header.bytes() };
        // Also a rank whose share is empty takes part in the sums of the others.
        let mut landing = Landing::new(link.device(), x.dtype(), part.max(1))?;
        self.complete(&about, traffic, || {
            tensors::reading(&mine, &link.stream, |data| {
                landing.writing(&link.stream, |into| match count.is_multiple_of(size) {
                    // SAFETY: `data` has as many elements as `into` per rank; both are kept until it is complete.
                    true => link.post(&about, |way| unsafe { way.reduce_scatter_sum(data.at, into) }),
                    false => link.post(&about, |way| {
                        let shares =
                            (0..size).map(|root| (root, share(count, size, root))).filter(|(_, s)| !s.is_empty());
                        let sum = |(root, share): (usize, Range<usize>)| {
                            let at = data.at + (share.start * x.dtype().size_in_bytes()) as u64;
                            // SAFETY: a part of `data`, and at the root as much room; both are kept until it is complete.
                            unsafe { way.reduce_sum(Elements { at, count: share.len(), ..data }, into.at, root) }
                        };
                        shares.map(sum).find(|&code| code != SUCCESS).unwrap_or(SUCCESS)
                    }),
                })
            })
        })?;
        self.count_shares(&header, false);
        let sums = landing.into_tensor(&[part.max(1)]);
        // No view: there would be an element that nobody has written.
        self.home(if part > 0 { sums } else { Tensor::zeros(0, x.dtype(), sums.device())? }, x)
    }

    /// Counts as sent and received what the plain algorithm does: its share to each rank, and if `gathered` this rank's
    /// sums to all.
    fn count_shares(&self, header: &Header, gathered: bool) {
        let (link, traffic) = (&self.link, header.tag.traffic);
        let part = |rank: usize| share(header.elements(), link.size(), rank).len() * header.dtype.size_in_bytes();
        for rank in (0..link.size()).filter(|&rank| rank != link.rank) {
            let ways = [(part(rank), part(link.rank)), (part(link.rank), part(rank))];
            for (sent, received) in ways.into_iter().take(1 + usize::from(gathered)) {
                link.counters().sent(traffic, sent);
                link.counters().received(traffic, received);
            }
        }
    }

    pub(super) fn send_from(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        let (link, traffic) = (&self.link, Traffic::Broadcast);
        let tag = Tag { traffic, call: self.call(), step: 0 };
        let header = Header::new(tag, x.dtype(), x.dims())?;
        let mine = self.bring(x)?;
        self.agree(&header, |theirs| theirs.dims == x.dims(), &format!("{:?}", x.dims()))?;
        let about = About { operation: &tag, peer: None, bytes: header.bytes() };
        let tensor = self.send_to_all(&mine, &header, root, &about)?;
        match link.rank == root {
            true => (1..link.size()).for_each(|_| self.link.counters().sent(traffic, header.bytes())),
            false => self.link.counters().received(traffic, header.bytes()),
        }
        self.home(tensor, x)
    }

    /// NCCL's broadcast of `mine` of rank `root`, which `header` describes.
    fn send_to_all(&self, mine: &Tensor, header: &Header, root: usize, about: &About) -> Result<Tensor> {
        let (link, traffic) = (&self.link, header.tag.traffic);
        let count = header.elements();
        if link.rank == root {
            if count > 0 {
                self.complete(about, traffic, || {
                    // SAFETY: the root only reads; kept until it is complete.
                    let send = |data| link.post(about, |way| unsafe { way.broadcast(data, root) });
                    tensors::reading(mine, &link.stream, send)
                })?;
            }
            return Ok(mine.clone());
        }
        if count == 0 {
            let device = Device::Cuda(link.device().clone());
            return Ok(Tensor::zeros(header.dims.as_slice(), header.dtype, &device)?);
        }
        let mut landing = Landing::new(link.device(), header.dtype, count)?;
        self.complete(about, traffic, || {
            // SAFETY: as much room as the root sends, kept until it is complete; only the root's own elements are read.
            let receive = |into| link.post(about, |way| unsafe { way.broadcast(into, root) });
            landing.writing(&link.stream, receive)
        })?;
        Ok(landing.into_tensor(&header.dims))
    }

    /// Every rank's header has come to all: that is the barrier.
    pub(super) fn meet(&self) -> Result<()> {
        let tag = Tag { traffic: Traffic::Barrier, call: self.call(), step: 0 };
        let header = Header::new(tag, DType::U8, &[1])?;
        self.agree(&header, |theirs| theirs.dims == header.dims, "[1]")?;
        for _ in 1..self.link.size() {
            self.link.counters().sent(Traffic::Barrier, header.bytes());
            self.link.counters().received(Traffic::Barrier, header.bytes());
        }
        Ok(())
    }
}
