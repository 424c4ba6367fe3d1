//! NCCL's functions that post work on a stream.

use super::library::{Code, DataType, Library, RawComm, RawStream};
use std::ffi::{c_int, c_void};

/// `ncclSum` of `ncclRedOp_t`.
const SUM: c_int = 0;

type Collective = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> Code;
type WithChoice = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
type ToRoot = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, RawComm, RawStream) -> Code;

/// The functions as they are found in a library.
pub struct Calls {
    pub send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, RawComm, RawStream) -> Code,
    pub recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code,
    pub all_gather: Collective,
    pub all_reduce: WithChoice,
    pub reduce_scatter: WithChoice,
    pub reduce: ToRoot,
    pub broadcast: WithChoice,
}

/// Where elements of one type lie on the device.
#[derive(Debug, Clone, Copy)]
pub struct Elements {
    pub at: u64,
    pub count: usize,
    pub kind: DataType,
}

/// Where work is posted.
#[derive(Clone, Copy)]
pub struct Way<'a> {
    pub library: &'a Library,
    pub comm: RawComm,
    pub stream: RawStream,
}

/// All are unsafe for the same reason: the communicator and the stream have to be live, and so have the places, until the
/// stream has passed the call; `data` holds its elements, and `into` has room for what the function writes. Ranks fit into
/// NCCL's numbers, or the communicator would not be there.
impl Way<'_> {
    /// # Safety
    /// As above.
    pub unsafe fn send(self, data: Elements, to: usize) -> Code {
        let (at, count, kind) = data.parts();
        // SAFETY: as the caller vouches.
        unsafe { (self.library.calls.send)(at, count, kind, to as c_int, self.comm, self.stream) }
    }

    /// # Safety
    /// As above.
    pub unsafe fn recv(self, into: Elements, from: usize) -> Code {
        let (at, count, kind) = into.parts();
        // SAFETY: as the caller vouches.
        unsafe { (self.library.calls.recv)(at.cast_mut(), count, kind, from as c_int, self.comm, self.stream) }
    }

    /// Writes as many elements per rank as `data` has.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn all_gather(self, data: Elements, into: u64) -> Code {
        let (at, count, kind) = data.parts();
        // SAFETY: as the caller vouches.
        unsafe { (self.library.calls.all_gather)(at, into as *mut c_void, count, kind, self.comm, self.stream) }
    }

    /// # Safety
    /// As above.
    pub unsafe fn all_reduce_sum(self, data: Elements, into: u64) -> Code {
        let (at, count, kind) = data.parts();
        // SAFETY: as the caller vouches.
        unsafe { (self.library.calls.all_reduce)(at, into as *mut c_void, count, kind, SUM, self.comm, self.stream) }
    }

    /// Writes `into`; reads as many elements per rank from `data`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn reduce_scatter_sum(self, data: u64, into: Elements) -> Code {
        let (at, count, kind) = into.parts();
        let (data, into) = (data as *const c_void, at.cast_mut());
        // SAFETY: as the caller vouches.
        unsafe { (self.library.calls.reduce_scatter)(data, into, count, kind, SUM, self.comm, self.stream) }
    }

    /// Writes on rank `root` only.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn reduce_sum(self, data: Elements, into: u64, root: usize) -> Code {
        let (at, count, kind) = data.parts();
        let (into, root) = (into as *mut c_void, root as c_int);
        // SAFETY: as the caller vouches.
        unsafe { (self.library.calls.reduce)(at, into, count, kind, SUM, root, self.comm, self.stream) }
    }

    /// Reads `data` on rank `root` and writes it elsewhere.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn broadcast(self, data: Elements, root: usize) -> Code {
        let (at, count, kind) = data.parts();
        let (into, root) = (at.cast_mut(), root as c_int);
        // SAFETY: as the caller vouches.
        unsafe { (self.library.calls.broadcast)(at, into, count, kind, root, self.comm, self.stream) }
    }
}

impl Elements {
    fn parts(self) -> (*const c_void, usize, c_int) {
        (self.at as *const c_void, self.count, self.kind as c_int)
    }
}
