//! What the encoders give to the text model.

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};

/// Soft tokens of a batch's images, or of its audio clips.
#[derive(Debug)]
pub struct Features {
    /// `[soft tokens of all items, text hidden]`, items in order.
    pub features_th: Tensor,
    /// Soft tokens of each item.
    pub per_item: Vec<usize>,
}

impl Features {
    /// Those of `[items, soft tokens, text hidden]` that are real.
    pub fn of_real(features_nth: &Tensor, is_real: &[Vec<bool>]) -> Result<Self> {
        let places = is_real.iter().flatten().enumerate().filter(|&(_, &real)| real);
        let places = Tensor::from_iter(places.map(|(place, _)| place as u32), features_nth.device())?;
        let per_item = is_real.iter().map(|item| item.iter().filter(|&&real| real).count()).collect();
        Ok(Self { features_th: features_nth.flatten_to(1)?.index_select(&places, 0)?, per_item })
    }
}

/// What placeholders of a batch are filled with.
#[derive(Debug, Default)]
pub struct Media {
    /// Those of images.
    pub images: Option<Features>,
    /// Those of audio clips.
    pub audio: Option<Features>,
}

/// The values of `input_features_mask`, which is to be `[clips, frames]` with 1 for real frames and 0 for padding.
pub fn read_frame_mask(mask: &Tensor, [clips, frames]: [usize; 2]) -> Result<Vec<Vec<bool>>> {
    let wrong = |found: String, expected: String| Error::Input { name: "input_features_mask", found, expected };
    if mask.dims() != [clips, frames] {
        let expected = format!("{:?}, to fit input_features", [clips, frames]);
        return Err(wrong(format!("{:?}", mask.dims()), expected));
    }
    let rows = mask.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec2::<f64>()?;
    let is_real = |value: f64| match value {
        0.0 => Ok(false),
        1.0 => Ok(true),
        other => Err(wrong(format!("a value of {other}"), "1 for real frames, 0 for padding".to_string())),
    };
    rows.into_iter().map(|row| row.into_iter().map(is_real).collect()).collect()
}
