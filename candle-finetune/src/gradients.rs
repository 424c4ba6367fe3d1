//! Named gradients: collected from the graph, summed over ranks, measured, clipped.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Tensor, Var};
use candle_cp::Communicator;

use crate::error::Result;
use crate::optimizer::state_dtype;

/// Gradients by parameter name, in f32 (f64 for f64 parameters).
#[derive(Debug, Clone)]
pub struct Gradients {
    named: BTreeMap<String, Tensor>,
}

impl Gradients {
    /// One gradient per variable; zeros for a variable that the graph does not reach.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn collect(store: &GradStore, variables: &BTreeMap<String, Var>) -> Result<Self> {
        let gradient = |var: &Var| match store.get(var.as_tensor()) {
            Some(gradient) => gradient.to_dtype(state_dtype(var.dtype())),
            None => Tensor::zeros(var.shape(), state_dtype(var.dtype()), var.device()),
        };
        let named = variables.iter().map(|(name, var)| Ok((name.clone(), gradient(var)?)));
        Ok(Self { named: named.collect::<Result<_>>()? })
    }

    /// Takes gradients as they are.
    pub fn from_named(named: BTreeMap<String, Tensor>) -> Self {
        Self { named }
    }

    /// The gradients, in name order.
    pub fn named(&self) -> &BTreeMap<String, Tensor> {
        &self.named
    }

    /// The sum over ranks, the same bits on every rank. One exchange per type: the gradients travel as one buffer, in
    /// name order.
    ///
    /// # Errors
    /// A communicator error.
    pub fn sum_over_ranks(&self, comm: &dyn Communicator) -> Result<Self> {
        let mut sums = BTreeMap::new();
        for dtype in [DType::F32, DType::F64] {
            let same: Vec<_> = self.named.iter().filter(|(_, gradient)| gradient.dtype() == dtype).collect();
            if same.is_empty() {
                continue;
            }
            let flat = same.iter().map(|(_, gradient)| gradient.flatten_all());
            let flat = Tensor::cat(&flat.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
            let total = comm.all_reduce_sum(&flat)?;
            let mut start = 0;
            for (name, gradient) in same {
                let len = gradient.elem_count();
                sums.insert(name.clone(), total.narrow(0, start, len)?.reshape(gradient.shape())?);
                start += len;
            }
        }
        Ok(Self { named: sums })
    }

    /// Root of the sum of all squares, in f64.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn norm(&self) -> Result<f64> {
        let Some(first) = self.named.values().next() else { return Ok(0.0) };
        // Read back once: each reading waits for the device.
        let mut total = Tensor::zeros((), DType::F64, first.device())?;
        for gradient in self.named.values() {
            total = (total + sum_of_squares(gradient)?)?;
        }
        Ok(total.to_scalar::<f64>()?.sqrt())
    }

    /// Scales all gradients by the same factor so that their norm is at most `max_norm`; `norm` is what
    /// [`Gradients::norm`] gave.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn clip(self, norm: f64, max_norm: f64) -> Result<Self> {
        if norm <= max_norm {
            return Ok(self);
        }
        let factor = max_norm / norm;
        let scaled = self.named.into_iter().map(|(name, gradient)| Ok((name, (gradient * factor)?)));
        Ok(Self { named: scaled.collect::<Result<_>>()? })
    }

    /// The first parameter, in name order, whose gradient has an entry that is not finite, and that entry.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn not_finite(&self) -> Result<Option<(&str, f64)>> {
        for (name, gradient) in &self.named {
            let values = gradient.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
            if let Some(&value) = values.iter().find(|value| !value.is_finite()) {
                return Ok(Some((name, value)));
            }
        }
        Ok(None)
    }
}

/// Numbers that are widened at a time.
const PIECE: usize = 1 << 26;

/// In f64, as a scalar on the gradient's device.
pub(crate) fn sum_of_squares(gradient: &Tensor) -> candle_core::Result<Tensor> {
    let Some(&rows) = gradient.dims().first() else { return gradient.to_dtype(DType::F64)?.sqr() };
    let piece = (PIECE / (gradient.elem_count() / rows.max(1)).max(1)).clamp(1, rows.max(1));
    let mut total = Tensor::zeros((), DType::F64, gradient.device())?;
    for start in (0..rows).step_by(piece) {
        let squares = gradient.narrow(0, start, piece.min(rows - start))?.to_dtype(DType::F64)?.sqr()?;
        // Row by row first: a GPU gives each sum that is wanted to one block of threads.
        let of_rows = if squares.rank() > 1 { squares.sum(D::Minus1)? } else { squares };
        total = (total + of_rows.sum_all()?)?;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_cp::comm::threads;

    fn gradients(values: &[(&str, Tensor)]) -> Gradients {
        Gradients::from_named(values.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect())
    }

    #[test]
    fn absent_gradients_are_zeros() -> Result<()> {
        let used = Var::new(&[1.0f32, 2.0], &Device::Cpu)?;
        let unused = Var::new(&[[5.0f32]], &Device::Cpu)?;
        let variables = BTreeMap::from([("b".to_string(), used.clone()), ("a".to_string(), unused)]);
        let store = used.sqr()?.sum_all()?.backward()?;
        let gradients = Gradients::collect(&store, &variables)?;
        assert_eq!(gradients.named().keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(gradients.named()["a"].to_vec2::<f32>()?, [[0.0]]);
        assert_eq!(gradients.named()["b"].to_vec1::<f32>()?, [2.0, 4.0]);
        Ok(())
    }

    #[test]
    fn clipping_keeps_the_direction_and_leaves_short_ones_alone() -> Result<()> {
        let device = Device::Cpu;
        let long = gradients(&[("a", Tensor::new(&[3.0f32], &device)?), ("b", Tensor::new(&[[4.0f64]], &device)?)]);
        assert_eq!(long.norm()?, 5.0);
        let clipped = long.clone().clip(5.0, 1.0)?;
        assert!((clipped.named()["a"].to_vec1::<f32>()?[0] - 0.6).abs() < 1e-7);
        assert!((clipped.named()["b"].to_vec2::<f64>()?[0][0] - 0.8).abs() < 1e-12);
        assert!((clipped.norm()? - 1.0).abs() < 1e-7);
        assert_eq!(long.clone().clip(5.0, 5.0)?.named()["a"].to_vec1::<f32>()?, [3.0]);
        Ok(())
    }

    #[test]
    fn ranks_get_the_same_sums_for_both_types() -> Result<()> {
        let sums = threads::run(3, &threads::Options::default(), |comm| {
            let mine = comm.rank() as f64 + 1.0;
            let a = Tensor::new(&[[mine, 10.0 * mine]], &Device::Cpu)?;
            let b = Tensor::new(&[mine as f32], &Device::Cpu)?;
            let c = Tensor::new(&[[[100.0 * mine as f32]]], &Device::Cpu)?;
            let sum = gradients(&[("a", a), ("b", b), ("c", c)]).sum_over_ranks(comm.as_ref())?;
            let get = |name: &str| sum.named()[name].flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
            assert_eq!(sum.named()["c"].dims(), [1, 1, 1]);
            Ok::<_, crate::Error>([get("a")?, get("b")?, get("c")?])
        })?;
        assert_eq!(sums, vec![[vec![6.0, 60.0], vec![6.0], vec![600.0]]; 3]);
        Ok(())
    }

    #[test]
    fn the_first_bad_gradient_is_named() -> Result<()> {
        let device = Device::Cpu;
        let good = Tensor::new(&[1.0f32, 2.0], &device)?;
        let bad = Tensor::new(&[1.0f32, f32::INFINITY], &device)?;
        assert_eq!(gradients(&[("a", good.clone())]).not_finite()?, None);
        let found = gradients(&[("a", good), ("b", bad.clone()), ("c", bad)]);
        assert_eq!(found.not_finite()?, Some(("b", f64::INFINITY)));
        Ok(())
    }
}
