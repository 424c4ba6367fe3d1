//! The two accumulation types, f32 and f64.

use crate::compiled::Compiled;
use crate::matmul::Term;
use pulp::Simd;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub};

/// A type that attention accumulates in.
pub trait Real:
    Compiled
    + Term
    + Copy
    + Send
    + Sync
    + Debug
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + MulAssign
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// -inf: the maximum and the log-sum-exp of a row without keys.
    const NEG_INFINITY: Self;

    /// From f64, rounded.
    fn from_f64(x: f64) -> Self;
    /// To f64.
    fn to_f64(self) -> f64;
    /// Smaller magnitudes count as 0 in the gradient of scores: multiplied on, they would leave the normal range, where
    /// processors are a hundred times slower.
    const NEGLIGIBLE: Self;

    /// e^x, for x <= 0 (the argument of a softmax); relative error a few units in the last place, and exactly 0 far below
    /// the last place of 1.
    fn exp(self) -> Self;
    /// The magnitude.
    fn abs(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Hyperbolic tangent; relative error a few units in the last place.
    fn tanh(self) -> Self;

    /// A vector of this type.
    type Vector<S: Simd>: Copy;
    /// All lanes the same.
    fn splat<S: Simd>(simd: S, x: Self) -> Self::Vector<S>;
    /// `a * b + c` with one rounding where the machine has it.
    fn mul_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>, c: Self::Vector<S>) -> Self::Vector<S>;
    /// `a + b`.
    fn add_vectors<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// The larger one; `other` when `self` is NaN.
    fn maximum(self, other: Self) -> Self;
}

impl Real for f32 {
    type Vector<S: Simd> = S::f32s;

    #[inline(always)]
    fn splat<S: Simd>(simd: S, x: Self) -> S::f32s {
        simd.splat_f32s(x)
    }

    #[inline(always)]
    fn mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
        simd.mul_add_e_f32s(a, b, c)
    }

    #[inline(always)]
    fn add_vectors<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::f32s {
        simd.add_f32s(a, b)
    }

    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;
    const NEGLIGIBLE: Self = 1e-29;

    #[inline(always)]
    fn abs(self) -> Self {
        f32::abs(self)
    }

    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x as f32
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    /// Branch-free, so that a loop over it becomes vector code: `e^x = 2^n * e^r`, `|r| <= ln(2) / 2`, with a
    /// polynomial of degree 6 for `e^r`. Below e^-55 = 1e-24 it is 0; NaN stays NaN.
    #[inline(always)]
    fn exp(self) -> Self {
        // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the mantissa.
        const ROUND: f32 = 12_582_912.0;
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        const LEAST: f32 = -55.0;
        let x = if self < LEAST { LEAST } else { self };
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        let r = x - n * LN2_HIGH - n * LN2_LOW;
        let mut p = 1.0 / 720.0;
        for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = p * r + c;
        }
        let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
        if self < LEAST { 0.0 } else { p * power }
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f32::ln(self)
    }

    /// Branch-free: an odd polynomial near 0, where the quotient would cancel.
    #[inline(always)]
    fn tanh(self) -> Self {
        let x = if self < 0.0 { -self } else { self };
        let e = Real::exp(-2.0 * x);
        let far = (1.0 - e) / (1.0 + e);
        let s = x * x;
        let mut near = -1382.0 / 155_925.0;
        for c in [62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0] {
            near = near * s + c;
        }
        let magnitude = if x < 0.35 { near * x } else { far };
        magnitude.copysign(self)
    }

    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        if self > other { self } else { other }
    }
}

impl Real for f64 {
    type Vector<S: Simd> = S::f64s;

    #[inline(always)]
    fn splat<S: Simd>(simd: S, x: Self) -> S::f64s {
        simd.splat_f64s(x)
    }

    #[inline(always)]
    fn mul_add<S: Simd>(simd: S, a: S::f64s, b: S::f64s, c: S::f64s) -> S::f64s {
        simd.mul_add_e_f64s(a, b, c)
    }

    #[inline(always)]
    fn add_vectors<S: Simd>(simd: S, a: S::f64s, b: S::f64s) -> S::f64s {
        simd.add_f64s(a, b)
    }

    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;
    const NEGLIGIBLE: Self = 1e-290;

    #[inline(always)]
    fn abs(self) -> Self {
        f64::abs(self)
    }

    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn exp(self) -> Self {
        f64::exp(self)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f64::ln(self)
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        f64::tanh(self)
    }

    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        if self > other { self } else { other }
    }
}
