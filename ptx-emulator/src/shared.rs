//! Shared memory of one thread block, with a record of who touched what since which barrier.
//!
//! Each warp has a clock: the time of its last barrier. `known[v][w]` is the latest time of warp `w` whose accesses are
//! ordered before what warp `v` does now. Two warps race on a cell if one of them writes it and neither access is
//! ordered before the other; this does not depend on the order in which the emulator runs the warps.

use crate::error::Trouble;

/// Time of copies that nobody waited for yet; no barrier orders them.
const PENDING: u32 = u32::MAX;

/// The last accesses of one kind to a cell.
#[derive(Clone, Copy, Default)]
struct Access {
    /// Time of the latest; 0 if there was none.
    time: u32,
    /// One bit per warp.
    warps: u32,
    line: u32,
    atomic: bool,
}

#[derive(Clone, Copy, Default)]
struct Cell {
    write: Access,
    read: Access,
}

/// Who makes an access, and how.
#[derive(Clone, Copy)]
pub(crate) struct Accessor {
    pub warp: usize,
    pub line: u32,
    pub atomic: bool,
}

pub(crate) struct Shared {
    bytes: Vec<u8>,
    cells: Vec<Cell>,
    /// Log2 of a cell's bytes: that of the narrowest access in the kernel.
    shift: u32,
    now: u32,
    /// Time of each warp's last barrier.
    clock: Vec<u32>,
    known: Vec<Vec<u32>>,
    /// Per warp the least of `known` over the other warps.
    safe: Vec<u32>,
}

impl Shared {
    pub fn new(len: usize, shift: u32, warps: usize) -> Self {
        Self {
            bytes: vec![0; len],
            cells: vec![Cell::default(); len.div_ceil(1 << shift)],
            shift,
            now: 1,
            clock: vec![1; warps],
            known: vec![vec![0; warps]; warps],
            safe: vec![if warps == 1 { PENDING - 1 } else { 0 }; warps],
        }
    }

    /// The warps of `mask` meet at a barrier: what each did or knew is ordered before what all of them do next.
    pub fn join(&mut self, mask: u32) {
        let warps = self.clock.len();
        let members: Vec<usize> = (0..warps).filter(|w| mask >> w & 1 != 0).collect();
        let mut joined = vec![0; warps];
        for &member in &members {
            for (j, k) in joined.iter_mut().zip(&self.known[member]) {
                *j = (*j).max(*k);
            }
        }
        members.iter().for_each(|&m| joined[m] = self.clock[m]);
        self.now += 1;
        for &member in &members {
            self.clock[member] = self.now;
            self.safe[member] = (0..warps).filter(|w| *w != member).map(|w| joined[w]).min().unwrap_or(PENDING - 1);
            self.known[member].clone_from(&joined);
        }
    }

    /// A barrier that only some wait at (`bar.arrive`): the others' later accesses are not ordered.
    pub fn join_arrived(&mut self, waiting: u32, arrived: &[(usize, Vec<u32>, u32)]) {
        for (warp, known, clock) in arrived {
            for waiter in (0..self.clock.len()).filter(|w| waiting >> w & 1 != 0) {
                for (mine, theirs) in self.known[waiter].iter_mut().zip(known) {
                    *mine = (*mine).max(*theirs);
                }
                self.known[waiter][*warp] = self.known[waiter][*warp].max(*clock);
            }
        }
        self.join(waiting);
    }

    /// What a warp knows as it arrives; its later accesses have a later time.
    pub fn arrive(&mut self, warp: usize) -> (usize, Vec<u32>, u32) {
        let clock = self.clock[warp];
        self.now += 1;
        self.clock[warp] = self.now;
        (warp, self.known[warp].clone(), clock)
    }

    fn range(&self, what: &str, address: u64, size: u32) -> Result<std::ops::Range<usize>, String> {
        let size = u64::from(size);
        let len = self.bytes.len() as u64;
        if address > len || size > len - address {
            return Err(format!(
                "shared {what} of {size} bytes at {address:#x} is out of bounds: the block has {len:#x} bytes"
            ));
        }
        if !address.is_multiple_of(size) {
            return Err(format!("shared {what} of {size} bytes at {address:#x} is not aligned to its size"));
        }
        Ok(address as usize..(address + size) as usize)
    }

    fn cells_of(&self, range: &std::ops::Range<usize>) -> std::ops::Range<usize> {
        range.start >> self.shift..((range.end - 1) >> self.shift) + 1
    }

    /// Whether an earlier access is ordered before what `by` does now.
    #[inline]
    fn ordered(&self, earlier: &Access, by: Accessor) -> bool {
        earlier.time <= self.safe[by.warp]
            || earlier.warps == 1 << by.warp
            || earlier.time != PENDING
                && (by.atomic && earlier.atomic
                    || (0..self.clock.len())
                        .all(|w| w == by.warp || earlier.warps >> w & 1 == 0 || earlier.time <= self.known[by.warp][w]))
    }

    fn race(&self, address: usize, what: &str, did: &str, earlier: &Access, by: Accessor) -> String {
        let warps: Vec<String> = (0..32).filter(|w| earlier.warps >> w & 1 != 0).map(|w| w.to_string()).collect();
        if earlier.time == PENDING {
            return format!(
                "race on shared byte {address:#x}: {what} while the cp.async of line {} may still write it; \
                 wait for the copy's group first",
                earlier.line
            );
        }
        format!(
            "race on shared byte {address:#x}: warp {} {what} what warp {} {did} (line {}), with no barrier between",
            by.warp,
            warps.join(", "),
            earlier.line
        )
    }

    /// Checks a read and records it.
    #[inline]
    fn note_read(&mut self, range: std::ops::Range<usize>, by: Accessor) -> Result<(), String> {
        let time = self.clock[by.warp];
        let safe = self.safe[by.warp];
        for at in self.cells_of(&range) {
            let cell = self.cells[at];
            if cell.write.time == 0 {
                return Err(format!("shared read of byte {:#x}, which nobody has written yet", at << self.shift));
            }
            if !self.ordered(&cell.write, by) {
                return Err(self.race(at << self.shift, "reads", "wrote", &cell.write, by));
            }
            let read = &mut self.cells[at].read;
            let warps = if read.time <= safe { 0 } else { read.warps };
            *read = Access { time, warps: warps | 1 << by.warp, line: by.line, atomic: by.atomic };
        }
        Ok(())
    }

    /// Checks a write and records it at a time, by the given warps.
    #[inline]
    fn note_write(&mut self, range: std::ops::Range<usize>, by: Accessor, pending: bool) -> Result<(), String> {
        let time = if pending { PENDING } else { self.clock[by.warp] };
        let warps = if pending { 0 } else { 1 << by.warp };
        for at in self.cells_of(&range) {
            let cell = self.cells[at];
            if !self.ordered(&cell.write, by) {
                return Err(self.race(at << self.shift, "overwrites", "wrote", &cell.write, by));
            }
            if !self.ordered(&cell.read, by) {
                return Err(self.race(at << self.shift, "overwrites", "read", &cell.read, by));
            }
            let others = if by.atomic && cell.write.atomic { cell.write.warps } else { 0 };
            let write = Access { time, warps: warps | others, line: by.line, atomic: by.atomic };
            self.cells[at] = Cell { write, read: Access::default() };
        }
        Ok(())
    }

    /// Loads 1, 2, 4, 8 or 16 bytes.
    #[inline]
    pub fn load(&mut self, address: u64, size: u32, by: Accessor) -> Result<[u32; 4], String> {
        let range = self.range("read", address, size)?;
        self.note_read(range.clone(), by)?;
        Ok(self.words(range))
    }

    /// The load of an atomic operation; the store that follows makes the record.
    pub fn load_atomic(&mut self, address: u64, size: u32) -> Result<[u32; 4], String> {
        let range = self.range("read", address, size)?;
        for at in self.cells_of(&range) {
            if self.cells[at].write.time == 0 {
                return Err(format!("shared read of byte {:#x}, which nobody has written yet", at << self.shift));
            }
        }
        Ok(self.words(range))
    }

    fn words(&self, range: std::ops::Range<usize>) -> [u32; 4] {
        // Lengths that the compiler knows make short copies.
        let source = &self.bytes[range];
        let mut bytes = [0; 16];
        match source.len() {
            16 => bytes.copy_from_slice(source),
            4 => bytes[..4].copy_from_slice(source),
            len => bytes[..len].copy_from_slice(source),
        }
        std::array::from_fn(|i| u32::from_le_bytes([0, 1, 2, 3].map(|b| bytes[i * 4 + b])))
    }

    /// Stores 1, 2, 4, 8 or 16 bytes.
    #[inline]
    pub fn store(&mut self, address: u64, size: u32, value: &[u32; 4], by: Accessor) -> Result<(), String> {
        let range = self.range("write", address, size)?;
        self.note_write(range.clone(), by, false)?;
        self.put(range, value);
        Ok(())
    }

    fn put(&mut self, range: std::ops::Range<usize>, value: &[u32; 4]) {
        let mut bytes = [0; 16];
        for (chunk, word) in bytes.chunks_exact_mut(4).zip(value) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        let target = &mut self.bytes[range];
        match target.len() {
            16 => target.copy_from_slice(&bytes),
            4 => target.copy_from_slice(&bytes[..4]),
            len => target.copy_from_slice(&bytes[..len]),
        }
    }

    /// A cp.async was issued: the bytes are its own until it is waited for.
    pub fn begin_copy(&mut self, address: u64, size: u32, by: Accessor) -> Result<(), String> {
        let range = self.range("write by cp.async", address, size)?;
        self.note_write(range, by, true)
    }

    /// The bytes of a cp.async arrive.
    pub fn land_copy(&mut self, address: u64, size: u32, value: &[u32; 4]) {
        self.put(address as usize..address as usize + size as usize, value);
    }

    /// The issuing warp waited for a cp.async: from now on it is that warp's write.
    pub fn end_copy(&mut self, address: u64, size: u32, by: Accessor) {
        let write = Access { time: self.clock[by.warp], warps: 1 << by.warp, line: by.line, atomic: false };
        for at in self.cells_of(&(address as usize..address as usize + size as usize)) {
            self.cells[at].write = write;
        }
    }

    /// Adds the lane to an error.
    pub fn trouble(lane: usize) -> impl Fn(String) -> Trouble {
        move |message| Trouble::at(lane, message)
    }
}
