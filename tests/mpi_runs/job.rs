//! One job: `mpirun` with some ranks, from its start to its end.

use crate::jobs::{no_orphans, output_within};
use crate::order::{Harm, Moment, Order, Strike};
use crate::rank::{note, process, report};
use candle_cp::comm::Traffic;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A job that has to end well; building machines are slow.
const LONG: Duration = Duration::from_secs(240);
/// One that fails, or whose ranks wait for something; the deadline of messages is longer where it should not be what ends it.
const LIMIT: Duration = Duration::from_secs(90);

pub struct Job {
    size: usize,
    folder: PathBuf,
    order: Order,
}

/// How a job ended.
pub struct Ended {
    /// Exit code of `mpirun`.
    pub code: Option<i32>,
    /// The error of each rank that had one.
    pub errors: Vec<Option<String>>,
    /// Whether a rank was struck.
    pub struck: bool,
    said: String,
}

impl Job {
    /// A job whose files are in a new folder.
    pub fn new(folder: PathBuf, size: usize, flags: &[(&str, &str)]) -> Self {
        let flags = flags.iter().map(|(flag, value)| (flag.to_string(), value.to_string())).collect();
        Self { size, folder, order: Order { flags, ..Order::default() } }
    }

    pub fn resume(mut self) -> Self {
        self.order.resume = true;
        self
    }

    pub fn only(mut self, rank: usize, flag: &str, value: impl AsRef<Path>) -> Self {
        self.order.only.push((rank, flag.to_string(), value.as_ref().display().to_string()));
        self
    }

    pub fn strike(mut self, rank: usize, after: usize, moment: Moment, harm: Harm) -> Self {
        self.order.strike = Some(Strike { rank, after, moment, harm });
        self
    }

    pub fn rest(mut self, time: Duration) -> Self {
        self.order.rest = time.as_millis() as u64;
        self
    }

    /// Where a struck rank leaves its process number.
    pub fn note(&self) -> PathBuf {
        note(&self.folder)
    }

    /// Where a rank leaves its process number.
    pub fn process(&self, rank: usize) -> PathBuf {
        process(&self.folder, rank)
    }

    /// Runs the job; `meanwhile` runs beside it.
    pub fn run(self, meanwhile: impl FnOnce() -> Result<(), String> + Send) -> Result<Ended, String> {
        self.run_within(LIMIT, meanwhile)
    }

    fn run_within(
        self,
        limit: Duration,
        meanwhile: impl FnOnce() -> Result<(), String> + Send,
    ) -> Result<Ended, String> {
        fs::create_dir_all(&self.folder).map_err(|e| e.to_string())?;
        self.order.write(&self.folder)?;
        let mut mpirun = Command::new("mpirun");
        // Symbols of a backtrace are looked up for longer than the launcher lets a rank speak.
        mpirun.env_remove("RUST_BACKTRACE").args([
            "--oversubscribe",
            "--bind-to",
            "none",
            "-n",
            &self.size.to_string(),
        ]);
        mpirun.arg(std::env::current_exe().map_err(|e| e.to_string())?).arg("--rank").arg(&self.folder);
        let (ended, beside) = std::thread::scope(|scope| {
            let beside = scope.spawn(meanwhile);
            (output_within(mpirun, limit), beside.join().expect("no panic"))
        });
        let (status, said) = ended?;
        beside.map_err(|text| format!("{text}; the job said:\n{said}"))?;
        no_orphans()?;
        let errors = (0..self.size).map(|rank| fs::read_to_string(report(&self.folder, rank)).ok()).collect();
        Ok(Ended { code: status.code(), errors, struck: self.note().exists(), said })
    }

    /// Runs a job that has to end well.
    pub fn well(self) -> Result<(), String> {
        self.run_within(LONG, || Ok(()))?.with_code(0)
    }
}

impl Ended {
    /// Whether it ended with an exit code.
    pub fn with_code(&self, code: i32) -> Result<(), String> {
        match self.code == Some(code) && self.errors.iter().all(Option::is_none) {
            true => Ok(()),
            false => Err(self.wrong(&format!("it should have ended with code {code}"))),
        }
    }

    pub fn wrong(&self, what: &str) -> String {
        format!("{what} (code {:?}, errors {:#?}); it said:\n{}", self.code, self.errors, self.said)
    }

    /// Whether the job failed and the error of every rank but one has all of these texts, where `{rank}` is its number.
    pub fn told_by_all_but(&self, but: usize, texts: &[&str]) -> Result<(), String> {
        if self.code.is_none_or(|code| code == 0) {
            return Err(self.wrong("it should have failed"));
        }
        for (rank, error) in self.errors.iter().enumerate().filter(|(rank, _)| *rank != but) {
            let error = error.as_ref().ok_or_else(|| self.wrong(&format!("rank {rank} reports nothing")))?;
            let missing = texts.iter().find(|text| !error.contains(&text.replace("{rank}", &rank.to_string())));
            if let Some(missing) = missing {
                return Err(self.wrong(&format!("rank {rank} does not say {missing:?}")));
            }
        }
        Ok(())
    }

    /// Whether those errors also name an operation.
    pub fn with_operations(&self, but: usize) -> Result<(), String> {
        let names = |error: &String| Traffic::ALL.iter().any(|traffic| error.contains(&format!("{traffic:?} (call ")));
        match self.errors.iter().enumerate().find(|(rank, error)| *rank != but && !error.as_ref().is_some_and(names)) {
            None => Ok(()),
            Some((rank, _)) => Err(self.wrong(&format!("rank {rank} names no operation"))),
        }
    }
}
