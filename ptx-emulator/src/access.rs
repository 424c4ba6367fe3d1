//! Moves, address conversions, loads and stores.

use crate::ast::Operand;
use crate::cta::Cta;
use crate::decode::{Decoded, Decoding};
use crate::error::Trouble;
use crate::registers::{FULL, LANES, Slot, Word, lanes};
use crate::shared::Shared;
use crate::types::{Class, Space, Type};
use crate::warp::{Op, Warp};

/// One lane's access: up to four words.
pub(crate) type Words = [u32; 4];

pub(crate) fn moves(ins: &mut Decoding<'_>) -> Decoded {
    ins.count(2..=2)?;
    match ins.base {
        "cvta" => return cvta(ins),
        "isspacep" => {
            let space = ins.take_any(&["global", "shared", "local", "const", "param", "shared::cta"]);
            let space = space.and_then(|s| Space::named(&format!(".{s}"))).ok_or("the space is missing")?;
            return ins.unary(move |a: u64| Space::of_generic(a).0 == space);
        }
        _ => {}
    }
    let ty = ins.ty()?;
    match (ins.operand(0)?, ins.operand(1)?) {
        (Operand::Vector(parts), _) => unpack(ins, ty, parts),
        (_, Operand::Vector(parts)) => pack(ins, ty, parts),
        (_, Operand::Name(name, 0))
            if matches!(name.as_str(), "%clock" | "%clock64" | "%globaltimer" | "%clock_hi") =>
        {
            // The warp's own count of instructions: it only has to go up.
            let d = ins.dst_any(0)?;
            Ok(Op::Warp(Box::new(move |warp, _, mask| {
                let steps = warp.steps;
                warp.registers.set_bits(d, mask, &[steps; LANES]);
                Ok(())
            })))
        }
        _ => match ty.class() {
            Class::Predicate => {
                let d = ins.dst::<bool>(0)? as usize;
                let (a, negated) = ins.predicate(1)?;
                let flip = if negated { FULL } else { 0 };
                Ok(Op::Lanes(Box::new(move |registers, mask| {
                    let bits = registers.predicates[a as usize] ^ flip;
                    registers.predicates[d] = registers.predicates[d] & !mask | bits & mask;
                })))
            }
            Class::Narrow => ins.unary(|a: u32| a),
            Class::Wide => ins.unary(|a: u64| a),
        },
    }
}

fn part_bits(ty: Type, parts: usize) -> Result<u32, String> {
    match 8 * ty.bytes() as usize / parts.max(1) {
        bits @ (8 | 16 | 32) if bits * parts == 8 * ty.bytes() as usize => Ok(bits as u32),
        _ => Err(format!("{ty:?} has no {parts} equal parts")),
    }
}

fn unpack(ins: &mut Decoding<'_>, ty: Type, parts: &[Operand]) -> Decoded {
    let bits = part_bits(ty, parts.len())?;
    let targets: Vec<Slot> =
        parts.iter().map(|p| ins.scope.target(p, Some(Class::Narrow))).collect::<Result<_, _>>()?;
    let a = ins.scope.source(ins.operand(1)?, ty.class())?;
    Ok(Op::Lanes(Box::new(move |registers, mask| {
        let value = registers.bits(a);
        for (at, target) in targets.iter().enumerate() {
            let shift = at as u32 * bits;
            u32::write(registers, target.index, mask, value.map(|v| (v >> shift) as u32 & (FULL >> (32 - bits))));
        }
    })))
}

fn pack(ins: &mut Decoding<'_>, ty: Type, parts: &[Operand]) -> Decoded {
    let bits = part_bits(ty, parts.len())?;
    let sources: Vec<Slot> = parts.iter().map(|p| ins.scope.source(p, Class::Narrow)).collect::<Result<_, _>>()?;
    let d = ins.scope.target(ins.operand(0)?, Some(ty.class()))?;
    Ok(Op::Lanes(Box::new(move |registers, mask| {
        let mut value = [0u64; LANES];
        for (at, source) in sources.iter().enumerate() {
            let part = registers.narrow[source.index as usize];
            for (v, p) in value.iter_mut().zip(part) {
                *v |= u64::from(p & (FULL >> (32 - bits))) << (at as u32 * bits);
            }
        }
        registers.set_bits(d, mask, &value);
    })))
}

fn cvta(ins: &mut Decoding<'_>) -> Decoded {
    let to = ins.take("to");
    let space = ins.take_any(&["global", "shared", "local", "const", "param", "shared::cta"]);
    let space = space.and_then(|s| Space::named(&format!(".{s}"))).ok_or("the space is missing")?;
    let window = space.window();
    match ins.ty()? {
        Type::U64 if to => ins.unary(move |a: u64| a.wrapping_sub(window)),
        Type::U64 => ins.unary(move |a: u64| a.wrapping_add(window)),
        _ => ins.unknown(),
    }
}

/// Takes modifiers that say how caches and other observers see an access; all accesses are seen at once here.
fn take_hints(ins: &mut Decoding<'_>) {
    let names = [
        "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "relaxed", "acquire", "release", "acq_rel", "weak",
        "gpu", "sys", "cta", "cluster", "unified",
    ];
    while ins.take_any(&names).is_some() {}
    for start in ["L1::", "L2::"] {
        ins.take_all(start);
    }
}

/// The space of a memory instruction, for the address in an operand.
pub(crate) fn take_space(ins: &mut Decoding<'_>) -> Space {
    take_hints(ins);
    let names = ["global", "shared", "shared::cta", "local", "param", "param::entry", "const"];
    ins.take_any(&names).and_then(|name| Space::named(&format!(".{name}"))).unwrap_or(Space::Generic)
}

/// Notes the width of an access that may be to shared memory.
pub(crate) fn note_width(ins: &mut Decoding<'_>, space: Space, bytes: u32) {
    if matches!(space, Space::Shared | Space::Generic) {
        ins.scope.narrowest = ins.scope.narrowest.min(bytes);
    }
}

pub(crate) fn decode(ins: &mut Decoding<'_>) -> Decoded {
    let space = take_space(ins);
    if ins.base.starts_with("prefetch") {
        ins.take_any(&["L1", "L2"]);
        ins.take_all("L2");
        return Ok(Op::Lanes(Box::new(|_, _| {})));
    }
    let vector = match ins.take_any(&["v2", "v4"]) {
        Some("v2") => 2,
        Some(_) => 4,
        None => 1,
    };
    let ty = ins.ty()?;
    let (each, total) = (ty.bytes() as u32, ty.bytes() as u32 * vector);
    if ty == Type::Pred || total > 16 {
        return ins.unknown();
    }
    note_width(ins, space, total);
    // A cache policy may follow.
    ins.count(2..=3)?;
    let store = ins.base == "st";
    let (data, address) = if store { (1, 0) } else { (0, 1) };
    let place = ins.scope.address(ins.operand(address)?)?;
    let one = std::slice::from_ref(ins.operand(data)?);
    let parts = match (ins.operand(data)?, vector) {
        (Operand::Vector(parts), _) if parts.len() == vector as usize => parts.as_slice(),
        (_, 1) => one,
        _ => return Err(format!("a vector of {vector} registers is needed")),
    };
    let slots: Vec<Slot> = parts
        .iter()
        .map(|p| if store { ins.scope.source_any(p, ty.class()) } else { ins.scope.target(p, None) })
        .collect::<Result<_, _>>()?;
    Ok(Op::Warp(Box::new(move |warp, cta, mask| {
        let addresses = warp.addresses(place);
        if store {
            let mut values = [[0; 4]; LANES];
            gather(warp, &slots, each, &mut values);
            lanes(mask).try_for_each(|lane| put(warp, cta, space, addresses[lane], total, &values[lane], lane))
        } else {
            let mut values = [[0; 4]; LANES];
            for lane in lanes(mask) {
                values[lane] = get(warp, cta, space, addresses[lane], total, lane)?;
            }
            scatter(warp, &slots, ty, mask, &values);
            Ok(())
        }
    })))
}

/// Registers of a vector to each lane's words.
fn gather(warp: &Warp, slots: &[Slot], each: u32, values: &mut [Words; LANES]) {
    for (at, slot) in slots.iter().enumerate() {
        match each {
            4 if slot.class == Class::Narrow => {
                let register = &warp.registers.narrow[slot.index as usize];
                values.iter_mut().zip(register).for_each(|(v, r)| v[at] = *r);
            }
            _ => {
                let register = warp.registers.bits(*slot);
                for (value, bits) in values.iter_mut().zip(register) {
                    place(value, at as u32 * each, each, bits);
                }
            }
        }
    }
}

fn place(value: &mut Words, offset: u32, each: u32, bits: u64) {
    match each {
        8 => {
            value[offset as usize / 4] = bits as u32;
            value[offset as usize / 4 + 1] = (bits >> 32) as u32;
        }
        _ => value[offset as usize / 4] |= (bits as u32 & (FULL >> (32 - 8 * each))) << (offset % 4 * 8),
    }
}

/// Each lane's words to the registers of a vector; wider registers get the sign or zeros.
fn scatter(warp: &mut Warp, slots: &[Slot], ty: Type, mask: u32, values: &[Words; LANES]) {
    let each = ty.bytes() as usize;
    for (at, slot) in slots.iter().enumerate() {
        if each == 4 && slot.class == Class::Narrow {
            u32::write(&mut warp.registers, slot.index, mask, std::array::from_fn(|lane| values[lane][at]));
            continue;
        }
        let offset = at * each;
        let unused = 64 - 8 * each as u32;
        let bits = values.map(|v| {
            let word = offset / 4;
            let raw = match each {
                8 => u64::from(v[word]) | u64::from(v[word + 1]) << 32,
                _ => u64::from(v[word] >> (offset % 4 * 8)),
            };
            if ty.signed() { ((raw << unused) as i64 >> unused) as u64 } else { raw << unused >> unused }
        });
        warp.registers.set_bits(*slot, mask, &bits);
    }
}

/// One lane's load.
#[inline]
pub(crate) fn get(
    warp: &Warp,
    cta: &mut Cta<'_>,
    space: Space,
    address: u64,
    size: u32,
    lane: usize,
) -> Result<Words, Trouble> {
    let (space, address) = if space == Space::Generic { Space::of_generic(address) } else { (space, address) };
    match space {
        Space::Shared => {
            cta.counts.shared_read += u64::from(size);
            cta.shared.load(address, size, warp.accessor(false)).map_err(Shared::trouble(lane))
        }
        Space::Local => {
            let range = window("local read", address, size, warp.local_len)?;
            Ok(words(&warp.local[lane * warp.local_len..][range]))
        }
        Space::Param => {
            let range = window("parameter read", address, size, cta.params.len())?;
            Ok(words(&cta.params[range]))
        }
        Space::Global | Space::Const | Space::Generic => {
            cta.counts.global_read += u64::from(size);
            cta.memory.load(address, size).map_err(Shared::trouble(lane))
        }
    }
    .map_err(|trouble| Trouble { lane: Some(lane as u32), ..trouble })
}

/// One lane's store.
#[inline]
pub(crate) fn put(
    warp: &mut Warp,
    cta: &mut Cta<'_>,
    space: Space,
    address: u64,
    size: u32,
    value: &Words,
    lane: usize,
) -> Result<(), Trouble> {
    let (space, address) = if space == Space::Generic { Space::of_generic(address) } else { (space, address) };
    match space {
        Space::Shared => {
            cta.counts.shared_written += u64::from(size);
            cta.shared.store(address, size, value, warp.accessor(false)).map_err(Shared::trouble(lane))
        }
        Space::Local => {
            let range = window("local write", address, size, warp.local_len)?;
            let own = &mut warp.local[lane * warp.local_len..][range];
            own.iter_mut().zip(value.iter().flat_map(|w| w.to_le_bytes())).for_each(|(to, from)| *to = from);
            Ok(())
        }
        Space::Param | Space::Const => Err(Trouble::at(lane, "write to read-only memory")),
        Space::Global | Space::Generic => {
            cta.counts.global_written += u64::from(size);
            cta.memory.store(address, size, value).map_err(Shared::trouble(lane))
        }
    }
    .map_err(|trouble| Trouble { lane: Some(lane as u32), ..trouble })
}

/// Checks an access to a space of a fixed length.
fn window(what: &str, address: u64, size: u32, len: usize) -> Result<std::ops::Range<usize>, Trouble> {
    let len = len as u64;
    if address > len || u64::from(size) > len - address {
        return Err(Trouble::new(format!(
            "{what} of {size} bytes at {address:#x} is out of bounds: {len} bytes exist"
        )));
    }
    if !address.is_multiple_of(u64::from(size)) {
        return Err(Trouble::new(format!("{what} of {size} bytes at {address:#x} is not aligned to its size")));
    }
    Ok(address as usize..address as usize + size as usize)
}

fn words(bytes: &[u8]) -> Words {
    let mut all = [0; 16];
    all[..bytes.len()].copy_from_slice(bytes);
    std::array::from_fn(|i| u32::from_le_bytes([0, 1, 2, 3].map(|b| all[i * 4 + b])))
}
