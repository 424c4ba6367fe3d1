//! The ranks of a run, and how they stay together.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{Traffic, threads};
use candle_cp::{Communicator, Error as CpError};

use crate::config::Config;
use crate::device::ComputeDevice;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::memory::Memory;

/// The ranks of a run.
#[derive(Debug, Clone)]
pub enum Ranks {
    /// As many threads of this process.
    Threads(usize),
    /// This process is one of them.
    Process {
        /// To the other ranks.
        comm: Arc<dyn Communicator>,
        /// Where this rank's model runs: what the communicator was made with, or the CPU.
        device: Device,
    },
}

impl Ranks {
    /// Whether rank 0, which writes files and talks to people, is in this process.
    pub fn is_first(&self) -> bool {
        match self {
            Self::Threads(_) => true,
            Self::Process { comm, .. } => comm.rank() == 0,
        }
    }

    /// The device that is open already.
    pub(crate) fn device(&self) -> Option<&Device> {
        match self {
            Self::Threads(_) => None,
            Self::Process { device, .. } => Some(device),
        }
    }

    /// The settings with the number of replicas that these ranks are for.
    ///
    /// # Errors
    /// They are not the ranks that the settings ask for.
    pub(crate) fn settle(&self, config: &Config) -> Result<Config> {
        let mut settled = config.clone();
        if let Self::Process { comm, .. } = self {
            settled.dp = config.dp.or(comm.size().is_multiple_of(config.cp).then_some(comm.size() / config.cp));
        }
        self.check(&settled)?;
        Ok(settled)
    }

    /// Whether these are the ranks that a run is for.
    pub(crate) fn check(&self, config: &Config) -> Result<()> {
        let size = match self {
            Self::Threads(1) => 1,
            Self::Threads(_) if config.device != ComputeDevice::Cpu => {
                let allowed = format!("1 beside --device {}: rank threads would share one GPU", config.device);
                return Err(Error::flag("--cp", config.cp, allowed, "use --cp 1"));
            }
            Self::Threads(size) => *size,
            Self::Process { comm, .. } => comm.size(),
        };
        let (cp, dp) = (config.cp, config.replicas());
        match (size == cp * dp, size.is_multiple_of(cp)) {
            (true, _) => Ok(()),
            (false, true) if config.dp.is_some() => {
                let allowed = format!("{} beside --cp {cp}: there are {size} ranks", size / cp);
                Err(Error::flag("--dp", dp, allowed, "leave --dp out, or start --cp times --dp ranks"))
            }
            _ => {
                let allowed = format!("a divisor of {size}, the number of ranks");
                Err(Error::flag("--cp", cp, allowed, format!("use --cp {size}, or start a multiple of {cp} ranks")))
            }
        }
    }

    /// Runs `rank` on every rank of this process; the result of its first one. An error ends all ranks of all processes.
    pub(crate) fn run<T: Send>(
        &self,
        deadline: Duration,
        rank: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
    ) -> Result<T> {
        let options = threads::Options { deadline, ..threads::Options::default() };
        let comm = match self {
            Self::Threads(size) => return Ok(threads::run(*size, &options, rank)?.swap_remove(0)),
            Self::Process { comm, .. } => comm,
        };
        // A thread of its own for the sake of its stack.
        let result = std::thread::scope(|scope| {
            let thread =
                std::thread::Builder::new().name(format!("rank {}", comm.rank())).stack_size(options.stack_bytes);
            let thread = thread.spawn_scoped(scope, || rank(comm.clone()));
            let thread =
                thread.map_err(|cause| self.failed(format!("its thread could not be started: {cause}").into()))?;
            thread.join().unwrap_or_else(|_| Err(self.failed("panicked".into())))
        });
        result.map_err(|error| self.end(error))
    }

    /// Tells the other processes that this one has failed, if it is the first, and gives the error with its rank.
    fn end(&self, error: Error) -> Error {
        let Self::Process { comm, .. } = self else { return error };
        if let Some((peer, message)) = comm.peer_failure() {
            // All ranks find out by themselves that they differ.
            if error.to_string().contains(&message) || matches!(error, Error::RanksDiffer { .. }) {
                return error;
            }
            // Both went wrong, such as two ranks that waited in vain for a third one.
            let message = format!("{message}; here, meanwhile: {error}");
            let (rank, operation) = (comm.rank(), "training".to_string());
            let failed = Error::Cp(CpError::PeerFailed { rank, operation, peer, message });
            return if let Error::AtStep { step, .. } = error { failed.at_step(step) } else { failed };
        }
        comm.abort(&error.to_string());
        match error {
            Error::Cp(failed @ CpError::RankFailed { .. }) => Error::Cp(failed),
            error => self.failed(error.into()),
        }
    }

    fn failed(&self, cause: Box<dyn std::error::Error + Send + Sync>) -> Error {
        let rank = if let Self::Process { comm, .. } = self { comm.rank() } else { 0 };
        Error::Cp(CpError::RankFailed { rank, cause })
    }

    /// What one step of the preparation came to on all processes, which all have to call this: they go on together, or none
    /// does.
    ///
    /// # Errors
    /// That of this process, or one that tells which other failed and why.
    pub fn together<T>(&self, step: Result<T>) -> Result<T> {
        let Self::Process { comm, .. } = self else { return step };
        // Also an error without a text is one.
        let texts = self.texts(&step.as_ref().map_or_else(|error| format!("E{error}"), |_| String::new()));
        match (step, texts) {
            (Err(error), _) => Err(error),
            (Ok(_), Err(error)) => Err(error),
            (Ok(value), Ok(texts)) => match texts.iter().position(|text| !text.is_empty()) {
                None => Ok(value),
                Some(peer) => Err(Error::Cp(CpError::PeerFailed {
                    rank: comm.rank(),
                    operation: "the preparation".to_string(),
                    peer,
                    message: texts[peer].chars().skip(1).collect(),
                })),
            },
        }
    }

    /// As [`Ranks::together`], of something that only the process of rank 0 does.
    pub(crate) fn on_first<T>(&self, step: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.together(self.is_first().then(step).transpose())
    }

    /// The text of rank 0, which all processes get.
    pub(crate) fn text_of_first(&self, text: &str) -> Result<String> {
        match self {
            Self::Threads(_) => Ok(text.to_string()),
            Self::Process { .. } => Ok(self.texts(if self.is_first() { text } else { "" })?.swap_remove(0)),
        }
    }

    /// Whether all processes train a model of the same configuration on the same data in the same way. The numbers in the
    /// weight files are compared when they are read.
    pub(crate) fn agree(&self, config: &Config, job: &Job) -> Result<()> {
        let Self::Process { comm, .. } = self else { return Ok(()) };
        let data = [
            format!("the data = {}", job.fingerprint()),
            format!("the held-out data = {}", job.held_out_fingerprint()),
            format!("the number of steps = {}", job.steps()),
        ];
        let digest = ring::digest::digest(&ring::digest::SHA256, format!("{:?}", job.model).as_bytes());
        let model: String = digest.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let model = std::iter::once(format!("the model's configuration, by digest, = {model}"));
        let mine: Vec<String> = config.of_all_ranks().into_iter().chain(data).chain(model).collect();
        let texts = self.texts(&mine.join("\n"))?;
        for (rank, theirs) in texts.iter().enumerate() {
            if let Some((mine, theirs)) = mine.iter().zip(theirs.split('\n')).find(|(mine, theirs)| mine != theirs) {
                let (what, mine) = mine.split_once(" = ").unwrap_or((mine, ""));
                let theirs = theirs.split_once(" = ").map_or(theirs, |(_, value)| value);
                let (mine, theirs) = (mine.to_string(), theirs.to_string());
                return Err(Error::RanksDiffer { what: what.to_string(), rank: comm.rank(), mine, peer: rank, theirs });
            }
        }
        Ok(())
    }

    /// The most resident bytes of each process, in rank order; 0 where the system does not tell.
    pub(crate) fn peak_memory(&self) -> Result<Vec<u64>> {
        let mine = Memory::now().peak_memory_bytes.unwrap_or(0);
        Ok(self.texts(&mine.to_string())?.iter().map(|text| text.parse().unwrap_or(0)).collect())
    }

    /// One text from each process, in rank order.
    pub(crate) fn texts(&self, text: &str) -> Result<Vec<String>> {
        let Self::Process { comm, .. } = self else { return Ok(vec![text.to_string()]) };
        let bytes = match text {
            "" => Tensor::zeros(0, DType::U8, &Device::Cpu)?,
            text => Tensor::new(text.as_bytes(), &Device::Cpu)?,
        };
        let all = comm.all_gather_uneven(&bytes, 0, Traffic::Gather)?;
        all.iter().map(|bytes| Ok(String::from_utf8_lossy(&bytes.to_vec1::<u8>()?).into_owned())).collect()
    }
}
