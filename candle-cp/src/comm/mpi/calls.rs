//! The calls of MPI that are used, with their return codes as texts. All of them belong on one thread.

use ::mpi::ffi;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::result::Result;
use std::sync::atomic::{AtomicBool, Ordering};

/// MPI belongs to the process: it can be started once, and never again.
static STARTED: AtomicBool = AtomicBool::new(false);

pub type Request = ffi::MPI_Request;

/// All ranks, on a communicator of our own whose errors are returned.
pub struct Mpi {
    comm: ffi::MPI_Comm,
    pub rank: usize,
    pub size: usize,
    /// Tags go from 0 to this.
    pub largest_tag: usize,
    indices: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

/// One of the requests that were tested: its place among them, and the bytes that came or the failure.
pub type Tested = (usize, Result<usize, String>);

impl Mpi {
    /// Starts MPI. Where no launcher started this process, it is alone.
    pub fn start() -> Result<Self, String> {
        let flag = |call: unsafe extern "C" fn(*mut c_int) -> c_int, name| {
            let mut flag = 0;
            // SAFETY: the two questions that may be asked at any time.
            checked(unsafe { call(&mut flag) }, name).map(|()| flag != 0)
        };
        if flag(ffi::MPI_Finalized, "MPI_Finalized")? {
            return Err(
                "this process has ended MPI already, which cannot begin anew; connect once and keep the group".into()
            );
        }
        if STARTED.swap(true, Ordering::SeqCst) || flag(ffi::MPI_Initialized, "MPI_Initialized")? {
            return Err("this process uses MPI already; connect once, and make smaller groups by split".into());
        }
        let mut provided = 0;
        // SAFETY: MPI has not been started; it takes no arguments of the program.
        unsafe {
            let code =
                ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), ffi::RSMPI_THREAD_FUNNELED, &mut provided);
            checked(code, "MPI_Init_thread")?;
            if provided < ffi::RSMPI_THREAD_FUNNELED {
                return Err("this MPI does not allow for other threads in the process; use one built with them".into());
            }
            let mut comm = ffi::RSMPI_COMM_NULL;
            checked(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut comm), "MPI_Comm_dup")?;
            checked(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN), "MPI_Comm_set_errhandler")?;
            let (mut rank, mut size) = (0, 0);
            checked(ffi::MPI_Comm_rank(comm, &mut rank), "MPI_Comm_rank")?;
            checked(ffi::MPI_Comm_size(comm, &mut size), "MPI_Comm_size")?;
            let (mut bound, mut found) = (ptr::null_mut::<c_int>(), 0);
            let place = (&raw mut bound).cast::<c_void>();
            checked(ffi::MPI_Comm_get_attr(comm, ffi::MPI_TAG_UB as c_int, place, &mut found), "MPI_Comm_get_attr")?;
            // What the standard promises at least.
            let largest_tag = if found != 0 && !bound.is_null() { *bound } else { 32767 };
            let number = |x: c_int| usize::try_from(x).map_err(|_| format!("MPI counts {x}"));
            let (rank, size, largest_tag) = (number(rank)?, number(size)?, number(largest_tag)?);
            Ok(Self { comm, rank, size, largest_tag, indices: Vec::new(), statuses: Vec::new() })
        }
    }

    /// Gives all ranks what rank 0 has in `bytes`; waits for it.
    pub fn broadcast(&self, bytes: &mut [u8]) -> Result<(), String> {
        let count = c_int::try_from(bytes.len()).expect("a short message");
        // SAFETY: as many bytes as said.
        let code = unsafe { ffi::MPI_Bcast(bytes.as_mut_ptr().cast(), count, ffi::RSMPI_UINT8_T, 0, self.comm) };
        checked(code, "MPI_Bcast")
    }

    /// Starts to send bytes.
    ///
    /// # Safety
    /// They stay in place, unchanged, until the request is done.
    pub unsafe fn send(&self, data: *const u8, bytes: usize, to: usize, tag: usize) -> Result<Request, String> {
        let mut request = request_null();
        let [count, to, tag] = [bytes, to, tag].map(|x| c_int::try_from(x).expect("checked when connected"));
        // SAFETY: the caller's promise.
        let code = unsafe { ffi::MPI_Isend(data.cast(), count, ffi::RSMPI_UINT8_T, to, tag, self.comm, &mut request) };
        checked(code, "MPI_Isend").map(|()| request)
    }

    /// Starts to receive bytes.
    ///
    /// # Safety
    /// Nobody else uses the place until the request is done.
    pub unsafe fn receive(&self, place: *mut u8, bytes: usize, from: usize, tag: usize) -> Result<Request, String> {
        let mut request = request_null();
        let [count, from, tag] = [bytes, from, tag].map(|x| c_int::try_from(x).expect("checked when connected"));
        // SAFETY: the caller's promise.
        let code =
            unsafe { ffi::MPI_Irecv(place.cast(), count, ffi::RSMPI_UINT8_T, from, tag, self.comm, &mut request) };
        checked(code, "MPI_Irecv").map(|()| request)
    }

    /// Lets MPI work, and says which requests are done; those are null from then on.
    pub fn test(&mut self, requests: &mut [Request]) -> Result<Vec<Tested>, String> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        // SAFETY: a status is plain numbers.
        self.statuses.resize_with(requests.len(), || unsafe { std::mem::zeroed() });
        self.indices.resize(requests.len(), 0);
        let (mut done, count) = (0, c_int::try_from(requests.len()).map_err(|e| e.to_string())?);
        let (indices, statuses) = (self.indices.as_mut_ptr(), self.statuses.as_mut_ptr());
        // SAFETY: the lists have room for all requests.
        let code = unsafe { ffi::MPI_Testsome(count, requests.as_mut_ptr(), &mut done, indices, statuses) };
        let each = code == ffi::MPI_ERR_IN_STATUS as c_int;
        if !each {
            checked(code, "MPI_Testsome")?;
        }
        let done = usize::try_from(done).unwrap_or(0);
        let tested = self.indices[..done].iter().zip(&self.statuses).map(|(&index, status)| {
            let failed = if each { status.MPI_ERROR } else { ffi::MPI_SUCCESS as c_int };
            let mut bytes = 0;
            // SAFETY: a status that MPI has filled.
            let counted = unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut bytes) };
            let came = checked(failed, "a transfer").and_then(|()| checked(counted, "MPI_Get_count"));
            (index as usize, came.map(|()| usize::try_from(bytes).unwrap_or(0)))
        });
        Ok(tested.collect())
    }

    /// Lets MPI work while there is no request to test.
    pub fn work(&mut self) -> Result<(), String> {
        let mut flag = 0;
        // SAFETY: only looks for messages, whose status is not asked for.
        let code = unsafe {
            let (any, status) = ((ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG), ffi::RSMPI_STATUS_IGNORE);
            ffi::MPI_Iprobe(any.0, any.1, self.comm, &mut flag, status)
        };
        checked(code, "MPI_Iprobe")
    }

    /// Ends MPI; returns when the other ranks do so, too. Nothing else may be called from then on.
    pub fn finalize(&mut self) {
        // SAFETY: no request is left. The code says nothing that could still be acted on.
        unsafe { ffi::MPI_Finalize() };
    }
}

fn request_null() -> Request {
    // SAFETY: a constant.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

fn checked(code: c_int, call: &str) -> Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: room for the longest text there is.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) } == ffi::MPI_SUCCESS as c_int;
    let text = &text[..usize::try_from(len).unwrap_or(0).min(text.len())];
    Err(match known {
        true => format!("{call} says: {}", String::from_utf8_lossy(text).trim_end_matches('\0')),
        false => format!("{call} returned {code}"),
    })
}
