//! The vision tower: from patches of images to soft tokens of the text model.

mod block;
mod grid;
mod merger;
mod names;
mod shape;

use candle_core::Tensor;
use candle_cp::{CpContext, Tokens, with_backward};
use candle_cp_layers::{Error, Features, Linear, Result, Rope, Tap, Weights, record_numbered, wide};

pub use self::grid::{Grid, Interpolation, read_grids};
pub use self::names::push_tensors;
pub use self::shape::VisionShape;

use self::block::Block;
use self::merger::Merger;

/// That of every norm of the tower; no field of the configuration.
const LAYER_NORM_EPS: f64 = 1e-6;

/// The tower and the merger behind it.
#[derive(Debug, Clone)]
pub struct VisionTower {
    patch_projection: Linear,
    /// `[positions, width]`: the learned grid, row by row.
    position_table: Tensor,
    blocks: Vec<Block>,
    merger: Merger,
    shape: VisionShape,
}

impl VisionTower {
    /// The tower whose weights have the names of [`push_tensors`].
    ///
    /// # Errors
    /// A shape that cannot be run ([`Error::Config`]); a tensor that is missing or has another shape
    /// ([`Error::Weight`]).
    pub fn new(shape: &VisionShape, weights: &Weights) -> Result<Self> {
        shape.check()?;
        let hidden = shape.hidden_size;
        Ok(Self {
            patch_projection: patch_projection(shape, weights)?,
            position_table: weights.get(&names::position_table(), &[shape.num_position_embeddings, hidden])?,
            blocks: (0..shape.depth).map(|index| Block::new(index, shape, weights)).collect::<Result<_>>()?,
            merger: Merger::new(shape, weights)?,
            shape: shape.clone(),
        })
    }

    /// `pixel_values [patches of all images, colours * frames * rows * columns]`, normalized, in the order of
    /// [`Grid::places`]; `image_grid_thw [images, 3]`: frames, rows and columns of patches of each. Soft tokens are
    /// `[text hidden]` wide, one for every square of patches, in the order of their patches.
    ///
    /// # Errors
    /// Shapes that do not fit the model or each other ([`Error::Input`]); a grid that cannot be merged
    /// ([`Error::PatchGrid`]).
    pub fn forward(&self, pixel_values: &Tensor, image_grid_thw: &Tensor, tap: &mut dyn Tap) -> Result<Features> {
        let patches = self.count_patches(pixel_values)?;
        let merge = self.shape.spatial_merge_size;
        let grids = read_grids(image_grid_thw, patches, merge)?;
        let per_item = grids.iter().map(|grid| grid.patches() / self.shape.merged_patches()).collect();
        let dtype = self.position_table.dtype();
        if patches == 0 {
            let features_th = Tensor::zeros((0, self.shape.out_hidden_size), dtype, pixel_values.device())?;
            return Ok(Features { features_th, per_item });
        }
        let patches_pw = self.patch_projection.forward(&pixel_values.to_dtype(dtype)?)?;
        tap.record("vision.patch_embed", &patches_pw)?;

        let positions_pw =
            interpolate(&self.position_table, &Interpolation::new(&grids, self.shape.grid_side(), merge))?;
        let mut x_1pw = (patches_pw + positions_pw)?.unsqueeze(0)?;
        let context = CpContext::single(documents(&grids)?)?;
        let rope = self.rope(&grids, &x_1pw)?;
        for (index, block) in self.blocks.iter().enumerate() {
            x_1pw = block.forward(&x_1pw, &rope, &context)?;
            record_numbered(tap, "vision.layer", index, &x_1pw.squeeze(0)?)?;
        }
        let x_pw = x_1pw.squeeze(0)?;
        tap.record("vision.tower_out", &x_pw)?;
        let features_th = self.merger.forward(&x_pw)?;
        tap.record("vision.features", &features_th)?;
        Ok(Features { features_th, per_item })
    }

    fn count_patches(&self, pixel_values: &Tensor) -> Result<usize> {
        let VisionShape { in_channels, temporal_patch_size, patch_size, .. } = self.shape;
        match *pixel_values.dims() {
            [patches, len] if len == self.shape.patch_len() => Ok(patches),
            _ => Err(Error::Input {
                name: "pixel_values",
                found: format!("{:?}", pixel_values.dims()),
                expected: format!(
                    "[patches, {}] ({in_channels} colours, temporal_patch_size {temporal_patch_size}, patch_size \
                     {patch_size})",
                    self.shape.patch_len()
                ),
            }),
        }
    }

    /// Angles of a patch's row in the first half of the pairs, of its column in the second.
    fn rope(&self, grids: &[Grid], x_1pw: &Tensor) -> Result<Rope> {
        let frequencies = self.shape.inverse_frequencies();
        let (_, patches, _) = x_1pw.dims3()?;
        let mut angles = Vec::with_capacity(patches * 2 * frequencies.len());
        for (row, column) in grids.iter().flat_map(|grid| grid.places(self.shape.spatial_merge_size)) {
            for place in [row, column] {
                angles.extend(frequencies.iter().map(|frequency| place as f64 * frequency));
            }
        }
        let angles_1pd = Tensor::from_vec(angles, (1, patches, 2 * frequencies.len()), x_1pw.device())?;
        Ok(Rope::from_angles(&angles_1pd, wide(x_1pw.dtype()))?)
    }
}

/// The convolution over patches: its kernel is as large as a patch, so it is a projection of the patch.
fn patch_projection(shape: &VisionShape, weights: &Weights) -> Result<Linear> {
    let name = names::patch_projection();
    let kernel = weights.get(&format!("{name}.weight"), &shape.patch_kernel())?;
    let bias_o = Some(weights.get(&format!("{name}.bias"), &[shape.hidden_size])?);
    Ok(Linear { bias_o, ..Linear::plain(kernel.flatten_from(1)?) })
}

/// The projection `[outputs, inputs]` of this name, with its bias.
fn linear(weights: &Weights, name: &str, [outputs, inputs]: [usize; 2]) -> Result<Linear> {
    let bias_o = Some(weights.get(&format!("{name}.bias"), &[outputs])?);
    Ok(Linear { bias_o, ..Linear::load(weights, &format!("{name}.weight"), [outputs, inputs])? })
}

/// The learned grid `[positions, width]` at every patch, `[patches, width]`, summed in f32 (f64 for f64). Nothing is kept
/// for backward but entries and weights.
fn interpolate(table: &Tensor, places: &Interpolation) -> Result<Tensor> {
    let (dtype, sum_type, device) = (table.dtype(), wide(table.dtype()), table.device());
    let mut corners = Vec::with_capacity(places.entries.len());
    for (entries, weights) in places.entries.iter().zip(&places.weights) {
        let weights_p1 = Tensor::new(weights.as_slice(), device)?.unsqueeze(1)?.to_dtype(sum_type)?;
        corners.push((Tensor::new(entries.as_slice(), device)?, weights_p1));
    }
    let constant = table.detach();
    let corner = |(entries, weights_p1): &(Tensor, Tensor)| {
        constant.index_select(entries, 0)?.to_dtype(sum_type)?.broadcast_mul(weights_p1)
    };
    let mut sum_pw = corner(&corners[0])?;
    for one in &corners[1..] {
        sum_pw = (sum_pw + corner(one)?)?;
    }
    let value = sum_pw.to_dtype(dtype)?;
    Ok(with_backward("interpolate", [table], value, move |[table], grad| {
        let grad_pw = grad.to_dtype(sum_type)?;
        let mut sum = Tensor::zeros(table.shape(), sum_type, table.device())?;
        for (entries, weights_p1) in &corners {
            sum = sum.index_add(entries, &grad_pw.broadcast_mul(weights_p1)?.contiguous()?, 0)?;
        }
        Ok([Some(sum.to_dtype(table.dtype())?)])
    })?)
}

/// All patches are one row, every frame a document of it.
fn documents(grids: &[Grid]) -> Result<Tokens> {
    let frames = grids.iter().flat_map(|grid| std::iter::repeat_n(grid.per_frame(), grid.frames));
    let documents: Vec<i64> = (0..).zip(frames).flat_map(|(frame, len)| std::iter::repeat_n(frame, len)).collect();
    let groups = vec![-1; documents.len()];
    Ok(Tokens::new(vec![documents], vec![groups])?)
}
