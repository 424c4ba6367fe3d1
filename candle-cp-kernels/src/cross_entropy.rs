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

/// Cross entropy (not multiplied by the factor) of `logits` against `label`.
///
/// # Panics
/// If `label` is outside of the row.
pub fn cross_entropy_row<T: Real>(options: CrossEntropy, logits: &mut [T], label: usize) -> f64 {
    assert!(label < logits.len());
    T::cross_entropy(Row { options, logits, label })
}

pub(crate) struct Row<'a, T> {
    options: CrossEntropy,
    logits: &'a mut [T],
    label: usize,
}

impl<T: Real> NullaryFnOnce for Row<'_, T> {
    type Output = f64;

    #[inline(always)]
    fn call(self) -> f64 {
        let Self { options, logits, label } = self;
        if let Some(cap) = options.softcap {
            let (cap, inverse) = (T::from_f64(cap), T::from_f64(1.0 / cap));
            logits.iter_mut().for_each(|x| *x = cap * (*x * inverse).tanh());
        }
        let target = logits[label];
        let max = fold(logits, T::NEG_INFINITY, |a, x| x.maximum(a), T::maximum);
        let sum = fold(logits, T::ZERO, |a, x| a + (x - max).exp(), |a, b| a + b);
        let lse = max + sum.ln();
        if options.gradient {
            let factor = T::from_f64(options.factor);
            let target_gradient = ((target - lse).exp() - T::ONE) * factor;
            match options.softcap {
                None => logits.iter_mut().for_each(|x| *x = (*x - lse).exp() * factor),
                Some(cap) => {
                    let inverse = T::from_f64(1.0 / cap);
                    let slope = |capped: T| T::ONE - (capped * inverse) * (capped * inverse);
                    logits.iter_mut().for_each(|x| *x = (*x - lse).exp() * factor * slope(*x));
                }
            }
            let slope = options.softcap.map_or(T::ONE, |cap| {
                let t = target * T::from_f64(1.0 / cap);
                T::ONE - t * t
            });
            logits[label] = target_gradient * slope;
        }
        (lse - target).to_f64()
    }
}

/// Folds in lanes, so that the loop becomes vector code.
#[inline(always)]
fn fold<T: Real>(row: &[T], start: T, step: impl Fn(T, T) -> T, join: impl Fn(T, T) -> T) -> T {
    let mut lanes = [start; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = step(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = step(*lane, x);
    }
    lanes.into_iter().fold(start, join)
}
