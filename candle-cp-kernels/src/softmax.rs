//! The element-wise part of one tile, compiled once per instruction set. Tiles have rows of [`KEY_BLOCK`].

use crate::real::Real;
use crate::tile::KEY_BLOCK;
use pulp::NullaryFnOnce;
use std::ops::Range;

const LANES: usize = 16;

/// The columns of a tile that a stacked row sees.
pub(crate) type Span = Range<usize>;

/// Turns scaled scores into probabilities and folds them into the running maximum and sum of each row.
/// On return `scores` holds `exp(scale * score - max)`, 0 outside of the spans, and `rescale[r]` the factor by
/// which what was accumulated before has to be multiplied.
pub(crate) struct Softmax<'a, T> {
    pub scores: &'a mut [T],
    pub spans: &'a [Span],
    pub scale: T,
    pub max: &'a mut [T],
    pub sum: &'a mut [T],
    pub rescale: &'a mut [T],
}

impl<T: Real> NullaryFnOnce for Softmax<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (r, span) in self.spans.iter().enumerate() {
            let row = clear_outside(self.scores, r, span);
            let seen = row;
            self.rescale[r] = T::ONE;
            if seen.is_empty() {
                continue;
            }
            let before = self.max[r];
            let max = before.maximum(scale_and_max(seen, self.scale));
            // A row of -inf scores (the caller's own) stays empty rather than becoming NaN.
            if max == T::NEG_INFINITY {
                // The maximum passes over NaN: what a NaN query saw must not look like nothing.
                match seen.iter().copied().find(|&x| x != T::NEG_INFINITY) {
                    Some(nan) => (self.max[r], self.sum[r]) = (nan, nan),
                    None => seen.fill(T::ZERO),
                }
                continue;
            }
            let rescale = if before == T::NEG_INFINITY { T::ZERO } else { (before - max).exp() };
            self.rescale[r] = rescale;
            self.max[r] = max;
            self.sum[r] = self.sum[r] * rescale + exp_and_sum(seen, max);
        }
    }
}

/// Probabilities again from scores and the final log-sum-exp: `exp(scale * score - lse)`, 0 outside of the spans.
pub(crate) struct Probabilities<'a, T> {
    pub scores: &'a mut [T],
    pub spans: &'a [Span],
    pub scale: T,
    pub lse: &'a [T],
}

impl<T: Real> NullaryFnOnce for Probabilities<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (r, span) in self.spans.iter().enumerate() {
            let row = clear_outside(self.scores, r, span);
            let lse = self.lse[r];
            if lse == T::NEG_INFINITY {
                row.fill(T::ZERO);
                continue;
            }
            for x in row {
                *x = (*x * self.scale - lse).exp();
            }
        }
    }
}

/// Gradient of the scores: `probability * (d_probability - delta) * scale`, written over `d_probability`; 0 outside of
/// the spans and where it is negligible.
pub(crate) struct ScoreGradient<'a, T> {
    pub d_probabilities: &'a mut [T],
    pub probabilities: &'a [T],
    pub spans: &'a [Span],
    pub scale: T,
    pub delta: &'a [T],
}

impl<T: Real> NullaryFnOnce for ScoreGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for ((r, span), &delta) in self.spans.iter().enumerate().zip(self.delta) {
            let d = clear_outside(self.d_probabilities, r, span);
            let p = &self.probabilities[r * KEY_BLOCK..][span.clone()];
            for (d, &p) in d.iter_mut().zip(p) {
                let gradient = p * (*d - delta) * self.scale;
                *d = if gradient.abs() < T::NEGLIGIBLE { T::ZERO } else { gradient };
            }
        }
    }
}

/// Row `r` of a tile inside its span, after zeroing the rest of it.
#[inline(always)]
fn clear_outside<'a, T: Real>(tile: &'a mut [T], r: usize, span: &Span) -> &'a mut [T] {
    let row = &mut tile[r * KEY_BLOCK..(r + 1) * KEY_BLOCK];
    row[..span.start].fill(T::ZERO);
    row[span.end..].fill(T::ZERO);
    &mut row[span.clone()]
}

/// `row[..] *= factor` for every stacked row whose factor is not 1.
pub(crate) struct Rescale<'a, T> {
    pub rows: &'a mut [T],
    /// Elements from one row to the next, of which `columns` are in use.
    pub stride: usize,
    pub columns: usize,
    pub factors: &'a [T],
}

impl<T: Real> NullaryFnOnce for Rescale<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (row, &factor) in self.rows.chunks_mut(self.stride).zip(self.factors) {
            if factor != T::ONE {
                row[..self.columns].iter_mut().for_each(|x| *x *= factor);
            }
        }
    }
}

/// Scales in place; returns the maximum.
#[inline(always)]
fn scale_and_max<T: Real>(row: &mut [T], scale: T) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (x, lane) in chunk.iter_mut().zip(&mut lanes) {
            *x *= scale;
            *lane = x.maximum(*lane);
        }
    }
    for (x, lane) in chunks.into_remainder().iter_mut().zip(&mut lanes) {
        *x *= scale;
        *lane = x.maximum(*lane);
    }
    lanes.into_iter().fold(T::NEG_INFINITY, T::maximum)
}

/// `exp(x - max)` in place; returns the sum.
#[inline(always)]
fn exp_and_sum<T: Real>(row: &mut [T], max: T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (x, lane) in chunk.iter_mut().zip(&mut lanes) {
            *x = (*x - max).exp();
            *lane += *x;
        }
    }
    for (x, lane) in chunks.into_remainder().iter_mut().zip(&mut lanes) {
        *x = (*x - max).exp();
        *lane += *x;
    }
    lanes.into_iter().fold(T::ZERO, |a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vector_exp_is_accurate_over_its_range() {
        let mut worst = 0f64;
        for i in 0..550_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(Real::exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 3e-7, "relative error {worst:e}");
        assert_eq!(Real::exp(0f32), 1.0);
        assert!(Real::exp(f32::NAN).is_nan());
        assert_eq!([Real::exp(-55.01f32), Real::exp(f32::NEG_INFINITY)], [0.0; 2]);
    }

    /// Maximum and sum of one row of five scores, after each of two tiles.
    fn folded(tiles: [[f32; 5]; 2]) -> [[f32; 2]; 2] {
        let (mut max, mut sum, mut rescale) = ([f32::NEG_INFINITY], [0.0], [0.0]);
        tiles.map(|tile| {
            let mut scores = vec![0.0; KEY_BLOCK];
            scores[..5].copy_from_slice(&tile);
            let spans = [0..5];
            let (max, sum, rescale) = (&mut max, &mut sum, &mut rescale);
            Softmax { scores: &mut scores, spans: &spans, scale: 1.0, max, sum, rescale }.call();
            [max[0], sum[0]]
        })
    }

    #[test]
    fn nan_scores_are_not_lost() {
        let (nan, nothing) = ([f32::NAN; 5], [f32::NEG_INFINITY; 5]);
        for tiles in [[nan, nothing], [nan, nan], [nan, [1.0; 5]]] {
            assert!(folded(tiles).iter().all(|state| state[1].is_nan()), "{tiles:?}");
        }
        assert!(folded([[1.0; 5], nan])[1][1].is_nan());
        assert!(folded([nothing, [f32::NAN, 1.0, 1.0, 1.0, 1.0]])[1][1].is_nan());
        assert_eq!(folded([nothing, nothing])[1], [f32::NEG_INFINITY, 0.0]);
    }

    #[test]
    fn vector_tanh_is_accurate() {
        let mut worst = 0f64;
        for i in 1..200_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).tanh();
            worst = worst.max((f64::from(Real::tanh(x)) - exact).abs() / exact);
            assert_eq!(Real::tanh(-x), -Real::tanh(x));
        }
        assert!(worst < 4e-7, "relative error {worst:e}");
    }
}
