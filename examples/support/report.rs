//! Differences of tensors, and the table that shows them.

use std::fmt;

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::tolerance::Tolerance;

/// The outcome of one tensor.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Name of the tensor.
    pub name: String,
    /// Entries that were compared.
    pub compared: usize,
    /// Largest absolute difference.
    pub max_abs: f64,
    /// Largest absolute difference over the largest absolute entry of the expected tensor.
    pub max_rel: f64,
    /// Where the largest difference is: its index in the expected tensor. Empty if nothing differs.
    pub at: Vec<usize>,
    /// The difference that passes at that place.
    pub allowed: f64,
    /// Entries past the tolerance.
    pub failed: usize,
    /// Why the tensors could not be compared entry by entry; counts as a failure.
    pub problem: Option<String>,
}

impl Comparison {
    /// A tensor that fails as a whole.
    pub fn problem(name: &str, problem: String) -> Self {
        let (max_abs, max_rel, allowed) = (f64::NAN, f64::NAN, 0.0);
        let (name, problem) = (name.to_string(), Some(problem));
        Self { name, compared: 0, max_abs, max_rel, at: vec![], allowed, failed: 0, problem }
    }

    /// Whether every compared entry is within its tolerance.
    pub fn passed(&self) -> bool {
        self.failed == 0 && self.problem.is_none()
    }
}

/// Compares two tensors of one shape. `keep` selects rows: it has one flag for each index of the leading axes (taken
/// together), and the entries of a row whose flag is false are left out.
///
/// A NaN on either side fails; equal infinities agree. Tensors of different shapes fail.
///
/// # Errors
/// An error of Candle.
pub fn compare(
    name: &str,
    expected: &Tensor,
    computed: &Tensor,
    tolerance: Tolerance,
    keep: Option<&[bool]>,
) -> Result<Comparison> {
    if expected.dims() != computed.dims() {
        let problem = format!("expected shape {:?}, computed {:?}", expected.dims(), computed.dims());
        return Ok(Comparison::problem(name, problem));
    }
    let count = expected.elem_count();
    let rows = keep.map_or(1, <[bool]>::len);
    if !count.is_multiple_of(rows) {
        let problem = format!("shape {:?} does not consist of {rows} rows", expected.dims());
        return Ok(Comparison::problem(name, problem));
    }
    let width = count / rows.max(1);
    let expected_entries = entries(expected)?;
    let computed_entries = entries(computed)?;
    let kept = |i: &usize| keep.is_none_or(|keep| keep[i / width]);
    let finite = |&x: &f64| if x.is_finite() { x.abs() } else { 0.0 };
    let largest = (0..count).filter(kept).map(|i| finite(&expected_entries[i])).fold(0.0, f64::max);

    let (mut compared, mut failed, mut max_abs, mut worst) = (0, 0, 0.0, None);
    for i in (0..count).filter(kept) {
        let difference = difference(expected_entries[i], computed_entries[i]);
        compared += 1;
        failed += usize::from(difference > tolerance.allowed(expected_entries[i], largest));
        if difference > max_abs {
            (max_abs, worst) = (difference, Some(i));
        }
    }
    Ok(Comparison {
        name: name.to_string(),
        compared,
        max_abs,
        max_rel: if max_abs == 0.0 { 0.0 } else { max_abs / largest },
        at: worst.map_or_else(Vec::new, |i| index_of(i, expected.dims())),
        allowed: tolerance.allowed(worst.map_or(0.0, |i| expected_entries[i]), largest),
        failed,
        problem: None,
    })
}

fn entries(x: &Tensor) -> Result<Vec<f64>> {
    Ok(x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

fn difference(expected: f64, computed: f64) -> f64 {
    if expected == computed {
        return 0.0;
    }
    let difference = (expected - computed).abs();
    if difference.is_nan() { f64::INFINITY } else { difference }
}

fn index_of(flat: usize, dims: &[usize]) -> Vec<usize> {
    let mut rest = flat;
    let mut index = vec![0; dims.len()];
    for (position, &size) in index.iter_mut().zip(dims).rev() {
        *position = rest % size;
        rest /= size;
    }
    index
}

/// The outcome of a run: one line per tensor, and what was not compared.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The tensors that were compared, in the order of the table.
    pub comparisons: Vec<Comparison>,
    /// Names of tensors that were not compared, with the reason.
    pub not_compared: Vec<(String, String)>,
}

impl Report {
    /// Whether at least one entry was compared and all are within their tolerances.
    pub fn passed(&self) -> bool {
        self.comparisons.iter().any(|c| c.compared > 0) && self.comparisons.iter().all(Comparison::passed)
    }

    /// Adds a comparison; one without any row left is noted as not compared.
    pub fn add(&mut self, comparison: Comparison) {
        if comparison.compared == 0 && comparison.problem.is_none() {
            self.skip(&comparison.name, "it has no entry outside padding");
        } else {
            self.comparisons.push(comparison);
        }
    }

    /// Notes a tensor that was not compared.
    pub fn skip(&mut self, name: &str, reason: &str) {
        self.not_compared.push((name.to_string(), reason.to_string()));
    }

    /// The comparison of a tensor by its name.
    pub fn get(&self, name: &str) -> Option<&Comparison> {
        self.comparisons.iter().find(|c| c.name == name)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.comparisons.iter().map(|c| c.name.len()).max().unwrap_or(0).max(6);
        writeln!(
            f,
            "{:width$}  {:>9}  {:>9}  {:>9}  {:>9}  result",
            "tensor", "entries", "max abs", "max rel", "allowed"
        )?;
        for c in &self.comparisons {
            let line = (&c.name, c.compared, c.max_abs, c.max_rel, c.allowed);
            write!(f, "{:width$}  {:>9}  {:>9.2e}  {:>9.2e}  {:>9.2e}  ", line.0, line.1, line.2, line.3, line.4)?;
            match &c.problem {
                Some(problem) => writeln!(f, "FAIL: {problem}")?,
                None if c.failed > 0 => writeln!(f, "FAIL: {} entries, worst at {:?}", c.failed, c.at)?,
                None if c.at.is_empty() => writeln!(f, "ok, equal")?,
                None => writeln!(f, "ok, worst at {:?}", c.at)?,
            }
        }
        for (name, reason) in &self.not_compared {
            writeln!(f, "{name:width$}  not compared: {reason}")?;
        }
        let failed = self.comparisons.iter().filter(|c| !c.passed()).count();
        let (all, skipped) = (self.comparisons.len(), self.not_compared.len());
        writeln!(f, "{all} tensors compared, {failed} past tolerance, {skipped} not compared")?;
        writeln!(f, "(max rel: the largest difference over the largest entry of the expected tensor)")
    }
}
