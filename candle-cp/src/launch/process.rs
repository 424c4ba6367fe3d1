//! What a program sets up once, before it starts threads.

use super::{LaunchEnvironment, ProcessCpus};
use candle_core::utils::get_num_threads;

/// Threads of rayon's pools, Candle's own one among them: matrix products and attention.
const RAYON_THREADS: &str = "RAYON_NUM_THREADS";
/// Threads of the pool over which Candle splits element-wise operations.
const CANDLE_THREADS: &str = "CANDLE_NUM_THREADS";

/// Settings of a process whose ranks are threads (`ranks` of them), which training is faster with. Optional; call it first
/// thing in `main`.
///
/// - Candle splits element-wise operations over a pool of its own that spins under one lock. Several rank threads would
///   take turns at it, so it is reduced to the calling thread (`CANDLE_NUM_THREADS`, unless that is set already). Matrix
///   products and attention use rayon's pool and are not concerned.
/// - Candle counts the cores of the machine, also where this process may use only some of them, in a container say. Then
///   `RAYON_NUM_THREADS` is set to those, unless it is set already.
/// - With glibc, freed memory is kept for the next step instead of going back to the system page by page. A step
///   allocates and frees the same large tensors over and over; faulting them in again took a fifth of the time.
///
/// # Safety
/// No other thread may run yet: environment variables are not synchronised.
pub unsafe fn prepare_process(ranks: usize) {
    let available = available_cpus();
    // SAFETY: the caller promises that there is no other thread.
    unsafe {
        if ranks > 1 {
            set_unless_set(CANDLE_THREADS, 1);
        }
        if get_num_threads() > available {
            set_unless_set(RAYON_THREADS, available);
        }
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    keep_freed_memory();
}

/// The same for a process that is one rank of a group. Its pools (`RAYON_NUM_THREADS` and `CANDLE_NUM_THREADS`, unless they
/// are set already) get its share of the CPUs that the launcher may use on this machine, and never more threads than there
/// are CPUs that this process may use itself: a launcher may have bound it to one core. Without a word of the launcher on
/// how many processes are on this machine, all CPUs that this one may use.
///
/// # Safety
/// No other thread may run yet: environment variables are not synchronised.
pub unsafe fn prepare_rank_process(place: &LaunchEnvironment) {
    let available = available_cpus();
    let cpus = ProcessCpus::read(Some(place));
    let (allowed, launcher) = match &cpus {
        Some(cpus) => (cpus.allowed.len(), cpus.launcher),
        None => (available, None),
    };
    let threads = threads_of_rank(available, allowed, launcher, place.local_size);
    // SAFETY: the caller promises that there is no other thread.
    unsafe {
        set_unless_set(RAYON_THREADS, threads);
        set_unless_set(CANDLE_THREADS, threads);
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    keep_freed_memory();
}

/// Threads of one rank, given the CPUs that its process may use, in number and in time (`available`: a container's quota
/// may be lower), those of its launcher, and the processes that share the machine.
fn threads_of_rank(available: usize, allowed: usize, launcher: Option<usize>, local_size: Option<usize>) -> usize {
    // Bound processes are told from those that share everything by what the launcher itself may use.
    let shared = launcher.unwrap_or(allowed).max(allowed);
    // A quota is one for all processes of the container.
    let shared = if available < allowed { available } else { shared };
    (shared / local_size.unwrap_or(1).max(1)).clamp(1, available.min(allowed).max(1))
}

/// CPUs that this process may use, also counting a limit on its time.
fn available_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// # Safety
/// As [`prepare_process`].
unsafe fn set_unless_set(name: &str, threads: usize) {
    if std::env::var_os(name).is_none() {
        // SAFETY: the caller promises that there is no other thread.
        unsafe { std::env::set_var(name, threads.to_string()) };
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_takes_its_share_and_never_more_than_it_may_use() {
        // (available, allowed, launcher, processes) and threads.
        for (case, threads) in [
            // 4 cores: not bound, bound to one core each, one process, more processes than cores.
            ((4, 4, Some(4), Some(2)), 2),
            ((1, 1, Some(4), Some(2)), 1),
            ((4, 4, Some(4), Some(1)), 4),
            ((4, 4, Some(4), Some(8)), 1),
            // 64 cores, two sockets: not bound, bound to a core, to 16 of them, to a socket that two share.
            ((64, 64, Some(64), Some(4)), 16),
            ((1, 1, Some(64), Some(2)), 1),
            ((16, 16, Some(64), Some(4)), 16),
            ((32, 32, Some(64), Some(4)), 16),
            ((32, 32, Some(64), Some(2)), 32),
            ((32, 32, Some(64), Some(1)), 32),
            // A container's quota of 8 CPUs, shared by two processes.
            ((8, 64, Some(64), Some(2)), 4),
            // Nothing is known of the launcher, or of the number of processes.
            ((32, 32, None, Some(4)), 8),
            ((32, 32, Some(64), None), 32),
            // A launcher that is itself bound to less than it gives away.
            ((8, 8, Some(1), Some(2)), 4),
            ((1, 1, None, Some(3)), 1),
        ] {
            let (available, allowed, launcher, local_size) = case;
            assert_eq!(threads_of_rank(available, allowed, launcher, local_size), threads, "{case:?}");
        }
    }
}
