//! A communicator that lets its rank come to harm in the middle of an exchange.

use crate::order::{Harm, Moment, Strike};
use candle_core::Tensor;
use candle_cp::comm::{CommStats, Expected, Pending, Tag, Trace};
use candle_cp::{Communicator, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Other ranks are behind by less, also where they share a CPU.
const UNTIL_THEY_WAIT: Duration = Duration::from_millis(500);

/// Shared by all groups of a rank.
#[derive(Debug)]
pub struct Trigger {
    /// `None` on ranks that are spared.
    strike: Option<Strike>,
    /// Where it is noted that the rank was struck.
    note: PathBuf,
    /// Steps that are done.
    done: AtomicUsize,
    /// Exchanges of the kind that counts, since then.
    exchanges: AtomicUsize,
}

impl Trigger {
    pub fn new(strike: Option<Strike>, note: PathBuf) -> Self {
        Self { strike, note, done: AtomicUsize::new(0), exchanges: AtomicUsize::new(0) }
    }

    fn due(&self) -> Option<&Strike> {
        self.strike.as_ref().filter(|strike| strike.after == self.done.load(Ordering::SeqCst))
    }

    fn exchange(&self, tag: Tag) {
        if let Some(Strike { moment: Moment::Exchange(name, number), harm, .. }) = self.due()
            && tag.traffic.name() == name
            && self.exchanges.fetch_add(1, Ordering::SeqCst) + 1 == *number
        {
            // What was sent before arrives, and the others come to wait for what is not.
            std::thread::sleep(UNTIL_THEY_WAIT);
            self.strike(harm);
        }
    }

    /// After a step.
    pub fn step(self: &Arc<Self>, step: usize) {
        self.done.store(step, Ordering::SeqCst);
        match self.due() {
            Some(Strike { moment: Moment::Observed, harm, .. }) => self.strike(harm),
            Some(Strike { moment: Moment::Writing(folder), harm, .. }) => {
                let (me, folder, harm) = (self.clone(), folder.clone(), harm.clone());
                std::thread::spawn(move || {
                    while !is_writing(&folder) {
                        std::thread::yield_now();
                    }
                    me.strike(&harm);
                });
            }
            _ => {}
        }
    }

    fn strike(&self, harm: &Harm) {
        std::fs::write(&self.note, std::process::id().to_string()).expect("a note");
        match harm {
            Harm::Killed => signal_self(libc::SIGKILL),
            Harm::Stopped => signal_self(libc::SIGSTOP),
            Harm::Loses(file) => std::fs::remove_file(file).expect("a file to lose"),
        }
    }
}

/// Whether a checkpoint is being written: see `candle_finetune::saves`.
fn is_writing(folder: &Path) -> bool {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with(".step-") && name.to_string_lossy().ends_with(".tmp")
    })
}

fn signal_self(signal: libc::c_int) {
    // SAFETY: a signal to this very process.
    unsafe { libc::kill(libc::getpid(), signal) };
}

#[derive(Debug)]
pub struct Striking {
    pub inner: Arc<dyn Communicator>,
    pub trigger: Arc<Trigger>,
}

impl Communicator for Striking {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn next_call(&self) -> u64 {
        self.inner.next_call()
    }

    fn exchange(&self, tag: Tag, send: Option<(usize, Tensor)>, receive: Option<Expected>) -> Result<Box<dyn Pending>> {
        self.trigger.exchange(tag);
        self.inner.exchange(tag, send, receive)
    }

    fn stats(&self) -> CommStats {
        self.inner.stats()
    }

    fn trace(&self) -> Trace {
        self.inner.trace()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn peer_failure(&self) -> Option<(usize, String)> {
        self.inner.peer_failure()
    }

    fn world_rank(&self, rank: usize) -> usize {
        self.inner.world_rank(rank)
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self { inner: self.inner.split(color)?, trigger: self.trigger.clone() }))
    }
}
