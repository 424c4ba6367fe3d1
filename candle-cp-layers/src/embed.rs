//! Full-sequence embeddings: the table's rows, with features of images and audio in the places of their placeholders.
//!
//! The result is gathered in one piece from its sources (table rows, the constant padding row, features), so nothing
//! is written in place and gradients flow back to the table and to the towers.

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::features::{Features, Media};

/// The embedding table and what is needed to read a batch of ids.
#[derive(Debug, Clone)]
pub struct Embedding {
    table_vh: Tensor,
    /// sqrt(hidden), rounded to the table's type.
    scale: f64,
    settings: EmbeddingSettings,
}

/// What is needed to read a batch of ids.
#[derive(Debug, Clone)]
pub struct EmbeddingSettings {
    /// Ids that the model knows.
    pub vocab_size: usize,
    /// The field of the configuration that says so, for messages.
    pub vocab_setting: &'static str,
    /// The id that the look-up does not train.
    pub pad_token_id: Option<u32>,
    /// What is no text.
    pub placeholders: Placeholders,
}

/// Ids that stand for something else than text. `None`: the model has no such placeholder, its id is text.
#[derive(Debug, Clone, Copy, Default)]
pub struct Placeholders {
    /// One image feature.
    pub image: Option<u32>,
    /// One video feature. Nothing fills it yet.
    pub video: Option<u32>,
    /// One audio feature.
    pub audio: Option<u32>,
    /// Whether the model has something that fills audio placeholders.
    pub has_audio: bool,
}

impl Placeholders {
    /// Whether this id is one of them.
    pub fn contains(&self, id: u32) -> bool {
        [self.image, self.video, self.audio].contains(&Some(id))
    }

    /// Image of every token of a row: a maximal run of image or video placeholders is one; counted from 0; other tokens
    /// have -1.
    pub fn groups(&self, ids: &[u32]) -> Vec<i64> {
        let mut group = -1;
        let mut inside = false;
        let of = |&id: &u32| {
            let vision = [self.image, self.video].contains(&Some(id));
            group += i64::from(vision && !inside);
            inside = vision;
            if vision { group } else { -1 }
        };
        ids.iter().map(of).collect()
    }
}

/// Where one token's embedding comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The n-th looked-up row.
    Table(u32),
    /// The padding row, which the look-up does not train.
    Padding,
    /// The n-th feature of a kind.
    Feature(Kind, u32),
}

/// What a placeholder is filled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Image,
    Audio,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Image, Self::Audio];

    /// One item, in messages.
    fn item(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Audio => "audio clip",
        }
    }

    fn features(self, media: &Media) -> Option<&Features> {
        match self {
            Self::Image => media.images.as_ref(),
            Self::Audio => media.audio.as_ref(),
        }
    }
}

/// A batch of ids, sorted into sources.
#[derive(Debug, Default)]
struct Plan {
    /// One per token of the batch.
    sources: Vec<Source>,
    /// Ids to look up, in order.
    table_ids: Vec<u32>,
    /// Features used of each kind.
    features: [u32; 2],
}

/// What the rows of an embedding table of this width are multiplied with: sqrt(width), rounded to the type that the
/// forward pass holds. Copies of the table in another type, as an optimizer may have, do not count.
pub fn table_scale(width: usize, dtype: DType) -> Result<f64> {
    let scale = Tensor::new((width as f64).sqrt(), &Device::Cpu)?.to_dtype(dtype)?;
    Ok(scale.to_dtype(DType::F64)?.to_scalar()?)
}

impl Embedding {
    /// Rows of `table_vh [vocabulary, hidden]`, multiplied by `scale`.
    pub fn new(table_vh: Tensor, scale: f64, settings: EmbeddingSettings) -> Self {
        Self { table_vh, scale, settings }
    }

    /// The table `[vocabulary, hidden]`.
    pub fn table_vh(&self) -> &Tensor {
        &self.table_vh
    }

    /// `[batch, tokens]` ids to `[batch, tokens, hidden]`.
    pub fn forward(&self, input_ids_bs: &Tensor, media: &Media) -> Result<Tensor> {
        let (batch, tokens) = input_ids_bs.dims2().map_err(|_| Error::Input {
            name: "input_ids",
            found: format!("{:?}", input_ids_bs.dims()),
            expected: "[batch, tokens]".to_string(),
        })?;
        let rows = input_ids_bs.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec2::<i64>()?;
        let plan = self.plan(&rows, media)?;
        let flat_th = self.gather(&plan, media)?;
        Ok(flat_th.reshape((batch, tokens, self.table_vh.dim(1)?))?)
    }

    fn plan(&self, rows: &[Vec<i64>], media: &Media) -> Result<Plan> {
        let mut plan = Plan::default();
        let mut fillers = Kind::ALL.map(|kind| Filler::new(kind, media));
        for (row, ids) in rows.iter().enumerate() {
            let mut index = 0;
            while index < ids.len() {
                let (id, kind) = self.check_id(row, index, ids[index])?;
                let Some(kind) = kind else {
                    plan.push_text(id, self.settings.pad_token_id);
                    index += 1;
                    continue;
                };
                let run = ids[index..].iter().take_while(|&&other| other == ids[index]).count();
                fillers[kind as usize].fill(row, index, run)?;
                plan.push_features(kind, run);
                index += run;
            }
        }
        for filler in fillers {
            filler.finish()?;
        }
        Ok(plan)
    }

    /// The id, and what fills it if it is a placeholder.
    fn check_id(&self, row: usize, index: usize, id: i64) -> Result<(u32, Option<Kind>)> {
        let EmbeddingSettings { vocab_size, vocab_setting: setting, placeholders, .. } = self.settings;
        let unknown = Error::TokenId { row, index, id, vocab_size, setting };
        let Ok(token) = u32::try_from(id) else { return Err(unknown) };
        let unfilled = |kind| Err(Error::Placeholder { row, index, id: token, kind });
        let is = |placeholder: Option<u32>| placeholder == Some(token);
        if is(placeholders.image) {
            Ok((token, Some(Kind::Image)))
        } else if is(placeholders.video) {
            unfilled("video")
        } else if is(placeholders.audio) {
            if placeholders.has_audio { Ok((token, Some(Kind::Audio))) } else { unfilled("audio") }
        } else if (token as usize) < vocab_size {
            Ok((token, None))
        } else {
            Err(unknown)
        }
    }

    fn gather(&self, plan: &Plan, media: &Media) -> Result<Tensor> {
        let device = self.table_vh.device();
        let mut parts = Vec::with_capacity(4);
        if !plan.table_ids.is_empty() {
            let ids = Tensor::new(plan.table_ids.as_slice(), device)?;
            parts.push((self.table_vh.index_select(&ids, 0)? * self.scale)?);
        }
        if plan.table_ids.len() == plan.sources.len() {
            return match parts.pop() {
                Some(only) => Ok(only),
                None => Ok(Tensor::zeros((0, self.table_vh.dim(1)?), self.table_vh.dtype(), device)?),
            };
        }
        let padding_start = plan.table_ids.len() as u32;
        let padding = self.settings.pad_token_id.filter(|_| plan.sources.contains(&Source::Padding));
        if let Some(id) = padding {
            parts.push((self.table_vh.detach().narrow(0, id as usize, 1)? * self.scale)?);
        }
        let mut start = padding_start + u32::from(padding.is_some());
        let mut feature_starts = [0; 2];
        for kind in Kind::ALL {
            let used = plan.features[kind as usize];
            feature_starts[kind as usize] = start;
            if let Some(features) = kind.features(media).filter(|_| used > 0) {
                parts.push(features.features_th.clone());
            }
            start += used;
        }
        let place = |source: &Source| match *source {
            Source::Table(n) => n,
            Source::Padding => padding_start,
            Source::Feature(kind, n) => feature_starts[kind as usize] + n,
        };
        let places: Vec<u32> = plan.sources.iter().map(place).collect();
        Ok(Tensor::cat(&parts, 0)?.index_select(&Tensor::new(places, device)?, 0)?)
    }
}

impl Plan {
    fn push_text(&mut self, id: u32, pad_token_id: Option<u32>) {
        if Some(id) == pad_token_id {
            self.sources.push(Source::Padding);
            return;
        }
        self.sources.push(Source::Table(self.table_ids.len() as u32));
        self.table_ids.push(id);
    }

    fn push_features(&mut self, kind: Kind, count: usize) {
        let used = &mut self.features[kind as usize];
        let next = *used;
        *used += count as u32;
        self.sources.extend((next..*used).map(|n| Source::Feature(kind, n)));
    }
}

/// Hands out whole items of one kind to runs of placeholders.
struct Filler<'a> {
    kind: Kind,
    per_item: &'a [usize],
    next: usize,
    last_row: usize,
}

impl<'a> Filler<'a> {
    fn new(kind: Kind, media: &'a Media) -> Self {
        let per_item = kind.features(media).map_or(&[][..], |features| &features.per_item);
        Self { kind, per_item, next: 0, last_row: 0 }
    }

    fn fill(&mut self, row: usize, start: usize, placeholders: usize) -> Result<()> {
        let item = self.next;
        let mut features = 0;
        while features < placeholders && self.next < self.per_item.len() {
            features += self.per_item[self.next];
            self.next += 1;
        }
        self.last_row = row;
        match features == placeholders {
            true => Ok(()),
            false => Err(Error::Splice { row, start, placeholders, kind: self.kind.item(), item, features }),
        }
    }

    fn finish(self) -> Result<()> {
        // An item without anything real gives no feature and needs no placeholder.
        let left = self.per_item[self.next..].iter().sum::<usize>();
        let (kind, given) = (self.kind.item(), self.per_item.len());
        match left {
            0 => Ok(()),
            _ => Err(Error::UnusedMedia { kind, given, used: self.next, row: self.last_row }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_factor_of_embeddings_is_rounded_as_in_transformers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/weights/embedding_scale.json");
        let facts: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let facts = facts.as_object().unwrap();
        assert_eq!(facts.len(), 7);
        for (width, factors) in facts {
            let width: usize = width.parse().unwrap();
            assert_eq!(table_scale(width, DType::F32).unwrap(), factors["f32 model"].as_f64().unwrap(), "{width}");
            assert_eq!(table_scale(width, DType::BF16).unwrap(), factors["bf16 model"].as_f64().unwrap(), "{width}");
        }
    }
}
