//! Collectives: all ranks agree on what they do, then NCCL does it.

use super::NcclRank;
use super::link::About;
use super::tensors::{self, Landing};
use crate::comm::header::{self, Header};
use crate::comm::{Tag, Traffic};
use crate::error::Result;
use candle_core::{DType, Device, Tensor};
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
            link.headers(&about, &slot)?.take(link.size).map(|numbers| Ok(Header::decode(numbers))).collect()
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
                Err(link.end(header::mismatch(link.rank, peer, tag, expected, other.as_ref())))
            }
        };
        headers.into_iter().enumerate().map(check).collect()
    }

    /// Runs what blocks the host, on the clock.
    fn waiting<T>(&self, traffic: Traffic, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let result = f();
        self.counters.waited(traffic, start.elapsed());
        result
    }

    /// Waits until the device is through with what `post` posts behind the computation so far.
    fn complete(&self, about: &About, traffic: Traffic, post: impl FnOnce() -> Result<()>) -> Result<()> {
        let link = &self.link;
        link.after_compute(about)?;
        let posted = post().and_then(|()| link.mark(about));
        let waited = posted.and_then(|mark| self.waiting(traffic, || link.wait(about, &mark)));
        // In any case: memory goes back to the device's own stream.
        link.cuda(about, link.compute.join(&link.stream))?;
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
        let kind = tensors::data_type(x.dtype())?;
        let about = About { operation: &tag, peer: None, bytes: headers.iter().map(Header::bytes).sum() };
        let mut slices = Vec::with_capacity(link.size);
        let count = header.elements();
        if headers.iter().all(|theirs| theirs.elements() == count) && count > 0 {
            let mut landing = Landing::new(&link.device, x.dtype(), count * link.size)?;
            self.complete(&about, traffic, || {
                tensors::reading(&mine, &link.stream, |data| {
                    landing.writing(&link.stream, |into| {
                        // SAFETY: `count` elements here, and room for as many per rank there, until it is complete.
                        link.post(&about, |nccl, comm, stream| unsafe {
                            nccl.all_gather(data, into, count, kind, comm, stream)
                        })
                    })
                })
            })?;
            let all = self.home(landing.into_tensor(&[count * link.size]), x)?;
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
            self.counters.sent(traffic, header.bytes());
            self.counters.received(traffic, theirs.bytes());
        }
        Ok(slices)
    }

    pub(super) fn sum(&self, x: &Tensor) -> Result<Tensor> {
        let (link, traffic) = (&self.link, Traffic::AllReduce);
        let tag = Tag { traffic, call: self.call(), step: 0 };
        let header = Header::new(tag, x.dtype(), x.dims())?;
        let mine = self.bring(x)?;
        self.agree(&header, |theirs| theirs.dims == x.dims(), &format!("{:?}", x.dims()))?;
        let (count, kind) = (header.elements(), tensors::data_type(x.dtype())?);
        if count == 0 {
            return Ok(x.detach());
        }
        let about = About { operation: &tag, peer: None, bytes: header.bytes() };
        let mut landing = Landing::new(&link.device, x.dtype(), count)?;
        self.complete(&about, traffic, || {
            tensors::reading(&mine, &link.stream, |data| {
                landing.writing(&link.stream, |into| {
                    // SAFETY: `count` elements here and room for as many there, until it is complete.
                    link.post(&about, |nccl, comm, stream| unsafe {
                        nccl.all_reduce_sum(data, into, count, kind, comm, stream)
                    })
                })
            })
        })?;
        // A part to each rank and its sum from there; then this rank's sum to all.
        let part =
            |rank: usize| ((rank + 1) * count / link.size - rank * count / link.size) * x.dtype().size_in_bytes();
        for rank in (0..link.size).filter(|&rank| rank != link.rank) {
            for (sent, received) in [(part(rank), part(link.rank)), (part(link.rank), part(rank))] {
                self.counters.sent(traffic, sent);
                self.counters.received(traffic, received);
            }
        }
        self.home(landing.into_tensor(x.dims()), x)
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
            true => (1..link.size).for_each(|_| self.counters.sent(traffic, header.bytes())),
            false => self.counters.received(traffic, header.bytes()),
        }
        self.home(tensor, x)
    }

    /// NCCL's broadcast of `mine` of rank `root`, which `header` describes.
    fn send_to_all(&self, mine: &Tensor, header: &Header, root: usize, about: &About) -> Result<Tensor> {
        let (link, traffic) = (&self.link, header.tag.traffic);
        let (count, kind) = (header.elements(), tensors::data_type(header.dtype)?);
        if link.rank == root {
            if count > 0 {
                self.complete(about, traffic, || {
                    tensors::reading(mine, &link.stream, |data| {
                        // SAFETY: `count` elements, which the root only reads, until it is complete.
                        link.post(about, |nccl, comm, stream| unsafe {
                            nccl.broadcast(data, data, count, kind, root, comm, stream)
                        })
                    })
                })?;
            }
            return Ok(mine.clone());
        }
        if count == 0 {
            let device = Device::Cuda(link.device.clone());
            return Ok(Tensor::zeros(header.dims.as_slice(), header.dtype, &device)?);
        }
        let mut landing = Landing::new(&link.device, header.dtype, count)?;
        self.complete(about, traffic, || {
            landing.writing(&link.stream, |into| {
                // SAFETY: room for `count` elements until it is complete; only the root's own are read.
                link.post(about, |nccl, comm, stream| unsafe {
                    nccl.broadcast(into, into, count, kind, root, comm, stream)
                })
            })
        })?;
        Ok(landing.into_tensor(&header.dims))
    }

    /// Every rank's header has come to all: that is the barrier.
    pub(super) fn meet(&self) -> Result<()> {
        let tag = Tag { traffic: Traffic::Barrier, call: self.call(), step: 0 };
        let header = Header::new(tag, DType::U8, &[1])?;
        self.agree(&header, |theirs| theirs.dims == header.dims, "[1]")?;
        for _ in 1..self.link.size {
            self.counters.sent(Traffic::Barrier, header.bytes());
            self.counters.received(Traffic::Barrier, header.bytes());
        }
        Ok(())
    }
}
