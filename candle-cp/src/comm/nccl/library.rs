//! The part of NCCL's C interface that is used here, opened at run time.
//!
//! Candle has cudarc link the CUDA libraries, for all of cudarc's modules at once; with its NCCL module a program could not
//! even start where NCCL is absent, and could not say so. cudarc's own run-time search does not try `libnccl.so.2`, the
//! name under which NCCL is installed. So the 20 functions are declared here; `calls` has those that post work.

use super::calls::Calls;
use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};

/// `ncclComm_t`.
pub type RawComm = *mut c_void;
/// `cudaStream_t`, the same handle as the driver's `CUstream`.
pub type RawStream = *mut c_void;
/// `ncclResult_t`.
pub type Code = c_int;

pub const SUCCESS: Code = 0;
pub const IN_PROGRESS: Code = 7;

const UNDEFINED: c_int = c_int::MIN;
/// Calls that do not block came with this version.
const OLDEST: c_int = 21400;
/// Splitting a communicator came with this version.
const SPLITS: c_int = 21800;
/// The library's name with its interface version, then what only development packages install.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` as of version 2.14; later versions take it and fill in what they have added.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    /// Where later versions have the cluster size.
    padding: c_int,
}

impl Config {
    /// Calls return at once, also while peers are awaited.
    pub fn without_blocking() -> Self {
        let (size, version) = (std::mem::size_of::<Self>(), OLDEST as c_uint);
        Self { size, magic: 0xcafe_beef, version, blocking: 0, padding: UNDEFINED }
    }
}

/// `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum DataType {
    U8 = 1,
    U32 = 3,
    I64 = 4,
    U64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    BF16 = 9,
}

type OnComm = unsafe extern "C" fn(RawComm) -> Code;
type Split = unsafe extern "C" fn(RawComm, c_int, c_int, *mut RawComm, *mut Config) -> Code;

/// NCCL's functions. The library stays open for the life of the process: its threads may outlive a group.
pub struct Library {
    path: PathBuf,
    version: c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Code,
    comm_init_rank_config: unsafe extern "C" fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> Code,
    comm_finalize: OnComm,
    comm_destroy: OnComm,
    comm_abort: OnComm,
    comm_get_async_error: unsafe extern "C" fn(RawComm, *mut Code) -> Code,
    get_error_string: unsafe extern "C" fn(Code) -> *const c_char,
    get_last_error: unsafe extern "C" fn(RawComm) -> *const c_char,
    group_start: unsafe extern "C" fn() -> Code,
    group_end: unsafe extern "C" fn() -> Code,
    /// From `SPLITS` on.
    comm_split: Option<Split>,
    pub(super) calls: Calls,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} ({})", named(self.version), self.path.display())
    }
}

fn named(version: c_int) -> String {
    format!("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

/// Looks up a function in a library that stays open.
///
/// # Safety
/// `T` is the function's type.
unsafe fn function<T: Copy>(library: &libloading::Library, name: &str) -> std::result::Result<T, String> {
    // SAFETY: the caller vouches for the type; the library is never closed, so the copied pointer stays valid.
    let symbol = unsafe { library.get::<T>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|e| format!("it has no function {name} ({e})"))
}

impl Library {
    /// Opens the given file, or the names under which NCCL is installed, where the system's loader looks for them.
    ///
    /// # Errors
    /// [`Error::Library`].
    pub fn open(file: Option<&Path>) -> Result<Self> {
        let names = match file {
            Some(file) => vec![file.to_path_buf()],
            None => NAMES.iter().map(PathBuf::from).collect(),
        };
        let mut faults = Vec::new();
        for path in &names {
            // SAFETY: NCCL's initialisers have no demands on the process.
            match unsafe { libloading::Library::new(path) } {
                Ok(library) => return Self::with_functions(library, path),
                Err(e) => faults.push(e.to_string()),
            }
        }
        Err(unusable(&names, faults.join("; ")))
    }

    fn with_functions(library: libloading::Library, path: &Path) -> Result<Self> {
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let fault = |message| unusable(&[path.to_path_buf()], message);
        // SAFETY: the types below are those of nccl.h, the same in all versions from `OLDEST` on.
        let functions = || unsafe {
            let version = version(function(library, "ncclGetVersion")?);
            Ok::<_, String>(Self {
                path: path.to_path_buf(),
                version,
                get_unique_id: function(library, "ncclGetUniqueId")?,
                comm_init_rank_config: function(library, "ncclCommInitRankConfig")?,
                comm_finalize: function(library, "ncclCommFinalize")?,
                comm_destroy: function(library, "ncclCommDestroy")?,
                comm_abort: function(library, "ncclCommAbort")?,
                comm_get_async_error: function(library, "ncclCommGetAsyncError")?,
                get_error_string: function(library, "ncclGetErrorString")?,
                get_last_error: function(library, "ncclGetLastError")?,
                group_start: function(library, "ncclGroupStart")?,
                group_end: function(library, "ncclGroupEnd")?,
                comm_split: if version >= SPLITS { Some(function(library, "ncclCommSplit")?) } else { None },
                calls: Calls {
                    send: function(library, "ncclSend")?,
                    recv: function(library, "ncclRecv")?,
                    all_gather: function(library, "ncclAllGather")?,
                    all_reduce: function(library, "ncclAllReduce")?,
                    reduce_scatter: function(library, "ncclReduceScatter")?,
                    reduce: function(library, "ncclReduce")?,
                    broadcast: function(library, "ncclBroadcast")?,
                },
            })
        };
        let found = functions().map_err(fault)?;
        if found.version < OLDEST {
            return Err(fault(format!("{found:?} is older than 2.14, which this program needs")));
        }
        Ok(found)
    }

    /// The library's texts for a result: of the kind, and of the last fault.
    pub fn text(&self, code: Code, comm: RawComm) -> String {
        // SAFETY: both return static or thread-local texts, or null; the communicator is live or null.
        let (kind, last) = unsafe { (text((self.get_error_string)(code)), text((self.get_last_error)(comm))) };
        match last.is_empty() {
            true => format!("NCCL says: {kind}"),
            false => format!("NCCL says: {kind}; {last}"),
        }
    }

    fn checked(&self, code: Code, comm: RawComm) -> std::result::Result<(), String> {
        if code == SUCCESS || code == IN_PROGRESS { Ok(()) } else { Err(self.text(code, comm)) }
    }

    pub fn unique_id(&self) -> std::result::Result<UniqueId, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: `id` is a valid place for the result.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.checked(code, std::ptr::null_mut()).map(|()| id)
    }

    /// Begins to make a communicator; [`Library::state`] tells when it is there.
    pub fn init(&self, size: usize, id: UniqueId, rank: usize) -> std::result::Result<RawComm, String> {
        let number = |x: usize| c_int::try_from(x).map_err(|_| format!("NCCL counts ranks up to {}", c_int::MAX));
        let (mut comm, mut config) = (std::ptr::null_mut(), Config::without_blocking());
        // SAFETY: `comm` and `config` are valid places; the configuration is read during the call.
        let code = unsafe { (self.comm_init_rank_config)(&mut comm, number(size)?, id, number(rank)?, &mut config) };
        self.checked(code, std::ptr::null_mut())?;
        if comm.is_null() { Err("NCCL made no communicator".into()) } else { Ok(comm) }
    }

    /// What this library is, as ranks tell each other.
    pub fn version(&self) -> i64 {
        self.version.into()
    }

    /// Whether a rank with the given version can take part in a split; `rank` is its number.
    ///
    /// # Errors
    /// [`Error::Library`].
    pub fn check_split(&self, rank: usize, version: i64) -> Result<()> {
        if version >= SPLITS.into() {
            return Ok(());
        }
        let found = c_int::try_from(version).map_or_else(|_| version.to_string(), named);
        Err(Error::Library {
            library: "NCCL",
            searched: self.path.display().to_string(),
            message: format!("rank {rank} has {found}, but groups of ranks need {} or newer", named(SPLITS)),
            fix: "install a newer one (package libnccl2, or pip's nvidia-nccl-cu13) for all ranks".into(),
        })
    }

    /// Begins to split a communicator: the ranks that give the same `color` are together, ordered by `key`. When
    /// [`Library::state`] of `comm` tells that it is through, `made` holds this rank's part.
    ///
    /// # Safety
    /// `comm` is live; `made` may be written to until it is through or has ended.
    pub unsafe fn split(
        &self,
        comm: RawComm,
        color: usize,
        key: usize,
        made: *mut RawComm,
    ) -> std::result::Result<(), String> {
        let Some(split) = self.comm_split else { return Err(format!("{self:?} cannot split a communicator")) };
        // SAFETY: as the caller vouches; without a configuration the new one has that of `comm`. Colors and keys are
        // ranks, which fit.
        self.checked(unsafe { split(comm, color as c_int, key as c_int, made, std::ptr::null_mut()) }, comm)
    }

    /// Whether all calls so far are through: `Ok(false)` while one is in progress.
    ///
    /// # Safety
    /// `comm` is live.
    pub unsafe fn state(&self, comm: RawComm) -> std::result::Result<bool, String> {
        let mut code = SUCCESS;
        // SAFETY: the caller vouches for `comm`; `code` is a valid place.
        let asked = unsafe { (self.comm_get_async_error)(comm, &mut code) };
        self.checked(asked, comm)?;
        self.checked(code, comm)?;
        Ok(code == SUCCESS)
    }

    /// # Safety
    /// `comm` is live, and all its work is done.
    pub unsafe fn finalize(&self, comm: RawComm) -> std::result::Result<(), String> {
        // SAFETY: as the caller vouches.
        self.checked(unsafe { (self.comm_finalize)(comm) }, comm)
    }

    /// # Safety
    /// `comm` is live and finalized; it is not used again.
    pub unsafe fn destroy(&self, comm: RawComm) {
        // SAFETY: as the caller vouches. Nothing can be done about a failure.
        let _ = unsafe { (self.comm_destroy)(comm) };
    }

    /// # Safety
    /// `comm` is live; it is not used again.
    pub unsafe fn abort(&self, comm: RawComm) {
        // SAFETY: as the caller vouches. Nothing can be done about a failure.
        let _ = unsafe { (self.comm_abort)(comm) };
    }

    /// Runs `post` as one group of calls.
    pub fn group(&self, comm: RawComm, post: impl FnOnce() -> Code) -> std::result::Result<(), String> {
        // SAFETY: no arguments; each start has its end.
        let (posted, ended) = unsafe {
            self.checked((self.group_start)(), comm)?;
            (post(), (self.group_end)())
        };
        self.checked(posted, comm)?;
        self.checked(ended, comm)
    }
}

fn version(get_version: unsafe extern "C" fn(*mut c_int) -> Code) -> c_int {
    let mut version = 0;
    // SAFETY: `version` is a valid place for the result; left alone on failure.
    unsafe { get_version(&mut version) };
    version
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller vouches.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_string()
}

fn unusable(searched: &[PathBuf], message: String) -> Error {
    let searched: Vec<String> = searched.iter().map(|path| path.display().to_string()).collect();
    Error::Library {
        library: "NCCL",
        searched: searched.join(", "),
        message,
        fix:
            "install it (package libnccl2, or pip's nvidia-nccl-cu13) and name its folder in LD_LIBRARY_PATH, or name \
              the file in the options"
                .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = Library::open(Some(Path::new("/nowhere/libnccl.so.2"))).unwrap_err().to_string();
        assert!(error.contains("searched: /nowhere/libnccl.so.2") && error.contains("LD_LIBRARY_PATH"), "{error}");
    }

    #[test]
    fn a_library_that_is_not_nccl_is_told_apart() {
        let error = Library::open(Some(Path::new("libc.so.6"))).unwrap_err().to_string();
        assert!(
            error.contains("searched: libc.so.6") && error.contains("it has no function ncclGetVersion"),
            "{error}"
        );
    }

    #[test]
    fn the_installed_library_works_or_its_names_are_told() {
        match Library::open(None) {
            Ok(library) => assert!(library.version >= OLDEST, "{library:?}"),
            Err(error @ Error::Library { .. }) => {
                let text = error.to_string();
                assert!(NAMES.iter().all(|name| text.contains(name)), "{text}");
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn the_configuration_is_that_of_2_14() {
        assert_eq!(std::mem::size_of::<Config>(), 24);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
    }
}
