//! Conversations about handwritten digits: several pictures, several turns.
//!
//! Each turn of the user but the last shows one to three pictures and asks to read them; the last one asks to repeat
//! all digits so far, which only layers that look past the window can know.

use std::sync::Arc;

use rand::Rng;
use rand::seq::SliceRandom;

use candle_vlm_processor::{ImageSettings, Picture, TextTokenizer};

use crate::digit_words::DigitWords;
use crate::digits::{Digit, Digits, SIDE};
use crate::error::{Error, Result};
use crate::family::VlmConfig;
use crate::sample::{Part, Position, Sample, Source, epoch_rng};

/// Most turns with pictures in a conversation; there is at least one.
const MAX_READ_TURNS: usize = 3;
/// How often a turn shows 1, 2 and 3 pictures, out of 10.
const PICTURES_OUT_OF_TEN: [usize; 3] = [5, 3, 2];
/// Soft tokens per side of a picture: two, so that an image block has a before and an after.
const SOFT_TOKENS_PER_SIDE: usize = 2;

/// What a turn of the user asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Question {
    Read,
    Repeat,
}

impl Question {
    fn part(self) -> Part {
        match self {
            Self::Read => Part::Read,
            Self::Repeat => Part::Repeat,
        }
    }
}

/// The task: digits, how to draw them for a model, and how to talk about them.
#[derive(Debug, Clone)]
pub struct DigitTask {
    digits: Digits,
    words: DigitWords,
    settings: Arc<dyn ImageSettings>,
    side: usize,
    soft_tokens: usize,
}

impl DigitTask {
    /// Prepares the task for a model: pictures are drawn at a size that it takes.
    ///
    /// # Errors
    /// The model takes no pictures, or the tokenizer lacks a token that the conversations need.
    pub fn new(config: &dyn VlmConfig, tokenizer: &TextTokenizer) -> Result<Self> {
        let settings = config.image_settings().ok_or_else(|| Error::Task {
            task: "digits",
            reason: "config.json has no vision_config; use a vision-language checkpoint, or give --data".to_string(),
        })?;
        let side = picture_side(settings.soft_token_side());
        let unusable = |reason: String| Error::Task { task: "digits", reason: format!("a digit's picture {reason}") };
        let blank = Picture::from_rgb(side, side, vec![0; 3 * side * side]).map_err(|e| unusable(e.to_string()))?;
        let patches = settings.patches_as_is(&blank).map_err(|e| unusable(e.to_string()))?;
        config.check_picture(patches.resized).map_err(unusable)?;
        let words = DigitWords::new(config, tokenizer)?;
        Ok(Self { digits: Digits::load()?, words, settings: settings.into(), side, soft_tokens: patches.soft_tokens })
    }

    /// Digits to train on and held out.
    pub fn digits(&self) -> &Digits {
        &self.digits
    }

    /// Conversations about the training digits, each of which is shown once per epoch, a little different each time,
    /// because so few images would be learned by heart.
    pub fn training(&self, seed: u64) -> Conversations<'_> {
        Conversations { task: self, digits: &self.digits.train, seed, varied: true, plan: None }
    }

    /// Conversations about the held-out digits, each of which is shown once per epoch.
    pub fn held_out(&self, seed: u64) -> Conversations<'_> {
        Conversations { task: self, digits: &self.digits.held_out, seed, varied: false, plan: None }
    }

    /// Tokens of the longest conversation; rows must not be shorter.
    pub fn longest(&self) -> usize {
        let digit = self.digits.train[0];
        let turns = vec![vec![digit; PICTURES_OUT_OF_TEN.len()]; MAX_READ_TURNS];
        self.conversation(&turns).len()
    }

    fn conversation(&self, turns: &[Vec<Digit>]) -> Sample {
        let mut sample = Sample::default();
        sample.push(self.words.bos.as_slice());
        for digits in turns {
            self.push_turns(&mut sample, Question::Read, digits);
        }
        self.push_turns(&mut sample, Question::Repeat, &turns.concat());
        sample
    }

    /// A turn of the user and the model's answer.
    fn push_turns(&self, sample: &mut Sample, question: Question, digits: &[Digit]) {
        sample.push(&self.words.user);
        if question == Question::Read {
            for digit in digits {
                sample.push(&self.words.image(self.soft_tokens));
                let patches = self.settings.patches_as_is(&digit.picture(self.side));
                sample.pictures.push(Arc::new(patches.expect("all digits have the size that was checked")));
            }
        }
        sample.push(match question {
            Question::Read => &self.words.read,
            Question::Repeat => &self.words.repeat,
        });
        sample.push(&[self.words.turn_close]);
        sample.push(&self.words.newline);
        sample.push(&self.words.model);
        for digit in digits {
            sample.push_learned(&[self.words.digits[usize::from(digit.value)]], question.part());
        }
        sample.push_learned(&[self.words.turn_close], Part::End);
        sample.push(&self.words.newline);
    }
}

/// The smallest side that is not below that of the table's images and gives two soft tokens.
fn picture_side(unit: usize) -> usize {
    unit * SIDE.div_ceil(unit).max(SOFT_TOKENS_PER_SIDE)
}

/// Conversations in epochs.
#[derive(Debug, Clone)]
pub struct Conversations<'a> {
    task: &'a DigitTask,
    digits: &'a [Digit],
    seed: u64,
    /// Whether a digit looks a little different each time.
    varied: bool,
    /// The epoch that was asked for last and its conversations: the digits of each turn, by their indices.
    plan: Option<(usize, Vec<Vec<Vec<usize>>>)>,
}

impl Conversations<'_> {
    /// Which digits the turns of an epoch show, conversation by conversation; nothing is drawn yet.
    fn plan(&mut self, epoch: usize) -> &[Vec<Vec<usize>>] {
        if self.plan.as_ref().is_none_or(|(planned, _)| *planned != epoch) {
            let mut rng = epoch_rng(self.seed, epoch, None);
            let mut deck: Vec<usize> = (0..self.digits.len()).collect();
            deck.shuffle(&mut rng);
            let mut conversations = Vec::new();
            while !deck.is_empty() {
                let mut turns = Vec::new();
                for _ in 0..rng.random_range(1..=MAX_READ_TURNS) {
                    let left = deck.len().saturating_sub(picture_count(&mut rng));
                    turns.push(deck.split_off(left));
                }
                turns.retain(|digits| !digits.is_empty());
                conversations.push(turns);
            }
            self.plan = Some((epoch, conversations));
        }
        let (_, conversations) = self.plan.as_ref().expect("it was just made");
        conversations
    }
}

/// How many pictures a turn shows.
fn picture_count(rng: &mut impl Rng) -> usize {
    let mut left = rng.random_range(0..PICTURES_OUT_OF_TEN.iter().sum());
    let chosen = PICTURES_OUT_OF_TEN.iter().position(|&share| {
        let inside = left < share;
        left = left.saturating_sub(share);
        inside
    });
    1 + chosen.expect("the number is below the sum of the shares")
}

impl Source for Conversations<'_> {
    fn epoch_len(&mut self, epoch: usize) -> usize {
        self.plan(epoch).len()
    }

    fn sample(&mut self, place: Position) -> Result<Sample> {
        let (task, all, varied) = (self.task, self.digits, self.varied);
        let mut rng = epoch_rng(self.seed, place.epoch, Some(place.taken));
        let mut digit = |&index: &usize| if varied { all[index].varied(&mut rng) } else { all[index] };
        let turns = &self.plan(place.epoch)[place.taken];
        let turns: Vec<Vec<Digit>> = turns.iter().map(|turn| turn.iter().map(&mut digit).collect()).collect();
        Ok(task.conversation(&turns))
    }
}

#[cfg(test)]
mod tests {
    use candle_vlm_processor::ImagePatches;

    use super::*;
    use crate::family::Family;
    use crate::small_model;

    fn task() -> Result<DigitTask> {
        let config = small_model::config(Family::Gemma4)?;
        DigitTask::new(config.as_ref(), &tokenizer()?)
    }

    fn tokenizer() -> Result<TextTokenizer> {
        Ok(TextTokenizer::from_json("built in", &small_model::tokenizer_json(Family::Gemma4))?)
    }

    fn text(ids: impl Iterator<Item = u32>) -> Result<String> {
        let tokenizer = tokenizer()?;
        Ok(ids.map(|id| tokenizer.token(id).expect("an id of the vocabulary")).collect())
    }

    fn patches(task: &DigitTask, digit: &Digit) -> Arc<ImagePatches> {
        Arc::new(task.settings.patches_as_is(&digit.picture(8)).expect("8 x 8 fits"))
    }

    #[test]
    fn a_conversation_reads_turn_by_turn_and_repeats_at_the_end() -> Result<()> {
        let task = task()?;
        let digit = |value| *task.digits.train.iter().find(|digit| digit.value == value).expect("all digits are there");
        let sample = task.conversation(&[vec![digit(3), digit(8)], vec![digit(1)]]);
        let image = "<|image><|image|><|image|><|image|><|image|><image|>";
        assert_eq!(
            text(sample.tokens.iter().map(|token| token.id))?,
            format!(
                "<bos><|turn>user\n{image}{image}read<turn|>\n<|turn>model\n38<turn|>\n\
                 <|turn>user\n{image}read<turn|>\n<|turn>model\n1<turn|>\n\
                 <|turn>user\nrepeat<turn|>\n<|turn>model\n381<turn|>\n"
            )
        );
        let learned =
            |part| text(sample.tokens.iter().filter(|token| token.learned == Some(part)).map(|token| token.id));
        assert_eq!(learned(Part::Read)?, "381");
        assert_eq!(learned(Part::Repeat)?, "381");
        assert_eq!(learned(Part::End)?, "<turn|><turn|><turn|>");
        assert_eq!(learned(Part::Text)?, "");
        assert_eq!(sample.pictures, [digit(3), digit(8), digit(1)].map(|digit| patches(&task, &digit)));
        Ok(())
    }

    fn epoch(conversations: &mut Conversations<'_>, epoch: usize) -> Result<Vec<Sample>> {
        let places = (0..conversations.epoch_len(epoch)).map(|taken| Position { epoch, taken });
        places.map(|place| conversations.sample(place)).collect()
    }

    #[test]
    fn equal_seeds_give_equal_conversations_and_no_sample_is_too_long() -> Result<()> {
        let task = task()?;
        let longest = task.longest();
        let samples = epoch(&mut task.training(5), 0)?;
        assert_eq!(samples, epoch(&mut task.training(5), 0)?);
        assert_ne!(samples[..20], epoch(&mut task.training(6), 0)?[..20]);
        assert!(samples.iter().all(|sample| sample.len() <= longest));
        Ok(())
    }

    #[test]
    fn a_place_does_not_depend_on_what_came_before() -> Result<()> {
        let task = task()?;
        let mut unbroken = task.training(5);
        let (first, second) = (epoch(&mut unbroken, 0)?, epoch(&mut unbroken, 1)?);
        assert_ne!(first[..20], second[..20]);
        let mut fresh = task.training(5);
        assert_eq!(fresh.sample(Position { epoch: 1, taken: 7 })?, second[7]);
        assert_eq!(fresh.sample(Position { epoch: 0, taken: 3 })?, first[3]);
        Ok(())
    }

    #[test]
    fn every_digit_is_shown_once_per_epoch() -> Result<()> {
        let task = task()?;
        let sorted = |mut pictures: Vec<Arc<ImagePatches>>| {
            pictures.sort_by(|a, b| a.pixels.partial_cmp(&b.pixels).expect("no pixel is NaN"));
            pictures
        };
        let expected = sorted(task.digits.held_out.iter().map(|digit| patches(&task, digit)).collect());
        let mut held_out = task.held_out(1);
        for number in 0..2 {
            let pictures = epoch(&mut held_out, number)?.into_iter().flat_map(|sample| sample.pictures).collect();
            assert_eq!(sorted(pictures), expected);
        }
        Ok(())
    }

    #[test]
    fn pictures_have_a_size_that_the_model_takes() -> Result<()> {
        for (unit, side) in [(4, 8), (12, 24), (48, 96), (1, 8), (3, 9)] {
            assert_eq!(picture_side(unit), side);
        }
        Ok(())
    }
}
