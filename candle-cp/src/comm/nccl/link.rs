//! One group: an NCCL communicator on a stream of its own. Posting work, waiting for it within a deadline, giving up.

use super::calls::{Elements, Way};
use super::library::{Code, DataType, RawComm, SUCCESS, UniqueId};
use super::shared::{Shared, State, lock};
use crate::comm::Counters;
use crate::comm::header::{HEADER_LEN, Header};
use crate::error::{Error, Result};
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, PinnedHostSlice, result,
};
use std::ffi::c_void;
use std::fmt::Display;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Polls that only spin; most headers and small sums arrive meanwhile.
const SPINS: u32 = 2000;
const PAUSE: Duration = Duration::from_micros(20);
/// Longest wait for a clean end; after it the communicator is aborted.
const FAREWELL: Duration = Duration::from_secs(10);

/// What is being done, for error texts.
#[derive(Clone, Copy)]
pub struct About<'a> {
    pub operation: &'a dyn Display,
    /// A rank of the group; `None` for all of them.
    pub peer: Option<usize>,
    pub bytes: usize,
}

/// This rank in one group.
pub struct Link {
    pub shared: Arc<Shared>,
    /// By rank of the group: rank of the world.
    members: Vec<usize>,
    pub rank: usize,
    /// Where the shared state has the communicator.
    place: usize,
    pub stream: Arc<CudaStream>,
    /// Header buffers that no exchange uses.
    free: Mutex<Vec<Slot>>,
    /// Header buffers of exchanges that nobody waited for: the device may still write to them.
    retired: Mutex<Vec<Slot>>,
}

/// Buffers of one header each way, or one from every rank.
pub struct Slot {
    sent_host: PinnedHostSlice<u64>,
    sent: CudaSlice<u64>,
    got_host: PinnedHostSlice<u64>,
    got: CudaSlice<u64>,
}

impl Link {
    /// Joins all ranks, for which `id` stands; returns when they have joined, too.
    pub fn join(shared: Shared, id: UniqueId) -> Result<Self> {
        let about = About { operation: &"joining the group", peer: None, bytes: 0 };
        let (rank, size) = (shared.rank, shared.size);
        let members: Vec<usize> = (0..size).collect();
        let joined = || {
            let stream = new_stream(&shared).map_err(|e| failed(&shared, &members, &about, cuda_text(e)))?;
            let comm = shared.library.init(size, id, rank);
            Ok((stream, comm.map_err(|text| failed(&shared, &members, &about, text))?))
        };
        // The others are told: a lifeline that is dropped says no more than goodbye.
        let (stream, comm) = joined().inspect_err(|error: &Error| shared.lifeline.fail(&error.to_string()))?;
        let place = lock(&shared.state).add(comm);
        let link = Self::new(Arc::new(shared), members, rank, place, stream);
        link.until_ready(&mut lock(&link.shared.state), comm, &about, link.shared.meeting)?;
        Ok(link)
    }

    fn new(shared: Arc<Shared>, members: Vec<usize>, rank: usize, place: usize, stream: Arc<CudaStream>) -> Self {
        let (free, retired) = Default::default();
        Self { shared, members, rank, place, stream, free, retired }
    }

    /// The part of this group that is made of `ranks`, this one among them. Every rank of the group has to call it, each
    /// with its part.
    pub fn split(&self, ranks: &[usize]) -> Result<Self> {
        let operation = format!("making a group of {} ranks", ranks.len());
        let about = About { operation: &operation, peer: None, bytes: 0 };
        let (shared, limit) = (&self.shared, self.shared.meeting);
        let stream = self.cuda(&about, new_stream(shared))?;
        let rank = ranks.iter().position(|&rank| rank == self.rank).expect("a rank is in its own part");
        let mut state = lock(&shared.state);
        self.check(&mut state, &about)?;
        let parent = state.comm(self.place);
        // A thread of NCCL writes to it, perhaps when nobody waits for that any more: it is never released.
        let made: &'static AtomicPtr<c_void> = Box::leak(Box::default());
        // SAFETY: `check` found the communicator alive under this lock; `made` is never released.
        let begun = unsafe { shared.library.split(parent, ranks[0], self.rank, made.as_ptr()) };
        begun.map_err(|text| self.give_up(&mut state, self.failed(&about, text)))?;
        self.until_ready(&mut state, parent, &about, limit)?;
        let comm: RawComm = made.load(Ordering::Acquire);
        if comm.is_null() {
            let error = self.failed(&about, "NCCL made no communicator".to_string());
            return Err(self.give_up(&mut state, error));
        }
        let place = state.add(comm);
        let members = ranks.iter().map(|&rank| self.members[rank]).collect();
        self.until_ready(&mut state, comm, &about, limit)?;
        Ok(Self::new(shared.clone(), members, rank, place, stream))
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The world's number of a rank of the group.
    pub fn world_rank(&self, rank: usize) -> usize {
        self.members[rank]
    }

    pub fn device(&self) -> &CudaDevice {
        &self.shared.device
    }

    /// The stream of the device that computes.
    pub fn compute(&self) -> &Arc<CudaStream> {
        &self.shared.compute
    }

    pub fn counters(&self) -> &Arc<Counters> {
        &self.shared.counters
    }

    /// Posts a group of NCCL calls on this link's stream, which passes them in order. Returns when NCCL has put them there;
    /// that needs the peers only the first time that two ranks talk.
    pub fn post(&self, about: &About, calls: impl FnOnce(Way) -> Code) -> Result<()> {
        let library = &self.shared.library;
        let mut state = lock(&self.shared.state);
        self.check(&mut state, about)?;
        self.cuda(about, self.stream.context().bind_to_thread())?;
        let comm = state.comm(self.place);
        let way = Way { library, comm, stream: self.stream.cu_stream().cast() };
        match library.group(comm, || calls(way)) {
            Ok(()) => self.until_ready(&mut state, comm, about, self.shared.deadline),
            Err(text) => Err(self.give_up(&mut state, self.failed(about, text))),
        }
    }

    /// A mark behind all that was posted so far.
    pub fn mark(&self, about: &About) -> Result<CudaEvent> {
        self.cuda(about, self.stream.record_event(None))
    }

    /// Lets the link's stream wait for what the device has been told to compute so far.
    pub fn after_compute(&self, about: &About) -> Result<()> {
        self.cuda(about, self.stream.join(self.compute()))
    }

    /// Blocks the host until the device has passed a mark. Past the deadline, or when NCCL reports a fault, the
    /// communicators are aborted, which also frees the device.
    pub fn wait(&self, about: &About, mark: &CudaEvent) -> Result<()> {
        let start = Instant::now();
        let mut polls = 0u32;
        self.cuda(about, self.stream.context().bind_to_thread())?;
        loop {
            let done = self.cuda(about, mark.try_is_complete())?;
            if done || polls >= SPINS {
                let mut state = lock(&self.shared.state);
                // Also when done: an abort lets the device pass marks as well.
                self.check(&mut state, about)?;
                let comm = state.comm(self.place);
                self.poll(&mut state, comm, about)?;
                if done {
                    return Ok(());
                }
                if start.elapsed() >= self.shared.deadline {
                    return Err(self.give_up(&mut state, self.timeout(about, self.shared.deadline)));
                }
            }
            polls += 1;
            if polls < SPINS { std::hint::spin_loop() } else { std::thread::sleep(PAUSE) }
        }
    }

    /// Ends all groups: nothing more is sent or received, and the device stops waiting for peers.
    pub fn end(&self, error: Error) -> Error {
        self.give_up(&mut lock(&self.shared.state), error)
    }

    /// A CUDA result as ours.
    pub fn cuda<T>(&self, about: &About, result: std::result::Result<T, DriverError>) -> Result<T> {
        result.map_err(|e| self.failed(about, cuda_text(e)))
    }

    fn until_ready(&self, state: &mut State, comm: RawComm, about: &About, limit: Duration) -> Result<()> {
        let start = Instant::now();
        while !self.poll(state, comm, about)? {
            self.check(state, about)?;
            if start.elapsed() >= limit {
                return Err(self.give_up(state, self.timeout(about, limit)));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Whether NCCL has nothing in progress on the host.
    fn poll(&self, state: &mut State, comm: RawComm, about: &About) -> Result<bool> {
        // SAFETY: `check` found the communicator alive under this lock, or it was just made.
        match unsafe { self.shared.library.state(comm) } {
            Ok(ready) => Ok(ready),
            Err(text) => Err(self.give_up(state, self.failed(about, text))),
        }
    }

    fn check(&self, state: &mut State, about: &About) -> Result<()> {
        let rank = self.shared.rank;
        if let Some((peer, message)) = self.shared.lifeline.failure().filter(|(peer, _)| *peer != rank) {
            let operation = about.operation.to_string();
            return Err(self.give_up(state, Error::PeerFailed { rank, operation, peer, message }));
        }
        match &state.failure {
            None => Ok(()),
            Some(failure) => Err(self.failed(about, format!("the group has ended before: {failure}"))),
        }
    }

    fn give_up(&self, state: &mut State, error: Error) -> Error {
        self.shared.cut(state, &error.to_string());
        error
    }

    fn failed(&self, about: &About, message: String) -> Error {
        failed(&self.shared, &self.members, about, message)
    }

    fn timeout(&self, about: &About, waited: Duration) -> Error {
        let (rank, operation) = (self.shared.rank, about.operation.to_string());
        match about.peer {
            Some(peer) => Error::Timeout { rank, operation, peer: self.members[peer], waited, bytes: about.bytes },
            None => self.failed(
                about,
                format!("not complete within {waited:?}; a rank is missing, slow or doing something else"),
            ),
        }
    }

    /// Sends a header and receives one, as the ranks say.
    pub fn post_headers(
        &self,
        about: &About,
        slot: &mut Slot,
        sent: Option<(usize, &Header)>,
        from: Option<usize>,
    ) -> Result<CudaEvent> {
        if let Some((_, header)) = sent {
            self.upload(about, slot, header)?;
        }
        {
            let (data, _read) = slot.sent.device_ptr(&self.stream);
            let (into, _written) = slot.got.device_ptr_mut(&self.stream);
            self.post(about, |way| {
                let mut code = SUCCESS;
                if let Some((to, _)) = sent {
                    // SAFETY: the slot's buffers hold a header each and outlive the exchange.
                    code = unsafe { way.send(header_at(data), to) };
                }
                match from {
                    // SAFETY: as above.
                    Some(from) if code == SUCCESS => unsafe { way.recv(header_at(into), from) },
                    _ => code,
                }
            })?;
        }
        if from.is_some() {
            self.download(about, slot, HEADER_LEN)?;
        }
        self.mark(about)
    }

    /// Gives every rank the headers of all.
    pub fn post_all_headers(&self, about: &About, slot: &mut Slot, header: &Header) -> Result<CudaEvent> {
        self.upload(about, slot, header)?;
        {
            let (data, _read) = slot.sent.device_ptr(&self.stream);
            let (into, _written) = slot.got.device_ptr_mut(&self.stream);
            // SAFETY: the slot's buffers hold one header, and one per rank; they outlive the exchange.
            self.post(about, |way| unsafe { way.all_gather(header_at(data), into) })?;
        }
        self.download(about, slot, HEADER_LEN * self.size())?;
        self.mark(about)
    }

    fn upload(&self, about: &About, slot: &mut Slot, header: &Header) -> Result<()> {
        self.cuda(about, slot.sent_host.as_mut_slice())?.copy_from_slice(&header.encode());
        self.cuda(about, self.stream.memcpy_htod(&slot.sent_host, &mut slot.sent))
    }

    fn download(&self, about: &About, slot: &mut Slot, len: usize) -> Result<()> {
        self.cuda(about, self.stream.memcpy_dtoh(&slot.got.slice(..len), &mut slot.got_host))
    }

    /// The headers that have come; only after waiting for their mark.
    pub fn headers<'a>(&self, about: &About, slot: &'a Slot) -> Result<impl Iterator<Item = &'a [u64]>> {
        Ok(self.cuda(about, slot.got_host.as_slice())?.chunks_exact(HEADER_LEN))
    }

    /// Buffers for an exchange.
    pub fn slot(&self, about: &About) -> Result<Slot> {
        if let Some(slot) = lock(&self.free).pop() {
            return Ok(slot);
        }
        let (one, all, context) = (HEADER_LEN, HEADER_LEN * self.size(), self.stream.context());
        // SAFETY: plain numbers, written before they are read: by `upload`, and by the device.
        let (sent_host, got_host) =
            unsafe { (context.alloc_pinned_with_flags(one, 0), context.alloc_pinned_with_flags(all, 0)) };
        Ok(Slot {
            sent_host: self.cuda(about, sent_host)?,
            sent: self.cuda(about, self.stream.alloc_zeros(one))?,
            got_host: self.cuda(about, got_host)?,
            got: self.cuda(about, self.stream.alloc_zeros(all))?,
        })
    }

    /// Takes back the buffers of an exchange that is over.
    pub fn give_back(&self, slot: Slot) {
        lock(&self.free).push(slot);
    }

    /// Keeps the buffers of an exchange that nobody waited for.
    pub fn retire(&self, slot: Slot) {
        lock(&self.retired).push(slot);
    }

    /// Ends in order: all work done, then finalized, within a time.
    fn farewell(&self, comm: RawComm) -> bool {
        let (start, limit) = (Instant::now(), self.shared.deadline.min(FAREWELL));
        let until = |ready: &dyn Fn() -> Option<bool>| loop {
            match ready() {
                Some(true) => return true,
                Some(false) if start.elapsed() < limit => std::thread::sleep(PAUSE),
                _ => return false,
            }
        };
        let Ok(mark) = self.stream.record_event(None) else { return false };
        // SAFETY: the communicator is alive until `drop` has ended it; its work is done when it is finalized.
        until(&|| mark.try_is_complete().ok())
            && unsafe { self.shared.library.finalize(comm) }.is_ok()
            && until(&|| unsafe { self.shared.library.state(comm) }.ok())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let shared = &self.shared;
        if std::thread::panicking() {
            // Peers will not finish what this rank began.
            shared.fail("panicked");
        }
        if let Some(failure) = &lock(&shared.state).failure {
            shared.lifeline.fail(failure);
        }
        let comm = lock(&shared.state).take(self.place);
        if comm.is_null() || self.stream.context().bind_to_thread().is_err() {
            return;
        }
        let clean = self.farewell(comm);
        // SAFETY: taken out above, so this is the last use. Without a clean end the work is cut off.
        unsafe { if clean { shared.library.destroy(comm) } else { shared.library.abort(comm) } }
    }
}

/// A stream ahead of computation where both could run: a hop is short, and its end is waited for.
fn new_stream(shared: &Shared) -> std::result::Result<Arc<CudaStream>, DriverError> {
    shared.compute.context().bind_to_thread()?;
    let (_, urgent) = result::stream::get_priority_range()?;
    shared.compute.context().new_stream_with_priority(urgent)
}

fn header_at(at: u64) -> Elements {
    Elements { at, count: HEADER_LEN, kind: DataType::U64 }
}

/// Names ranks as the world counts them.
fn failed(shared: &Shared, members: &[usize], about: &About, message: String) -> Error {
    let peers = match about.peer {
        Some(peer) => format!("rank {}", members[peer]),
        None if members.len() == shared.size => format!("all {} ranks", shared.size),
        None => format!("ranks {members:?}"),
    };
    Error::Nccl { rank: shared.rank, operation: about.operation.to_string(), peers, bytes: about.bytes, message }
}

fn cuda_text(error: DriverError) -> String {
    format!("CUDA says: {error}")
}
