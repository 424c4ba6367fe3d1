//! What the tests share: a case, a dense reference in f64, and the same case on rank threads.

#![allow(dead_code, unused_imports)] // every test file uses a part of it

pub mod case;
pub mod dense;
pub mod devices;
pub mod draw;
pub mod loss_reference;
pub mod ratio;
pub mod ring;

pub use case::{Case, Data, Rule, block, documents};
pub use dense::{Outcome, dense};
pub use ring::{Run, Strides, layouts, ring};

/// Tolerance of f64 results, relative to the largest reference value, or to 1 if that is smaller.
pub const EXACT: f64 = 1e-12;

/// Largest absolute difference. Infinities of the same sign do not differ; a NaN differs from everything.
pub fn max_difference(actual: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len(), "lengths differ");
    let difference = |(&a, &b): (&f64, &f64)| if a == b { 0.0 } else { (a - b).abs() };
    let pairs = actual.iter().zip(expected).map(difference);
    pairs.fold(0.0, |worst, d| if d.is_nan() || d > worst { d } else { worst })
}

/// Largest finite magnitude.
pub fn magnitude(x: &[f64]) -> f64 {
    x.iter().filter(|v| v.is_finite()).fold(0.0, |largest, v| v.abs().max(largest))
}

/// `None` if `actual` is within `tolerance` of `expected`, else what is wrong.
pub fn deviation(name: &str, actual: &[f64], expected: &[f64], tolerance: f64) -> Option<String> {
    let worst = max_difference(actual, expected);
    let allowed = tolerance * magnitude(expected).max(1.0);
    let wrong = worst.is_nan() || worst > allowed;
    wrong.then(|| format!("{name} is off by {worst:e}, allowed {allowed:e}"))
}

/// Panics unless `actual` is within [`EXACT`] of `expected`.
#[track_caller]
pub fn assert_exact(name: &str, actual: &[f64], expected: &[f64]) {
    if let Some(text) = deviation(name, actual, expected, EXACT) {
        panic!("{text}");
    }
}

/// Panics unless all five results are exact.
#[track_caller]
pub fn assert_outcome(context: &str, actual: &Outcome, expected: &Outcome) {
    for ((name, a), (_, b)) in actual.parts().into_iter().zip(expected.parts()) {
        assert_exact(&format!("{context}: {name}"), a, b);
    }
}

/// Runs `case` in f64 over every layout at every one of `ranks` and compares with the dense reference.
#[track_caller]
pub fn assert_every_layout(case: &Case, ranks: &[usize]) {
    let data = case.data();
    let expected = dense(case, &data);
    for &p in ranks {
        for (name, layout) in layouts(case.len(), p) {
            let actual = ring(case, &data, &layout, Run::default());
            assert_outcome(&format!("{name} over {p} ranks"), &actual, &expected);
        }
    }
}
