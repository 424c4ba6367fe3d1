//! The two accumulation types, f32 and f64.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub};

/// A type that attention accumulates in.
pub trait Real:
    Copy
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
    /// e^x, for x <= 0 (the argument of a softmax); relative error a few units in the last place.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Hyperbolic tangent; relative error a few units in the last place.
    fn tanh(self) -> Self;
    /// The larger one; `other` when `self` is NaN.
    fn maximum(self, other: Self) -> Self;
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x as f32
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    /// Branch-free, so that a loop over it becomes vector code: `e^x = 2^n * e^r`, `|r| <= ln(2) / 2`, with a
    /// polynomial of degree 6 for `e^r`. Arguments below -87 give about 1e-38; NaN stays NaN.
    #[inline(always)]
    fn exp(self) -> Self {
        // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the mantissa.
        const ROUND: f32 = 12_582_912.0;
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        let x = if self < -87.0 { -87.0 } else { self };
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        let r = x - n * LN2_HIGH - n * LN2_LOW;
        let mut p = 1.0 / 720.0;
        for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = p * r + c;
        }
        let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
        p * power
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
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;

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

/// A matrix of `rows x columns` inside a slice: element `(i, j)` at `i * row + j * column`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    pub data: &'a [T],
    pub row: usize,
    pub column: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Row-major, `row` elements from one row to the next.
    pub fn rows(data: &'a [T], row: usize) -> Self {
        Self { data, row, column: 1 }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self { data: self.data, row: self.column, column: self.row }
    }

    fn check(&self, rows: usize, columns: usize) {
        assert!((rows - 1) * self.row + (columns - 1) * self.column < self.data.len());
    }
}

/// `out = a . b`, or `out += a . b`, for row-major `out` with rows of `n` elements; `a` is `m x k`, `b` is `k x n`.
pub(crate) fn matmul<T: Real>(
    out: &mut [T],
    accumulate: bool,
    a: Matrix<T>,
    b: Matrix<T>,
    (m, k, n): (usize, usize, usize),
) {
    assert!(out.len() >= m * n && m > 0 && n > 0 && k > 0);
    a.check(m, k);
    b.check(k, n);
    // SAFETY: the checks above keep all three matrices inside their slices, and `out` is borrowed mutably.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            accumulate,
            a.data.as_ptr(),
            a.column as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.column as isize,
            b.row as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
