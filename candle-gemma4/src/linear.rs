//! A projection.

use candle_core::{Result, Tensor};

/// `x W^T + b` over the last dimension.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    pub(crate) weight_oi: Tensor,
    pub(crate) bias_o: Option<Tensor>,
}

impl Linear {
    /// `[.., inputs]` to `[.., outputs]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (outputs, inputs) = self.weight_oi.dims2()?;
        let mut dims = x.dims().to_vec();
        // One matrix product over all rows: a batched one would copy the weight for every batch row.
        let rows = x.elem_count() / inputs;
        let y = x.reshape((rows, inputs))?.matmul(&self.weight_oi.t()?)?;
        let y = match &self.bias_o {
            Some(bias_o) => y.broadcast_add(bias_o)?,
            None => y,
        };
        if let Some(last) = dims.last_mut() {
            *last = outputs;
        }
        y.reshape(dims)
    }
}
