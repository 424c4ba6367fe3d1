//! Training data as JSONL or Parquet: every line or row is checked before anything is trained.

mod epochs;
mod fields;
mod fingerprint;
mod fit;
mod held_out;
mod places;
mod reader;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use candle_vlm_processor::{ImagePatches, PictureSource};

pub use self::epochs::Epochs;
#[cfg(feature = "parquet")]
pub(crate) use self::fields::{COLUMNS, KNOWN, has_a_sample, json};
pub use self::fit::Fitted;
use self::fit::listed;
pub(crate) use self::fit::{counted, cut};
pub use self::held_out::{HeldOut, InOrder};
use self::places::Places;
use self::reader::Reader;
use crate::encoder::{Encoded, Encoder, Fault, Stored};
use crate::error::{Error, Result, Unit, io};
use crate::parquet::{self, Table};
use crate::sample::Sample;

/// All samples of one or several files. Tokens are kept in memory; pictures are read again whenever their sample comes:
/// from their own files, or from their cells of a Parquet file. For a cell the pages of its one column and row group are
/// walked up to its row: skipped unread where the file tells how many rows they have (a column without lists, version 2
/// pages, or a page index), else unpacked, which small row groups keep short.
#[derive(Debug)]
pub struct Lines {
    encoder: Arc<Encoder>,
    places: Arc<Places>,
    /// Of each file that is one.
    tables: Arc<Vec<Option<Table>>>,
    samples: Vec<Line>,
    /// Fields that no line is read for, and the lines that have them.
    unread: BTreeMap<String, usize>,
    fitted: Fitted,
    /// Pictures that some rank still holds, by sample: ranks come to a sample at about the same time, and only the
    /// first one cuts.
    in_use: Mutex<BTreeMap<usize, Vec<Weak<ImagePatches>>>>,
}

/// A sample and its line or row, from 1, counted through all files.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) number: usize,
    pub(crate) encoded: Encoded,
}

/// What is found while files are read.
struct Found<'a> {
    encoder: &'a Encoder,
    places: Places,
    tables: Vec<Option<Table>>,
    samples: Vec<Line>,
    /// Line or row, and what is wrong with it.
    faults: Vec<(usize, String)>,
    unread: BTreeMap<String, usize>,
    /// Lines and rows so far.
    end: usize,
}

impl Lines {
    /// Reads and checks a file, its pictures included. Its content tells whether it is JSONL or Parquet. Samples may be of
    /// any length until [`Lines::fit`].
    ///
    /// # Errors
    /// The file cannot be read, has no sample, or has lines that cannot be used; all of those are listed.
    pub fn read(path: &Path, encoder: impl Into<Arc<Encoder>>) -> Result<Self> {
        Self::read_all(&[path], encoder)
    }

    /// Reads and checks several files as one data set, in this order. Relative paths of pictures count from the folder of
    /// the file that names them.
    ///
    /// # Errors
    /// As [`Lines::read`]; the faults of all files are listed together.
    pub fn read_all(paths: &[impl AsRef<Path>], encoder: impl Into<Arc<Encoder>>) -> Result<Self> {
        let encoder = encoder.into();
        let mut found = Found {
            encoder: &encoder,
            places: Places::default(),
            tables: Vec::new(),
            samples: Vec::new(),
            faults: Vec::new(),
            unread: BTreeMap::new(),
            end: 0,
        };
        // Tables are opened first: one that cannot be read is told before the others are checked at length.
        let open = |path: &Path| match parquet::is_parquet(path).map_err(io("read", path))? {
            true => Table::open(path).map(Some),
            false => Ok(None),
        };
        let tables: Vec<_> = paths.iter().map(|path| open(path.as_ref())).collect::<Result<_>>()?;
        for (path, table) in paths.iter().zip(tables) {
            found.file(path.as_ref(), table)?;
        }
        let Found { places, tables, samples, faults, unread, .. } = found;
        let path = places.whole().to_path_buf();
        if !faults.is_empty() {
            let faults: Vec<_> = faults.into_iter().map(|(number, reason)| places.fault(number, reason)).collect();
            return Err(Error::Data { path, unit: places.unit(), lines: samples.len() + faults.len(), faults });
        }
        if samples.is_empty() {
            return Err(Error::EmptyData { path });
        }
        let places = Arc::new(places);
        let fitted = Fitted { places: places.clone(), ..Fitted::default() };
        Ok(Self { encoder, places, tables: Arc::new(tables), samples, unread, fitted, in_use: Mutex::default() })
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
        let mut fitted = Fitted { seq_len, samples, longest, places: self.places.clone(), ..Fitted::default() };
        self.samples.retain_mut(|line| fitted.keeps(line, truncate));
        if self.samples.is_empty() {
            let (path, place) = (self.path().to_path_buf(), self.places.short(line));
            return Err(Error::NothingFits { path, samples, place, longest, seq_len, truncate });
        }
        Ok(Self { fitted, in_use: Mutex::default(), ..self })
    }

    /// Parts the samples into those to train on and those held out for validation, both in the order of their lines. The
    /// same seed holds the same samples out. Nothing is read again; both parts share encoder and files.
    ///
    /// # Errors
    /// One of the parts would be empty.
    pub fn split(mut self, held_out: HeldOut, seed: u64) -> Result<(Self, Self)> {
        let mut is_held_out = held_out.choose(self.samples.len(), seed)?.into_iter();
        let mut samples = Vec::new();
        let mut keeps = |line: &mut Line| {
            let leaves = is_held_out.next() == Some(true);
            if leaves {
                samples.push(Line { number: line.number, encoded: std::mem::take(&mut line.encoded) });
            }
            !leaves
        };
        self.samples.retain_mut(&mut keeps);
        let held_out = Self {
            encoder: self.encoder.clone(),
            places: self.places.clone(),
            tables: self.tables.clone(),
            fitted: Fitted { seq_len: self.fitted.seq_len, places: self.places.clone(), ..Fitted::default() },
            unread: BTreeMap::new(),
            samples,
            in_use: Mutex::default(),
        };
        Ok((Self { in_use: Mutex::default(), ..self }, held_out))
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
        let unit = self.places.unit().to_string();
        let name = |(name, &lines): (&String, &usize)| format!("{name:?} ({})", counted(lines, &unit));
        let names: Vec<String> = self.unread.iter().map(name).collect();
        (!names.is_empty()).then(|| format!("fields that are not read: {}", listed(&names)))
    }

    /// The file, or the folder of several.
    pub fn path(&self) -> &Path {
        self.places.whole()
    }

    /// All files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.places.paths()
    }

    /// Where a sample stands: `line 7`, `row 7`, and with the file if there are several.
    pub(crate) fn place(&self, line: &Line) -> String {
        self.places.short(line.number)
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
        let (file, _) = self.places.find(number);
        let folder = self.places.path(file).parent().unwrap_or(Path::new(""));
        let named =
            |cause| candle_vlm_processor::Error::Sample { sample: self.places.full(number), cause: Box::new(cause) };
        let sources: Vec<PictureSource> =
            encoded.pictures.iter().map(|picture| self.source(file, number, picture)).collect::<Result<_>>()?;
        let patches = self.encoder.processor().map_err(unusable)?.patches(&sources, folder).map_err(named)?;
        for (at, (patches, &soft_tokens)) in patches.iter().zip(&encoded.soft_tokens).enumerate() {
            if patches.soft_tokens != soft_tokens {
                let (place, name) = (self.places.full(number), encoded.pictures[at].name());
                return Err(Error::PictureChanged { place, name });
            }
        }
        Ok(patches.into_iter().map(Arc::new).collect())
    }

    /// A picture as the processor takes it.
    fn source(&self, file: usize, number: usize, picture: &Stored) -> Result<PictureSource> {
        match (picture, &self.tables[file]) {
            (Stored::Source(source), _) => Ok(source.clone()),
            (Stored::Cell(cell), Some(table)) => {
                let failed = |reason| Error::Parquet {
                    path: self.places.path(file).to_path_buf(),
                    reason: format!("{}, {}: {reason}", self.places.short(number), cell.name),
                };
                Ok(PictureSource::Bytes(cell.name.clone(), table.cell(cell).map_err(failed)?.into()))
            }
            (Stored::Cell(_), None) => unreachable!("only rows of tables have cells"),
        }
    }

    /// What reads the samples.
    pub fn encoder(&self) -> &Arc<Encoder> {
        &self.encoder
    }

    /// Endless epochs, each in an order of its own.
    pub fn training(&self, seed: u64) -> Epochs<'_> {
        Epochs::new(self, seed)
    }

    /// Each sample once per pass, in the order of their lines.
    pub fn in_order(&self) -> InOrder<'_> {
        InOrder::new(self)
    }
}

impl Found<'_> {
    fn file(&mut self, path: &Path, table: Option<Table>) -> Result<()> {
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let reader = Reader { encoder: self.encoder, folder: &folder };
        let unit = if table.is_some() { Unit::Row } else { Unit::Line };
        self.places.push(path, unit, self.end);
        match &table {
            Some(table) => {
                let start = self.end;
                table.read(&mut |number, row| {
                    self.end = start + number;
                    self.add(row.and_then(|row| reader.row(row)));
                })?;
                self.end = start + table.rows();
            }
            None => self.lines(&std::fs::read(path).map_err(io("read", path))?, &reader),
        }
        self.tables.push(table);
        Ok(())
    }

    fn lines(&mut self, bytes: &[u8], reader: &Reader) {
        if let Some(reason) = other_format(bytes) {
            self.end += 1;
            return self.add(Err(reason));
        }
        for line in bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes).split(|&byte| byte == b'\n') {
            self.end += 1;
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if !line.iter().all(u8::is_ascii_whitespace) {
                self.add(reader.line(line));
            }
        }
    }

    /// What the line or row of the number `end` has become: a sample and the fields that are not read of it, or a fault.
    fn add(&mut self, read: Fault<(Encoded, Vec<String>)>) {
        match read {
            Ok((encoded, names)) => {
                self.samples.push(Line { number: self.end, encoded });
                names.into_iter().for_each(|name| *self.unread.entry(name).or_default() += 1);
            }
            Err(reason) => self.faults.push((self.end, reason)),
        }
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
