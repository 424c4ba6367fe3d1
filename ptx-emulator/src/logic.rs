//! Logic, shifts and bit fields.

use crate::ast::Operand;
use crate::decode::{Decoded, Decoding};
use crate::integer::by_integer;
use crate::registers::{Word, map3};
use crate::types::Type;
use crate::warp::Op;

pub(crate) fn decode(ins: &mut Decoding<'_>) -> Decoded {
    let ty = ins.ty()?;
    match (ins.base, ty) {
        ("and" | "or" | "xor" | "not", Type::Pred) => predicates(ins),
        ("and", _) => by_integer!(ins, T => ins.binary::<T, T, T>(|a, b| a & b)),
        ("or", _) => by_integer!(ins, T => ins.binary::<T, T, T>(|a, b| a | b)),
        ("xor", _) => by_integer!(ins, T => ins.binary::<T, T, T>(|a, b| a ^ b)),
        ("not", _) => by_integer!(ins, T => ins.unary::<T, T>(|a| !a)),
        ("cnot", _) => by_integer!(ins, T => ins.unary::<T, T>(|a| (a == 0) as T)),
        // Shifts by the width or more give 0, or the sign.
        ("shl", _) => by_integer!(ins, T => ins.binary::<T, T, u32>(|a, n| if n < T::BITS { a << n } else { 0 })),
        ("shr", _) => by_integer!(ins, T => ins.binary::<T, T, u32>(|a, n| {
            if n < T::BITS { a >> n } else { a >> (T::BITS - 1) >> 1 }
        })),
        ("shf", Type::B32) => funnel(ins),
        ("lop3", Type::B32) => lop3(ins),
        _ => ins.unknown(),
    }
}

fn predicates(ins: &mut Decoding<'_>) -> Decoded {
    let base = ins.base;
    ins.count(if base == "not" { 2..=2 } else { 3..=3 })?;
    let d = ins.dst::<bool>(0)? as usize;
    let (a, negate_a) = ins.predicate(1)?;
    let (b, negate_b) = if base == "not" { (a, negate_a) } else { ins.predicate(2)? };
    let kind = ["and", "or", "xor"].iter().position(|k| *k == base);
    let flip = |negated: bool| if negated { u32::MAX } else { 0 };
    let (flip_a, flip_b) = (flip(negate_a), flip(negate_b));
    Ok(Op::Lanes(Box::new(move |registers, mask| {
        let (a, b) = (registers.predicates[a as usize] ^ flip_a, registers.predicates[b as usize] ^ flip_b);
        let bits = match kind {
            Some(0) => a & b,
            Some(1) => a | b,
            Some(_) => a ^ b,
            None => !a,
        };
        registers.predicates[d] = registers.predicates[d] & !mask | bits & mask;
    })))
}

fn funnel(ins: &mut Decoding<'_>) -> Decoded {
    let left = ins.take("l");
    let right = !left && ins.take("r");
    let clamp = ins.take("clamp");
    if !(left || right) || !(clamp || ins.take("wrap")) {
        return ins.unknown();
    }
    let amount = move |n: u32| if clamp { n.min(32) } else { n & 31 };
    let join = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    if left {
        ins.ternary::<u32, u32, u32, u32>(move |a, b, n| (join(a, b) << amount(n) >> 32) as u32)
    } else {
        ins.ternary::<u32, u32, u32, u32>(move |a, b, n| (join(a, b) >> amount(n)) as u32)
    }
}

fn lop3(ins: &mut Decoding<'_>) -> Decoded {
    ins.count(5..=5)?;
    let Operand::Integer(table @ 0..=255) = *ins.operand(4)? else {
        return Err("lop3 needs a table of 8 bits".into());
    };
    let d = ins.dst::<u32>(0)?;
    let operands = [ins.src::<u32>(1)?, ins.src::<u32>(2)?, ins.src::<u32>(3)?];
    Ok(Op::Lanes(map3(d, operands, move |a: u32, b: u32, c: u32| {
        (0..8u32).filter(|row| table >> row & 1 != 0).fold(0, |bits, row| {
            let pick = |value: u32, bit: u32| if row >> bit & 1 != 0 { value } else { !value };
            bits | pick(a, 2) & pick(b, 1) & pick(c, 0)
        })
    })))
}

/// A field's start and length, which are taken as bytes, inside of a value's width.
fn field(start: u32, len: u32, width: u32) -> (u32, u32) {
    let start = (start & 255).min(width);
    (start, (len & 255).min(width - start))
}

fn low_bits(len: u32) -> u64 {
    if len >= 64 { u64::MAX } else { (1 << len) - 1 }
}

/// `bfe`: bits beyond the value are zeros, or copies of the field's sign.
fn extract(value: u64, start: u32, len: u32, width: u32, signed: bool) -> u64 {
    let (start, len) = (start & 255, len & 255);
    let unsigned = if start >= 64 { 0 } else { value >> start & low_bits(len) };
    if !signed || len == 0 {
        return unsigned;
    }
    let top = (start + len - 1).min(width - 1);
    let sign = value >> top & 1 != 0;
    let kept = len.min(width.saturating_sub(start));
    if sign { unsigned & low_bits(kept) | !low_bits(kept) } else { unsigned }
}

fn insert(a: u64, b: u64, start: u32, len: u32, width: u32) -> u64 {
    let (start, len) = field(start, len, width);
    if start >= width {
        return b;
    }
    let mask = low_bits(len) << start;
    b & !mask | a << start & mask
}

pub(crate) fn bits(ins: &mut Decoding<'_>) -> Decoded {
    let ty = ins.ty()?;
    match (ins.base, ty) {
        ("bfe", Type::U32) => ins.ternary::<u32, u32, u32, u32>(|a, s, l| extract(a.into(), s, l, 32, false) as u32),
        ("bfe", Type::S32) => ins.ternary::<u32, u32, u32, u32>(|a, s, l| extract(a.into(), s, l, 32, true) as u32),
        ("bfe", Type::U64) => ins.ternary::<u64, u64, u32, u32>(|a, s, l| extract(a, s, l, 64, false)),
        ("bfe", Type::S64) => ins.ternary::<u64, u64, u32, u32>(|a, s, l| extract(a, s, l, 64, true)),
        ("bfi", Type::B32) => insertion::<u32>(ins, |a, b, s, l| insert(a.into(), b.into(), s, l, 32) as u32),
        ("bfi", Type::B64) => insertion::<u64>(ins, |a, b, s, l| insert(a, b, s, l, 64)),
        ("bfind", _) => {
            let shift = ins.take("shiftamt");
            // For signed types the highest bit that differs from the sign.
            let find = move |value: u64, width: u32| match value {
                0 => u32::MAX,
                _ if shift => value.leading_zeros() - (64 - width),
                _ => 63 - value.leading_zeros(),
            };
            match ty {
                Type::U32 => ins.unary::<u32, u32>(move |a| find(a.into(), 32)),
                Type::S32 => ins.unary::<u32, i32>(move |a| find(((a ^ (a >> 31)) as u32).into(), 32)),
                Type::U64 => ins.unary::<u32, u64>(move |a| find(a, 64)),
                Type::S64 => ins.unary::<u32, i64>(move |a| find((a ^ (a >> 63)) as u64, 64)),
                _ => ins.unknown(),
            }
        }
        ("brev", Type::B32) => ins.unary(u32::reverse_bits),
        ("brev", Type::B64) => ins.unary(u64::reverse_bits),
        ("popc", Type::B32) => ins.unary(u32::count_ones),
        ("popc", Type::B64) => ins.unary(u64::count_ones),
        ("clz", Type::B32) => ins.unary(u32::leading_zeros),
        ("clz", Type::B64) => ins.unary(u64::leading_zeros),
        ("prmt", Type::B32) => ins.ternary::<u32, u32, u32, u32>(permute),
        _ => ins.unknown(),
    }
}

fn insertion<T: Word>(ins: &mut Decoding<'_>, f: impl Fn(T, T, u32, u32) -> T + Send + Sync + 'static) -> Decoded {
    ins.count(5..=5)?;
    let d = ins.dst::<T>(0)?;
    let (a, b, s, l) = (ins.src::<T>(1)?, ins.src::<T>(2)?, ins.src::<u32>(3)?, ins.src::<u32>(4)?);
    Ok(Op::Lanes(Box::new(move |registers, mask| {
        let (a, b) = (T::read(registers, a), T::read(registers, b));
        let (s, l) = (u32::read(registers, s), u32::read(registers, l));
        T::write(registers, d, mask, std::array::from_fn(|i| f(a[i], b[i], s[i], l[i])));
    })))
}

/// Each nibble of the selector picks a byte of `b:a`; its top bit repeats that byte's sign instead.
fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |out, i| {
        let pick = selector >> (i * 4) & 15;
        let byte = (bytes >> ((pick & 7) * 8)) as u8;
        let byte = if pick & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        out | u32::from(byte) << (i * 8)
    })
}
