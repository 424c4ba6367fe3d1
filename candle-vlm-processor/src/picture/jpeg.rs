//! JPEG content.
//!
//! The segments are walked before anything is decoded: for the size, and because a decoder fills the rest of a cut file
//! with grey and says nothing. Bytes behind the end marker are left alone: phones put more pictures there.
//!
//! DIFFERENCE: a file without its end marker is refused even if all pixels are there, where Pillow reads some of them.

use image::metadata::Orientation;
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::decode::{check_size, rgb_image, upright};
use super::{Picture, PictureLimits, orientation};
use crate::error::PictureFault;

/// What the segments of a JPEG tell.
struct Header {
    width: u32,
    height: u32,
    /// Identifiers of the components, in order.
    components: Vec<u8>,
    /// Whether a JFIF or Adobe segment tells the colours.
    marked: bool,
}

pub(super) fn decode(content: &[u8], limits: &PictureLimits) -> Result<Picture, PictureFault> {
    let header = walk(content)?;
    check_size(header.width, header.height, limits)?;
    let (rgb_hwc, turn) = pixels(content, &header)?;
    let image = rgb_image(header.width, header.height, rgb_hwc)
        .ok_or_else(|| PictureFault::Damaged("the decoder gave another number of pixels".into()))?;
    Ok(upright(image, turn))
}

/// `[height, width, 3]` samples as stored, and the orientation.
fn pixels(content: &[u8], header: &Header) -> Result<(Vec<u8>, Orientation), PictureFault> {
    // Without any mark these names mean RGB, to be taken as stored.
    let plain_rgb = header.components == *b"RGB" && !header.marked;
    // Four channels are inks, stored inverted as Adobe's programs do it (Pillow takes that for granted as well); the
    // decoder makes RGB of them.
    let space = if plain_rgb { ColorSpace::YCbCr } else { ColorSpace::RGB };
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_out_colorspace(space);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(content), options);
    let samples = decoder.decode().map_err(fault)?;
    let turn = orientation::find(decoder.exif().map(Vec::as_slice), decoder.xmp().map(Vec::as_slice));
    Ok((samples, turn))
}

fn fault(cause: DecodeErrors) -> PictureFault {
    match cause {
        DecodeErrors::Unsupported(scheme) => PictureFault::Unsupported(format!("{scheme:?}")),
        DecodeErrors::ExhaustedData => PictureFault::CutShort("the JPEG data ends before the last row".into()),
        other => PictureFault::Damaged(format!("{other:?}")),
    }
}

/// Reads all segments up to the end marker.
fn walk(content: &[u8]) -> Result<Header, PictureFault> {
    let cut = |place: &str| PictureFault::CutShort(format!("the JPEG ends in {place}, without its end marker"));
    let mut header = None;
    let mut marked = false;
    let mut at = 2;
    loop {
        at += content[at..].iter().position(|&b| b == 0xff).ok_or_else(|| cut("its segments"))?;
        at += content[at..].iter().position(|&b| b != 0xff).ok_or_else(|| cut("its segments"))?;
        let marker = content[at];
        at += 1;
        match marker {
            0xd9 => break,
            0x00 | 0x01 | 0xd0..=0xd8 => continue,
            _ => {}
        }
        let length = content.get(at..at + 2).ok_or_else(|| cut("its segments"))?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]])).max(2);
        let body = content.get(at + 2..at + length).ok_or_else(|| cut("its segments"))?;
        at += length;
        match marker {
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) => header = header.or(frame(marker, body)?),
            0xe0 if body.starts_with(b"JFIF") => marked = true,
            0xee if body.starts_with(b"Adobe") => marked = true,
            0xda => at = scan_end(content, at).ok_or_else(|| cut("its pixels"))?,
            _ => {}
        }
    }
    match header {
        Some(frame) => Ok(Header { marked, ..frame }),
        None => Err(PictureFault::Damaged("the JPEG has no frame header".into())),
    }
}

/// Size and components of a frame header; refuses what no decoder here reads.
fn frame(marker: u8, body: &[u8]) -> Result<Option<Header>, PictureFault> {
    let &[precision, h1, h0, w1, w0, count, ref components @ ..] = body else {
        return Err(PictureFault::Damaged("its frame header is too short".into()));
    };
    match marker {
        0xc0..=0xc2 => {}
        0xc9 | 0xca => return Err(PictureFault::Unsupported("a JPEG with arithmetic coding".into())),
        _ => return Err(PictureFault::Unsupported("a lossless or hierarchical JPEG".into())),
    }
    if precision != 8 {
        return Err(PictureFault::Unsupported(format!("a JPEG with {precision}-bit samples")));
    }
    if !matches!(count, 1 | 3 | 4) {
        return Err(PictureFault::Unsupported(format!("a JPEG with {count} components")));
    }
    let (width, height) = (u32::from(u16::from_be_bytes([w1, w0])), u32::from(u16::from_be_bytes([h1, h0])));
    if width == 0 || height == 0 {
        return Err(PictureFault::Unsupported(format!("a JPEG of {width} x {height} pixels")));
    }
    let components = components.chunks(3).take(usize::from(count)).map(|c| c[0]).collect();
    Ok(Some(Header { width, height, components, marked: false }))
}

/// Index of the first marker after entropy-coded data; stuffed bytes and restart markers belong to the data.
fn scan_end(content: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += content[at..].iter().position(|&b| b == 0xff)?;
        match content.get(at + 1)? {
            0x00 | 0xd0..=0xd7 => at += 2,
            0xff => at += 1,
            _ => return Some(at),
        }
    }
}
