//! Products of bf16 pairs by matrix tiles (Intel AMX): 16 rows by 16 columns of f32 sums, 16 pairs per step.
//!
//! Written as assembly: the compiler has no stable intrinsics for it yet.

use crate::matmul::Product;
use crate::pairs::Pair;
use std::arch::asm;
use std::ops::Range;

/// Rows and columns of a tile, and pairs of a step.
const TILE: usize = 16;
/// Rows and columns of a block: 2 x 2 tiles.
const BLOCK: usize = 2 * TILE;

/// Whether the processor has tiles with bf16, and the system lets this process use them.
#[cfg(target_os = "linux")]
pub(crate) fn is_available() -> bool {
    const LEAF: u32 = 7;
    const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    let features = std::arch::x86_64::__cpuid_count(LEAF, 0).edx;
    if features & BF16_AND_TILE != BF16_AND_TILE {
        return false;
    }
    // SAFETY: a system call without pointers; it fails where the kernel does not know it. Asking again is allowed.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn is_available() -> bool {
    false
}

/// The product. Limits hold for groups of [`BLOCK`] rows.
///
/// # Safety
/// [`is_available`] was true in this process.
pub(crate) unsafe fn multiply(p: Product<Pair, f32>) {
    let (terms, columns) = p.check(BLOCK, TILE, BLOCK);
    if terms == 0 {
        return;
    }
    assert!(p.a.column == 1 && p.a.data.len() >= p.rows.next_multiple_of(BLOCK) * p.a.row, "whole blocks of rows");
    // SAFETY: the caller's promise; nothing else uses tiles between these two.
    unsafe { configure() };
    let mut spare = [0.0; BLOCK * BLOCK];
    // A block of columns of `b` stays in the first-level cache while all rows pass over it.
    for column in (0..columns).step_by(BLOCK) {
        for (group, limits) in p.limits.iter().enumerate() {
            if limits.columns.start >= column + BLOCK || limits.columns.end <= column || limits.terms.is_empty() {
                continue;
            }
            let terms = limits.terms.start / TILE * TILE..limits.terms.end.next_multiple_of(TILE);
            let block = Block { first: group * BLOCK, column, columns: BLOCK.min(columns - column), terms };
            // SAFETY: `check` and the assertion above: rows up to the next whole block, terms and columns
            // rounded to tiles lie inside of all operands.
            unsafe { run_block(&p, block, &mut spare) };
        }
    }
    // SAFETY: as for `configure`.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Eight tiles of 16 rows by 64 bytes.
unsafe fn configure() {
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    config.row_bytes[..8].fill(4 * TILE as u16);
    config.rows[..8].fill(TILE as u8);
    // SAFETY: a valid configuration of 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
}

struct Block {
    first: usize,
    column: usize,
    columns: usize,
    terms: Range<usize>,
}

/// One block of the result; at the edges it takes the way through `spare`.
unsafe fn run_block(p: &Product<Pair, f32>, block: Block, spare: &mut [f32; BLOCK * BLOCK]) {
    let Block { first, column, columns, terms } = block;
    let width = p.out_row;
    let rows = BLOCK.min(p.rows - first);
    // SAFETY: the caller's promise.
    unsafe {
        let (b_start, b_row) = p.b.place(column);
        let b = p.b.data.as_ptr().add(b_start + terms.start * b_row);
        // A block that is one tile wide computes it twice.
        let second = if columns == BLOCK { b.add(TILE) } else { b };
        let a = p.a.data.as_ptr().add(first * p.a.row + terms.start);
        let steps = terms.len() / TILE;
        let out = p.out.as_ptr().cast_mut().add(first * width + column);
        let operands = Operands { a, a_row: p.a.row, b: [b, second], b_row, steps };
        if rows == BLOCK && columns == BLOCK {
            operands.add_to(out, width, p.accumulate);
            return;
        }
        operands.add_to(spare.as_mut_ptr(), BLOCK, false);
        for row in 0..rows {
            let out = std::slice::from_raw_parts_mut(out.add(row * width), columns);
            let sums = &spare[row * BLOCK..][..columns];
            match p.accumulate {
                true => out.iter_mut().zip(sums).for_each(|(out, &sum)| *out += sum),
                false => out.copy_from_slice(sums),
            }
        }
    }
}

/// `2 x 2` tiles: addresses of the first terms, words from row to row.
struct Operands {
    a: *const Pair,
    a_row: usize,
    b: [*const Pair; 2],
    b_row: usize,
    steps: usize,
}

impl Operands {
    /// Writes the block at `out`, `width` numbers from row to row, or adds to it.
    ///
    /// # Safety
    /// Tiles are configured; all rows of all tiles lie inside of their operands.
    #[inline]
    unsafe fn add_to(self, out: *mut f32, width: usize, accumulate: bool) {
        let word = size_of::<Pair>();
        // SAFETY: the caller's promise.
        unsafe {
            let lower = out.add(TILE * width);
            asm!(
                "test {accumulate}, {accumulate}",
                "jnz 2f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 3f",
                "2:",
                "tileloadd tmm0, [{upper} + {out_row}]",
                "tileloadd tmm1, [{upper} + {out_row} + 64]",
                "tileloadd tmm2, [{lower} + {out_row}]",
                "tileloadd tmm3, [{lower} + {out_row} + 64]",
                "3:",
                "tileloadd tmm4, [{a0} + {a_row}]",
                "tileloadd tmm6, [{b0} + {b_row}]",
                "tileloadd tmm7, [{b1} + {b_row}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a1} + {a_row}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a0}, 64",
                "add {a1}, 64",
                "add {b0}, {b_step}",
                "add {b1}, {b_step}",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{upper} + {out_row}], tmm0",
                "tilestored [{upper} + {out_row} + 64], tmm1",
                "tilestored [{lower} + {out_row}], tmm2",
                "tilestored [{lower} + {out_row} + 64], tmm3",
                accumulate = in(reg) usize::from(accumulate),
                upper = in(reg) out,
                lower = in(reg) lower,
                out_row = in(reg) width * size_of::<f32>(),
                a0 = inout(reg) self.a => _,
                a1 = inout(reg) self.a.add(TILE * self.a_row) => _,
                a_row = in(reg) self.a_row * word,
                b0 = inout(reg) self.b[0] => _,
                b1 = inout(reg) self.b[1] => _,
                b_row = in(reg) self.b_row * word,
                b_step = in(reg) TILE * self.b_row * word,
                steps = inout(reg) self.steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
