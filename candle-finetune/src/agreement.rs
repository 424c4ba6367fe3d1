//! What all ranks have to know of the batches of a step: how many labels there are, and that ranks which share sequences have
//! the same ones.

use candle_core::{Device, Tensor};
use candle_cp::Communicator;
use candle_cp::comm::Mesh;
use candle_cp_layers::Weights;
use rayon::prelude::*;
use safetensors::View;

use crate::error::{Error, Result};
use crate::packing::Batch;

/// Parts of batches that are compared, by what an error calls them.
const PARTS: [&str; 4] = ["the tokens", "the labels", "the documents", "the pictures"];

/// Counts over the batches of a step on all replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Tokens that are not padding.
    pub tokens: usize,
    /// Learned tokens.
    pub label_tokens: usize,
}

/// Compares this rank's batches, of which `label_tokens` are learned, with those of its replica and counts over all replicas.
/// Every rank has to call it.
///
/// # Errors
/// [`Error::RanksDiffer`] if ranks of one replica have other batches; or another rank failed.
pub(crate) fn agree(mesh: &Mesh, step: usize, batches: &[Batch], label_tokens: usize) -> Result<Totals> {
    let tokens: usize = batches.iter().map(Batch::token_count).sum();
    let sums = checksums(batches).map(i64::from);
    let mine = [sums.as_slice(), &[batches.len() as i64, tokens as i64, label_tokens as i64]].concat();
    let all = mesh.world().all_gather(&Tensor::new(mine.as_slice(), &Device::Cpu)?)?;
    let all = all.iter().map(Tensor::to_vec1::<i64>).collect::<candle_core::Result<Vec<_>>>()?;
    let (context, rank) = (mesh.context().size(), mesh.world().rank());
    let first = mesh.replica() * context;
    for (peer, theirs) in all.iter().enumerate().skip(first).take(context) {
        let names = PARTS.iter().copied().chain(["the number", "the count of tokens", "the count of labels"]);
        if let Some(((what, mine), theirs)) = names.zip(&mine).zip(theirs).find(|((_, mine), theirs)| mine != theirs) {
            let what = format!("{what} of the batches of step {step} (checksum or count)");
            let (mine, theirs) = (mine.to_string(), theirs.to_string());
            return Err(Error::RanksDiffer { what, rank, mine, peer, theirs });
        }
    }
    // One rank of each replica tells for all of them.
    let of_replicas = |place: usize| all.iter().step_by(context).map(|counts| counts[place] as usize).sum();
    Ok(Totals { tokens: of_replicas(PARTS.len() + 1), label_tokens: of_replicas(PARTS.len() + 2) })
}

/// Compares the numbers of all weights over ranks, tensor by tensor. Every rank has to call it; ranks that are threads
/// have read the same files.
///
/// # Errors
/// [`Error::RanksDiffer`] names the first tensor, in name order, that is not the same; or another rank failed.
pub(crate) fn agree_on_weights(world: &dyn Communicator, weights: &Weights) -> Result<()> {
    let trained = weights.variables().iter().map(|(name, var)| (name, var.as_tensor()));
    let mut tensors: Vec<(&String, &Tensor)> = trained.chain(weights.buffers()).chain(weights.frozen()).collect();
    tensors.sort_by_key(|(name, _)| *name);
    let checksum = |(_, tensor): &(&String, &Tensor)| {
        let here = tensor.to_device(&Device::Cpu)?.contiguous()?;
        Ok(i64::from(crc32c::crc32c(&View::data(&here))))
    };
    let mine: Vec<i64> = tensors.par_iter().map(checksum).collect::<candle_core::Result<_>>()?;
    let all = world.all_gather(&Tensor::new(mine.as_slice(), &Device::Cpu)?)?;
    for (peer, theirs) in all.iter().enumerate() {
        let theirs = theirs.to_vec1::<i64>()?;
        if let Some(place) = mine.iter().zip(&theirs).position(|(mine, theirs)| mine != theirs) {
            let what = format!("the weight {}, by its checksum,", tensors[place].0);
            let (mine, theirs) = (mine[place].to_string(), theirs[place].to_string());
            return Err(Error::RanksDiffer { what, rank: world.rank(), mine, peer, theirs });
        }
    }
    Ok(())
}

/// One checksum (CRC-32C) for each of [`PARTS`].
fn checksums(batches: &[Batch]) -> [u32; PARTS.len()] {
    let mut sums = [0; PARTS.len()];
    for batch in batches {
        let [tokens, labels, documents, pictures] = &mut sums;
        batch.ids.iter().for_each(|row| add(tokens, row.iter().map(|id| id.to_le_bytes())));
        for row in batch.labels.iter().chain(&batch.parts) {
            add(labels, row.iter().map(|label| label.to_le_bytes()));
        }
        for row in batch.documents.iter().chain(&batch.groups) {
            add(documents, row.iter().map(|document| document.to_le_bytes()));
        }
        for picture in &batch.pictures {
            add(pictures, picture.grid_thw.iter().map(|size| (*size as u64).to_le_bytes()));
            add(
                pictures,
                picture
                    .positions
                    .iter()
                    .map(|[x, y]| (u128::from(*x as u64) | u128::from(*y as u64) << 64).to_le_bytes()),
            );
            add(pictures, picture.pixels.iter().map(|pixel| pixel.to_le_bytes()));
        }
    }
    sums
}

/// Goes on with a checksum, and tells where a row ends.
fn add<const N: usize>(sum: &mut u32, numbers: impl ExactSizeIterator<Item = [u8; N]> + Clone) {
    let bytes: Vec<u8> = numbers.clone().flatten().chain((numbers.len() as u64).to_le_bytes()).collect();
    *sum = crc32c::crc32c_append(*sum, &bytes);
}
