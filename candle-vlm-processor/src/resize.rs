//! Bicubic resizing with antialiasing, bit for bit as Pillow does it with 8-bit samples.
//!
//! One pass along the rows and one along the columns; each rounds to 8 bits, so their order shows. Weights are
//! fixed-point numbers with 22 fraction bits, made in f64; when a side shrinks, the kernel is as much wider.

use crate::picture::Picture;

/// Fraction bits of a weight: 8 bits of a sample and 2 of headroom leave 22 of 32.
const FRACTION_BITS: u32 = 32 - 8 - 2;
/// Reach of the bicubic kernel, in pixels of the larger scale.
const REACH: f64 = 2.0;

/// The weights of one pass: for each output pixel the first input pixel and its weights.
struct Weights {
    first: Vec<usize>,
    taps: Vec<usize>,
    /// `[outputs, stride]`, only the first `taps` of each are used.
    weights: Vec<i32>,
    stride: usize,
}

/// Keys' cubic kernel with a = -0.5.
fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

impl Weights {
    fn new(inputs: usize, outputs: usize) -> Self {
        let scale = inputs as f64 / outputs as f64;
        let spread = scale.max(1.0);
        let reach = REACH * spread;
        let stride = reach.ceil() as usize * 2 + 1;
        let mut result = Self { first: Vec::new(), taps: Vec::new(), weights: vec![0; outputs * stride], stride };
        let mut exact = vec![0.0f64; stride];
        for (output, weights) in result.weights.chunks_exact_mut(stride).enumerate() {
            let center = (output as f64 + 0.5) * scale;
            let first = (center - reach + 0.5).max(0.0) as usize;
            let end = ((center + reach + 0.5) as usize).min(inputs);
            let taps = end - first;
            let inverse = 1.0 / spread;
            for (tap, weight) in exact[..taps].iter_mut().enumerate() {
                *weight = bicubic(((tap + first) as f64 - center + 0.5) * inverse);
            }
            let sum: f64 = exact[..taps].iter().sum();
            for (fixed, weight) in weights.iter_mut().zip(&exact[..taps]) {
                let scaled = if sum == 0.0 { *weight } else { weight / sum } * f64::from(1u32 << FRACTION_BITS);
                *fixed = (scaled + if scaled < 0.0 { -0.5 } else { 0.5 }) as i32; // away from zero
            }
            result.first.push(first);
            result.taps.push(taps);
        }
        result
    }

    /// First input pixel and weights of one output pixel.
    fn of(&self, output: usize) -> (usize, &[i32]) {
        let at = output * self.stride;
        (self.first[output], &self.weights[at..at + self.taps[output]])
    }
}

/// A sum of samples times weights, rounded and clamped to 8 bits.
fn to_sample(sum: i32) -> u8 {
    (sum >> FRACTION_BITS).clamp(0, 255) as u8
}

const HALF: i32 = 1 << (FRACTION_BITS - 1);

/// `[height, width, 3]` to `[height, outputs, 3]`.
fn resize_rows(rgb_hwc: &[u8], width: usize, outputs: usize) -> Vec<u8> {
    let weights = Weights::new(width, outputs);
    let mut result = Vec::with_capacity(rgb_hwc.len() / width * outputs);
    for row in rgb_hwc.chunks_exact(width * 3) {
        for output in 0..outputs {
            let (first, taps) = weights.of(output);
            let mut sums = [HALF; 3];
            for (pixel, weight) in row[first * 3..].chunks_exact(3).zip(taps) {
                for (sum, sample) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(*sample) * weight;
                }
            }
            result.extend(sums.map(to_sample));
        }
    }
    result
}

/// `[height, width, 3]` to `[outputs, width, 3]`.
fn resize_columns(rgb_hwc: &[u8], width: usize, outputs: usize) -> Vec<u8> {
    let row_len = width * 3;
    let weights = Weights::new(rgb_hwc.len() / row_len, outputs);
    let mut result = Vec::with_capacity(outputs * row_len);
    let mut sums = vec![HALF; row_len];
    for output in 0..outputs {
        let (first, taps) = weights.of(output);
        sums.fill(HALF);
        for (row, weight) in rgb_hwc[first * row_len..].chunks_exact(row_len).zip(taps) {
            for (sum, sample) in sums.iter_mut().zip(row) {
                *sum += i32::from(*sample) * weight;
            }
        }
        result.extend(sums.iter().map(|&sum| to_sample(sum)));
    }
    result
}

/// Resizes to `width` x `height`, as `PIL.Image.resize((width, height), BICUBIC)` does for RGB pictures.
///
/// # Panics
/// A side is 0.
pub fn resize_bicubic(picture: &Picture, width: usize, height: usize) -> Picture {
    assert!(width > 0 && height > 0, "cannot resize to {width} x {height}");
    let rows = |rgb_hwc: &[u8]| resize_rows(rgb_hwc, picture.width(), width);
    let columns = |rgb_hwc: &[u8], row_width| resize_columns(rgb_hwc, row_width, height);
    let (old_width, old_height) = (picture.width(), picture.height());
    // The rule of Pillow 13, found by comparing its results with those of either order.
    let lost = |old: usize, new: usize| old as i64 - new as i64;
    let columns_first = height < old_height && lost(old_height, height) > 2 * lost(old_width, width);
    let rgb_hwc = match (width != old_width, height != old_height) {
        (false, false) => None,
        (true, false) => Some(rows(picture.rgb_hwc())),
        (false, true) => Some(columns(picture.rgb_hwc(), width)),
        (true, true) if columns_first => Some(rows(&columns(picture.rgb_hwc(), old_width))),
        (true, true) => Some(columns(&rows(picture.rgb_hwc()), width)),
    };
    picture.resized(width, height, rgb_hwc)
}
