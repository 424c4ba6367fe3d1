//! Root-mean-square normalization.

use candle_core::{D, DType, Result, Tensor};

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in f32 (f64 for f64 input).
///
/// Put together from plain operations: candle-nn's fused norm has no backward pass.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    /// Plain multiplier, not `1 + weight`; `None` for none.
    pub(crate) weight: Option<Tensor>,
    pub(crate) eps: f64,
}

impl RmsNorm {
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dtype = wide(x.dtype());
        let x_wide = x.to_dtype(dtype)?;
        let mean_square = (x_wide.sqr()?.mean_keepdim(D::Minus1)? + self.eps)?;
        let normed = x_wide.broadcast_mul(&mean_square.powf(-0.5)?)?;
        let scaled = match &self.weight {
            Some(weight) => normed.broadcast_mul(&weight.to_dtype(dtype)?)?,
            None => normed,
        };
        scaled.to_dtype(x.dtype())
    }
}

/// The type that sums are formed in.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
