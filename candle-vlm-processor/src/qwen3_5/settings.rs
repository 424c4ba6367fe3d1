//! The image settings of a checkpoint.

use std::fmt::Display;
use std::path::Path;

use serde_json::Value;

use super::size;
use crate::error::{Error, PictureFault, Result};
use crate::fields::Fields;
use crate::image_settings::{ImageSettings, ImageTokens, check_not_empty, check_sides};
use crate::patches::ImagePatches;
use crate::picture::Picture;
use crate::tokenizer::TextTokenizer;

/// How Qwen 3.5 cuts pictures into patches. Read from a checkpoint, or set by hand.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3_5ImageSettings {
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// How often a picture is repeated along time in a patch.
    pub temporal_patch_size: usize,
    /// Patches per soft token along each side.
    pub merge_size: usize,
    /// Fewest pixels of a resized picture (`size.shortest_edge`, an area in spite of its name). It yields where the
    /// rounding of a side to whole soft tokens needs it.
    pub min_pixels: usize,
    /// Most pixels of a resized picture (`size.longest_edge`, an area as well). It yields likewise.
    pub max_pixels: usize,
    /// Samples are multiplied with this; 1 / 255 brings them to 0..1. 1 where `do_rescale` is false.
    pub rescale_factor: f64,
    /// Mean and standard deviation per channel, applied after that; `None` where `do_normalize` is false.
    pub normalize: Option<([f32; 3], [f32; 3])>,
}

/// What transformers takes for absent fields.
const MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const STD: [f32; 3] = [0.268_629_54, 0.261_302_6, 0.275_777_1];
const MIN_PIXELS: usize = 56 * 56;
const MAX_PIXELS: usize = 28 * 28 * 1280;
/// The class that Qwen 3.5 takes from Qwen 2, by its names over time.
const CLASSES: [&str; 3] = ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"];
/// The switches that are followed; any other has to be off.
const SWITCHES: [&str; 4] = ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"];

impl Qwen3_5ImageSettings {
    /// Reads the settings of a checkpoint folder: the section `image_processor` of `processor_config.json`, else
    /// `preprocessor_config.json`. Absent fields have the values that transformers gives them, which are not those of
    /// released checkpoints (patch 14, merge 2, 3136 to 1003520 pixels, mean and deviation of CLIP).
    ///
    /// DIFFERENCE: switches that transformers reads and then ignores for this family (`do_center_crop`, `do_pad`) are
    /// refused where they are true.
    ///
    /// # Errors
    /// No such file; a field with a value that is not supported, by name and value.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let fields = Fields::of_images(folder)?.ok_or_else(|| Fields::missing(folder))?;
        check_class(&fields)?;
        fields.needs(&["do_resize", "do_convert_rgb"])?;
        fields.needs_bicubic()?;
        refuse_other_switches(&fields)?;
        let (min_pixels, max_pixels) = pixel_range(&fields)?;
        let rescale_factor = fields.rescale_factor()?;
        let settings = Self {
            patch_size: fields.number("patch_size")?.map_or(14, to_usize),
            temporal_patch_size: fields.number("temporal_patch_size")?.map_or(2, to_usize),
            merge_size: fields.number("merge_size")?.map_or(2, to_usize),
            min_pixels,
            max_pixels,
            rescale_factor: if fields.flag("do_rescale")?.unwrap_or(true) { rescale_factor } else { 1.0 },
            normalize: match fields.flag("do_normalize")?.unwrap_or(true) {
                true => Some(fields.mean_and_std(MEAN, STD)?),
                false => None,
            },
        };
        settings.check().map_err(|fault| fields.located(fault))?;
        Ok(settings)
    }
}

impl ImageSettings for Qwen3_5ImageSettings {
    fn check(&self) -> Result<()> {
        let range = |field: &str, value: usize, most: usize| match (1..=most).contains(&value) {
            true => Ok(()),
            false => Err(by_hand(field, &value, format!("1 to {most} are allowed"))),
        };
        range("patch_size", self.patch_size, 1024)?;
        range("temporal_patch_size", self.temporal_patch_size, 64)?;
        range("merge_size", self.merge_size, 64)?;
        range("min_pixels", self.min_pixels, usize::MAX)?;
        range("max_pixels", self.max_pixels, usize::MAX)?;
        if self.normalize.is_some_and(|(_, std)| std.contains(&0.0)) {
            return Err(by_hand("image_std", &0, "must not be 0".into()));
        }
        Ok(())
    }

    /// The template writes the tokens around a picture, so the processor adds none.
    fn tokens(&self, tokenizer: &TextTokenizer) -> Result<ImageTokens> {
        let named = |field, usual: &str| match tokenizer.named_token(field) {
            // What transformers takes where no file names the token.
            Err(Error::SpecialToken { token: None, .. }) => {
                tokenizer.id(usual).map(|id| (usual.to_owned(), id)).ok_or(Error::SpecialToken {
                    field,
                    token: Some(usual.to_owned()),
                    reason: "it is not a token of tokenizer.json; name another in tokenizer_config.json",
                })
            }
            named => named,
        };
        let (image, image_id) = named("image_token", "<|image_pad|>")?;
        let video_id = named("video_token", "<|video_pad|>").ok().map(|(_, id)| id);
        Ok(ImageTokens { image, image_id, begin: String::new(), end: String::new(), video_id, audio_id: None })
    }

    fn soft_token_side(&self) -> usize {
        self.patch_size * self.merge_size
    }

    fn padded_patches(&self) -> Option<usize> {
        None
    }

    fn resized(&self, height: usize, width: usize) -> Result<(usize, usize), PictureFault> {
        check_not_empty(height, width)?;
        size::resized(height, width, self)
    }

    fn patches_as_is(&self, picture: &Picture) -> Result<ImagePatches, PictureFault> {
        check_sides(picture, self.soft_token_side(), "patch_size x merge_size")?;
        size::check_pixels(picture.height() as u128, picture.width() as u128)?;
        Ok(self.cut(picture))
    }
}

fn by_hand(field: &str, value: &dyn Display, reason: String) -> Error {
    Error::Setting { file: "image settings".into(), field: field.into(), value: value.to_string(), reason }
}

/// Too large a number stays too large.
fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The class of the image processor decides, else that of the processor.
fn check_class(fields: &Fields) -> Result<()> {
    let by = |field: &str, right: bool| match right {
        true => Ok(()),
        false => Err(fields.fault(field, "only Qwen's image processor is supported here (Qwen2VLImageProcessor)")),
    };
    match (fields.values.get("image_processor_type"), &fields.processor_class) {
        (Some(class), _) if !class.is_null() => {
            by("image_processor_type", class.as_str().is_some_and(|class| CLASSES.contains(&class)))
        }
        (_, Some(class)) => by("processor_class", class.starts_with("Qwen")),
        (_, None) => Ok(()),
    }
}

fn refuse_other_switches(fields: &Fields) -> Result<()> {
    let others = fields.values.keys().filter(|name| name.starts_with("do_") && !SWITCHES.contains(&name.as_str()));
    for field in others {
        if fields.flag(field)?.unwrap_or(false) {
            return Err(fields.fault(field, "only false is supported for this family"));
        }
    }
    Ok(())
}

/// Fewest and most pixels: `min_pixels` and `max_pixels`, else what `size` says.
fn pixel_range(fields: &Fields) -> Result<(usize, usize)> {
    let size = match fields.values.get("size") {
        None | Some(Value::Null) => None,
        Some(Value::Object(size)) => Some(size),
        Some(_) => return Err(fields.fault("size", "must be an object with shortest_edge and longest_edge")),
    };
    let limit = |older: &str, edge: &str, absent: usize| match (fields.number(older)?, size) {
        (Some(0), _) => Err(fields.fault(older, "must be at least 1")),
        (Some(pixels), _) => Ok(to_usize(pixels)),
        (None, None) => Ok(absent),
        (None, Some(size)) => match size.get(edge).and_then(Value::as_u64) {
            None | Some(0) => {
                Err(fields.fault("size", &format!("{edge} must be a whole number of pixels, at least 1")))
            }
            Some(pixels) => Ok(to_usize(pixels)),
        },
    };
    let range = (limit("min_pixels", "shortest_edge", MIN_PIXELS)?, limit("max_pixels", "longest_edge", MAX_PIXELS)?);
    // transformers drops the older names inside `size` where they also stand beside it.
    let known = |key: &str| match key {
        "shortest_edge" | "longest_edge" => true,
        "min_pixels" | "max_pixels" => fields.values.get(key).is_some_and(|value| !value.is_null()),
        _ => false,
    };
    match size.into_iter().flatten().find(|(key, value)| !value.is_null() && !known(key)) {
        Some((key, _)) => {
            let reason = format!("only shortest_edge and longest_edge are supported, not {key}");
            Err(fields.fault("size", &reason))
        }
        None => Ok(range),
    }
}
