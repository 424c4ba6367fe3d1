//! Small matrix products on packed operands, one micro-kernel for every type and instruction set.
//!
//! `out (m x n, row-major) += a (m x k, any strides) . b (k x n, in panels)`: lanes run along a row of `b`, terms of
//! `a` are broadcast. Rows of `b` and `out` are padded to whole [`LANES`], so there is no tail in `n`. Each group of
//! rows has its own range of `k` and of columns, which is how masked parts of a tile are left out.

use crate::real::Real;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Row lengths of packed operands are multiples of this; vectors of any instruction set divide it.
pub(crate) const LANES: usize = 16;
/// Rows of the micro-kernel, which share one range of `k` and columns.
pub(crate) const ROWS: usize = 6;
/// What operands are made of.
pub trait Term: Copy + Default + Send + Sync {
    /// Columns of a panel.
    #[doc(hidden)]
    const PANEL: usize;
}

impl Term for f32 {
    const PANEL: usize = 64;
}

impl Term for f64 {
    const PANEL: usize = 64;
}

/// Terms that are summed up in one go: with a panel of f32 columns, 32 KiB of `b`.
const TERMS: usize = 128;
/// Vectors of columns in one micro-kernel: with 6 rows, 24 of 32 accumulators.
const VECTORS: usize = 4;

/// Elements `(i, p)` at `i * row + p * column`.
#[derive(Clone, Copy)]
pub(crate) struct Broadcast<'a, T> {
    pub data: &'a [T],
    pub row: usize,
    pub column: usize,
}

impl<'a, T> Broadcast<'a, T> {
    /// A row-major matrix, `row` elements from one row to the next.
    pub fn rows(data: &'a [T], row: usize) -> Self {
        Self { data, row, column: 1 }
    }

    /// The transpose of a row-major matrix.
    pub fn transposed(data: &'a [T], row: usize) -> Self {
        Self { data, row: 1, column: row }
    }
}

/// A matrix cut into panels of [`Term::PANEL`] columns, each stored row by row: what one micro-kernel reads is contiguous. The
/// last panel may be narrower.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a, T> {
    pub data: &'a [T],
    pub rows: usize,
    /// A multiple of [`LANES`].
    pub columns: usize,
}

impl<T: Term> Panels<'_, T> {
    /// Index of `(0, column)`, and elements from one row to the next.
    pub fn place(&self, column: usize) -> (usize, usize) {
        let panel = column / T::PANEL * T::PANEL;
        (panel * self.rows + column % T::PANEL, T::PANEL.min(self.columns - panel))
    }
}

/// Index of `(row, column)` in a matrix of [`Panels`].
pub(crate) fn panel_index<T: Term>(rows: usize, columns: usize, row: usize, column: usize) -> usize {
    let panel = column / T::PANEL * T::PANEL;
    panel * rows + row * T::PANEL.min(columns - panel) + column % T::PANEL
}

/// What a group of rows needs: the terms of the sum, and the columns of the result (whole vectors are computed).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub terms: Range<usize>,
    pub columns: Range<usize>,
}

/// The product; see the module. Terms of type `T`, sums of type `A`.
pub(crate) struct Product<'a, T, A> {
    /// Row-major, the columns of `b`.
    pub out: &'a mut [A],
    /// Elements of `out` from one row to the next.
    pub out_row: usize,
    /// Add to `out` rather than overwrite the columns inside the limits.
    pub accumulate: bool,
    pub a: Broadcast<'a, T>,
    pub b: Panels<'a, T>,
    /// Rows of `out`.
    pub rows: usize,
    /// One for each group of rows.
    pub limits: &'a [Limits],
}

/// The vectors of one instruction set: a value of the type proves that the machine has it.
pub(crate) trait Vectors<T, A>: Copy {
    type Term: Copy;
    type Sum: Copy;
    const LANES: usize;
    fn splat(self, x: T) -> Self::Term;
    fn zero(self) -> Self::Sum;
    /// `a * b + c`; of terms with several numbers, the sum of their products.
    fn mul_add(self, a: Self::Term, b: Self::Term, c: Self::Sum) -> Self::Sum;
    fn add(self, a: Self::Sum, b: Self::Sum) -> Self::Sum;
}

/// Vectors of plain numbers, from `pulp`.
#[derive(Clone, Copy)]
struct Numbers<S>(S);

impl<S: Simd, T: Real> Vectors<T, T> for Numbers<S> {
    type Term = T::Vector<S>;
    type Sum = T::Vector<S>;
    const LANES: usize = size_of::<T::Vector<S>>() / size_of::<T>();

    #[inline(always)]
    fn splat(self, x: T) -> T::Vector<S> {
        T::splat(self.0, x)
    }

    #[inline(always)]
    fn zero(self) -> T::Vector<S> {
        T::splat(self.0, T::ZERO)
    }

    #[inline(always)]
    fn mul_add(self, a: T::Vector<S>, b: T::Vector<S>, c: T::Vector<S>) -> T::Vector<S> {
        T::mul_add(self.0, a, b, c)
    }

    #[inline(always)]
    fn add(self, a: T::Vector<S>, b: T::Vector<S>) -> T::Vector<S> {
        T::add_vectors(self.0, a, b)
    }
}

impl<T: Real> WithSimd for Product<'_, T, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.run(Numbers(simd));
    }
}

impl<T: Term, A> Product<'_, T, A> {
    /// The product by the micro-kernel. Limits hold for groups of [`ROWS`] rows.
    #[inline(always)]
    pub fn run<V: Vectors<T, A>>(self, vectors: V) {
        let (terms, columns) = self.check(ROWS, 1, LANES);
        // A block of `b`, TERMS x PANEL, stays in the first-level cache while all rows pass over it.
        for panel in (0..columns).step_by(T::PANEL) {
            for first_term in (0..terms).step_by(TERMS) {
                for (group, limits) in self.limits.iter().enumerate() {
                    let terms = limits.terms.start.max(first_term)..limits.terms.end.min(first_term + TERMS);
                    let mut column = (limits.columns.start / LANES * LANES).max(panel);
                    let end = limits.columns.end.next_multiple_of(LANES).min(panel + T::PANEL);
                    let first = group * ROWS;
                    let rows = ROWS.min(self.rows - first);
                    while column < end && !terms.is_empty() {
                        let wide = VECTORS.min((end - column) / V::LANES);
                        let add = self.accumulate || first_term > limits.terms.start;
                        let block = Block { first, column, terms: terms.clone(), add };
                        // SAFETY: `check` proved that the largest index of each operand lies inside of its slice.
                        unsafe { by_rows(vectors, &self, rows, wide, block) };
                        column += wide * V::LANES;
                    }
                }
            }
        }
    }

    /// Everything that kernels rely on, for limits of groups of `rows` rows, with terms and columns taken up to a multiple
    /// of a step; returns the largest term and column of any group.
    pub fn check(&self, rows: usize, term_step: usize, column_step: usize) -> (usize, usize) {
        assert_eq!(self.limits.len(), self.rows.div_ceil(rows), "one limit for each group of rows");
        assert!(self.b.columns.is_multiple_of(LANES), "rows are whole vectors");
        let terms = self.limits.iter().map(|l| l.terms.end.next_multiple_of(term_step)).max().unwrap_or(0);
        let columns = self.limits.iter().map(|l| l.columns.end.next_multiple_of(column_step)).max().unwrap_or(0);
        let columns = columns.min(self.b.columns);
        if self.rows == 0 || columns == 0 {
            return (0, 0);
        }
        assert!(columns <= self.out_row && (self.rows - 1) * self.out_row + columns <= self.out.len());
        if terms > 0 {
            assert!((self.rows - 1) * self.a.row + (terms - 1) * self.a.column < self.a.data.len());
            assert!(terms <= self.b.rows);
            assert!(self.b.rows * self.b.columns <= self.b.data.len());
        }
        (terms, columns)
    }
}

struct Block {
    first: usize,
    column: usize,
    terms: Range<usize>,
    add: bool,
}

#[inline(always)]
unsafe fn by_rows<T: Term, A, V: Vectors<T, A>>(v: V, p: &Product<T, A>, rows: usize, wide: usize, block: Block) {
    // SAFETY: as for the caller.
    unsafe {
        match rows {
            6 => by_vectors::<T, A, V, 6>(v, p, wide, block),
            5 => by_vectors::<T, A, V, 5>(v, p, wide, block),
            4 => by_vectors::<T, A, V, 4>(v, p, wide, block),
            3 => by_vectors::<T, A, V, 3>(v, p, wide, block),
            2 => by_vectors::<T, A, V, 2>(v, p, wide, block),
            _ => by_vectors::<T, A, V, 1>(v, p, wide, block),
        }
    }
}

#[inline(always)]
unsafe fn by_vectors<T: Term, A, V: Vectors<T, A>, const R: usize>(v: V, p: &Product<T, A>, wide: usize, block: Block) {
    // SAFETY: as for the caller.
    unsafe {
        match wide {
            4 => kernel::<T, A, V, R, 4>(v, p, block),
            3 => kernel::<T, A, V, R, 3>(v, p, block),
            2 => kernel::<T, A, V, R, 2>(v, p, block),
            _ => kernel::<T, A, V, R, 1>(v, p, block),
        }
    }
}

/// `R` rows by `W` vectors of the result, held in registers over all terms.
///
/// # Safety
/// Rows `block.first..+R`, columns `block.column..+W * lanes` and `block.terms` lie inside of all operands of `p`.
#[inline(always)]
unsafe fn kernel<T: Term, A, V: Vectors<T, A>, const R: usize, const W: usize>(v: V, p: &Product<T, A>, block: Block) {
    let mut sums = [[v.zero(); W]; R];
    // SAFETY: the caller's promise; vectors are read and written unaligned.
    unsafe {
        let mut a = p.a.data.as_ptr().add(block.first * p.a.row + block.terms.start * p.a.column);
        let (b_start, b_row) = p.b.place(block.column);
        let mut b = p.b.data.as_ptr().add(b_start + block.terms.start * b_row);
        for _ in block.terms.clone() {
            let row: [V::Term; W] = std::array::from_fn(|w| b.add(w * V::LANES).cast::<V::Term>().read_unaligned());
            for (r, sums) in sums.iter_mut().enumerate() {
                let factor = v.splat(*a.add(r * p.a.row));
                for (sum, &vector) in sums.iter_mut().zip(&row) {
                    *sum = v.mul_add(factor, vector, *sum);
                }
            }
            a = a.wrapping_add(p.a.column);
            b = b.wrapping_add(b_row);
        }
        let out = p.out.as_ptr().cast_mut().add(block.first * p.out_row + block.column);
        for (r, sums) in sums.iter().enumerate() {
            for (w, &sum) in sums.iter().enumerate() {
                let at = out.add(r * p.out_row + w * V::LANES).cast::<V::Sum>();
                let sum = if block.add { v.add(at.read_unaligned(), sum) } else { sum };
                at.write_unaligned(sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiled::Compiled;

    /// Against plain loops, over shapes with every remainder of rows and vectors, strides, and limits.
    #[test]
    fn product_equals_plain_loops() {
        for (m, k, n) in [(1, 1, 16), (5, 7, 32), (6, 3, 48), (13, 20, 64), (20, 9, 80), (17, 300, 208)] {
            for accumulate in [false, true] {
                let value = |i: usize| ((i * 7919) % 23) as f64 - 11.0;
                let a: Vec<f64> = (0..m * k).map(value).collect();
                let mut b = vec![0.0; k * n];
                let entry = |p: usize, j: usize| value(p * n + j + 5);
                for (p, j) in (0..k).flat_map(|p| (0..n).map(move |j| (p, j))) {
                    b[panel_index::<f64>(k, n, p, j)] = entry(p, j);
                }
                let b = Panels { data: &b, rows: k, columns: n };
                let limits: Vec<_> = (0..m.div_ceil(ROWS))
                    .map(|g| Limits { terms: (g % k).min(k - 1)..k, columns: (g * 9) % n..n })
                    .collect();
                let mut out = vec![1.0; m * n];
                // `a` is stored transposed.
                let a = Broadcast::transposed(&a, m);
                f64::multiply(Product { out: &mut out, out_row: n, accumulate, a, b, rows: m, limits: &limits });
                for i in 0..m {
                    let Limits { terms, columns } = &limits[i / ROWS];
                    for j in columns.clone() {
                        let sum: f64 = terms.clone().map(|p| a.data[p * m + i] * entry(p, j)).sum();
                        assert_eq!(out[i * n + j], sum + f64::from(u8::from(accumulate)), "{m} {k} {n}: {i} {j}");
                    }
                }
            }
        }
    }
}
