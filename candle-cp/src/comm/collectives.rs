//! Collectives from exchanges between two ranks, in two parts: what is started early travels while something else is
//! computed.

use super::{Communicator, Expected, Pending, Tag, Traffic};
use crate::error::{Error, Result};
use candle_core::Tensor;
use std::ops::Range;

/// The elements of `count` that are a rank's share where each of `size` ranks has one: shares follow each other in rank order
/// and differ by one element at most.
///
/// ```
/// let shares: Vec<_> = (0..3).map(|rank| candle_cp::comm::share(10, 3, rank)).collect();
/// assert_eq!(shares, [0..3, 3..6, 6..10]);
/// ```
pub fn share(count: usize, size: usize, rank: usize) -> Range<usize> {
    // Wide, for the sake of the product.
    let border = |rank: usize| (rank as u128 * count as u128 / size as u128) as usize;
    border(rank)..border(rank + 1)
}

/// One message to each other rank of a group and one from each.
struct AllToAll {
    rank: usize,
    size: usize,
    /// By sender.
    pending: Vec<(usize, Box<dyn Pending>)>,
    tag: Tag,
}

impl AllToAll {
    fn start<C: Communicator + ?Sized>(
        comm: &C,
        traffic: Traffic,
        expected: impl Fn(usize) -> Expected,
        send: impl Fn(usize) -> Result<Tensor>,
    ) -> Result<Self> {
        let (rank, size, call) = (comm.rank(), comm.size(), comm.next_call());
        let mut pending = Vec::with_capacity(size);
        for step in 1..size {
            let (to, from) = ((rank + step) % size, (rank + size - step) % size);
            let exchange = comm.exchange(Tag { traffic, call, step }, Some((to, send(to)?)), Some(expected(from)))?;
            pending.push((from, exchange));
        }
        Ok(Self { rank, size, pending, tag: Tag { traffic, call, step: 0 } })
    }

    /// What came, in rank order, with `own` in its place.
    fn finish(self, own: Tensor, check: impl Fn(usize, &Tensor) -> Result<()>) -> Result<Vec<Tensor>> {
        let mut all = vec![own; self.size];
        for (from, exchange) in self.pending {
            let received = exchange.wait()?.expect("a message was expected").tensor;
            check(from, &received)?;
            all[from] = received;
        }
        Ok(all)
    }
}

/// Slices of all ranks on their way to all ranks.
#[must_use = "the other ranks wait for it to be finished"]
pub struct Gathering {
    own: Tensor,
    dim: usize,
    /// Ranks of the group, as error texts count them.
    world: Vec<usize>,
    messages: AllToAll,
}

impl Gathering {
    pub(super) fn start<C: Communicator + ?Sized>(comm: &C, x: &Tensor, dim: usize, traffic: Traffic) -> Result<Self> {
        let own = x.detach().contiguous()?;
        let dtype = own.dtype();
        let world = (0..comm.size()).map(|rank| comm.world_rank(rank)).collect();
        let expected = |from| Expected { from, shape: None, dtype };
        let messages = AllToAll::start(comm, traffic, expected, |_| Ok(own.clone()))?;
        Ok(Self { own, dim, world, messages })
    }

    /// Slices of all ranks, in rank order.
    ///
    /// # Errors
    /// As [`Pending::wait`], or the slices do not fit together.
    pub fn finish(self) -> Result<Vec<Tensor>> {
        let Self { own, dim, world, messages } = self;
        let (rank, tag, mine) = (messages.rank, messages.tag, own.clone());
        messages.finish(own, |from, theirs| {
            let rest = |t: &Tensor| t.dims().iter().enumerate().filter(|(i, _)| *i != dim).map(|(_, &n)| n).collect();
            let (a, b): (Vec<usize>, Vec<usize>) = (rest(&mine), rest(theirs));
            if a == b && mine.rank() == theirs.rank() {
                return Ok(());
            }
            Err(Error::Mismatch {
                rank: world[rank],
                operation: tag.to_string(),
                peer: world[from],
                expected: match dim < mine.rank() {
                    true => format!("{:?} up to dimension {dim}", mine.dims()),
                    false => format!("{:?}", mine.dims()),
                },
                sent: format!("{:?}", theirs.dims()),
            })
        })
    }
}

/// A sum over ranks on its way, of which this rank gets its [`share`].
#[must_use = "the other ranks wait for it to be finished"]
pub struct Reducing {
    own: Tensor,
    messages: AllToAll,
}

impl Reducing {
    pub(super) fn start<C: Communicator + ?Sized>(comm: &C, x: &Tensor, traffic: Traffic) -> Result<Self> {
        let (rank, size) = (comm.rank(), comm.size());
        let flat = x.detach().contiguous()?.flatten_all()?;
        let part = |rank: usize| {
            let Range { start, end } = share(flat.elem_count(), size, rank);
            Ok::<_, Error>(flat.narrow(0, start, end - start)?.contiguous()?)
        };
        let own = part(rank)?;
        let expected = |from| Expected { from, shape: Some(own.dims().to_vec()), dtype: own.dtype() };
        let messages = AllToAll::start(comm, traffic, expected, part)?;
        // Memory of its own, where the share is not all there is: a view, and candle's `copy`, keep the whole tensor's.
        // Not all devices give out memory of no bytes.
        let own = if size > 1 && own.elem_count() > 0 { own.force_contiguous()? } else { own };
        Ok(Self { own, messages })
    }

    /// The sums, `[share]`: each element is added up in rank order.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    pub fn finish(self) -> Result<Tensor> {
        let parts = self.messages.finish(self.own, |_, _| Ok(()))?;
        let mut sum = parts[0].clone();
        for part in &parts[1..] {
            sum = (&sum + part)?;
        }
        Ok(sum)
    }
}
