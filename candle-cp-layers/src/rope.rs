//! Rotary position embedding.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_cp::with_backward;

use crate::fused;
use crate::norm::wide;

/// Cosines and sines of every token, for heads whose first dimensions are cut into sections. In a section of size `n`,
/// dimension `i` turns together with dimension `i + n / 2`. Dimensions behind the sections stay as they are.
#[derive(Debug, Clone)]
pub struct Rope {
    cos_bsd: Tensor,
    /// Sines with the sign of the dimension they are multiplied with: minus in the first half of each section.
    signed_sin_bsd: Tensor,
    sections: usize,
}

impl Rope {
    /// `axes`: one tensor of positions `[batch, tokens]` per axis; `frequencies`: angle per position of each pair
    /// of dimensions in a section.
    pub fn new(axes: &[Tensor], frequencies: &[f64], dtype: DType, device: &Device) -> Result<Self> {
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

    /// One section, of twice the number of pairs, from the angle of every pair: `[batch, tokens, pairs]`.
    ///
    /// # Errors
    /// Another number of dimensions.
    pub fn from_angles(angles_bsp: &Tensor, dtype: DType) -> Result<Self> {
        let angles = angles_bsp.to_dtype(wide(dtype))?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        Ok(Self {
            cos_bsd: Tensor::cat(&[&cos, &cos], D::Minus1)?.to_dtype(dtype)?,
            signed_sin_bsd: Tensor::cat(&[&sin.neg()?, &sin], D::Minus1)?.to_dtype(dtype)?,
            sections: 1,
        })
    }

    /// Turns the heads of `x [batch, tokens, heads, head size]`.
    pub fn apply(&self, x_bshd: &Tensor) -> Result<Tensor> {
        match fused::applies(x_bshd) {
            true => fused::rotate(x_bshd, &self.cos_bsd, &self.signed_sin_bsd, self.sections),
            false => self.composed(x_bshd),
        }
    }

    /// By tensor operations. Backward turns the gradient back; nothing is kept for it but the tables.
    fn composed(&self, x_bshd: &Tensor) -> Result<Tensor> {
        let [cos_bs1d, sin_bs1d] = [self.cos_bsd.detach().unsqueeze(2)?, self.signed_sin_bsd.detach().unsqueeze(2)?];
        let sections = self.sections;
        let (head_dim, turning) = (x_bshd.dim(D::Minus1)?, cos_bs1d.dim(D::Minus1)?);
        let turn = move |x_bshd: &Tensor, back: bool| {
            let part = x_bshd.narrow(D::Minus1, 0, turning)?;
            let swapped = swap_halves(&part, sections)?.broadcast_mul(&sin_bs1d)?;
            let kept = part.broadcast_mul(&cos_bs1d)?;
            let turned = if back { kept - swapped } else { kept + swapped }?;
            match head_dim - turning {
                0 => Ok(turned),
                rest => Tensor::cat(&[&turned, &x_bshd.narrow(D::Minus1, turning, rest)?], D::Minus1),
            }
        };
        let y_bshd = turn(&x_bshd.detach(), false)?;
        with_backward("rotate", [x_bshd], y_bshd, move |_, grad| Ok([Some(turn(grad, true)?)]))
    }

    /// The cosines `[batch, tokens, dimensions that turn]`.
    pub fn cos(&self) -> &Tensor {
        &self.cos_bsd
    }

    /// The sines `[batch, tokens, dimensions that turn]`, as the textbook has them.
    pub fn sin(&self) -> Result<Tensor> {
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

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;
    use crate::fused::testing::{assert_close, random};

    #[test]
    fn one_pass_and_composed_ropes_agree_with_their_gradients() -> Result<()> {
        let device = &Device::Cpu;
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            for (axes, head_dim) in [(1, 6), (2, 12)] {
                let dims = [2, 400, 3, head_dim];
                let positions: Vec<u32> = (0..800).map(|token| token * 7 % 93).collect();
                let positions = Tensor::from_vec(positions, (2, 400), device)?;
                let axes: Vec<Tensor> = (0..axes).map(|axis| &positions + axis as f64).collect::<Result<_>>()?;
                let rope = Rope::new(&axes, &[0.7, 0.05, 0.0][..head_dim / axes.len() / 2], dtype, device)?;
                let x = Var::from_tensor(&random(&dims, dtype, 1)?)?;
                let grad = random(&dims, dtype, 2)?;
                let (fused, composed) = (rope.apply(&x)?, rope.composed(&x)?);
                assert_close("y", &fused, &composed, tolerance)?;
                let gradient =
                    |y: &Tensor| -> Result<Tensor> { Ok((y * &grad)?.sum_all()?.backward()?.get(&x).unwrap().clone()) };
                assert_close("dx", &gradient(&fused)?, &gradient(&composed)?, tolerance)?;
            }
        }
        Ok(())
    }

    #[test]
    fn dimensions_behind_the_sections_stay() -> Result<()> {
        let device = &Device::Cpu;
        let angles = random(&[2, 30, 3], DType::F64, 1)?;
        let rope = Rope::from_angles(&angles, DType::F64)?;
        let x = Var::from_tensor(&random(&[2, 30, 4, 10], DType::F64, 2)?)?;
        let grad = random(&[2, 30, 4, 10], DType::F64, 3)?;
        let (fused, composed) = (rope.apply(&x)?, rope.composed(&x)?);
        assert_close("y", &fused, &composed, 1e-12)?;
        assert_close("rest", &fused.narrow(3, 6, 4)?, &x.narrow(3, 6, 4)?, 0.0)?;
        let gradient =
            |y: &Tensor| -> Result<Tensor> { Ok((y * &grad)?.sum_all()?.backward()?.get(&x).unwrap().clone()) };
        assert_close("dx", &gradient(&fused)?, &gradient(&composed)?, 1e-12)?;
        // With the angles of positions it is the usual rope of a narrower head.
        let positions = Tensor::arange(0u32, 30, device)?.unsqueeze(0)?.repeat((2, 1))?;
        let frequencies = [0.7, 0.05, 0.01];
        let usual = Rope::new(std::slice::from_ref(&positions), &frequencies, DType::F64, device)?;
        let angles =
            positions.to_dtype(DType::F64)?.unsqueeze(2)?.broadcast_mul(&Tensor::new(&frequencies, device)?)?;
        let expected = usual.apply(&x.narrow(3, 0, 6)?)?;
        assert_close("y", &Rope::from_angles(&angles, DType::F64)?.apply(&x)?.narrow(3, 0, 6)?, &expected, 0.0)
    }

    #[test]
    fn dimensions_turn_in_pairs_across_the_halves_of_a_section() -> Result<()> {
        let device = &Device::Cpu;
        let at = |position: u32| Tensor::new(&[[position]], device);
        let x = Tensor::new(&[1.0f64, 0.0, 0.0, 2.0, 0.0, 3.0, 1.0, 0.0], device)?.reshape((1, 1, 1, 8))?;
        let rope = Rope::new(&[at(2)?, at(3)?], &[1.0, 0.5], DType::F64, device)?;
        let (s, c) = (f64::sin, f64::cos);
        let expected = [c(2.0), -2.0 * s(1.0), s(2.0), 2.0 * c(1.0), -s(3.0), 3.0 * c(1.5), c(3.0), 3.0 * s(1.5)];
        let expected = Tensor::new(&expected, device)?.reshape((1, 1, 1, 8))?;
        assert_close("y", &rope.apply(&x)?, &expected, 1e-12)?;
        let sines = Tensor::new(&[s(2.0), s(1.0), s(2.0), s(1.0), s(3.0), s(1.5), s(3.0), s(1.5)], device)?;
        assert_close("sin", &rope.sin()?.flatten_all()?, &sines, 1e-12)
    }
}
