//! Small matrix products on packed operands, one micro-kernel for every instruction set.
//!
//! `out (m x n, row-major) += a (m x k, any strides) . b (k x n, in panels)`: lanes run along a row of `b`, elements of
//! `a` are broadcast. Rows of `b` and `out` are padded to whole [`LANES`], so there is no tail in `n`. Each group of
//! [`ROWS`] rows has its own range of `k` and of columns, which is how masked parts of a tile are left out.

use crate::real::Real;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Row lengths of packed operands are multiples of this; vectors of any instruction set divide it.
pub(crate) const LANES: usize = 16;
/// Rows that share one range of `k` and columns.
pub(crate) const ROWS: usize = 6;
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

/// Columns of a panel.
pub(crate) const PANEL: usize = 64;
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

/// A matrix cut into panels of [`PANEL`] columns, each stored row by row: what one micro-kernel reads is contiguous. The
/// last panel may be narrower.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a, T> {
    pub data: &'a [T],
    pub rows: usize,
    /// A multiple of [`LANES`].
    pub columns: usize,
}

impl<T> Panels<'_, T> {
    /// Index of `(0, column)`, and elements from one row to the next.
    fn place(&self, column: usize) -> (usize, usize) {
        let panel = column / PANEL * PANEL;
        (panel * self.rows + column % PANEL, PANEL.min(self.columns - panel))
    }
}

/// Index of `(row, column)` in a matrix of [`Panels`].
pub(crate) fn panel_index(rows: usize, columns: usize, row: usize, column: usize) -> usize {
    let panel = column / PANEL * PANEL;
    panel * rows + row * PANEL.min(columns - panel) + column % PANEL
}

/// What a group of rows needs: the terms of the sum, and the columns of the result (whole vectors are computed).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub terms: Range<usize>,
    pub columns: Range<usize>,
}

/// The product; see the module.
pub(crate) struct Product<'a, T> {
    /// Row-major, with the columns of `b`.
    pub out: &'a mut [T],
    /// Add to `out` rather than overwrite the columns inside the limits.
    pub accumulate: bool,
    pub a: Broadcast<'a, T>,
    pub b: Panels<'a, T>,
    /// Rows of `out`.
    pub rows: usize,
    /// One for each group of [`ROWS`] rows.
    pub limits: &'a [Limits],
}

impl<T: Real> WithSimd for Product<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (terms, columns) = self.check();
        let lanes = lanes::<S, T>();
        // A block of `b`, TERMS x PANEL, stays in the first-level cache while all rows pass over it.
        for panel in (0..columns).step_by(PANEL) {
            for first_term in (0..terms).step_by(TERMS) {
                for (group, limits) in self.limits.iter().enumerate() {
                    let terms = limits.terms.start.max(first_term)..limits.terms.end.min(first_term + TERMS);
                    let mut column = (limits.columns.start / LANES * LANES).max(panel);
                    let end = limits.columns.end.next_multiple_of(LANES).min(panel + PANEL);
                    let first = group * ROWS;
                    let rows = ROWS.min(self.rows - first);
                    while column < end && !terms.is_empty() {
                        let vectors = VECTORS.min((end - column) / lanes);
                        let add = self.accumulate || first_term > limits.terms.start;
                        let block = Block { first, column, terms: terms.clone(), add };
                        // SAFETY: `check` proved that the largest index of each operand lies inside of its slice.
                        unsafe { by_rows(simd, &self, rows, vectors, block) };
                        column += vectors * lanes;
                    }
                }
            }
        }
    }
}

impl<T: Real> Product<'_, T> {
    /// Everything that the micro-kernels rely on; returns the largest term and column of any group.
    fn check(&self) -> (usize, usize) {
        assert_eq!(self.limits.len(), self.rows.div_ceil(ROWS), "one limit for each group of rows");
        assert!(self.b.columns.is_multiple_of(LANES), "rows are whole vectors");
        let terms = self.limits.iter().map(|l| l.terms.end).max().unwrap_or(0);
        let columns = self.limits.iter().map(|l| l.columns.end.next_multiple_of(LANES)).max().unwrap_or(0);
        if self.rows == 0 || columns == 0 {
            return (0, 0);
        }
        assert!((self.rows - 1) * self.b.columns + columns <= self.out.len());
        if terms > 0 {
            assert!((self.rows - 1) * self.a.row + (terms - 1) * self.a.column < self.a.data.len());
            assert!(terms <= self.b.rows && columns <= self.b.columns);
            assert!(self.b.rows * self.b.columns <= self.b.data.len());
        }
        (terms, columns)
    }
}

const fn lanes<S: Simd, T: Real>() -> usize {
    size_of::<T::Vector<S>>() / size_of::<T>()
}

struct Block {
    first: usize,
    column: usize,
    terms: Range<usize>,
    add: bool,
}

#[inline(always)]
unsafe fn by_rows<S: Simd, T: Real>(simd: S, p: &Product<T>, rows: usize, vectors: usize, block: Block) {
    // SAFETY: as for the caller.
    unsafe {
        match rows {
            6 => by_vectors::<S, T, 6>(simd, p, vectors, block),
            5 => by_vectors::<S, T, 5>(simd, p, vectors, block),
            4 => by_vectors::<S, T, 4>(simd, p, vectors, block),
            3 => by_vectors::<S, T, 3>(simd, p, vectors, block),
            2 => by_vectors::<S, T, 2>(simd, p, vectors, block),
            _ => by_vectors::<S, T, 1>(simd, p, vectors, block),
        }
    }
}

#[inline(always)]
unsafe fn by_vectors<S: Simd, T: Real, const R: usize>(simd: S, p: &Product<T>, vectors: usize, block: Block) {
    // SAFETY: as for the caller.
    unsafe {
        match vectors {
            4 => kernel::<S, T, R, 4>(simd, p, block),
            3 => kernel::<S, T, R, 3>(simd, p, block),
            2 => kernel::<S, T, R, 2>(simd, p, block),
            _ => kernel::<S, T, R, 1>(simd, p, block),
        }
    }
}

/// `R` rows by `V` vectors of the result, held in registers over all terms.
///
/// # Safety
/// Rows `block.first..+R`, columns `block.column..+V * lanes` and `block.terms` lie inside of all operands of `p`.
#[inline(always)]
unsafe fn kernel<S: Simd, T: Real, const R: usize, const V: usize>(simd: S, p: &Product<T>, block: Block) {
    let lanes = lanes::<S, T>();
    let mut sums = [[T::splat(simd, T::ZERO); V]; R];
    // SAFETY: the caller's promise; vectors are read and written unaligned.
    unsafe {
        let mut a = p.a.data.as_ptr().add(block.first * p.a.row + block.terms.start * p.a.column);
        let (b_start, b_row) = p.b.place(block.column);
        let mut b = p.b.data.as_ptr().add(b_start + block.terms.start * b_row);
        for _ in block.terms.clone() {
            let mut row = [T::splat(simd, T::ZERO); V];
            for (v, vector) in row.iter_mut().enumerate() {
                *vector = b.add(v * lanes).cast::<T::Vector<S>>().read_unaligned();
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let factor = T::splat(simd, *a.add(r * p.a.row));
                for (sum, &vector) in sums.iter_mut().zip(&row) {
                    *sum = T::mul_add(simd, factor, vector, *sum);
                }
            }
            a = a.wrapping_add(p.a.column);
            b = b.wrapping_add(b_row);
        }
        let out = p.out.as_ptr().cast_mut().add(block.first * p.b.columns + block.column);
        for (r, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let at = out.add(r * p.b.columns + v * lanes).cast::<T::Vector<S>>();
                let sum = if block.add { T::add_vectors(simd, at.read_unaligned(), sum) } else { sum };
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
                    b[panel_index(k, n, p, j)] = entry(p, j);
                }
                let b = Panels { data: &b, rows: k, columns: n };
                let limits: Vec<_> = (0..m.div_ceil(ROWS))
                    .map(|g| Limits { terms: (g % k).min(k - 1)..k, columns: (g * 9) % n..n })
                    .collect();
                let mut out = vec![1.0; m * n];
                // `a` is stored transposed.
                let a = Broadcast::transposed(&a, m);
                f64::multiply(Product { out: &mut out, accumulate, a, b, rows: m, limits: &limits });
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
