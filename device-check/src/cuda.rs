//! A device of the CUDA driver, on its default stream.

use crate::check::ELEMENTS;
use crate::draw::HEADS;
use crate::driver::{Driver, Handle};
use crate::error::{Error, Result};
use crate::target::Target;
use candle_cp_kernels::gpu::{GpuLimits, Kernel, Kernels, Launch, compiled};
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::ptr::null_mut;

/// Numbers of `CUdevice_attribute`, `CUfunction_attribute` and `CUjit_option`.
mod attribute {
    pub const MULTIPROCESSORS: i32 = 16;
    pub const MAJOR: i32 = 75;
    pub const MINOR: i32 = 76;
    pub const SHARED_OPTIN: i32 = 97;
    pub const DYNAMIC_SHARED: i32 = 8;
    pub const ERROR_LOG: i32 = 5;
    pub const ERROR_LOG_BYTES: i32 = 6;
}

/// A device.
#[derive(Debug)]
pub struct CudaDevice {
    driver: Driver,
    context: Context,
    name: String,
    limits: GpuLimits,
    multiprocessors: i32,
    version: i32,
    modules: BTreeMap<&'static str, Handle>,
    /// By module and kernel.
    functions: BTreeMap<(&'static str, String), Handle>,
    allocations: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Context(Handle);

// SAFETY: the driver's contexts may be made current on any thread.
unsafe impl Sync for Context {}
// SAFETY: as above.
unsafe impl Send for Context {}

#[derive(Debug)]
struct Module(Handle);

// SAFETY: a module belongs to its context and may be used on any thread where that is current.
unsafe impl Send for Module {}

impl CudaDevice {
    /// Opens the driver's library `path` ([`crate::DRIVER`]) and its device number `ordinal`.
    ///
    /// # Errors
    /// No driver, no such device.
    pub fn open(path: &Path, ordinal: i32) -> Result<Self> {
        let driver = Driver::open(path)?;
        let call = |code: i32, what: &str| driver.checked(code, || what.to_string());
        // SAFETY: no condition.
        call(unsafe { (driver.init)(0) }, "starting the driver (cuInit)")?;
        let (mut count, mut device, mut version) = (0, 0, 0);
        // SAFETY: the pointer is to a local number.
        call(unsafe { (driver.device_count)(&mut count) }, "counting devices")?;
        if ordinal < 0 || ordinal >= count {
            return Err(Error::NoDevice { asked: ordinal, count });
        }
        // SAFETY: as above.
        call(unsafe { (driver.device_get)(&mut device, ordinal) }, "getting the device")?;
        // SAFETY: as above.
        call(unsafe { (driver.driver_version)(&mut version) }, "asking for the driver's version")?;
        let of = |attribute: i32| -> Result<i32> {
            let mut value = 0;
            // SAFETY: as above.
            call(unsafe { (driver.device_attribute)(&mut value, attribute, device) }, "asking for a device attribute")?;
            Ok(value)
        };
        let capability = (of(attribute::MAJOR)? as u32, of(attribute::MINOR)? as u32);
        let limits = GpuLimits { capability, shared_bytes: of(attribute::SHARED_OPTIN)? as usize };
        let multiprocessors = of(attribute::MULTIPROCESSORS)?;
        let mut text = [0 as c_char; 128];
        // SAFETY: the length is that of the array.
        call(unsafe { (driver.device_name)(text.as_mut_ptr(), 127, device) }, "asking for the device's name")?;
        let name: Vec<u8> = text.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
        let name = String::from_utf8_lossy(&name).into_owned();
        let mut context = null_mut();
        // SAFETY: as above.
        call(unsafe { (driver.context_retain)(&mut context, device) }, "making a context")?;
        // SAFETY: the context was just made.
        call(unsafe { (driver.context_set)(context) }, "using the context")?;
        let (modules, functions, allocations) = Default::default();
        let context = Context(context);
        Ok(Self { driver, context, name, limits, multiprocessors, version, modules, functions, allocations })
    }

    /// Name, as the driver has it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Version of CUDA that the driver speaks, as (major, minor).
    pub fn version(&self) -> (i32, i32) {
        (self.version / 1000, self.version % 1000 / 10)
    }

    /// Streaming multiprocessors.
    pub fn multiprocessors(&self) -> i32 {
        self.multiprocessors
    }

    /// Has the driver compile all PTX, a thread for each module.
    ///
    /// # Errors
    /// PTX that the driver does not take.
    pub fn load_all(&mut self) -> Result<()> {
        let all = ELEMENTS.into_iter().flat_map(|element| HEADS.map(|head| compiled(element, head[0])));
        let (driver, context) = (&self.driver, self.context);
        let loaded: Vec<Result<(&'static str, Module)>> = std::thread::scope(|scope| {
            let load = |module: candle_cp_kernels::gpu::Compiled| {
                scope.spawn(move || {
                    let Context(context) = { context };
                    // SAFETY: the context is that of this device.
                    let code = unsafe { (driver.context_set)(context) };
                    driver.checked(code, || "using the context".into())?;
                    Ok((module.name, Module(load(driver, module.name, module.text)?)))
                })
            };
            let threads: Vec<_> = all.flatten().map(load).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        for module in loaded {
            let (name, Module(handle)) = module?;
            self.modules.insert(name, handle);
        }
        Ok(())
    }

    fn function(&mut self, kernels: &Kernels, kernel: &Kernel) -> Result<Handle> {
        let module = kernels.module();
        let key = (module.name, kernel.name.clone());
        if let Some(function) = self.functions.get(&key) {
            return Ok(*function);
        }
        let handle = match self.modules.get(module.name) {
            Some(handle) => *handle,
            None => load(&self.driver, module.name, module.text)?,
        };
        self.modules.insert(module.name, handle);
        let what = || format!("loading kernel {} of {}", kernel.name, module.name);
        let name = CString::new(kernel.name.clone()).expect("names of kernels are plain");
        let mut function = null_mut();
        // SAFETY: a module of this context, a text with an end, a local to write to.
        self.driver.checked(unsafe { (self.driver.function_get)(&mut function, handle, name.as_ptr()) }, what)?;
        // SAFETY: the function was just loaded.
        let code =
            unsafe { (self.driver.function_set)(function, attribute::DYNAMIC_SHARED, kernel.shared_bytes as i32) };
        self.driver.checked(code, what)?;
        self.functions.insert(key, function);
        Ok(function)
    }

    /// Thread blocks of a kernel that one multiprocessor runs at a time, as the driver says.
    ///
    /// # Errors
    /// A kernel that cannot be loaded.
    pub fn blocks_per_multiprocessor(&mut self, kernels: &Kernels, kernel: &Kernel) -> Result<i32> {
        let function = self.function(kernels, kernel)?;
        let (threads, shared, mut blocks) = (kernel.threads as i32, kernel.shared_bytes as usize, 0);
        // SAFETY: a loaded function and a local to write to.
        let code = unsafe { (self.driver.occupancy)(&mut blocks, function, threads, shared) };
        self.driver.checked(code, || format!("asking for the occupancy of {}", kernel.name))?;
        Ok(blocks)
    }

    /// Queues zeros for `count` bytes from `address` on.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fill_zeros(&mut self, address: u64, count: usize) -> Result<()> {
        // SAFETY: the caller's addresses are those of this device; the driver checks them.
        self.driver.checked(unsafe { (self.driver.fill)(address, 0, count) }, || format!("zeroing {count} bytes"))
    }

    /// Milliseconds that the device takes for what `work` queues.
    ///
    /// # Errors
    /// A launch that failed.
    pub fn timed(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<f64> {
        let mut events = [null_mut(); 2];
        for event in &mut events {
            // SAFETY: a local to write to.
            let code = unsafe { (self.driver.event_create)(event, 0) };
            self.driver.checked(code, || "making an event".into())?;
        }
        let [start, end] = events;
        let record = |device: &Self, event: Handle| {
            // SAFETY: an event of this context, on the default stream.
            let code = unsafe { (device.driver.event_record)(event, null_mut()) };
            device.driver.checked(code, || "recording an event".into())
        };
        record(self, start)?;
        work(self)?;
        record(self, end)?;
        // SAFETY: an event that was recorded.
        let code = unsafe { (self.driver.event_synchronize)(end) };
        self.driver.checked(code, || "waiting for the kernels that are timed".into())?;
        let mut milliseconds = 0f32;
        // SAFETY: both events have passed.
        let code = unsafe { (self.driver.event_elapsed)(&mut milliseconds, start, end) };
        self.driver.checked(code, || "reading the time between events".into())?;
        for event in events {
            // SAFETY: nothing waits for it any more.
            let code = unsafe { (self.driver.event_destroy)(event) };
            self.driver.checked(code, || "giving an event back".into())?;
        }
        Ok(f64::from(milliseconds))
    }

    fn allocate(&mut self, count: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: a local to write to.
        let code = unsafe { (self.driver.alloc)(&mut address, count.max(16)) };
        self.driver.checked(code, || format!("allocating {count} bytes"))?;
        self.allocations.push(address);
        Ok(address)
    }
}

fn load(driver: &Driver, name: &str, text: &str) -> Result<Handle> {
    let text = CString::new(text).expect("PTX is plain text");
    let (mut module, mut log) = (null_mut(), [0u8; 2048]);
    let mut options = [attribute::ERROR_LOG, attribute::ERROR_LOG_BYTES];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(log.len())];
    // SAFETY: a text with an end, a local to write to, and two options whose values are a buffer and its length; the
    // context is current.
    let code = unsafe {
        (driver.module_load)(&mut module, text.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr())
    };
    driver.checked(code, || {
        let log: Vec<u8> = log.iter().copied().take_while(|&c| c != 0).collect();
        let log = String::from_utf8_lossy(&log);
        format!("compiling the PTX of {name} (its ISA 8.4 needs driver r550 or newer) {}", log.trim())
    })?;
    Ok(module)
}

impl Target for CudaDevice {
    fn limits(&self) -> GpuLimits {
        self.limits
    }

    fn upload(&mut self, bytes: &[u8]) -> Result<u64> {
        let address = self.allocate(bytes.len())?;
        if !bytes.is_empty() {
            // SAFETY: the allocation and the slice have this length.
            let code = unsafe { (self.driver.to_device)(address, bytes.as_ptr().cast(), bytes.len()) };
            self.driver.checked(code, || format!("copying {} bytes to the device", bytes.len()))?;
        }
        Ok(address)
    }

    fn zeros(&mut self, count: usize) -> Result<u64> {
        let address = self.allocate(count)?;
        if count > 0 {
            self.fill_zeros(address, count)?;
        }
        Ok(address)
    }

    fn download(&mut self, address: u64, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0u8; count];
        if count > 0 {
            // SAFETY: the vector has this length; the driver checks the address.
            let code = unsafe { (self.driver.to_host)(bytes.as_mut_ptr().cast(), address, count) };
            self.driver.checked(code, || format!("copying {count} bytes from the device"))?;
        }
        Ok(bytes)
    }

    fn launch(&mut self, kernels: &Kernels, launch: &Launch) -> Result<()> {
        let function = self.function(kernels, &launch.kernel)?;
        let mut parameter = launch.parameter;
        let mut parameters: [*mut c_void; 1] = [parameter.as_mut_ptr().cast()];
        let ([x, y, z], threads) = (launch.grid, launch.kernel.threads);
        let (shared, stream, extra) = (launch.kernel.shared_bytes, null_mut(), null_mut());
        // SAFETY: the kernel takes this one parameter, whose addresses are those of live allocations with the sizes that
        // the shapes give.
        let code = unsafe {
            (self.driver.launch)(function, x, y, z, threads, 1, 1, shared, stream, parameters.as_mut_ptr(), extra)
        };
        let (major, minor) = self.limits.capability;
        self.driver.checked(code, || {
            let (name, head, element) = (&launch.kernel.name, kernels.head_dim(), kernels.element());
            format!("launching {name} for head size {head}, {element:?} on sm_{major}{minor}")
        })
    }

    fn clear(&mut self) -> Result<()> {
        // SAFETY: no condition.
        self.driver.checked(unsafe { (self.driver.synchronize)() }, || "waiting for the kernels".into())?;
        for address in self.allocations.drain(..) {
            // SAFETY: an allocation of this device that is not used any more.
            self.driver.checked(unsafe { (self.driver.free)(address) }, || "freeing memory".into())?;
        }
        Ok(())
    }
}
