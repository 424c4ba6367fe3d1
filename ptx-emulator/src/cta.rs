//! One thread block: its warps take turns, each up to the next barrier.

use crate::error::{Fault, Trouble, line_text};
use crate::launch::{CopyLanding, Counts, Launch};
use crate::memory::Memory;
use crate::module::{Kernel, Module};
use crate::registers::LANES;
use crate::shared::{Accessor, Shared};
use crate::warp::{Arrival, Stop, Warp};
use std::collections::BTreeMap;

/// What the warps of a block share.
pub(crate) struct Cta<'m> {
    pub memory: &'m Memory,
    pub shared: Shared,
    pub params: &'m [u8],
    pub landing: CopyLanding,
    pub counts: Counts,
}

/// Warps at one barrier.
#[derive(Default)]
struct Barrier {
    threads: Option<u32>,
    arrived: u32,
    waiting: u32,
    /// What warps knew that arrived without waiting.
    others: Vec<(usize, Vec<u32>, u32)>,
}

/// State of a warp between its turns.
enum State {
    Ready,
    Waiting(Arrival),
    Exited,
}

/// Runs a block to its end.
pub(crate) fn run(
    module: &Module,
    kernel: &Kernel,
    launch: &Launch<'_>,
    memory: &Memory,
    index: [u32; 3],
    budget: u64,
) -> Result<Counts, Fault> {
    let threads: u32 = launch.block.iter().product();
    let count = threads.div_ceil(LANES as u32) as usize;
    let shared_len = kernel.shared_len(launch.shared_bytes) as usize;
    let mut cta = Cta {
        memory,
        shared: Shared::new(shared_len, kernel.cell_shift, count),
        params: launch.params,
        landing: launch.copies,
        counts: Counts::default(),
    };
    let mut warps: Vec<Warp> = (0..count).map(|w| kernel.warp(launch, index, w, threads)).collect();
    let outcome = schedule(kernel, &mut warps, &mut cta, threads, budget);
    cta.counts.instructions = warps.iter().map(|w| w.steps).sum();
    outcome.map(|()| cta.counts).map_err(|(warp, line, trouble)| Fault::Instruction {
        kernel: kernel.name.clone(),
        cta: index,
        warp: warp as u32,
        lane: trouble.lane,
        line,
        text: line_text(&module.text, line),
        message: trouble.message,
    })
}

type Failure = (usize, u32, Trouble);

fn schedule(kernel: &Kernel, warps: &mut [Warp], cta: &mut Cta<'_>, threads: u32, budget: u64) -> Result<(), Failure> {
    let mut states: Vec<State> = warps.iter().map(|_| State::Ready).collect();
    let mut barriers: BTreeMap<u32, Barrier> = BTreeMap::new();
    loop {
        let mut progress = false;
        for w in 0..warps.len() {
            if !matches!(states[w], State::Ready) {
                continue;
            }
            progress = true;
            let warp = &mut warps[w];
            match warp.run(&kernel.code, cta, budget) {
                Err(trouble) => return Err((w, warp.line, trouble)),
                Ok(Stop::Exited) => states[w] = State::Exited,
                Ok(Stop::Arrived(arrival)) => {
                    cta.counts.barriers += 1;
                    let barrier = barriers.entry(arrival.id).or_default();
                    if barrier.arrived > 0 && barrier.threads != arrival.threads {
                        let message = format!("barrier {} is used with two different counts of threads", arrival.id);
                        return Err((w, arrival.line, Trouble::new(message)));
                    }
                    barrier.threads = arrival.threads;
                    // A barrier counts whole warps, also where the block's last one is not full.
                    barrier.arrived += LANES as u32;
                    if arrival.wait {
                        barrier.waiting |= 1 << w;
                        states[w] = State::Waiting(arrival);
                    } else {
                        barrier.others.push(cta.shared.arrive(w));
                    }
                    let expected = arrival.threads.unwrap_or(threads.next_multiple_of(LANES as u32));
                    if barrier.arrived >= expected {
                        let done = barriers.remove(&arrival.id).unwrap_or_default();
                        cta.shared.join_arrived(done.waiting, &done.others);
                        (0..states.len()).filter(|w| done.waiting >> w & 1 != 0).for_each(|w| states[w] = State::Ready);
                    }
                }
            }
        }
        if !progress {
            return unreached(&states, &barriers);
        }
    }
}

/// The end of a block in which no warp can go on.
fn unreached(states: &[State], barriers: &BTreeMap<u32, Barrier>) -> Result<(), Failure> {
    let waiting = states.iter().enumerate().find_map(|(w, s)| match s {
        State::Waiting(arrival) => Some((w, *arrival)),
        _ => None,
    });
    let Some((warp, arrival)) = waiting else { return Ok(()) };
    let others: Vec<String> = states
        .iter()
        .enumerate()
        .filter_map(|(w, s)| match s {
            State::Exited => Some(format!("warp {w} has exited")),
            State::Waiting(a) if a.id != arrival.id => {
                Some(format!("warp {w} waits at barrier {} (line {})", a.id, a.line))
            }
            _ => None,
        })
        .collect();
    let arrived = barriers.get(&arrival.id).map_or(0, |b| b.arrived);
    let message = format!("barrier {} was reached by only {arrived} threads: {}", arrival.id, others.join(", "));
    Err((warp, arrival.line, Trouble::new(message)))
}

impl Warp {
    /// This warp as one who accesses shared memory.
    pub fn accessor(&self, atomic: bool) -> Accessor {
        Accessor { warp: self.index, line: self.line, atomic }
    }
}
