//! What an adapter computes.

use candle_core::{Result, Shape, Tensor};

use super::dropout::Dropout;
use crate::linear::project;

/// The adapter of one projection.
#[derive(Debug, Clone)]
pub(crate) struct Adapter {
    /// `[rank, inputs]`.
    pub(crate) a_ri: Tensor,
    /// `[outputs, rank]`.
    pub(crate) b_or: Tensor,
    /// On the result: alpha over rank.
    pub(crate) scale: f64,
    /// `None`: nothing is dropped.
    pub(crate) dropout: Option<Dropout>,
}

impl Adapter {
    /// Adds `scale * B(A(dropout(x)))` to `y`, the projection's own result for `x`, in the adapter's type, and returns it in the
    /// type of `y`.
    pub(crate) fn add_to(&self, y: &Tensor, x: &Tensor) -> Result<Tensor> {
        let dtype = self.a_ri.dtype();
        let (rank, inputs) = self.a_ri.dims2()?;
        let rows = x.elem_count() / inputs;
        let x = x.to_dtype(dtype)?;
        let x = match &self.dropout {
            Some(dropout) => dropout.apply(&x, inputs)?,
            None => x,
        };
        // The factor is applied where rows are narrowest.
        let low_nr = (project(&x, &self.a_ri, Shape::from((rows, rank)))? * self.scale)?;
        let added = project(&low_nr, &self.b_or, y.shape().clone())?;
        (y.to_dtype(dtype)? + added)?.to_dtype(y.dtype())
    }

    /// For a projection that gets only the rows at these indices among those that the model works on.
    pub(crate) fn select(self, rows: &[u32]) -> Self {
        let dropout = self.dropout.map(|dropout| dropout.select(rows));
        Self { dropout, ..self }
    }

    /// `scale * B A`, `[outputs, inputs]`.
    pub(crate) fn product_oi(&self) -> Result<Tensor> {
        self.b_or.detach().matmul(&self.a_ri.detach())? * self.scale
    }
}
