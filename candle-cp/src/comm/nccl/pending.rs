//! Point-to-point exchanges.

use super::calls::Elements;
use super::library::SUCCESS;
use super::link::{About, Link, Slot};
use super::tensors::{self, Landing};
use crate::comm::header::{self, Header};
use crate::comm::{Alive, Expected, Pending, Received, Tag};
use crate::error::Result;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;
use std::time::Instant;

/// An exchange on its way. Dropped without a wait, it keeps what the device may still use out of others' hands.
pub struct NcclPending {
    link: Arc<Link>,
    tag: Tag,
    /// Where the received tensor goes: the CPU if the sent one came from there.
    home: Option<Device>,
    /// On the device, with its guard.
    sent: Option<(usize, Tensor, Alive)>,
    receive: Option<Receive>,
    slot: Option<Slot>,
    /// Behind the headers, and behind everything.
    headers_done: CudaEvent,
    done: Option<CudaEvent>,
}

struct Receive {
    from: usize,
    dtype: DType,
    dims: Vec<usize>,
    landing: Option<Landing>,
}

impl Receive {
    fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    fn bytes(&self) -> usize {
        self.elements() * self.dtype.size_in_bytes()
    }
}

impl NcclPending {
    /// Posts the headers, then the tensors. Without an expected shape the host waits for the header here.
    pub fn post(
        link: &Arc<Link>,
        tag: Tag,
        sent: Option<(usize, Tensor)>,
        expected: Option<Expected>,
        home: Option<Device>,
    ) -> Result<Self> {
        let header = sent.as_ref().map(|(_, tensor)| Header::new(tag, tensor.dtype(), tensor.dims())).transpose()?;
        if let Some(expected) = &expected {
            Header::new(tag, expected.dtype, expected.shape.as_deref().unwrap_or_default())?;
        }
        let from = expected.as_ref().map(|expected| expected.from);
        let to = sent.as_ref().map(|(to, _)| *to);
        let about = About { operation: &tag, peer: from.or(to), bytes: header.as_ref().map_or(0, Header::bytes) };
        let mut slot = link.slot(&about)?;
        let headers_done = match link.post_headers(&about, &mut slot, to.zip(header.as_ref()), from) {
            Ok(mark) => mark,
            Err(e) => {
                link.retire(slot);
                return Err(e);
            }
        };
        let sent = sent.map(|(to, tensor)| {
            let alive = Alive::new(link.counters(), tag.traffic, &tensor);
            link.counters().sent(tag.traffic, alive.bytes());
            (to, tensor, alive)
        });
        let (link, slot) = (link.clone(), Some(slot));
        let mut pending = Self { link, tag, home, sent, receive: None, slot, headers_done, done: None };
        pending.receive = expected.map(|expected| pending.land(expected)).transpose()?;
        pending.post_tensors(&about)?;
        Ok(pending)
    }

    fn land(&self, expected: Expected) -> Result<Receive> {
        let Expected { from, shape, dtype } = expected;
        let dims = match shape {
            Some(dims) => dims,
            None => {
                let start = Instant::now();
                let header = self.header(from, dtype, None);
                self.link.counters().waited(self.tag.traffic, start.elapsed());
                header?.dims
            }
        };
        let mut receive = Receive { from, dtype, dims, landing: None };
        if receive.bytes() > 0 {
            receive.landing = Some(Landing::new(self.link.device(), dtype, receive.elements())?);
        }
        Ok(receive)
    }

    fn post_tensors(&mut self, about: &About) -> Result<()> {
        let link = &self.link;
        // What is sent has been computed, and the memory for what comes is free, when the device gets there.
        link.after_compute(about)?;
        let sent = self.sent.as_ref().filter(|(_, tensor, _)| tensor.elem_count() > 0);
        let (to, from) = (sent.map(|(to, ..)| *to), self.receive.as_ref().map(|receive| receive.from));
        let post = |data: Option<Elements>, into: Option<Elements>| {
            link.post(about, |way| {
                let mut code = SUCCESS;
                if let Some((data, to)) = data.zip(to) {
                    // SAFETY: the tensor is contiguous and kept until the device is through.
                    code = unsafe { way.send(data, to) };
                }
                match into.zip(from) {
                    // SAFETY: the landing is kept until the device is through.
                    Some((into, from)) if code == SUCCESS => unsafe { way.recv(into, from) },
                    _ => code,
                }
            })
        };
        let landing = self.receive.as_mut().and_then(|receive| receive.landing.as_mut());
        match (sent, landing) {
            (None, None) => {}
            (Some((_, tensor, _)), None) => tensors::reading(tensor, &link.stream, |data| post(Some(data), None))?,
            (None, Some(landing)) => landing.writing(&link.stream, |into| post(None, Some(into)))?,
            (Some((_, tensor, _)), Some(landing)) => tensors::reading(tensor, &link.stream, |data| {
                landing.writing(&link.stream, |into| post(Some(data), Some(into)))
            })?,
        }
        self.done = Some(link.mark(about)?);
        Ok(())
    }

    /// Waits for the peer's header and checks it. A peer that is out of step ends the group: what it sent does not fit
    /// into what was posted.
    fn header(&self, from: usize, dtype: DType, dims: Option<&[usize]>) -> Result<Header> {
        let bytes = dims.map_or(0, |dims| dims.iter().product::<usize>() * dtype.size_in_bytes());
        let about = About { operation: &self.tag, peer: Some(from), bytes };
        self.link.wait(&about, &self.headers_done)?;
        let slot = self.slot.as_ref().expect("kept until the end");
        let numbers = self.link.headers(&about, slot)?.next().unwrap_or_default();
        let who = (self.link.world_rank(self.link.rank), self.link.world_rank(from));
        header::checked(numbers, who, (self.tag, dtype, dims)).map_err(|e| self.link.end(e))
    }

    fn finish(&mut self) -> Result<Option<Received>> {
        if let Some(receive) = &self.receive {
            self.header(receive.from, receive.dtype, Some(&receive.dims))?;
        }
        let peer = self.receive.as_ref().map(|r| r.from).or(self.sent.as_ref().map(|(to, ..)| *to));
        let bytes = self.receive.as_ref().map_or(0, Receive::bytes);
        let about = About { operation: &self.tag, peer, bytes };
        let done = self.done.take().expect("posted");
        let passed = self.link.wait(&about, &done);
        // For the memory that goes back to the device's own stream, and for readers of what came.
        self.link.cuda(&about, self.link.compute().wait(&done))?;
        passed?;
        self.link.give_back(self.slot.take().expect("kept until the end"));
        self.sent = None;
        let Some(receive) = self.receive.take() else { return Ok(None) };
        let tensor = match receive.landing {
            Some(landing) => landing.into_tensor(&receive.dims),
            None => Tensor::zeros(receive.dims, receive.dtype, &Device::Cuda(self.link.device().clone()))?,
        };
        let tensor = match &self.home {
            Some(home) => tensor.to_device(home)?,
            None => tensor,
        };
        let alive = Alive::new(self.link.counters(), self.tag.traffic, &tensor);
        self.link.counters().received(self.tag.traffic, alive.bytes());
        Ok(Some(Received { tensor, _alive: Box::new(alive) }))
    }
}

impl Pending for NcclPending {
    fn wait(mut self: Box<Self>) -> Result<Option<Received>> {
        let start = Instant::now();
        let received = self.finish();
        self.link.counters().waited(self.tag.traffic, start.elapsed());
        received
    }
}

impl Drop for NcclPending {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        // Tensors go back to the device's own stream, which first lets the communicator's pass.
        let _ = self.link.compute().join(&self.link.stream);
        self.link.retire(slot);
    }
}
