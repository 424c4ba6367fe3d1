//! Content to pixels: the first bytes tell the format, the file name does not count.

use std::io::Cursor;

use image::codecs::png::PngDecoder;
use image::error::ImageError;
use image::{DynamicImage, ImageBuffer, ImageDecoder};

use super::{Picture, PictureLimits, color, jpeg, orientation};
use crate::error::PictureFault;

pub(super) fn decode(content: &[u8], limits: &PictureLimits) -> Result<Picture, PictureFault> {
    let bytes = content.len() as u64;
    if bytes > limits.max_bytes {
        return Err(PictureFault::TooManyBytes { bytes, max_bytes: limits.max_bytes });
    }
    match content {
        [] => Err(PictureFault::Empty),
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => png(content, limits),
        [0xff, 0xd8, 0xff, ..] => jpeg::decode(content, limits),
        _ => Err(other_format(content)),
    }
}

/// Fails if a picture of this size would be too large, before its pixels are decoded.
pub(super) fn check_size(width: u32, height: u32, limits: &PictureLimits) -> Result<(), PictureFault> {
    if u64::from(width) * u64::from(height) > limits.max_pixels {
        return Err(PictureFault::TooManyPixels { width, height, max_pixels: limits.max_pixels });
    }
    Ok(())
}

/// Turns the stored rows upright and makes the picture.
pub(super) fn upright(mut image: DynamicImage, turn: image::metadata::Orientation) -> Picture {
    image.apply_orientation(turn);
    let (width, height) = (image.width() as usize, image.height() as usize);
    Picture { width, height, rgb_hwc: color::to_rgb(image) }
}

/// An image of the `image` crate from RGB bytes.
pub(super) fn rgb_image(width: u32, height: u32, rgb_hwc: Vec<u8>) -> Option<DynamicImage> {
    ImageBuffer::from_raw(width, height, rgb_hwc).map(DynamicImage::ImageRgb8)
}

fn png(content: &[u8], limits: &PictureLimits) -> Result<Picture, PictureFault> {
    let mut decoder = PngDecoder::new(Cursor::new(content)).map_err(png_fault)?;
    let (width, height) = decoder.dimensions();
    check_size(width, height, limits)?;
    let exif = decoder.exif_metadata().unwrap_or(None);
    let xmp = decoder.xmp_metadata().unwrap_or(None);
    let turn = orientation::find(exif.as_deref(), xmp.as_deref());
    Ok(upright(DynamicImage::from_decoder(decoder).map_err(png_fault)?, turn))
}

fn png_fault(cause: ImageError) -> PictureFault {
    match cause {
        ImageError::IoError(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
            PictureFault::CutShort("the PNG data ends before the last row".into())
        }
        ImageError::Unsupported(e) => PictureFault::Unsupported(e.to_string()),
        other => PictureFault::Damaged(other.to_string()),
    }
}

/// Names what is there instead of PNG or JPEG.
fn other_format(content: &[u8]) -> PictureFault {
    let found = match content {
        [b'G', b'I', b'F', b'8', ..] => "a GIF",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "a WebP picture",
        [b'B', b'M', ..] => "a BMP picture",
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => "a TIFF picture",
        [_, _, _, _, b'f', b't', b'y', b'p', b'a', b'v', b'i', b'f' | b's', ..] => "an AVIF picture",
        [_, _, _, _, b'f', b't', b'y', b'p', b'h' | b'm', ..] => "a HEIF picture",
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => "a film",
        [0xff, 0x0a, ..] | [0, 0, 0, 12, b'J', b'X', b'L', b' ', ..] => "a JPEG XL picture",
        [0, 0, 0, 12, b'j', b'P', ..] => "a JPEG 2000 picture",
        [b'%', b'P', b'D', b'F', ..] => "a PDF",
        [0x1f, 0x8b, ..] => "gzip data",
        _ => return PictureFault::NotAPicture(String::from_utf8_lossy(&content[..content.len().min(24)]).into()),
    };
    PictureFault::Format { found }
}
