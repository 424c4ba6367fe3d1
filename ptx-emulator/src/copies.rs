//! `cp.async`: copies from global to shared memory that nobody may touch before they are waited for.

use crate::access::take_space;
use crate::ast::Operand;
use crate::cta::Cta;
use crate::decode::{Decoded, Decoding};
use crate::error::Trouble;
use crate::launch::CopyLanding;
use crate::registers::{Word, lanes};
use crate::shared::{Accessor, Shared};
use crate::types::{Class, Space};
use crate::warp::{Op, Warp};
use std::collections::VecDeque;

/// One lane's copy.
#[derive(Clone, Copy)]
struct Copy {
    to: u64,
    from: u64,
    size: u32,
    /// Bytes that are read; zeros follow.
    read: u32,
    by: Accessor,
    lane: usize,
}

/// Copies of a warp that were not waited for yet.
#[derive(Default)]
pub(crate) struct Copies {
    open: Vec<Copy>,
    groups: VecDeque<Vec<Copy>>,
}

pub(crate) fn decode(ins: &mut Decoding<'_>) -> Decoded {
    if !ins.take("async") {
        return ins.unknown();
    }
    if ins.take("commit_group") {
        return Ok(Op::Warp(Box::new(|warp, _, mask| {
            same_groups(warp, mask, "cp.async.commit_group")?;
            let group = std::mem::take(&mut warp.copies.open);
            warp.copies.groups.push_back(group);
            Ok(())
        })));
    }
    if ins.take("wait_all") {
        return Ok(Op::Warp(Box::new(|warp, cta, mask| {
            same_groups(warp, mask, "cp.async.wait_all")?;
            let group = std::mem::take(&mut warp.copies.open);
            warp.copies.groups.push_back(group);
            wait(warp, cta, 0)
        })));
    }
    if ins.take("wait_group") {
        ins.count(1..=1)?;
        let Operand::Integer(left) = *ins.operand(0)? else {
            return Err("the number of groups has to be known".into());
        };
        return Ok(Op::Warp(Box::new(move |warp, cta, mask| {
            same_groups(warp, mask, "cp.async.wait_group")?;
            wait(warp, cta, left as usize)
        })));
    }
    copy(ins)
}

fn copy(ins: &mut Decoding<'_>) -> Decoded {
    let all_levels = !ins.take("cg") && ins.take("ca");
    let hint = ins.take("L2::cache_hint");
    // Both spaces are named; the first one is where the copy goes.
    if (take_space(ins), take_space(ins)) != (Space::Shared, Space::Global) {
        return ins.unknown();
    }
    ins.count(3..=5)?;
    let size = match *ins.operand(2)? {
        Operand::Integer(size @ (4 | 8 | 16)) if size == 16 || all_levels => size as u32,
        _ => return Err("cp.async copies 16 bytes, or 4, 8 or 16 with .ca".into()),
    };
    crate::access::note_width(ins, Space::Shared, size);
    let with_size = ins.operands.len() > 3 + usize::from(hint);
    let read = if with_size { Some(ins.src::<u32>(3)?) } else { None };
    let to = ins.scope.address(ins.operand(0)?)?;
    let from = ins.scope.address(ins.operand(1)?)?;
    if from.base.class != Class::Wide {
        return Err("a global address has 64 bits".into());
    }
    Ok(Op::Warp(Box::new(move |warp, cta, mask| {
        let to = warp.addresses(to);
        let from = warp.addresses(from);
        let read = read.map(|r| u32::read(&warp.registers, r));
        for lane in lanes(mask) {
            let read = read.map_or(size, |r| r[lane]);
            if read > size {
                return Err(Trouble::at(lane, format!("a copy of {size} bytes that reads {read}")));
            }
            let copy = Copy { to: to[lane], from: from[lane], size, read, by: warp.accessor(false), lane };
            cta.counts.shared_written += u64::from(size);
            cta.counts.global_read += u64::from(read);
            cta.shared.begin_copy(copy.to, size, copy.by).map_err(Shared::trouble(lane))?;
            // Also a copy that lands later fails where it was issued.
            let value = fetch(cta, &copy)?;
            if cta.landing == CopyLanding::AtIssue {
                cta.shared.land_copy(copy.to, size, &value);
            }
            warp.copies.open.push(copy);
        }
        Ok(())
    })))
}

fn fetch(cta: &Cta<'_>, copy: &Copy) -> Result<[u32; 4], Trouble> {
    let trouble = Shared::trouble(copy.lane);
    if !copy.from.is_multiple_of(u64::from(copy.size)) {
        let message = format!("a copy of {} bytes from {:#x}, which is not aligned to that", copy.size, copy.from);
        return Err(trouble(message));
    }
    if copy.read == copy.size {
        return cta.memory.load(copy.from, copy.size).map_err(trouble);
    }
    let mut value = [0; 4];
    for at in 0..copy.read {
        let byte = cta.memory.load(copy.from + u64::from(at), 1).map_err(&trouble)?[0];
        value[at as usize / 4] |= byte << (at % 4 * 8);
    }
    Ok(value)
}

/// Groups belong to threads; here to the warp, so its lanes have to make the same ones.
fn same_groups(warp: &Warp, mask: u32, what: &str) -> Result<(), Trouble> {
    if mask == warp.alive {
        return Ok(());
    }
    Err(Trouble::new(format!("{what} by lanes {mask:#010x} of {:#010x} is not modelled", warp.alive)))
}

/// Waits until at most `left` groups are under way.
fn wait(warp: &mut Warp, cta: &mut Cta<'_>, left: usize) -> Result<(), Trouble> {
    while warp.copies.groups.len() > left {
        for copy in warp.copies.groups.pop_front().unwrap_or_default() {
            if cta.landing == CopyLanding::AtWait {
                let value = fetch(cta, &copy)?;
                cta.shared.land_copy(copy.to, copy.size, &value);
            }
            cta.shared.end_copy(copy.to, copy.size, copy.by);
        }
    }
    Ok(())
}
