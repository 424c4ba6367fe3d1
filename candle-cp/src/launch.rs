//! What a program sets up once, before it starts threads.

use crate::error::{Error, Result};

/// Settings of the process that training is faster with. Optional; call it first thing in `main`.
///
/// - Candle splits element-wise operations over a pool of its own that spins under one lock. If several of this process's
///   threads are ranks (`ranks` of them), they would take turns at it, so it is reduced to the calling thread
///   (`CANDLE_NUM_THREADS`, unless that is set already). Matrix products and attention use rayon's pool and are not
///   concerned.
/// - With glibc, freed memory is kept for the next step instead of going back to the system page by page. A step
///   allocates and frees the same large tensors over and over; faulting them in again took a fifth of the time.
///
/// # Safety
/// No other thread may run yet: environment variables are not synchronised.
pub unsafe fn prepare_process(ranks: usize) {
    const CANDLE_THREADS: &str = "CANDLE_NUM_THREADS";
    if ranks > 1 && std::env::var_os(CANDLE_THREADS).is_none() {
        // SAFETY: the caller promises that there is no other thread.
        unsafe { std::env::set_var(CANDLE_THREADS, "1") };
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    keep_freed_memory();
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn keep_freed_memory() {
    // Older versions of glibc refuse thresholds above 32 MiB; then the first value stays.
    for (option, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_MMAP_THRESHOLD, 32 << 20),
        (libc::M_MMAP_THRESHOLD, 1 << 30),
        (libc::M_TRIM_THRESHOLD, i32::MAX),
        (libc::M_TOP_PAD, 64 << 20),
    ] {
        // SAFETY: `mallopt` takes two integers. A refused option (0) leaves the default, which is only slower.
        unsafe { libc::mallopt(option, value) };
    }
}

/// Which rank this process is, and where its group meets; told by whoever started it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchEnvironment {
    /// This rank, `0..size`.
    pub rank: usize,
    /// Ranks of the group.
    pub size: usize,
    /// Number of this process on its machine: the GPU that it should use.
    pub local_rank: usize,
    /// Name or address of the machine of rank 0.
    pub address: String,
    /// TCP port at which rank 0 listens.
    pub port: u16,
}

/// Reads the launch environment of this process: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`, as
/// `torchrun` and many cluster scripts set them. `None` if none of them is set: then this process is not one of a group.
///
/// Where torchrun's agent itself listens at `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE` is `True`), the group meets at
/// the next port.
///
/// # Errors
/// [`Error::Argument`] if only some of them are set, naming those and the missing ones; a value that is no number; a rank
/// outside of the group.
pub fn launch_environment() -> Result<Option<LaunchEnvironment>> {
    launch_environment_from(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
}

/// [`launch_environment`] with another source of variables than this process's own.
///
/// # Errors
/// As [`launch_environment`].
pub fn launch_environment_from(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchEnvironment>> {
    const NAMES: [&str; 5] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];
    // An empty variable is what scripts leave that expand a variable they do not have.
    let values = NAMES.map(|name| lookup(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty()));
    let found: Vec<String> =
        NAMES.iter().zip(&values).filter_map(|(n, v)| Some(format!("{n}={}", v.as_ref()?))).collect();
    let [Some(rank), Some(size), Some(local_rank), Some(address), Some(port)] = &values else {
        if found.is_empty() {
            return Ok(None);
        }
        let missing: Vec<&str> = NAMES.iter().zip(&values).filter(|(_, v)| v.is_none()).map(|(n, _)| *n).collect();
        let allowed =
            format!("{} missing or empty", missing.join(", ") + if missing.len() > 1 { " are" } else { " is" });
        let fix = format!("set all of {} for every process, or none", NAMES.join(", "));
        return Err(Error::argument("the launch environment", found.join(" "), allowed, fix));
    };
    let number = |name: &'static str, text: &str| {
        let fix = "set it to a number, for every process";
        text.parse::<usize>().map_err(|_| Error::argument(name, format!("{text:?}"), "a whole number is expected", fix))
    };
    let (rank, size) = (number("RANK", rank)?, number("WORLD_SIZE", size)?);
    if rank >= size {
        let allowed = format!("WORLD_SIZE is {size}, which makes the ranks 0..{size}");
        return Err(Error::argument("RANK", rank, allowed, "count ranks from 0, and set WORLD_SIZE to their number"));
    }
    let local_rank = number("LOCAL_RANK", local_rank)?;
    let offset = usize::from(lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True"));
    let port = number("MASTER_PORT", port)?;
    let used = port.checked_add(offset).and_then(|port| u16::try_from(port).ok()).filter(|&port| port > 0);
    let Some(port) = used else {
        let allowed = format!("ports go from 1 to {}", usize::from(u16::MAX) - offset);
        return Err(Error::argument("MASTER_PORT", port, allowed, "choose a free port above 1023"));
    };
    Ok(Some(LaunchEnvironment { rank, size, local_rank, address: address.clone(), port }))
}
