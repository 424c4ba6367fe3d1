//! Matrices stored the way the products read their right operand: panels of 64 columns, each row by row. Sums come out in
//! the same form, so the state of a recurrence is packed once and stays so.

use crate::aligned::Aligned;
use crate::matmul::{Broadcast, LANES, Limits, Panels, Product, ROWS};
use crate::pack::padded;
use crate::real::Real;

/// Columns of a panel, and the side of a triangular matrix at most.
pub(crate) const PANEL: usize = 64;

/// A dense matrix. Both sides are taken up to whole vectors; columns beyond the asked ones stay 0 where they were 0.
#[derive(Debug)]
pub(crate) struct Matrix<T> {
    data: Aligned<T>,
    rows: usize,
    columns: usize,
}

impl<T: Real> Matrix<T> {
    pub fn zeros(rows: usize, columns: usize) -> Self {
        const { assert!(T::PANEL == PANEL) };
        let (rows, columns) = (padded(rows), padded(columns));
        Self { data: Aligned::zeros(rows * columns), rows, columns }
    }

    #[inline(always)]
    pub fn panels(&self) -> usize {
        self.columns.div_ceil(PANEL)
    }

    /// Columns of panel `p`, which are also the elements from one of its rows to the next.
    #[inline(always)]
    pub fn width(&self, p: usize) -> usize {
        PANEL.min(self.columns - p * PANEL)
    }

    #[inline(always)]
    pub fn panel(&self, p: usize) -> &[T] {
        &self.data[p * PANEL * self.rows..][..self.rows * self.width(p)]
    }

    #[inline(always)]
    pub fn panel_mut(&mut self, p: usize) -> &mut [T] {
        let (start, len) = (p * PANEL * self.rows, self.rows * self.width(p));
        &mut self.data[start..][..len]
    }

    /// The part of a row that lies in panel `p`.
    #[inline(always)]
    pub fn part(&self, row: usize, p: usize) -> &[T] {
        let width = self.width(p);
        &self.panel(p)[row * width..][..width]
    }

    #[inline(always)]
    pub fn part_mut(&mut self, row: usize, p: usize) -> &mut [T] {
        let width = self.width(p);
        &mut self.panel_mut(p)[row * width..][..width]
    }

    pub fn copy_from(&mut self, other: &Self) {
        self.data.copy_from_slice(&other.data);
    }

    /// The unit matrix of `size` rows and columns.
    pub fn set_unit(&mut self, size: usize) {
        self.data.fill(T::ZERO);
        (0..size).for_each(|i| self.part_mut(i, i / PANEL)[i % PANEL] = T::ONE);
    }

    /// The first columns of a row from `from`, the others 0.
    #[inline(always)]
    pub fn set_row(&mut self, row: usize, from: &[T]) {
        for p in 0..self.panels() {
            let from = &from[from.len().min(p * PANEL)..];
            let part = self.part_mut(row, p);
            let (inside, outside) = part.split_at_mut(from.len().min(part.len()));
            inside.copy_from_slice(&from[..inside.len()]);
            outside.fill(T::ZERO);
        }
    }

    /// The first columns of a row.
    #[inline(always)]
    pub fn read_row(&self, row: usize, into: &mut [T]) {
        for (p, into) in into.chunks_mut(PANEL).enumerate() {
            into.copy_from_slice(&self.part(row, p)[..into.len()]);
        }
    }

    /// From a plain row-major matrix.
    pub fn load(&mut self, rows: usize, columns: usize, from: &[T]) {
        for (row, from) in from.chunks_exact(columns).take(rows).enumerate() {
            self.set_row(row, from);
        }
    }

    /// Appends it to `into`, row-major.
    pub fn store(&self, rows: usize, columns: usize, into: &mut Vec<T>) {
        for row in 0..rows {
            for p in 0..columns.div_ceil(PANEL) {
                into.extend_from_slice(&self.part(row, p)[..PANEL.min(columns - p * PANEL)]);
            }
        }
    }

    /// Multiplies each of the first rows by its factor.
    #[inline(always)]
    pub fn scale_rows(&mut self, factors: &[T]) {
        for p in 0..self.panels() {
            let width = self.width(p);
            for (row, &factor) in self.panel_mut(p).chunks_exact_mut(width).zip(factors) {
                each(row, |x| x * factor);
            }
        }
    }

    /// `self = factor * other`, row by row for as many rows as there are factors.
    #[inline(always)]
    pub fn set_scaled(&mut self, other: &Self, factors: &[T]) {
        for p in 0..self.panels() {
            let width = self.width(p);
            let rows = self.panel_mut(p).chunks_exact_mut(width).zip(other.panel(p).chunks_exact(width));
            for ((row, other), &factor) in rows.zip(factors) {
                both(row, other, |_, y| y * factor);
            }
        }
    }

    /// `self += factor * other`, row by row for as many rows as there are factors.
    #[inline(always)]
    pub fn add_scaled(&mut self, other: &Self, factors: &[T]) {
        for p in 0..self.panels() {
            let width = self.width(p);
            let rows = self.panel_mut(p).chunks_exact_mut(width).zip(other.panel(p).chunks_exact(width));
            for ((row, other), &factor) in rows.zip(factors) {
                both(row, other, |x, y| x + y * factor);
            }
        }
    }

    #[inline(always)]
    pub fn scale_row(&mut self, row: usize, factor: T) {
        for p in 0..self.panels() {
            each(self.part_mut(row, p), |x| x * factor);
        }
    }

    /// Row `d` becomes `norm (up d - down y (y . d))`, `y` the same row of `other`: the gradient of what was normalised.
    #[inline(always)]
    pub fn normalised_row(&mut self, other: &Self, row: usize, (up, down): (T, T), norm: T) {
        let along = self.dot_row(other, row) * down * norm;
        let across = up * norm;
        for p in 0..self.panels() {
            both(self.part_mut(row, p), other.part(row, p), |d, y| across * d - along * y);
        }
    }

    /// All numbers multiplied by one.
    #[inline(always)]
    pub fn scale(&mut self, factor: T) {
        each(&mut self.data, |x| x * factor);
    }

    /// The sum of the products of all elements.
    #[inline(always)]
    pub fn dot(&self, other: &Self) -> T {
        dot(&self.data, &other.data)
    }

    /// The product of one row of each.
    #[inline(always)]
    pub fn dot_row(&self, other: &Self, row: usize) -> T {
        (0..self.panels()).fold(T::ZERO, |sum, p| sum + dot(self.part(row, p), other.part(row, p)))
    }

    /// Writes the transpose. What lies beyond the sides that are in use is moved along and means nothing.
    #[inline(always)]
    pub fn transpose_into(&self, into: &mut Self) {
        debug_assert!(into.rows == self.columns && into.columns == self.rows);
        for p in 0..self.panels() {
            let (width, panel) = (self.width(p), self.panel(p));
            for q in 0..into.panels() {
                let (into_width, first) = (into.width(q), p * PANEL);
                let into = &mut into.panel_mut(q)[first * into_width..][..width * into_width];
                for row in (0..into_width).step_by(LANES) {
                    for column in (0..width).step_by(LANES) {
                        let from = &panel[(q * PANEL + row) * width + column..];
                        transpose_block(from, width, &mut into[column * into_width + row..], into_width);
                    }
                }
            }
        }
    }
}

/// `x = f(x)`, by whole vectors.
#[inline(always)]
fn each<T: Real>(x: &mut [T], f: impl Fn(T) -> T) {
    for x in x.as_chunks_mut::<LANES>().0 {
        *x = x.map(&f);
    }
}

/// `x = f(x, y)`, by whole vectors, each read before it is written.
#[inline(always)]
pub(crate) fn both<T: Real>(x: &mut [T], y: &[T], f: impl Fn(T, T) -> T) {
    for (x, y) in x.as_chunks_mut::<LANES>().0.iter_mut().zip(y.as_chunks::<LANES>().0) {
        *x = std::array::from_fn(|i| f(x[i], y[i]));
    }
}

#[inline(always)]
fn transpose_block<T: Real>(from: &[T], from_row: usize, into: &mut [T], into_row: usize) {
    let mut block = [[T::ZERO; LANES]; LANES];
    for (i, row) in block.iter_mut().enumerate() {
        row.copy_from_slice(&from[i * from_row..][..LANES]);
    }
    for j in 0..LANES {
        let column: [T; LANES] = std::array::from_fn(|i| block[i][j]);
        into[j * into_row..][..LANES].copy_from_slice(&column);
    }
}

/// The sum of products, in as many partial sums as a vector has lanes.
#[inline(always)]
pub(crate) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut sums = [T::ZERO; LANES];
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    sums.into_iter().fold(T::ZERO, |sum, x| sum + x)
}

/// The left operand of a product.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a, T> {
    Plain(&'a Matrix<T>),
    Transposed(&'a Matrix<T>),
}

/// Which part of a product is computed. The triangles are of square matrices with one panel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    All,
    /// Of the result, the columns up to the diagonal.
    LowerResult,
    /// The left operand is 0 right of the diagonal.
    LowerLeft,
    /// The left operand is 0 left of the diagonal.
    UpperLeft,
}

/// Products, with the space for their limits.
#[derive(Default)]
pub(crate) struct Multiplier(Vec<Limits>);

impl Multiplier {
    /// `out = a . b`, or `out += a . b`, for the first `rows` rows of `out` and `terms` terms.
    pub fn multiply<T: Real>(
        &mut self,
        (out, add): (&mut Matrix<T>, bool),
        a: Left<T>,
        b: &Matrix<T>,
        (rows, terms): (usize, usize),
        part: Part,
    ) {
        debug_assert_eq!(out.columns, b.columns);
        for p in 0..b.panels() {
            let width = b.width(p);
            match a {
                Left::Plain(a) => {
                    for (q, first) in (0..terms).step_by(PANEL).enumerate() {
                        let limits = self.limits(rows, PANEL.min(terms - first), width, part);
                        T::multiply(Product {
                            out: out.panel_mut(p),
                            out_row: width,
                            accumulate: add || q > 0,
                            a: Broadcast::rows(a.panel(q), a.width(q)),
                            b: Panels { data: &b.panel(p)[first * width..], rows: b.rows - first, columns: width },
                            rows,
                            limits,
                        });
                    }
                }
                Left::Transposed(a) => {
                    for (q, first) in (0..rows).step_by(PANEL).enumerate() {
                        let rows = PANEL.min(rows - first);
                        let limits = self.limits(rows, terms, width, part);
                        T::multiply(Product {
                            out: &mut out.panel_mut(p)[first * width..],
                            out_row: width,
                            accumulate: add,
                            a: Broadcast::transposed(a.panel(q), a.width(q)),
                            b: Panels { data: b.panel(p), rows: b.rows, columns: width },
                            rows,
                            limits,
                        });
                    }
                }
            }
        }
    }

    fn limits(&mut self, rows: usize, terms: usize, columns: usize, part: Part) -> &[Limits] {
        self.0.clear();
        self.0.extend((0..rows).step_by(ROWS).map(|first| {
            let end = first + ROWS;
            match part {
                Part::All => Limits { terms: 0..terms, columns: 0..columns },
                Part::LowerResult => Limits { terms: 0..terms, columns: 0..end.min(columns) },
                Part::LowerLeft => Limits { terms: 0..end.min(terms), columns: 0..columns },
                Part::UpperLeft => Limits { terms: first..terms, columns: 0..columns },
            }
        }));
        &self.0
    }
}
