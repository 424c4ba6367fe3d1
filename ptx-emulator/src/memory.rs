//! Emulated device memory: allocations with gaps between them, and a mark for every byte that was written.

use crate::error::MemoryError;
use crate::types::{LOCAL_WINDOW, SHARED_WINDOW, WINDOW};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};

/// Alignment of allocations, in bytes.
const ALIGN: u64 = 256;
/// Unmapped bytes after each allocation, at least.
const GAP: u64 = 1 << 16;
/// The first address; null and small integers are never valid.
const FIRST: u64 = 0x10_0000_0000;
/// Addresses that a caller may choose: nearly a tebibyte, above all others but those of module variables, and between the
/// windows through which generic addresses reach shared and local memory.
const CHOSEN: Range<u64> = SHARED_WINDOW + WINDOW..LOCAL_WINDOW;

/// Device memory that kernels read and write.
///
/// Every access is checked against the allocations; bytes that nobody wrote cannot be read.
#[derive(Debug)]
pub struct Memory {
    /// Ascending by address.
    blocks: Vec<Block>,
    next: u64,
}

/// One allocation. Words are atomic since several thread blocks may run at once.
#[derive(Debug)]
struct Block {
    base: u64,
    /// In bytes.
    len: u64,
    words: Box<[AtomicU32]>,
    /// Per word one bit for each byte that was written; `None` where all were.
    written: Option<Box<[AtomicU8]>>,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl Memory {
    /// Memory without allocations.
    pub fn new() -> Self {
        Self { blocks: Vec::new(), next: FIRST }
    }

    /// Allocates `len` bytes, aligned to 256, which nobody has written yet; returns their address.
    pub fn alloc(&mut self, len: usize) -> u64 {
        let base = self.next;
        let words = len.div_ceil(4);
        self.next = (base + len as u64 + GAP).next_multiple_of(ALIGN);
        self.insert(Block {
            base,
            len: len as u64,
            words: (0..words).map(|_| AtomicU32::new(0)).collect(),
            written: Some((0..words).map(|_| AtomicU8::new(0)).collect()),
        });
        base
    }

    /// Allocates memory, aligned to 256, that holds `bytes`; returns its address.
    pub fn upload(&mut self, bytes: &[u8]) -> u64 {
        let base = self.next;
        self.next = (base + bytes.len() as u64 + GAP).next_multiple_of(ALIGN);
        self.insert(Block::filled(base, bytes));
        base
    }

    /// Allocates memory that holds `bytes` at an address of the caller's choice, with nothing between it and what else
    /// there is: rows of one tensor may lie gigabytes apart, so that index arithmetic in too few bits is found.
    ///
    /// # Errors
    /// An address outside of 2^40 + 2^32..2^41 or not a multiple of 16; bytes that are allocated already.
    pub fn upload_at(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let end = address.saturating_add(bytes.len() as u64);
        if !address.is_multiple_of(16) || address < CHOSEN.start || end > CHOSEN.end {
            return Err(MemoryError(format!(
                "{address:#x} for {} bytes; multiples of 16 in {:#x}..{:#x} can be chosen",
                bytes.len(),
                CHOSEN.start,
                CHOSEN.end
            )));
        }
        let before =
            self.blocks.partition_point(|b| b.base < end.max(address + 1)).checked_sub(1).map(|at| &self.blocks[at]);
        if let Some(other) = before.filter(|b| b.base + b.len > address || b.base == address) {
            let given = format!("{address:#x} for {} bytes", bytes.len());
            return Err(MemoryError(format!("{given}; {} bytes at {:#x} are allocated", other.len, other.base)));
        }
        self.insert(Block::filled(address, bytes));
        Ok(())
    }

    fn insert(&mut self, block: Block) {
        let at = self.blocks.partition_point(|b| b.base < block.base);
        self.blocks.insert(at, block);
    }

    /// Places bytes at a fixed address above all others, for a module's variables.
    pub(crate) fn place(&mut self, base: u64, bytes: &[u8]) {
        self.blocks.push(Block::filled(base, bytes));
    }

    /// Takes back what was placed from `base` on.
    pub(crate) fn remove_placed(&mut self, base: u64) {
        self.blocks.retain(|b| b.base < base);
    }

    /// Frees an allocation; accesses to it are faults from now on.
    ///
    /// # Errors
    /// If `address` is not the beginning of a live allocation.
    pub fn free(&mut self, address: u64) -> Result<(), MemoryError> {
        let at = self.blocks.binary_search_by_key(&address, |b| b.base);
        let at = at.map_err(|_| {
            MemoryError(format!("{address:#x} is no live allocation; free what upload or alloc returned, once"))
        })?;
        self.blocks.remove(at);
        Ok(())
    }

    /// Copies `len` bytes from `address` on.
    ///
    /// # Errors
    /// If the range is not inside one allocation, or holds a byte that nobody wrote.
    pub fn read(&self, address: u64, len: usize) -> Result<Vec<u8>, MemoryError> {
        self.copy(address, len, None)
    }

    /// Copies `len` bytes from `address` on; bytes that nobody wrote are `fill`.
    ///
    /// # Errors
    /// If the range is not inside one allocation.
    pub fn read_or(&self, address: u64, len: usize, fill: u8) -> Result<Vec<u8>, MemoryError> {
        self.copy(address, len, Some(fill))
    }

    /// Overwrites bytes from `address` on.
    ///
    /// # Errors
    /// If the range is not inside one allocation.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let (block, offset) = self.range(address, bytes.len() as u64)?;
        for (at, byte) in bytes.iter().enumerate() {
            block.store_part(offset + at as u64, 1, u32::from(*byte));
        }
        Ok(())
    }

    fn copy(&self, address: u64, len: usize, fill: Option<u8>) -> Result<Vec<u8>, MemoryError> {
        let (block, offset) = self.range(address, len as u64)?;
        (offset..offset + len as u64)
            .map(|at| match (block.is_written(at), fill) {
                (true, _) => Ok((block.words[(at / 4) as usize].load(Relaxed) >> (at % 4 * 8)) as u8),
                (false, Some(fill)) => Ok(fill),
                (false, None) => Err(MemoryError(format!(
                    "byte {} of the {len} from {address:#x} on was never written",
                    at - offset
                ))),
            })
            .collect()
    }

    fn range(&self, address: u64, len: u64) -> Result<(&Block, u64), MemoryError> {
        let block = self.find(address, len).ok_or_else(|| MemoryError(self.outside("access", address, len)))?;
        Ok((block, address - block.base))
    }

    #[inline]
    fn find(&self, address: u64, len: u64) -> Option<&Block> {
        let at = self.blocks.partition_point(|b| b.base <= address);
        let block = &self.blocks[at.checked_sub(1)?];
        let offset = address - block.base;
        (offset <= block.len && len <= block.len - offset).then_some(block)
    }

    fn outside(&self, what: &str, address: u64, len: u64) -> String {
        let at = self.blocks.partition_point(|b| b.base <= address);
        let near = match at.checked_sub(1).map(|i| &self.blocks[i]) {
            Some(b) => format!(
                "byte {} of the allocation of {} bytes at {:#x} would be its first",
                address - b.base,
                b.len,
                b.base
            ),
            None => "no allocation lies before it".to_string(),
        };
        format!("global {what} of {len} bytes at {address:#x} is out of bounds: {near}")
    }

    /// Loads 1, 2, 4, 8 or 16 bytes; the words beyond the size are 0.
    #[inline]
    pub(crate) fn load(&self, address: u64, size: u32) -> Result<[u32; 4], String> {
        let block = self.checked("read", address, size)?;
        let offset = address - block.base;
        if let Some(written) = &block.written {
            block.check_written(written, address, size)?;
        }
        let at = (offset / 4) as usize;
        let mut out = [0; 4];
        if size < 4 {
            let word = block.words[at].load(Relaxed) >> (offset % 4 * 8);
            out[0] = word & (u32::MAX >> (32 - size * 8));
        } else {
            for (o, word) in out.iter_mut().zip(&block.words[at..at + size as usize / 4]) {
                *o = word.load(Relaxed);
            }
        }
        Ok(out)
    }

    /// Stores 1, 2, 4, 8 or 16 bytes.
    #[inline]
    pub(crate) fn store(&self, address: u64, size: u32, value: &[u32; 4]) -> Result<(), String> {
        let block = self.checked("write", address, size)?;
        let offset = address - block.base;
        if size < 4 {
            block.store_part(offset, size, value[0]);
            return Ok(());
        }
        let (at, count) = ((offset / 4) as usize, size as usize / 4);
        for (value, word) in value.iter().zip(&block.words[at..at + count]) {
            word.store(*value, Relaxed);
        }
        if let Some(written) = &block.written {
            written[at..at + count].iter().for_each(|w| w.store(15, Relaxed));
        }
        Ok(())
    }

    #[inline]
    fn checked(&self, what: &str, address: u64, size: u32) -> Result<&Block, String> {
        let size = u64::from(size);
        let block = self.find(address, size).ok_or_else(|| self.outside(what, address, size))?;
        match address % size {
            0 => Ok(block),
            _ => Err(format!("global {what} of {size} bytes at {address:#x} is not aligned to its size")),
        }
    }
}

impl Block {
    fn filled(base: u64, bytes: &[u8]) -> Self {
        let word = |chunk: &[u8]| {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            AtomicU32::new(u32::from_le_bytes(word))
        };
        Self { base, len: bytes.len() as u64, words: bytes.chunks(4).map(word).collect(), written: None }
    }

    fn is_written(&self, offset: u64) -> bool {
        let written = self.written.as_ref();
        written.is_none_or(|w| w[(offset / 4) as usize].load(Relaxed) >> (offset % 4) & 1 != 0)
    }

    fn check_written(&self, written: &[AtomicU8], address: u64, size: u32) -> Result<(), String> {
        let offset = address - self.base;
        let at = (offset / 4) as usize;
        let complete = match size {
            1 | 2 => {
                let bits = (1u8 << size) - 1;
                written[at].load(Relaxed) >> (offset % 4) & bits == bits
            }
            _ => written[at..at + size as usize / 4].iter().all(|w| w.load(Relaxed) == 15),
        };
        if complete {
            return Ok(());
        }
        let first = (offset..offset + u64::from(size)).find(|o| !self.is_written(*o)).unwrap_or(offset);
        Err(format!(
            "global read of {size} bytes at {address:#x}: byte {first} of the allocation at {:#x} was never written",
            self.base
        ))
    }

    /// Stores 1 or 2 bytes inside of a word, without touching the others.
    fn store_part(&self, offset: u64, size: u32, value: u32) {
        let at = (offset / 4) as usize;
        let shift = offset % 4 * 8;
        let mask = (u32::MAX >> (32 - size * 8)) << shift;
        let update = |word: u32| Some(word & !mask | value << shift & mask);
        // The closure never refuses, so there is nothing to handle.
        let _ = self.words[at].fetch_update(Relaxed, Relaxed, update);
        if let Some(written) = &self.written {
            written[at].fetch_or(((1 << size) - 1) << (offset % 4), Relaxed);
        }
    }
}
