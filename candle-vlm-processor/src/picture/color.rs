//! From the colour types of files to 8-bit RGB.

use image::DynamicImage;

/// The samples of a decoded PNG as `[height, width, 3]` bytes, transparency composited onto white.
///
/// DIFFERENCE: Hugging Face drops the alpha channel of pictures that it loads from a path, which shows whatever colour
/// was left under the transparent pixels; it composites onto white only for pictures handed over in memory. Here both
/// are composited.
///
/// DIFFERENCE: 16-bit grey keeps its high byte, as the other 16-bit types do; Pillow clips it to 255, which leaves a
/// white picture.
pub(super) fn to_rgb(image: DynamicImage) -> Vec<u8> {
    match image {
        DynamicImage::ImageRgb8(x) => x.into_raw(),
        DynamicImage::ImageLuma8(x) => grey(x.into_raw()),
        DynamicImage::ImageLumaA8(x) => grey_alpha(&x.into_raw()),
        DynamicImage::ImageRgba8(x) => rgb_alpha(&x.into_raw()),
        DynamicImage::ImageLuma16(x) => grey(high_bytes(x.into_raw())),
        DynamicImage::ImageLumaA16(x) => grey_alpha(&high_bytes(x.into_raw())),
        DynamicImage::ImageRgb16(x) => high_bytes(x.into_raw()),
        DynamicImage::ImageRgba16(x) => rgb_alpha(&high_bytes(x.into_raw())),
        other => other.into_rgb8().into_raw(),
    }
}

fn high_bytes(samples: Vec<u16>) -> Vec<u8> {
    samples.into_iter().map(|s| (s >> 8) as u8).collect()
}

fn grey(samples: Vec<u8>) -> Vec<u8> {
    samples.into_iter().flat_map(|g| [g; 3]).collect()
}

fn grey_alpha(samples: &[u8]) -> Vec<u8> {
    samples.chunks_exact(2).flat_map(|p| [on_white(p[0], p[1]); 3]).collect()
}

fn rgb_alpha(samples: &[u8]) -> Vec<u8> {
    samples.chunks_exact(4).flat_map(|p| [on_white(p[0], p[3]), on_white(p[1], p[3]), on_white(p[2], p[3])]).collect()
}

/// A sample of opacity `alpha` over white, rounded as Pillow's `alpha_composite` does: seven fraction bits, and a
/// division by 255 as two shifts.
fn on_white(sample: u8, alpha: u8) -> u8 {
    let (sample, alpha) = (u32::from(sample), u32::from(alpha));
    let sum = ((sample * alpha + 255 * (255 - alpha)) << 7) + (0x80 << 7);
    ((((sum >> 8) + sum) >> 8) >> 7) as u8
}
