//! Floating-point arithmetic. NaN results are quiet, but their other bits are not modelled.

use crate::decode::{Decoded, Decoding};
use crate::types::Type;
use half::{bf16, f16};

/// A number that instructions compute with.
trait Number: crate::registers::Word + PartialOrd {
    const NAN: Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// With one rounding.
    fn fma(self, b: Self, c: Self) -> Self;
    fn negative(self) -> bool;
    fn neg(self) -> Self;
    /// Subnormal numbers as zeros of the same sign.
    fn flush(self) -> Self;
    fn clamp01(self) -> Self;

    fn is_nan(self) -> bool {
        self.partial_cmp(&self).is_none()
    }

    fn abs(self) -> Self {
        if self.negative() { self.neg() } else { self }
    }

    /// The smaller one; -0 is below +0. One NaN is ignored unless `nan`.
    fn least(self, other: Self, nan: bool) -> Self {
        match (self.is_nan(), other.is_nan()) {
            (false, false) if self == other => {
                if self.negative() {
                    self
                } else {
                    other
                }
            }
            (false, false) => {
                if self < other {
                    self
                } else {
                    other
                }
            }
            (true, true) => Self::NAN,
            _ if nan => Self::NAN,
            (true, false) => other,
            (false, true) => self,
        }
    }

    fn greatest(self, other: Self, nan: bool) -> Self {
        let least = self.neg().least(other.neg(), nan);
        if least.is_nan() { least } else { least.neg() }
    }
}

macro_rules! number {
    ($type:ty, $nan:expr, $fma:expr) => {
        impl Number for $type {
            const NAN: Self = $nan;
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self - other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn fma(self, b: Self, c: Self) -> Self {
                $fma(self, b, c)
            }
            #[inline(always)]
            fn negative(self) -> bool {
                self.is_sign_negative()
            }
            #[inline(always)]
            fn neg(self) -> Self {
                -self
            }
            #[inline(always)]
            fn flush(self) -> Self {
                if self.is_normal() || self == Self::default() || !self.is_finite() {
                    self
                } else {
                    Self::default().copysign(self)
                }
            }
            #[inline(always)]
            fn clamp01(self) -> Self {
                let one = <$type>::from(1u8);
                if self > one {
                    one
                } else if self > Self::default() {
                    self
                } else {
                    Self::default()
                }
            }
        }
    };
}

number!(f32, f32::from_bits(0x7fff_ffff), f32::mul_add);
number!(f64, f64::from_bits(0x7fff_ffff_ffff_ffff), f64::mul_add);
// The sum has one rounding to 53 bits before that to 11 or 8; a product has 22 or 16.
number!(f16, f16::from_bits(0x7fff), |a: f16, b: f16, c: f16| f16::from_f64(
    f64::from(a) * f64::from(b) + f64::from(c)
));
number!(bf16, bf16::from_bits(0x7fff), |a: bf16, b: bf16, c: bf16| bf16::from_f64(
    f64::from(a) * f64::from(b) + f64::from(c)
));

/// Both halves of a packed register.
fn halves<T: Copy>(bits: u32, from: impl Fn(u16) -> T) -> [T; 2] {
    [from(bits as u16), from((bits >> 16) as u16)]
}

/// Modifiers of arithmetic.
#[derive(Clone, Copy)]
struct Modes {
    /// Subnormal operands and results are zeros.
    ftz: bool,
    /// Results are clamped to 0 to 1.
    sat: bool,
    /// `min` and `max` of a NaN are NaN.
    nan: bool,
}

pub(crate) fn arithmetic(ins: &mut Decoding<'_>) -> Decoded {
    let ty = *ins.types.first().ok_or("the type is missing")?;
    if ty == Type::F32 && ins.take("rz") {
        return truncated(ins);
    }
    let rounding = ins.take_any(&["rn", "approx", "full"]);
    if rounding.is_none() && matches!(ins.base, "fma" | "mad" | "div") {
        return ins.unknown();
    }
    let modes = Modes { ftz: ins.take("ftz"), sat: ins.take("sat"), nan: ins.take("NaN") };
    let ftz = modes.ftz;
    match ty {
        Type::F32 if ins.base == "div" => {
            ins.binary(move |a: f32, b: f32| if ftz { (a.flush() / b.flush()).flush() } else { a / b })
        }
        Type::F64 if ins.base == "div" => ins.binary(|a: f64, b: f64| a / b),
        Type::F32 => scalar::<f32>(ins, modes),
        Type::F64 => scalar::<f64>(ins, modes),
        Type::F16 => scalar::<f16>(ins, modes),
        Type::Bf16 => scalar::<bf16>(ins, modes),
        Type::F16x2 => packed::<f16>(ins, f16::from_bits, f16::to_bits, modes),
        Type::Bf16x2 => packed::<bf16>(ins, bf16::from_bits, bf16::to_bits, modes),
        _ => ins.unknown(),
    }
}

/// Sums and products that are rounded toward zero.
fn truncated(ins: &mut Decoding<'_>) -> Decoded {
    /// `value + rest` is exact; `rest` is less than the last place of `value` in f64.
    fn cut(value: f64, rest: f64) -> f32 {
        let near = value as f32;
        let back = f64::from(near);
        let below = back == value && rest != 0.0 && (rest < 0.0) != (value < 0.0);
        let over = value.is_finite() && (back.abs() > value.abs() || below);
        if over { f32::from_bits(near.to_bits() - 1) } else { near }
    }
    fn sum(a: f32, b: f32) -> f32 {
        let (a, b) = (f64::from(a), f64::from(b));
        let value = a + b;
        let added = value - a;
        cut(value, (a - (value - added)) + (b - added))
    }
    match ins.base {
        "add" => ins.binary(sum),
        "sub" => ins.binary(|a: f32, b: f32| sum(a, -b)),
        "mul" => ins.binary(|a: f32, b: f32| cut(f64::from(a) * f64::from(b), 0.0)),
        _ => ins.unknown(),
    }
}

#[inline(always)]
fn finish<T: Number>(value: T, ftz: bool, sat: bool) -> T {
    let value = if ftz { value.flush() } else { value };
    if sat { value.clamp01() } else { value }
}

/// The plain forms have no branches in their loops; they are nearly all of a kernel.
fn scalar<T: Number>(ins: &mut Decoding<'_>, Modes { ftz, sat, nan }: Modes) -> Decoded {
    let plain = !ftz && !sat;
    let flush = move |value: T| if ftz { value.flush() } else { value };
    match ins.base {
        "add" if plain => ins.binary::<T, T, T>(T::add),
        "sub" if plain => ins.binary::<T, T, T>(T::sub),
        "mul" if plain => ins.binary::<T, T, T>(T::mul),
        "fma" | "mad" if plain => ins.ternary::<T, T, T, T>(T::fma),
        "add" => ins.binary::<T, T, T>(move |a, b| finish(flush(a).add(flush(b)), ftz, sat)),
        "sub" => ins.binary::<T, T, T>(move |a, b| finish(flush(a).sub(flush(b)), ftz, sat)),
        "mul" => ins.binary::<T, T, T>(move |a, b| finish(flush(a).mul(flush(b)), ftz, sat)),
        "fma" | "mad" => ins.ternary::<T, T, T, T>(move |a, b, c| finish(flush(a).fma(flush(b), flush(c)), ftz, sat)),
        "min" => ins.binary::<T, T, T>(move |a, b| flush(a).least(flush(b), nan)),
        "max" => ins.binary::<T, T, T>(move |a, b| flush(a).greatest(flush(b), nan)),
        "neg" => ins.unary::<T, T>(move |a| flush(a).neg()),
        "abs" => ins.unary::<T, T>(move |a| flush(a).abs()),
        _ => ins.unknown(),
    }
}

fn packed<T: Number>(
    ins: &mut Decoding<'_>,
    from: fn(u16) -> T,
    to: fn(T) -> u16,
    Modes { ftz, sat, nan }: Modes,
) -> Decoded {
    let join =
        move |[low, high]: [T; 2]| u32::from(to(finish(low, ftz, sat))) | u32::from(to(finish(high, ftz, sat))) << 16;
    let read = move |bits: u32| halves(bits, |h| if ftz { from(h).flush() } else { from(h) });
    let two = move |a: u32, b: u32, f: fn(T, T) -> T| {
        let (a, b) = (read(a), read(b));
        join([f(a[0], b[0]), f(a[1], b[1])])
    };
    match ins.base {
        "add" => ins.binary(move |a: u32, b: u32| two(a, b, T::add)),
        "sub" => ins.binary(move |a: u32, b: u32| two(a, b, T::sub)),
        "mul" => ins.binary(move |a: u32, b: u32| two(a, b, T::mul)),
        "min" if nan => ins.binary(move |a: u32, b: u32| two(a, b, |x, y| x.least(y, true))),
        "max" if nan => ins.binary(move |a: u32, b: u32| two(a, b, |x, y| x.greatest(y, true))),
        "min" => ins.binary(move |a: u32, b: u32| two(a, b, |x, y| x.least(y, false))),
        "max" => ins.binary(move |a: u32, b: u32| two(a, b, |x, y| x.greatest(y, false))),
        "fma" => ins.ternary(move |a: u32, b: u32, c: u32| {
            let (a, b, c) = (read(a), read(b), read(c));
            join([a[0].fma(b[0], c[0]), a[1].fma(b[1], c[1])])
        }),
        "neg" => ins.unary(move |a: u32| join(read(a).map(T::neg))),
        "abs" => ins.unary(move |a: u32| join(read(a).map(T::abs))),
        _ => ins.unknown(),
    }
}

/// Functions of one number. Approximate ones are computed as exactly as the host does.
pub(crate) fn function(ins: &mut Decoding<'_>) -> Decoded {
    let ty = ins.ty()?;
    if ins.base == "copysign" {
        return match ty {
            Type::F32 => ins.binary(|a: f32, b: f32| b.copysign(a)),
            Type::F64 => ins.binary(|a: f64, b: f64| b.copysign(a)),
            _ => ins.unknown(),
        };
    }
    if ins.take_any(&["rn", "approx"]).is_none() {
        return ins.unknown();
    }
    let ftz = ins.take("ftz");
    let flush = move |value: f32| if ftz { value.flush() } else { value };
    macro_rules! function {
        ($f:expr) => {
            ins.unary(move |a: f32| flush($f(flush(a))))
        };
    }
    match (ins.base, ty) {
        ("rcp", Type::F32) => function!(|a: f32| 1.0 / a),
        ("sqrt", Type::F32) => function!(f32::sqrt),
        ("rsqrt", Type::F32) => function!(|a: f32| (1.0 / f64::from(a).sqrt()) as f32),
        ("ex2", Type::F32) => function!(f32::exp2),
        ("lg2", Type::F32) => function!(f32::log2),
        ("sin", Type::F32) => function!(f32::sin),
        ("cos", Type::F32) => function!(f32::cos),
        ("tanh", Type::F32) => function!(f32::tanh),
        ("rcp", Type::F64) => ins.unary(|a: f64| 1.0 / a),
        ("sqrt", Type::F64) => ins.unary(f64::sqrt),
        ("rsqrt", Type::F64) => ins.unary(|a: f64| 1.0 / a.sqrt()),
        _ => ins.unknown(),
    }
}

/// `testp`: properties of a number.
pub(crate) fn test(ins: &mut Decoding<'_>) -> Decoded {
    let names = ["finite", "infinite", "number", "notanumber", "normal", "subnormal"];
    let name = ins.take_any(&names).ok_or("the property is missing")?;
    macro_rules! test {
        ($T:ty) => {
            match name {
                "finite" => ins.unary(|a: $T| a.is_finite()),
                "infinite" => ins.unary(|a: $T| a.is_infinite()),
                "number" => ins.unary(|a: $T| a == a),
                "notanumber" => ins.unary(|a: $T| a != a),
                "normal" => ins.unary(|a: $T| a.is_normal()),
                _ => ins.unary(|a: $T| a.is_subnormal()),
            }
        };
    }
    match ins.ty()? {
        Type::F32 => test!(f32),
        Type::F64 => test!(f64),
        _ => ins.unknown(),
    }
}
