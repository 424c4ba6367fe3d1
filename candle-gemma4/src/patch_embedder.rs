//! Images without a tower (unified models): every patch goes through norms and projections into the text model.

use candle_core::Tensor;

use crate::config::{Config, PatchEmbedderConfig};
use crate::names;
use crate::patches::{check_shapes, read_positions};
use candle_cp_layers::{Features, LayerNorm, Linear, Result, RmsNorm, Tap, Weights};

/// Added to the variance in every layer norm; no configuration has it.
const LAYER_NORM_EPS: f64 = 1e-5;

/// Norm, projection, norm, positions, norm, and the projection into the text model.
#[derive(Debug, Clone)]
pub(crate) struct PatchEmbedder {
    patch_norm: LayerNorm,
    dense: Linear,
    dense_norm: LayerNorm,
    /// `[positions, 2, width]`: a row for x and one for y.
    position_table: Tensor,
    position_norm: LayerNorm,
    projection_norm: RmsNorm,
    projection: Linear,
    patch_len: usize,
    /// Of a patch, in pixels.
    side: usize,
}

impl PatchEmbedder {
    pub(crate) fn new(config: &Config, shape: &PatchEmbedderConfig, weights: &Weights) -> Result<Self> {
        let (width, patch_len) = (shape.width, shape.patch_len());
        let name = |part: &str| format!("{}.{part}", names::PATCH_EMBEDDER);
        let dense = Linear {
            bias_o: Some(weights.get(&name("patch_dense.bias"), &[width])?),
            ..Linear::load(weights, &name("patch_dense.weight"), [width, patch_len])?
        };
        let projection = Linear::load(weights, names::VISION_PROJECTION, [config.text.hidden_size, width])?;
        Ok(Self {
            patch_norm: LayerNorm::load(weights, &name("patch_ln1"), patch_len, LAYER_NORM_EPS)?,
            dense,
            dense_norm: LayerNorm::load(weights, &name("patch_ln2"), width, LAYER_NORM_EPS)?,
            position_table: weights.get(&name("pos_embedding"), &[shape.position_embedding_size, 2, width])?,
            position_norm: LayerNorm::load(weights, &name("pos_norm"), width, LAYER_NORM_EPS)?,
            projection_norm: RmsNorm::new(None, shape.rms_norm_eps),
            projection,
            patch_len,
            side: shape.patch_size * shape.pooling_kernel_size,
        })
    }

    /// `pixel_values [images, patches, 3 side^2]` in 0..1, `position_ids [images, patches, 2]`: one soft token per patch,
    /// in the order in which they are given; padding, (-1, -1), is left out.
    pub(crate) fn forward(&self, pixel_values: &Tensor, position_ids: &Tensor, tap: &mut dyn Tap) -> Result<Features> {
        let (images, patches) = check_shapes(pixel_values, position_ids, self.patch_len, self.side)?;
        let limit = self.position_table.dim(0)?;
        let positions = read_positions(position_ids, limit, "vision_config.mm_posemb_size")?;

        let x_npl = pixel_values.to_dtype(self.position_table.dtype())?;
        let x_npw = self.dense_norm.forward(&self.dense.forward(&self.patch_norm.forward(&x_npl)?)?)?;
        let x_npw = (x_npw + self.embed_positions(&positions)?.reshape((images, patches, ()))?)?;
        let x_npw = self.position_norm.forward(&x_npw)?;
        let features_nph = self.projection.forward(&self.projection_norm.forward(&x_npw)?)?;
        tap.record("vision.features", &features_nph)?;

        let is_real = |image: &[Option<_>]| image.iter().map(Option::is_some).collect();
        Features::of_real(&features_nph, &positions.chunks(patches).map(is_real).collect::<Vec<_>>())
    }

    /// The sum of the two axes' rows, `[images * patches, width]`; padding has zeros.
    fn embed_positions(&self, positions: &[Option<(u32, u32)>]) -> candle_core::Result<Tensor> {
        let device = self.position_table.device();
        let is_real = positions.iter().map(|position| if position.is_some() { 1f32 } else { 0.0 });
        let is_real = Tensor::from_iter(is_real, device)?.to_dtype(self.position_table.dtype())?.unsqueeze(1)?;
        let rows = self.position_table.flatten_to(1)?;
        let axis = |axis: u32, at: fn((u32, u32)) -> u32| -> candle_core::Result<Tensor> {
            let places = positions.iter().map(|position| 2 * position.map_or(0, at) + axis);
            rows.index_select(&Tensor::from_iter(places, device)?, 0)
        };
        (axis(0, |(x, _)| x)? + axis(1, |(_, y)| y)?)?.broadcast_mul(&is_real)
    }
}
