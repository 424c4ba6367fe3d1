//! What can go wrong, as one documented enum.

use std::time::Duration;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors name what was given, what is allowed, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),

    /// An argument cannot be used.
    #[error("{argument} is {given}, but {allowed}; {fix}")]
    Argument {
        /// Name of the argument or field.
        argument: &'static str,
        /// What was given.
        given: String,
        /// What is allowed.
        allowed: String,
        /// What to do about it.
        fix: String,
    },

    /// The device has no attention kernel for these tensors.
    #[error(transparent)]
    NoKernel(candle_cp_kernels::gpu::NoKernel),

    /// Another rank failed first; this rank stopped waiting for it.
    #[error("rank {rank}: {operation} stopped because rank {peer} failed: {message}")]
    PeerFailed {
        /// This rank.
        rank: usize,
        /// What this rank was doing.
        operation: String,
        /// The rank that failed.
        peer: usize,
        /// Its error.
        message: String,
    },

    /// Another rank returned without taking part.
    #[error(
        "rank {rank}: {operation} waits for rank {peer}, which has already returned; every rank has to make the same calls in the same order"
    )]
    PeerLeft {
        /// This rank.
        rank: usize,
        /// What this rank was doing.
        operation: String,
        /// The rank that is gone.
        peer: usize,
    },

    /// No answer within the deadline.
    #[error(
        "rank {rank}: {operation} got no answer from rank {peer} within {waited:?} ({bytes} bytes expected); raise the deadline if rank {peer} is only slow"
    )]
    Timeout {
        /// This rank.
        rank: usize,
        /// What this rank was doing.
        operation: String,
        /// The rank it waited for.
        peer: usize,
        /// The deadline.
        waited: Duration,
        /// Bytes that should have come.
        bytes: usize,
    },

    /// Two ranks are in different operations, or send other shapes than expected.
    #[error(
        "rank {rank}: {operation} expects {expected} from rank {peer}, which sent {sent}; every rank has to make the same calls in the same order, with the same layout and tokens"
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// What this rank was doing.
        operation: String,
        /// The sender.
        peer: usize,
        /// What this rank expects.
        expected: String,
        /// What came.
        sent: String,
    },

    /// A library that is opened at run time cannot be used.
    #[error("{library} cannot be used (searched: {searched}): {message}; {fix}")]
    Library {
        /// What the library is.
        library: &'static str,
        /// The files that were tried.
        searched: String,
        /// Why none of them will do.
        message: String,
        /// What to do about it.
        fix: String,
    },

    /// The processes of a group did not find each other.
    #[error("rank {rank} of {size}: meeting the other ranks at {address} failed: {message}")]
    Rendezvous {
        /// This rank.
        rank: usize,
        /// Ranks of the group.
        size: usize,
        /// Address and port of rank 0.
        address: String,
        /// What went wrong, and what to do about it.
        message: String,
    },

    /// NCCL, or CUDA underneath it, refused an operation or did not complete it.
    #[error("rank {rank}: {operation} with {peers} ({bytes} bytes) failed: {message}")]
    Nccl {
        /// This rank.
        rank: usize,
        /// What this rank was doing.
        operation: String,
        /// The ranks it was doing that with.
        peers: String,
        /// Bytes of the message.
        bytes: usize,
        /// The libraries' own texts.
        message: String,
    },

    /// MPI cannot be used in this process.
    #[error("MPI cannot be started: {message}")]
    MpiStart {
        /// Why, and what to do about it.
        message: String,
    },

    /// MPI refused an operation or did not complete it.
    #[error("rank {rank}: {operation} with {peers} ({bytes} bytes) failed: {message}")]
    Mpi {
        /// This rank.
        rank: usize,
        /// What this rank was doing.
        operation: String,
        /// The ranks it was doing that with.
        peers: String,
        /// Bytes of the message.
        bytes: usize,
        /// The library's own text.
        message: String,
    },

    /// The first rank that failed in a group of rank threads.
    #[error("rank {rank} failed: {cause}")]
    RankFailed {
        /// The rank that failed first.
        rank: usize,
        /// Its error.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    pub(crate) fn argument(
        argument: &'static str,
        given: impl ToString,
        allowed: impl ToString,
        fix: impl ToString,
    ) -> Self {
        let (given, allowed, fix) = (given.to_string(), allowed.to_string(), fix.to_string());
        Self::Argument { argument, given, allowed, fix }
    }

    /// True if the error is only an echo of another rank's failure.
    pub fn is_peer_failure(&self) -> bool {
        matches!(self, Self::PeerFailed { .. } | Self::PeerLeft { .. })
    }
}

/// Candle's own error type, for the inside of custom operators. The text survives, the type does not.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(e) => e,
            other => candle_core::Error::wrap(other),
        }
    }
}
