//! A projection.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, MetalStorage, Result, Shape, Tensor};

use crate::clip::Clip;
use crate::lora::Adapter;
use crate::weights::Weights;

/// `x W^T + b` over the last dimension, plus what its adapter adds, with `x` and the result cut to bounds if it has a
/// clip.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight_oi: Tensor,
    /// `[outputs]`.
    pub bias_o: Option<Tensor>,
    /// What its input and output are cut to.
    pub clip: Option<Clip>,
    /// What is trained in place of it.
    pub adapter: Option<Adapter>,
}

impl Linear {
    /// Without bias, bounds and adapter.
    pub fn plain(weight_oi: Tensor) -> Self {
        Self { weight_oi, bias_o: None, clip: None, adapter: None }
    }

    /// The matrix `[outputs, inputs]` of this name, with its adapter if it has one; without bias and bounds.
    pub fn load(weights: &Weights, matrix: &str, shape: [usize; 2]) -> crate::error::Result<Self> {
        let adapter = weights.adapter(matrix, shape)?;
        Ok(Self { adapter, ..Self::plain(weights.get(matrix, &shape)?) })
    }

    /// A projection of a tower: its matrix `[outputs, inputs]` and its bounds, if it is clipped, are under its name.
    pub fn clippable(weights: &Weights, name: &str, shape: [usize; 2], clipped: bool) -> crate::error::Result<Self> {
        let clip = clipped.then(|| Clip::new(weights, name)).transpose()?;
        Ok(Self { clip, ..Self::load(weights, &format!("{name}.linear.weight"), shape)? })
    }

    /// `[.., inputs]` to `[.., outputs]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let outputs = self.weight_oi.dim(0)?;
        self.project(x, &[outputs])
    }

    /// `[.., heads, head size]`, whose product is the number of inputs, to `[.., outputs]`.
    pub fn over_heads(&self, x: &Tensor) -> Result<Tensor> {
        let (outputs, inputs) = self.weight_oi.dims2()?;
        match x.dims() {
            [leading @ .., heads, head_dim] if heads * head_dim == inputs => self.project_rows(x, leading, &[outputs]),
            dims => candle_core::bail!("a projection of {inputs} inputs got heads of {dims:?}"),
        }
    }

    /// `[.., inputs]` to `[.., heads, head size]`.
    pub fn heads(&self, x: &Tensor, head_dim: usize) -> Result<Tensor> {
        let heads = self.weight_oi.dim(0)? / head_dim;
        self.project(x, &[heads, head_dim])
    }

    /// The last dimension becomes `outputs`, whose product is the number of outputs.
    fn project(&self, x: &Tensor, outputs: &[usize]) -> Result<Tensor> {
        let (_, inputs) = self.weight_oi.dims2()?;
        let leading = match x.dims() {
            [leading @ .., last] if *last == inputs => leading,
            dims => candle_core::bail!("a projection of {inputs} inputs got {dims:?}"),
        };
        self.project_rows(x, leading, outputs)
    }

    fn project_rows(&self, x: &Tensor, leading: &[usize], outputs: &[usize]) -> Result<Tensor> {
        let shape = Shape::from([leading, outputs].concat());
        let x = match &self.clip {
            Some(clip) => clip.input.clamp(x)?,
            None => x.clone(),
        };
        let x = x.contiguous()?;
        let y = match &self.adapter {
            Some(adapter) => adapter.project(&x, &self.weight_oi, shape)?,
            None => project(&x, &self.weight_oi, shape)?,
        };
        let y = match &self.bias_o {
            Some(bias_o) => y.broadcast_add(&bias_o.reshape(outputs)?)?,
            None => y,
        };
        match &self.clip {
            Some(clip) => clip.output.clamp(&y),
            None => Ok(y),
        }
    }
}

/// `x W^T` over all rows of `x`, whatever its dimensions, in the shape that is wanted.
pub fn project(x: &Tensor, weight_oi: &Tensor, shape: Shape) -> Result<Tensor> {
    x.contiguous()?.apply_op2(&weight_oi.contiguous()?, Project { shape })
}

/// One matrix product over all rows, in the shape that is wanted: as an operation of its own it leaves out the
/// reshapes and the transposed weight, each of which costs passes over memory in the backward pass.
struct Project {
    shape: Shape,
}

impl Project {
    fn forward<S: BackendStorage>(&self, x: &S, lx: &Layout, w: &S, lw: &Layout) -> Result<(S, Shape)> {
        let (outputs, inputs) = lw.shape().dims2()?;
        let rows = lx.shape().elem_count() / inputs;
        let x_layout = Layout::contiguous_with_offset((rows, inputs), lx.start_offset());
        let w_layout = Layout::contiguous_with_offset((outputs, inputs), lw.start_offset()).transpose(0, 1)?;
        let y = x.matmul(w, (1, rows, outputs, inputs), &x_layout, &w_layout)?;
        Ok((y, self.shape.clone()))
    }
}

impl CustomOp2 for Project {
    fn name(&self) -> &'static str {
        "project"
    }

    fn cpu_fwd(&self, x: &CpuStorage, lx: &Layout, w: &CpuStorage, lw: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward(x, lx, w, lw)
    }

    fn cuda_fwd(&self, x: &CudaStorage, lx: &Layout, w: &CudaStorage, lw: &Layout) -> Result<(CudaStorage, Shape)> {
        self.forward(x, lx, w, lw)
    }

    fn metal_fwd(&self, x: &MetalStorage, lx: &Layout, w: &MetalStorage, lw: &Layout) -> Result<(MetalStorage, Shape)> {
        self.forward(x, lx, w, lw)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (outputs, inputs) = w.dims2()?;
        let rows = x.elem_count() / inputs;
        let grad_ro = grad.reshape((rows, outputs))?;
        // Constants, such as frozen weights, get no gradient: it would cost a product as large as the other one.
        let x_grad = match x.track_op() {
            true => Some(grad_ro.matmul(&w.detach())?.reshape(x.shape())?),
            false => None,
        };
        let w_grad = match w.track_op() {
            true => Some(grad_ro.t()?.matmul(&x.reshape((rows, inputs))?.detach())?),
            false => None,
        };
        Ok((x_grad, w_grad))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Var};

    use super::*;
    use crate::fused::testing::{assert_close, random};

    #[test]
    fn projections_agree_with_plain_products() -> Result<()> {
        let x = Var::from_tensor(&random(&[2, 3, 5], DType::F64, 1)?)?;
        let weight = Var::from_tensor(&random(&[8, 5], DType::F64, 2)?)?;
        let bias = Var::from_tensor(&random(&[8], DType::F64, 3)?)?;
        let grad = random(&[2, 3, 4, 2], DType::F64, 4)?;
        let (weight_oi, bias_o) = (weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        let linear = Linear { bias_o, ..Linear::plain(weight_oi) };
        let found = linear.heads(&x, 2)?;
        let plain = x.reshape((6, 5))?.matmul(&weight.t()?)?.broadcast_add(&bias)?.reshape((2, 3, 4, 2))?;
        assert_close("y", &found, &plain, 1e-12)?;
        assert_close("y", &linear.forward(&x)?.reshape((2, 3, 4, 2))?, &plain, 1e-12)?;
        let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
        let (found, plain) = (gradients(&found)?, gradients(&plain)?);
        for var in [&x, &weight, &bias] {
            assert_close("gradient", found.get(var).unwrap(), plain.get(var).unwrap(), 1e-12)?;
        }
        let frozen = weight.detach();
        let store = Linear::plain(frozen.clone()).forward(&x)?.sum_all()?.backward()?;
        assert!(store.get(&frozen).is_none() && store.get(&x).is_some());
        let constant = linear.forward(&x.detach())?.sum_all()?.backward()?;
        assert_eq!(constant.get_ids().count(), 2, "of the weight and the bias, and no other");
        let swapped = x.transpose(0, 1)?;
        assert_close("y", &linear.forward(&swapped)?, &linear.forward(&swapped.contiguous()?)?, 0.0)?;
        let heads = x.reshape((2, 3, 1, 5))?;
        assert_close("y", &linear.over_heads(&heads)?, &linear.forward(&x)?, 0.0)?;
        assert!(linear.over_heads(&x).unwrap_err().to_string().contains("heads of [2, 3, 5]"));
        assert!(linear.forward(&weight.t()?).unwrap_err().to_string().contains("5 inputs got [5, 8]"));
        Ok(())
    }
}
