//! Training data as JSONL: every line is checked before anything is trained.

mod epochs;
mod fields;
mod fingerprint;
mod fit;
mod reader;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use candle_vlm_processor::ImagePatches;

pub use self::epochs::Epochs;
pub use self::fit::Fitted;
use self::fit::listed;
pub(crate) use self::fit::{counted, cut};
use self::reader::Reader;
use crate::encoder::{Encoded, Encoder};
use crate::error::{Error, LineFault, Result, io};
use crate::sample::Sample;

/// All samples of a file. Tokens are kept in memory; pictures are read again whenever their sample comes.
#[derive(Debug)]
pub struct Lines {
    encoder: Encoder,
    path: PathBuf,
    samples: Vec<Line>,
    /// Fields that no line is read for, and the lines that have them.
    unread: BTreeMap<String, usize>,
    fitted: Fitted,
    /// Pictures that some rank still holds, by sample: ranks come to a sample at about the same time, and only the
    /// first one cuts.
    in_use: Mutex<BTreeMap<usize, Vec<Weak<ImagePatches>>>>,
}

/// A sample and its line, from 1.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) number: usize,
    pub(crate) encoded: Encoded,
}

impl Lines {
    /// Reads and checks a file, its pictures included. Samples may be of any length until [`Lines::fit`].
    ///
    /// # Errors
    /// The file cannot be read, has no sample, or has lines that cannot be used; all of those are listed.
    pub fn read(path: &Path, encoder: Encoder) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(io("read", path))?;
        if let Some(reason) = other_format(&bytes) {
            let faults = vec![LineFault { line: 1, reason }];
            return Err(Error::Data { path: path.to_path_buf(), lines: 1, faults });
        }
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let reader = Reader { encoder: &encoder, folder: &folder };
        let (mut samples, mut faults) = (Vec::new(), Vec::new());
        let mut unread = BTreeMap::new();
        for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let number = index + 1;
            match reader.read(line) {
                Ok((encoded, names)) => {
                    samples.push(Line { number, encoded });
                    names.into_iter().for_each(|name| *unread.entry(name).or_default() += 1);
                }
                Err(reason) => faults.push(LineFault { line: number, reason }),
            }
        }
        if !faults.is_empty() {
            return Err(Error::Data { path: path.to_path_buf(), lines: samples.len() + faults.len(), faults });
        }
        match samples.is_empty() {
            true => Err(Error::EmptyData { path: path.to_path_buf() }),
            false => Ok(Self {
                encoder,
                path: path.to_path_buf(),
                samples,
                unread,
                fitted: Fitted::default(),
                in_use: Mutex::default(),
            }),
        }
    }

    /// Leaves samples of more than `seq_len` tokens out, or cuts them with `truncate`: after the last token that fits, or
    /// before the picture that this token belongs to. An answer that is cut loses the token that ends it, and a sample
    /// without a learned token in what is left is left out too.
    ///
    /// # Errors
    /// No sample is left.
    pub fn fit(mut self, seq_len: usize, truncate: bool) -> Result<Self> {
        let (samples, longest) = (self.samples.len(), self.samples.iter().max_by_key(|line| line.encoded.tokens.len()));
        let (line, longest) = longest.map_or((0, 0), |line| (line.number, line.encoded.tokens.len()));
        let mut fitted = Fitted { seq_len, samples, longest, ..Fitted::default() };
        self.samples.retain_mut(|line| fitted.keeps(line, truncate));
        match self.samples.is_empty() {
            true => Err(Error::NothingFits { path: self.path, samples, line, longest, seq_len, truncate }),
            false => Ok(Self { fitted, in_use: Mutex::default(), ..self }),
        }
    }

    /// What [`Lines::fit`] left out or cut.
    pub fn fitted(&self) -> &Fitted {
        &self.fitted
    }

    /// What a user should know: fields that are not read, samples that were left out or cut.
    pub fn notices(&self) -> Vec<String> {
        self.unread().into_iter().chain(self.fitted.notices()).collect()
    }

    /// The fields that are not read, if there are any.
    pub(crate) fn unread(&self) -> Option<String> {
        let name = |(name, &lines): (&String, &usize)| format!("{name:?} ({})", counted(lines, "line"));
        let names: Vec<String> = self.unread.iter().map(name).collect();
        (!names.is_empty()).then(|| format!("fields that are not read: {}", listed(&names)))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The samples in the order of their lines.
    pub(crate) fn lines(&self) -> &[Line] {
        &self.samples
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
        // A rank that failed inside has changed nothing here.
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        let held = in_use.get(&index).and_then(|pictures| pictures.iter().map(Weak::upgrade).collect());
        sample.pictures = match held {
            Some(pictures) => pictures,
            None => self.cut(*number, encoded)?,
        };
        in_use.insert(index, sample.pictures.iter().map(Arc::downgrade).collect());
        Ok(sample)
    }

    /// Reads and cuts the pictures of a sample.
    fn cut(&self, number: usize, encoded: &Encoded) -> Result<Vec<Arc<ImagePatches>>> {
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
                return Err(Error::PictureChanged { path: self.path.clone(), line: number, name });
            }
        }
        Ok(patches.into_iter().map(Arc::new).collect())
    }

    /// What reads the samples.
    pub fn encoder(&self) -> &Encoder {
        &self.encoder
    }

    /// Endless epochs, each in an order of its own.
    pub fn training(&self, seed: u64) -> Epochs<'_> {
        Epochs::new(self, seed)
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
