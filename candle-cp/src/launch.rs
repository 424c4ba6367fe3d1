//! What a program sets up once, before it starts threads.

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
