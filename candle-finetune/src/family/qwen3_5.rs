//! Qwen 3.5 and 3.6.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_cp::{CpContext, DeltaHeads, LayerWork, ShardedLabels};
use candle_cp_layers::{Placeholders, Recompute, Weights};
use candle_qwen3_5::{Config, Inputs, LayerKind, MlpConfig, Model, TextConfig};
use candle_vlm_processor::{ImagePatches, ImageSettings, Qwen3_5ImageSettings};

use super::{
    AttentionShape, DecoderLayerShape, DecoderShape, ExpertsShape, KeyRole, Mixer, TokenIds, Turns, VisionShape,
    VlmConfig, VlmModel, check_settings,
};
use crate::device::ComputeDevice;
use crate::encoder::or_missing;
use crate::error::Result;
use crate::packing::Batch;

/// Pixels of pictures in released checkpoints, which bring pictures into -1..1.
const MEAN_AND_DEVIATION: ([f32; 3], [f32; 3]) = ([0.5; 3], [0.5; 3]);

/// Soft tokens of a picture of a million pixels, which the planner takes for the usual one.
const TOKENS_PER_PICTURE: usize = 1024;

impl VlmConfig for Config {
    fn title(&self) -> String {
        format!("Qwen 3.5, {} layers of width {}", self.text.layers.len(), self.text.hidden_size)
    }

    fn token_ids(&self) -> TokenIds {
        let eos = self.eos_token_ids.first().copied();
        TokenIds { pad: self.text.pad_token_id.or(eos).unwrap_or(0), bos: None, needs_bos: false, eos }
    }

    fn placeholders(&self) -> Placeholders {
        Config::placeholders(self)
    }

    fn around_picture(&self) -> (u32, u32) {
        (self.vision_start_token_id, self.vision_end_token_id)
    }

    fn turns(&self) -> Turns {
        Turns { open: "<|im_start|>", close: "<|im_end|>", assistant: "assistant" }
    }

    fn layer_work(&self) -> Vec<LayerWork> {
        self.text.layer_work()
    }

    fn decoder_layer(&self, name: &str) -> Option<usize> {
        Config::decoder_layer(self, name)
    }

    fn decoder_shape(&self) -> DecoderShape {
        let text = &self.text;
        DecoderShape {
            vocab_size: text.vocab_size,
            hidden_size: text.hidden_size,
            tied: self.tie_word_embeddings,
            per_layer_width: None,
            sandwich_norms: false,
            scaled_layers: false,
            layers: text.layers.iter().map(|kind| layer_shape(text, *kind)).collect(),
            vision: self.vision.as_ref().map(|vision| vision_shape(&vision.shape)),
        }
    }

    fn image_settings(&self) -> Option<Box<dyn ImageSettings>> {
        settings(self).map(|settings| Box::new(settings) as Box<dyn ImageSettings>)
    }

    fn read_image_settings(&self, folder: &Path) -> Result<std::result::Result<Box<dyn ImageSettings>, String>> {
        let Some(model) = settings(self) else { return Ok(Err("this model takes no pictures".to_string())) };
        match or_missing(Qwen3_5ImageSettings::from_folder(folder))? {
            Err(reason) => Ok(Err(reason)),
            Ok(settings) => {
                check_settings(told(&settings), told(&model))?;
                Ok(Ok(Box::new(settings)))
            }
        }
    }

    /// The grid of positions is interpolated to any shape.
    fn check_picture(&self, _: (usize, usize)) -> std::result::Result<(), String> {
        Ok(())
    }

    fn check_device(&self, device: ComputeDevice) -> std::result::Result<(), String> {
        match device {
            ComputeDevice::Cpu => Ok(()),
            ComputeDevice::Cuda(_) => {
                Err("the gated delta rule and the causal convolution of Qwen 3.5 have no CUDA kernels yet".to_string())
            }
        }
    }

    fn model(&self, weights: &Weights) -> Result<Box<dyn VlmModel>> {
        let merge_size = self.vision.as_ref().map_or(1, |vision| vision.shape.spatial_merge_size);
        let image = Config::placeholders(self).image;
        Ok(Box::new(Placed { model: Model::new(self, weights)?, merge_size, image }))
    }
}

/// The model, and what the places of pictures in a row depend on.
#[derive(Debug)]
struct Placed {
    model: Model,
    merge_size: usize,
    image: Option<u32>,
}

impl VlmModel for Placed {
    fn hidden(
        &self,
        batch: &Batch,
        context: &CpContext,
        recompute: &Recompute,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let inputs = self.inputs(batch, dtype, device)?;
        let local =
            self.model.shard(&self.model.embed(&inputs, &mut ())?, inputs.position_ids_abs.as_ref(), context)?;
        Ok(self.model.decode_with(&local, context, recompute, &mut ())?)
    }

    fn loss(&self, hidden_bsh: &Tensor, labels: &ShardedLabels) -> Result<Tensor> {
        Ok(self.model.loss(hidden_bsh, labels)?)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.model.logits(hidden)?)
    }
}

impl Placed {
    fn inputs(&self, batch: &Batch, dtype: DType, device: &Device) -> Result<Inputs> {
        let mut inputs = Inputs::text(Tensor::new(batch.ids.clone(), &Device::Cpu)?);
        inputs.position_ids_abs = Some(self.positions(batch)?);
        if let Some((pixels, grids)) = tensors(&batch.pictures, dtype, device)? {
            (inputs.pixel_values, inputs.image_grid_thw) = (Some(pixels), Some(grids));
        }
        Ok(inputs)
    }

    /// `[3, rows, tokens]`, i64; row by row, as each row has its own pictures.
    fn positions(&self, batch: &Batch) -> Result<Tensor> {
        let mut grids = batch.pictures.iter().map(|picture| picture.grid_thw);
        let mut axes: [Vec<i64>; 3] = Default::default();
        for (row, ids) in batch.ids.iter().enumerate() {
            let types: Vec<u8> = ids.iter().map(|&id| u8::from(self.image == Some(id))).collect();
            let pictures = batch.pictures_of_row(row);
            let grids: Vec<[usize; 3]> = grids.by_ref().take(pictures).collect();
            let positions =
                candle_vlm_processor::qwen3_5::mrope_positions(&types, &batch.documents[row], &grids, self.merge_size)?;
            axes.iter_mut().zip(positions).for_each(|(axis, row)| axis.extend(row));
        }
        let shape = (3, batch.ids.len(), batch.seq_len());
        Ok(Tensor::from_vec(axes.concat(), shape, &Device::Cpu)?)
    }
}

fn layer_shape(text: &TextConfig, kind: LayerKind) -> DecoderLayerShape {
    let delta = &text.delta_net;
    let mixer = match kind {
        LayerKind::Linear => Mixer::Delta {
            heads: DeltaHeads {
                key_heads: delta.key_heads,
                value_heads: delta.value_heads,
                key_dim: delta.key_dim,
                value_dim: delta.value_dim,
            },
            taps: delta.kernel,
        },
        LayerKind::Full => Mixer::Attention(AttentionShape {
            name: "full",
            rule: text.mask_rule(),
            query_heads: text.num_attention_heads,
            key_heads: text.num_key_value_heads,
            head_dim: text.head_dim,
            keys: KeyRole::Own,
            keys_are_values: false,
            gated: true,
        }),
    };
    let (mlp_width, experts) = match text.mlp {
        MlpConfig::Dense(width) => (width, None),
        MlpConfig::Moe(moe) => {
            let experts = ExpertsShape { count: moe.num_experts, top_k: moe.top_k, width: moe.intermediate_size };
            (moe.shared_intermediate_size, Some(experts))
        }
    };
    DecoderLayerShape { mixer, mlp_width: Some(mlp_width), experts }
}

fn vision_shape(tower: &candle_qwen3_5::vision::VisionShape) -> VisionShape {
    VisionShape {
        layers: tower.depth,
        width: tower.hidden_size,
        mlp_width: tower.intermediate_size,
        gated: false,
        heads: tower.num_heads,
        key_heads: tower.num_heads,
        head_dim: tower.hidden_size / tower.num_heads,
        patch_len: tower.patch_len(),
        patches_per_token: tower.spatial_merge_size * tower.spatial_merge_size,
        tokens_per_picture: TOKENS_PER_PICTURE,
        clipped: false,
        merges: true,
    }
}

fn settings(config: &Config) -> Option<Qwen3_5ImageSettings> {
    let vision = config.vision.as_ref()?;
    let unit = vision.shape.patch_size * vision.shape.spatial_merge_size;
    Some(Qwen3_5ImageSettings {
        patch_size: vision.shape.patch_size,
        temporal_patch_size: vision.shape.temporal_patch_size,
        merge_size: vision.shape.spatial_merge_size,
        // 64 to 16,384 soft tokens, as in released checkpoints.
        min_pixels: 64 * unit * unit,
        max_pixels: 16_384 * unit * unit,
        rescale_factor: 1.0 / 255.0,
        normalize: Some(MEAN_AND_DEVIATION),
    })
}

fn told(settings: &Qwen3_5ImageSettings) -> String {
    let (patch, time, merge) = (settings.patch_size, settings.temporal_patch_size, settings.merge_size);
    format!("patch_size {patch}, temporal_patch_size {time}, merge_size {merge}")
}

/// `pixel_values [patches of all pictures, patch_dim]` and `image_grid_thw [pictures, 3]`, the grids on the CPU. `None`
/// for no picture.
fn tensors(pictures: &[Arc<ImagePatches>], dtype: DType, device: &Device) -> Result<Option<(Tensor, Tensor)>> {
    let Some(first) = pictures.first() else { return Ok(None) };
    let pixels: Vec<f32> = pictures.iter().flat_map(|picture| picture.pixels.iter().copied()).collect();
    let grids: Vec<i64> = pictures.iter().flat_map(|picture| picture.grid_thw.map(|side| side as i64)).collect();
    let patches = pixels.len() / first.patch_dim;
    let pixels = Tensor::from_vec(pixels, (patches, first.patch_dim), device)?.to_dtype(dtype)?;
    Ok(Some((pixels, Tensor::from_vec(grids, (pictures.len(), 3), &Device::Cpu)?)))
}
