//! What turns images and audio into features: towers, or the projections that unified models have in their place.

use candle_core::Tensor;

use crate::audio::AudioTower;
use crate::config::Config;
use crate::frame_embedder::FrameEmbedder;
use crate::model::Inputs;
use crate::patch_embedder::PatchEmbedder;
use crate::vision::VisionTower;
use candle_cp_layers::{Error, Features, Media, Result, Tap, Weights};

#[derive(Debug, Clone)]
enum Vision {
    Tower(Box<VisionTower>),
    Patches(Box<PatchEmbedder>),
}

#[derive(Debug, Clone)]
enum Audio {
    Tower(Box<AudioTower>),
    Frames(FrameEmbedder),
}

/// The encoders that a model has.
#[derive(Debug, Clone)]
pub(crate) struct Encoders {
    vision: Option<Vision>,
    audio: Option<Audio>,
}

impl Encoders {
    pub(crate) fn new(config: &Config, weights: &Weights) -> Result<Self> {
        let vision = match (&config.vision, &config.patch_embedder) {
            (Some(vision), _) => Some(Vision::Tower(Box::new(VisionTower::new(config, vision, weights)?))),
            (_, Some(embedder)) => Some(Vision::Patches(Box::new(PatchEmbedder::new(config, embedder, weights)?))),
            (None, None) => None,
        };
        let audio = match (&config.audio, &config.frame_embedder) {
            (Some(audio), _) => Some(Audio::Tower(Box::new(AudioTower::new(config, audio, weights)?))),
            (_, Some(embedder)) => Some(Audio::Frames(FrameEmbedder::new(config, embedder, weights)?)),
            (None, None) => None,
        };
        Ok(Self { vision, audio })
    }

    /// Features of all images and all audio clips of a batch.
    pub(crate) fn forward(&self, inputs: &Inputs, tap: &mut dyn Tap) -> Result<Media> {
        Ok(Media { images: self.images(inputs, tap)?, audio: self.audio(inputs, tap)? })
    }

    fn images(&self, inputs: &Inputs, tap: &mut dyn Tap) -> Result<Option<Features>> {
        let pixel_values = ("pixel_values", &inputs.pixel_values, "the patches that image_position_ids is about");
        let position_ids =
            ("image_position_ids", &inputs.image_position_ids, "the positions of the patches in pixel_values");
        let Some((pixel_values, position_ids)) = both(pixel_values, position_ids)? else { return Ok(None) };
        match &self.vision {
            Some(Vision::Tower(tower)) => Ok(Some(tower.forward(pixel_values, position_ids, tap)?)),
            Some(Vision::Patches(embedder)) => Ok(Some(embedder.forward(pixel_values, position_ids, tap)?)),
            None => Err(wrong("pixel_values", "images", "none: this model has no vision_config")),
        }
    }

    fn audio(&self, inputs: &Inputs, tap: &mut dyn Tap) -> Result<Option<Features>> {
        let features = ("input_features", &inputs.input_features, "the frames that input_features_mask is about");
        let mask = ("input_features_mask", &inputs.input_features_mask, "1 or 0 for every frame of input_features");
        let Some((features, mask)) = both(features, mask)? else { return Ok(None) };
        match &self.audio {
            Some(Audio::Tower(tower)) => Ok(Some(tower.forward(features, mask, tap)?)),
            Some(Audio::Frames(embedder)) => Ok(Some(embedder.forward(features, mask, tap)?)),
            None => Err(wrong("input_features", "audio", "none: this model has no audio_config")),
        }
    }
}

/// An input's name, the input, and what is expected if it is the only one missing.
type Part<'a> = (&'static str, &'a Option<Tensor>, &'static str);

/// Two inputs that need each other; `None` if there are none, or none of their items.
fn both<'a>(first: Part<'a>, second: Part<'a>) -> Result<Option<(&'a Tensor, &'a Tensor)>> {
    match (first.1, second.1) {
        (None, None) => Ok(None),
        (Some(first), _) if first.dims().first() == Some(&0) => Ok(None),
        (Some(first), Some(second)) => Ok(Some((first, second))),
        (Some(_), None) => Err(wrong(second.0, "none", second.2)),
        (None, Some(_)) => Err(wrong(first.0, "none", first.2)),
    }
}

fn wrong(name: &'static str, found: &str, expected: &str) -> Error {
    Error::Input { name, found: found.to_string(), expected: expected.to_string() }
}
