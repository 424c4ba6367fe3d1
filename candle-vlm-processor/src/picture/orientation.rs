//! The orientation that a camera notes beside the pixels.

use image::metadata::Orientation;

/// The orientation in an EXIF block, else in an XMP packet; none where they say nothing or are broken.
pub(super) fn find(exif: Option<&[u8]>, xmp: Option<&[u8]>) -> Orientation {
    exif.and_then(Orientation::from_exif_chunk)
        .or_else(|| xmp.and_then(in_xmp).and_then(Orientation::from_exif))
        .unwrap_or(Orientation::NoTransforms)
}

/// The digit after `tiff:Orientation="` or `tiff:Orientation>`.
fn in_xmp(packet: &[u8]) -> Option<u8> {
    const KEY: &[u8] = b"tiff:Orientation";
    let at = packet.windows(KEY.len()).position(|w| w == KEY)?;
    match &packet[at + KEY.len()..] {
        [b'=', b'"' | b'\'', digit, ..] | [b'>', digit, ..] => digit.checked_sub(b'0'),
        _ => None,
    }
}
