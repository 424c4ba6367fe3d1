//! Integer arithmetic, comparisons and selections.

use crate::ast::Operand;
use crate::decode::{Decoded, Decoding};
use crate::registers::{Word, map3};
use crate::types::Type;
use crate::warp::Op;
use half::{bf16, f16};

/// Runs a body with `$T` as the Rust type of an integer type of 16 to 64 bits.
macro_rules! by_integer {
    ($ins:expr, $T:ident => $body:expr) => {
        match $ins.ty()? {
            Type::U16 | Type::B16 => {
                type $T = u16;
                $body
            }
            Type::S16 => {
                type $T = i16;
                $body
            }
            Type::U32 | Type::B32 => {
                type $T = u32;
                $body
            }
            Type::S32 => {
                type $T = i32;
                $body
            }
            Type::U64 | Type::B64 => {
                type $T = u64;
                $body
            }
            Type::S64 => {
                type $T = i64;
                $body
            }
            _ => return $ins.unknown(),
        }
    };
}
pub(crate) use by_integer;

pub(crate) fn arithmetic(ins: &mut Decoding<'_>) -> Decoded {
    if ins.take("sat") {
        return match (ins.base, ins.ty()?) {
            ("add", Type::S32) => ins.binary(i32::saturating_add),
            ("sub", Type::S32) => ins.binary(i32::saturating_sub),
            _ => ins.unknown(),
        };
    }
    match ins.base {
        "add" => by_integer!(ins, T => ins.binary::<T, T, T>(T::wrapping_add)),
        "sub" => by_integer!(ins, T => ins.binary::<T, T, T>(T::wrapping_sub)),
        "min" => by_integer!(ins, T => ins.binary::<T, T, T>(T::min)),
        "max" => by_integer!(ins, T => ins.binary::<T, T, T>(T::max)),
        // The result of a division by zero is unspecified; all ones are what the instruction sequence of devices gives.
        "div" => by_integer!(ins, T => ins.binary::<T, T, T>(|a, b| if b == 0 { !0 } else { a.wrapping_div(b) })),
        "rem" => by_integer!(ins, T => ins.binary::<T, T, T>(|a, b| if b == 0 { !0 } else { a.wrapping_rem(b) })),
        "neg" => by_integer!(ins, T => ins.unary::<T, T>(|a| (0 as T).wrapping_sub(a))),
        "sad" => by_integer!(ins, T => ins.ternary::<T, T, T, T>(|a, b, c| {
            c.wrapping_add(if a > b { a.wrapping_sub(b) } else { b.wrapping_sub(a) })
        })),
        "abs" => match ins.ty()? {
            Type::S16 => ins.unary(i16::wrapping_abs),
            Type::S32 => ins.unary(i32::wrapping_abs),
            Type::S64 => ins.unary(i64::wrapping_abs),
            _ => ins.unknown(),
        },
        "mul" | "mad" => multiply(ins),
        _ => ins.unknown(),
    }
}

fn multiply(ins: &mut Decoding<'_>) -> Decoded {
    macro_rules! wide {
        ($T:ty, $W:ty) => {
            match ins.base {
                "mul" => ins.binary::<$W, $T, $T>(|a, b| <$W>::from(a) * <$W>::from(b)),
                _ => ins.ternary::<$W, $T, $T, $W>(|a, b, c| (<$W>::from(a) * <$W>::from(b)).wrapping_add(c)),
            }
        };
    }
    macro_rules! high {
        ($T:ty, $W:ty) => {{
            let high = |a: $T, b: $T| ((<$W>::from(a) * <$W>::from(b)) >> <$T>::BITS) as $T;
            match ins.base {
                "mul" => ins.binary::<$T, $T, $T>(high),
                _ => ins.ternary::<$T, $T, $T, $T>(move |a, b, c| high(a, b).wrapping_add(c)),
            }
        }};
    }
    if ins.take("wide") {
        return match ins.ty()? {
            Type::U16 => wide!(u16, u32),
            Type::S16 => wide!(i16, i32),
            Type::U32 => wide!(u32, u64),
            Type::S32 => wide!(i32, i64),
            _ => ins.unknown(),
        };
    }
    if ins.take("hi") {
        return match ins.ty()? {
            Type::U16 => high!(u16, u32),
            Type::S16 => high!(i16, i32),
            Type::U32 => high!(u32, u64),
            Type::S32 => high!(i32, i64),
            Type::U64 => high!(u64, u128),
            Type::S64 => high!(i64, i128),
            _ => ins.unknown(),
        };
    }
    if !ins.take("lo") {
        return ins.unknown();
    }
    match ins.base {
        "mul" => by_integer!(ins, T => ins.binary::<T, T, T>(T::wrapping_mul)),
        _ => by_integer!(ins, T => ins.ternary::<T, T, T, T>(|a, b, c| a.wrapping_mul(b).wrapping_add(c))),
    }
}

/// Comparisons: which outcomes make it true, as bits for less, equal, greater and unordered.
const LESS: u32 = 1;
const EQUAL: u32 = 2;
const GREATER: u32 = 4;
const UNORDERED: u32 = 8;

fn outcomes(name: &str, float: bool) -> Option<u32> {
    Some(match name {
        "eq" => EQUAL,
        // `ne` of numbers is ordered: false if one is NaN.
        "ne" => LESS | GREATER,
        "lt" | "lo" => LESS,
        "le" | "ls" => LESS | EQUAL,
        "gt" | "hi" => GREATER,
        "ge" | "hs" => GREATER | EQUAL,
        "equ" if float => EQUAL | UNORDERED,
        "neu" if float => LESS | GREATER | UNORDERED,
        "ltu" if float => LESS | UNORDERED,
        "leu" if float => LESS | EQUAL | UNORDERED,
        "gtu" if float => GREATER | UNORDERED,
        "geu" if float => GREATER | EQUAL | UNORDERED,
        "num" if float => LESS | EQUAL | GREATER,
        "nan" if float => UNORDERED,
        _ => return None,
    })
}

#[rustfmt::skip]
const COMPARISONS: [&str; 18] = [
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
];

#[inline(always)]
fn holds<T: PartialOrd>(accept: u32, a: T, b: T) -> bool {
    let found = u32::from(a < b) | u32::from(a == b) << 1 | u32::from(a > b) << 2;
    accept & (if found == 0 { UNORDERED } else { found }) != 0
}

pub(crate) fn compare(ins: &mut Decoding<'_>) -> Decoded {
    match ins.base {
        "selp" => return select(ins),
        "slct" => {
            let Some(Type::S32) = ins.types.get(1) else { return ins.unknown() };
            return match ins.ty()?.bytes() {
                4 => ins.ternary::<u32, u32, u32, i32>(|a, b, c| if c >= 0 { a } else { b }),
                8 => ins.ternary::<u64, u64, u64, i32>(|a, b, c| if c >= 0 { a } else { b }),
                _ => ins.unknown(),
            };
        }
        _ => {}
    }
    let ty = *ins.types.last().ok_or("the type is missing")?;
    let name = ins.take_any(&COMPARISONS).ok_or("the comparison is missing")?;
    let accept = outcomes(name, ty.float()).ok_or_else(|| format!("{name} does not compare {ty:?}"))?;
    if ins.take("ftz") {
        // Subnormal numbers compare as zeros.
        let flush = |value: f32| if value.is_subnormal() { 0.0 } else { value };
        return if ty == Type::F32 { compared(ins, accept, flush) } else { ins.unknown() };
    }
    match ty {
        Type::U16 | Type::B16 => compared(ins, accept, |value: u16| value),
        Type::S16 => compared(ins, accept, |value: i16| value),
        Type::U32 | Type::B32 => compared(ins, accept, |value: u32| value),
        Type::S32 => compared(ins, accept, |value: i32| value),
        Type::U64 | Type::B64 => compared(ins, accept, |value: u64| value),
        Type::S64 => compared(ins, accept, |value: i64| value),
        Type::F16 => compared(ins, accept, |value: f16| value),
        Type::Bf16 => compared(ins, accept, |value: bf16| value),
        Type::F32 => compared(ins, accept, |value: f32| value),
        Type::F64 => compared(ins, accept, |value: f64| value),
        _ => ins.unknown(),
    }
}

fn compared<T: Word + PartialOrd>(
    ins: &mut Decoding<'_>,
    accept: u32,
    prepare: impl Fn(T) -> T + Send + Sync + 'static,
) -> Decoded {
    let holds = move |a: T, b: T| holds(accept, prepare(a), prepare(b));
    if ins.base == "set" {
        return match ins.ty()? {
            Type::U32 | Type::S32 => ins.binary::<u32, T, T>(move |a, b| if holds(a, b) { !0 } else { 0 }),
            Type::F32 => ins.binary::<f32, T, T>(move |a, b| f32::from(u8::from(holds(a, b)))),
            _ => ins.unknown(),
        };
    }
    let combine = ins.take_any(&["and", "or", "xor"]);
    let kind = ["and", "or", "xor"].iter().position(|k| combine == Some(*k));
    ins.count(if kind.is_some() { 4..=4 } else { 3..=3 })?;
    let operands = [ins.src::<T>(1)?, ins.src::<T>(2)?];
    let (c, negated) = if kind.is_some() { ins.predicate(3)? } else { (operands[0], false) };
    let (targets, both) = match ins.operand(0)? {
        Operand::Pair(p, q) => ([p.clone(), q.clone()], true),
        Operand::Name(p, 0) => ([p.clone(), "_".to_string()], false),
        other => return Err(format!("{other:?} is no predicate")),
    };
    let mut target = |name: &String| ins.scope.target(&Operand::Name(name.clone(), 0), Some(bool::CLASS));
    let (p, q) = (target(&targets[0])?.index, target(&targets[1])?.index);
    Ok(Op::Lanes(Box::new(move |registers, mask| {
        let (a, b) = (T::read(registers, operands[0]), T::read(registers, operands[1]));
        let hit = (0..32).fold(0u32, |bits, i| bits | u32::from(holds(a[i], b[i])) << i);
        let third = match kind {
            Some(_) => registers.predicates[c as usize] ^ if negated { !0 } else { 0 },
            None => 0,
        };
        let with = |hit: u32| match kind {
            Some(0) => hit & third,
            Some(1) => hit | third,
            Some(_) => hit ^ third,
            None => hit,
        };
        let set = |register: &mut u32, bits: u32| *register = *register & !mask | bits & mask;
        set(&mut registers.predicates[p as usize], with(hit));
        if both {
            set(&mut registers.predicates[q as usize], with(!hit));
        }
    })))
}

fn select(ins: &mut Decoding<'_>) -> Decoded {
    fn of<T: Word>(ins: &mut Decoding<'_>) -> Decoded {
        ins.count(4..=4)?;
        let (c, negated) = ins.predicate(3)?;
        let d = ins.dst::<T>(0)?;
        let operands = [ins.src::<T>(1)?, ins.src::<T>(2)?, c];
        Ok(Op::Lanes(map3(d, operands, move |a: T, b: T, c: bool| if c != negated { a } else { b })))
    }
    match ins.ty()?.bytes() {
        2 => of::<u16>(ins),
        4 => of::<u32>(ins),
        8 => of::<u64>(ins),
        _ => ins.unknown(),
    }
}
