//! The vision tower: from patches of images to features in the width of the text model.

use candle_core::{D, Tensor};
use candle_cp::{CpContext, Tokens};

use crate::config::{Config, VisionConfig};
use crate::layer::{Layer, LayerShape};
use crate::names;
use crate::patches::{Patches, check_shapes};
use candle_cp_layers::{Features, Linear, Result, RmsNorm, Rope, Tap, Weights, record_numbered, wide};

/// Shift and scale of the pooled features.
#[derive(Debug, Clone)]
struct Standardize {
    bias: Tensor,
    scale: Tensor,
}

/// The tower and the projection behind it.
#[derive(Debug, Clone)]
pub(crate) struct VisionTower {
    patch_projection: Linear,
    /// `[2, positions, width]`: one table per axis.
    position_table: Tensor,
    layers: Vec<Layer>,
    standardize: Option<Standardize>,
    projection_norm: RmsNorm,
    projection: Linear,
    vision: VisionConfig,
    text_hidden: usize,
}

impl VisionTower {
    pub(crate) fn new(config: &Config, vision: &VisionConfig, weights: &Weights) -> Result<Self> {
        let hidden = vision.hidden_size;
        let layers = 0..vision.num_hidden_layers;
        let standardize = match vision.standardize {
            true => Some(Standardize {
                bias: weights.get(names::STD_BIAS, &[hidden])?,
                scale: weights.get(names::STD_SCALE, &[hidden])?,
            }),
            false => None,
        };
        Ok(Self {
            patch_projection: Linear::load(weights, names::PATCH_PROJECTION, [hidden, vision.patch_len()])?,
            position_table: weights.get(names::POSITION_TABLE, &[2, vision.position_embedding_size, hidden])?,
            layers: layers
                .map(|index| Layer::new(&LayerShape::vision(index, vision), weights))
                .collect::<Result<_>>()?,
            standardize,
            projection_norm: RmsNorm::new(None, vision.rms_norm_eps),
            projection: Linear::load(weights, names::VISION_PROJECTION, [config.text.hidden_size, hidden])?,
            vision: vision.clone(),
            text_hidden: config.text.hidden_size,
        })
    }

    /// `pixel_values [images, patches, 3 p p]` in 0..1, `position_ids [images, patches, 2]`.
    pub(crate) fn forward(&self, pixel_values: &Tensor, position_ids: &Tensor, tap: &mut dyn Tap) -> Result<Features> {
        check_shapes(pixel_values, position_ids, self.vision.patch_len(), self.vision.patch_size)?;
        let patches = Patches::read(position_ids, &self.vision)?;
        if patches.pooled.is_empty() {
            let features_th = Tensor::zeros((0, self.text_hidden), self.position_table.dtype(), pixel_values.device())?;
            return Ok(Features { features_th, per_item: patches.soft_tokens });
        }
        let mut x_npw = self.embed_patches(pixel_values, &patches)?;
        tap.record("vision.patch_embed", &x_npw)?;

        let context = CpContext::single(documents(&patches)?)?;
        let rope = self.rope(&patches, &x_npw)?;
        for (index, layer) in self.layers.iter().enumerate() {
            x_npw = layer.forward(&x_npw, &rope, &context)?;
            record_numbered(tap, "vision.layer", index, &x_npw)?;
        }
        let pooled_tw = self.pool(&x_npw, &patches)?;
        tap.record("vision.tower_out", &pooled_tw)?;
        let features_th = self.projection.forward(&self.projection_norm.forward(&pooled_tw)?)?;
        tap.record("vision.features", &features_th)?;
        Ok(Features { features_th, per_item: patches.soft_tokens })
    }

    /// Projects pixels from -1 to 1 and adds the two axes' position embeddings; padding has no position.
    fn embed_patches(&self, pixel_values: &Tensor, patches: &Patches) -> Result<Tensor> {
        let (images, per_image, _) = pixel_values.dims3()?;
        let dtype = self.position_table.dtype();
        let pixels = pixel_values.to_dtype(wide(dtype))?.affine(2.0, -1.0)?.to_dtype(dtype)?;
        let x_npw = self.patch_projection.forward(&pixels)?;

        let device = x_npw.device();
        let width = self.vision.hidden_size;
        let count = patches.positions.len();
        let is_real = patches.positions.iter().map(|position| if position.is_some() { 1f32 } else { 0.0 });
        let is_real = Tensor::from_iter(is_real, device)?.to_dtype(dtype)?.reshape((count, 1))?;
        let axis = |axis: usize, at: fn((u32, u32)) -> u32| -> candle_core::Result<Tensor> {
            let rows = patches.positions.iter().map(|position| position.map_or(0, at));
            self.position_table.get(axis)?.index_select(&Tensor::from_iter(rows, device)?, 0)
        };
        let positions = (axis(0, |(x, _)| x)? + axis(1, |(_, y)| y)?)?.broadcast_mul(&is_real)?;
        Ok((x_npw + positions.reshape((images, per_image, width))?)?)
    }

    fn rope(&self, patches: &Patches, x_npw: &Tensor) -> Result<Rope> {
        let (images, per_image, _) = x_npw.dims3()?;
        let axis = |at: fn((u32, u32)) -> u32| -> candle_core::Result<Tensor> {
            let positions = patches.positions.iter().map(|position| position.map_or(0, at));
            Tensor::from_iter(positions, x_npw.device())?.reshape((images, per_image))
        };
        let axes = [axis(|(x, _)| x)?, axis(|(_, y)| y)?];
        Ok(Rope::new(&axes, &self.vision.inverse_frequencies(), x_npw.dtype(), x_npw.device())?)
    }

    /// The mean of each cell of patches, scaled by sqrt(width) and standardized, in f32 (f64 for f64).
    fn pool(&self, x_npw: &Tensor, patches: &Patches) -> Result<Tensor> {
        let width = self.vision.hidden_size;
        let soft_tokens: usize = patches.soft_tokens.iter().sum();
        let cell = self.vision.pooling_kernel_size * self.vision.pooling_kernel_size;
        let dtype = wide(x_npw.dtype());
        let order = Tensor::new(patches.pooled.as_slice(), x_npw.device())?;
        let patches_tcw = x_npw.flatten_to(1)?.index_select(&order, 0)?.reshape((soft_tokens, cell, width))?;
        // The mean is rounded to the weights' type once, as in the reference, before it is scaled.
        let mean_tw = patches_tcw.to_dtype(dtype)?.mean(D::Minus2)?.to_dtype(x_npw.dtype())?;
        let scaled_tw = (mean_tw.to_dtype(dtype)? * (width as f64).sqrt())?;
        let pooled_tw = match &self.standardize {
            None => scaled_tw,
            Some(Standardize { bias, scale }) => {
                let shifted = scaled_tw.broadcast_sub(&bias.to_dtype(dtype)?)?;
                shifted.broadcast_mul(&scale.to_dtype(dtype)?)?
            }
        };
        Ok(pooled_tw.to_dtype(x_npw.dtype())?)
    }
}

/// Every image is a row of its own; padded patches belong to no document.
fn documents(patches: &Patches) -> Result<Tokens> {
    let rows = patches.positions.chunks(patches.per_image);
    let document = |position: &Option<(u32, u32)>| if position.is_some() { 0 } else { -1 };
    let documents: Vec<Vec<i64>> = rows.map(|row| row.iter().map(document).collect()).collect();
    let groups = documents.iter().map(|row| vec![-1; row.len()]).collect();
    Ok(Tokens::new(documents, groups)?)
}
