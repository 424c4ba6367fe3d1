//! The devices of the model, and everything that is assumed about them and about how they work.

use candle_cp_kernels::gpu::GpuLimits;

/// Shared memory of a thread block on sm_90, sm_80 and sm_89.
pub const SHARED: [usize; 3] = [227 << 10, 163 << 10, 99 << 10];

/// A device, by its maker's documents except where it says assumed.
pub struct Device {
    pub name: &'static str,
    pub limits: GpuLimits,
    /// Column of the table of registers.
    pub sm: &'static str,
    pub multiprocessors: f64,
    /// Hz: the published tensor peak divided by the operations per clock.
    pub clock: f64,
    /// Bytes of shared memory of a multiprocessor.
    pub shared: usize,
    /// Floating-point operations of dense bf16 products per clock and multiprocessor.
    pub tensor: f64,
    /// Share of that which `mma.sync` reaches; assumed for Hopper.
    pub mma_share: f64,
    /// Bytes per clock from L2, all multiprocessors together; assumed for Hopper.
    pub l2: f64,
    /// Bytes per second of device memory.
    pub memory: f64,
}

pub const DEVICES: [Device; 2] = [
    Device {
        name: "H200",
        limits: GpuLimits { capability: (9, 0), shared_bytes: SHARED[0] },
        sm: "90",
        multiprocessors: 132.0,
        clock: 1.83e9,
        shared: 228 << 10,
        tensor: 4096.0,
        mma_share: 0.62,
        l2: 5120.0,
        memory: 4.8e12,
    },
    Device {
        name: "A100",
        limits: GpuLimits { capability: (8, 0), shared_bytes: SHARED[1] },
        sm: "80",
        multiprocessors: 108.0,
        clock: 1.41e9,
        shared: 164 << 10,
        tensor: 2048.0,
        mma_share: 1.0,
        l2: 5120.0,
        memory: 2.039e12,
    },
];

/// Bytes of shared memory per clock and multiprocessor.
pub const SHARED_WIDTH: f64 = 128.0;
/// Instructions of warps that a multiprocessor issues per clock, one for each scheduler.
pub const ISSUE: f64 = 4.0;
/// `ex2` results per clock and multiprocessor.
pub const EXPONENTIALS: f64 = 16.0;
/// Clocks from a load of shared memory to its use, and from an `mma` to the next one that needs its sums: assumed.
pub const LATENCY: f64 = 33.0 + 33.0;
/// Floating-point operations of an `mma.m16n8k16`.
pub const MMA_FLOPS: f64 = 4096.0;

/// Thread blocks that a multiprocessor holds at a time. Registers are given to warps in units of 256, to four warps at a
/// time; a block's shared memory in units of 128 bytes, with 1 KiB on top; at most 64 warps and 32 blocks.
pub fn resident(device: &Device, registers: usize, threads: u32, shared_bytes: u32) -> usize {
    let warps = threads as usize / 32;
    let of_warp = (registers * 32).next_multiple_of(256);
    let by_registers = 65536 / of_warp / 4 * 4 / warps;
    let by_shared = device.shared / ((shared_bytes as usize).next_multiple_of(128) + 1024);
    let fits = shared_bytes as usize <= device.limits.shared_bytes;
    if fits { by_registers.min(by_shared).min(64 / warps).min(32) } else { 0 }
}

/// Prints what is assumed.
pub fn assumptions() {
    println!("## What is assumed\n");
    for Device { name, multiprocessors, clock, tensor, mma_share, l2, memory, shared, .. } in &DEVICES {
        println!(
            "- {name}: {multiprocessors} multiprocessors with {} KiB of shared memory and 65,536 registers at {:.2} GHz; {} \
             TFLOP/s of dense bf16, of which `mma.sync` reaches {:.0} %; {l2} bytes per clock from L2; {:.2} TB/s of memory.",
            shared >> 10,
            clock / 1e9,
            (multiprocessors * clock * tensor / 1e12).round(),
            100.0 * mma_share,
            memory / 1e12,
        );
    }
    println!(
        "- Sizes, clocks, peaks and memory are the maker's figures. The share of `mma.sync` on Hopper is what microbenchmarks \
         report (60 to 65 %; the peak needs `wgmma`); the maker gives L2's width for the A100, the H200's is taken to be the \
         same.\n\
         - Per clock and multiprocessor: {SHARED_WIDTH} bytes of shared memory without bank conflicts, {ISSUE} instructions \
         of warps, {EXPONENTIALS} exponentials.\n\
         - A warp waits {LATENCY} clocks in every step of 16 of a product: 33 for the load of its operands, 33 for the sums. \
         Nothing overlaps inside a warp; other warps of the scheduler fill the gap.\n\
         - A PTX instruction is one instruction of the device.\n\
         - All global traffic of the tiles comes from L2. Zeroing and the kernels over rows move their bytes at the rate of \
         the memory, and overlap with nothing.\n\
         - Multiprocessors are evenly loaded; a tile that is seen in part costs a whole one; no power limit, no launch times.\n"
    );
}
