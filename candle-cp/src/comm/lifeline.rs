//! How the processes of a group learn that one has failed: the connections over which they met stay open, and rank 0
//! passes on what it hears. One that breaks off without a farewell stands for a process that was killed.
//!
//! Tells only; ending a wait is up to the backend.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Result, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Kinds of messages; each is a kind, a rank, a length and a text.
const BEAT: u8 = 0;
const FAILED: u8 = 1;
const FAREWELL: u8 = 2;
/// Passed on, like failures: the rank sends nothing more, but its process still listens.
const LEAVING: u8 = 3;
const HEAD_BYTES: usize = 9;
const MAX_TEXT: usize = 1 << 14;
/// Something is sent this often, so that nobody between the processes takes the connection for an idle one.
const PERIOD: Duration = Duration::from_secs(20);
/// Longest time that telling a peer may take.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// This process's end of the connections of a group. Dropped, it says farewell to the others.
#[derive(Debug)]
pub struct Lifeline {
    shared: Arc<Shared>,
    listeners: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    rank: usize,
    /// By the rank at the other end; for writing.
    lines: Vec<(usize, Mutex<TcpStream>)>,
    /// The rank that failed first, as far as this process knows, and what it said.
    failure: OnceLock<(usize, String)>,
    /// Held while the others are told of a failure or a farewell.
    telling: Mutex<()>,
    /// Ranks that have said that they leave.
    left: Mutex<BTreeSet<usize>>,
    ended: AtomicBool,
}

impl Lifeline {
    /// Listens to the other processes: `lines` are connections by the rank at the other end, on rank 0 to all other ranks, on
    /// those to rank 0. There are none in a group of one.
    ///
    /// # Errors
    /// The system has no more threads or files.
    pub fn new(rank: usize, lines: Vec<(usize, TcpStream)>) -> Result<Self> {
        let mut heard = Vec::with_capacity(lines.len());
        for (peer, line) in &lines {
            line.set_nonblocking(false)?;
            line.set_read_timeout(Some(PERIOD))?;
            line.set_write_timeout(Some(PATIENCE))?;
            line.set_nodelay(true)?;
            heard.push((*peer, line.try_clone()?));
        }
        let lines = lines.into_iter().map(|(peer, line)| (peer, Mutex::new(line))).collect();
        let (failure, telling, left, ended) = Default::default();
        let shared = Arc::new(Shared { rank, lines, failure, telling, left, ended });
        let mut lifeline = Self { shared: shared.clone(), listeners: Vec::with_capacity(heard.len()) };
        for (peer, line) in heard {
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name(format!("lifeline to rank {peer}"));
            let listener = thread.spawn(move || shared.listen(peer, line));
            lifeline.listeners.push(listener.inspect_err(|error| lifeline.fail(&error.to_string()))?);
        }
        Ok(lifeline)
    }

    /// The rank that failed first, as far as this process knows, and what it said; it may be this one.
    pub fn failure(&self) -> Option<(usize, String)> {
        self.shared.failure.get().cloned()
    }

    /// Whether a rank has failed, as far as this process knows.
    pub fn has_failed(&self) -> bool {
        self.shared.failure.get().is_some()
    }

    /// As [`Lifeline::failure`], which is waited for.
    pub fn failure_within(&self, time: Duration) -> Option<(usize, String)> {
        let start = Instant::now();
        while self.shared.failure.get().is_none() && start.elapsed() < time {
            std::thread::sleep(PAUSE);
        }
        self.failure()
    }

    /// Tells the others that this rank has failed; only the first failure of a group is told.
    pub fn fail(&self, reason: &str) {
        self.shared.fail(self.shared.rank, reason, None);
    }

    /// Tells the others that this rank sends nothing more. It goes on listening until it is dropped.
    pub fn leave(&self) {
        self.shared.leave(self.shared.rank, None);
    }

    /// Whether a rank has said that it sends nothing more.
    pub fn has_left(&self, rank: usize) -> bool {
        self.shared.left.lock().unwrap_or_else(PoisonError::into_inner).contains(&rank)
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("panicked");
        }
        self.shared.part();
        for listener in self.listeners.drain(..) {
            let _ = listener.join();
        }
    }
}

impl Shared {
    /// Passes on and notes a failure that was heard `from` a peer. In this order: whoever finds it noted may end this
    /// process, which must not look to the others as if it had been the first to fail.
    fn fail(&self, rank: usize, reason: &str, from: Option<usize>) {
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        if self.failure.get().is_some() {
            return;
        }
        for (_, line) in self.lines.iter().filter(|(peer, _)| Some(*peer) != from) {
            self.say(line, FAILED, rank, reason);
        }
        let _ = self.failure.set((rank, reason.to_string()));
    }

    /// Closes all connections, with a farewell if nothing has failed.
    fn part(&self) {
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        self.ended.store(true, Ordering::SeqCst);
        for (_, line) in &self.lines {
            if self.failure.get().is_none() {
                self.say(line, FAREWELL, self.rank, "");
            }
            // Also wakes the listener.
            let _ = line.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
        }
    }

    /// Notes and passes on that a rank leaves.
    fn leave(&self, rank: usize, from: Option<usize>) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).insert(rank);
        for (_, line) in self.lines.iter().filter(|(peer, _)| Some(*peer) != from) {
            self.say(line, LEAVING, rank, "");
        }
    }

    /// Best effort: a peer that is gone has been noticed by its listener.
    fn say(&self, line: &Mutex<TcpStream>, kind: u8, rank: usize, text: &str) {
        let mut end = text.len().min(MAX_TEXT);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut message = vec![kind];
        message.extend((rank as u32).to_le_bytes());
        message.extend((end as u32).to_le_bytes());
        message.extend(&text.as_bytes()[..end]);
        let _ = line.lock().unwrap_or_else(PoisonError::into_inner).write_all(&message);
    }

    fn listen(&self, peer: usize, mut line: TcpStream) {
        loop {
            match self.hear(peer, &mut line) {
                Ok((BEAT, ..)) => {}
                Ok((LEAVING, rank, _)) => self.leave(rank, Some(peer)),
                Ok((FAREWELL, ..)) => return,
                Ok((_, rank, text)) => return self.fail(rank, &text, Some(peer)),
                Err(_) if self.ended.load(Ordering::SeqCst) => return,
                Err(e) => {
                    let reason = format!("its process ended without a word, or cannot be reached any more ({e})");
                    return self.fail(peer, &reason, Some(peer));
                }
            }
        }
    }

    fn hear(&self, peer: usize, line: &mut TcpStream) -> Result<(u8, usize, String)> {
        let mut head = [0; HEAD_BYTES];
        self.fill(peer, line, &mut head)?;
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        if head[0] > LEAVING || number(5) > MAX_TEXT {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut text = vec![0; number(5)];
        self.fill(peer, line, &mut text)?;
        Ok((head[0], number(1), String::from_utf8_lossy(&text).into_owned()))
    }

    /// Reads all of `into`; sends a sign of life whenever nothing has come for a while.
    fn fill(&self, peer: usize, line: &mut TcpStream, mut into: &mut [u8]) -> Result<()> {
        while !into.is_empty() {
            match line.read(into) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => into = &mut into[n..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    self.lines.iter().filter(|(to, _)| *to == peer).for_each(|(_, l)| self.say(l, BEAT, self.rank, ""));
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_secs(30);

    /// The ends of a group's connections, by rank.
    fn ends(size: usize) -> Vec<Vec<(usize, TcpStream)>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut all = vec![Vec::new()];
        for rank in 1..size {
            all.push(vec![(0, TcpStream::connect(listener.local_addr().unwrap()).unwrap())]);
            all[0].push((rank, listener.accept().unwrap().0));
        }
        all
    }

    fn group(size: usize) -> Vec<Lifeline> {
        ends(size).into_iter().enumerate().map(|(rank, lines)| Lifeline::new(rank, lines).unwrap()).collect()
    }

    #[test]
    fn all_are_told_who_failed_first_and_why() {
        for failing in 0..4 {
            let group = group(4);
            let long = "é".repeat(MAX_TEXT);
            group[failing].fail(&long);
            for lifeline in &group {
                let (rank, text) = lifeline.failure_within(LONG).unwrap();
                assert_eq!(rank, failing);
                let whole = if lifeline.shared.rank == failing { long.len() } else { MAX_TEXT };
                assert!(long.starts_with(&text) && text.len() == whole);
            }
            group[(failing + 1) % 4].fail("later");
            assert!(group.iter().all(|lifeline| lifeline.failure().unwrap().0 == failing));
        }
    }

    #[test]
    fn a_farewell_is_no_failure_in_any_order() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
            let mut group: Vec<_> = group(3).into_iter().map(Some).collect();
            for rank in order {
                drop(group[rank].take());
                for left in group.iter().flatten() {
                    assert_eq!(left.failure_within(Duration::from_millis(30)), None, "rank {rank} left");
                }
            }
        }
        drop(Lifeline::new(0, Vec::new()).unwrap());
    }

    #[test]
    fn who_leaves_is_known_to_all_and_still_hears() {
        for leaving in 0..3 {
            let group = group(3);
            group[leaving].leave();
            for lifeline in &group {
                let start = Instant::now();
                while !lifeline.has_left(leaving) {
                    assert!(start.elapsed() < LONG, "rank {} does not hear of {leaving}", lifeline.shared.rank);
                    std::thread::sleep(PAUSE);
                }
                assert!(!lifeline.has_left((leaving + 1) % 3) && lifeline.failure().is_none());
            }
            group[(leaving + 1) % 3].fail("later");
            assert!(group.iter().all(|lifeline| lifeline.failure_within(LONG).is_some()));
        }
    }

    #[test]
    fn who_is_gone_without_a_word_has_failed() {
        for gone in 0..3 {
            let mut left = Vec::new();
            for (rank, lines) in ends(3).into_iter().enumerate() {
                match rank == gone {
                    true => drop(lines),
                    false => left.push(Lifeline::new(rank, lines).unwrap()),
                }
            }
            for lifeline in &left {
                let (rank, text) = lifeline.failure_within(LONG).unwrap();
                assert!(rank == gone && text.starts_with("its process ended without a word"), "{rank}: {text}");
            }
        }
    }

    /// Whoever acts on a failure may end at once: the others know by then, and do not take it for the one that failed.
    #[test]
    fn a_failure_is_known_when_the_others_are_told() {
        for _ in 0..50 {
            let mut group = group(8);
            drop(group.pop().map(|last| last.shared.lines[0].1.lock().unwrap().shutdown(Shutdown::Both)));
            let first = group.remove(0);
            while !first.has_failed() {
                std::hint::spin_loop();
            }
            drop(first);
            for lifeline in &group {
                let (rank, text) = lifeline.failure_within(LONG).unwrap();
                assert_eq!(rank, 7, "rank {}: {text}", lifeline.shared.rank);
            }
        }
    }

    #[test]
    fn a_panic_and_noise_on_the_line_are_failures() {
        let mut all = group(2);
        let last = all.pop().unwrap();
        let panicked = std::thread::spawn(move || {
            let _last = last;
            panic!("as planned");
        });
        assert!(panicked.join().is_err());
        assert_eq!(all[0].failure_within(LONG), Some((1, "panicked".to_string())));

        let mut lines = ends(2);
        lines.pop().unwrap()[0].1.write_all(&[9; HEAD_BYTES]).unwrap();
        let first = Lifeline::new(0, lines.pop().unwrap()).unwrap();
        assert_eq!(first.failure_within(LONG).unwrap().0, 1);
    }
}
