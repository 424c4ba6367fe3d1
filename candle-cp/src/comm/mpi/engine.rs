//! The thread that talks to MPI: it posts what other threads hand to it and polls until it is done.

use super::calls::{Mpi, Request};
use super::landing::{self, Landing};
use super::pending::Ticket;
use super::shared::Shared;
use crate::comm::group::Channel;
use crate::comm::header::{self, HEADER_LEN, Header};
use crate::comm::trace::OpenSpan;
use crate::comm::{Expected, Tag};
use crate::error::{Error, Result};
use candle_core::Tensor;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

const HEADER_BYTES: usize = HEADER_LEN * size_of::<u64>();
/// After something has happened it is polled without a pause for this long; answers of small messages come meanwhile.
const SPIN: Duration = Duration::from_micros(50);
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
/// While large messages travel: MPI moves a limited amount at each poll.
const PAUSE_OF_TRANSFERS: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_micros(500);
/// With nothing on its way, for a while and then.
const IDLE: Duration = Duration::from_millis(1);
const LONG_IDLE: Duration = Duration::from_millis(10);
const LONG: Duration = Duration::from_secs(1);

/// An exchange that a rank posts.
pub struct Post {
    pub channel: Channel,
    pub tag: Tag,
    /// Receiver, contiguous tensor on the CPU, its header, and the span of the transfer.
    pub send: Option<(usize, Tensor, Header, OpenSpan)>,
    pub receive: Option<Expected>,
    pub ticket: Arc<Ticket>,
}

/// What a request of MPI is a part of.
enum Job {
    Send(u64),
    Header(usize, Channel),
    /// Bytes of one piece.
    Piece(u64, usize),
}

struct Sending {
    tag: Tag,
    to: usize,
    /// Read by MPI until all parts are done.
    _header: Box<[u64; HEADER_LEN]>,
    _tensor: Tensor,
    transfer: OpenSpan,
    bytes: usize,
    parts: usize,
    ticket: Arc<Ticket>,
}

struct Receiving {
    tag: Tag,
    from: usize,
    /// Written by MPI until all parts are done.
    landing: Landing,
    dims: Vec<usize>,
    bytes: usize,
    parts: usize,
    ticket: Arc<Ticket>,
}

/// Messages from one peer in one channel. Only the header of the next one is listened for: its payload has to be posted
/// before that of the one after it.
#[derive(Default)]
struct Lane {
    waiting: VecDeque<(Tag, Expected, Arc<Ticket>)>,
    header: Box<[u64; HEADER_LEN]>,
    listening: bool,
}

pub struct Engine {
    mpi: Mpi,
    shared: Arc<Shared>,
    piece_bytes: usize,
    requests: Vec<Request>,
    /// By request.
    jobs: Vec<Job>,
    sending: BTreeMap<u64, Sending>,
    receiving: BTreeMap<u64, Receiving>,
    lanes: BTreeMap<(usize, Channel), Lane>,
    next: u64,
    finalized: bool,
}

impl Engine {
    pub fn new(mpi: Mpi, shared: Arc<Shared>, piece_bytes: usize) -> Self {
        let (requests, jobs, sending, receiving, lanes) = Default::default();
        Self { mpi, shared, piece_bytes, requests, jobs, sending, receiving, lanes, next: 0, finalized: false }
    }

    /// Works until nobody can post any more; then messages on their way have `patience` to be done, and MPI is finalized.
    /// Where the group fails, MPI is left as it is: finalizing it would wait for ranks that are gone.
    pub fn run(mut self, posts: &Receiver<Post>, patience: Duration) {
        shorten_pauses();
        let mut quiet = Instant::now();
        loop {
            match self.next_post(posts, quiet.elapsed()) {
                Ok(post) => {
                    self.accept(post);
                    posts.try_iter().for_each(|post| self.accept(post));
                    quiet = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.shared.is_over() {
                return;
            }
            if self.progress() {
                quiet = Instant::now();
            }
        }
        let start = Instant::now();
        while !self.requests.is_empty() && start.elapsed() < patience && !self.shared.is_over() {
            self.progress();
            std::thread::sleep(SHORTEST_PAUSE);
        }
        if !self.requests.is_empty() {
            self.shared.end("left the group while messages to or for it were on their way");
        }
        if self.shared.is_over() {
            return;
        }
        self.shared.leave();
        self.mpi.finalize();
        self.finalized = true;
    }

    /// What is posted before the next poll is due.
    fn next_post(&self, posts: &Receiver<Post>, quiet: Duration) -> std::result::Result<Post, RecvTimeoutError> {
        if self.requests.is_empty() {
            return posts.recv_timeout(if quiet < LONG { IDLE } else { LONG_IDLE });
        }
        if quiet < SPIN {
            std::hint::spin_loop();
            return posts.try_recv().map_err(|e| match e {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            });
        }
        let transfers = !self.sending.is_empty() || !self.receiving.is_empty();
        let longest = if transfers { PAUSE_OF_TRANSFERS } else { LONGEST_PAUSE };
        posts.recv_timeout((quiet / 16).clamp(SHORTEST_PAUSE, longest))
    }

    fn accept(&mut self, post: Post) {
        let Post { channel, tag, send, receive, ticket } = post;
        if let Some((to, tensor, header, transfer)) = send {
            let sent = self.send(channel, (to, tensor, &header, transfer), tag, &ticket);
            sent.unwrap_or_else(|error| self.end(error, |error| ticket.sent(Err(error))));
        }
        if let Some(expected) = receive {
            let from = expected.from;
            self.lanes.entry((from, channel)).or_default().waiting.push_back((tag, expected, ticket));
            self.listen(from, channel);
        }
    }

    fn send(
        &mut self,
        channel: Channel,
        (to, tensor, header, transfer): (usize, Tensor, &Header, OpenSpan),
        tag: Tag,
        ticket: &Arc<Ticket>,
    ) -> Result<()> {
        let (bytes, id) = (header.bytes(), self.next);
        let data = landing::address(&tensor).expect("checked when posted");
        let numbers = Box::new(header.encode());
        let head = numbers.as_ptr().cast::<u8>();
        self.next += 1;
        // Kept from here on, whatever becomes of it.
        let (_header, _tensor, ticket) = (numbers, tensor, ticket.clone());
        let kept = Sending { tag, to, _header, _tensor, transfer, bytes, parts: 0, ticket };
        self.sending.insert(id, kept);
        let payload = pieces(bytes, self.piece_bytes).map(|(at, len)| (data.wrapping_add(at), len, tags(channel).1));
        for (data, len, mpi_tag) in std::iter::once((head, HEADER_BYTES, tags(channel).0)).chain(payload) {
            // SAFETY: a part of the header or of the tensor, which are kept until all parts are done.
            let request = unsafe { self.mpi.send(data, len, to, mpi_tag) };
            let request = request.map_err(|text| self.shared.fault(&tag.to_string(), to, bytes, text))?;
            self.requests.push(request);
            self.jobs.push(Job::Send(id));
            self.sending.get_mut(&id).expect("just inserted").parts += 1;
        }
        Ok(())
    }

    /// Listens for the next header of a lane, unless that is done already.
    fn listen(&mut self, from: usize, channel: Channel) {
        let lane = self.lanes.get_mut(&(from, channel)).expect("a lane of something posted");
        let Some((tag, expected, ticket)) = lane.waiting.front().filter(|_| !lane.listening) else { return };
        let (place, mpi_tag) = (lane.header.as_mut_ptr().cast::<u8>(), tags(channel).0);
        // SAFETY: the lane's header is not looked at until the request is done, and lanes stay.
        match unsafe { self.mpi.receive(place, HEADER_BYTES, from, mpi_tag) } {
            Ok(request) => {
                lane.listening = true;
                self.requests.push(request);
                self.jobs.push(Job::Header(from, channel));
            }
            Err(text) => {
                let error = self.shared.fault(&tag.to_string(), from, bytes_of(expected), text);
                let ticket = ticket.clone();
                self.end(error, |error| ticket.received(Err(error)));
            }
        }
    }

    /// Polls once; whether something was done.
    fn progress(&mut self) -> bool {
        if self.requests.is_empty() {
            // What counts as sent may not have left the process yet.
            let worked = self.mpi.work();
            return worked.map_err(|text| self.shared.end(&text)).is_err();
        }
        let mut tested = match self.mpi.test(&mut self.requests) {
            Ok(tested) => tested,
            Err(text) => {
                self.shared.end(&text);
                return true;
            }
        };
        // From the end, so that places ahead stay.
        tested.sort_unstable_by_key(|(place, _)| std::cmp::Reverse(*place));
        let taken = tested.into_iter().map(|(place, outcome)| {
            self.requests.swap_remove(place);
            (self.jobs.swap_remove(place), outcome)
        });
        let done: Vec<_> = taken.collect();
        let any = !done.is_empty();
        for (job, outcome) in done {
            match job {
                Job::Send(id) => self.sent(id, outcome),
                Job::Header(from, channel) => self.introduced(from, channel, outcome),
                Job::Piece(id, bytes) => self.came(id, bytes, outcome),
            }
        }
        any
    }

    fn sent(&mut self, id: u64, outcome: std::result::Result<usize, String>) {
        let Some(part_of) = self.sending.get_mut(&id) else { return };
        part_of.parts -= 1;
        if let Err(text) = outcome {
            let Sending { tag, to, bytes, ref ticket, .. } = *part_of;
            let (error, ticket) = (self.shared.fault(&tag.to_string(), to, bytes, text), ticket.clone());
            return self.end(error, |error| ticket.sent(Err(error)));
        }
        if part_of.parts == 0 {
            let done = self.sending.remove(&id).expect("just found");
            drop(done.transfer);
            done.ticket.sent(Ok(()));
        }
    }

    /// A header has come.
    fn introduced(&mut self, from: usize, channel: Channel, outcome: std::result::Result<usize, String>) {
        let lane = self.lanes.get_mut(&(from, channel)).expect("lanes stay");
        lane.listening = false;
        let (tag, expected, ticket) = lane.waiting.pop_front().expect("listened for");
        let dims = expected.shape.as_deref();
        let header = match outcome {
            Ok(HEADER_BYTES) => {
                header::checked(&lane.header[..], (self.shared.rank, from), (tag, expected.dtype, dims))
            }
            Ok(_) => header::checked(&[], (self.shared.rank, from), (tag, expected.dtype, dims)),
            Err(text) => Err(self.shared.fault(&tag.to_string(), from, bytes_of(&expected), text)),
        };
        match header.and_then(|header| self.receive(from, channel, header, &ticket)) {
            Ok(()) => self.listen(from, channel),
            Err(error) => self.end(error, |error| ticket.received(Err(error))),
        }
    }

    /// Makes room for the tensor that a header announces and receives it.
    fn receive(&mut self, from: usize, channel: Channel, header: Header, ticket: &Arc<Ticket>) -> Result<()> {
        let Header { tag, dtype, dims } = header;
        let room = dims
            .iter()
            .try_fold(dtype.size_in_bytes(), |bytes, &n| bytes.checked_mul(n))
            .and_then(|bytes| Some((bytes, Landing::new(dtype, bytes / dtype.size_in_bytes())?)));
        let Some((bytes, mut landing)) = room else {
            let (rank, operation, peers) = (self.shared.rank, tag.to_string(), format!("rank {from}"));
            let message = format!("there is no memory for {dtype:?} {dims:?}");
            return Err(Error::Mpi { rank, operation, peers, bytes: 0, message });
        };
        let (place, id) = (landing.place(), self.next);
        self.next += 1;
        if bytes == 0 {
            ticket.received(Ok((landing, dims)));
            return Ok(());
        }
        self.receiving.insert(id, Receiving { tag, from, landing, dims, bytes, parts: 0, ticket: ticket.clone() });
        for (at, len) in pieces(bytes, self.piece_bytes) {
            // SAFETY: a part of the landing, which is kept until all parts are done.
            let request = unsafe { self.mpi.receive(place.wrapping_add(at), len, from, tags(channel).1) };
            let request = request.map_err(|text| self.shared.fault(&tag.to_string(), from, bytes, text))?;
            self.requests.push(request);
            self.jobs.push(Job::Piece(id, len));
            self.receiving.get_mut(&id).expect("just inserted").parts += 1;
        }
        Ok(())
    }

    /// A piece has come.
    fn came(&mut self, id: u64, expected: usize, outcome: std::result::Result<usize, String>) {
        let Some(part_of) = self.receiving.get_mut(&id) else { return };
        part_of.parts -= 1;
        let whole = outcome.and_then(|bytes| match bytes == expected {
            true => Ok(()),
            false => Err(format!(
                "a piece of {bytes} bytes came where {expected} were announced; all ranks need the same piece_bytes"
            )),
        });
        if let Err(text) = whole {
            let Receiving { tag, from, bytes, ref ticket, .. } = *part_of;
            let (error, ticket) = (self.shared.fault(&tag.to_string(), from, bytes, text), ticket.clone());
            return self.end(error, |error| ticket.received(Err(error)));
        }
        if part_of.parts == 0 {
            let done = self.receiving.remove(&id).expect("just found");
            self.shared.counters.received(done.tag.traffic, done.bytes);
            done.ticket.received(Ok((done.landing, done.dims)));
        }
    }

    /// Ends the group for `error`, which the one who waits gets first.
    fn end(&self, error: Error, tell: impl FnOnce(Error)) {
        let text = error.to_string();
        tell(error);
        self.shared.end(&text);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.finalized {
            return;
        }
        // MPI may still read and write the memory of what is on its way, also from another process: it is never freed.
        let (sending, receiving) = (std::mem::take(&mut self.sending), std::mem::take(&mut self.receiving));
        std::mem::forget((sending, receiving, std::mem::take(&mut self.lanes)));
        if std::thread::panicking() {
            self.shared.end("the thread that talks to MPI has panicked");
        }
    }
}

/// The system may lengthen a pause by this thread's timer slack, 50 us unless it is set.
fn shorten_pauses() {
    #[cfg(target_os = "linux")]
    // SAFETY: concerns this thread's timers only; where it is refused, pauses are longer.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1000 as libc::c_ulong);
    }
}

/// MPI's tags of headers and of payloads in a channel.
fn tags(channel: Channel) -> (usize, usize) {
    (2 * channel as usize, 2 * channel as usize + 1)
}

/// Start and length of each piece.
fn pieces(bytes: usize, largest: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes).step_by(largest).map(move |at| (at, largest.min(bytes - at)))
}

fn bytes_of(expected: &Expected) -> usize {
    expected.shape.as_ref().map_or(0, |shape| shape.iter().product::<usize>() * expected.dtype.size_in_bytes())
}
