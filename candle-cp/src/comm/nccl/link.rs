//! One NCCL communicator on a stream of its own: posting work, waiting for it within a deadline, giving up.

use super::library::{Code, Library, RawComm, RawStream, UniqueId};
use crate::comm::header::{HEADER_LEN, Header};
use crate::comm::lifeline::Lifeline;
use crate::error::{Error, Result};
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, PinnedHostSlice, result,
};
use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Polls that only spin; most headers and small sums arrive meanwhile.
const SPINS: u32 = 2000;
const PAUSE: Duration = Duration::from_micros(20);
/// Longest wait for a clean end; after it the communicator is aborted.
const FAREWELL: Duration = Duration::from_secs(10);
/// NCCL may notice that a peer is gone before the peer's own word has come.
const WORD: Duration = Duration::from_secs(1);

/// What is being done, for error texts.
#[derive(Clone, Copy)]
pub struct About<'a> {
    pub operation: &'a dyn Display,
    /// `None` for all ranks.
    pub peer: Option<usize>,
    pub bytes: usize,
}

struct State {
    /// Null once aborted.
    comm: RawComm,
    /// Why the group cannot be used any more.
    failure: Option<String>,
}

// SAFETY: NCCL's handles may be used from any thread, one at a time, which the mutex around this sees to.
unsafe impl Send for State {}

/// A communicator, its stream, and the stream of the device that computes.
pub struct Link {
    pub rank: usize,
    pub size: usize,
    pub deadline: Duration,
    pub device: CudaDevice,
    pub compute: Arc<CudaStream>,
    pub stream: Arc<CudaStream>,
    library: Library,
    state: Mutex<State>,
    lifeline: Lifeline,
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

// A panic elsewhere leaves the lists and the state whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Joins the group that `id` stands for; returns when all ranks have.
    pub fn join(
        library: Library,
        id: UniqueId,
        (rank, size): (usize, usize),
        device: CudaDevice,
        deadline: Duration,
        lifeline: Lifeline,
    ) -> Result<Self> {
        let about = About { operation: &"joining the group", peer: None, bytes: 0 };
        let compute = device.cuda_stream();
        let joined = || {
            let cuda = |e: DriverError| failed(rank, size, &about, cuda_text(e));
            compute.context().bind_to_thread().map_err(cuda)?;
            // Ahead of computation where both could run: a hop is short, and its end is waited for.
            let (_, urgent) = result::stream::get_priority_range().map_err(cuda)?;
            let stream = compute.context().new_stream_with_priority(urgent).map_err(cuda)?;
            let comm = library.init(size, id, rank).map_err(|text| failed(rank, size, &about, text))?;
            Ok((stream, comm))
        };
        // The others are told: a lifeline that is dropped says no more than goodbye.
        let (stream, comm) = joined().inspect_err(|error: &Error| lifeline.fail(&error.to_string()))?;
        let (free, retired) = Default::default();
        let state = Mutex::new(State { comm, failure: None });
        let link = Self { rank, size, deadline, device, compute, stream, library, state, lifeline, free, retired };
        link.until_posted(&mut lock(&link.state), &about)?;
        Ok(link)
    }

    /// What the library is.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Posts a group of NCCL calls on this link's stream, which passes them in order. Returns when NCCL has put them there;
    /// that needs the peers only the first time that two ranks talk.
    pub fn post(&self, about: &About, calls: impl FnOnce(&Library, RawComm, RawStream) -> Code) -> Result<()> {
        let mut state = lock(&self.state);
        self.check(&mut state, about)?;
        self.cuda(about, self.stream.context().bind_to_thread())?;
        let (comm, stream) = (state.comm, self.stream.cu_stream().cast());
        match self.library.group(comm, || calls(&self.library, comm, stream)) {
            Ok(()) => self.until_posted(&mut state, about),
            Err(text) => Err(self.give_up(&mut state, self.failed(about, text))),
        }
    }

    /// A mark behind all that was posted so far.
    pub fn mark(&self, about: &About) -> Result<CudaEvent> {
        self.cuda(about, self.stream.record_event(None))
    }

    /// Lets the link's stream wait for what the device has been told to compute so far.
    pub fn after_compute(&self, about: &About) -> Result<()> {
        self.cuda(about, self.stream.join(&self.compute))
    }

    /// Blocks the host until the device has passed a mark. Past the deadline, or when NCCL reports a fault, the
    /// communicator is aborted, which also frees the device.
    pub fn wait(&self, about: &About, mark: &CudaEvent) -> Result<()> {
        let start = Instant::now();
        let mut polls = 0u32;
        self.cuda(about, self.stream.context().bind_to_thread())?;
        loop {
            let done = self.cuda(about, mark.try_is_complete())?;
            if done || polls >= SPINS {
                let mut state = lock(&self.state);
                // Also when done: an abort lets the device pass marks as well.
                self.check(&mut state, about)?;
                self.poll(&mut state, about)?;
                if done {
                    return Ok(());
                }
                if start.elapsed() >= self.deadline {
                    return Err(self.give_up(&mut state, self.timeout(about)));
                }
            }
            polls += 1;
            if polls < SPINS { std::hint::spin_loop() } else { std::thread::sleep(PAUSE) }
        }
    }

    /// Ends the group: nothing more is sent or received, and the device stops waiting for peers.
    pub fn end(&self, error: Error) -> Error {
        self.give_up(&mut lock(&self.state), error)
    }

    /// A CUDA result as ours.
    pub fn cuda<T>(&self, about: &About, result: std::result::Result<T, DriverError>) -> Result<T> {
        result.map_err(|e| self.failed(about, cuda_text(e)))
    }

    fn until_posted(&self, state: &mut State, about: &About) -> Result<()> {
        let start = Instant::now();
        while !self.poll(state, about)? {
            self.check(state, about)?;
            if start.elapsed() >= self.deadline {
                return Err(self.give_up(state, self.timeout(about)));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Whether NCCL has nothing in progress on the host.
    fn poll(&self, state: &mut State, about: &About) -> Result<bool> {
        // SAFETY: `check` found the communicator alive under this lock, or it was just made.
        match unsafe { self.library.state(state.comm) } {
            Ok(ready) => Ok(ready),
            Err(text) => Err(self.give_up(state, self.failed(about, text))),
        }
    }

    fn check(&self, state: &mut State, about: &About) -> Result<()> {
        if let Some((peer, message)) = self.lifeline.failure().filter(|(peer, _)| *peer != self.rank) {
            let operation = about.operation.to_string();
            return Err(self.give_up(state, Error::PeerFailed { rank: self.rank, operation, peer, message }));
        }
        match &state.failure {
            None => Ok(()),
            Some(failure) => Err(self.failed(about, format!("the group has ended before: {failure}"))),
        }
    }

    /// Ends the group for a failure of this rank, and tells the others.
    pub fn fail(&self, reason: &str) {
        self.lifeline.fail(reason);
        let mut state = lock(&self.state);
        state.failure.get_or_insert_with(|| reason.to_string());
        self.cut(&mut state);
    }

    /// The peer that ended the group, if it was one.
    pub fn peer_failure(&self) -> Option<(usize, String)> {
        let ended = lock(&self.state).failure.is_some();
        let failure = if ended { self.lifeline.failure_within(WORD) } else { self.lifeline.failure() };
        failure.filter(|(peer, _)| *peer != self.rank)
    }

    fn give_up(&self, state: &mut State, error: Error) -> Error {
        self.cut(state);
        state.failure.get_or_insert_with(|| error.to_string());
        error
    }

    fn cut(&self, state: &mut State) {
        if !state.comm.is_null() {
            let _ = self.stream.context().bind_to_thread();
            // SAFETY: alive, and null from here on.
            unsafe { self.library.abort(std::mem::replace(&mut state.comm, std::ptr::null_mut())) };
        }
    }

    fn failed(&self, about: &About, message: String) -> Error {
        failed(self.rank, self.size, about, message)
    }

    fn timeout(&self, about: &About) -> Error {
        let operation = about.operation.to_string();
        match about.peer {
            Some(peer) => {
                Error::Timeout { rank: self.rank, operation, peer, waited: self.deadline, bytes: about.bytes }
            }
            None => self.failed(
                about,
                format!("not complete within {:?}; a rank is missing, slow or doing something else", self.deadline),
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
            self.post(about, |nccl, comm, stream| {
                use super::library::{DataType, SUCCESS};
                let mut code = SUCCESS;
                if let Some((to, _)) = sent {
                    // SAFETY: the slot's buffers hold a header each and outlive the exchange.
                    code = unsafe { nccl.send(data, HEADER_LEN, DataType::U64, to, comm, stream) };
                }
                match from {
                    // SAFETY: as above.
                    Some(from) if code == SUCCESS => unsafe {
                        nccl.recv(into, HEADER_LEN, DataType::U64, from, comm, stream)
                    },
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
            self.post(about, |nccl, comm, stream| unsafe {
                nccl.all_gather(data, into, HEADER_LEN, super::library::DataType::U64, comm, stream)
            })?;
        }
        self.download(about, slot, HEADER_LEN * self.size)?;
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
        let (one, all, context) = (HEADER_LEN, HEADER_LEN * self.size, self.stream.context());
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
        let (start, limit) = (Instant::now(), self.deadline.min(FAREWELL));
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
            && unsafe { self.library.finalize(comm) }.is_ok()
            && until(&|| unsafe { self.library.state(comm) }.ok())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(failure) = &lock(&self.state).failure {
            self.lifeline.fail(failure);
        }
        let comm = std::mem::replace(&mut lock(&self.state).comm, std::ptr::null_mut());
        if comm.is_null() || self.stream.context().bind_to_thread().is_err() {
            return;
        }
        // A panicking rank's peers will not finish what it began.
        let clean = !std::thread::panicking() && self.farewell(comm);
        // SAFETY: taken out above, so this is the last use. Without a clean end the work is cut off.
        unsafe { if clean { self.library.destroy(comm) } else { self.library.abort(comm) } }
    }
}

fn failed(rank: usize, size: usize, about: &About, message: String) -> Error {
    let peers = about.peer.map_or(format!("all {size} ranks"), |peer| format!("rank {peer}"));
    Error::Nccl { rank, operation: about.operation.to_string(), peers, bytes: about.bytes, message }
}

fn cuda_text(error: DriverError) -> String {
    format!("CUDA says: {error}")
}
