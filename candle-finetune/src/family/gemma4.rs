//! Gemma 4.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_cp::{CpContext, LayerWork, ShardedLabels};
use candle_cp_layers::{Placeholders, Recompute, Weights};
use candle_gemma4::{Config, Inputs, LayerKind, Model};
use candle_vlm_processor::{Gemma4ImageSettings, ImagePatches, ImageSettings, PatchLayout};

use super::{
    AttentionShape, DecoderLayerShape, DecoderShape, ExpertsShape, KeyRole, Mixer, TokenIds, Turns, VisionShape,
    VlmConfig, VlmModel, check_settings,
};
use crate::encoder::or_missing;
use crate::error::Result;
use crate::packing::Batch;

/// Position of a patch that is padding.
const PADDING: [i64; 2] = [-1, -1];

impl VlmConfig for Config {
    fn title(&self) -> String {
        format!("Gemma 4, {} layers of width {}", self.text.num_hidden_layers, self.text.hidden_size)
    }

    fn token_ids(&self) -> TokenIds {
        TokenIds {
            pad: self.text.pad_token_id.unwrap_or(0),
            bos: self.text.bos_token_id,
            needs_bos: true,
            eos: self.eos_token_ids.first().copied(),
        }
    }

    fn placeholders(&self) -> Placeholders {
        Config::placeholders(self)
    }

    fn around_picture(&self) -> (u32, u32) {
        (self.boi_token_id, self.eoi_token_id)
    }

    fn turns(&self) -> Turns {
        Turns { open: "<|turn>", close: "<turn|>", assistant: "model" }
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
            per_layer_width: text.per_layer.map(|per_layer| per_layer.width),
            sandwich_norms: true,
            scaled_layers: true,
            layers: (0..text.layers.len()).map(|index| layer_shape(self, index)).collect(),
            vision: vision_shape(self),
        }
    }

    /// The soft tokens are those that released checkpoints allow.
    fn image_settings(&self) -> Option<Box<dyn ImageSettings>> {
        settings(self).map(|settings| Box::new(settings) as Box<dyn ImageSettings>)
    }

    fn read_image_settings(&self, folder: &Path) -> Result<std::result::Result<Box<dyn ImageSettings>, String>> {
        let Some(model) = settings(self) else { return Ok(Err("this model takes no pictures".to_string())) };
        match or_missing(Gemma4ImageSettings::from_folder(folder))? {
            Err(reason) => Ok(Err(reason)),
            Ok(settings) => {
                check_settings(told(&settings), told(&model))?;
                Ok(Ok(Box::new(settings)))
            }
        }
    }

    fn check_picture(&self, (height, width): (usize, usize)) -> std::result::Result<(), String> {
        let tower = self.vision.as_ref().map(|tower| (tower.patch_size, tower.position_embedding_size));
        let tower = tower.map(|(side, limit)| (side, limit, "position_embedding_size"));
        let embedder = || {
            let embedder = self.patch_embedder.as_ref()?;
            let side = embedder.patch_size * embedder.pooling_kernel_size;
            Some((side, embedder.position_embedding_size, "mm_posemb_size"))
        };
        let Some((side, limit, field)) = tower.or_else(embedder) else { return Ok(()) };
        let most = height.max(width) / side;
        match most > limit {
            true => Err(format!(
                "is {width} x {height} pixels after resizing, which is {most} patches along a side; the model has \
                 positions for {limit} (vision_config.{field}): cut it to a shape that is closer to a square"
            )),
            false => Ok(()),
        }
    }

    fn model(&self, weights: &Weights) -> Result<Box<dyn VlmModel>> {
        Ok(Box::new(Model::new(self, weights)?))
    }
}

impl VlmModel for Model {
    fn hidden(
        &self,
        batch: &Batch,
        context: &CpContext,
        recompute: &Recompute,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let inputs = inputs(batch, dtype, device)?;
        let local = self.shard(&self.embed(&inputs, &mut ())?, &inputs.input_ids_bs, context)?;
        Ok(self.decode_with(&local, context, recompute, &mut ())?)
    }

    fn loss(&self, hidden_bsh: &Tensor, labels: &ShardedLabels) -> Result<Tensor> {
        Ok(Model::loss(self, hidden_bsh, labels)?)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(Model::logits(self, hidden)?)
    }
}

/// What the model reads of a batch; pixels in `dtype` on `device`. Ids and positions stay on the CPU, where the model looks
/// at them.
///
/// # Errors
/// A tensor operation failed.
pub fn inputs(batch: &Batch, dtype: DType, device: &Device) -> Result<Inputs> {
    let input_ids_bs = Tensor::new(batch.ids.clone(), &Device::Cpu)?;
    Ok(match tensors(&batch.pictures, dtype, device)? {
        None => Inputs::text(input_ids_bs),
        Some((pixels, positions)) => {
            Inputs { pixel_values: Some(pixels), image_position_ids: Some(positions), ..Inputs::text(input_ids_bs) }
        }
    })
}

fn layer_shape(config: &Config, index: usize) -> DecoderLayerShape {
    let (text, layer) = (&config.text, &config.text.layers[index]);
    let lends = || text.layers.iter().any(|other| other.keys_of == Some(index));
    let attention = AttentionShape {
        name: match layer.kind {
            LayerKind::Sliding => "sliding",
            LayerKind::Full => "full",
        },
        rule: text.mask_rule(layer.kind),
        query_heads: text.num_attention_heads,
        key_heads: layer.num_key_value_heads,
        head_dim: layer.head_dim,
        keys: match layer.keys_of {
            Some(_) => KeyRole::Reads,
            None if lends() => KeyRole::Lends,
            None => KeyRole::Own,
        },
        keys_are_values: layer.keys_are_values,
        gated: false,
    };
    let experts =
        text.moe.map(|moe| ExpertsShape { count: moe.num_experts, top_k: moe.top_k, width: moe.intermediate_size });
    DecoderLayerShape { mixer: Mixer::Attention(attention), mlp_width: Some(layer.intermediate_size), experts }
}

fn vision_shape(config: &Config) -> Option<VisionShape> {
    let tokens_per_picture = settings(config)?.max_soft_tokens;
    let tower = config.vision.as_ref().map(|tower| VisionShape {
        layers: tower.num_hidden_layers,
        width: tower.hidden_size,
        mlp_width: tower.intermediate_size,
        gated: true,
        heads: tower.num_attention_heads,
        key_heads: tower.num_key_value_heads,
        head_dim: tower.head_dim,
        patch_len: tower.patch_len(),
        patches_per_token: tower.pooling_kernel_size * tower.pooling_kernel_size,
        tokens_per_picture,
        clipped: tower.use_clipped_linears,
        merges: false,
    });
    let embedder = config.patch_embedder.as_ref().map(|embedder| VisionShape {
        layers: 0,
        width: embedder.width,
        mlp_width: 0,
        gated: false,
        heads: 0,
        key_heads: 0,
        head_dim: 0,
        patch_len: embedder.patch_len(),
        patches_per_token: 1,
        tokens_per_picture,
        clipped: false,
        merges: false,
    });
    tower.or(embedder)
}

fn settings(config: &Config) -> Option<Gemma4ImageSettings> {
    let (patch_size, pooling_kernel_size, layout) = match (&config.vision, &config.patch_embedder) {
        (Some(tower), _) => (tower.patch_size, tower.pooling_kernel_size, PatchLayout::Tower),
        (None, Some(embedder)) => (embedder.patch_size, embedder.pooling_kernel_size, PatchLayout::Merged),
        (None, None) => return None,
    };
    let (max_soft_tokens, rescale_factor) = (280, 1.0 / 255.0);
    Some(Gemma4ImageSettings {
        patch_size,
        pooling_kernel_size,
        max_soft_tokens,
        rescale_factor,
        normalize: None,
        layout,
    })
}

fn told(settings: &Gemma4ImageSettings) -> String {
    let layout = match settings.layout {
        PatchLayout::Tower => "vision tower",
        PatchLayout::Merged => "unified model",
    };
    let (patch, pool) = (settings.patch_size, settings.pooling_kernel_size);
    format!("patch_size {patch}, pooling_kernel_size {pool}, patches for a {layout}")
}

/// `pixel_values [images, patches, patch_dim]` and `image_position_ids [images, patches, 2]` of pictures, which may
/// differ in size, the positions on the CPU: short ones are padded to the longest with zeros at position (-1, -1). `None` for no picture.
fn tensors(pictures: &[Arc<ImagePatches>], dtype: DType, device: &Device) -> Result<Option<(Tensor, Tensor)>> {
    let real = |picture: &ImagePatches| picture.positions.iter().take_while(|&&position| position != PADDING).count();
    let Some(most) = pictures.iter().map(|picture| real(picture)).max() else { return Ok(None) };
    let patch_dim = pictures[0].patch_dim;
    let (mut values, mut positions) = (Vec::new(), Vec::new());
    for (index, picture) in pictures.iter().enumerate() {
        let real = real(picture);
        values.extend_from_slice(&picture.pixels[..real * patch_dim]);
        positions.extend(picture.positions[..real].iter().flatten());
        values.resize((index + 1) * most * patch_dim, 0.0);
        positions.resize((index + 1) * most * 2, -1);
    }
    let values = Tensor::from_vec(values, (pictures.len(), most, patch_dim), device)?.to_dtype(dtype)?;
    Ok(Some((values, Tensor::from_vec(positions, (pictures.len(), most, 2), &Device::Cpu)?)))
}

#[cfg(test)]
mod tests {
    use candle_vlm_processor::{ImageSettings, Picture};

    use super::*;
    use crate::family::Family;
    use crate::small_model;

    fn small() -> Result<Config> {
        Ok(Config::from_json(&small_model::config_json(Family::Gemma4))?)
    }

    #[test]
    fn patches_are_cut_row_by_row_and_short_pictures_padded() -> Result<()> {
        let settings = settings(&small()?).expect("a tower");
        assert_eq!((settings.patch_size, settings.pooling_kernel_size), (2, 2));
        let numbered = |width: usize, height: usize| {
            let rgb = (0..width * height).flat_map(|pixel| [pixel as u8, 100 + pixel as u8, 255]).collect();
            Picture::from_rgb(width, height, rgb).expect("three samples per pixel")
        };
        let cut = |width, height| Arc::new(settings.patches_as_is(&numbered(width, height)).expect("it fits"));
        let mut padded = (*cut(4, 4)).clone();
        padded.patches = 12;
        padded.pixels.resize(12 * 12, 0.0);
        padded.positions.resize(12, PADDING);
        let (values, positions) =
            tensors(&[Arc::new(padded), cut(8, 4)], DType::F32, &Device::Cpu)?.expect("two pictures");
        assert_eq!(values.dims(), [2, 8, 12]);
        let values = (values * 255.0)?.round()?.to_vec3::<f32>()?;
        // Second patch of the first row of the first picture: pixels 2, 3 and 6, 7.
        assert_eq!(values[0][1], [2., 102., 255., 3., 103., 255., 6., 106., 255., 7., 107., 255.]);
        assert_eq!(values[0][4], [0.0; 12]);
        let positions = positions.to_vec3::<i64>()?;
        assert_eq!(positions[0], [[0, 0], [1, 0], [0, 1], [1, 1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]);
        assert_eq!(positions[1], [[0, 0], [1, 0], [2, 0], [3, 0], [0, 1], [1, 1], [2, 1], [3, 1]]);
        assert!(tensors(&[], DType::F32, &Device::Cpu)?.is_none());
        Ok(())
    }

    #[test]
    fn levels_are_the_nearest_numbers_to_a_255th() -> Result<()> {
        let settings = settings(&small()?).expect("a tower");
        let rgb: Vec<u8> = (0..=255).flat_map(|level| [level; 3]).collect();
        let cut = settings.patches_as_is(&Picture::from_rgb(16, 16, rgb).expect("256 pixels")).expect("it fits");
        let mut found: Vec<f32> = cut.pixels.iter().step_by(3).copied().collect();
        found.sort_by(f32::total_cmp);
        let expected: Vec<f32> = (0..=255u8).map(|level| f32::from(level) / 255.0).collect();
        assert_eq!(found, expected);
        Ok(())
    }

    #[test]
    fn sizes_that_the_model_cannot_take_are_refused() -> Result<()> {
        let config = small()?;
        let settings = settings(&config).expect("a tower");
        assert_eq!(config.check_picture((128, 8)), Ok(()));
        let reason = config.check_picture((8, 132)).unwrap_err();
        assert!(
            reason.contains("132 x 8 pixels") && reason.contains("66 patches") && reason.contains("for 64"),
            "{reason}"
        );
        let odd = Picture::from_rgb(8, 6, vec![0; 3 * 48]).expect("48 pixels");
        let fault = settings.patches_as_is(&odd).unwrap_err().to_string();
        assert!(fault.contains("8 x 6") && fault.contains("multiples of 4"), "{fault}");
        Ok(())
    }
}
