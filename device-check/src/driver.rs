//! The CUDA driver, opened at run time: what this crate calls of it, with results as errors.

use crate::error::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::path::Path;

/// The driver's library, as the loader finds it.
pub const DRIVER: &str = "libcuda.so.1";

/// A context, module, function or event of the driver.
pub(crate) type Handle = *mut c_void;

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident $symbol:literal ($($argument:ty),*);)*) => {
        /// Functions of the driver; they stay valid as long as the library is open.
        #[derive(Debug)]
        pub(crate) struct Driver {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($argument),*) -> i32,)*
            _library: Library,
        }

        impl Driver {
            /// # Errors
            /// A library that is missing, or that lacks a function.
            pub fn open(path: &Path) -> Result<Self> {
                let fail = |e: libloading::Error| {
                    let library = path.display().to_string();
                    // The loader's own words are one level down.
                    let reason = std::error::Error::source(&e).map_or(e.to_string(), |words| words.to_string());
                    Error::Library { library, reason }
                };
                // SAFETY: the driver's initialisers have no conditions of their own.
                let library = unsafe { Library::new(path) }.map_err(fail)?;
                $(
                    // SAFETY: the signature is that of the driver's API reference for this symbol.
                    let $field = *unsafe { library.get($symbol) }.map_err(fail)?;
                )*
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}

functions! {
    init "cuInit" (c_uint);
    device_count "cuDeviceGetCount" (*mut i32);
    device_get "cuDeviceGet" (*mut i32, i32);
    device_name "cuDeviceGetName" (*mut c_char, i32, i32);
    device_attribute "cuDeviceGetAttribute" (*mut i32, i32, i32);
    driver_version "cuDriverGetVersion" (*mut i32);
    context_retain "cuDevicePrimaryCtxRetain" (*mut Handle, i32);
    context_set "cuCtxSetCurrent" (Handle);
    synchronize "cuCtxSynchronize" ();
    /// Module, PTX, options: their count, numbers and values.
    module_load "cuModuleLoadDataEx" (*mut Handle, *const c_void, c_uint, *mut i32, *mut *mut c_void);
    function_get "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    function_set "cuFuncSetAttribute" (Handle, i32, i32);
    occupancy "cuOccupancyMaxActiveBlocksPerMultiprocessor" (*mut i32, Handle, i32, usize);
    /// Grid, block, shared bytes, stream, parameters, extra.
    launch "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    alloc "cuMemAlloc_v2" (*mut u64, usize);
    free "cuMemFree_v2" (u64);
    to_device "cuMemcpyHtoD_v2" (u64, *const c_void, usize);
    to_host "cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    fill "cuMemsetD8_v2" (u64, u8, usize);
    event_create "cuEventCreate" (*mut Handle, c_uint);
    event_record "cuEventRecord" (Handle, Handle);
    event_synchronize "cuEventSynchronize" (Handle);
    event_elapsed "cuEventElapsedTime" (*mut f32, Handle, Handle);
    event_destroy "cuEventDestroy_v2" (Handle);
    error_name "cuGetErrorName" (i32, *mut *const c_char);
    error_string "cuGetErrorString" (i32, *mut *const c_char);
}

impl Driver {
    /// The result of a call, which `what` names.
    pub fn checked(&self, code: i32, what: impl FnOnce() -> String) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = |function: unsafe extern "C" fn(i32, *mut *const c_char) -> i32| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: the driver sets the pointer to a text of its own, or leaves it.
            unsafe { function(code, &mut text) };
            if text.is_null() {
                return "unknown".to_string();
            }
            // SAFETY: not null, so a text of the driver with an end, which lives as long as the driver.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(Error::Driver { call: what(), code, name: text(self.error_name), text: text(self.error_string) })
    }
}
