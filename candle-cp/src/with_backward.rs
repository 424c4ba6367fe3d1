//! Tensors whose value was computed outside of the graph, with a backward pass of their own.
//!
//! Candle's way to a gradient of one's own is a custom operator, which works on bare storage. This turns it around: the
//! value comes from tensor operations, on any device, and the operator only puts it into the graph.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, MetalStorage, Result, Shape, Storage, Tensor,
    bail,
};
use std::sync::{Mutex, PoisonError};

/// Most inputs.
const MOST_INPUTS: usize = 3;

/// `value` as a function of `inputs`, one to three of them, all on its device.
///
/// `backward` gets the inputs and the gradient of the value, in the value's shape, and returns the gradients of the
/// inputs in their shapes and types; `None` only for an input that is not tracked. It should not build a graph of its
/// own: detach inputs before use. It runs once per backward pass, and not at all where no input is tracked.
///
/// The value is copied once; `name` is what Candle's errors call the operation.
///
/// # Errors
/// The value is on another device than the inputs.
///
/// # Panics
/// For no input, or more than three.
pub fn with_backward<const N: usize>(
    name: &'static str,
    inputs: [&Tensor; N],
    value: Tensor,
    backward: impl Fn([&Tensor; N], &Tensor) -> Result<[Option<Tensor>; N]> + Send + Sync + 'static,
) -> Result<Tensor> {
    const { assert!(1 <= N && N <= MOST_INPUTS) };
    let backward = move |inputs: &[&Tensor], grad: &Tensor| {
        let gradients = backward(std::array::from_fn(|i| inputs[i]), grad)?;
        Ok(gradients.into_iter().collect())
    };
    let op = Attach { name, value: Mutex::new(Some(value.detach())), backward: Box::new(backward) };
    match inputs.as_slice() {
        [a] => a.apply_op1(op),
        [a, b] => a.apply_op2(b, op),
        [a, b, c] => a.apply_op3(b, c, op),
        _ => unreachable!("one to three inputs"),
    }
}

type Backward = dyn Fn(&[&Tensor], &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync;

struct Attach {
    name: &'static str,
    /// Until forward takes it.
    value: Mutex<Option<Tensor>>,
    backward: Box<Backward>,
}

impl Attach {
    fn take(&self) -> Tensor {
        self.value.lock().unwrap_or_else(PoisonError::into_inner).take().expect("forward runs once")
    }

    fn cpu(&self) -> Result<(CpuStorage, Shape)> {
        let value = self.take();
        let (storage, layout) = value.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => copy(storage, layout),
            _ => bail!("{}: the inputs are on the CPU, the value is on {:?}", self.name, value.device()),
        }
    }

    fn cuda(&self) -> Result<(CudaStorage, Shape)> {
        let value = self.take();
        let (storage, layout) = value.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => copy(storage, layout),
            _ => bail!("{}: the inputs are on a CUDA device, the value is on {:?}", self.name, value.device()),
        }
    }

    fn metal(&self) -> Result<(MetalStorage, Shape)> {
        let value = self.take();
        let (storage, layout) = value.storage_and_layout();
        match &*storage {
            Storage::Metal(storage) => copy(storage, layout),
            _ => bail!("{}: the inputs are on a Metal device, the value is on {:?}", self.name, value.device()),
        }
    }

    fn gradients<const N: usize>(&self, inputs: [&Tensor; N], grad: &Tensor) -> Result<[Option<Tensor>; N]> {
        let gradients = (self.backward)(&inputs, grad)?;
        Ok(gradients.try_into().expect("a gradient for every input"))
    }
}

/// The numbers of a tensor as contiguous storage.
fn copy<D: BackendDevice<Storage = S>, S: BackendStorage<Device = D>>(
    storage: &S,
    layout: &Layout,
) -> Result<(S, Shape)> {
    let shape = layout.shape().clone();
    // SAFETY: all of it is written below, where there is anything to write.
    let mut copy = unsafe { storage.device().alloc_uninit(&shape, storage.dtype())? };
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok((copy, shape))
}

impl CustomOp1 for Attach {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.cuda()
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        self.metal()
    }

    fn bwd(&self, a: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let [a] = self.gradients([a], grad)?;
        Ok(a)
    }
}

impl CustomOp2 for Attach {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.cuda()
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        self.metal()
    }

    fn bwd(&self, a: &Tensor, b: &Tensor, _: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [a, b] = self.gradients([a, b], grad)?;
        Ok((a, b))
    }
}

impl CustomOp3 for Attach {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda()
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.metal()
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = self.gradients([a, b, c], grad)?;
        Ok((a, b, c))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn values_and_gradients_are_those_given() -> Result<()> {
        let x = Var::new(&[[1f64, 2.0], [3.0, 4.0]], &Device::Cpu)?;
        let y = Var::new(&[[5f64, 6.0], [7.0, 8.0]], &Device::Cpu)?;
        let constant = Tensor::new(2f64, &Device::Cpu)?;
        // A strided value that starts inside of its storage.
        let value = || x.t()?.narrow(0, 1, 1);
        let one = with_backward("one", [&x], value()?, |[x], grad| {
            Ok([Some((x.detach() * grad.sum_all()?.to_scalar::<f64>()?)?)])
        })?;
        assert_eq!(one.to_vec2::<f64>()?, [[2.0, 4.0]]);
        assert_eq!(one.sum_all()?.backward()?.get(&x).unwrap().to_vec2::<f64>()?, [[2.0, 4.0], [6.0, 8.0]]);
        let three = with_backward("three", [&x, &constant, &y], value()?, |[x, constant, y], _| {
            assert!(!constant.track_op());
            Ok([Some(y.detach()), None, Some(x.detach())])
        })?;
        let store = (three * 3.0)?.sum_all()?.backward()?;
        assert_eq!(store.get(&x).unwrap().to_vec2::<f64>()?, y.to_vec2::<f64>()?);
        assert_eq!(store.get(&y).unwrap().to_vec2::<f64>()?, x.to_vec2::<f64>()?);
        assert!(store.get(&constant).is_none());
        let untracked = with_backward("two", [&constant, &constant], constant.clone(), |_, _| unreachable!())?;
        assert!(!untracked.track_op() && untracked.to_scalar::<f64>()? == 2.0);
        let empty = with_backward("two", [&x, &y], x.narrow(0, 0, 0)?, |[x, y], _| {
            Ok([Some(x.zeros_like()?), Some(y.zeros_like()?)])
        })?;
        assert_eq!(empty.dims(), [0, 2]);
        Ok(())
    }
}
