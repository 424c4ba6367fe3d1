//! Instructions in which the lanes of a warp, or the warps of a block, take part together.

use crate::ast::Operand;
use crate::decode::{Decoded, Decoding};
use crate::error::Trouble;
use crate::registers::{FULL, Word, lanes};
use crate::types::{Class, Type};
use crate::warp::{BarrierOp, Op};

pub(crate) fn decode(ins: &mut Decoding<'_>) -> Decoded {
    if ins.base == "activemask" {
        let d = ins.dst::<u32>(0)?;
        return Ok(Op::Lanes(Box::new(move |registers, mask| u32::write(registers, d, mask, [mask; 32]))));
    }
    if !ins.take("sync") {
        return ins.unknown();
    }
    match ins.base {
        "shfl" => shuffle(ins),
        "vote" => vote(ins),
        "redux" => reduce(ins),
        "match" => matching(ins),
        _ => ins.unknown(),
    }
}

/// The lane that a lane reads from, and whether that is inside of its segment.
fn source_lane(mode: &str, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (b, clamp, segment) = (b & 31, c & 31, c >> 8 & 31);
    let first = lane & segment;
    let last = first | clamp & !segment;
    let (from, inside) = match mode {
        "up" => (lane.wrapping_sub(b), lane as i32 - b as i32 >= last as i32),
        "down" => (lane + b, lane + b <= last),
        "bfly" => (lane ^ b, lane ^ b <= last),
        _ => {
            let from = first | b & !segment;
            (from, from <= last)
        }
    };
    if inside { (from, true) } else { (lane, false) }
}

fn shuffle(ins: &mut Decoding<'_>) -> Decoded {
    let mode = ins.take_any(&["up", "down", "bfly", "idx"]).ok_or("the mode is missing")?;
    // The name is needed while running.
    let mode = ["up", "down", "bfly", "idx"].into_iter().find(|m| *m == mode).ok_or("the mode is missing")?;
    ins.count(5..=5)?;
    let (d, p) = match ins.operand(0)? {
        Operand::Pair(d, p) => (d.clone(), p.clone()),
        Operand::Name(d, 0) => (d.clone(), "_".to_string()),
        other => return Err(format!("{other:?} is no register")),
    };
    let d = ins.scope.target(&Operand::Name(d, 0), Some(Class::Narrow))?.index;
    let p = ins.scope.target(&Operand::Name(p, 0), Some(Class::Predicate))?.index;
    let [a, b, c, members] = [ins.src::<u32>(1)?, ins.src::<u32>(2)?, ins.src::<u32>(3)?, ins.src::<u32>(4)?];
    Ok(Op::Warp(Box::new(move |warp, _, mask| {
        let r = &warp.registers;
        let [a, b, c, members] = [a, b, c, members].map(|slot| u32::read(r, slot));
        warp.need_members(mask, &members)?;
        let (mut values, mut inside) = ([0; 32], [false; 32]);
        for lane in lanes(mask) {
            let (from, valid) = source_lane(mode, lane as u32, b[lane], c[lane]);
            if mask >> from & 1 == 0 {
                return Err(Trouble::at(lane, format!("reads from lane {from}, which does not take part")));
            }
            (values[lane], inside[lane]) = (a[from as usize], valid);
        }
        u32::write(&mut warp.registers, d, mask, values);
        bool::write(&mut warp.registers, p, mask, inside);
        Ok(())
    })))
}

fn vote(ins: &mut Decoding<'_>) -> Decoded {
    let mode = ins.take_any(&["all", "any", "uni", "ballot"]).ok_or("the mode is missing")?;
    let kind = ["all", "any", "uni"].iter().position(|m| *m == mode);
    ins.count(3..=3)?;
    let d = if kind.is_some() { ins.dst::<bool>(0)? } else { ins.dst::<u32>(0)? };
    let (p, negated) = ins.predicate(1)?;
    let members = ins.src::<u32>(2)?;
    let flip = if negated { FULL } else { 0 };
    Ok(Op::Warp(Box::new(move |warp, _, mask| {
        let members = u32::read(&warp.registers, members);
        warp.need_members(mask, &members)?;
        let votes = (warp.registers.predicates[p as usize] ^ flip) & mask;
        let result = match kind {
            Some(0) => votes == mask,
            Some(1) => votes != 0,
            Some(_) => votes == mask || votes == 0,
            None => {
                u32::write(&mut warp.registers, d, mask, [votes; 32]);
                return Ok(());
            }
        };
        bool::write(&mut warp.registers, d, mask, [result; 32]);
        Ok(())
    })))
}

fn reduce(ins: &mut Decoding<'_>) -> Decoded {
    let name = ins.take_any(&["add", "min", "max", "and", "or", "xor"]).ok_or("the operation is missing")?;
    let f: fn(u32, u32) -> u32 = match (name, ins.ty()?) {
        ("add", Type::U32 | Type::S32) => u32::wrapping_add,
        ("min", Type::U32) => u32::min,
        ("max", Type::U32) => u32::max,
        ("min", Type::S32) => |a, b| (a as i32).min(b as i32) as u32,
        ("max", Type::S32) => |a, b| (a as i32).max(b as i32) as u32,
        ("and", Type::B32) => |a, b| a & b,
        ("or", Type::B32) => |a, b| a | b,
        ("xor", Type::B32) => |a, b| a ^ b,
        _ => return ins.unknown(),
    };
    ins.count(3..=3)?;
    let (d, a, members) = (ins.dst::<u32>(0)?, ins.src::<u32>(1)?, ins.src::<u32>(2)?);
    Ok(Op::Warp(Box::new(move |warp, _, mask| {
        let members = u32::read(&warp.registers, members);
        warp.need_members(mask, &members)?;
        let a = u32::read(&warp.registers, a);
        let result = lanes(mask).map(|lane| a[lane]).reduce(f).unwrap_or(0);
        u32::write(&mut warp.registers, d, mask, [result; 32]);
        Ok(())
    })))
}

fn matching(ins: &mut Decoding<'_>) -> Decoded {
    if !ins.take("any") {
        return ins.unknown();
    }
    ins.count(3..=3)?;
    let ty = ins.ty()?;
    let d = ins.dst::<u32>(0)?;
    let a = ins.scope.source(ins.operand(1)?, ty.class())?;
    let members = ins.src::<u32>(2)?;
    Ok(Op::Warp(Box::new(move |warp, _, mask| {
        let members = u32::read(&warp.registers, members);
        warp.need_members(mask, &members)?;
        let a = warp.registers.bits(a);
        let equal = |lane: usize| lanes(mask).filter(|l| a[*l] == a[lane]).fold(0, |m, l| m | 1u32 << l);
        u32::write(&mut warp.registers, d, mask, std::array::from_fn(equal));
        Ok(())
    })))
}

/// `bar` and `barrier`: of a warp, or of a block.
pub(crate) fn barrier(ins: &mut Decoding<'_>) -> Decoded {
    if ins.take("warp") {
        if !ins.take("sync") {
            return ins.unknown();
        }
        let members = ins.src::<u32>(0)?;
        return Ok(Op::Warp(Box::new(move |warp, _, mask| {
            let members = u32::read(&warp.registers, members);
            warp.need_members(mask, &members)
        })));
    }
    ins.take("cta");
    ins.take("aligned");
    let wait = ins.take("sync");
    if !wait && !ins.take("arrive") {
        return ins.unknown();
    }
    ins.count(if wait { 1..=2 } else { 2..=2 })?;
    let id = ins.src::<u32>(0)?;
    let threads = if ins.operands.len() == 2 { Some(ins.src::<u32>(1)?) } else { None };
    Ok(Op::Barrier(BarrierOp { id, threads, wait }))
}
