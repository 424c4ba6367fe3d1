//! The size that a picture is resized to.

use super::settings::Qwen3_5ImageSettings;
use crate::error::PictureFault;

/// How much longer than the other a side may be.
const LARGEST_RATIO: f64 = 200.0;
/// Most pixels after resizing, 16 times what released checkpoints allow, so that settings cannot ask for all memory.
const MOST_PIXELS: u128 = 1 << 28;

/// Height and width in pixels: the multiples of `patch_size * merge_size` that are nearest, unless their area leaves
/// the range of pixels; then the largest (or smallest) multiples that keep the shape and the range. Sides are not 0.
pub(super) fn resized(
    height: usize,
    width: usize,
    settings: &Qwen3_5ImageSettings,
) -> Result<(usize, usize), PictureFault> {
    if height.max(width) as f64 / height.min(width) as f64 > LARGEST_RATIO {
        let reason = format!(
            "one side is more than {LARGEST_RATIO} times as long as the other; cut it to a shape closer to a square"
        );
        return Err(PictureFault::Shape { width, height, reason });
    }
    let multiple = (settings.patch_size * settings.merge_size) as u128;
    let units = |side: usize| side as f64 / multiple as f64;
    let area = height as f64 * width as f64;
    // Ties go to the even number, as Python rounds.
    let nearest = [height, width].map(|side| units(side).round_ties_even() as u128 * multiple);
    let nearest_area = nearest[0].saturating_mul(nearest[1]);
    let [new_height, new_width] = if nearest_area > settings.max_pixels as u128 {
        let shrink = (area / settings.max_pixels as f64).sqrt();
        let floor = |side: usize| (side as f64 / shrink / multiple as f64).floor() as u128 * multiple;
        [height, width].map(|side| floor(side).max(multiple))
    } else if nearest_area < settings.min_pixels as u128 {
        let grow = (settings.min_pixels as f64 / area).sqrt();
        [height, width].map(|side| (side as f64 * grow / multiple as f64).ceil() as u128 * multiple)
    } else {
        nearest
    };
    if new_height == 0 || new_width == 0 {
        let reason = "patch_size, merge_size and min_pixels must be at least 1".into();
        return Err(PictureFault::Shape { width, height, reason });
    }
    check_pixels(new_height, new_width)?;
    Ok((new_height as usize, new_width as usize))
}

/// Fails on more pixels than this crate cuts.
pub(super) fn check_pixels(height: u128, width: u128) -> Result<(), PictureFault> {
    if height.saturating_mul(width) <= MOST_PIXELS {
        return Ok(());
    }
    let side = |side: u128| usize::try_from(side).unwrap_or(usize::MAX);
    let reason = format!("that is the size to cut, and at most {MOST_PIXELS} pixels are allowed; lower longest_edge");
    Err(PictureFault::Shape { width: side(width), height: side(height), reason })
}
