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
    let mut allowed = image::Limits::no_limits();
    allowed.max_alloc = Some(limits.max_pixels.saturating_mul(8).saturating_add(64 << 20)); // profiles and the like
    let decoder = PngDecoder::with_limits(Cursor::new(content), allowed).map_err(png_fault)?;
    let (width, height) = decoder.dimensions();
    check_size(width, height, limits)?;
    let turn = orientation::find(
        chunks(content).find(|(kind, _)| *kind == b"eXIf").map(|(_, body)| body),
        chunks(content).find(|(kind, body)| *kind == b"iTXt" && body.starts_with(XMP_KEY)).map(|(_, body)| body),
    );
    Ok(upright(DynamicImage::from_decoder(decoder).map_err(png_fault)?, turn))
}

/// Keyword of the text chunk with an XMP packet.
const XMP_KEY: &[u8] = b"XML:com.adobe.xmp\0";

/// Kind and body of each chunk of a PNG; tags may stand behind the pixels, where the decoder does not look.
fn chunks(content: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let mut rest = &content[8..];
    std::iter::from_fn(move || {
        let (length, after) = rest.split_first_chunk::<4>()?;
        let (kind, after) = after.split_at_checked(4)?;
        let (body, after) = after.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        rest = after.get(4..)?;
        Some((kind, body))
    })
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
