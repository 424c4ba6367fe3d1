//! Ranks in two directions: the replicas of a model, and the ranks that share the sequences of one replica.

use super::Communicator;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Data parallel times context parallel. The ranks of one replica are neighbours, since they talk most: rank
/// `replica * context + place`.
///
/// ```
/// use candle_cp::comm::{Mesh, threads};
/// let places = threads::run(6, &threads::Options::default(), |world| {
///     let mesh = Mesh::new(world, 3)?;
///     Ok::<_, candle_cp::Error>((mesh.replica(), mesh.context().rank()))
/// })?;
/// assert_eq!(places, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
/// # Ok::<(), candle_cp::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mesh {
    world: Arc<dyn Communicator>,
    context: Arc<dyn Communicator>,
    data: Arc<dyn Communicator>,
}

impl Mesh {
    /// Makes the groups; every rank has to call it. `context` ranks share a sequence.
    ///
    /// # Errors
    /// The ranks are no multiple of `context`, or as [`Communicator::split`].
    pub fn new(world: Arc<dyn Communicator>, context: usize) -> Result<Self> {
        let (rank, size) = (world.rank(), world.size());
        if context == 0 || !size.is_multiple_of(context) {
            let allowed = format!("there are {size} ranks, which have to be a whole number of replicas");
            return Err(Error::argument("context", context, allowed, "use a divisor of the number of ranks"));
        }
        let data = world.split(rank % context)?;
        Ok(Self { context: world.split(rank / context)?, data, world })
    }

    /// All ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// The ranks that share this rank's sequences.
    pub fn context(&self) -> &Arc<dyn Communicator> {
        &self.context
    }

    /// The ranks at the same place in other replicas, and this one.
    pub fn data(&self) -> &Arc<dyn Communicator> {
        &self.data
    }

    /// This rank's replica, `0..replicas`.
    pub fn replica(&self) -> usize {
        self.data.rank()
    }

    /// Replicas of the model.
    pub fn replicas(&self) -> usize {
        self.data.size()
    }
}
