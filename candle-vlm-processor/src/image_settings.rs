//! What every family's image settings answer, so that one processor serves all.

use std::fmt::Debug;

use crate::error::{PictureFault, Result};
use crate::patches::ImagePatches;
use crate::picture::Picture;
use crate::resize::resize_bicubic;
use crate::tokenizer::TextTokenizer;

/// The tokens around and for pictures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageTokens {
    /// Stands for a picture in a rendered chat, and for each of its soft tokens in the encoded one.
    pub image: String,
    /// Its id.
    pub image_id: u32,
    /// What the processor writes before the soft tokens of a picture; empty where the template does.
    pub begin: String,
    /// What it writes behind them.
    pub end: String,
    /// Id of the token for videos, if the tokenizer has one.
    pub video_id: Option<u32>,
    /// Id of the token for sounds, if the tokenizer has one.
    pub audio_id: Option<u32>,
}

/// How a family of models cuts pictures into patches. Values that [`Self::check`] refuses have no meaning for the rest.
pub trait ImageSettings: Debug + Send + Sync {
    /// Fails on values that do not fit together, so that settings made by hand are checked like those of files.
    ///
    /// # Errors
    /// The first such value, by name.
    fn check(&self) -> Result<()>;

    /// The tokens that stand around and for pictures.
    ///
    /// # Errors
    /// A token is not named, or is not one token of the vocabulary.
    fn tokens(&self, tokenizer: &TextTokenizer) -> Result<ImageTokens>;

    /// Side in pixels of the square of a resized picture that becomes one soft token.
    fn soft_token_side(&self) -> usize;

    /// The number of patches that [`Self::patches`] pads every picture to, where the family pads.
    fn padded_patches(&self) -> Option<usize>;

    /// Height and width in pixels that a picture of this size is resized to.
    ///
    /// # Errors
    /// A side is 0, or the rule has no answer for the shape.
    fn resized(&self, height: usize, width: usize) -> Result<(usize, usize), PictureFault>;

    /// Cuts a picture into patches as it is, without resizing and without padding.
    ///
    /// # Errors
    /// A side is 0 or no multiple of [`Self::soft_token_side`], or there are more patches than the model may get.
    fn patches_as_is(&self, picture: &Picture) -> Result<ImagePatches, PictureFault>;

    /// Soft tokens that a picture of this size takes.
    ///
    /// # Errors
    /// As [`Self::resized`].
    fn soft_tokens(&self, height: usize, width: usize) -> Result<usize, PictureFault> {
        let (height, width) = self.resized(height, width)?;
        Ok((height / self.soft_token_side()) * (width / self.soft_token_side()))
    }

    /// Resizes a picture and cuts it into patches.
    ///
    /// DIFFERENCE: pictures are resized as Pillow does it. transformers prefers torchvision where it is installed, and
    /// has nothing else for the merged layout of Gemma 4; its levels differ by 1, and by up to 8 where one side grows
    /// while the other shrinks.
    ///
    /// # Errors
    /// As [`Self::resized`].
    fn patches(&self, picture: &Picture) -> Result<ImagePatches, PictureFault> {
        let (height, width) = self.resized(picture.height(), picture.width())?;
        let mut cut = self.patches_as_is(&resize_bicubic(picture, width, height))?;
        if let Some(patches) = self.padded_patches() {
            cut.pad(patches);
        }
        Ok(cut)
    }
}

/// For programs that learn the family only when they read a checkpoint.
impl<T: ImageSettings + ?Sized> ImageSettings for Box<T> {
    fn check(&self) -> Result<()> {
        (**self).check()
    }

    fn tokens(&self, tokenizer: &TextTokenizer) -> Result<ImageTokens> {
        (**self).tokens(tokenizer)
    }

    fn soft_token_side(&self) -> usize {
        (**self).soft_token_side()
    }

    fn padded_patches(&self) -> Option<usize> {
        (**self).padded_patches()
    }

    fn resized(&self, height: usize, width: usize) -> Result<(usize, usize), PictureFault> {
        (**self).resized(height, width)
    }

    fn patches_as_is(&self, picture: &Picture) -> Result<ImagePatches, PictureFault> {
        (**self).patches_as_is(picture)
    }
}

/// Fails on a picture whose sides are 0 or no multiples of `multiple`, the product of the named fields.
pub(crate) fn check_sides(picture: &Picture, multiple: usize, fields: &str) -> Result<(), PictureFault> {
    let (height, width) = (picture.height(), picture.width());
    if multiple == 0 || height == 0 || width == 0 || height % multiple != 0 || width % multiple != 0 {
        let reason = format!("both sides must be multiples of {multiple} ({fields})");
        return Err(PictureFault::Shape { width, height, reason });
    }
    Ok(())
}

/// Fails on a picture without pixels, which the rules for sizes would divide by.
pub(crate) fn check_not_empty(height: usize, width: usize) -> Result<(), PictureFault> {
    match height == 0 || width == 0 {
        true => Err(PictureFault::Shape { width, height, reason: "a side is 0".into() }),
        false => Ok(()),
    }
}
