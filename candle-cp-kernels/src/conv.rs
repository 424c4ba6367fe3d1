//! Short causal depthwise convolution along a sequence: one filter of a few taps per channel.
//!
//! The sequence is a list of rows, one per token, wherever they lie in memory, and each row says how many of those before
//! it belong to the same document. Rows from elsewhere (a halo) and padding are rows that have no output.

use crate::real::Real;
use pulp::NullaryFnOnce;
use rayon::prelude::*;
use std::ops::Range;

/// Rows per task. Partial sums of the weight's gradient are per task, so the bits of the sum depend on it, but not on the
/// number of threads.
const BLOCK: usize = 128;
/// Channels at a time, so that the rows that one output reads stay in the first cache.
const CHANNELS: usize = 256;

/// What follows the convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConvActivation {
    /// Nothing.
    None,
    /// `x * sigmoid(x)`.
    Silu,
}

/// One row of the sequence.
#[derive(Debug, Clone, Copy)]
pub struct ConvRow<'a, T> {
    /// One number per channel.
    pub x: &'a [T],
    /// How many of the rows directly before it its output may read; those further back count as 0. `None` for a row that
    /// has no output.
    pub reach: Option<usize>,
}

/// `y[t, c] = sum over j of w[c, j] * x[t - (K - 1) + j, c]` with K taps, then the activation: the last tap meets the row
/// itself.
#[derive(Debug)]
pub struct CausalConv<'a, T> {
    rows: &'a [ConvRow<'a, T>],
    /// `[K, C]`, by the distance to the row that is read.
    weight: Vec<T>,
    channels: usize,
    taps: usize,
    activation: ConvActivation,
}

impl<'a, T: Real> CausalConv<'a, T> {
    /// Over `rows` of C channels each, with `weight` `[C, taps]`.
    ///
    /// # Panics
    /// No tap, a weight that is not whole filters, a row of another width, or one that reaches before the first row.
    pub fn new(rows: &'a [ConvRow<'a, T>], weight: &[T], taps: usize, activation: ConvActivation) -> Self {
        assert!(taps > 0 && weight.len().is_multiple_of(taps), "{} numbers in filters of {taps}", weight.len());
        let channels = weight.len() / taps;
        for (i, row) in rows.iter().enumerate() {
            assert!(row.x.len() == channels, "row {i} has {} channels, the weight {channels}", row.x.len());
            assert!(row.reach.is_none_or(|reach| reach <= i), "row {i} reaches {:?} rows back", row.reach);
        }
        let by_distance = (0..taps).flat_map(|back| (0..channels).map(move |c| weight[c * taps + taps - 1 - back]));
        Self { rows, weight: by_distance.collect(), channels, taps, activation }
    }

    /// Writes the output of every row that has one; `out[i]` is that of row `i` and is not touched where there is none,
    /// so it may be empty there.
    ///
    /// # Panics
    /// Another number of rows, or an output of another width.
    pub fn forward(&self, out: &mut [&mut [T]]) {
        assert_eq!(out.len(), self.rows.len(), "one output per row");
        out.par_chunks_mut(BLOCK).enumerate().for_each(|(block, out)| {
            T::conv_forward(ForwardBlock { conv: self, first: block * BLOCK, out });
        });
    }

    /// Gradients from `d_out[i]`, that of the output of row `i` (not read where there is none): writes that of every row
    /// of the input to `d_x` and, if asked, returns that of the weight, `[C, taps]`. The order of all sums is fixed.
    ///
    /// # Panics
    /// Other numbers of rows, or rows of another width.
    pub fn backward(&self, d_out: &[&[T]], d_x: &mut [&mut [T]], with_weight: bool) -> Option<Vec<T>> {
        assert!(d_out.len() == self.rows.len() && d_x.len() == self.rows.len(), "one gradient per row");
        let task = |(block, d_x)| {
            let mut d_weight = vec![T::ZERO; if with_weight { self.weight.len() } else { 0 }];
            let first = block * BLOCK;
            T::conv_backward(BackwardBlock { conv: self, first, d_out, d_x, d_weight: &mut d_weight });
            d_weight
        };
        let parts: Vec<_> = d_x.par_chunks_mut(BLOCK).enumerate().map(task).collect();
        with_weight.then(|| self.sum(&parts))
    }

    /// The sum of `[K, C]` parts in their order, as `[C, K]`.
    fn sum(&self, parts: &[Vec<T>]) -> Vec<T> {
        let mut d_weight = vec![T::ZERO; self.weight.len()];
        d_weight.par_chunks_mut(self.taps).enumerate().with_min_len(CHANNELS).for_each(|(c, filter)| {
            for part in parts {
                for (j, sum) in filter.iter_mut().enumerate() {
                    *sum += part[(self.taps - 1 - j) * self.channels + c];
                }
            }
        });
        d_weight
    }

    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<T> {
        let channels = self.channels;
        (0..channels).step_by(CHANNELS).map(move |start| start..(start + CHANNELS).min(channels))
    }

    #[inline(always)]
    fn filter(&self, back: usize, channels: &Range<usize>) -> &[T] {
        &self.weight[back * self.channels..][channels.clone()]
    }

    /// Whether the output of `row` reads the one `back` rows before it.
    #[inline(always)]
    fn reads(&self, row: usize, back: usize) -> bool {
        back < self.taps && self.rows[row].reach.is_some_and(|reach| back <= reach)
    }

    /// The convolution of a row that has an output, before the activation.
    #[inline(always)]
    fn convolve(&self, row: usize, channels: &Range<usize>, out: &mut [T]) {
        out.fill(T::ZERO);
        for back in (0..self.taps).take_while(|&back| self.reads(row, back)) {
            add_product(out, self.filter(back, channels), &self.rows[row - back].x[channels.clone()]);
        }
    }
}

/// `sums += a * b`.
#[inline(always)]
fn add_product<T: Real>(sums: &mut [T], a: &[T], b: &[T]) {
    for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
        *sum += a * b;
    }
}

/// `1 / (1 + e^-y)`, without an overflow.
#[inline(always)]
fn sigmoid<T: Real>(y: T) -> T {
    let e = (T::ZERO - y.abs()).exp();
    (if y < T::ZERO { e } else { T::ONE }) / (T::ONE + e)
}

pub(crate) struct ForwardBlock<'a, 'b, T> {
    conv: &'a CausalConv<'a, T>,
    first: usize,
    out: &'a mut [&'b mut [T]],
}

impl<T: Real> NullaryFnOnce for ForwardBlock<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { conv, first, out } = self;
        for channels in conv.blocks() {
            for (row, out) in (first..).zip(out.iter_mut()) {
                if conv.rows[row].reach.is_none() {
                    continue;
                }
                let out = &mut out[channels.clone()];
                conv.convolve(row, &channels, out);
                if conv.activation == ConvActivation::Silu {
                    out.iter_mut().for_each(|y| *y *= sigmoid(*y));
                }
            }
        }
    }
}

pub(crate) struct BackwardBlock<'a, 'b, T> {
    conv: &'a CausalConv<'a, T>,
    first: usize,
    d_out: &'a [&'a [T]],
    d_x: &'a mut [&'b mut [T]],
    /// `[K, C]`, or empty if it is not wanted.
    d_weight: &'a mut [T],
}

impl<T: Real> BackwardBlock<'_, '_, T> {
    /// The gradient of the convolution of a row that has an output, from that of the output.
    #[inline(always)]
    fn through_activation(&self, row: usize, channels: &Range<usize>, gradient: &mut [T]) {
        let d_out = &self.d_out[row][channels.clone()];
        if self.conv.activation == ConvActivation::None {
            gradient.copy_from_slice(d_out);
            return;
        }
        // What the activation saw is computed again: it costs less than to keep it.
        self.conv.convolve(row, channels, gradient);
        for (y, &d_out) in gradient.iter_mut().zip(d_out) {
            let s = sigmoid(*y);
            *y = d_out * s * (T::ONE + *y * (T::ONE - s));
        }
    }
}

impl<T: Real> NullaryFnOnce for BackwardBlock<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let (conv, first, count) = (self.conv, self.first, self.d_x.len());
        // Outputs of the next block read rows of this one.
        let end = (first + count).saturating_add(conv.taps - 1).min(conv.rows.len());
        let width = CHANNELS.min(conv.channels);
        let mut gradients = vec![T::ZERO; (end - first) * width];
        let at = |row: usize, channels: &Range<usize>| (row - first) * width..(row - first) * width + channels.len();
        for channels in conv.blocks() {
            for row in (first..end).filter(|&row| conv.rows[row].reach.is_some()) {
                self.through_activation(row, &channels, &mut gradients[at(row, &channels)]);
            }
            for (row, d_x) in (first..).zip(self.d_x.iter_mut()) {
                let d_x = &mut d_x[channels.clone()];
                d_x.fill(T::ZERO);
                for back in (0..conv.taps.min(end - row)).filter(|&back| conv.reads(row + back, back)) {
                    add_product(d_x, conv.filter(back, &channels), &gradients[at(row + back, &channels)]);
                }
            }
            for row in first..if self.d_weight.is_empty() { first } else { first + count } {
                for back in (0..conv.taps).take_while(|&back| conv.reads(row, back)) {
                    let d_filter = &mut self.d_weight[back * conv.channels..][channels.clone()];
                    add_product(d_filter, &gradients[at(row, &channels)], &conv.rows[row - back].x[channels.clone()]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const C: usize = 2 * CHANNELS + 5;
    const ROWS: usize = 2 * BLOCK + 9;
    const TAPS: usize = 4;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.0 - 1.0).collect()
    }

    /// Documents of 50 rows; two rows of padding between them, which hold NaN, as do gradients that nobody may read.
    fn run() -> [Vec<f32>; 3] {
        let padding = |row: usize| row % 52 >= 50;
        let [mut x, mut d_out] = [1, 2].map(|seed| numbers(ROWS * C, seed));
        for numbers in [&mut x, &mut d_out] {
            numbers.chunks_mut(C).enumerate().filter(|(row, _)| padding(*row)).for_each(|(_, x)| x.fill(f32::NAN));
        }
        let row = |(i, x)| ConvRow { x, reach: (!padding(i)).then_some(i % 52) };
        let rows: Vec<_> = x.chunks(C).enumerate().map(row).collect();
        let weight = numbers(C * TAPS, 3);
        let conv = CausalConv::new(&rows, &weight, TAPS, ConvActivation::Silu);
        let [mut out, mut d_x] = [(); 2].map(|()| vec![0.0; ROWS * C]);
        conv.forward(&mut out.chunks_mut(C).collect::<Vec<_>>());
        let d_out: Vec<_> = d_out.chunks(C).collect();
        let d_weight = conv.backward(&d_out, &mut d_x.chunks_mut(C).collect::<Vec<_>>(), true);
        assert_eq!(conv.backward(&d_out, &mut d_x.chunks_mut(C).collect::<Vec<_>>(), false), None);
        [out, d_x, d_weight.expect("asked for")]
    }

    #[test]
    fn padding_is_not_read_and_the_number_of_threads_changes_no_bit() {
        let on = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(run);
        let (one, four) = (on(1), on(4));
        assert!(one.iter().flatten().all(|x| x.is_finite()));
        assert_eq!(one, four);
        for gradient in &one[..2] {
            let nonzero = gradient.chunks(C).map(|row| row.iter().filter(|&&x| x != 0.0).count());
            nonzero.enumerate().for_each(|(row, count)| assert_eq!(count > C / 2, row % 52 < 50, "row {row}: {count}"));
        }
    }

    #[test]
    fn silu_does_not_overflow() {
        for y in [-1e30f32, -200.0, -3.0, -0.0, 0.5, 200.0, 1e30] {
            let expected = f64::from(y) / (1.0 + (-f64::from(y)).exp());
            let actual = f64::from(y * sigmoid(y));
            assert!((actual - expected).abs() <= 1e-6 * expected.abs() + 1e-20, "{y}: {actual} instead of {expected}");
        }
    }

    #[test]
    #[should_panic(expected = "row 1 reaches Some(2) rows back")]
    fn a_reach_before_the_first_row_is_refused() {
        let rows = [0, 2].map(|reach| ConvRow { x: &[1.0f32], reach: Some(reach) });
        CausalConv::new(&rows, &[1.0; 4], 4, ConvActivation::None);
    }
}
