//! What a unified model has in the place of towers.

use candle_cp_layers::{Fields, Result};

/// Norms and projections that take patches of images into the text model.
#[derive(Debug, Clone, PartialEq)]
pub struct PatchEmbedderConfig {
    /// Side of the small patches that positions of a picture are counted in, in pixels.
    pub patch_size: usize,
    /// Side of the square of small patches that is one patch of the model, and one soft token.
    pub pooling_kernel_size: usize,
    /// Width of a patch's embedding.
    pub width: usize,
    /// Rows of the table of positions, which both axes share.
    pub position_embedding_size: usize,
    /// Added to the mean square in the norm before the last projection.
    pub rms_norm_eps: f64,
    /// Standard deviation that fresh matrices have at least.
    pub initializer_range: f64,
}

/// Longest side of a patch of the model, in pixels. No model is near it; what follows from a side stays countable.
const MAX_SIDE: u64 = 4096;

const REQUIRED: [&str; 5] = ["patch_size", "pooling_kernel_size", "mm_embed_dim", "mm_posemb_size", "rms_norm_eps"];

impl PatchEmbedderConfig {
    /// Names of the required fields that are absent.
    pub(super) fn missing(fields: &Fields) -> Vec<String> {
        fields.missing(&REQUIRED)
    }

    /// Reads and checks `vision_config`.
    pub(super) fn read(fields: &Fields) -> Result<Self> {
        fields.only("model_type", "gemma4_unified_vision")?;
        let width = fields.size("mm_embed_dim")?;
        if fields.size_if_present("output_proj_dims")?.is_some_and(|inputs| inputs != width) {
            let reason = format!("must be mm_embed_dim {width}, whose output it projects");
            return Err(fields.refuse("output_proj_dims", reason));
        }
        let (patch_size, pooling_kernel_size) = (fields.size("patch_size")?, fields.size("pooling_kernel_size")?);
        let side = patch_size as u64 * pooling_kernel_size as u64;
        if side > MAX_SIDE {
            let reason = format!("times pooling_kernel_size is {side} pixels; at most {MAX_SIDE} make a patch");
            return Err(fields.refuse("patch_size", reason));
        }
        if fields.size_if_present("model_patch_size")?.is_some_and(|given| given as u64 != side) {
            let reason = format!("must be patch_size times pooling_kernel_size, {side}");
            return Err(fields.refuse("model_patch_size", reason));
        }
        Ok(Self {
            patch_size,
            pooling_kernel_size,
            width,
            position_embedding_size: fields.size("mm_posemb_size")?,
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            initializer_range: fields.positive_if_present("initializer_range")?.unwrap_or(0.02),
        })
    }

    /// Numbers in one patch of the model: three colours of `patch_size * pooling_kernel_size` pixels squared.
    pub fn patch_len(&self) -> usize {
        let side = self.patch_size * self.pooling_kernel_size;
        3 * side * side
    }
}

/// A norm and a projection that take frames of raw audio into the text model.
#[derive(Debug, Clone, PartialEq)]
pub struct FrameEmbedderConfig {
    /// Samples in one frame, which becomes one soft token.
    pub width: usize,
    /// Added to the mean square in the norm before the projection.
    pub rms_norm_eps: f64,
    /// Standard deviation that fresh matrices have at least.
    pub initializer_range: f64,
}

impl FrameEmbedderConfig {
    /// Names of the required fields that are absent.
    pub(super) fn missing(fields: &Fields) -> Vec<String> {
        fields.missing(&["audio_embed_dim", "rms_norm_eps"])
    }

    /// Reads and checks `audio_config`.
    pub(super) fn read(fields: &Fields) -> Result<Self> {
        fields.only("model_type", "gemma4_unified_audio")?;
        let width = fields.size("audio_embed_dim")?;
        for field in ["audio_samples_per_token", "output_proj_dims", "hidden_size"] {
            if fields.size_if_present(field)?.is_some_and(|size| size != width) {
                return Err(fields.refuse(field, format!("must be audio_embed_dim {width}: a frame is a soft token")));
            }
        }
        Ok(Self {
            width,
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            initializer_range: fields.positive_if_present("initializer_range")?.unwrap_or(0.02),
        })
    }
}
