//! A warp in lock-step: its lanes diverge at branches and meet again at the branch's immediate post-dominator.

use crate::copies::Copies;
use crate::cta::Cta;
use crate::decode::Instruction;
use crate::error::Trouble;
use crate::flow::NOWHERE;
use crate::operands::Address;
use crate::registers::{FULL, LANES, LaneOp, Registers};

/// An instruction that touches more than its own lane's registers.
pub(crate) type WarpOp = Box<dyn Fn(&mut Warp, &mut Cta<'_>, u32) -> Result<(), Trouble> + Send + Sync>;

/// What an instruction does.
pub(crate) enum Op {
    Lanes(LaneOp),
    Warp(WarpOp),
    Branch {
        target: u32,
        /// Where both sides meet again.
        reconverge: u32,
    },
    Exit,
    Barrier(BarrierOp),
}

/// Operands of `bar.sync` and `bar.arrive`: registers of 32 bits.
#[derive(Clone, Copy)]
pub(crate) struct BarrierOp {
    pub id: u32,
    pub threads: Option<u32>,
    pub wait: bool,
}

/// Lanes that run together up to a place where they meet others.
struct Frame {
    pc: u32,
    mask: u32,
    until: u32,
}

/// A barrier that a warp arrived at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub id: u32,
    pub threads: Option<u32>,
    pub wait: bool,
    pub line: u32,
}

/// Why a warp stopped.
pub(crate) enum Stop {
    Exited,
    Arrived(Arrival),
}

pub(crate) struct Warp {
    pub registers: Registers,
    /// Local memory of each lane, one after the other.
    pub local: Vec<u8>,
    pub local_len: usize,
    pub index: usize,
    /// Lanes that the block's size gives this warp.
    pub lanes: u32,
    /// Those that have not exited.
    pub alive: u32,
    pub copies: Copies,
    pub steps: u64,
    /// Line of the current instruction.
    pub line: u32,
    frames: Vec<Frame>,
}

impl Warp {
    pub fn new(registers: Registers, local_len: usize, index: usize, lanes: u32) -> Self {
        Self {
            registers,
            local: vec![0; local_len * LANES],
            local_len,
            index,
            lanes,
            alive: lanes,
            copies: Copies::default(),
            steps: 0,
            line: 0,
            frames: vec![Frame { pc: 0, mask: lanes, until: NOWHERE }],
        }
    }

    /// Runs until the warp exits or arrives at a barrier.
    pub fn run(&mut self, code: &[Instruction], cta: &mut Cta<'_>, budget: u64) -> Result<Stop, Trouble> {
        while let Some(frame) = self.frames.last_mut() {
            if frame.pc == frame.until || frame.mask == 0 {
                self.frames.pop();
                continue;
            }
            let instruction = &code[frame.pc as usize];
            let mut mask = frame.mask;
            if let Some((predicate, negated)) = instruction.guard {
                let bits = self.registers.predicates[predicate as usize];
                mask &= if negated { !bits } else { bits };
            }
            self.line = instruction.line;
            self.steps += 1;
            if self.steps > budget {
                return Err(Trouble::new(format!("the warp ran {budget} instructions without an end")));
            }
            match &instruction.op {
                Op::Branch { target, reconverge } => branch(&mut self.frames, mask, *target, *reconverge),
                _ if mask == 0 => frame.pc += 1,
                Op::Lanes(op) => {
                    frame.pc += 1;
                    op(&mut self.registers, mask);
                }
                Op::Warp(op) => {
                    frame.pc += 1;
                    op(self, cta, mask)?;
                }
                Op::Exit => {
                    frame.pc += 1;
                    self.alive &= !mask;
                    self.frames.iter_mut().for_each(|f| f.mask &= !mask);
                }
                Op::Barrier(barrier) => {
                    frame.pc += 1;
                    return Ok(Stop::Arrived(self.arrive(*barrier, mask)?));
                }
            }
        }
        Ok(Stop::Exited)
    }

    fn arrive(&self, barrier: BarrierOp, mask: u32) -> Result<Arrival, Trouble> {
        if mask != self.lanes {
            let missing = self.lanes & !mask;
            let exited = if missing & self.alive == 0 { "have exited" } else { "do not reach it with the others" };
            return Err(Trouble::new(format!("diverged barrier: lanes {missing:#010x} of the warp {exited}")));
        }
        let lane = mask.trailing_zeros() as usize;
        let id = self.registers.narrow[barrier.id as usize][lane];
        let threads = barrier.threads.map(|t| self.registers.narrow[t as usize][lane]);
        if id > 15 {
            return Err(Trouble::new(format!("barrier {id} does not exist; they are 0 to 15")));
        }
        if let Some(count) = threads.filter(|t| *t == 0 || t % LANES as u32 != 0) {
            return Err(Trouble::new(format!("a barrier of {count} threads; a multiple of 32 is needed")));
        }
        Ok(Arrival { id, threads, wait: barrier.wait, line: self.line })
    }

    /// All 32 lanes have to take part in an instruction of the whole warp.
    pub fn need_all(&self, mask: u32) -> Result<(), Trouble> {
        if mask == FULL {
            return Ok(());
        }
        Err(Trouble::new(format!("all 32 lanes of the warp have to run this together; only {mask:#010x} do")))
    }

    /// The lanes that the member mask names have to be those that run the instruction.
    pub fn need_members(&self, mask: u32, members: &[u32; LANES]) -> Result<(), Trouble> {
        for lane in crate::registers::lanes(mask) {
            if members[lane] & self.lanes != mask {
                let message =
                    format!("the member mask names lanes {:#010x}, but lanes {mask:#010x} run this", members[lane]);
                return Err(Trouble::at(lane, message));
            }
        }
        Ok(())
    }

    /// The addresses of all lanes.
    pub fn addresses(&self, Address { base, offset }: Address) -> [u64; LANES] {
        let mut addresses = self.registers.bits(base);
        addresses.iter_mut().for_each(|a| *a = a.wrapping_add_signed(offset));
        addresses
    }
}

fn branch(frames: &mut Vec<Frame>, taken: u32, target: u32, reconverge: u32) {
    let Some(frame) = frames.last_mut() else { return };
    let next = frame.pc + 1;
    let skipped = frame.mask & !taken;
    if taken == 0 {
        frame.pc = next;
    } else if skipped == 0 {
        frame.pc = target;
    } else {
        frame.pc = reconverge;
        for (pc, mask) in [(next, skipped), (target, taken)] {
            if pc != reconverge {
                frames.push(Frame { pc, mask, until: reconverge });
            }
        }
    }
}
