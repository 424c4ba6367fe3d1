//! `atom` and `red`: read, compute and write one place without others between.

use crate::access::{note_width, take_space};
use crate::cta::Cta;
use crate::decode::{Decoded, Decoding};
use crate::error::Trouble;
use crate::registers::lanes;
use crate::shared::Shared;
use crate::types::{Space, Type};
use crate::warp::{Op, Warp};
use half::{bf16, f16};

/// New value from the old one and the operands.
type Update = fn(u64, u64, u64) -> u64;

fn update(name: &str, ty: Type) -> Option<Update> {
    use Type::*;
    Some(match (name, ty) {
        ("exch", _) => |_, b, _| b,
        ("cas", _) => |a, b, c| if a == b { c } else { a },
        ("and", B32 | B64) => |a, b, _| a & b,
        ("or", B32 | B64) => |a, b, _| a | b,
        ("xor", B32 | B64) => |a, b, _| a ^ b,
        ("add", U32 | S32) => |a, b, _| u64::from((a as u32).wrapping_add(b as u32)),
        ("add", U64 | S64) => |a, b, _| a.wrapping_add(b),
        ("add", F32) => |a, b, _| u64::from((f32::from_bits(a as u32) + f32::from_bits(b as u32)).to_bits()),
        ("add", F64) => |a, b, _| (f64::from_bits(a) + f64::from_bits(b)).to_bits(),
        ("add", F16) => |a, b, _| u64::from((f16::from_bits(a as u16) + f16::from_bits(b as u16)).to_bits()),
        ("add", Bf16) => |a, b, _| u64::from((bf16::from_bits(a as u16) + bf16::from_bits(b as u16)).to_bits()),
        ("add", F16x2) => |a, b, _| {
            let add = |s: u32| u64::from((f16::from_bits((a >> s) as u16) + f16::from_bits((b >> s) as u16)).to_bits());
            add(0) | add(16) << 16
        },
        ("add", Bf16x2) => |a, b, _| {
            let add =
                |s: u32| u64::from((bf16::from_bits((a >> s) as u16) + bf16::from_bits((b >> s) as u16)).to_bits());
            add(0) | add(16) << 16
        },
        ("min", U32 | U64) => |a, b, _| a.min(b),
        ("max", U32 | U64) => |a, b, _| a.max(b),
        ("min", S32) => |a, b, _| u64::from((a as i32).min(b as i32) as u32),
        ("max", S32) => |a, b, _| u64::from((a as i32).max(b as i32) as u32),
        ("min", S64) => |a, b, _| (a as i64).min(b as i64) as u64,
        ("max", S64) => |a, b, _| (a as i64).max(b as i64) as u64,
        ("inc", U32) => |a, b, _| if a >= b { 0 } else { a + 1 },
        ("dec", U32) => |a, b, _| if a == 0 || a > b { b } else { a - 1 },
        _ => return None,
    })
}

pub(crate) fn decode(ins: &mut Decoding<'_>) -> Decoded {
    let space = take_space(ins);
    if !matches!(space, Space::Global | Space::Shared | Space::Generic) {
        return ins.unknown();
    }
    ins.take("noftz");
    let names = ["exch", "cas", "and", "or", "xor", "add", "min", "max", "inc", "dec"];
    let name = ins.take_any(&names).ok_or("the operation is missing")?;
    let ty = ins.ty()?;
    let Some(update) = update(name, ty) else { return ins.unknown() };
    let first = usize::from(ins.base == "atom");
    let values = if name == "cas" { 2 } else { 1 };
    ins.count(first + 1 + values..=first + 1 + values)?;
    let size = ty.bytes() as u32;
    note_width(ins, space, size);
    ins.scope.global_atomics |= space != Space::Shared;
    let d = if first == 1 { Some(ins.scope.target(ins.operand(0)?, Some(ty.class()))?) } else { None };
    let place = ins.scope.address(ins.operand(first)?)?;
    let b = ins.scope.source(ins.operand(first + 1)?, ty.class())?;
    let c = if values == 2 { ins.scope.source(ins.operand(first + 2)?, ty.class())? } else { b };
    Ok(Op::Warp(Box::new(move |warp, cta, mask| {
        let addresses = warp.addresses(place);
        let (b, c) = (warp.registers.bits(b), warp.registers.bits(c));
        let mut old = [0; 32];
        // Lanes take their turns in ascending order.
        for lane in lanes(mask) {
            let new = |old: u64| update(old, b[lane], c[lane]);
            old[lane] = exchange(warp, cta, space, addresses[lane], size, new).map_err(Shared::trouble(lane))?;
        }
        if let Some(d) = d {
            warp.registers.set_bits(d, mask, &old);
        }
        Ok::<(), Trouble>(())
    })))
}

fn exchange(
    warp: &Warp,
    cta: &mut Cta<'_>,
    space: Space,
    address: u64,
    size: u32,
    new: impl Fn(u64) -> u64,
) -> Result<u64, String> {
    let (space, address) = if space == Space::Generic { Space::of_generic(address) } else { (space, address) };
    let join = |words: [u32; 4]| u64::from(words[0]) | u64::from(words[1]) << 32;
    let split = |bits: u64| [bits as u32, (bits >> 32) as u32, 0, 0];
    let bytes = u64::from(size);
    match space {
        Space::Shared => {
            cta.counts.shared_read += bytes;
            cta.counts.shared_written += bytes;
            let by = warp.accessor(true);
            let old = join(cta.shared.load_atomic(address, size)?);
            cta.shared.store(address, size, &split(new(old)), by)?;
            Ok(old)
        }
        Space::Global => {
            cta.counts.global_read += bytes;
            cta.counts.global_written += bytes;
            let old = join(cta.memory.load(address, size)?);
            cta.memory.store(address, size, &split(new(old)))?;
            Ok(old)
        }
        _ => Err(format!("an atomic at {address:#x}, which is neither global nor shared memory")),
    }
}
