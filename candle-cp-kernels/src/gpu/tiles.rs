//! Which kernel a device runs: the table of tile shapes, with the shared memory that each needs.

use super::ptx::{Compiled, compiled};
use std::fmt;

/// Element types of queries, keys and values that have kernels. Sums are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GpuElement {
    /// Products on tensor cores.
    Bf16,
    /// Products on tensor cores.
    F16,
    /// Plain fused multiply-adds, no TF32: exact, and far slower.
    F32,
}

impl GpuElement {
    /// Size of one element.
    pub fn bytes(self) -> usize {
        match self {
            GpuElement::Bf16 | GpuElement::F16 => 2,
            GpuElement::F32 => 4,
        }
    }
}

/// What a device offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuLimits {
    /// Compute capability, (8, 0) or later.
    pub capability: (u32, u32),
    /// Shared memory that one thread block can ask for, in bytes (`MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`).
    pub shared_bytes: usize,
}

/// What a kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Output, maximum and sum.
    Forward,
    /// Gradient of queries, by blocks of queries.
    BackwardQueries,
    /// Gradients of keys and values, by blocks of keys.
    BackwardKeys,
}

/// A tile: the rows that a thread block owns, the columns of one step, and how warps share them.
///
/// Rows are stacked queries (keys in [`Direction::BackwardKeys`]), columns are keys (stacked queries).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Warps over the rows, and over the columns and the head.
    pub warps: (usize, usize),
}

impl TileShape {
    /// Shared memory of a kernel with this tile, in bytes: operand tiles, tiles of pairs, statistics of the rows.
    pub fn shared_bytes(&self, direction: Direction, element: GpuElement, padded_head: usize) -> usize {
        let Self { rows, columns, warps } = *self;
        let head = padded_head * element.bytes();
        let pairs = rows * columns * element.bytes();
        match direction {
            // Q; K, V; P; maxima by warp; bounds.
            Direction::Forward => (rows + 2 * columns) * head + pairs + rows * warps.1 * 4 + rows * 8,
            // Q, dO; K, V; dS; lse, delta, bounds of the queries.
            Direction::BackwardQueries => 2 * (rows + columns) * head + pairs + rows * 16,
            // K, V; Q, dO; dS, P; the same.
            Direction::BackwardKeys => 2 * (rows + columns) * head + 2 * pairs + columns * 16,
        }
    }

    /// Registers of one thread that hold sums over the whole pass: what limits a tile besides shared memory.
    pub fn sum_registers(&self, direction: Direction, padded_head: usize) -> usize {
        let tensors = if direction == Direction::BackwardKeys { 2 } else { 1 };
        tensors * self.rows * padded_head / (self.warps.0 * self.warps.1 * 32)
    }
}

const fn tile(rows: usize, columns: usize, down: usize, across: usize) -> TileShape {
    TileShape { rows, columns, warps: (down, across) }
}

/// The tiles that are compiled, the best one first. A device takes the first one whose shared memory it has:
/// 227 KiB on sm_90 and sm_100, 163 KiB on sm_80, 99 KiB on sm_86, sm_89 and sm_120.
///
/// More rows mean fewer bytes of shared memory per product; 128 registers of sums per thread (of 255) are the most that
/// leaves room for the rest without spills.
pub fn table(direction: Direction, element: GpuElement, padded_head: usize) -> &'static [TileShape] {
    use Direction::{BackwardKeys, BackwardQueries, Forward};
    let wide = element == GpuElement::F32;
    match (wide, padded_head, direction) {
        //                                      shared memory in KiB
        (false, 64, Forward) => const { &[tile(128, 64, 4, 2)] }, //             50
        (false, 64, _) => const { &[tile(64, 64, 2, 4)] },        //                   41, 49
        (false, 128, Forward) => const { &[tile(128, 64, 4, 2)] }, //            82
        (false, 128, _) => const { &[tile(64, 64, 2, 4)] },       //                  73, 81
        (false, 256, Forward) => const { &[tile(128, 64, 4, 2), tile(64, 32, 2, 4)] }, // 146, 70
        (false, 256, _) => const { &[tile(64, 64, 2, 4), tile(32, 32, 1, 4)] }, // 137 and 145, 67 and 69
        // 202, 134, 99
        (false, 512, Forward) => const { &[tile(64, 64, 2, 4), tile(64, 32, 2, 4), tile(32, 32, 2, 4)] },
        // 197, 131, 97
        (false, 512, BackwardQueries) => const { &[tile(64, 32, 2, 4), tile(32, 32, 2, 4), tile(16, 32, 1, 4)] },
        // 133, 99
        (false, 512, BackwardKeys) => const { &[tile(32, 32, 2, 4), tile(16, 32, 1, 4)] },
        (true, 64 | 128, _) => const { &[tile(32, 32, 2, 4)] }, //               29 to 41, 53 to 73
        (true, 256, Forward) => const { &[tile(32, 16, 2, 2)] }, //              67
        (true, 256, _) => const { &[tile(16, 16, 1, 2)] },      //                   65, 66
        (true, 512, Forward | BackwardQueries) => const { &[tile(16, 16, 1, 2)] }, // 97, 129
        (true, 512, BackwardKeys) => const { &[tile(16, 32, 1, 4)] }, //         197
        _ => &[],
    }
}

/// A kernel to launch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Entry of the module.
    pub name: String,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
}

/// There is no kernel for what was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoKernel {
    /// Element type.
    pub element: GpuElement,
    /// Head size.
    pub head_dim: usize,
    /// The device.
    pub limits: GpuLimits,
    /// Why.
    pub reason: String,
}

impl fmt::Display for NoKernel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { element, head_dim, limits, reason } = self;
        let (major, minor) = limits.capability;
        write!(
            f,
            "no attention kernel for {element:?}, head size {head_dim} on compute capability {major}.{minor}: {reason}"
        )
    }
}

impl std::error::Error for NoKernel {}

/// The kernels of one element type and head size on one device.
#[derive(Debug, Clone)]
pub struct Kernels {
    element: GpuElement,
    head_dim: usize,
    module: Compiled,
    shapes: [TileShape; 3],
    kernels: [Kernel; 3],
}

/// The head sizes that kernels are compiled for; smaller ones are padded in shared memory.
pub const PADDED_HEADS: [usize; 4] = [64, 128, 256, 512];

impl Kernels {
    /// Chooses kernels.
    ///
    /// # Errors
    /// An architecture before sm_80, a head size of 0 or above 512, or a device with too little shared memory.
    pub fn new(element: GpuElement, head_dim: usize, limits: GpuLimits) -> Result<Self, NoKernel> {
        let none = |reason: String| NoKernel { element, head_dim, limits, reason };
        if limits.capability < (8, 0) {
            return Err(none("the kernels need 8.0 (Ampere) or later".into()));
        }
        let padded = PADDED_HEADS.into_iter().find(|&size| size >= head_dim && head_dim > 0);
        let padded = padded.ok_or_else(|| none("sizes 1 to 512 have kernels".into()))?;
        let module = compiled(element, padded).expect("every padded head size has a module");
        let directions = [Direction::Forward, Direction::BackwardQueries, Direction::BackwardKeys];
        let mut shapes = [tile(0, 0, 0, 0); 3];
        for (shape, direction) in shapes.iter_mut().zip(directions) {
            let table = table(direction, element, padded);
            let needs = |tile: &TileShape| tile.shared_bytes(direction, element, padded);
            *shape = *table.iter().find(|tile| needs(tile) <= limits.shared_bytes).ok_or_else(|| {
                let least = table.iter().map(needs).min().unwrap_or(0);
                none(format!(
                    "{direction:?} needs {least} bytes of shared memory per block, of which it has {}; use bf16",
                    limits.shared_bytes
                ))
            })?;
        }
        let kernels = std::array::from_fn(|i| kernel(directions[i], element, padded, shapes[i]));
        Ok(Self { element, head_dim, module, shapes, kernels })
    }

    /// Element type.
    pub fn element(&self) -> GpuElement {
        self.element
    }

    /// Head size, as it was asked for.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// What to load.
    pub fn module(&self) -> Compiled {
        self.module
    }

    /// Tile of a direction.
    pub fn shape(&self, direction: Direction) -> TileShape {
        self.shapes[direction as usize]
    }

    /// Kernel of a direction.
    pub fn kernel(&self, direction: Direction) -> &Kernel {
        &self.kernels[direction as usize]
    }
}

/// The kernel of a tile.
pub fn kernel(direction: Direction, element: GpuElement, padded_head: usize, shape: TileShape) -> Kernel {
    let TileShape { rows, columns, warps: (down, across) } = shape;
    let what = match direction {
        Direction::Forward => "forward",
        Direction::BackwardQueries => "backward_queries",
        Direction::BackwardKeys => "backward_keys",
    };
    Kernel {
        name: format!("{what}_r{rows}_c{columns}_w{down}x{across}"),
        threads: (down * across * 32) as u32,
        shared_bytes: shape.shared_bytes(direction, element, padded_head) as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Direction; 3] = [Direction::Forward, Direction::BackwardQueries, Direction::BackwardKeys];
    const ELEMENTS: [GpuElement; 3] = [GpuElement::Bf16, GpuElement::F16, GpuElement::F32];

    /// Every tile of the table is compiled, and nothing else is.
    #[test]
    fn table_and_ptx_agree() {
        for element in ELEMENTS {
            for head in PADDED_HEADS {
                let text = compiled(element, head).unwrap().text;
                let mut named: Vec<String> = ALL
                    .into_iter()
                    .flat_map(|d| table(d, element, head).iter().map(move |&t| kernel(d, element, head, t).name))
                    .chain(["finish".into(), "output_dot".into()])
                    .collect();
                let mut found: Vec<_> = text
                    .lines()
                    .filter_map(|line| line.strip_prefix(".visible .entry "))
                    .map(|line| line.trim_end_matches('(').to_string())
                    .collect();
                named.sort();
                found.sort();
                assert_eq!(named, found, "{element:?} {head}");
            }
        }
    }

    #[test]
    fn budgets_hold() {
        for element in ELEMENTS {
            for head in PADDED_HEADS {
                for direction in ALL {
                    let shapes = table(direction, element, head);
                    let bytes: Vec<_> = shapes.iter().map(|t| t.shared_bytes(direction, element, head)).collect();
                    assert!(bytes.is_sorted_by(|a, b| a > b), "the best tile needs the most");
                    assert!(bytes[0] <= 227 << 10, "{element:?} {head} {direction:?} {bytes:?}");
                    let wide_backward = element == GpuElement::F32 && head == 512 && direction != Direction::Forward;
                    assert!(
                        wide_backward || *bytes.last().unwrap() <= 99 << 10,
                        "{element:?} {head} {direction:?} {bytes:?}"
                    );
                    assert!(shapes.iter().all(|t| t.sum_registers(direction, head) <= 128));
                }
            }
        }
    }

    #[test]
    fn what_has_no_kernel_is_named() {
        let limits = |capability, shared_bytes| GpuLimits { capability, shared_bytes };
        let text = |element, head, limits| Kernels::new(element, head, limits).unwrap_err().to_string();
        let h200 = limits((9, 0), 227 << 10);
        assert!(
            text(GpuElement::Bf16, 513, h200).contains("Bf16, head size 513 on compute capability 9.0: sizes 1 to 512")
        );
        assert!(text(GpuElement::Bf16, 0, h200).contains("sizes 1 to 512"));
        assert!(text(GpuElement::F16, 64, limits((7, 5), 64 << 10)).contains("8.0 (Ampere)"));
        let small = text(GpuElement::F32, 512, limits((8, 9), 99 << 10));
        assert!(small.contains("BackwardQueries needs 132352 bytes"), "{small}");
        assert_eq!(
            Kernels::new(GpuElement::Bf16, 100, h200).unwrap().kernel(Direction::Forward).name,
            "forward_r128_c64_w4x2"
        );
        let ada = Kernels::new(GpuElement::Bf16, 512, limits((8, 9), 99 << 10)).unwrap();
        assert_eq!(ada.shape(Direction::Forward), tile(32, 32, 2, 4));
    }
}
