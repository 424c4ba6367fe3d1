//! The experts: gated MLPs side by side, each for the rows that chose it.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::Dispatch;
use super::composed;
use super::grouped::{Gather, Scatter};
use crate::fused::{self, Activation};
use crate::norm::wide;
use crate::weights::Weights;

/// Sum over a row's experts of `weight * down(activation(gate(x)) * up(x))`.
///
/// The routing weight is applied before `down`, where rows are narrower; what reaches the graph is then the gate and up
/// values and the activation of every assignment, as in the plain MLP. They are kept for backward, not recomputed:
/// [`Recompute`](crate::Recompute) is there for who wants the memory instead.
#[derive(Debug, Clone)]
pub struct Experts {
    /// `[experts, 2 * width, hidden]`; the rows of the gate come first.
    pub gate_up_ewh: Tensor,
    /// `[experts, hidden, width]`
    pub down_ehw: Tensor,
    /// On the gate.
    pub activation: Activation,
}

impl Experts {
    /// `prefix` is that of the block, such as `model.layers.0.mlp.experts`; so many experts of this width.
    pub fn new(
        prefix: &str,
        hidden: usize,
        (experts, width): (usize, usize),
        activation: Activation,
        weights: &Weights,
    ) -> crate::error::Result<Self> {
        let get = |name: &str, shape: &[usize]| weights.get(&format!("{prefix}.{name}"), shape);
        Ok(Self {
            gate_up_ewh: get("gate_up_proj", &[experts, 2 * width, hidden])?,
            activation,
            down_ehw: get("down_proj", &[experts, hidden, width])?,
        })
    }

    /// `[.., hidden]` to the same shape. `weights_rk` is `[real rows, top_k]`, f32 (f64 if `x` is f64); each counts for
    /// the expert at its place in what `dispatch` was made from.
    pub fn forward(&self, x: &Tensor, dispatch: &Arc<Dispatch>, weights_rk: &Tensor) -> Result<Tensor> {
        let (experts, _, hidden) = self.gate_up_ewh.dims3()?;
        if x.elem_count() != dispatch.rows * hidden || x.dims().last() != Some(&hidden) {
            bail!("experts for {} rows of width {hidden} got {:?}", dispatch.rows, x.dims());
        }
        if dispatch.experts != experts || weights_rk.dims() != [dispatch.real, dispatch.top_k] {
            bail!("{experts} experts got weights {:?} and a choice among {}", weights_rk.dims(), dispatch.experts);
        }
        let x_rh = x.reshape((dispatch.rows, hidden))?.contiguous()?;
        let (gate_up_ewh, down_ehw) = (self.gate_up_ewh.contiguous()?, self.down_ehw.contiguous()?);
        let y_rh = match x.device().is_cpu() {
            true => {
                let gate_up_aw = x_rh.apply_op2(&gate_up_ewh, Gather::new(dispatch))?.to_dtype(wide(x.dtype()))?;
                let active_aw = fused::expert_gate(&gate_up_aw, weights_rk, &dispatch.slot, self.activation)?
                    .to_dtype(x.dtype())?;
                active_aw.apply_op2(&down_ehw, Scatter::new(dispatch))?
            }
            false => composed::experts(&x_rh, (&gate_up_ewh, &down_ehw), dispatch, weights_rk, self.activation)?,
        };
        y_rh.reshape(x.shape())
    }
}
