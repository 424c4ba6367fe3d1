//! An emulated GPU: the checked-in PTX on the CPU, behind the same trait as a CUDA device.

#![allow(dead_code, reason = "every test file uses a part of it")]

use crate::common::case::{Case, Data};
use crate::common::dense::Outcome;
use crate::common::devices::dtype;
use crate::common::ring::{Run, Strides, agreed, mask_rule, one_rank_by, options, tokens};
use candle_core::{DType, Device, Shape, Tensor};
use candle_cp::comm::threads;
use candle_cp::gpu::{DeviceBuffer, GpuDevice, GpuElement, GpuLimits, Kernels, Launch};
use candle_cp::{CpContext, Order, Result, SequenceLayout};
use half::{bf16, f16};
use ptx_emulator::{CopyLanding, Memory, Module};
use std::sync::{Arc, Mutex};

/// One device with one module loaded.
pub struct Emulated {
    limits: GpuLimits,
    module: Arc<Module>,
    landing: CopyLanding,
    memory: Arc<Mutex<Memory>>,
    /// Names of the kernels that ran.
    ran: Arc<Mutex<Vec<String>>>,
}

impl std::fmt::Debug for Emulated {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "emulated {:?}", self.limits)
    }
}

/// An allocation of the emulated device, of `bytes` bytes.
struct Allocation {
    address: u64,
    bytes: usize,
    memory: Arc<Mutex<Memory>>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.memory.lock().unwrap().free(self.address).expect("allocated here");
    }
}

impl Emulated {
    fn store(&self, bytes: &[u8]) -> DeviceBuffer {
        let address = self.memory.lock().unwrap().upload(bytes);
        let owner = Arc::new(Allocation { address, bytes: bytes.len(), memory: self.memory.clone() });
        DeviceBuffer { address, owner }
    }
}

impl GpuDevice for Emulated {
    fn id(&self) -> String {
        "emulated".into()
    }

    fn limits(&self) -> GpuLimits {
        self.limits
    }

    /// A copy with the same strides.
    fn import(&self, x: &Tensor) -> Result<DeviceBuffer> {
        let last: usize = x.dims().iter().zip(x.stride()).map(|(n, s)| n.saturating_sub(1) * s).sum();
        let extent = if x.elem_count() == 0 { 0 } else { last + 1 };
        let (storage, layout) = x.storage_and_layout();
        let candle_core::Storage::Cpu(storage) = &*storage else { panic!("a CPU tensor") };
        let range = layout.start_offset()..layout.start_offset() + extent;
        let bytes: Vec<u8> = match x.dtype() {
            DType::BF16 => storage.as_slice::<bf16>()?[range].iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::F16 => storage.as_slice::<f16>()?[range].iter().flat_map(|x| x.to_le_bytes()).collect(),
            _ => storage.as_slice::<f32>()?[range].iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        Ok(self.store(&bytes))
    }

    fn zeros(&self, count: usize, dtype: DType) -> Result<DeviceBuffer> {
        Ok(self.store(&vec![0; count * dtype.size_in_bytes()]))
    }

    fn upload(&self, words: &[u32]) -> Result<DeviceBuffer> {
        Ok(self.store(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()))
    }

    fn export(&self, buffer: &DeviceBuffer, dtype: DType, shape: Shape) -> Result<Tensor> {
        let allocation = buffer.owner.downcast_ref::<Allocation>().expect("of this device");
        assert_eq!(allocation.bytes, shape.elem_count() * dtype.size_in_bytes());
        let bytes = self.memory.lock().unwrap().read(buffer.address, allocation.bytes).expect("written");
        Ok(Tensor::from_raw_buffer(&bytes, dtype, shape.dims(), &Device::Cpu)?)
    }

    fn launch(&self, _: &Kernels, launch: &Launch) -> Result<()> {
        let run = ptx_emulator::Launch {
            kernel: &launch.kernel.name,
            grid: launch.grid,
            block: [launch.kernel.threads, 1, 1],
            shared_bytes: launch.kernel.shared_bytes,
            params: &launch.parameter_bytes(),
            copies: self.landing,
        };
        self.ran.lock().unwrap().push(launch.kernel.name.clone());
        match run.run(&self.module, &mut self.memory.lock().unwrap()) {
            Ok(_) => Ok(()),
            Err(fault) => panic!("{fault}"),
        }
    }
}

/// The kernels of one type, head size and device, and how a case is handed to them.
pub struct Gpu {
    limits: GpuLimits,
    element: GpuElement,
    module: Arc<Module>,
    pub landing: CopyLanding,
    pub strides: Strides,
    /// Rows do not start on 16 bytes.
    pub odd: bool,
    pub ran: Arc<Mutex<Vec<String>>>,
}

impl Gpu {
    pub fn new(element: GpuElement, head_dim: usize, limits: GpuLimits) -> Self {
        let kernels = Kernels::new(element, head_dim, limits).expect("a kernel");
        let module = Arc::new(Module::parse(kernels.module().text).expect("PTX that the emulator knows"));
        let (landing, strides) = (CopyLanding::AtWait, Strides::HeadsAfterTokens);
        Self { limits, element, module, landing, strides, odd: false, ran: Arc::default() }
    }

    /// A device with memory of its own.
    pub fn device(&self) -> Arc<dyn GpuDevice> {
        Arc::new(Emulated {
            limits: self.limits,
            module: self.module.clone(),
            landing: self.landing,
            memory: Arc::new(Mutex::new(Memory::new())),
            ran: self.ran.clone(),
        })
    }

    /// The case on rank threads, each with a device of its own. `data` has to be representable in the type.
    pub fn ring(&self, case: &Case, data: &Data, layout: &SequenceLayout) -> Outcome {
        let run = Run { dtype: dtype(self.element), strides: self.strides, ..Run::default() };
        let all = threads::run(layout.ranks(), &options(), |comm| {
            let context = CpContext::with_trim(comm, layout.clone(), tokens(case), run.trim)?;
            one_rank_by(case, data, &context, run, |operands| self.attend(case, &context, operands))
        });
        agreed(all.expect("the ranks run"))
    }

    fn attend(&self, case: &Case, context: &CpContext, operands: [&Tensor; 3]) -> Result<(Tensor, Tensor)> {
        let tokens_first = self.strides == Strides::HeadsAfterTokens;
        let laid_out = |x: &Tensor| -> Result<Tensor> {
            let x = if tokens_first { x.transpose(1, 2)? } else { x.clone() };
            Ok(if self.odd { x.pad_with_zeros(3, 0, 1)?.narrow(3, 0, case.head_dim)? } else { x })
        };
        let [q, k, v] = [laid_out(operands[0])?, laid_out(operands[1])?, laid_out(operands[2])?];
        let order = if tokens_first { Order::TokensFirst } else { Order::HeadsFirst };
        let (out, lse) = context.attend_on(&self.device(), (&q, &k, &v), &mask_rule(&case.rule), order, case.scale)?;
        Ok((if tokens_first { out.transpose(1, 2)? } else { out }, lse))
    }
}
