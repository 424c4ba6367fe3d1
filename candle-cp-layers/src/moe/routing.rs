//! Which experts every row goes to, from a router's scores.

use std::cmp::Ordering;
use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor, bail};

use super::{Dispatch, RealRows};
use crate::tap::{Tap, record_numbered};

/// What a router decided for the rows of a rank.
#[derive(Debug, Clone)]
pub struct Routing {
    /// Which rows go to which expert.
    pub dispatch: Arc<Dispatch>,
    /// `[real rows, top_k]`, best expert first, in the type of the scores; leads back to them.
    pub weights_rk: Tensor,
    /// `[real rows, top_k]` flattened: the chosen experts, best first.
    pub chosen_rk: Vec<u32>,
    logits_re: Tensor,
    real: RealRows,
    /// Dimensions of the router's input but the last.
    leading: Vec<usize>,
}

impl Routing {
    /// Routes `x [.., hidden]`, which has as many rows as `real` knows, to `top_k` experts each. `logits` gives the
    /// scores `[n, experts]`, in f32 or f64, of `n` rows `[n, hidden]`. Weights are the softmax over the chosen logits,
    /// which is what softmax over all of them gives after the chosen are scaled to sum 1; `scaled` may change them: it gets
    /// weights and chosen experts, both `[n, top_k]`.
    ///
    /// A NaN in a row makes all weights of that row NaN, and with them the experts' output; it disturbs no other row.
    ///
    /// # Errors
    /// Another number of rows or another width; and those of the functions.
    pub fn new(
        x: &Tensor,
        real: &RealRows,
        [hidden, top_k]: [usize; 2],
        logits: impl FnOnce(&Tensor) -> Result<Tensor>,
        scaled: impl FnOnce(Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
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
        let logits_re = logits(&x_rh)?;
        let experts = logits_re.dim(1)?;
        let mut chosen_rk = choose(&logits_re, top_k)?;
        let chosen = Tensor::from_slice(&chosen_rk, (logits_re.dim(0)?, top_k), x.device())?;
        let weights_rk = scaled(shares(&logits_re.gather(&chosen, 1)?)?, &chosen)?.narrow(0, 0, real.len())?;
        chosen_rk.truncate(real.len() * top_k);
        Ok(Self {
            dispatch: Arc::new(Dispatch::new(real, top_k, experts, &chosen_rk)?),
            weights_rk,
            chosen_rk,
            logits_re: logits_re.detach().narrow(0, 0, real.len())?,
            real: real.clone(),
            leading: leading.to_vec(),
        })
    }
}

/// Softmax over the last dimension, the first of which is the largest.
fn shares(logits_rk: &Tensor) -> Result<Tensor> {
    let largest = logits_rk.narrow(1, 0, 1)?.detach();
    let shares = logits_rk.broadcast_sub(&largest)?.exp()?;
    shares.broadcast_div(&shares.sum_keepdim(D::Minus1)?)
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
    ///
    /// # Errors
    /// The tap's.
    pub fn record(&self, layer: usize, tap: &mut dyn Tap) -> Result<()> {
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

/// Indices as Hugging Face has them: i64.
fn integers(values: &[u32], shape: (usize, usize)) -> Result<Tensor> {
    Tensor::from_slice(values, shape, &Device::Cpu)?.to_dtype(DType::I64)
}
