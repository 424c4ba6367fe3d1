//! What an adapted projection computes.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};
use candle_cp::with_backward;
use rayon::prelude::*;

use super::dropout::Dropout;
use crate::fused::{Real, TASK};
use crate::linear::project;

/// The adapter of one projection.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// `[rank, inputs]`.
    pub a_ri: Tensor,
    /// `[outputs, rank]`.
    pub b_or: Tensor,
    /// On the result: alpha over rank.
    pub scale: f64,
    /// `None`: nothing is dropped.
    pub dropout: Option<Dropout>,
}

impl Adapter {
    /// `x W^T + scale * B(A(dropout(x)))` over all rows of `x`, in the shape that is wanted and the type of `x`. The
    /// adapter computes in its own type. `W` gets no gradient.
    pub fn project(&self, x: &Tensor, weight_oi: &Tensor, shape: Shape) -> Result<Tensor> {
        let weight_oi = weight_oi.detach().contiguous()?;
        match x.device().is_cpu() {
            true => {
                let op = Adapted { adapter: self.clone(), weight_oi, shape };
                x.contiguous()?.apply_op3(&self.a_ri.contiguous()?, &self.b_or.contiguous()?, op)
            }
            false => self.on_device(x, weight_oi, shape),
        }
    }

    /// One operation for backward, whose value comes from single steps.
    fn on_device(&self, x: &Tensor, weight_oi: Tensor, shape: Shape) -> Result<Tensor> {
        let y = self.composed(&x.detach(), &weight_oi, shape)?;
        let adapter = self.clone();
        with_backward("adapted-project", [x, &self.a_ri, &self.b_or], y, move |[x, _, _], grad| {
            adapter.gradients(x, &weight_oi, grad)
        })
    }

    /// Gradients of `x`, if it is tracked, `A` and `B`.
    fn gradients(&self, x: &Tensor, weight_oi: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let (outputs, inputs) = weight_oi.dims2()?;
        let (dtype, rows) = (self.a_ri.dtype(), x.elem_count() / inputs);
        let grad_ro = grad.reshape((rows, outputs))?;
        let wide_ro = grad_ro.to_dtype(dtype)?;
        let x_ri = self.drop(&x.detach().to_dtype(dtype)?)?.reshape((rows, inputs))?;
        let low_nr = self.narrow(&x_ri)?.detach();
        let low_grad = (wide_ro.matmul(&self.b_or.detach())? * self.scale)?;
        let a_grad = low_grad.t()?.matmul(&x_ri)?;
        let b_grad = (wide_ro.t()?.matmul(&low_nr)? * self.scale)?;
        let x_grad = match x.track_op() {
            true => {
                let through = self.drop(&low_grad.matmul(&self.a_ri.detach())?)?;
                let direct = grad_ro.matmul(weight_oi)?.to_dtype(dtype)?;
                Some((direct + through)?.to_dtype(x.dtype())?.reshape(x.shape())?)
            }
            false => None,
        };
        Ok([x_grad, Some(a_grad), Some(b_grad)])
    }

    /// The same from single steps, each of which keeps its result for backward.
    fn composed(&self, x: &Tensor, weight_oi: &Tensor, shape: Shape) -> Result<Tensor> {
        let y = project(x, weight_oi, shape)?;
        let dtype = self.a_ri.dtype();
        let low_nr = (self.narrow(&self.drop(&x.to_dtype(dtype)?)?)? * self.scale)?;
        let added = project(&low_nr, &self.b_or, y.shape().clone())?;
        (y.to_dtype(dtype)? + added)?.to_dtype(y.dtype())
    }

    fn drop(&self, x: &Tensor) -> Result<Tensor> {
        match &self.dropout {
            Some(dropout) => dropout.apply(x, self.a_ri.dim(1)?),
            None => Ok(x.clone()),
        }
    }

    /// `A(x)`, `[rows, rank]`.
    fn narrow(&self, x: &Tensor) -> Result<Tensor> {
        let (rank, inputs) = self.a_ri.dims2()?;
        project(x, &self.a_ri, Shape::from((x.elem_count() / inputs, rank)))
    }

    /// For a projection that gets only the rows at these indices among those that the model works on.
    pub fn select(self, rows: &[u32]) -> Self {
        let dropout = self.dropout.map(|dropout| dropout.select(rows));
        Self { dropout, ..self }
    }

    /// `scale * B A`, `[outputs, inputs]`.
    pub fn product_oi(&self) -> Result<Tensor> {
        self.b_or.detach().matmul(&self.a_ri.detach())? * self.scale
    }
}

/// The adapted projection as one operation, of `x`, `A` and `B`: nothing as wide as the outputs is kept but the result,
/// and what the adapter adds is added in place.
struct Adapted {
    adapter: Adapter,
    weight_oi: Tensor,
    shape: Shape,
}

impl CustomOp3 for Adapted {
    fn name(&self) -> &'static str {
        "adapted-project"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        a: &CpuStorage,
        la: &Layout,
        b: &CpuStorage,
        lb: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (dtype, inputs) = (a.dtype(), self.weight_oi.dim(1)?);
        let rows = lx.shape().elem_count() / inputs;
        let (weight, lw) = self.weight_oi.storage_and_layout();
        let Storage::Cpu(weight) = &*weight else { bail!("the matrix of an adapted projection is on another device") };
        let y = product(x, lx.start_offset(), rows, weight, lw)?;
        let (wide_x, start) = match (&self.adapter.dropout, x.dtype() == dtype) {
            (None, true) => (None, lx.start_offset()),
            (None, false) => (Some(x.to_dtype(lx, dtype)?), 0),
            (Some(dropout), _) => (Some(dropout.apply_to(&x.to_dtype(lx, dtype)?, inputs)?), 0),
        };
        let low = product(wide_x.as_ref().unwrap_or(x), start, rows, a, la)?;
        let added = product(&low, 0, rows, b, lb)?;
        let layout = Layout::contiguous(self.shape.clone());
        let sum = match y.dtype() == dtype {
            true => add(y, &added, self.adapter.scale)?,
            false => add(y.to_dtype(&layout, dtype)?, &added, self.adapter.scale)?.to_dtype(&layout, x.dtype())?,
        };
        Ok((sum, self.shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        _a: &Tensor,
        _b: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [x_grad, a_grad, b_grad] = self.adapter.gradients(x, &self.weight_oi, grad)?;
        Ok((x_grad, a_grad, b_grad))
    }
}

/// `[rows, inputs]`, contiguous from `start`, times a contiguous `[outputs, inputs]`, transposed.
fn product(x: &CpuStorage, start: usize, rows: usize, w: &CpuStorage, lw: &Layout) -> Result<CpuStorage> {
    let (outputs, inputs) = lw.shape().dims2()?;
    let lx = Layout::contiguous_with_offset((rows, inputs), start);
    let lw = Layout::contiguous_with_offset((outputs, inputs), lw.start_offset()).transpose(0, 1)?;
    x.matmul(w, (1, rows, outputs, inputs), &lx, &lw)
}

/// `y + scale * added`, in the memory of `y`.
fn add(mut y: CpuStorage, added: &CpuStorage, scale: f64) -> Result<CpuStorage> {
    match (&mut y, added) {
        (CpuStorage::F32(y), CpuStorage::F32(added)) => add_numbers(y, added, scale as f32),
        (CpuStorage::F64(y), CpuStorage::F64(added)) => add_numbers(y, added, scale),
        _ => bail!("adapters compute in f32 and f64"),
    }
    Ok(y)
}

fn add_numbers<T: Real>(y: &mut [T], added: &[T], scale: T) {
    y.par_chunks_mut(TASK).zip(added.par_chunks(TASK)).for_each(|(y, added)| {
        y.iter_mut().zip(added).for_each(|(y, &added)| *y += added * scale);
    });
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Var};

    use super::*;
    use crate::fused::testing::{assert_close, random};
    use crate::lora::DropoutStep;

    fn adapter(dtype: DType, dropout: Option<Dropout>) -> Result<Adapter> {
        let var = |dims: &[usize], seed| {
            Ok::<_, candle_core::Error>(Var::from_tensor(&random(dims, dtype, seed)?)?.as_tensor().clone())
        };
        Ok(Adapter { a_ri: var(&[2, 5], 1)?, b_or: var(&[8, 2], 2)?, scale: 1.5, dropout })
    }

    #[test]
    fn one_operation_and_single_steps_agree() -> Result<()> {
        let step = DropoutStep { share: 0.4, seed: 1, step: 1, tokens: [].into() };
        for (base, dtype, tolerance) in
            [(DType::F64, DType::F64, 1e-12), (DType::F32, DType::F32, 1e-5), (DType::BF16, DType::F32, 0.25)]
        {
            for dropout in [None, Some(step.of_module("a", false))] {
                let adapter = adapter(dtype, dropout)?;
                let x = Var::from_tensor(&random(&[2, 3, 5], base, 3)?)?;
                let weight = random(&[8, 5], base, 4)?;
                let grad = random(&[2, 3, 4, 2], base, 5)?;
                let shape = || Shape::from((2, 3, 4, 2));
                let run =
                    |y: Tensor| Ok::<_, candle_core::Error>((y.to_dtype(dtype)?, (y * &grad)?.sum_all()?.backward()?));
                let (plain, plain_gradients) = run(adapter.composed(&x, &weight, shape())?)?;
                for found in [adapter.project(&x, &weight, shape())?, adapter.on_device(&x, weight.clone(), shape())?] {
                    assert_eq!(found.sorted_nodes().len(), 4, "the result, x, A and B");
                    let (found, found_gradients) = run(found)?;
                    assert_close("y", &found, &plain, tolerance)?;
                    for input in [x.as_tensor(), &adapter.a_ri, &adapter.b_or] {
                        let gradient =
                            |store: &candle_core::backprop::GradStore| store.get(input).unwrap().to_dtype(dtype);
                        assert_close(
                            "gradient",
                            &gradient(&found_gradients)?,
                            &gradient(&plain_gradients)?,
                            tolerance,
                        )?;
                        assert_eq!(found_gradients.get(input).unwrap().dtype(), input.dtype());
                    }
                    assert!(found_gradients.get(&weight).is_none() && plain_gradients.get(&weight).is_none());
                }
            }
        }
        Ok(())
    }

    #[test]
    fn constants_get_no_gradient_and_slices_are_read_where_they_start() -> Result<()> {
        let adapter = adapter(DType::F64, None)?;
        let (x, weight) = (random(&[6, 5], DType::F64, 3)?, random(&[16, 5], DType::F64, 4)?);
        let (x, weight) = (x.narrow(0, 2, 3)?, weight.narrow(0, 8, 8)?);
        let shape = || Shape::from((3, 8));
        let y = adapter.project(&x, &weight, shape())?;
        assert_close("y", &y, &adapter.composed(&x.copy()?, &weight.copy()?, shape())?, 1e-12)?;
        let store = y.sum_all()?.backward()?;
        assert!(store.get(&x).is_none() && store.get(&weight).is_none() && store.get(&adapter.a_ri).is_some());
        let merged = (&weight + adapter.product_oi()?)?;
        assert_close("merged", &x.matmul(&merged.t()?)?, &y, 1e-12)
    }
}
