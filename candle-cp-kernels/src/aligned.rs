//! Buffers that start on a line of the cache. Vectors and tiles that cross lines cost twice as much or more.

use std::ops::{Deref, DerefMut};

const LINE: usize = 64;

/// Numbers on whole lines.
#[derive(Debug)]
pub(crate) struct Aligned<T> {
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// `len` zeros.
    pub fn zeros(len: usize) -> Self {
        let data = vec![T::default(); len + LINE / size_of::<T>()];
        let start = data.as_ptr().align_offset(LINE).min(data.len() - len);
        Self { data, start, len }
    }

    /// Makes it at least `len` long; what it held is lost if it has to grow.
    pub fn reserve(&mut self, len: usize) {
        if self.len < len {
            *self = Self::zeros(len);
        }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data[self.start..][..self.len]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_on_a_line() {
        for len in [0, 1, 1000] {
            let mut x = Aligned::<f32>::zeros(len);
            assert_eq!((x.len(), x.as_ptr() as usize % LINE), (len, 0));
            x.fill(1.0);
            x.reserve(len);
            assert_eq!(x.iter().sum::<f32>(), len as f32);
            x.reserve(len + 1);
            assert_eq!((x.len(), x.as_ptr() as usize % LINE), (len + 1, 0));
        }
    }
}
