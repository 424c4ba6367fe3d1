//! Matrix products per expert by tensor operations, for devices that the products of [`super::grouped`] do not run on.
//!
//! Which rows go to which expert is known on the host, so every expert that has rows is a product of its own. Products
//! are in the type of their inputs; sums over a row's experts run in f32 (f64 for f64), in the order of experts.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_cp::with_backward;

use super::Dispatch;
use super::dispatch::Group;
use super::grouped::Side;
use crate::fused::{self, Activation};
use crate::norm::wide;

/// `[rows, hidden]` to the same: what [`super::Experts`] compute with `gate_up [experts, 2 * width, hidden]` and `down
/// [experts, hidden, width]`.
pub(super) fn experts(
    x_rh: &Tensor,
    (gate_up_ewh, down_ehw): (&Tensor, &Tensor),
    dispatch: &Arc<Dispatch>,
    weights_rk: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    if dispatch.len() == 0 {
        // Not every device sums over nothing.
        let y_rh = x_rh.zeros_like()?;
        return with_backward("no-experts", [x_rh, gate_up_ewh, down_ehw], y_rh, |inputs, _| {
            let zeros = inputs.map(|input| input.track_op().then(|| input.zeros_like()).transpose());
            let [x_grad, gate_up_grad, down_grad] = zeros;
            Ok([x_grad?, gate_up_grad?, down_grad?])
        });
    }
    let gate_up_aw = gather(x_rh, gate_up_ewh, dispatch)?.to_dtype(wide(x_rh.dtype()))?;
    let active_aw =
        fused::composed_expert_gate(&gate_up_aw, weights_rk, &dispatch.slot, activation)?.to_dtype(x_rh.dtype())?;
    scatter(&active_aw, down_ehw, dispatch)
}

/// `[rows, inputs]` and `[experts, outputs, inputs]` to `[assignments, outputs]`.
fn gather(x_ri: &Tensor, w_eoi: &Tensor, dispatch: &Arc<Dispatch>) -> Result<Tensor> {
    let y_ao = gathered(dispatch, &x_ri.detach(), &w_eoi.detach(), Side::OutputsFirst)?;
    let dispatch = dispatch.clone();
    with_backward("gather-to-experts", [x_ri, w_eoi], y_ao, move |[x_ri, w_eoi], grad| {
        let x_grad = scattered(&dispatch, grad, &w_eoi.detach(), Side::InputsFirst)?;
        let of_weight = || weight_gradient(&dispatch, grad, &x_ri.detach(), Side::OutputsFirst);
        Ok([Some(x_grad), w_eoi.track_op().then(of_weight).transpose()?])
    })
}

/// `[assignments, inputs]` and `[experts, outputs, inputs]` to `[rows, outputs]`.
fn scatter(x_ai: &Tensor, w_eoi: &Tensor, dispatch: &Arc<Dispatch>) -> Result<Tensor> {
    let y_ro = scattered(dispatch, &x_ai.detach(), &w_eoi.detach(), Side::OutputsFirst)?;
    let dispatch = dispatch.clone();
    with_backward("scatter-from-experts", [x_ai, w_eoi], y_ro, move |[x_ai, w_eoi], grad| {
        let x_grad = gathered(&dispatch, grad, &w_eoi.detach(), Side::InputsFirst)?;
        let of_weight = || weight_gradient(&dispatch, &x_ai.detach(), grad, Side::InputsFirst);
        Ok([Some(x_grad), w_eoi.track_op().then(of_weight).transpose()?])
    })
}

/// `[count, inputs]` times the matrix of an expert.
fn product(x_ni: &Tensor, w: &Tensor, group: &Group, side: Side) -> Result<Tensor> {
    let matrix = w.get(group.expert)?;
    match side {
        Side::OutputsFirst => x_ni.matmul(&matrix.t()?),
        Side::InputsFirst => x_ni.matmul(&matrix),
    }
}

/// The rows of an expert.
fn rows_of(x_rw: &Tensor, dispatch: &Dispatch, group: &Group) -> Result<Tensor> {
    x_rw.index_select(&Tensor::new(&dispatch.row[group.range.clone()], x_rw.device())?, 0)
}

fn gathered(dispatch: &Dispatch, x_rw: &Tensor, w: &Tensor, side: Side) -> Result<Tensor> {
    let x_rw = x_rw.contiguous()?;
    let parts = dispatch.groups.iter().map(|group| product(&rows_of(&x_rw, dispatch, group)?, w, group, side));
    Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)
}

fn scattered(dispatch: &Dispatch, x_aw: &Tensor, w: &Tensor, side: Side) -> Result<Tensor> {
    let (rows, dtype) = (dispatch.rows, x_aw.dtype());
    let parts = dispatch.groups.iter().map(|group| {
        let x_nw = x_aw.narrow(0, group.range.start, group.range.len())?.contiguous()?;
        product(&x_nw, w, group, side)?.to_dtype(wide(dtype))
    });
    let mut parts = parts.collect::<Result<Vec<_>>>()?;
    let outputs = w.dim(if side == Side::OutputsFirst { 1 } else { 2 })?;
    // What padding rows have in place of assignments.
    parts.push(Tensor::zeros((1, outputs), wide(dtype), x_aw.device())?);
    let mut assignments = vec![dispatch.len() as u32; rows * dispatch.top_k];
    let mut counts = vec![0; rows];
    for (assignment, &row) in (0..).zip(&dispatch.row) {
        let count = &mut counts[row as usize];
        assignments[row as usize * dispatch.top_k + *count] = assignment;
        *count += 1;
    }
    let assignments = Tensor::new(assignments, x_aw.device())?;
    let y_rko = Tensor::cat(&parts, 0)?.index_select(&assignments, 0)?.reshape((rows, dispatch.top_k, outputs))?;
    y_rko.sum(1)?.to_dtype(dtype)
}

/// `[assignments, a]` and `[rows, r]` to the sums of outer products per expert: `[experts, a, r]` with
/// [`Side::OutputsFirst`], `[experts, r, a]` with the other; 0 for an expert without rows.
fn weight_gradient(dispatch: &Dispatch, of_assignments: &Tensor, of_rows: &Tensor, side: Side) -> Result<Tensor> {
    let (a_width, r_width) = (of_assignments.dim(1)?, of_rows.dim(1)?);
    let (outer, inner) = if side == Side::OutputsFirst { (a_width, r_width) } else { (r_width, a_width) };
    let of_rows = of_rows.contiguous()?;
    let gradient = Tensor::zeros((dispatch.experts, outer, inner), of_rows.dtype(), of_rows.device())?;
    for group in &dispatch.groups {
        let a_nw = of_assignments.narrow(0, group.range.start, group.range.len())?.contiguous()?;
        let r_nw = rows_of(&of_rows, dispatch, group)?;
        let part = match side {
            Side::OutputsFirst => a_nw.t()?.matmul(&r_nw)?,
            Side::InputsFirst => r_nw.t()?.matmul(&a_nw)?,
        };
        gradient.slice_set(&part.unsqueeze(0)?, 0, group.expert)?;
    }
    Ok(gradient)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Var};

    use super::*;
    use crate::fused::testing::{assert_close, random};
    use crate::moe::{Experts, RealRows};

    #[test]
    fn agrees_with_the_products_on_the_cpu() -> Result<()> {
        let var = |dims: &[usize], seed| Var::from_tensor(&random(dims, DType::F64, seed)?);
        let (x, gate_up, down) = (var(&[6, 5], 1)?, var(&[4, 6, 5], 2)?, var(&[4, 5, 3], 3)?);
        let grad = random(&[6, 5], DType::F64, 4)?;
        // Expert 2 has no rows; one row is padding; then all of them are.
        for (real, chosen) in
            [(vec![true, true, false, true, true, true], vec![3, 0, 0, 1, 1, 3, 3, 1, 0, 3]), (vec![false; 6], vec![])]
        {
            let real = RealRows::from_mask(&real);
            let dispatch = Arc::new(Dispatch::new(&real, 2, 4, &chosen)?);
            let weights = Var::from_tensor(&random(&[5, 2], DType::F64, 5)?.narrow(0, 0, real.len())?.contiguous()?)?;
            let activation = if chosen.is_empty() { Activation::GeluTanh } else { Activation::Silu };
            let (gate_up_ewh, down_ehw) = (gate_up.as_tensor().clone(), down.as_tensor().clone());
            let experts_on_cpu = Experts { gate_up_ewh, down_ehw, activation };
            let expected = experts_on_cpu.forward(&x, &dispatch, &weights)?;
            let found = experts(&x, (&gate_up, &down), &dispatch, &weights, activation)?;
            assert_close("y", &found, &expected, 1e-12)?;
            let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
            let (found, expected) = (gradients(&found)?, gradients(&expected)?);
            if chosen.is_empty() {
                assert!([&x, &gate_up, &down].iter().all(|var| found.get(var).is_some()));
                continue;
            }
            for var in [&x, &gate_up, &down, &weights] {
                assert_close("gradient", found.get(var).unwrap(), expected.get(var).unwrap(), 1e-12)?;
            }
            let frozen = (gate_up.as_tensor().detach(), down.as_tensor().detach());
            let store = experts(&x, (&frozen.0, &frozen.1), &dispatch, &weights, activation)?.sum_all()?.backward()?;
            assert!(store.get(&frozen.0).is_none() && store.get(&frozen.1).is_none());
        }
        Ok(())
    }
}
