//! What a rank does, and when: spans of time, recorded while a [`Trace`] is switched on.

use super::Tag;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What a span is about. A picture has a row for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Row {
    /// Parts of a training step.
    Step,
    /// Work on this rank's device; on a GPU the launches, which the host is done with before the device is.
    Compute,
    /// This rank cannot go on for want of its peers.
    Waits,
    /// Messages that this rank sent, from the post to the arrival.
    Transfers,
}

impl Row {
    /// All rows, from the top.
    pub const ALL: [Self; 4] = [Self::Step, Self::Compute, Self::Waits, Self::Transfers];

    /// A name, such as `transfers`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Compute => "compute",
            Self::Waits => "waits",
            Self::Transfers => "transfers",
        }
    }
}

/// Something that took a while.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// What it is about.
    pub row: Row,
    /// What was done.
    pub name: &'static str,
    /// Begin, since 1970. Rank threads have one clock; processes each have their own, which agree as far as those of the
    /// system do: on one machine to the time it takes to read them, between machines as they are kept.
    pub begin: Duration,
    /// End, since 1970, not before the begin.
    pub end: Duration,
    /// Numbers that belong to it. Messages have `to` or `from` (a rank of the world), `bytes`, and `call` and `step` of
    /// their tag; work on what came has the `call` and the `step` of the message that brought it.
    pub numbers: Vec<(&'static str, u64)>,
}

impl Span {
    /// A number by its name.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.numbers.iter().find(|(found, _)| *found == name).map(|(_, number)| *number)
    }
}

/// Times that never run backwards, as times since 1970.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    origin: Instant,
    since_1970: Duration,
}

impl Clock {
    /// Set by the system's clock; a later correction of that does not reach it.
    pub fn start() -> Self {
        Self { origin: Instant::now(), since_1970: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() }
    }

    fn now(&self) -> Duration {
        self.since_1970 + self.origin.elapsed()
    }
}

#[derive(Debug)]
struct Recording {
    on: AtomicBool,
    clock: Clock,
    spans: Mutex<Vec<Span>>,
}

impl Recording {
    // Whole spans only: a panic elsewhere leaves nothing half-written.
    fn spans(&self) -> MutexGuard<'_, Vec<Span>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records what one rank does while it is switched on; a clone is cheap and records into the same place. The default
/// records nothing, ever.
///
/// ```
/// use candle_cp::comm::{Communicator, Local, Row};
/// let trace = Local::new().trace();
/// trace.start();
/// {
///     let _span = trace.span(Row::Compute, "a sum").with("numbers", 2);
///     assert_eq!(1 + 1, 2);
/// }
/// let spans = trace.stop();
/// assert_eq!((spans[0].name, spans[0].number("numbers")), ("a sum", Some(2)));
/// assert!(spans[0].begin <= spans[0].end);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Trace(Option<Arc<Recording>>);

impl Trace {
    /// Switched off, but can be switched on.
    pub(crate) fn new(clock: Clock) -> Self {
        Self(Some(Arc::new(Recording { on: AtomicBool::new(false), clock, spans: Mutex::default() })))
    }

    /// Forgets what was recorded, and records from now on.
    pub fn start(&self) {
        if let Some(recording) = &self.0 {
            recording.spans().clear();
            recording.on.store(true, Ordering::Relaxed);
        }
    }

    /// Records no new spans from now on; those that have ended, in the order of their ends.
    pub fn stop(&self) -> Vec<Span> {
        let Some(recording) = &self.0 else { return Vec::new() };
        recording.on.store(false, Ordering::Relaxed);
        std::mem::take(&mut *recording.spans())
    }

    /// A span that begins now and ends when what is returned is dropped. Costs one look at a flag while nothing is recorded.
    pub fn span(&self, row: Row, name: &'static str) -> OpenSpan {
        let recording = self.0.as_ref().filter(|recording| recording.on.load(Ordering::Relaxed));
        OpenSpan(recording.map(|recording| {
            let begin = recording.clock.now();
            (recording.clone(), Span { row, name, begin, end: begin, numbers: Vec::new() })
        }))
    }

    /// A message to a rank of the world that is posted now and has arrived when what is returned is dropped, on any thread:
    /// before the sender's [`Pending::wait`](super::Pending::wait) is over.
    pub(crate) fn transfer(&self, tag: Tag, to: usize, bytes: usize) -> OpenSpan {
        let span = self.span(Row::Transfers, tag.traffic.name()).with("to", to as u64).with("bytes", bytes as u64);
        span.with("call", tag.call).with("step", tag.step as u64)
    }

    /// A [`Pending::wait`](super::Pending::wait): for a message from a rank of the world, or for one to a rank to be taken.
    pub(crate) fn wait(&self, tag: Tag, from: Option<usize>, to: Option<usize>) -> OpenSpan {
        let span = self.span(Row::Waits, tag.traffic.name());
        let peers = [("from", from), ("to", to)].into_iter().filter_map(|(name, peer)| Some((name, peer?)));
        let span = peers.fold(span, |span, (name, peer)| span.with(name, peer as u64));
        span.with("call", tag.call).with("step", tag.step as u64)
    }
}

/// A span that has begun; it ends, and is recorded, when this is dropped.
#[derive(Debug)]
#[must_use = "the span ends when this is dropped"]
pub struct OpenSpan(Option<(Arc<Recording>, Span)>);

impl OpenSpan {
    /// Adds a number.
    pub fn with(mut self, name: &'static str, number: u64) -> Self {
        if let Some((_, span)) = &mut self.0 {
            span.numbers.push((name, number));
        }
        self
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        if let Some((recording, mut span)) = self.0.take() {
            // In the lock, so that the order of the list is that of the ends.
            let mut spans = recording.spans();
            span.end = recording.clock.now();
            spans.push(span);
        }
    }
}
