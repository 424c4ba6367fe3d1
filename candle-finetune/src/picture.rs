//! Pictures as pixels, and cut into the patches that the vision tower reads.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_gemma4::VisionConfig;
use image::{DynamicImage, ImageDecoder, ImageReader};

use crate::error::Result;

/// A picture in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// In pixels.
    pub width: usize,
    /// In pixels.
    pub height: usize,
    /// Red, green, blue of every pixel, row by row, 0 to 255.
    pub rgb: Vec<u8>,
}

impl Picture {
    /// Decodes a PNG or JPEG file; the content decides, not the name. Pictures are turned upright, and transparent
    /// ones are laid on white.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn open(path: &Path) -> std::result::Result<Self, String> {
        let reader = ImageReader::open(path).and_then(ImageReader::with_guessed_format).map_err(|e| e.to_string())?;
        let mut decoder = reader.into_decoder().map_err(|e| e.to_string())?;
        let orientation = decoder.orientation().map_err(|e| e.to_string())?;
        let mut decoded = DynamicImage::from_decoder(decoder).map_err(|e| e.to_string())?;
        decoded.apply_orientation(orientation);
        let (width, height) = (decoded.width() as usize, decoded.height() as usize);
        let rgb = match decoded.color().has_alpha() {
            false => decoded.to_rgb8().into_raw(),
            true => decoded.to_rgba8().pixels().flat_map(|pixel| on_white(pixel.0)).collect(),
        };
        Ok(Self { width, height, rgb })
    }

    /// Side of the squares that become one soft token each; both sides of a picture have to be multiples of it.
    pub fn unit(vision: &VisionConfig) -> usize {
        vision.patch_size * vision.pooling_kernel_size
    }

    /// Soft tokens of the picture.
    ///
    /// # Errors
    /// The size and the allowed multiple, if the model cannot take the picture as it is.
    pub fn soft_tokens(&self, vision: &VisionConfig) -> std::result::Result<usize, String> {
        let (width, height, unit) = (self.width, self.height, Self::unit(vision));
        if width == 0 || height == 0 || width % unit != 0 || height % unit != 0 {
            return Err(format!(
                "is {width} x {height} pixels; both sides must be multiples of {unit} (patch_size {} times \
                 pooling_kernel_size {} of the model); pictures are not resized yet, so resize it first",
                vision.patch_size, vision.pooling_kernel_size
            ));
        }
        let limit = vision.position_embedding_size * vision.patch_size;
        if width.max(height) > limit {
            return Err(format!(
                "is {width} x {height} pixels; no side may be above {limit} (position_embedding_size {} times \
                 patch_size {} of the model); make it smaller first",
                vision.position_embedding_size, vision.patch_size
            ));
        }
        Ok((width / unit) * (height / unit))
    }

    /// Appends the numbers of all patches, row by row; inside a patch by pixel row, pixel, colour. 0 to 1.
    fn push_patches(&self, patch: usize, values: &mut Vec<f32>) {
        for top in (0..self.height).step_by(patch) {
            for left in (0..self.width).step_by(patch) {
                for y in top..top + patch {
                    let start = 3 * (y * self.width + left);
                    values.extend(self.rgb[start..start + 3 * patch].iter().map(|&level| f32::from(level) / 255.0));
                }
            }
        }
    }
}

/// The colour of a half transparent pixel over white paper.
fn on_white([red, green, blue, alpha]: [u8; 4]) -> [u8; 3] {
    let mix = |colour: u8| {
        let alpha = u32::from(alpha);
        ((u32::from(colour) * alpha + 255 * (255 - alpha) + 127) / 255) as u8
    };
    [mix(red), mix(green), mix(blue)]
}

/// `pixel_values [images, patches, 3 * patch_size^2]` and `image_position_ids [images, patches, 2]` of pictures, which
/// may differ in size: short ones are padded with zeros at position (-1, -1). `None` for no picture.
pub(crate) fn patches(
    pictures: &[Picture],
    vision: &VisionConfig,
    dtype: DType,
    device: &Device,
) -> Result<Option<(Tensor, Tensor)>> {
    let patch = vision.patch_size;
    let count = |picture: &Picture| (picture.width / patch) * (picture.height / patch);
    let Some(most) = pictures.iter().map(count).max() else { return Ok(None) };
    let (mut values, mut positions) = (Vec::new(), Vec::new());
    for (index, picture) in pictures.iter().enumerate() {
        picture.push_patches(patch, &mut values);
        for y in 0..picture.height / patch {
            positions.extend((0..picture.width / patch).flat_map(|x| [x as i64, y as i64]));
        }
        values.resize((index + 1) * most * vision.patch_len(), 0.0);
        positions.resize((index + 1) * most * 2, -1);
    }
    let values = Tensor::from_vec(values, (pictures.len(), most, vision.patch_len()), device)?.to_dtype(dtype)?;
    Ok(Some((values, Tensor::from_vec(positions, (pictures.len(), most, 2), device)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small_model;

    fn vision() -> VisionConfig {
        small_model::config().expect("the built-in configuration is valid").vision.expect("it has a vision tower")
    }

    #[test]
    fn patches_are_cut_row_by_row_and_short_pictures_padded() -> Result<()> {
        let vision = vision();
        assert_eq!((vision.patch_size, vision.pooling_kernel_size), (2, 2));
        let numbered = |width: usize, height: usize| {
            let rgb = (0..width * height).flat_map(|pixel| [pixel as u8, 100 + pixel as u8, 255]).collect();
            Picture { width, height, rgb }
        };
        let pictures = [numbered(4, 4), numbered(8, 4)];
        let (values, positions) = patches(&pictures, &vision, DType::F32, &Device::Cpu)?.expect("two pictures");
        assert_eq!(values.dims(), [2, 8, 12]);
        let values = (values * 255.0)?.round()?.to_vec3::<f32>()?;
        // Second patch of the first row of the first picture: pixels 2, 3 and 6, 7.
        assert_eq!(values[0][1], [2., 102., 255., 3., 103., 255., 6., 106., 255., 7., 107., 255.]);
        assert_eq!(values[0][4], [0.0; 12]);
        let positions = positions.to_vec3::<i64>()?;
        assert_eq!(positions[0], [[0, 0], [1, 0], [0, 1], [1, 1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]);
        assert_eq!(positions[1], [[0, 0], [1, 0], [2, 0], [3, 0], [0, 1], [1, 1], [2, 1], [3, 1]]);
        assert!(patches(&[], &vision, DType::F32, &Device::Cpu)?.is_none());
        Ok(())
    }

    #[test]
    fn sizes_that_the_model_cannot_take_are_refused() {
        let vision = vision();
        let sized = |width, height| Picture { width, height, rgb: vec![0; 3 * width * height] };
        assert_eq!(sized(8, 12).soft_tokens(&vision), Ok(6));
        let error = sized(8, 6).soft_tokens(&vision).unwrap_err();
        assert!(error.contains("8 x 6 pixels") && error.contains("multiples of 4"), "{error}");
        assert!(sized(0, 4).soft_tokens(&vision).unwrap_err().contains("0 x 4"));
        let limit = vision.position_embedding_size * vision.patch_size;
        assert!(sized(limit + 4, 4).soft_tokens(&vision).unwrap_err().contains(&format!("above {limit}")));
    }

    #[test]
    fn files_are_read_by_content_and_laid_on_white() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("really-a-png.jpg");
        let mut canvas = image::RgbaImage::from_pixel(3, 2, image::Rgba([10, 20, 30, 255]));
        canvas.put_pixel(2, 1, image::Rgba([0, 0, 0, 0]));
        canvas.save_with_format(&path, image::ImageFormat::Png).unwrap();
        let picture = Picture::open(&path).unwrap();
        assert_eq!((picture.width, picture.height), (3, 2));
        assert_eq!(picture.rgb[..3], [10, 20, 30]);
        assert_eq!(picture.rgb[15..], [255; 3]);
        std::fs::write(&path, "<html>").unwrap();
        assert!(Picture::open(&path).is_err());
        assert!(Picture::open(&dir.path().join("absent.png")).is_err());
    }
}
