//! Sharding and gathering, out of place and differentiable.

use crate::comm::{Communicator, Traffic};
use crate::error::{Error, Result};
use crate::layout::SequenceLayout;
use crate::with_backward::with_backward;
use candle_core::Tensor;
use std::sync::Arc;

fn check_len(name: &'static str, x: &Tensor, dim: usize, len: usize) -> Result<()> {
    if x.dims().get(dim) != Some(&len) {
        let given = format!("a tensor of shape {:?}", x.shape());
        let allowed = format!("dimension {dim} has to be {len} tokens");
        return Err(Error::argument(name, given, allowed, "pass the tensor that the layout was made for"));
    }
    Ok(())
}

/// The part of `x` that `rank` owns along `dim`; beyond the end of the row it is `fill`. `x` has the unpadded length.
///
/// The gradient reaches exactly the owned rows. A rank whose slice is padding only stays attached to the graph,
/// with a gradient of zeros: were it cut off, its peers would wait for it in the backward ring.
///
/// # Errors
/// A length along `dim` that is not the layout's.
pub fn shard(layout: &SequenceLayout, rank: usize, x: &Tensor, dim: usize, fill: f64) -> Result<Tensor> {
    check_len("x", x, dim, layout.len())?;
    let pad = layout.padded_len() - layout.len();
    let padded = if pad == 0 {
        x.clone()
    } else {
        let mut shape = x.dims().to_vec();
        shape[dim] = pad;
        let tail = Tensor::full(fill, shape, x.device())?.to_dtype(x.dtype())?;
        Tensor::cat(&[x, &tail], dim)?
    };
    let pieces = layout
        .ranges(rank)
        .iter()
        .map(|range| padded.narrow(dim, range.start, range.len()))
        .collect::<candle_core::Result<Vec<_>>>()?;
    Ok(match pieces.len() {
        0 => padded.narrow(dim, 0, 0)?,
        1 => pieces[0].contiguous()?,
        _ => Tensor::cat(&pieces, dim)?,
    })
}

/// The inverse: every rank gets the whole row, without padding. Backward sums the gradients that the ranks have for the
/// whole row and returns each rank its own rows. Every rank has to call it.
///
/// # Errors
/// A length along `dim` that is not this rank's, or a communicator error.
pub fn gather(layout: &SequenceLayout, comm: &Arc<dyn Communicator>, local: &Tensor, dim: usize) -> Result<Tensor> {
    check_len("local", local, dim, layout.local_len(comm.rank()))?;
    let slices = comm.all_gather_uneven(local, dim, Traffic::Gather)?;
    let all = Tensor::cat(&slices, dim)?.contiguous()?;
    let places = layout.gather_indices();
    let places = Tensor::from_slice(&places[..layout.len()], layout.len(), all.device())?;
    let full = all.index_select(&places, dim)?;
    let (layout, comm) = (layout.clone(), comm.clone());
    Ok(with_backward("gather", [local], full, move |_, grad| {
        let total = comm.all_reduce_sum(grad)?;
        Ok([Some(shard(&layout, comm.rank(), &total, dim, 0.0)?)])
    })?)
}

/// Labels for the local slice.
#[derive(Debug, Clone)]
pub struct ShardedLabels {
    /// `[B, S_local]` i64: what the logits at each local token are scored against; -100 is ignored.
    pub labels_bs: Tensor,
    /// Labels that count in the whole batch, over all ranks.
    pub count: usize,
}

/// Label that is ignored.
pub const IGNORED: i64 = -100;

/// Shifts `[B, S]` labels on the full row, then counts and shards them. A token is never scored against the first token
/// of another document.
pub(crate) fn shard_labels(
    layout: &SequenceLayout,
    rank: usize,
    documents: &[Vec<i64>],
    labels_bs: &Tensor,
) -> Result<ShardedLabels> {
    check_len("labels", labels_bs, 1, layout.len())?;
    let device = labels_bs.device();
    let rows = labels_bs.to_dtype(candle_core::DType::I64)?.to_vec2::<i64>()?;
    if rows.len() != documents.len() {
        let given = format!("{} rows of labels", rows.len());
        return Err(Error::argument(
            "labels",
            given,
            format!("the batch has {}", documents.len()),
            "pass one row each",
        ));
    }
    let mut shifted = Vec::with_capacity(rows.len() * layout.len());
    for (row, documents) in rows.iter().zip(documents) {
        for i in 0..row.len() {
            let follows = i + 1 < row.len() && documents[i] >= 0 && documents[i] == documents[i + 1];
            shifted.push(if follows { row[i + 1] } else { IGNORED });
        }
    }
    let count = shifted.iter().filter(|&&label| label != IGNORED).count();
    let shifted = Tensor::from_vec(shifted, (rows.len(), layout.len()), device)?;
    Ok(ShardedLabels { labels_bs: shard(layout, rank, &shifted, 1, IGNORED as f64)?, count })
}
