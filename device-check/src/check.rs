//! Correctness: recorded results and random cases, by the error-ratio rule.
//!
//! The largest error against f64 may be twice that of a plain computation in the same type (three times for gradients),
//! and what rounding a sum to the type costs. The log-sum-exp has to agree to 1e-5.

use crate::attend::attend;
use crate::case::{Case, Data};
use crate::composed::{composed, rounded};
use crate::dense::{Outcome, dense};
use crate::draw::{HEADS, Sizes, draw};
use crate::error::Result;
use crate::golden::golden;
use crate::target::Target;
use candle_cp_kernels::gpu::{Direction, GpuElement, GpuLimits, Kernels};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::path::Path;

/// All element types.
pub const ELEMENTS: [GpuElement; 3] = [GpuElement::Bf16, GpuElement::F16, GpuElement::F32];

/// Parts of an outcome, in the order of [`Checked::used`].
pub const PARTS: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];

/// What a case came to.
#[derive(Debug, Clone)]
pub struct Checked {
    /// What it is.
    pub name: String,
    /// Element type.
    pub element: GpuElement,
    /// Head size that the kernels are compiled for.
    pub padded_head: usize,
    /// Error of each part as a share of what is allowed; wrong above 1.
    pub used: [f64; 5],
    /// What is wrong, in words.
    pub failure: Option<String>,
}

/// What all cases came to.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Every case.
    pub cases: Vec<Checked>,
    /// `module: kernel` of every kernel that ran.
    pub kernels: BTreeSet<String>,
    /// The last case is one that the target could not run, and nothing runs on it after that.
    pub stopped: bool,
}

impl Report {
    /// Cases that failed.
    pub fn failures(&self) -> impl Iterator<Item = &Checked> {
        self.cases.iter().filter(|case| case.failure.is_some())
    }
}

/// Runs all recorded results in `fixtures`, in all types, and `random` cases.
///
/// The number of a case decides its type, head size and tile: those of the device, and the smaller ones of devices with
/// less shared memory.
///
/// # Errors
/// Recorded results that cannot be read, and a device that has no kernels. Wrong results are in the report, and so is what
/// the target says where it cannot run a case: a kernel that leaves its memory is found this way.
pub fn check(target: &mut dyn Target, fixtures: &Path, random: usize, sizes: Sizes) -> Result<Report> {
    let mut report = Report::default();
    for (case, data, expected) in golden(fixtures)? {
        report.cases.push(reference_check(&case, &data, &expected));
        for element in ELEMENTS {
            let kernels = Kernels::new(element, case.head_dim, target.limits())?;
            let case = Case { name: format!("{} in {element:?}", case.name), ..case.clone() };
            let data = rounded_data(&data, element);
            // Recorded operands are f32; those of a shorter type have results of their own.
            let reference = if element == GpuElement::F32 { expected.clone() } else { dense(&case, &data) };
            report.run(target, &kernels, (&case, &data), [&reference, &composed(&case, &data, element)]);
            if report.stopped {
                return Ok(report);
            }
        }
    }
    let numbers: Vec<u64> = (0..random as u64).collect();
    for numbers in numbers.chunks(48) {
        let prepared: Vec<_> = numbers
            .par_iter()
            .map(|&number| {
                let element = ELEMENTS[(number % 3) as usize];
                let (case, data) = draw(number, element, (number / 3) as usize % HEADS.len(), sizes);
                let outcomes = [dense(&case, &data), composed(&case, &data, element)];
                (number, element, case, data, outcomes)
            })
            .collect();
        for (number, element, case, data, [reference, composed]) in prepared {
            let kernels = kernels(element, case.head_dim, target.limits(), number)?;
            report.run(target, &kernels, (&case, &data), [&reference, &composed]);
            if report.stopped {
                return Ok(report);
            }
        }
    }
    Ok(report)
}

/// The kernels of the device, or of one with less shared memory where that has some.
fn kernels(element: GpuElement, head_dim: usize, limits: GpuLimits, number: u64) -> Result<Kernels> {
    let least = [usize::MAX, 163 << 10, 99 << 10][(number / 12 % 3) as usize];
    let smaller = GpuLimits { shared_bytes: limits.shared_bytes.min(least), ..limits };
    match Kernels::new(element, head_dim, smaller) {
        Ok(kernels) => Ok(kernels),
        Err(_) => Ok(Kernels::new(element, head_dim, limits)?),
    }
}

fn rounded_data(data: &Data, element: GpuElement) -> Data {
    let round = |x: &[f64]| x.iter().map(|&x| rounded(element, x)).collect();
    Data { q: round(&data.q), k: round(&data.k), v: round(&data.v), d_out: round(&data.d_out) }
}

/// The reference itself against recorded results, which are f64 rounded to f32.
fn reference_check(case: &Case, data: &Data, expected: &Outcome) -> Checked {
    let found = dense(case, data);
    let allowed = |x: &[f64]| 2.0 * f64::from(f32::EPSILON) * magnitude(x).max(1.0);
    let (found, expected) = (parts(&found), parts(expected));
    let used = std::array::from_fn(|i| max_difference(found[i], expected[i]) / allowed(expected[i]));
    Checked::new(format!("{}: the reference", case.name), GpuElement::F32, case.head_dim, used)
}

impl Report {
    fn run(
        &mut self,
        target: &mut dyn Target,
        kernels: &Kernels,
        (case, data): (&Case, &Data),
        [reference, composed]: [&Outcome; 2],
    ) {
        let checked = match attend(target, kernels, case, data) {
            Ok(found) => check_case(kernels, case, &found, reference, composed),
            Err(error) => {
                self.stopped = true;
                let checked = Checked::new(case.name.clone(), kernels.element(), case.head_dim, [f64::NAN; 5]);
                Checked { failure: Some(error.to_string()), ..checked }
            }
        };
        self.cases.push(checked);
        let names = [Direction::Forward, Direction::BackwardQueries, Direction::BackwardKeys];
        let names = names.map(|direction| kernels.kernel(direction).name.clone());
        let all = names.into_iter().chain(["finish".into(), "output_dot".into()]);
        self.kernels.extend(all.map(|name| format!("{}: {name}", kernels.module().name)));
    }
}

/// Compares what kernels `found` with the reference, by the error of the `composed` computation.
pub fn check_case(kernels: &Kernels, case: &Case, found: &Outcome, reference: &Outcome, composed: &Outcome) -> Checked {
    let element = kernels.element();
    let epsilon = f64::from(f32::EPSILON);
    // Backward gets its probabilities from the log-sum-exp, which f32 keeps to half a unit in the last place, and from a
    // power of two that the hardware approximates to two.
    let slack = match element {
        GpuElement::F32 => 4.0 * epsilon * magnitude(&reference.lse).max(1.0),
        _ => 0.0,
    };
    // Sums in f32 of numbers up to 1, whose differences may cancel.
    let floor = 16.0 * epsilon + slack * magnitude(&reference.dk).max(magnitude(&reference.dv));
    let (found, reference, composed) = (parts(found), parts(reference), parts(composed));
    let used = std::array::from_fn(|i| {
        let theirs = || max_difference(composed[i], reference[i]);
        let allowed = match i {
            0 => 2.0 * theirs() + jitter(reference[i], element) + slack * magnitude(reference[i]),
            1 => 1e-5 * magnitude(reference[i]).max(1.0),
            _ => 3.0 * theirs() + jitter(reference[i], element) + floor,
        };
        max_difference(found[i], reference[i]) / allowed
    });
    let name = format!("{}, {}", case.name, kernels.kernel(Direction::Forward).name);
    Checked::new(name, element, case.head_dim, used)
}

impl Checked {
    pub(crate) fn new(name: String, element: GpuElement, head_dim: usize, used: [f64; 5]) -> Self {
        let wrong: Vec<String> = PARTS
            .iter()
            .zip(used)
            .filter(|(_, used)| used.is_nan() || *used > 1.0)
            .map(|(part, used)| format!("{part} has {used:.3} times the error that is allowed"))
            .collect();
        let failure = (!wrong.is_empty()).then(|| wrong.join(", "));
        let padded_head = HEADS.iter().map(|of| of[0]).find(|&size| size >= head_dim).unwrap_or(head_dim);
        Self { name, element, padded_head, used, failure }
    }
}

fn parts(outcome: &Outcome) -> [&[f64]; 5] {
    [&outcome.out, &outcome.lse, &outcome.dq, &outcome.dk, &outcome.dv]
}

/// Largest absolute difference. Infinities of the same sign do not differ; a NaN differs from everything.
pub(crate) fn max_difference(actual: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len(), "lengths differ");
    let difference = |(&a, &b): (&f64, &f64)| if a == b { 0.0 } else { (a - b).abs() };
    let pairs = actual.iter().zip(expected).map(difference);
    pairs.fold(0.0, |worst, d| if d.is_nan() || d > worst { d } else { worst })
}

/// Largest finite magnitude.
fn magnitude(x: &[f64]) -> f64 {
    x.iter().filter(|x| x.is_finite()).fold(0.0, |largest, x| x.abs().max(largest))
}

/// Twice the largest change that adding and subtracting 0.3 makes in a type.
pub(crate) fn jitter(reference: &[f64], element: GpuElement) -> f64 {
    let round = |x: f64| rounded(element, x);
    let change = |&x: &f64| (round(round(round(x) + 0.3) - 0.3) - round(x)).abs();
    2.0 * reference.iter().filter(|x| x.is_finite()).map(change).fold(0.0, f64::max)
}
