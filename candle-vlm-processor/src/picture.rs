//! Pictures: 8-bit RGB, upright, without transparency, from PNG or JPEG content.

mod color;
mod decode;
mod jpeg;
mod orientation;
mod source;

pub use source::PictureSource;

use crate::error::PictureFault;

/// An upright picture of 8-bit RGB samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    width: usize,
    height: usize,
    /// `[height, width, 3]`, row by row.
    rgb_hwc: Vec<u8>,
}

/// What a picture may at most be, so that a few kilobytes cannot ask for all memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PictureLimits {
    /// Most pixels (width times height) of a picture; decoding takes up to 19 bytes for each.
    pub max_pixels: u64,
    /// Most bytes of an encoded picture.
    pub max_bytes: u64,
}

impl Default for PictureLimits {
    /// 178,956,970 pixels, where Pillow refuses pictures as well, and 512 MiB.
    fn default() -> Self {
        Self { max_pixels: 178_956_970, max_bytes: 512 << 20 }
    }
}

impl Picture {
    /// A picture from `[height, width, 3]` samples, row by row.
    ///
    /// # Errors
    /// The number of samples is not `width * height * 3`, or is 0.
    pub fn from_rgb(width: usize, height: usize, rgb_hwc: Vec<u8>) -> Result<Self, PictureFault> {
        if rgb_hwc.is_empty() {
            return Err(PictureFault::Empty);
        }
        if width.checked_mul(height).and_then(|pixels| pixels.checked_mul(3)) != Some(rgb_hwc.len()) {
            return Err(PictureFault::WrongLength { width, height, found: rgb_hwc.len() });
        }
        Ok(Self { width, height, rgb_hwc })
    }

    /// Decodes the content of a PNG or JPEG file.
    ///
    /// Orientation tags (EXIF, XMP) are applied; transparency is composited onto white; 16-bit samples keep their high
    /// byte; CMYK becomes RGB by plain ink arithmetic, as in Pillow. Of an animated PNG the default image is taken.
    ///
    /// # Errors
    /// Empty, cut, damaged or too large content; another format.
    pub fn decode(content: &[u8], limits: &PictureLimits) -> Result<Self, PictureFault> {
        decode::decode(content, limits)
    }

    /// The same picture with other samples; `None` keeps them.
    pub(crate) fn resized(&self, width: usize, height: usize, rgb_hwc: Option<Vec<u8>>) -> Self {
        Self { width, height, rgb_hwc: rgb_hwc.unwrap_or_else(|| self.rgb_hwc.clone()) }
    }

    /// Width in pixels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Height in pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The samples, `[height, width, 3]`.
    pub fn rgb_hwc(&self) -> &[u8] {
        &self.rgb_hwc
    }

    /// Red, green and blue of one pixel.
    ///
    /// # Panics
    /// `x` or `y` is outside the picture.
    pub fn pixel(&self, x: usize, y: usize) -> [u8; 3] {
        assert!(x < self.width && y < self.height, "pixel ({x}, {y}) of a {} x {} picture", self.width, self.height);
        let at = (y * self.width + x) * 3;
        [self.rgb_hwc[at], self.rgb_hwc[at + 1], self.rgb_hwc[at + 2]]
    }
}
