//! The size that a picture is resized to.

use super::settings::Gemma4ImageSettings;
use crate::error::PictureFault;

/// Height and width in pixels: the largest multiples of `patch * pooling` that keep the shape, as far as it goes, and
/// stay within the patches that the soft tokens pool. Small pictures grow.
pub(super) fn resized(
    height: usize,
    width: usize,
    settings: &Gemma4ImageSettings,
) -> Result<(usize, usize), PictureFault> {
    let refused = |reason: String| PictureFault::Shape { width, height, reason };
    let multiple = settings.patch_size * settings.pooling_kernel_size;
    let target_pixels = settings.max_patches() * settings.patch_size * settings.patch_size;
    let factor = (target_pixels as f64 / (height as f64 * width as f64)).sqrt();
    let floor = |side: usize| (factor * side as f64 / multiple as f64).floor() as usize * multiple;
    let (mut target_height, mut target_width) = (floor(height), floor(width));
    if target_height == 0 && target_width == 0 {
        return Err(refused(format!(
            "both sides would shrink below {multiple} pixels (patch_size x pooling_kernel_size)"
        )));
    }
    let longest = settings.max_soft_tokens * multiple;
    if target_height == 0 {
        target_height = multiple;
        target_width = (width / height).saturating_mul(multiple).min(longest);
    } else if target_width == 0 {
        target_width = multiple;
        target_height = (height / width).saturating_mul(multiple).min(longest);
    }
    if target_height * target_width > target_pixels {
        return Err(refused(format!(
            "{target_width} x {target_height} pixels would be more than {} patches",
            settings.max_patches()
        )));
    }
    Ok((target_height, target_width))
}
