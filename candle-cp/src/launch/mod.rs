//! How this process was started: which rank it is, who its neighbours on the machine are, which CPUs it may use; and what
//! a program sets up once, before it starts threads.
//!
//! Launchers tell the processes that they start by environment variables. They are looked for in this order, and the first
//! one that is there decides alone; nothing is put together from two of them:
//!
//! 1. torchrun, and scripts like it: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`;
//! 2. `mpirun` of OpenMPI: `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE`;
//! 3. `mpiexec` of MPICH and Intel MPI: `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS`;
//! 4. `srun` of Slurm: `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE`,
//!    `SLURM_CPUS_ON_NODE`.
//!
//! A variable without text counts as unset.

mod cpus;
mod hosts;
mod launchers;
mod process;
mod variables;

pub use cpus::{CpuSet, ProcessCpus};
pub use process::{prepare_process, prepare_rank_process};

use crate::error::{Error, Result};
use launchers::read;
use std::fmt;
use variables::Variables;

/// Who starts processes that work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Launcher {
    /// torchrun, or whatever else sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// `mpirun` or `mpiexec` of OpenMPI.
    OpenMpi,
    /// `mpiexec` of MPICH, Intel MPI and others that talk the protocol PMI.
    Pmi,
    /// `srun` of Slurm.
    Slurm,
}

impl Launcher {
    /// All of them, in the order in which they are looked for.
    pub const ALL: [Self; 4] = [Self::Torchrun, Self::OpenMpi, Self::Pmi, Self::Slurm];

    /// The variable that tells a process its rank.
    pub fn rank_variable(self) -> &'static str {
        match self {
            Self::Torchrun => "RANK",
            Self::OpenMpi => "OMPI_COMM_WORLD_RANK",
            Self::Pmi => "PMI_RANK",
            Self::Slurm => "SLURM_PROCID",
        }
    }

    /// The variable that tells how many processes there are.
    pub fn size_variable(self) -> &'static str {
        match self {
            Self::Torchrun => "WORLD_SIZE",
            Self::OpenMpi => "OMPI_COMM_WORLD_SIZE",
            Self::Pmi => "PMI_SIZE",
            Self::Slurm => "SLURM_STEP_NUM_TASKS",
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "mpirun of OpenMPI",
            Self::Pmi => "mpiexec of MPICH or Intel MPI",
            Self::Slurm => "srun",
        })
    }
}

/// Where the processes of a group find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeetingPlace {
    /// Name or address of the machine of rank 0.
    pub address: String,
    /// TCP port at which rank 0 listens.
    pub port: u16,
}

/// Which rank this process is, and where its group meets; told by whoever started it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchEnvironment {
    /// Who said so.
    pub launcher: Launcher,
    /// This rank, `0..size`.
    pub rank: usize,
    /// Ranks of the group.
    pub size: usize,
    /// Number of this process on its machine: the GPU that it should use. `None` if the launcher does not say.
    pub local_rank: Option<usize>,
    /// Processes of the group on this machine. `None` if the launcher does not say.
    pub local_size: Option<usize>,
    /// CPUs of this machine that the group was given. `None` if the launcher does not say.
    pub machine_cpus: Option<usize>,
    /// Where the ranks meet, see [`LaunchEnvironment::meeting`]. MPI needs no such place.
    pub meeting: Option<MeetingPlace>,
    /// Launchers whose variables are set as well and were not used: torchrun may run beneath `srun`, or a shell of an
    /// earlier launcher has left them.
    pub others: Vec<Launcher>,
}

impl LaunchEnvironment {
    /// Where the ranks meet: `MASTER_ADDR` and `MASTER_PORT`; else, if all are on one machine, port 29500 there; else, with
    /// Slurm, port 29500 of the first machine of the step.
    ///
    /// # Errors
    /// [`Error::Argument`] if nothing says where.
    pub fn meeting(&self) -> Result<&MeetingPlace> {
        self.meeting.as_ref().ok_or_else(|| {
            let allowed = format!("the {} ranks that {} started may be on several machines", self.size, self.launcher);
            let fix =
                "set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there, for every process";
            Error::argument("the meeting place of the ranks", "not known", allowed, fix)
        })
    }
}

/// By whom the process was started, and whose variables were left alone.
impl fmt::Display for LaunchEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "started by {}", self.launcher)?;
        if self.others.is_empty() {
            return Ok(());
        }
        let others: Vec<String> = self.others.iter().map(ToString::to_string).collect();
        write!(f, " (variables of {} were seen too and not used)", others.join(" and "))
    }
}

/// Reads the launch environment of this process, see the [list of launchers](Launcher). `None` if none of them started it:
/// then this process is not one of a group.
///
/// Where torchrun's agent itself listens at `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE` is `True`), the group meets at
/// the next port.
///
/// # Errors
/// [`Error::Argument`] if only some of the variables of a launcher are set, naming those and the missing ones; a value that
/// is no number; a rank outside of the group; a process of a Slurm job with several tasks that `srun` did not start.
pub fn launch_environment() -> Result<Option<LaunchEnvironment>> {
    launch_environment_from(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
}

/// [`launch_environment`] with another source of variables than this process's own.
///
/// # Errors
/// As [`launch_environment`].
pub fn launch_environment_from(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchEnvironment>> {
    read(&Variables::new(&lookup))
}
