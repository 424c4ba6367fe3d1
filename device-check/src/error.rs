//! What can go wrong besides a wrong result.

use candle_cp_kernels::gpu::NoKernel;
use std::path::PathBuf;

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a check could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No driver.
    #[error("{library} cannot be used: {reason}; it comes with the NVIDIA driver (r550 or newer)")]
    Library {
        /// What was looked for.
        library: String,
        /// What the loader says.
        reason: String,
    },
    /// A driver without a device.
    #[error("device {asked} does not exist: the driver has {count}; nvidia-smi lists the GPUs")]
    NoDevice {
        /// Ordinal that was asked for.
        asked: i32,
        /// Devices of the driver.
        count: i32,
    },
    /// The driver refused a call.
    #[error("{call} failed with {code} {name}: {text}")]
    Driver {
        /// The call and what it was about.
        call: String,
        /// `CUresult`.
        code: i32,
        /// Name of the code.
        name: String,
        /// The driver's words for it.
        text: String,
    },
    /// What a target other than a device says.
    #[error("{0}")]
    Target(String),
    /// The device has no such kernel.
    #[error(transparent)]
    Kernel(#[from] NoKernel),
    /// A file of recorded results is not as expected.
    #[error("{}: {reason}; it is part of the repository", path.display())]
    Golden {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Results cannot be written.
    #[error("{} cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
}
