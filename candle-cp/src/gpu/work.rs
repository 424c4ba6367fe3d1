//! The plan's tile lists in device memory, uploaded once per plan.

use super::{DeviceBuffer, GpuDevice};
use crate::error::Result;
use crate::plan::{AttentionPlan, Edge};
use candle_cp_kernels::gpu::{Direction, Kernels, TileShape, Work, WorkList};
use std::sync::{Arc, Mutex, PoisonError};

const DIRECTIONS: [Direction; 3] = [Direction::Forward, Direction::BackwardQueries, Direction::BackwardKeys];

/// What was uploaded for a plan. A clone starts empty.
#[derive(Debug, Default)]
pub(crate) struct WorkCache(Mutex<Vec<(Key, Arc<PlanWork>)>>);

impl Clone for WorkCache {
    fn clone(&self) -> Self {
        Self::default()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Key {
    device: String,
    group: usize,
    shapes: [TileShape; 3],
}

/// Work of every chunk of a plan: this rank's own, then those that arrive, in the order of the hops.
#[derive(Debug)]
pub(crate) struct PlanWork {
    chunks: Vec<[Work; 3]>,
    _buffers: Vec<DeviceBuffer>,
}

impl PlanWork {
    /// The lists for one direction of a chunk.
    pub fn of(&self, chunk: usize, direction: Direction) -> Work {
        self.chunks[chunk][direction as usize]
    }

    fn upload(device: &dyn GpuDevice, plan: &AttentionPlan, group: usize, shapes: [TileShape; 3]) -> Result<Self> {
        let mut buffers = Vec::new();
        let mut upload = |words: &[u32]| -> Result<u64> {
            let buffer = device.upload(words)?;
            let address = buffer.address;
            buffers.push(buffer);
            Ok(address)
        };
        let bounds: Vec<u32> = plan.bounds().iter().flatten().flat_map(|b| [b.first, b.end]).collect();
        let bounds = upload(&bounds)?;
        let mut chunks = Vec::new();
        for edge in edges(plan) {
            let mut works = [Work::default(); 3];
            for direction in DIRECTIONS {
                let make = match direction {
                    Direction::BackwardKeys => WorkList::by_keys,
                    _ => WorkList::by_queries,
                };
                let list = make(shapes[direction as usize], group, plan.bounds(), &edge.tiles);
                let blocks = list.blocks();
                works[direction as usize] = match blocks {
                    0 => Work::default(),
                    _ => Work { tiles: upload(&list.tiles)?, entries: upload(&list.entries)?, blocks, bounds },
                };
            }
            chunks.push(works);
        }
        Ok(Self { chunks, _buffers: buffers })
    }
}

/// The chunks of a plan in the order in which they are visited.
pub(crate) fn edges(plan: &AttentionPlan) -> impl Iterator<Item = &Edge> {
    let received = plan.hops().iter().filter_map(|hop| hop.receive.as_ref()).map(|(_, edge)| edge);
    std::iter::once(plan.own()).chain(received)
}

/// The work of `plan` on a device, uploaded on first use.
pub(crate) fn work(
    device: &dyn GpuDevice,
    plan: &AttentionPlan,
    group: usize,
    kernels: &Kernels,
) -> Result<Arc<PlanWork>> {
    let shapes = DIRECTIONS.map(|direction| kernels.shape(direction));
    let key = Key { device: device.id(), group, shapes };
    let mut cache = plan.gpu.0.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, work)) = cache.iter().find(|(k, _)| *k == key) {
        return Ok(work.clone());
    }
    let work = Arc::new(PlanWork::upload(device, plan, group, shapes)?);
    cache.push((key, work.clone()));
    Ok(work)
}
