//! How the processes of a group meet: rank 0 listens at an address that all know and hands everyone the same bytes
//! (the id that NCCL groups start from) once all have come. Plain TCP; no GPU is touched.
//!
//! A caller says who it is: magic, protocol, rank, group size, version of this crate. Rank 0 keeps callers waiting until
//! the group is complete, so that nobody goes on into a group that will not be. If something is wrong (another size,
//! another version, a rank twice, a rank that does not come in time) all who came are told what, and all fail. Strangers,
//! who do not speak this protocol, are hung up on and counted. Nothing is secret and nobody is authenticated: the port
//! belongs in a trusted network.

use crate::error::{Error, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// What rank 0 hands out.
pub type Payload = [u8; PAYLOAD_BYTES];

/// Length of the [`Payload`] in bytes: that of NCCL's unique id.
pub const PAYLOAD_BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"candleCP";
const PROTOCOL: u32 = 1;
const VERSION_BYTES: usize = 28;
const NONCE_BYTES: usize = 16;
const HELLO_BYTES: usize = 64;
/// A caller that has not introduced itself after this long is a stranger.
const PATIENCE: Duration = Duration::from_secs(5);
/// Strangers that may hang on the line at a time; more are hung up on at once.
const STRANGERS: usize = 64;
const PAUSE: Duration = Duration::from_millis(5);
const ACCEPTED: u8 = 1;
const REFUSED: u8 = 2;
/// Said at once to callers of a meeting with a nonce: this is the one they look for.
const SEATED: u8 = 3;
const HEAD_BYTES: usize = 11;

/// What callers know of a meeting beside its address, so that they do not take another for it. Zeros where the address is
/// all that they know.
pub(super) type Nonce = [u8; NONCE_BYTES];
const NO_NONCE: Nonce = [0; NONCE_BYTES];

/// Where a group meets, and who this process is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meeting {
    /// Name or IP address of the machine of rank 0.
    pub address: String,
    /// TCP port at which rank 0 listens.
    pub port: u16,
    /// This rank, `0..size`.
    pub rank: usize,
    /// Ranks of the group.
    pub size: usize,
    /// Longest time until all ranks have come.
    pub deadline: Duration,
}

/// How a caller introduces itself.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hello {
    protocol: u32,
    rank: u32,
    size: u32,
    version: [u8; VERSION_BYTES],
    nonce: Nonce,
}

impl Hello {
    fn of(meeting: &Meeting, nonce: &Nonce) -> Result<Self> {
        let number = |x: usize| u32::try_from(x).map_err(|_| meeting.error("ranks are counted in 32 bits"));
        let mut version = [0; VERSION_BYTES];
        let text = env!("CARGO_PKG_VERSION").as_bytes();
        let len = text.len().min(VERSION_BYTES);
        version[..len].copy_from_slice(&text[..len]);
        let (rank, size) = (number(meeting.rank)?, number(meeting.size)?);
        Ok(Self { protocol: PROTOCOL, rank, size, version, nonce: *nonce })
    }

    fn to_bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.protocol.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.rank.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.size.to_le_bytes());
        bytes[20..48].copy_from_slice(&self.version);
        bytes[48..].copy_from_slice(&self.nonce);
        bytes
    }

    fn from_bytes(bytes: &[u8; HELLO_BYTES]) -> Self {
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut version = [0; VERSION_BYTES];
        version.copy_from_slice(&bytes[20..48]);
        let mut nonce = NO_NONCE;
        nonce.copy_from_slice(&bytes[48..]);
        Self { protocol: number(8), rank: number(12), size: number(16), version, nonce }
    }

    fn version(&self) -> String {
        String::from_utf8_lossy(&self.version).trim_end_matches('\0').to_string()
    }

    /// What keeps this caller out of the meeting, if anything.
    fn fault(&self, meeting: &Meeting) -> Option<String> {
        let rank = self.rank;
        let ours = env!("CARGO_PKG_VERSION");
        if self.protocol != PROTOCOL || self.version() != ours {
            let theirs = self.version();
            return Some(format!("rank {rank} runs version {theirs:?} and rank 0 {ours:?}; start the same program"));
        }
        if self.size as usize != meeting.size {
            let (theirs, ours) = (self.size, meeting.size);
            return Some(format!("rank {rank} was told of {theirs} ranks and rank 0 of {ours}; set WORLD_SIZE alike"));
        }
        if rank == 0 || self.size <= rank {
            return Some(format!("a caller says it is rank {rank}, but 1..{} are expected", self.size));
        }
        None
    }
}

/// Somebody who called and is not known yet.
struct Caller {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    bytes: [u8; HELLO_BYTES],
    read: usize,
}

enum Heard {
    NotYet,
    Stranger,
    All(Hello),
}

impl Caller {
    fn listen(&mut self) -> Heard {
        while self.read < HELLO_BYTES {
            match self.stream.read(&mut self.bytes[self.read..]) {
                Ok(0) => return Heard::Stranger,
                Ok(n) => self.read += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Heard::Stranger,
            }
            let known = self.read.min(MAGIC.len());
            if self.bytes[..known] != MAGIC[..known] {
                return Heard::Stranger;
            }
        }
        match self.read == HELLO_BYTES {
            true => Heard::All(Hello::from_bytes(&self.bytes)),
            false if self.since.elapsed() > PATIENCE => Heard::Stranger,
            false => Heard::NotYet,
        }
    }
}

/// Who has come so far.
struct Room {
    /// By rank; seat 0 stays empty.
    seats: Vec<Option<(TcpStream, SocketAddr)>>,
    strangers: usize,
}

impl Room {
    /// Whether all have come and are still there. A seat whose owner has hung up is free again: its process is started anew.
    fn is_full(&mut self) -> bool {
        if !self.seats[1..].iter().all(Option::is_some) {
            return false;
        }
        for seat in &mut self.seats {
            seat.take_if(|(stream, _)| has_hung_up(stream));
        }
        self.seats[1..].iter().all(Option::is_some)
    }

    fn ranks(&self, present: bool) -> String {
        let ranks = (1..self.seats.len()).filter(|&r| self.seats[r].is_some() == present);
        let list: Vec<String> = ranks.map(|r| r.to_string()).collect();
        if list.is_empty() { "none".to_string() } else { list.join(", ") }
    }

    /// Gives a caller its seat, which may be one whose owner has hung up.
    fn seat(&mut self, rank: usize, stream: TcpStream, from: SocketAddr) -> Option<String> {
        if let Some((_, first)) = self.seats[rank].as_ref().filter(|(old, _)| !has_hung_up(old)) {
            let fault = format!("rank {rank} came twice, from {first} and {from}; give every process its own RANK");
            answer(&stream, REFUSED, fault.as_bytes());
            return Some(fault);
        }
        self.seats[rank] = Some((stream, from));
        None
    }

    /// Answers all who came; gives back their connections, by rank.
    fn dismiss(self, status: u8, content: &[u8]) -> Vec<(usize, TcpStream)> {
        let seated = self.seats.into_iter().enumerate().filter_map(|(rank, seat)| Some((rank, seat?.0)));
        seated.inspect(|(_, stream)| answer(stream, status, content)).collect()
    }
}

/// Of a stream that does not block.
fn has_hung_up(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != ErrorKind::WouldBlock,
    }
}

/// Best effort: a caller that has hung up finds out by itself.
fn answer(mut stream: &TcpStream, status: u8, content: &[u8]) {
    let len = content.len().min(u16::MAX.into());
    let mut bytes = MAGIC.to_vec();
    bytes.push(status);
    bytes.extend((len as u16).to_le_bytes());
    bytes.extend(&content[..len]);
    let sent = stream.set_nonblocking(false).and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
    let _ = sent.and_then(|()| stream.write_all(&bytes)).and_then(|()| stream.flush());
}

impl Meeting {
    /// Meets the other ranks. On rank 0 `payload` is called once, and all ranks get what it returned.
    ///
    /// # Errors
    /// [`Error::Rendezvous`]: the address cannot be used, a rank does not fit in or does not come before the deadline.
    /// [`Error::Argument`] for a rank outside of the group; what `payload` returns.
    pub fn meet(&self, payload: impl FnOnce() -> Result<Payload>) -> Result<Payload> {
        Ok(self.meet_and_stay(payload)?.0)
    }

    /// As [`Meeting::meet`], and the connections stay open: by the rank at the other end, on rank 0 those to all other
    /// ranks, on those the one to rank 0; for a [`Lifeline`](super::lifeline::Lifeline).
    ///
    /// # Errors
    /// As [`Meeting::meet`].
    pub fn meet_and_stay(
        &self,
        payload: impl FnOnce() -> Result<Payload>,
    ) -> Result<(Payload, Vec<(usize, TcpStream)>)> {
        self.check()?;
        if self.rank > 0 {
            let (payload, stream) = self.join_and_stay()?;
            return Ok((payload, vec![(0, stream)]));
        }
        let payload = payload()?;
        let lines = if self.size > 1 { self.host_and_stay(self.listen()?, &payload, &NO_NONCE)? } else { Vec::new() };
        Ok((payload, lines))
    }

    /// A listener at this address, for [`Meeting::host`].
    ///
    /// # Errors
    /// [`Error::Rendezvous`] if the port is taken or the address is not one of this machine.
    pub fn listen(&self) -> Result<TcpListener> {
        TcpListener::bind((self.address.as_str(), self.port)).map_err(|e| {
            self.error(match e.kind() {
                ErrorKind::AddrInUse => format!("the port is taken ({e}); choose another MASTER_PORT for all ranks"),
                ErrorKind::PermissionDenied => format!("the port is reserved ({e}); choose a MASTER_PORT above 1023"),
                _ => format!("cannot listen there: {e}; MASTER_ADDR has to be an address of the machine of rank 0"),
            })
        })
    }

    /// Rank 0's part: waits for all other ranks at a listener, then hands out the payload.
    ///
    /// # Errors
    /// [`Error::Rendezvous`].
    pub fn host(&self, listener: TcpListener, payload: &Payload) -> Result<()> {
        self.host_and_stay(listener, payload, &NO_NONCE).map(drop)
    }

    /// As [`Meeting::host`], for callers that know a nonce; the connections stay open.
    pub(super) fn host_and_stay(
        &self,
        listener: TcpListener,
        payload: &Payload,
        nonce: &Nonce,
    ) -> Result<Vec<(usize, TcpStream)>> {
        self.check()?;
        let mut room = Room { seats: (0..self.size).map(|_| None).collect(), strangers: 0 };
        match self.fill(&listener, &mut room, nonce) {
            Ok(()) => Ok(room.dismiss(ACCEPTED, payload)),
            Err(message) => {
                room.dismiss(REFUSED, message.as_bytes());
                Err(self.error(message))
            }
        }
    }

    fn fill(&self, listener: &TcpListener, room: &mut Room, nonce: &Nonce) -> std::result::Result<(), String> {
        listener.set_nonblocking(true).map_err(|e| format!("cannot listen without blocking: {e}"))?;
        let start = Instant::now();
        let mut callers: Vec<Caller> = Vec::new();
        loop {
            while let Ok((stream, from)) = listener.accept() {
                if callers.len() >= STRANGERS + self.size || stream.set_nonblocking(true).is_err() {
                    room.strangers += 1;
                    continue;
                }
                callers.push(Caller { stream, from, since: Instant::now(), bytes: [0; HELLO_BYTES], read: 0 });
            }
            let mut unknown = Vec::new();
            for mut caller in callers {
                match caller.listen() {
                    Heard::NotYet => unknown.push(caller),
                    Heard::Stranger => room.strangers += 1,
                    Heard::All(hello) if hello.nonce != *nonce => room.strangers += 1,
                    Heard::All(hello) => {
                        let fault = match hello.fault(self) {
                            Some(fault) => {
                                answer(&caller.stream, REFUSED, fault.as_bytes());
                                Some(fault)
                            }
                            None => {
                                if *nonce != NO_NONCE {
                                    answer(&caller.stream, SEATED, &[]);
                                    let _ = caller.stream.set_nonblocking(true);
                                }
                                room.seat(hello.rank as usize, caller.stream, caller.from)
                            }
                        };
                        if let Some(fault) = fault {
                            return Err(fault);
                        }
                    }
                }
            }
            callers = unknown;
            if room.is_full() {
                return Ok(());
            }
            if start.elapsed() >= self.deadline {
                return Err(format!(
                    "not all ranks came within {:?}: missing {}, came {}, and {} that do not speak this protocol; start \
                     the missing ranks, or raise the deadline",
                    self.deadline,
                    room.ranks(false),
                    room.ranks(true),
                    room.strangers
                ));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// The part of ranks 1 and up: calls rank 0 until it answers or the deadline passes.
    ///
    /// # Errors
    /// [`Error::Rendezvous`].
    pub fn join(&self) -> Result<Payload> {
        Ok(self.join_and_stay()?.0)
    }

    fn join_and_stay(&self) -> Result<(Payload, TcpStream)> {
        self.check()?;
        let start = Instant::now();
        let left = || self.deadline.saturating_sub(start.elapsed());
        let mut stream = loop {
            match self.call(left()) {
                Ok(stream) => break stream,
                Err(e) if left().is_zero() => {
                    return Err(self.error(format!(
                        "rank 0 does not answer within {:?} ({e}); start it, and check MASTER_ADDR and MASTER_PORT",
                        self.deadline
                    )));
                }
                Err(_) => std::thread::sleep(PAUSE.min(left())),
            }
        };
        let hello = Hello::of(self, &NO_NONCE)?.to_bytes();
        stream.write_all(&hello).map_err(|e| self.error(format!("rank 0 hung up: {e}")))?;
        let (status, content) = self.answered(&mut stream, &left)?;
        Ok((self.payload(status, &content)?, stream))
    }

    /// As [`Meeting::join`], where rank 0 is at one of several addresses: they are tried in turn until one answers as the
    /// meeting with this nonce.
    #[cfg(any(test, feature = "mpi"))]
    pub(super) fn join_at(&self, candidates: &[SocketAddr], nonce: &Nonce) -> Result<(Payload, TcpStream)> {
        self.check()?;
        let start = Instant::now();
        let left = || self.deadline.saturating_sub(start.elapsed());
        let hello = Hello::of(self, nonce)?.to_bytes();
        loop {
            let mut tried = String::new();
            for address in candidates {
                // As in `call`; the first word comes soon where it comes at all.
                let soon = || left().clamp(Duration::from_millis(1), Duration::from_secs(1));
                let called = TcpStream::connect_timeout(address, soon()).and_then(|mut stream| {
                    stream.write_all(&hello)?;
                    Ok(stream)
                });
                let met = called.map_err(|e| self.error(e)).and_then(|mut stream| {
                    let word = self.answered(&mut stream, &|| Duration::ZERO)?;
                    Ok((stream, word))
                });
                match met {
                    Ok((mut stream, (SEATED, _))) => {
                        let (status, content) = self.answered(&mut stream, &left)?;
                        return Ok((self.payload(status, &content)?, stream));
                    }
                    Ok((_, (status, content))) => {
                        return Err(self
                            .payload(status, &content)
                            .err()
                            .unwrap_or_else(|| self.error("rank 0 gave no seat before its answer")));
                    }
                    Err(e) => tried += &format!("; {address}: {e}"),
                }
            }
            if left().is_zero() {
                let limit = self.deadline;
                return Err(
                    self.error(format!("rank 0 does not answer within {limit:?} at any of its addresses{tried}"))
                );
            }
            std::thread::sleep(PAUSE.min(left()));
        }
    }

    /// The next answer of rank 0: its status and content.
    fn answered(&self, stream: &mut TcpStream, left: &dyn Fn() -> Duration) -> Result<(u8, Vec<u8>)> {
        let mut head = [0; HEAD_BYTES];
        self.read(stream, &mut head, left)?;
        if head[..8] != MAGIC {
            let hint = "something else listens there; choose another MASTER_PORT for all ranks";
            return Err(self.error(hint));
        }
        let mut content = vec![0; u16::from_le_bytes([head[9], head[10]]).into()];
        self.read(stream, &mut content, left)?;
        Ok((head[8], content))
    }

    fn payload(&self, status: u8, content: &[u8]) -> Result<Payload> {
        match (status, Payload::try_from(content)) {
            (ACCEPTED, Ok(payload)) => Ok(payload),
            (REFUSED, _) => Err(self.error(format!("rank 0 says: {}", String::from_utf8_lossy(content)))),
            _ => Err(self.error(format!("rank 0 answered {} bytes with status {status}", content.len()))),
        }
    }

    fn call(&self, left: Duration) -> std::io::Result<TcpStream> {
        let mut last = std::io::Error::new(ErrorKind::NotFound, "the name has no address");
        for address in (self.address.as_str(), self.port).to_socket_addrs()? {
            // One second each, so that all addresses get their turn and a rank 0 that comes late is found.
            let patience = left.clamp(Duration::from_millis(1), Duration::from_secs(1));
            match TcpStream::connect_timeout(&address, patience) {
                Ok(stream) => return Ok(stream),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    fn read(&self, stream: &mut TcpStream, mut into: &mut [u8], left: &dyn Fn() -> Duration) -> Result<()> {
        while !into.is_empty() {
            // Longer than rank 0's own deadline, so that its explanation arrives.
            let patience = left() + PATIENCE;
            let read = stream.set_read_timeout(Some(patience)).and_then(|()| stream.read(into));
            match read {
                Ok(0) => return Err(self.error("rank 0 hung up without an answer; its own output tells why")),
                Ok(n) => into = &mut into[n..],
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(
                        self.error(format!("rank 0 took the call, but said nothing within {:?}", self.deadline))
                    );
                }
                Err(e) => return Err(self.error(format!("rank 0 hung up: {e}"))),
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if self.rank < self.size {
            return Ok(());
        }
        let allowed = format!("a group of {} has the ranks 0..{}", self.size, self.size);
        Err(Error::argument("rank", self.rank, allowed, "set RANK and WORLD_SIZE to fit"))
    }

    pub(super) fn error(&self, message: impl ToString) -> Error {
        Error::Rendezvous {
            rank: self.rank,
            size: self.size,
            address: format!("{}:{}", self.address, self.port),
            message: message.to_string(),
        }
    }
}
