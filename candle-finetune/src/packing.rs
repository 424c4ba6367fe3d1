//! Samples packed into rows of one length: documents stay whole, the tail of a row is padding.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_cp::Tokens;
use candle_vlm_processor::ImagePatches;

use crate::error::{Error, Result};
use crate::family::VlmConfig;
use crate::sample::{Part, Position, Sample, Source};

/// Id of padding in place of a document, a group or a part.
const NONE: i64 = -1;
/// Label that is not learned.
const IGNORED: i64 = -100;

/// One batch, the same on every rank; `[rows][tokens]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Token ids.
    pub ids: Vec<Vec<u32>>,
    /// The id where it is learned, else -100; not shifted.
    pub labels: Vec<Vec<i64>>,
    /// Index in [`Part::ALL`] where a token is learned, else -100; not shifted.
    pub parts: Vec<Vec<i64>>,
    /// Documents of a row, counted from 0; -1 is padding.
    pub documents: Vec<Vec<i64>>,
    /// Images of a row, counted from 0; -1 is text.
    pub groups: Vec<Vec<i64>>,
    /// Pictures, row by row in the order of their placeholders.
    pub pictures: Vec<Arc<ImagePatches>>,
}

impl Batch {
    /// Tokens that are not padding.
    pub fn token_count(&self) -> usize {
        self.documents.iter().flatten().filter(|&&document| document >= 0).count()
    }

    /// Tokens of a row.
    pub fn seq_len(&self) -> usize {
        self.ids.first().map_or(0, Vec::len)
    }

    /// Pictures of a row.
    pub fn pictures_of_row(&self, row: usize) -> usize {
        self.groups[row].iter().max().map_or(0, |last| (last + 1) as usize)
    }

    /// What every rank knows of all tokens.
    ///
    /// # Errors
    /// The rows are empty or differ in length.
    pub fn tokens(&self) -> Result<Tokens> {
        Ok(Tokens::new(self.documents.clone(), self.groups.clone())?)
    }

    /// Labels `[rows, tokens]`, i64, not shifted.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn labels_bs(&self, device: &Device) -> Result<Tensor> {
        Ok(Tensor::new(self.labels.clone(), device)?)
    }

    /// Parts `[rows, tokens]`, i64, not shifted.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn parts_bs(&self, device: &Device) -> Result<Tensor> {
        Ok(Tensor::new(self.parts.clone(), device)?)
    }
}

/// The rows of one batch as they fill up: what comes goes to the first row with room.
#[derive(Debug)]
pub(crate) struct FirstFit {
    used: Vec<usize>,
    most: usize,
    seq_len: usize,
}

impl FirstFit {
    /// Up to `most` rows of `seq_len` tokens.
    pub(crate) fn new(most: usize, seq_len: usize) -> Self {
        Self { used: Vec::new(), most, seq_len }
    }

    /// The row that takes `len` tokens, at most those of a row; `None` if the batch is full.
    pub(crate) fn place(&mut self, len: usize) -> Option<usize> {
        let row = match self.used.iter().position(|used| used + len <= self.seq_len) {
            Some(row) => row,
            None if self.used.len() < self.most => {
                self.used.push(0);
                self.used.len() - 1
            }
            None => return None,
        };
        self.used[row] += len;
        Some(row)
    }

    /// Rows that hold something.
    pub(crate) fn rows(&self) -> usize {
        self.used.len()
    }
}

/// Fills batches from a source: each sample goes to the first row with room; the first one that fits nowhere begins
/// the next batch. A batch never reaches over the end of an epoch; the last one of an epoch may have fewer rows.
pub struct Packer<'a> {
    source: Box<dyn Source + 'a>,
    /// Where the first sample lies that is in no batch yet.
    position: Position,
    /// That sample, if it was drawn for the last batch and did not fit.
    waiting: Option<Sample>,
    config: &'a dyn VlmConfig,
    rows: usize,
    seq_len: usize,
}

impl<'a> Packer<'a> {
    /// Batches of `rows` x `seq_len` tokens, from the beginning of the first epoch.
    pub fn new(source: Box<dyn Source + 'a>, config: &'a dyn VlmConfig, rows: usize, seq_len: usize) -> Self {
        Self { source, position: Position::default(), waiting: None, config, rows, seq_len }
    }

    /// Where the batches given out so far end. At the end of an epoch all its samples are taken; the next batch is of
    /// the epoch after it.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Goes to where another packer over the same data was: the batches that follow are the same bit for bit.
    ///
    /// # Errors
    /// The epoch has fewer samples than are taken; then nothing was changed.
    pub fn seek(&mut self, position: Position) -> Result<()> {
        let samples = self.source.epoch_len(position.epoch);
        if position.taken > samples {
            return Err(Error::Position { epoch: position.epoch, taken: position.taken, samples });
        }
        self.position = position;
        self.waiting = None;
        Ok(())
    }

    /// Samples of the epoch of [`Packer::position`].
    pub fn epoch_len(&mut self) -> usize {
        self.source.epoch_len(self.position.epoch)
    }

    /// The next batch; `None` once at the end of each epoch.
    ///
    /// # Errors
    /// The source failed, or a sample is longer than a row.
    pub fn next_batch(&mut self) -> Result<Option<Batch>> {
        Ok(self.next_rows(true)?.map(|rows| self.lay_out(rows)))
    }

    /// Passes over the next batch, whose samples are not made where their lengths are known; false once at the end of each
    /// epoch.
    ///
    /// # Errors
    /// As [`Packer::next_batch`].
    pub fn skip_batch(&mut self) -> Result<bool> {
        Ok(self.next_rows(false)?.is_some())
    }

    /// The rows of the next batch, without their samples if these are not wanted.
    fn next_rows(&mut self, wanted: bool) -> Result<Option<Vec<Vec<Sample>>>> {
        let mut rows: Vec<Vec<Sample>> = Vec::new();
        let mut fit = FirstFit::new(self.rows, self.seq_len);
        // An error leaves the position where it was.
        let mut place = self.position;
        let samples = self.epoch_len();
        while place.taken < samples {
            let (sample, tokens) = match self.waiting.take() {
                None if wanted => sized(self.source.sample(place)?),
                None => (None, self.source.sample_len(place)?),
                Some(sample) => sized(sample),
            };
            if tokens > self.seq_len {
                return Err(Error::SampleTooLong { tokens, seq_len: self.seq_len });
            }
            let Some(row) = fit.place(tokens) else {
                self.waiting = sample;
                break;
            };
            rows.resize_with(fit.rows(), Vec::new);
            rows[row].extend(sample);
            place.taken += 1;
        }
        if place == self.position {
            self.position = Position { epoch: place.epoch + 1, taken: 0 };
            return Ok(None);
        }
        self.position = place;
        Ok(Some(rows))
    }

    /// The next batch of an endless row of epochs.
    ///
    /// # Errors
    /// As [`Packer::next_batch`], and a source without any sample.
    pub fn next_training_batch(&mut self) -> Result<Batch> {
        self.enter_epoch()?;
        Ok(self.next_batch()?.expect("an epoch that is not done has a batch"))
    }

    /// Goes to the beginning of the next epoch if the batches of this one are done.
    ///
    /// # Errors
    /// A source without any sample.
    pub fn enter_epoch(&mut self) -> Result<()> {
        if self.position.taken < self.epoch_len() {
            return Ok(());
        }
        self.position = Position { epoch: self.position.epoch + 1, taken: 0 };
        match self.epoch_len() {
            0 => Err(Error::Task { task: "this data", reason: "an epoch has no sample".to_string() }),
            _ => Ok(()),
        }
    }

    fn lay_out(&self, rows: Vec<Vec<Sample>>) -> Batch {
        let pad = self.config.token_ids().pad;
        let mut batch = Batch {
            ids: Vec::new(),
            labels: Vec::new(),
            parts: Vec::new(),
            documents: Vec::new(),
            groups: Vec::new(),
            pictures: Vec::new(),
        };
        for samples in rows {
            let (mut ids, mut labels, mut parts, mut documents) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for (document, sample) in samples.into_iter().enumerate() {
                for (place, token) in sample.tokens.iter().enumerate() {
                    let learned = token.learned.filter(|_| place > 0);
                    ids.push(token.id);
                    labels.push(learned.map_or(IGNORED, |_| i64::from(token.id)));
                    parts.push(learned.map_or(IGNORED, part_index));
                    documents.push(document as i64);
                }
                batch.pictures.extend(sample.pictures);
            }
            ids.resize(self.seq_len, pad);
            labels.resize(self.seq_len, IGNORED);
            parts.resize(self.seq_len, IGNORED);
            documents.resize(self.seq_len, NONE);
            batch.groups.push(self.config.placeholders().groups(&ids));
            batch.ids.push(ids);
            batch.labels.push(labels);
            batch.parts.push(parts);
            batch.documents.push(documents);
        }
        batch
    }
}

/// A sample and its length.
fn sized(sample: Sample) -> (Option<Sample>, usize) {
    let tokens = sample.len();
    (Some(sample), tokens)
}

fn part_index(part: Part) -> i64 {
    Part::ALL.iter().position(|other| *other == part).expect("all parts are listed") as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Family;
    use crate::small_model;

    /// Gives samples of the listed lengths in every epoch; the ids of a sample are 20 + its index.
    struct Lengths(Vec<usize>);

    impl Source for Lengths {
        fn epoch_len(&mut self, _: usize) -> usize {
            self.0.len()
        }

        fn sample(&mut self, place: Position) -> Result<Sample> {
            let mut sample = Sample::default();
            sample.push_learned(&vec![20 + place.taken as u32; self.0[place.taken]], Part::Text);
            Ok(sample)
        }
    }

    fn packer<'a>(config: &'a dyn VlmConfig, lengths: &[usize], rows: usize, seq_len: usize) -> Packer<'a> {
        Packer::new(Box::new(Lengths(lengths.to_vec())), config, rows, seq_len)
    }

    #[test]
    fn samples_stay_whole_and_go_to_the_first_row_with_room() -> Result<()> {
        let config = small_model::config(Family::Gemma4)?;
        let mut packer = packer(config.as_ref(), &[5, 6, 3, 2, 4, 1], 2, 8);
        let first = packer.next_batch()?.expect("a batch");
        assert_eq!(first.ids, [[20, 20, 20, 20, 20, 22, 22, 22], [21, 21, 21, 21, 21, 21, 23, 23]]);
        assert_eq!(first.documents, [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]]);
        assert_eq!(first.token_count(), 16);
        // The sample of 4 did not fit and waits; the epoch ends after the one of 1, and so does the batch.
        let second = packer.next_batch()?.expect("a batch");
        assert_eq!(second.ids, [[24, 24, 24, 24, 25, 0, 0, 0]]);
        assert_eq!(second.documents, [[0, 0, 0, 0, 1, -1, -1, -1]]);
        assert_eq!(second.token_count(), 5);
        assert!(packer.next_batch()?.is_none());
        assert_eq!(packer.next_training_batch()?, first);
        Ok(())
    }

    #[test]
    fn the_first_token_of_a_document_and_padding_are_never_learned() -> Result<()> {
        let config = small_model::config(Family::Gemma4)?;
        let batch = packer(config.as_ref(), &[3, 2], 1, 8).next_batch()?.expect("a batch");
        assert_eq!(batch.labels, [[-100, 20, 20, -100, 21, -100, -100, -100]]);
        assert_eq!(batch.parts, [[-100, 0, 0, -100, 0, -100, -100, -100]]);
        Ok(())
    }

    #[test]
    fn images_are_groups_and_pictures_follow_the_rows() -> Result<()> {
        let config = small_model::config(Family::Gemma4)?;
        let picture = |level: u8| {
            let picture = candle_vlm_processor::Picture::from_rgb(4, 4, vec![level; 48]).expect("48 samples");
            Arc::new(config.image_settings().expect("a tower").patches_as_is(&picture).expect("it fits"))
        };
        struct Three(Vec<Sample>);
        impl Source for Three {
            fn epoch_len(&mut self, _: usize) -> usize {
                self.0.len()
            }

            fn sample(&mut self, place: Position) -> Result<Sample> {
                Ok(self.0[place.taken].clone())
            }
        }
        let sample = |level: u8, len: usize| {
            let mut sample = Sample { tokens: Vec::new(), pictures: vec![picture(level)] };
            sample.push(&[2, config.placeholders().image.expect("a tower")]);
            sample.push(&vec![20; len - 2]);
            sample
        };
        // First-fit order: level 1 in row 0, level 2 in row 1, level 3 in row 0 again.
        let samples = vec![sample(1, 4), sample(2, 5), sample(3, 3)];
        let batch = Packer::new(Box::new(Three(samples)), config.as_ref(), 2, 7).next_batch()?.expect("a batch");
        assert_eq!(batch.groups, [[-1, 0, -1, -1, -1, 1, -1], [-1, 0, -1, -1, -1, -1, -1]]);
        let levels: Vec<f32> = batch.pictures.iter().map(|picture| (picture.pixels[0] * 255.0).round()).collect();
        assert_eq!(levels, [1.0, 3.0, 2.0]);
        Ok(())
    }

    #[test]
    fn a_sample_longer_than_a_row_is_an_error() -> Result<()> {
        let config = small_model::config(Family::Gemma4)?;
        let error = packer(config.as_ref(), &[9], 2, 8).next_batch().unwrap_err().to_string();
        assert!(error.contains("9 tokens") && error.contains("row of 8") && error.contains("--seq-len"), "{error}");
        let empty = packer(config.as_ref(), &[], 2, 8).next_training_batch().unwrap_err().to_string();
        assert!(empty.contains("no sample"), "{empty}");
        Ok(())
    }

    #[test]
    fn batches_after_a_seek_are_those_of_an_unbroken_run() -> Result<()> {
        let config = small_model::config(Family::Gemma4)?;
        let new = || packer(config.as_ref(), &[5, 6, 3, 2, 4, 1, 7, 8, 1], 2, 8);
        let mut unbroken = new();
        let mut steps = Vec::new();
        for _ in 0..12 {
            steps.push((unbroken.position(), unbroken.next_batch()?));
        }
        assert_eq!(steps.iter().filter(|(_, batch)| batch.is_none()).count(), 3);
        for from in 0..steps.len() {
            let mut resumed = new();
            // A sample that waits belongs to the place that was left.
            resumed.next_batch()?;
            resumed.seek(steps[from].0)?;
            for (position, batch) in &steps[from..] {
                assert_eq!((&resumed.position(), &resumed.next_batch()?), (position, batch), "from {from}");
            }
        }
        Ok(())
    }

    #[test]
    fn batches_that_are_passed_over_leave_the_others_as_they_are() -> Result<()> {
        let config = small_model::config(Family::Gemma4)?;
        let new = || packer(config.as_ref(), &[5, 6, 3, 2, 4, 1, 7, 8, 1], 2, 8);
        let mut whole = new();
        let all: Vec<_> = (0..8).map(|_| Ok((whole.next_batch()?, whole.position()))).collect::<Result<_>>()?;
        for pattern in 0..1u32 << all.len() {
            let mut some = new();
            for (number, (batch, position)) in all.iter().enumerate() {
                match pattern >> number & 1 {
                    0 => assert_eq!(some.skip_batch()?, batch.is_some()),
                    _ => assert_eq!(some.next_batch()?, *batch),
                }
                assert_eq!(some.position(), *position);
            }
        }
        Ok(())
    }

    #[test]
    fn a_place_that_the_data_does_not_have_is_an_error() -> Result<()> {
        let config = small_model::config(Family::Gemma4)?;
        let mut packer = packer(config.as_ref(), &[2, 3], 1, 8);
        packer.seek(Position { epoch: 4, taken: 2 })?;
        assert!(packer.next_batch()?.is_none());
        let error = packer.seek(Position { epoch: 1, taken: 3 }).unwrap_err();
        let text = error.to_string();
        assert!(error.is_usage() && text.contains("3 samples of epoch 2") && text.contains("has 2"), "{text}");
        assert_eq!((packer.position(), packer.epoch_len()), (Position { epoch: 5, taken: 0 }, 2));
        Ok(())
    }
}
