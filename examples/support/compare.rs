//! Comparison of a run with the tensors of a case file, name by name.

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::case::{Case, GIVEN, Tensors};
use crate::report::{Comparison, Report, compare};
use crate::tolerance::{GRADIENT, RowKind, of_model_tensor, rows_of};

/// Beginnings of the names that are results of a model, as opposed to inputs.
const RESULTS: [&str; 7] = ["mask.", "rope.", "vision.", "audio.", "mid.", "router.", "out."];

fn is_result(name: &str) -> bool {
    RESULTS.iter().any(|prefix| name.starts_with(prefix))
}

/// Whether the file holds anything that a run could be compared with.
pub fn has_results(case: &Case) -> bool {
    case.tensors().keys().any(|name| is_result(name))
}

/// Compares every tensor of the case file that is not one of its inputs. A result that the run did not produce fails;
/// what cannot be compared is noted with the reason.
///
/// # Errors
/// Inputs of the case that are malformed (they decide which rows are padding).
pub fn compare_case(case: &Case, computed: &Tensors) -> Result<Report> {
    let rows = KeptRows::new(case)?;
    let targets = match case.get("out.num_valid").or(computed.get("out.num_valid")) {
        Some(count) => count.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?,
        None => 1.0,
    };
    let mut report = Report::default();
    for (name, expected) in case.tensors().iter().filter(|(name, _)| !GIVEN.contains(&name.as_str())) {
        let Some(tolerance) = of_model_tensor(name, targets) else {
            report.skip(name, no_rule_reason(name));
            continue;
        };
        match computed.get(name) {
            Some(computed) => {
                let expected = expand_shared_row(name, expected, computed)?;
                report.add(compare(name, &expected, computed, tolerance, rows.of(name))?);
            }
            None => not_computed(case, name, &mut report),
        }
    }
    Ok(report)
}

fn no_rule_reason(name: &str) -> &'static str {
    match name {
        "out.positions" => "it names the rows of out.logits_at_positions",
        _ => "it is neither an input nor a result of a model case (a gradient is compared with --grads)",
    }
}

fn not_computed(case: &Case, name: &str, report: &mut Report) {
    let absent = |input: &str| case.get(input).is_none();
    if name.starts_with("input.") {
        report.skip(name, "the model does not read this input");
    } else if name.starts_with("vision.") && absent("input.pixel_values") {
        report.skip(name, "the file has no input.pixel_values");
    } else if (name.starts_with("out.loss") || name == "out.num_valid" || name == "out.token_loss")
        && absent("input.labels")
    {
        report.skip(name, "the file has no input.labels");
    } else {
        report.add(Comparison::problem(name, "the model computed no such tensor".into()));
    }
}

/// Files hold positions and rotary tables once, `[1, S, ..]`, where all rows of the batch share them.
fn expand_shared_row(name: &str, expected: &Tensor, computed: &Tensor) -> Result<Tensor> {
    let shared = name.starts_with("rope.") || name == "input.position_ids";
    let same_otherwise = expected.rank() == computed.rank() && expected.dims()[1..] == computed.dims()[1..];
    if shared && same_otherwise && expected.dims()[0] == 1 {
        return Ok(expected.broadcast_as(computed.dims())?);
    }
    Ok(expected.clone())
}

/// Flags of the rows that are compared; `None`: all.
struct KeptRows {
    tokens: Option<Vec<bool>>,
    /// Tokens once for each of the three axes of positions.
    axes: Option<Vec<bool>>,
    listed: Option<Vec<bool>>,
    patches: Option<Vec<bool>>,
}

impl KeptRows {
    fn new(case: &Case) -> Result<Self> {
        let tokens = match case.get("input.attention_mask") {
            Some(_) => Some(case.real_tokens()?.concat()),
            None => None,
        };
        let listed = match (&tokens, case.get("out.positions")) {
            (Some(real), Some(positions)) => {
                let positions = positions.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
                let real_at = |&p: &i64| usize::try_from(p).ok().and_then(|p| real.get(p)).copied().unwrap_or(true);
                Some(positions.iter().map(real_at).collect())
            }
            _ => None,
        };
        let patches = match case.get("input.image_position_ids") {
            Some(positions) => {
                let xy = positions.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
                Some(xy.chunks(2).map(|xy| xy[0] != -1).collect())
            }
            None => None,
        };
        let axes = tokens.as_ref().filter(|_| has_axes(case)).map(|real: &Vec<bool>| real.repeat(3));
        Ok(Self { tokens, axes, listed, patches })
    }

    fn of(&self, name: &str) -> Option<&[bool]> {
        match rows_of(name) {
            RowKind::Tokens => self.tokens.as_deref(),
            RowKind::Positions => self.axes.as_deref(),
            RowKind::ListedTokens => self.listed.as_deref(),
            RowKind::Patches => self.patches.as_deref(),
            RowKind::Other => None,
        }
    }
}

/// Whether the positions of a case are `[3, B, S]`, one for each axis.
fn has_axes(case: &Case) -> bool {
    case.get("input.position_ids").is_some_and(|positions| positions.rank() == 3)
}

/// Compares every gradient of the reference: parameters under their names, the merged embeddings as `inputs_embeds`.
/// A name that the model does not have, or that no gradient reached, fails.
///
/// # Errors
/// An error of Candle.
pub fn compare_gradients(reference: &Tensors, computed: &Tensors) -> Result<Report> {
    let mut report = Report::default();
    for (name, expected) in reference {
        match computed.get(name) {
            Some(computed) => report.add(compare(name, expected, computed, GRADIENT, None)?),
            None if is_result(name) || name.starts_with("input.") => report.skip(name, "it is no gradient"),
            None => {
                let problem = "the model has no trainable tensor of this name, or no gradient reached it";
                report.add(Comparison::problem(name, problem.into()));
            }
        }
    }
    for name in computed.keys().filter(|name| !reference.contains_key(*name)) {
        report.skip(name, "a gradient was computed, but the file has none of this name");
    }
    Ok(report)
}
