//! Matrix products into memory that is there already.
//!
//! Candle's `matmul` returns a new tensor, so a sum of products costs a temporary and an addition each time. This calls
//! the same kernels (the `gemm` crate) with a destination. Each product runs on the calling thread; callers split the
//! work over the current rayon pool themselves.

use candle_cp_kernels::Real;
use gemm::Parallelism;
use std::ops::Range;

/// A matrix in a slice, by strides.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix<'a, T> {
    pub data: &'a [T],
    pub rows: usize,
    pub columns: usize,
    /// From one row to the next, from one column to the next.
    pub strides: (usize, usize),
}

impl<'a, T> Matrix<'a, T> {
    /// Rows one after the other.
    pub fn contiguous(data: &'a [T], columns: usize) -> Self {
        Self { data, rows: data.len() / columns, columns, strides: (columns, 1) }
    }

    pub fn transposed(self) -> Self {
        let (row, column) = self.strides;
        Self { data: self.data, rows: self.columns, columns: self.rows, strides: (column, row) }
    }

    /// A range of rows, not an empty one.
    pub fn rows(self, range: Range<usize>) -> Self {
        Self { data: &self.data[range.start * self.strides.0..], rows: range.len(), ..self }
    }

    /// Whether the last element is inside of the slice.
    fn fits(&self) -> bool {
        let last = self.rows.saturating_sub(1) * self.strides.0 + self.columns.saturating_sub(1) * self.strides.1;
        self.rows == 0 || self.columns == 0 || last < self.data.len()
    }
}

/// `dst = a * b`, or `dst += a * b`, on the calling thread. Rows of `dst` are one after the other.
pub(super) fn multiply<T: Real>(dst: &mut [T], a: Matrix<T>, b: Matrix<T>, add: bool) {
    assert!(a.fits() && b.fits() && a.columns == b.rows, "{}x{} times {}x{}", a.rows, a.columns, b.rows, b.columns);
    assert_eq!(dst.len(), a.rows * b.columns, "the destination has another shape");
    let [dst_row, a_row, a_column, b_row, b_column] =
        [b.columns, a.strides.0, a.strides.1, b.strides.0, b.strides.1].map(|stride| stride as isize);
    // SAFETY: by the assertions all three matrices are inside of their slices; `dst` is borrowed alone; `Real` is f32 or
    // f64, which `gemm` knows.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            dst.as_mut_ptr(),
            1,
            dst_row,
            add,
            a.data.as_ptr(),
            a_column,
            a_row,
            b.data.as_ptr(),
            b_column,
            b_row,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
