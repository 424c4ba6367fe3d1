//! 1,797 handwritten digits, embedded. See `data/README.md` for authors and licence (CC BY 4.0).

use std::io::Read;

use flate2::read::GzDecoder;
use candle_vlm_processor::Picture;
use rand::Rng;

use crate::error::{Error, Result};

/// Side of an image, in pixels.
pub const SIDE: usize = 8;
/// The brightest grey level.
const MAX_LEVEL: u8 = 16;
/// Every sixth image is held out: the 13 writers follow each other in the table, so that each is on both sides.
const HELD_OUT_EVERY: usize = 6;

const TABLE: &[u8] = include_bytes!("../data/digits.csv.gz");

/// Most pixels that [`Digit::varied`] moves an image.
const MAX_SHIFT: f32 = 0.25;
/// Largest share by which it stretches and slants an image.
const MAX_STRETCH: f32 = 0.1;
/// Most grey levels that it adds to or takes from a pixel.
const MAX_NOISE: f32 = 1.6;

/// One image and what it shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digit {
    /// Grey levels from 0 (paper) to 16 (ink), row by row, 8 x 8.
    pub levels: [u8; SIDE * SIDE],
    /// 0 to 9.
    pub value: u8,
}

impl Digit {
    /// The image in grey tones, enlarged to `side` x `side` pixels with linear interpolation.
    ///
    /// # Panics
    /// `side` is 0.
    pub fn picture(&self, side: usize) -> Picture {
        let at = |x: usize, y: usize| f32::from(self.levels[y * SIDE + x]);
        // Where the middle of a pixel lies in the small image: the two pixels around it and the share of the second.
        let place = |pixel: usize| {
            let middle = (pixel as f32 + 0.5) * SIDE as f32 / side as f32 - 0.5;
            let middle = middle.clamp(0.0, (SIDE - 1) as f32);
            let low = middle as usize;
            (low, (low + 1).min(SIDE - 1), middle - low as f32)
        };
        let mut rgb = Vec::with_capacity(3 * side * side);
        for y in 0..side {
            let (top, bottom, down) = place(y);
            for x in 0..side {
                let (left, right, across) = place(x);
                let mix = |y: usize| at(left, y) * (1.0 - across) + at(right, y) * across;
                let level = mix(top) * (1.0 - down) + mix(bottom) * down;
                rgb.extend([(level * 255.0 / f32::from(MAX_LEVEL)).round() as u8; 3]);
            }
        }
        Picture::from_rgb(side, side, rgb).expect("three samples per pixel")
    }

    /// The same digit as it might have been written another time: moved, stretched and slanted by less than a pixel,
    /// with a little noise.
    pub fn varied(&self, rng: &mut impl Rng) -> Self {
        let mut up_to = |most: f32| rng.random_range(-most..=most);
        let (right, down) = (up_to(MAX_SHIFT), up_to(MAX_SHIFT));
        let (stretch, slant) = (1.0 + up_to(MAX_STRETCH), up_to(MAX_STRETCH));
        let middle = (SIDE - 1) as f32 / 2.0;
        let mut levels = self.levels;
        for (place, level) in levels.iter_mut().enumerate() {
            let (x, y) = ((place % SIDE) as f32 - middle, (place / SIDE) as f32 - middle);
            let (from_x, from_y) = (middle + right + stretch * x + slant * y, middle + down + stretch * y);
            let value = self.level_at(from_x, from_y) + up_to(MAX_NOISE);
            *level = value.round().clamp(0.0, f32::from(MAX_LEVEL)) as u8;
        }
        Self { levels, value: self.value }
    }

    /// Grey level between the pixels; 0 outside.
    fn level_at(&self, x: f32, y: f32) -> f32 {
        let pixel = |x: f32, y: f32| {
            let inside = |at: f32| (0.0..SIDE as f32).contains(&at);
            if inside(x) && inside(y) { f32::from(self.levels[y as usize * SIDE + x as usize]) } else { 0.0 }
        };
        let (left, top) = (x.floor(), y.floor());
        let row = |y: f32| pixel(left, y) * (1.0 - (x - left)) + pixel(left + 1.0, y) * (x - left);
        row(top) * (1.0 - (y - top)) + row(top + 1.0) * (y - top)
    }
}

/// The digits, split into those that are trained on and those that are not.
#[derive(Debug, Clone)]
pub struct Digits {
    /// 1,498 digits to train on.
    pub train: Vec<Digit>,
    /// 299 other images, by the same writers.
    pub held_out: Vec<Digit>,
}

impl Digits {
    /// Unpacks the embedded table. The split never changes.
    ///
    /// # Errors
    /// The table is damaged.
    pub fn load() -> Result<Self> {
        let mut text = String::new();
        let unpacked = GzDecoder::new(TABLE).read_to_string(&mut text);
        unpacked.map_err(|e| Error::Digits { line: 0, reason: e.to_string() })?;
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for (index, digit) in parse(&text)?.into_iter().enumerate() {
            match index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 {
                true => held_out.push(digit),
                false => train.push(digit),
            }
        }
        Ok(Self { train, held_out })
    }
}

fn parse(text: &str) -> Result<Vec<Digit>> {
    let lines = text.lines().enumerate();
    lines.map(|(index, line)| parse_line(line).map_err(|reason| Error::Digits { line: index + 1, reason })).collect()
}

fn parse_line(line: &str) -> std::result::Result<Digit, String> {
    let numbers = line.split(',').map(|field| field.trim().parse::<u8>().map_err(|e| format!("{field:?}: {e}")));
    let numbers = numbers.collect::<std::result::Result<Vec<u8>, String>>()?;
    let (value, levels) = numbers.split_last().ok_or("an empty line")?;
    let levels: [u8; SIDE * SIDE] =
        levels.try_into().map_err(|_| format!("{} numbers, {} needed", numbers.len(), SIDE * SIDE + 1))?;
    match levels.iter().find(|&&level| level > MAX_LEVEL) {
        Some(level) => Err(format!("grey level {level}, at most {MAX_LEVEL} is allowed")),
        None if *value > 9 => Err(format!("digit {value}, at most 9 is allowed")),
        None => Ok(Digit { levels, value: *value }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    #[test]
    fn the_table_has_all_digits_on_both_sides() -> Result<()> {
        let digits = Digits::load()?;
        assert_eq!((digits.train.len(), digits.held_out.len()), (1498, 299));
        assert_eq!(digits.train[..5].iter().map(|d| d.value).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        assert_eq!(digits.held_out[0].value, 5);
        for value in 0..10 {
            let count = digits.held_out.iter().filter(|digit| digit.value == value).count();
            assert!((20..=40).contains(&count), "{count} images of {value} are held out");
        }
        assert!(digits.held_out.iter().all(|digit| !digits.train.contains(digit)), "an image is on both sides");
        Ok(())
    }

    #[test]
    fn bad_lines_are_named() {
        let line = |numbers: &[u8]| numbers.iter().map(u8::to_string).collect::<Vec<_>>().join(",");
        let good = line(&[1; 65]);
        let mut too_bright = [0; 65];
        too_bright[7] = 17;
        let mut no_digit = [0; 65];
        no_digit[64] = 10;
        for (bad, reason) in [
            (line(&[1; 64]), "64 numbers, 65 needed"),
            (line(&too_bright), "grey level 17"),
            (line(&no_digit), "digit 10"),
            ("x,1".to_string(), "\"x\": invalid digit"),
            (String::new(), "\"\": cannot parse"),
        ] {
            let error = parse(&format!("{good}\n{bad}\n")).unwrap_err().to_string();
            assert!(error.starts_with("digits, line 2: ") && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn variants_stay_close_and_levels_stay_in_range() -> Result<()> {
        let digits = Digits::load()?;
        let mut rng = StdRng::seed_from_u64(1);
        for digit in &digits.train[..100] {
            let varied = digit.varied(&mut rng);
            assert_eq!(varied.value, digit.value);
            assert_ne!(varied.levels, digit.levels);
            assert!(varied.levels.iter().all(|&level| level <= MAX_LEVEL));
            let moved = varied.levels.iter().zip(&digit.levels).map(|(a, b)| f32::from(a.abs_diff(*b)));
            let mean = moved.sum::<f32>() / 64.0;
            assert!(mean < 4.0, "a pixel moves by {mean} levels of 16 on average");
        }
        Ok(())
    }

    #[test]
    fn levels_between_pixels_are_mixed() {
        let mut digit = Digit { levels: [0; 64], value: 0 };
        (digit.levels[0], digit.levels[1], digit.levels[8]) = (16, 8, 4);
        assert_eq!(digit.level_at(0.0, 0.0), 16.0);
        assert_eq!(digit.level_at(0.5, 0.0), 12.0);
        assert_eq!(digit.level_at(0.0, 0.25), 13.0);
        assert_eq!(digit.level_at(-0.5, 0.0), 8.0);
        assert_eq!(digit.level_at(7.9, 9.0), 0.0);
    }

    #[test]
    fn pictures_keep_levels_and_grow_smoothly() {
        let mut digit = Digit { levels: [0; 64], value: 0 };
        digit.levels[..8].copy_from_slice(&[0, 16, 0, 16, 8, 8, 8, 8]);
        let small = digit.picture(8);
        assert_eq!(small.rgb_hwc()[..15], [0, 0, 0, 255, 255, 255, 0, 0, 0, 255, 255, 255, 128, 128, 128]);
        let large = digit.picture(16);
        assert_eq!((large.width(), large.height(), large.rgb_hwc().len()), (16, 16, 3 * 256));
        let first_row: Vec<u8> = large.rgb_hwc()[..3 * 16].iter().step_by(3).copied().collect();
        assert_eq!(first_row[..4], [0, 64, 191, 191]);
        assert_eq!(first_row[12..], [128; 4]);
    }
}
