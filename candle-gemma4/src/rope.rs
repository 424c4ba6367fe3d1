//! Rotary position embedding of one or two axes.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::norm::wide;

/// Cosines and sines of every token, for heads whose dimensions are cut into one section per axis. In a section of
/// size `n`, dimension `i` turns together with dimension `i + n / 2`.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    cos_bsd: Tensor,
    /// Sines with the sign of the dimension they are multiplied with: minus in the first half of each section.
    signed_sin_bsd: Tensor,
    sections: usize,
}

impl Rope {
    /// `axes`: one tensor of positions `[batch, tokens]` per axis; `frequencies`: angle per position of each pair
    /// of dimensions in a section.
    pub(crate) fn new(axes: &[Tensor], frequencies: &[f64], dtype: DType, device: &Device) -> Result<Self> {
        let angle_type = wide(dtype);
        let frequencies = Tensor::new(frequencies, device)?.to_dtype(angle_type)?;
        let mut cos = Vec::with_capacity(2 * axes.len());
        let mut sin = Vec::with_capacity(2 * axes.len());
        for positions_bs in axes {
            let positions = positions_bs.to_dtype(angle_type)?.unsqueeze(D::Minus1)?;
            let angles = positions.broadcast_mul(&frequencies)?;
            let (cos_half, sin_half) = (angles.cos()?, angles.sin()?);
            cos.extend([cos_half.clone(), cos_half]);
            sin.extend([sin_half.neg()?, sin_half]);
        }
        Ok(Self {
            cos_bsd: Tensor::cat(&cos, D::Minus1)?.to_dtype(dtype)?,
            signed_sin_bsd: Tensor::cat(&sin, D::Minus1)?.to_dtype(dtype)?,
            sections: axes.len(),
        })
    }

    /// Turns the heads of `x [batch, tokens, heads, head size]`.
    pub(crate) fn apply(&self, x_bshd: &Tensor) -> Result<Tensor> {
        let turned = x_bshd.broadcast_mul(&self.cos_bsd.unsqueeze(2)?)?;
        let swapped = swap_halves(x_bshd, self.sections)?;
        turned + swapped.broadcast_mul(&self.signed_sin_bsd.unsqueeze(2)?)?
    }

    /// The cosines `[batch, tokens, head size]`.
    pub(crate) fn cos(&self) -> &Tensor {
        &self.cos_bsd
    }

    /// The sines `[batch, tokens, head size]`, as the textbook has them.
    pub(crate) fn sin(&self) -> Result<Tensor> {
        let half = self.signed_sin_bsd.dim(D::Minus1)? / self.sections / 2;
        let mut parts = Vec::with_capacity(2 * self.sections);
        for section in 0..self.sections {
            let positive = self.signed_sin_bsd.narrow(D::Minus1, (2 * section + 1) * half, half)?;
            parts.extend([positive.clone(), positive]);
        }
        Tensor::cat(&parts, D::Minus1)
    }
}

/// Exchanges the two halves of every section of the last dimension.
fn swap_halves(x: &Tensor, sections: usize) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / sections / 2;
    let mut parts = Vec::with_capacity(2 * sections);
    for section in 0..sections {
        parts.push(x.narrow(D::Minus1, (2 * section + 1) * half, half)?);
        parts.push(x.narrow(D::Minus1, 2 * section * half, half)?);
    }
    Tensor::cat(&parts, D::Minus1)
}
