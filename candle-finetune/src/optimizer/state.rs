//! Optimizer state as one safetensors file: `steps`, and `mean.<parameter>`, `square.<parameter>` and, for parameters in
//! a narrow type, `master.<parameter>`.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, Var};
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensorError, View};

use super::{AdamW, AdamWConfig, Moments, Slot, needs_master, state_dtype};
use crate::buckets::Owned;
use crate::error::{Error, Result, io};

/// Steps taken, one i64.
const STEPS: &str = "steps";
pub(super) const MEAN: &str = "mean.";
pub(super) const SQUARE: &str = "square.";
pub(super) const MASTER: &str = "master.";

/// Bytes before the header: its length.
const LENGTH_FIELD: u64 = size_of::<u64>() as u64;
/// Tensors that a message names; the rest is counted.
const SHOWN: usize = 3;

/// Why a file is not the state of this optimizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateFault {
    /// The header cannot be read, or holds numbers that cannot be.
    #[error("not a usable safetensors file ({reason}); copy it again, or resume from an earlier checkpoint")]
    Broken {
        /// What is wrong.
        reason: String,
    },

    /// The file is shorter or longer than its header says.
    #[error("it is {} ({expected} bytes expected by its header, {found} found); copy it again, or resume from an earlier \
        checkpoint", if found < expected { "cut short" } else { "too long" })]
    Length {
        /// Bytes of the length field, the header and all tensors.
        expected: u64,
        /// Bytes found.
        found: u64,
    },

    /// The file is whole, and was written for other parameters.
    #[error(
        "it was written for other trained parameters or weights of another type: {}; resume with the settings of \
        that run, or start a new one from the checkpoint's folder with --model",
        differences(missing, unexpected, wrong)
    )]
    Tensors {
        /// Tensors that the file lacks.
        missing: Vec<String>,
        /// Tensors that nothing is known of.
        unexpected: Vec<String>,
        /// Tensors of another type or shape, with what was found and what is needed.
        wrong: Vec<String>,
    },
}

fn differences(missing: &[String], unexpected: &[String], wrong: &[String]) -> String {
    let group = |what: &str, names: &[String]| {
        let more = if names.len() > SHOWN { ", .." } else { "" };
        let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
        (!names.is_empty()).then(|| format!("{} {what} ({shown}{more})", names.len()))
    };
    let groups = [group("missing", missing), group("unexpected", unexpected), group("of another type or shape", wrong)];
    groups.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

impl Moments {
    /// What is kept, each with what its names in a file begin with.
    pub(super) fn kinds(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let master = self.master.as_ref().map(|master| (MASTER, master));
        [(MEAN, &self.mean), (SQUARE, &self.square)].into_iter().chain(master)
    }
}

impl AdamW {
    /// Writes the state, tensor by tensor: no second copy of it is made. The bits come back with [`AdamW::load`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let here = |name: &str, tensor: &Tensor| {
            let made = tensor.clone();
            (name.to_string(), Entry::new(tensor.dtype(), tensor.dims(), move || Ok(made.clone())))
        };
        let kept =
            self.slots.iter().flat_map(|(name, slot)| slot.moments.kinds().map(move |(kind, x)| (kind, name, x)));
        let mut entries: BTreeMap<String, Entry> =
            kept.map(|(kind, name, tensor)| here(&format!("{kind}{name}"), tensor)).collect();
        entries.extend([self.steps_entry()?]);
        write(path, &entries)
    }

    pub(super) fn steps_entry<'a>(&self) -> Result<(String, Entry<'a>)> {
        let steps = Tensor::new(self.steps as i64, &Device::Cpu)?;
        Ok((STEPS.to_string(), Entry::new(DType::I64, &[], move || Ok(steps.clone()))))
    }

    /// The optimizer that wrote a file with [`AdamW::save`], for the same variables. Their values are the caller's to
    /// restore; only masters of variables in a narrow type come from the file.
    ///
    /// # Errors
    /// The file cannot be read, or is not the state for these variables: names, types and shapes all have to agree.
    pub fn load(variables: &BTreeMap<String, Var>, config: AdamWConfig, path: &Path) -> Result<Self> {
        Self::read(variables, config, path, variables.keys().map(|name| (name, None)))
    }

    /// The same for some elements only.
    ///
    /// # Errors
    /// As [`AdamW::load`].
    pub(crate) fn load_own(
        variables: &BTreeMap<String, Var>,
        owned: &Owned,
        config: AdamWConfig,
        path: &Path,
    ) -> Result<Self> {
        Self::read(variables, config, path, owned.iter().map(|(name, range)| (name, Some(range.clone()))))
    }

    fn read<'a>(
        variables: &BTreeMap<String, Var>,
        config: AdamWConfig,
        path: &Path,
        wanted: impl Iterator<Item = (&'a String, Option<Range<usize>>)>,
    ) -> Result<Self> {
        let mut file = StateFile::open(path)?;
        file.check(&expected(variables))?;
        let steps = file.read(STEPS, None, &Device::Cpu)?.to_scalar::<i64>()?;
        let impossible = |_| file.fault(StateFault::Broken { reason: format!("{steps} steps") });
        // No run takes more, and the step after them still has a number of its own.
        let steps = u32::try_from(steps).map_err(impossible)? as usize;
        let mut slots = BTreeMap::new();
        for (name, range) in wanted {
            let var = variables[name].clone();
            let mut read = |prefix: &str| file.read(&format!("{prefix}{name}"), range.as_ref(), var.device());
            let (mean, square) = (read(MEAN)?, read(SQUARE)?);
            let master = needs_master(&var).then(|| read(MASTER)).transpose()?;
            slots.insert(name.clone(), Slot { var, range, moments: Moments { master, mean, square } });
        }
        Ok(Self { config, slots, steps })
    }
}

/// Type and shape of every tensor of the state.
pub(super) fn expected(variables: &BTreeMap<String, Var>) -> BTreeMap<String, (Dtype, Vec<usize>)> {
    let mut expected = BTreeMap::from([(STEPS.to_string(), (Dtype::I64, Vec::new()))]);
    for (name, var) in variables {
        for prefix in [MEAN, SQUARE, MASTER] {
            if prefix != MASTER || needs_master(var) {
                expected.insert(format!("{prefix}{name}"), (state_dtype(var.dtype()).into(), var.dims().to_vec()));
            }
        }
    }
    expected
}

/// One tensor on its way into a file; made when its turn comes.
pub(super) struct Entry<'a> {
    dtype: DType,
    dims: Vec<usize>,
    make: Box<dyn Fn() -> Result<Tensor> + 'a>,
}

impl<'a> Entry<'a> {
    pub(super) fn new(dtype: DType, dims: &[usize], make: impl Fn() -> Result<Tensor> + 'a) -> Self {
        Self { dtype, dims: dims.to_vec(), make: Box::new(make) }
    }
}

pub(super) fn write(path: &Path, entries: &BTreeMap<String, Entry>) -> Result<()> {
    let failure = RefCell::new(None);
    let views = entries.iter().map(|(name, entry)| (name, EntryView { entry, failure: &failure }));
    // Other tools refuse files that do not name the library whose layout they have.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    // The library leaves files that only their owner may read; a file made here has the usual permissions.
    let permissions = File::create(path).and_then(|file| file.metadata()).map_err(io("write", path))?.permissions();
    let written = safetensors::serialize_to_file(views, Some(metadata), path).map_err(|error| match error {
        SafeTensorError::IoError(cause) => cause,
        other => io::Error::other(other),
    });
    match failure.into_inner() {
        Some(error) => Err(error),
        None => written.and_then(|()| fs::set_permissions(path, permissions)).map_err(io("write", path)),
    }
}

/// The format's writer takes no errors from a tensor, so the first one is kept.
struct EntryView<'a> {
    entry: &'a Entry<'a>,
    failure: &'a RefCell<Option<Error>>,
}

impl View for EntryView<'_> {
    fn dtype(&self) -> Dtype {
        self.entry.dtype.into()
    }

    fn shape(&self) -> &[usize] {
        &self.entry.dims
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let made = match self.failure.borrow().is_some() {
            // What comes behind a failure is not used.
            true => None,
            false => Some((self.entry.make)().and_then(|tensor| Ok(tensor.to_device(&Device::Cpu)?))),
        };
        match made {
            Some(Ok(tensor)) => return Cow::Owned(View::data(&tensor).into_owned()),
            Some(Err(error)) => *self.failure.borrow_mut() = Some(error),
            None => {}
        }
        Cow::Owned(vec![0; self.data_len()])
    }

    fn data_len(&self) -> usize {
        self.entry.dims.iter().product::<usize>() * self.entry.dtype.size_in_bytes()
    }
}

/// An open file whose length has been checked against its header.
struct StateFile {
    path: PathBuf,
    file: File,
    header: Metadata,
    /// Where the tensors' bytes start.
    data_start: u64,
}

impl StateFile {
    fn open(path: &Path) -> Result<Self> {
        let failed = |fault| Error::OptimizerState { path: path.to_path_buf(), fault };
        let mut file = File::open(path).map_err(io("read", path))?;
        let found = file.metadata().map_err(io("read", path))?.len();
        let mut length = [0; LENGTH_FIELD as usize];
        if found < LENGTH_FIELD {
            return Err(failed(StateFault::Length { expected: LENGTH_FIELD, found }));
        }
        file.read_exact(&mut length).map_err(io("read", path))?;
        // A file of another format may begin with any number.
        let data_start = LENGTH_FIELD.saturating_add(u64::from_le_bytes(length));
        if found < data_start {
            return Err(failed(StateFault::Length { expected: data_start, found }));
        }
        let mut header = vec![0; (data_start - LENGTH_FIELD) as usize];
        file.read_exact(&mut header).map_err(io("read", path))?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| failed(StateFault::Broken { reason: format!("its header: {error}") }))?;
        let expected = data_start + header.data_len() as u64;
        match found == expected {
            true => Ok(Self { path: path.to_path_buf(), file, header, data_start }),
            false => Err(failed(StateFault::Length { expected, found })),
        }
    }

    fn fault(&self, fault: StateFault) -> Error {
        Error::OptimizerState { path: self.path.clone(), fault }
    }

    fn check(&self, expected: &BTreeMap<String, (Dtype, Vec<usize>)>) -> Result<()> {
        let found: BTreeMap<String, _> = self.header.tensors().into_iter().collect();
        let absent = |name: &&String| !found.contains_key(*name);
        let missing: Vec<String> = expected.keys().filter(absent).cloned().collect();
        let unexpected: Vec<String> = found.keys().filter(|name| !expected.contains_key(*name)).cloned().collect();
        let mut wrong = Vec::new();
        for (name, (dtype, shape)) in expected {
            if let Some(info) = found.get(name).filter(|info| (&info.dtype, &info.shape) != (dtype, shape)) {
                wrong.push(format!("{name} is {} {:?}, needed is {dtype} {shape:?}", info.dtype, info.shape));
            }
        }
        match missing.is_empty() && unexpected.is_empty() && wrong.is_empty() {
            true => Ok(()),
            false => Err(self.fault(StateFault::Tensors { missing, unexpected, wrong })),
        }
    }

    /// Reads one tensor, whose name and type have been checked.
    /// A tensor with its shape, or some of its elements in one dimension.
    fn read(&mut self, name: &str, elements: Option<&Range<usize>>, device: &Device) -> Result<Tensor> {
        let info = self.header.info(name).expect("names were checked");
        let dtype = DType::try_from(info.dtype)?;
        let (mut start, mut end) = info.data_offsets;
        let mut shape = info.shape.clone();
        if let Some(elements) = elements {
            let first = start;
            (start, end) =
                (first + elements.start * dtype.size_in_bytes(), first + elements.end * dtype.size_in_bytes());
            shape = vec![elements.len()];
        }
        let mut bytes = vec![0; end - start];
        let sought = self.file.seek(SeekFrom::Start(self.data_start + start as u64));
        sought.and_then(|_| self.file.read_exact(&mut bytes)).map_err(io("read", &self.path))?;
        Ok(Tensor::from_raw_buffer(&bytes, dtype, &shape, device)?)
    }
}
