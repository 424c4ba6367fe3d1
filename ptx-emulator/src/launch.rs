//! Launches: a grid of thread blocks over memory.

use crate::cta;
use crate::error::Fault;
use crate::memory::Memory;
use crate::module::{Kernel, Module};
use crate::types::MODULE_BASE;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// When the bytes of a `cp.async` appear in shared memory. Real devices may do either, or anything between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyLanding {
    /// When the issuing warp waits for the copy's group.
    #[default]
    AtWait,
    /// At once.
    AtIssue,
}

/// What a launch did, summed over its thread blocks. One instruction of a warp counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of warps, those with a false predicate included.
    pub instructions: u64,
    /// `mma` instructions.
    pub mma: u64,
    /// `ldmatrix` instructions.
    pub ldmatrix: u64,
    /// Arrivals of warps at barriers.
    pub barriers: u64,
    /// Bytes that lanes read from global memory, copies and atomics included.
    pub global_read: u64,
    /// Bytes that lanes wrote to global memory.
    pub global_written: u64,
    /// Bytes that lanes read from shared memory.
    pub shared_read: u64,
    /// Bytes that lanes wrote to shared memory, copies included.
    pub shared_written: u64,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.instructions += other.instructions;
        self.mma += other.mma;
        self.ldmatrix += other.ldmatrix;
        self.barriers += other.barriers;
        self.global_read += other.global_read;
        self.global_written += other.global_written;
        self.shared_read += other.shared_read;
        self.shared_written += other.shared_written;
    }
}

/// A kernel with everything that it is started with.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Name of the entry function.
    pub kernel: &'a str,
    /// Thread blocks, x y z.
    pub grid: [u32; 3],
    /// Threads per block, x y z; 1 to 1024 together.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The parameters as the kernel lays them out: each aligned to its size.
    pub params: &'a [u8],
    /// When copies land.
    pub copies: CopyLanding,
}

/// Instructions that one warp may run, unless [`Launch::run_within`] says otherwise.
const BUDGET: u64 = 1 << 26;

impl Launch<'_> {
    /// Runs all thread blocks. Those of kernels without global atomics run on all cores; the result and the fault do
    /// not depend on that as long as no block reads what another one writes.
    ///
    /// # Errors
    /// The fault of the first thread block (x fastest) that has one. What other blocks wrote stays written.
    pub fn run(&self, module: &Module, memory: &mut Memory) -> Result<Counts, Fault> {
        self.run_within(module, memory, BUDGET)
    }

    /// As [`Launch::run`], with `budget` instructions for each warp.
    ///
    /// # Errors
    /// As for [`Launch::run`].
    pub fn run_within(&self, module: &Module, memory: &mut Memory, budget: u64) -> Result<Counts, Fault> {
        let kernel = self.check(module)?;
        memory.place(MODULE_BASE, &module.variables);
        let outcome = self.run_blocks(module, kernel, memory, budget);
        memory.remove_placed(MODULE_BASE);
        outcome
    }

    fn check<'m>(&self, module: &'m Module) -> Result<&'m Kernel, Fault> {
        let fail = |message: String| Fault::Launch { kernel: self.kernel.to_string(), message };
        let kernel = module.kernel(self.kernel).ok_or_else(|| {
            fail(format!("the module has no such kernel; it has {}", module.kernels().collect::<Vec<_>>().join(", ")))
        })?;
        let threads = self.block.iter().try_fold(1u32, |n, b| n.checked_mul(*b)).unwrap_or(0);
        if threads == 0 || threads > 1024 {
            return Err(fail(format!("a block of {:?} threads; 1 to 1024 are allowed", self.block)));
        }
        if self.grid.contains(&0) {
            return Err(fail(format!("a grid of {:?} blocks; at least one is needed per dimension", self.grid)));
        }
        // `.maxntid` limits the product of its numbers.
        if let Some(max) = kernel.max_block.filter(|max| threads > max.iter().product()) {
            return Err(fail(format!("a block of {:?} threads; .maxntid allows {max:?}", self.block)));
        }
        if let Some(required) = kernel.required_block.filter(|r| *r != self.block) {
            return Err(fail(format!("a block of {:?} threads; .reqntid needs {required:?}", self.block)));
        }
        if self.params.len() != kernel.params_len as usize {
            let (given, needed) = (self.params.len(), kernel.params_len);
            return Err(fail(format!(
                "{given} bytes of parameters; the kernel has {needed}, each aligned to its size"
            )));
        }
        Ok(kernel)
    }

    fn run_blocks(&self, module: &Module, kernel: &Kernel, memory: &Memory, budget: u64) -> Result<Counts, Fault> {
        let [x, y, z] = self.grid.map(u64::from);
        let blocks = x * y * z;
        let index = |b: u64| [(b % x) as u32, (b / x % y) as u32, (b / x / y) as u32];
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        let workers = if kernel.global_atomics { 1 } else { cores.min(blocks) };
        let next = AtomicU64::new(0);
        // Blocks are taken in order, so every block before the first one with a fault is run.
        let failed = AtomicU64::new(u64::MAX);
        let work = || {
            let mut counts = Counts::default();
            loop {
                let b = next.fetch_add(1, Relaxed);
                if b >= blocks || b > failed.load(Relaxed) {
                    return (counts, None);
                }
                match cta::run(module, kernel, self, memory, index(b), budget) {
                    Ok(more) => counts.add(&more),
                    Err(fault) => {
                        failed.fetch_min(b, Relaxed);
                        return (counts, Some((b, fault)));
                    }
                }
            }
        };
        let results: Vec<_> = if workers == 1 {
            vec![work()]
        } else {
            std::thread::scope(|scope| {
                let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
                handles.into_iter().map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
            })
        };
        let mut counts = Counts::default();
        results.iter().for_each(|(more, _)| counts.add(more));
        match results.into_iter().filter_map(|(_, fault)| fault).min_by_key(|(b, _)| *b) {
            Some((_, fault)) => Err(fault),
            None => Ok(counts),
        }
    }
}
