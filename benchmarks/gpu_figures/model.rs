//! How long a kernel takes, from what it does and what a device can.

use crate::counted::{Counted, GLOBAL, INSTRUCTIONS, LDMATRIX, MMA, SHARED_BYTES, plan};
use crate::device::{Device, EXPONENTIALS, ISSUE, LATENCY, MMA_FLOPS, SHARED_WIDTH, resident};
use candle_cp_kernels::Bounds;
use candle_cp_kernels::gpu::{Direction, TileShape, WorkList};

/// Heads of the predicted shapes, each with its own keys.
pub const QUERY_HEADS: usize = 16;

/// Clocks of a multiprocessor for one tile.
pub struct Clocks {
    /// By unit.
    pub tensor: f64,
    pub shared: f64,
    pub issue: f64,
    pub exponentials: f64,
    pub l2: f64,
    /// By phase, which barriers keep apart: products with their latency, and everything else. Thread blocks that run at a
    /// time share them.
    pub products: f64,
    pub rest: f64,
    /// Of a thread block, not of a tile.
    pub once: f64,
}

impl Clocks {
    pub fn new(device: &Device, c: &Counted) -> Self {
        let blocks = resident(device, c.registers(device.sm), c.kernel.threads, c.kernel.shared_bytes) as f64;
        let rate = device.tensor * device.mma_share / MMA_FLOPS;
        let l2_width = device.l2 / device.multiprocessors;
        let shared = c.both(SHARED_BYTES) / SHARED_WIDTH;
        let exponentials = (c.tile.rows * c.tile.columns) as f64 / EXPONENTIALS;
        let others = (c.per_tile[INSTRUCTIONS] - c.per_tile[MMA] - c.per_tile[LDMATRIX]) / ISSUE;
        // A warp loads its operands of a step of 16, then multiplies: its scheduler's tensor core idles for the latency
        // unless other warps fill it.
        let scheduler_warps = c.warps() / 4.0;
        let products = steps(c).into_iter().map(|(steps, mma)| {
            let busy = mma / (rate / 4.0);
            steps * (scheduler_warps * busy).max(LATENCY + busy)
        });
        let once = (c.once[INSTRUCTIONS] / ISSUE).max((c.once[GLOBAL[0]] + c.once[GLOBAL[1]]) / l2_width);
        Self {
            tensor: c.per_tile[MMA] / rate,
            shared,
            issue: c.per_tile[INSTRUCTIONS] / ISSUE,
            exponentials,
            l2: c.both(GLOBAL) / l2_width,
            products: products.sum::<f64>().max(shared) / blocks,
            rest: others.max(exponentials) / blocks,
            once,
        }
    }

    /// The unit that is busiest, and its clocks.
    pub fn busiest(&self) -> (&'static str, f64) {
        let units = [
            ("tensor cores", self.tensor),
            ("shared memory", self.shared),
            ("issue", self.issue),
            ("exponentials", self.exponentials),
            ("L2", self.l2),
        ];
        units.into_iter().fold(("", 0.0), |a, b| if b.1 > a.1 { b } else { a })
    }
}

/// Of each product of a tile, for one warp: steps of 16 in the inner dimension, and `mma` per step.
pub fn steps(c: &Counted) -> Vec<(f64, f64)> {
    let TileShape { rows, columns, warps: (down, across) } = c.tile;
    let blocks = |n: usize| (rows / down / 16 * (n / across / 8)) as f64;
    let scores = ((c.head / 16) as f64, blocks(columns));
    let sums = ((columns / 16) as f64, blocks(c.head));
    let products = match c.direction {
        Direction::Forward => vec![scores, sums],
        Direction::BackwardQueries => vec![scores, scores, sums],
        Direction::BackwardKeys => vec![scores, scores, sums, sums],
    };
    let all: f64 = products.iter().map(|(steps, mma)| steps * mma).sum::<f64>() * c.warps();
    assert_eq!(all, c.per_tile[MMA], "{}: what the emulator counts", c.kernel.name);
    products
}

/// Seconds of a kernel over a shape.
#[derive(Clone, Copy)]
pub struct Seconds {
    /// If only the busiest unit counted.
    pub least: f64,
    /// Products, everything else in the tiles, what blocks do once.
    pub parts: [f64; 3],
}

pub fn seconds(device: &Device, c: &Counted, tokens: usize, window: Option<usize>) -> Seconds {
    let see = |query: usize| Bounds {
        first: (query + 1).saturating_sub(window.unwrap_or(usize::MAX)) as u32,
        end: query as u32 + 1,
    };
    let bounds = [(0..tokens).map(see).collect::<Vec<_>>()];
    let make = if c.direction == Direction::BackwardKeys { WorkList::by_keys } else { WorkList::by_queries };
    let list = make(c.tile, 1, &bounds, &[plan(tokens)]);
    let clocks = Clocks::new(device, c);
    let of_clock = QUERY_HEADS as f64 / device.multiprocessors / device.clock;
    let [tiles, blocks] = [list.live().live(), list.blocks()].map(|n| n as f64 * of_clock);
    let (busiest, in_turn) = (clocks.busiest().1, clocks.products + clocks.rest);
    // Several blocks hide each other's phases, but no unit does more than it can.
    let stretched = (busiest / in_turn).max(1.0) * tiles;
    let once = blocks * clocks.once;
    Seconds { least: tiles * busiest + once, parts: [stretched * clocks.products, stretched * clocks.rest, once] }
}
