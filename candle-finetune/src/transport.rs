//! How ranks talk to each other.

use std::fmt;

/// What ranks are, and over what they talk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Threads in a process by itself; MPI between several processes on CPUs, NCCL between several on GPUs.
    #[default]
    Auto,
    /// Threads of one process, whoever started it.
    Threads,
    /// Processes over MPI.
    Mpi,
    /// Processes over NCCL, one GPU for each.
    Nccl,
}

impl Transport {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Threads, Self::Mpi, Self::Nccl];
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Threads => "threads",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
        })
    }
}
