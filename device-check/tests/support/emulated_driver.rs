//! A CUDA driver whose one device is the PTX emulator: what `device-check` calls of it, for tests without a GPU.
//!
//! Launches run at once, so events need no queue. Pointers are trusted, as by the real driver. The state is global since
//! that is how the driver's interface is made.

use ptx_emulator::{CopyLanding, Launch, Memory, Module};
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

const INVALID: i32 = 1;
const BAD_PTX: i32 = 218;
const LAUNCH_FAILED: i32 = 719;
/// Words of the parameter of every kernel.
const PARAMETER_BYTES: usize = 8 * candle_cp_kernels::gpu::PARAMETER_WORDS;

struct Function {
    module: &'static Module,
    name: String,
}

fn memory() -> MutexGuard<'static, Memory> {
    static MEMORY: OnceLock<Mutex<Memory>> = OnceLock::new();
    MEMORY.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// `to` points to a `T`, as for every function below.
unsafe fn give<T>(to: *mut T, value: T) -> i32 {
    // SAFETY: as above.
    unsafe { to.write(value) };
    0
}

macro_rules! driver {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {
        $(
            /// # Safety
            /// As the driver's function of this name.
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe)] // some do nothing
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> i32 {
                // SAFETY: the caller keeps to the driver's interface.
                unsafe { $body }
            }
        )*
    };
}

driver! {
    cuInit(_flags: c_uint) { ok() }
    cuDeviceGetCount(count: *mut i32) { give(count, 1) }
    cuDeviceGet(device: *mut i32, ordinal: i32) { give(device, ordinal) }
    cuDriverGetVersion(version: *mut i32) { give(version, 12040) }
    cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _device: i32) { give(context, std::ptr::dangling_mut()) }
    cuCtxSetCurrent(_context: *mut c_void) { ok() }
    cuCtxSynchronize() { ok() }
    cuFuncSetAttribute(_function: *mut c_void, _attribute: i32, _value: i32) { ok() }
    cuDeviceGetName(name: *mut c_char, length: i32, _device: i32) {
        let text = b"PTX emulator\0";
        assert!(length as usize >= text.len());
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len());
        0
    }
    cuDeviceGetAttribute(value: *mut i32, attribute: i32, _device: i32) {
        // Multiprocessors, compute capability, shared memory of a thread block: an H200.
        let of = match attribute { 16 => 132, 75 => 9, 76 => 0, 97 => 227 << 10, _ => return INVALID };
        give(value, of)
    }
    cuModuleLoadDataEx(
        module: *mut *mut c_void, text: *const c_void, count: c_uint, options: *mut i32, values: *mut *mut c_void
    ) {
        // The buffer for errors and its length, with an end.
        assert_eq!(std::slice::from_raw_parts(options, count as usize), [5, 6]);
        let [log, length] = *values.cast::<[*mut c_void; 2]>();
        log.cast::<u8>().add(length.addr() - 1).write(0);
        let text = CStr::from_ptr(text.cast()).to_str().unwrap_or_default();
        match Module::parse(text) {
            Ok(parsed) => give(module, Box::into_raw(Box::new(parsed)).cast()),
            Err(error) => {
                let words = format!("{error}\0");
                std::ptr::copy_nonoverlapping(words.as_ptr(), log.cast(), words.len().min(length.addr()));
                BAD_PTX
            }
        }
    }
    cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char) {
        let name = CStr::from_ptr(name).to_string_lossy().into_owned();
        let module: &'static Module = &*module.cast::<Module>();
        give(function, Box::into_raw(Box::new(Function { module, name })).cast())
    }
    cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut i32, _function: *mut c_void, _threads: i32, _bytes: usize) {
        give(blocks, 1)
    }
    cuMemAlloc_v2(address: *mut u64, count: usize) { give(address, memory().alloc(count)) }
    cuMemFree_v2(address: u64) { memory().free(address).map_or(INVALID, |()| 0) }
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, count: usize) {
        let bytes = std::slice::from_raw_parts(from.cast::<u8>(), count);
        memory().write(to, bytes).map_or(INVALID, |()| 0)
    }
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, count: usize) {
        let Ok(bytes) = memory().read(from, count) else { return INVALID };
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), count);
        0
    }
    cuMemsetD8_v2(to: u64, value: u8, count: usize) {
        memory().write(to, &vec![value; count]).map_or(INVALID, |()| 0)
    }
    cuEventCreate(event: *mut *mut c_void, _flags: c_uint) {
        give(event, Box::into_raw(Box::new(Instant::now())).cast())
    }
    cuEventRecord(event: *mut c_void, _stream: *mut c_void) { give(event.cast(), Instant::now()) }
    cuEventSynchronize(_event: *mut c_void) { ok() }
    cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) {
        let [start, end] = [start, end].map(|event| *event.cast::<Instant>());
        give(milliseconds, end.duration_since(start).as_secs_f32() * 1e3)
    }
    cuEventDestroy_v2(event: *mut c_void) {
        drop(Box::from_raw(event.cast::<Instant>()));
        ok()
    }
    cuGetErrorName(_code: i32, text: *mut *const c_char) { give(text, c"EMULATED".as_ptr()) }
    cuGetErrorString(_code: i32, text: *mut *const c_char) { give(text, c"the emulator refused".as_ptr()) }
    cuLaunchKernel(
        function: *mut c_void, x: c_uint, y: c_uint, z: c_uint, threads_x: c_uint, threads_y: c_uint, threads_z: c_uint,
        shared_bytes: c_uint, _stream: *mut c_void, parameters: *mut *mut c_void, _extra: *mut *mut c_void
    ) {
        let Function { module, name } = &*function.cast::<Function>();
        let launch = Launch {
            kernel: name,
            grid: [x, y, z],
            block: [threads_x, threads_y, threads_z],
            shared_bytes,
            params: std::slice::from_raw_parts((*parameters).cast(), PARAMETER_BYTES),
            copies: CopyLanding::AtIssue,
        };
        match launch.run(module, &mut memory()) {
            Ok(_) => 0,
            Err(fault) => {
                eprintln!("{fault}");
                LAUNCH_FAILED
            }
        }
    }
}

fn ok() -> i32 {
    0
}
