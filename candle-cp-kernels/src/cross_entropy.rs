//! Soft cap, softmax and cross entropy of one row of logits, with the gradient in place.

use crate::real::Real;
use pulp::NullaryFnOnce;

const LANES: usize = 16;

/// How [`cross_entropy_row`] treats a row.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy {
    /// Logits become `softcap * tanh(logit / softcap)` first.
    pub softcap: Option<f64>,
    /// Factor on the gradient: one over the number of labels that count.
    pub factor: f64,
    /// Whether `logits` is to hold the gradient on return; otherwise its content is lost.
    pub gradient: bool,
}

/// Cross entropy (not multiplied by the factor) of the logits of one token against `label`. The row is the segments one
/// after the other.
///
/// # Panics
/// If `label` is outside of the row.
pub fn cross_entropy_row<T: Real>(options: CrossEntropy, logits: &mut [&mut [T]], label: usize) -> f64 {
    T::cross_entropy(Row { options, logits, label })
}

pub(crate) struct Row<'a, 'b, T> {
    options: CrossEntropy,
    logits: &'a mut [&'b mut [T]],
    label: usize,
}

impl<T: Real> NullaryFnOnce for Row<'_, '_, T> {
    type Output = f64;

    #[inline(always)]
    fn call(self) -> f64 {
        let Self { options, logits, label } = self;
        let inverse = T::from_f64(options.softcap.map_or(0.0, |cap| 1.0 / cap));
        let slope = |capped: T| T::ONE - (capped * inverse) * (capped * inverse);
        let mut max = T::NEG_INFINITY;
        for part in logits.iter_mut() {
            let largest = match options.softcap.map(T::from_f64) {
                None => fold(part, T::NEG_INFINITY, |max, x| x.maximum(max), T::maximum),
                Some(cap) => {
                    let step = |max, x: &mut T| {
                        *x = cap * (*x * inverse).tanh();
                        x.maximum(max)
                    };
                    fold(part, T::NEG_INFINITY, step, T::maximum)
                }
            };
            max = max.maximum(largest);
        }
        let target = *element(logits, label);
        // Segments are summed in their own type, all of them in f64: a row may have hundreds of thousands of terms.
        let mut sum = 0.0;
        for part in logits.iter_mut() {
            sum += match options.softcap {
                None => exponentials(part, max, |_| T::ONE),
                Some(_) => exponentials(part, max, slope),
            };
        }
        if options.gradient {
            let scale = T::from_f64(options.factor / sum);
            logits.iter_mut().for_each(|part| part.iter_mut().for_each(|x| *x *= scale));
            let minus_one = ((target - max).exp().to_f64() - sum) / sum;
            *element(logits, label) = T::from_f64(minus_one * slope(target).to_f64() * options.factor);
        }
        (max.to_f64() - target.to_f64()) + sum.ln()
    }
}

/// Turns each `x` into `e^(x - max) * slope(x)` and returns the sum of the exponentials alone.
#[inline(always)]
fn exponentials<T: Real>(part: &mut [T], max: T, slope: impl Fn(T) -> T) -> f64 {
    let step = |sum, x: &mut T| {
        let e = (*x - max).exp();
        *x = e * slope(*x);
        sum + e
    };
    fold(part, T::ZERO, step, |a, b| a + b).to_f64()
}

/// The element at `index` of the whole row.
fn element<'a, T>(row: &'a mut [&mut [T]], mut index: usize) -> &'a mut T {
    for part in row {
        if index < part.len() {
            return &mut part[index];
        }
        index -= part.len();
    }
    panic!("the label is outside of the row")
}

/// Folds in lanes, so that the loop becomes vector code; `step` may change the element.
#[inline(always)]
fn fold<T: Real>(row: &mut [T], start: T, step: impl Fn(T, &mut T) -> T, join: impl Fn(T, T) -> T) -> T {
    let mut lanes = [start; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = step(*lane, x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *lane = step(*lane, x);
    }
    lanes.into_iter().fold(start, join)
}
