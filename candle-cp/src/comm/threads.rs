//! Ranks as threads of one process: no set-up, nothing is copied.

use super::group::{Channel, Group, Transport};
use super::mailbox::{Slot, Taken, Wait, World};
use super::{Alive, Clock, Communicator, Counters, Expected, Pending, Received, Tag};
use crate::error::{Error, Result};
use candle_core::Tensor;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How [`run`] starts its ranks.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Longest time that a rank waits for one message.
    pub deadline: Duration,
    /// Stack of each rank thread. Candle walks the graph recursively, so deep models need a large one; only what is
    /// used becomes real memory.
    pub stack_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(120), stack_bytes: 256 << 20 }
    }
}

/// Runs `f` on `size` rank threads and returns their results in rank order.
///
/// When a rank fails or panics, the others stop at their next wait; nobody hangs. The error names the rank that
/// failed first.
///
/// # Errors
/// [`Error::RankFailed`], or [`Error::Argument`] for no ranks.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_cp::comm::threads;
/// let sums = threads::run(3, &threads::Options::default(), |comm| {
///     let mine = Tensor::new(&[comm.rank() as f32], &Device::Cpu)?;
///     comm.all_reduce_sum(&mine)?.to_vec1::<f32>().map_err(candle_cp::Error::from)
/// })?;
/// assert_eq!(sums, vec![vec![3.0]; 3]);
/// # Ok::<(), candle_cp::Error>(())
/// ```
pub fn run<T, E, F>(size: usize, options: &Options, f: F) -> Result<Vec<T>>
where
    T: Send,
    E: Into<BoxError>,
    F: Fn(Arc<dyn Communicator>) -> std::result::Result<T, E> + Sync,
{
    if size == 0 {
        return Err(Error::argument("size", 0, "a group has at least one rank", "use 1 for no sharding"));
    }
    let (world, clock) = (Arc::new(World::new(size, options.deadline)), Clock::start());
    let results: Vec<std::result::Result<T, BoxError>> = std::thread::scope(|scope| {
        let start = |rank: usize| {
            let (shared, f) = (world.clone(), &f);
            let thread = std::thread::Builder::new()
                .name(format!("rank {rank}"))
                .stack_size(options.stack_bytes)
                .spawn_scoped(scope, move || run_rank((rank, size), shared, clock, f));
            // At once: those that run may wait for it already.
            thread.inspect_err(|e| world.fail(rank, format!("its thread could not be started: {e}")))
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        let joined = threads.into_iter().map(|thread| match thread {
            Ok(thread) => thread.join().expect("a rank thread catches its panics"),
            Err(e) => Err(e.into()),
        });
        joined.collect()
    });
    let mut values = Vec::with_capacity(size);
    let mut errors = Vec::new();
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(value) => values.push(value),
            Err(e) => errors.push((rank, e)),
        }
    }
    let first = world.failure().map(|(rank, _)| rank);
    match errors.iter().position(|(rank, _)| Some(*rank) == first).or((!errors.is_empty()).then_some(0)) {
        Some(i) => {
            let (rank, cause) = errors.swap_remove(i);
            Err(Error::RankFailed { rank, cause })
        }
        None => Ok(values),
    }
}

fn run_rank<T, E, F>(
    (rank, size): (usize, usize),
    world: Arc<World>,
    clock: Clock,
    f: &F,
) -> std::result::Result<T, BoxError>
where
    E: Into<BoxError>,
    F: Fn(Arc<dyn Communicator>) -> std::result::Result<T, E>,
{
    let counters = Arc::new(Counters::with_clock(clock));
    let transport = Arc::new(ThreadRank { rank, size, world: world.clone(), counters });
    let comm = Arc::new(Group::world(transport));
    let result = catch_unwind(AssertUnwindSafe(|| f(comm).map_err(Into::into)))
        .unwrap_or_else(|panic| Err(format!("panicked: {}", panic_text(panic.as_ref())).into()));
    match &result {
        Ok(_) => world.leave(rank),
        Err(e) => world.fail(rank, e.to_string()),
    }
    result
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// One of several threads.
struct ThreadRank {
    rank: usize,
    size: usize,
    world: Arc<World>,
    counters: Arc<Counters>,
}

impl std::fmt::Debug for ThreadRank {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "thread {} of {}", self.rank, self.size)
    }
}

impl Transport for ThreadRank {
    fn place(&self) -> (usize, usize) {
        (self.rank, self.size)
    }

    fn post(
        &self,
        channel: Channel,
        tag: Tag,
        send: Option<(usize, Tensor)>,
        receive: Option<Expected>,
    ) -> Result<Box<dyn Pending>> {
        let mut sent = None;
        if let Some((to, tensor)) = send {
            let guard = Alive::new(&self.counters, tag.traffic, &tensor);
            self.counters.sent(tag.traffic, guard.bytes());
            let transfer = self.counters.trace().transfer(tag, to, guard.bytes());
            sent = Some((to, self.world.send((to, self.rank, channel), tag, tensor, transfer)?, guard));
        }
        let (world, counters) = (self.world.clone(), self.counters.clone());
        let receive = receive.map(|expected| {
            let slot = world.post((self.rank, expected.from, channel));
            (expected, slot)
        });
        Ok(Box::new(ThreadPending { rank: self.rank, world, counters, tag, sent, receive }))
    }

    fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    fn abort(&self, reason: &str) {
        self.world.fail(self.rank, reason.to_string());
    }

    fn peer_failure(&self) -> Option<(usize, String)> {
        self.world.failure().filter(|(rank, _)| *rank != self.rank)
    }
}

struct ThreadPending {
    rank: usize,
    world: Arc<World>,
    counters: Arc<Counters>,
    tag: Tag,
    sent: Option<(usize, Taken, Alive)>,
    receive: Option<(Expected, Slot)>,
}

impl Pending for ThreadPending {
    fn wait(self: Box<Self>) -> Result<Option<Received>> {
        let (from, to) = (self.receive.as_ref().map(|(e, _)| e.from), self.sent.as_ref().map(|(to, ..)| *to));
        let _span = self.counters.trace().wait(self.tag, from, to);
        let start = Instant::now();
        let received = self.take();
        self.counters.waited(self.tag.traffic, start.elapsed());
        received
    }
}

impl ThreadPending {
    fn take(&self) -> Result<Option<Received>> {
        let received = self.receive.as_ref().map(|(expected, slot)| {
            let wait = Wait { rank: self.rank, peer: expected.from, tag: self.tag, expected: Some(expected) };
            let tensor = self.world.receive(&wait, slot)?;
            let alive = Alive::new(&self.counters, self.tag.traffic, &tensor);
            self.counters.received(self.tag.traffic, alive.bytes());
            Ok::<_, Error>(Received { tensor, _alive: Box::new(alive) })
        });
        let received = received.transpose()?;
        if let Some((to, taken, _alive)) = &self.sent {
            self.world.wait_taken(&Wait { rank: self.rank, peer: *to, tag: self.tag, expected: None }, taken)?;
        }
        Ok(received)
    }
}
