//! Training data as JSONL: every line is checked before anything is trained.

mod fields;
mod reader;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use self::reader::Reader;
use crate::encoder::{Encoded, Encoder};
use crate::error::{Error, LineFault, Result, io};
use crate::sample::{Sample, Source};

/// All samples of a file. Tokens are kept in memory; pictures are read again whenever their sample comes.
#[derive(Debug)]
pub struct Lines {
    encoder: Encoder,
    path: PathBuf,
    samples: Vec<Line>,
}

/// A sample and its line, from 1.
#[derive(Debug)]
struct Line {
    number: usize,
    encoded: Encoded,
}

impl Lines {
    /// Reads and checks a file, its pictures included. Samples of more than `seq_len` tokens are faults.
    ///
    /// # Errors
    /// The file cannot be read, has no sample, or has lines that cannot be used; all of those are listed.
    pub fn load(path: &Path, encoder: Encoder, seq_len: usize) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(io("read", path))?;
        if let Some(reason) = other_format(&bytes) {
            let faults = vec![LineFault { line: 1, reason }];
            return Err(Error::Data { path: path.to_path_buf(), lines: 1, faults });
        }
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let reader = Reader { encoder: &encoder, folder: &folder, seq_len };
        let (mut samples, mut faults) = (Vec::new(), Vec::new());
        for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let number = index + 1;
            match reader.read(line) {
                Ok(encoded) => samples.push(Line { number, encoded }),
                Err(reason) => faults.push(LineFault { line: number, reason }),
            }
        }
        if !faults.is_empty() {
            return Err(Error::Data { path: path.to_path_buf(), lines: samples.len() + faults.len(), faults });
        }
        match samples.is_empty() {
            true => Err(Error::EmptyData { path: path.to_path_buf() }),
            false => Ok(Self { encoder, path: path.to_path_buf(), samples }),
        }
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there is no sample; a file without any does not load.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// A sample, in the order of their lines, its pictures read and cut.
    ///
    /// # Errors
    /// A picture cannot be read any more, or has changed since it was checked.
    ///
    /// # Panics
    /// There is no such sample.
    pub fn sample(&self, index: usize) -> Result<Sample> {
        let Line { number, encoded } = &self.samples[index];
        let mut sample = Sample { tokens: encoded.tokens.clone(), pictures: Vec::new() };
        if encoded.pictures.is_empty() {
            return Ok(sample);
        }
        let unusable = |reason| Error::Task { task: "pictures", reason };
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let named = |cause| candle_vlm_processor::Error::Sample {
            sample: format!("{} line {number}", self.path.display()),
            cause: Box::new(cause),
        };
        let patches = self.encoder.processor().map_err(unusable)?.patches(&encoded.pictures, folder).map_err(named)?;
        for (at, (patches, &soft_tokens)) in patches.iter().zip(&encoded.soft_tokens).enumerate() {
            if patches.soft_tokens != soft_tokens {
                let name = encoded.pictures[at].name();
                return Err(Error::PictureChanged { path: self.path.clone(), line: *number, name });
            }
        }
        sample.pictures = patches.into_iter().map(Arc::new).collect();
        Ok(sample)
    }

    /// What reads the samples.
    pub fn encoder(&self) -> &Encoder {
        &self.encoder
    }

    /// Endless epochs, each in an order of its own.
    pub fn training(&self, seed: u64) -> Epochs<'_> {
        Epochs { lines: self, order: Vec::new(), started: false, rng: StdRng::seed_from_u64(seed) }
    }
}

/// Why a file as a whole is no UTF-8 text, told by its first bytes.
fn other_format(bytes: &[u8]) -> Option<String> {
    let found = match bytes {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "UTF-16 text",
        [b'{', 0, ..] | [0, b'{', ..] => "UTF-16 text without a byte order mark",
        [0x1f, 0x8b, ..] => "a gzip archive; unpack it",
        _ => return None,
    };
    Some(format!("not UTF-8 at byte offset 0 of the line: the file starts as {found}; save it as UTF-8"))
}

/// A stream of samples: each one once per epoch.
#[derive(Debug, Clone)]
pub struct Epochs<'a> {
    lines: &'a Lines,
    /// What is left of this epoch, taken from the end.
    order: Vec<usize>,
    started: bool,
    rng: StdRng,
}

impl Source for Epochs<'_> {
    fn next_sample(&mut self) -> Result<Option<Sample>> {
        if !self.started {
            self.order = (0..self.lines.len()).collect();
            self.order.shuffle(&mut self.rng);
            self.started = true;
        }
        let next = self.order.pop();
        self.started = next.is_some();
        next.map(|index| self.lines.sample(index)).transpose()
    }
}
