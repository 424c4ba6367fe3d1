//! The router: which experts a token goes to, and how much each counts.

use std::cmp::Ordering;
use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor, bail};

use super::{Dispatch, RealRows, integers};
use crate::config::MoeConfig;
use crate::linear::Linear;
use crate::lora::Adapter;
use crate::norm::{RmsNorm, wide};
use crate::tap::{Tap, record_numbered};
use crate::weights::Weights;

/// Scores all experts for each row and keeps the best `top_k`, whose weights sum to 1 before `per_expert_scale`.
///
/// Everything is computed in f32 (f64 for f64).
/// DIFFERENCE: Hugging Face forms the logits in the model's type; in a short one many of them would be equal.
#[derive(Debug, Clone)]
pub(crate) struct Router {
    pub(crate) proj: Linear,
    pub(crate) scale_h: Tensor,
    pub(crate) per_expert_scale_e: Tensor,
    pub(crate) top_k: usize,
    pub(crate) eps: f64,
}

/// What a router decided for the rows of a rank.
#[derive(Debug, Clone)]
pub(crate) struct Routing {
    /// Which rows go to which expert.
    pub(crate) dispatch: Arc<Dispatch>,
    /// `[real rows, top_k]`, best expert first, f32 or f64; leads back to the router's weights and its input.
    pub(crate) weights_rk: Tensor,
    /// `[real rows, top_k]` flattened: the chosen experts, best first.
    pub(crate) chosen_rk: Vec<u32>,
    logits_re: Tensor,
    real: RealRows,
    /// Dimensions of the router's input but the last.
    leading: Vec<usize>,
}

impl Router {
    /// `prefix` is that of the layer.
    pub(crate) fn new(
        prefix: &str,
        hidden: usize,
        eps: f64,
        moe: &MoeConfig,
        weights: &Weights,
    ) -> crate::error::Result<Self> {
        let get = |name: &str, shape: &[usize]| weights.get(&format!("{prefix}.router.{name}"), shape);
        Ok(Self {
            proj: Linear::load(weights, &format!("{prefix}.router.proj.weight"), [moe.num_experts, hidden])?,
            scale_h: get("scale", &[hidden])?,
            per_expert_scale_e: get("per_expert_scale", &[moe.num_experts])?,
            top_k: moe.top_k,
            eps,
        })
    }

    /// Routes the residual stream as it is, `[.., hidden]`, which has as many rows as `real` knows.
    ///
    /// A NaN in a row makes all weights of that row NaN, and with them the experts' output; it disturbs no other row.
    pub(crate) fn forward(&self, x: &Tensor, real: &RealRows) -> Result<Routing> {
        let (experts, hidden) = self.proj.weight_oi.dims2()?;
        let leading = match x.dims() {
            [leading @ .., last] if *last == hidden && leading.iter().product::<usize>() == real.total() => leading,
            dims => bail!("a router for {} rows of width {hidden} got {dims:?}", real.total()),
        };
        // Candle takes operands without elements out of the graph: where no row is real, the router's weights stay in it
        // by a row of zeros, which is cut off below.
        let x_rh = match real.len() {
            0 => Tensor::zeros((1, hidden), x.dtype(), x.device())?,
            _ => real.select(&x.reshape((real.total(), hidden))?)?,
        };
        let logits_re = self.logits(&x_rh, real)?;
        let mut chosen_rk = choose(&logits_re, self.top_k)?;
        let weights_rk = self.weights(&logits_re, &chosen_rk)?.narrow(0, 0, real.len())?;
        chosen_rk.truncate(real.len() * self.top_k);
        Ok(Routing {
            dispatch: Arc::new(Dispatch::new(real, self.top_k, experts, &chosen_rk)?),
            weights_rk,
            chosen_rk,
            logits_re: logits_re.detach().narrow(0, 0, real.len())?,
            real: real.clone(),
            leading: leading.to_vec(),
        })
    }

    fn logits(&self, x_rh: &Tensor, real: &RealRows) -> Result<Tensor> {
        let dtype = wide(x_rh.dtype());
        let normed = RmsNorm { weight: None, eps: self.eps }.forward(&x_rh.to_dtype(dtype)?)?;
        let root = (x_rh.dim(1)? as f64).powf(-0.5);
        let scaled = (normed.broadcast_mul(&self.scale_h.to_dtype(dtype)?)? * root)?;
        let mut proj = Linear { weight_oi: self.proj.weight_oi.to_dtype(dtype)?, ..self.proj.clone() };
        proj.adapter = match (proj.adapter, &real.rows) {
            // The row of zeros.
            (Some(adapter), Some(rows)) if rows.is_empty() => Some(Adapter { dropout: None, ..adapter }),
            (Some(adapter), Some(rows)) => Some(adapter.select(rows)),
            (adapter, _) => adapter,
        };
        proj.forward(&scaled)
    }

    /// Softmax over the chosen logits: what softmax over all of them gives after the chosen are scaled to sum 1.
    fn weights(&self, logits_re: &Tensor, chosen_rk: &[u32]) -> Result<Tensor> {
        let rows = logits_re.dim(0)?;
        let device = logits_re.device();
        let chosen = Tensor::from_slice(chosen_rk, (rows, self.top_k), device)?;
        let logits_rk = logits_re.gather(&chosen, 1)?;
        let largest = logits_rk.narrow(1, 0, 1)?.detach();
        let shares = logits_rk.broadcast_sub(&largest)?.exp()?;
        let shares = shares.broadcast_div(&shares.sum_keepdim(D::Minus1)?)?;
        let scale_e = self.per_expert_scale_e.to_dtype(logits_re.dtype())?;
        shares * scale_e.index_select(&chosen.flatten_all()?, 0)?.reshape((rows, self.top_k))?
    }
}

/// The `top_k` largest of every row of `[rows, experts]`, in descending order.
///
/// DIFFERENCE: of equal ones the lower index comes first. `torch.topk`, which Hugging Face uses, promises no order, and
/// on the CPU it mostly prefers higher indices, but not always.
fn choose(logits_re: &Tensor, top_k: usize) -> Result<Vec<u32>> {
    let (rows, experts) = logits_re.dims2()?;
    let logits = logits_re.detach().to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    let mut chosen_rk = Vec::with_capacity(rows * top_k);
    let mut order: Vec<u32> = Vec::with_capacity(experts);
    for row in logits.chunks_exact(experts) {
        order.clear();
        order.extend(0..row.len() as u32);
        // NaN before all numbers, as a total order is needed; -0 and 0 are equal.
        let key = |index: &u32| row[*index as usize];
        let descending = |a: &u32, b: &u32| match (key(a), key(b)) {
            (x, y) if x.is_nan() || y.is_nan() => y.is_nan().cmp(&x.is_nan()),
            (x, y) => y.partial_cmp(&x).unwrap_or(Ordering::Equal),
        };
        let best_first = |a: &u32, b: &u32| descending(a, b).then(a.cmp(b));
        if top_k < order.len() {
            order.select_nth_unstable_by(top_k - 1, best_first);
            order.truncate(top_k);
        }
        order.sort_unstable_by(best_first);
        chosen_rk.extend_from_slice(&order);
    }
    Ok(chosen_rk)
}

impl Routing {
    /// Tells a tap about layer `layer`: `router.probs` over all experts, `router.top_k_index` (i64) and
    /// `router.top_k_weights`, each `[.., experts or top_k]` with the leading dimensions of the input. Padding rows have
    /// 0, and index -1.
    pub(crate) fn record(&self, layer: usize, tap: &mut dyn Tap) -> Result<()> {
        if !tap.is_on() {
            return Ok(());
        }
        let shaped = |x: &Tensor, fill: f64| {
            let width = x.dim(1)?;
            self.real.spread(x, fill)?.reshape([&self.leading[..], &[width]].concat())
        };
        let logits_re = &self.logits_re;
        let probs_re = match self.real.len() {
            0 => logits_re.clone(), // Candle has no maximum of nothing
            _ => {
                let shares_re = logits_re.broadcast_sub(&logits_re.max_keepdim(1)?)?.exp()?;
                shares_re.broadcast_div(&shares_re.sum_keepdim(1)?)?
            }
        };
        let index_rk = integers(&self.chosen_rk, self.weights_rk.dims2()?)?;
        record_numbered(tap, "router.probs", layer, &shaped(&probs_re, 0.0)?)?;
        record_numbered(tap, "router.top_k_index", layer, &shaped(&index_rk, -1.0)?)?;
        record_numbered(tap, "router.top_k_weights", layer, &shaped(&self.weights_rk, 0.0)?)
    }
}
