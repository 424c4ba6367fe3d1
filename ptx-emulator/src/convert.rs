//! `cvt`: conversions between integers and floating-point formats.

use crate::decode::{Decoded, Decoding};
use crate::registers::{Slot, map1, map2};
use crate::types::{Class, Type};
use crate::warp::Op;
use half::{bf16, f16};

pub(crate) fn decode(ins: &mut Decoding<'_>) -> Decoded {
    let [to, from] = match ins.types[..] {
        [to, from] => [to, from],
        _ => return ins.unknown(),
    };
    if ins.operands.len() == 3 {
        return pack(ins, to, from);
    }
    ins.count(2..=2)?;
    let d = ins.dst_any(0)?;
    let operand = ins.operand(1)?;
    let a = ins.scope.source_any(operand, from.class())?;
    if d.class == Class::Predicate || a.class == Class::Predicate {
        return Err("cvt has no predicates; use selp".into());
    }
    let rounding = ins.take_any(&["rn", "rz", "rni", "rzi", "rmi", "rpi", "rna"]);
    let (sat, ftz, relu) = (ins.take("sat"), ins.take("ftz"), ins.take("relu"));
    if relu && !to.float() {
        return ins.unknown();
    }
    let narrow = d.class == Class::Narrow && a.class == Class::Narrow;
    let plain = narrow && !(sat || ftz || relu);
    let (slot_d, slot_a) = (d.index, a.index);
    // The conversions that kernels spend time on.
    match (to, from, rounding) {
        (Type::F32, Type::S32, Some("rn")) if plain => return Ok(Op::Lanes(map1(slot_d, slot_a, |a: i32| a as f32))),
        (Type::F32, Type::U32, Some("rn")) if plain => return Ok(Op::Lanes(map1(slot_d, slot_a, |a: u32| a as f32))),
        (Type::F32, Type::Bf16, None) if plain => return Ok(Op::Lanes(map1(slot_d, slot_a, bf16::to_f32))),
        (Type::F32, Type::F16, None) if plain => return Ok(Op::Lanes(map1(slot_d, slot_a, f16::to_f32))),
        (Type::Bf16, Type::F32, Some("rn")) if plain => return Ok(Op::Lanes(map1(slot_d, slot_a, bf16::from_f32))),
        (Type::F16, Type::F32, Some("rn")) if plain => return Ok(Op::Lanes(map1(slot_d, slot_a, f16::from_f32))),
        (Type::U64, Type::U32, None) if d.class == Class::Wide && a.class == Class::Narrow => {
            return Ok(Op::Lanes(map1(slot_d, slot_a, |a: u32| u64::from(a))));
        }
        (Type::S64, Type::S32, None) if d.class == Class::Wide && a.class == Class::Narrow => {
            return Ok(Op::Lanes(map1(slot_d, slot_a, |a: i32| i64::from(a))));
        }
        (Type::U32 | Type::S32, Type::U64 | Type::S64, None) if d.class == Class::Narrow && !sat => {
            return Ok(Op::Lanes(map1(slot_d, slot_a, |a: u64| a as u32)));
        }
        _ => {}
    }
    let convert = conversion(ins, to, from, Options { rounding, sat, ftz, relu })?;
    Ok(Op::Lanes(Box::new(move |registers, mask| {
        let bits = registers.bits(a).map(&convert);
        // A destination that is wider than the type gets the sign or zeros.
        registers.set_bits(d, mask, &bits.map(|b| extend(b, to)));
    })))
}

#[derive(Clone, Copy)]
struct Options<'a> {
    rounding: Option<&'a str>,
    sat: bool,
    ftz: bool,
    relu: bool,
}

fn extend(bits: u64, ty: Type) -> u64 {
    let unused = 64 - 8 * ty.bytes() as u32;
    if ty.signed() { ((bits << unused) as i64 >> unused) as u64 } else { bits << unused >> unused }
}

type Conversion = Box<dyn Fn(u64) -> u64 + Send + Sync>;

fn conversion(ins: &Decoding<'_>, to: Type, from: Type, options: Options<'_>) -> Result<Conversion, String> {
    let Options { rounding, sat, ftz, relu } = options;
    let unknown = || format!("unknown form of {} from {from:?} to {to:?}", ins.base);
    let packed = |ty| matches!(ty, Type::F16x2 | Type::Bf16x2 | Type::Pred);
    if packed(to) || packed(from) || from == Type::Tf32 {
        return Err(unknown());
    }
    Ok(match (to.integer(), from.integer()) {
        (true, true) if rounding.is_none() => Box::new(move |bits| {
            let value = extend(bits, from);
            if sat { saturate(integer(value, from), to) } else { value }
        }),
        (true, false) => {
            let round: fn(f64) -> f64 = match rounding {
                Some("rni") => f64::round_ties_even,
                Some("rzi") => f64::trunc,
                Some("rmi") => f64::floor,
                Some("rpi") => f64::ceil,
                _ => return Err(unknown()),
            };
            Box::new(move |bits| {
                let value = flushed(number(bits, from), ftz && from == Type::F32);
                // As the ISA says: a NaN becomes 0, or the top bit where 64 bits are on either side.
                let narrow = from != Type::F64 && to.bytes() < 8;
                let nan = if narrow { 0 } else { 1 << (8 * to.bytes() - 1) };
                if value.is_nan() { nan } else { saturate(round(value) as i128, to) }
            })
        }
        (false, true) => {
            let toward_zero = match rounding {
                Some("rn") => false,
                Some("rz") => true,
                _ => return Err(unknown()),
            };
            Box::new(move |bits| from_integer(integer(extend(bits, from), from), to, toward_zero))
        }
        (false, false) => {
            let narrows = to.bytes() < from.bytes() || to == Type::Tf32 || (to != from && to.bytes() == from.bytes());
            let round: Option<fn(f64) -> f64> = match rounding {
                Some("rni") => Some(f64::round_ties_even),
                Some("rzi") => Some(f64::trunc),
                Some("rmi") => Some(f64::floor),
                Some("rpi") => Some(f64::ceil),
                _ => None,
            };
            if narrows && !matches!(rounding, Some("rn" | "rz" | "rna")) {
                return Err(unknown());
            }
            let toward_zero = rounding == Some("rz");
            Box::new(move |bits| {
                let value = flushed(number(bits, from), ftz && from == Type::F32);
                let value = round.map_or(value, |r| r(value));
                let value = match sat {
                    true if value.is_nan() => 0.0,
                    true => value.clamp(0.0, 1.0),
                    false => value,
                };
                let value = if relu && value < 0.0 { 0.0 } else { value };
                let value = if to == Type::F32 { flushed(value, ftz) } else { value };
                float_bits(value, to, toward_zero)
            })
        }
        _ => return Err(unknown()),
    })
}

fn integer(extended: u64, ty: Type) -> i128 {
    if ty.signed() { i128::from(extended as i64) } else { i128::from(extended) }
}

fn saturate(value: i128, ty: Type) -> u64 {
    let bits = 8 * ty.bytes() as u32;
    let (low, high) = match ty.signed() {
        true => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
        false => (0, (1i128 << bits) - 1),
    };
    value.clamp(low, high) as u64
}

/// A floating-point number as f64, exactly.
fn number(bits: u64, ty: Type) -> f64 {
    match ty {
        Type::F16 => f16::from_bits(bits as u16).to_f64(),
        Type::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        Type::F64 => f64::from_bits(bits),
        _ => f64::from(f32::from_bits(bits as u32)),
    }
}

fn flushed(value: f64, ftz: bool) -> f64 {
    if ftz && value.abs() < f64::from(f32::MIN_POSITIVE) { 0f64.copysign(value) } else { value }
}

fn from_integer(value: i128, to: Type, toward_zero: bool) -> u64 {
    match to {
        Type::F64 if !toward_zero => (value as f64).to_bits(),
        Type::F32 if !toward_zero => u64::from((value as f32).to_bits()),
        // Sticky bits below keep a second rounding right: all but the top 40 bits become one.
        _ => {
            let magnitude = value.unsigned_abs();
            let extra = (128 - magnitude.leading_zeros()).saturating_sub(if to == Type::F64 { 53 } else { 40 });
            let cut = magnitude >> extra << extra;
            let sticky = if cut != magnitude && to != Type::F64 { 1u128 << extra } else { 0 };
            let exact = (cut | sticky) as f64;
            float_bits(if value < 0 { -exact } else { exact }, to, toward_zero)
        }
    }
}

/// Rounds to nearest even, or toward zero.
fn float_bits(value: f64, to: Type, toward_zero: bool) -> u64 {
    let (bits, back) = match to {
        Type::F64 => return value.to_bits(),
        Type::F16 => {
            let rounded = f16::from_f64(value);
            (u64::from(rounded.to_bits()), rounded.to_f64())
        }
        Type::Bf16 => {
            let rounded = bf16::from_f64(value);
            (u64::from(rounded.to_bits()), rounded.to_f64())
        }
        Type::Tf32 => {
            // Ties away from zero: add half a unit of the 13 bits that go.
            let bits = (value as f32).to_bits();
            let finite = (value as f32).is_finite();
            return u64::from(if finite { bits.wrapping_add(0x1000) & !0x1fff } else { bits });
        }
        _ => {
            let rounded = value as f32;
            (u64::from(rounded.to_bits()), f64::from(rounded))
        }
    };
    // One unit less in magnitude, also from infinity.
    if toward_zero && value.is_finite() && back.abs() > value.abs() { bits - 1 } else { bits }
}

/// `cvt.rn.bf16x2.f32 d, a, b`: `a` is the upper half.
fn pack(ins: &mut Decoding<'_>, to: Type, from: Type) -> Decoded {
    let rounding = ins.take_any(&["rn", "rz"]);
    let relu = ins.take("relu");
    let (Some(rounding), Type::F32) = (rounding, from) else { return ins.unknown() };
    let d: Slot = ins.scope.target(ins.operand(0)?, Some(Class::Narrow))?;
    let operands = [ins.src::<f32>(1)?, ins.src::<f32>(2)?];
    let clip = move |value: f32| if relu && value < 0.0 { 0.0 } else { value };
    let join = |high: u16, low: u16| u32::from(high) << 16 | u32::from(low);
    Ok(Op::Lanes(match (to, rounding) {
        (Type::Bf16x2, "rn") => map2(d.index, operands, move |a: f32, b: f32| {
            join(bf16::from_f32(clip(a)).to_bits(), bf16::from_f32(clip(b)).to_bits())
        }),
        (Type::F16x2, "rn") => map2(d.index, operands, move |a: f32, b: f32| {
            join(f16::from_f32(clip(a)).to_bits(), f16::from_f32(clip(b)).to_bits())
        }),
        (Type::Bf16x2 | Type::F16x2, _) => {
            let half = if to == Type::F16x2 { Type::F16 } else { Type::Bf16 };
            let cut = move |value: f32| float_bits(f64::from(clip(value)), half, true) as u16;
            map2(d.index, operands, move |a: f32, b: f32| join(cut(a), cut(b)))
        }
        _ => return ins.unknown(),
    }))
}
