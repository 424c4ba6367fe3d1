//! A model's tensors under their names in a checkpoint.

mod config_text;
mod file;
mod files;
mod freeze;
mod lora;
mod mismatch;
mod options;
mod part;
mod pieces;
mod save;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};

pub use self::file::FileFault;
use self::files::WeightFiles;
use self::lora::Attached;
pub use self::mismatch::{Mismatch, OtherPrefix, WrongShape};
pub use self::options::{LoadOptions, Notice, SaveOptions};
pub use self::part::Part;
use self::pieces::Piece;
use self::save::{Content, Contents};
use crate::error::{Error, Result};
use crate::lora::{DropoutStep, LoraError};
use crate::random;
use crate::spec::{CONFIG_FILE, ModelConfig, Role, TensorSpec};

/// The tensors of one model. Those that the model reads have one type and live on one device.
///
/// The maps iterate in name order, which is also the order in which gradients are summed over ranks.
///
/// Tensors that training does not change are saved as they were loaded, in bytes and type. For that the files they
/// came from stay mapped, not in memory; they must not be changed in place (replacing or removing them is fine).
#[derive(Debug, Clone)]
pub struct Weights {
    variables: BTreeMap<String, Var>,
    buffers: BTreeMap<String, Tensor>,
    frozen: BTreeMap<String, Tensor>,
    kept: Option<Arc<Kept>>,
    notices: Vec<Notice>,
    lora: Option<Arc<Attached>>,
    dropout: Option<DropoutStep>,
}

/// Tensors that are written back from the files they came from.
#[derive(Debug)]
struct Kept {
    files: WeightFiles,
    tensors: Vec<KeptTensor>,
}

/// One of them, as a model has it and as the files have it.
#[derive(Debug)]
struct KeptTensor {
    name: String,
    shape: Vec<usize>,
    pieces: Vec<String>,
}

impl Weights {
    /// Loads with the default [`LoadOptions`]; see [`Weights::load_with`].
    ///
    /// # Errors
    /// As [`Weights::load_with`].
    pub fn load(dir: &Path, config: &dyn ModelConfig, dtype: DType, device: &Device) -> Result<Self> {
        Self::load_with(dir, config, dtype, device, &LoadOptions::default())
    }

    /// Loads the files that `model.safetensors.index.json` lists, or `model.safetensors` if there is no index, and
    /// converts to `dtype`, tensor by tensor. Experts may be stacked or one tensor each.
    ///
    /// # Errors
    /// A pattern of the options matches no tensor ([`Error::FreezePattern`]).
    /// Files are absent or not as long as their headers say ([`Error::WeightFiles`] names them all); tensors have a
    /// type other than BF16, F16, F32, F64; or the tensors are not exactly those the configuration asks for
    /// ([`Error::Mismatch`] lists all differences at once). All this is found before any tensor is read.
    pub fn load_with(
        dir: &Path,
        config: &dyn ModelConfig,
        dtype: DType,
        device: &Device,
        options: &LoadOptions,
    ) -> Result<Self> {
        let files = WeightFiles::open(dir)?;
        let specs = specs(&files, config);
        Self::load_specs(files, &specs, dtype, device, options)
    }

    /// How many tensors [`Weights::load_with`] would load to be trained; only the files' headers are read.
    ///
    /// # Errors
    /// As [`Weights::load_with`].
    pub fn check(dir: &Path, config: &dyn ModelConfig, options: &LoadOptions) -> Result<usize> {
        let files = WeightFiles::open(dir)?;
        let specs = specs(&files, config);
        places(&files, &specs)?;
        options.freeze.check(&specs)?;
        Ok(specs.iter().filter(|spec| spec.is_trained() && !options.freeze.covers(&spec.name)).count())
    }

    fn load_specs(
        files: WeightFiles,
        specs: &[TensorSpec],
        dtype: DType,
        device: &Device,
        options: &LoadOptions,
    ) -> Result<Self> {
        check_dtype(dtype)?;
        let places = places(&files, specs)?;
        let mut weights = Self::empty();
        weights.notices = files.notices().to_vec();
        weights.notices.extend(options.freeze.check(specs)?);

        let mut kept = Vec::new();
        for (spec, pieces) in places {
            let trained = spec.is_trained() && !options.freeze.covers(&spec.name);
            let name = spec.name.clone();
            if trained {
                let variable = Var::zeros(spec.shape.as_slice(), dtype, device)?;
                files.fill(&variable, pieces.iter().map(|piece| piece.name.as_str()))?;
                weights.variables.insert(name, variable);
                continue;
            }
            if spec.role != Role::Unused {
                let constant = Tensor::zeros(spec.shape.as_slice(), dtype, device)?;
                files.fill(&constant, pieces.iter().map(|piece| piece.name.as_str()))?;
                let constants = if spec.is_trained() { &mut weights.frozen } else { &mut weights.buffers };
                constants.insert(name.clone(), constant);
            }
            // An unread tensor has the shape that it has, whatever the table thinks.
            let shape = match (spec.role, pieces.as_slice()) {
                (Role::Unused, [whole]) => whole.shape.clone(),
                _ => spec.shape.clone(),
            };
            kept.push(KeptTensor { name, shape, pieces: pieces.into_iter().map(|piece| piece.name).collect() });
        }
        weights.kept = (!kept.is_empty()).then(|| Arc::new(Kept { files, tensors: kept }));
        Ok(weights)
    }

    /// Fresh weights; equal arguments give equal numbers, on any rank and machine.
    ///
    /// A matrix or table is normal with standard deviation `max(initializer_range, 1 / sqrt(inputs per row))`,
    /// norm weights are 1 (those over query and key heads `head_dim^(-1/4)`), biases 0.
    ///
    /// # Errors
    /// `dtype` is not a floating point type that can be trained in.
    pub fn random(config: &dyn ModelConfig, dtype: DType, device: &Device, seed: u64) -> Result<Self> {
        check_dtype(dtype)?;
        let mut weights = Self::empty();
        for spec in config.tensors().into_iter().filter(|spec| spec.role != Role::Unused) {
            let tensor = random::tensor(&spec, dtype, device, seed)?;
            match spec.is_trained() {
                true => drop(weights.variables.insert(spec.name, Var::from_tensor(&tensor)?)),
                false => drop(weights.buffers.insert(spec.name, tensor)),
            }
        }
        Ok(weights)
    }

    /// Saves with the default [`SaveOptions`]; see [`Weights::save_with`].
    ///
    /// # Errors
    /// As [`Weights::save_with`].
    pub fn save(&self, dir: &Path, config: &dyn ModelConfig) -> Result<()> {
        self.save_with(dir, config, &SaveOptions::default())
    }

    /// Writes weights and `config.json` into a folder, which is made if need be: `model.safetensors`, or shards and
    /// their index where that would be too large. Weight files of an earlier save in this folder are removed.
    ///
    /// Names and layout are those of transformers, experts stacked. Trained tensors are written in the type they
    /// have or in that of the options; `dtype` in `config.json` is set to it, because it is the type in which
    /// transformers loads. All others are written as they were loaded.
    ///
    /// Files are written beside their places first and moved there when all are complete, the index last. A crash
    /// leaves the old checkpoint or the new one; if it falls between the moves of shards that replace others of the
    /// same names, the folder has no index and does not load. The folder may be the one loaded from.
    ///
    /// # Errors
    /// A file cannot be written, the type is not one of BF16, F16, F32, F64, or there are adapters
    /// ([`LoraError::Attached`]).
    pub fn save_with(&self, dir: &Path, config: &dyn ModelConfig, options: &SaveOptions) -> Result<()> {
        if self.lora.is_some() {
            return Err(LoraError::Attached.into());
        }
        let mut contents = self.unchanged(options);
        for (name, variable) in &self.variables {
            let dtype = options.dtype.unwrap_or(variable.dtype());
            contents.insert(name.clone(), Content::Tensor { tensor: variable.as_tensor(), dtype });
        }
        let trained = self.variables.values().next().map(|variable| variable.dtype());
        let text = match options.dtype.or(trained) {
            Some(dtype) => config_text::with_dtype(&config.to_json(), dtype)?,
            None => config.to_json(),
        };
        self.write(dir, &contents, options, &text)
    }

    fn write(&self, dir: &Path, contents: &Contents, options: &SaveOptions, config: &str) -> Result<()> {
        options.dtype.map_or(Ok(()), check_dtype)?;
        let failed = |cause| Error::Io { action: "create", path: dir.to_path_buf(), cause };
        std::fs::create_dir_all(dir).map_err(failed)?;
        save::save_weights(dir, contents, options.max_shard_bytes)?;
        save::save_text(&dir.join(CONFIG_FILE), config)
    }

    /// Everything that training does not change, as it was.
    fn unchanged(&self, options: &SaveOptions) -> Contents<'_> {
        let mut contents = Contents::new();
        // Frozen tensors that are in no file are those of fresh weights, or were frozen after they had been loaded.
        for (name, tensor) in self.frozen.iter().chain(&self.buffers) {
            let dtype = options.dtype.unwrap_or(tensor.dtype());
            contents.insert(name.clone(), Content::Tensor { tensor, dtype });
        }
        if let Some(kept) = &self.kept {
            contents.extend(kept.tensors.iter().map(|tensor| (tensor.name.clone(), kept.content(tensor))));
        }
        contents
    }

    /// The tensors that training changes.
    pub fn variables(&self) -> &BTreeMap<String, Var> {
        &self.variables
    }

    /// The tensors that belong to the model but are never trained: layer scalars, the standardization of image
    /// features.
    pub fn buffers(&self) -> &BTreeMap<String, Tensor> {
        &self.buffers
    }

    /// The tensors of parts that were loaded frozen.
    pub fn frozen(&self) -> &BTreeMap<String, Tensor> {
        &self.frozen
    }

    /// What the user should know about the loaded files; each is said once.
    pub fn notices(&self) -> &[Notice] {
        &self.notices
    }

    /// One tensor by name, checked against the shape the configuration gives it.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let variable = self.variables.get(name).map(Var::as_tensor);
        let found = variable.or_else(|| self.buffers.get(name)).or_else(|| self.frozen.get(name));
        let wrong = |reason: String| Error::Weight { name: name.to_string(), reason };
        let tensor = found.ok_or_else(|| wrong("it is missing".to_string()))?;
        match tensor.dims() == shape {
            true => Ok(tensor.clone()),
            false => Err(wrong(format!("shape {:?} found, {shape:?} needed", tensor.dims()))),
        }
    }

    fn empty() -> Self {
        Self {
            variables: BTreeMap::new(),
            buffers: BTreeMap::new(),
            frozen: BTreeMap::new(),
            kept: None,
            notices: Vec::new(),
            lora: None,
            dropout: None,
        }
    }
}

impl Weights {
    fn kept(&self, name: &str) -> Option<(&Kept, &KeptTensor)> {
        let kept = self.kept.as_deref()?;
        Some((kept, kept.tensors.iter().find(|tensor| tensor.name == name)?))
    }

    /// The type that a tensor has in the files it is written back from; `None` if it is not.
    fn kept_dtype(&self, name: &str) -> Result<Option<DType>> {
        self.kept(name).map(|(kept, tensor)| kept.files.dtype(&tensor.pieces[0])).transpose()
    }
}

impl Kept {
    fn content(&self, tensor: &KeptTensor) -> Content<'_> {
        let piece = |name: &String| self.files.bytes(name).expect("kept tensors were found when the files were opened");
        let pieces: Vec<_> = tensor.pieces.iter().map(piece).collect();
        let runs = pieces.iter().map(|(_, bytes)| *bytes).collect();
        Content::Bytes { dtype: pieces[0].0.dtype, shape: tensor.shape.clone(), runs }
    }
}

/// The tensors of a model, and those of the files that it keeps unread.
fn specs(files: &WeightFiles, config: &dyn ModelConfig) -> Vec<TensorSpec> {
    let mut specs = config.tensors();
    let listed: BTreeSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    let unread = |name: &str| config.unread_prefixes().iter().any(|prefix| name.starts_with(prefix));
    let found = files.shapes().into_iter().filter(|(name, _)| unread(name) && !listed.contains(name.as_str()));
    let kept: Vec<_> = found.map(|(name, shape)| TensorSpec { name, shape, role: Role::Unused }).collect();
    specs.extend(kept);
    specs
}

/// Which tensors of the files make up each tensor of the table; unread ones only if they are there.
fn places<'a>(files: &WeightFiles, specs: &'a [TensorSpec]) -> Result<Vec<(&'a TensorSpec, Vec<Piece>)>> {
    let shapes = files.shapes();
    let (unread, read): (Vec<&TensorSpec>, Vec<&TensorSpec>) = specs.iter().partition(|spec| spec.role == Role::Unused);
    let mut places: Vec<_> = read.into_iter().map(|spec| (spec, pieces::resolve(spec, &shapes))).collect();
    let wanted: Vec<Piece> = places.iter().flat_map(|(_, pieces)| pieces.iter().cloned()).collect();
    let unread_names: BTreeSet<&str> = unread.iter().map(|spec| spec.name.as_str()).collect();
    let mismatch = Mismatch::between(&wanted, &unread_names, &shapes);
    if !mismatch.is_empty() {
        let path = files.path().to_path_buf();
        return Err(Error::Mismatch { path, mismatch: Box::new(mismatch) });
    }
    for (spec, pieces) in &places {
        let types = pieces.iter().map(|piece| files.dtype(&piece.name)).collect::<Result<Vec<_>>>()?;
        if let Some(other) = types.iter().position(|dtype| *dtype != types[0]) {
            let (first, second) = (&pieces[0].name, &pieces[other].name);
            let reason = format!(
                "its pieces have several types, {first} is {:?} and {second} {:?}; they must have one",
                types[0], types[other]
            );
            return Err(Error::Weight { name: spec.name.clone(), reason });
        }
    }
    places.extend(unread.into_iter().filter_map(|spec| {
        let shape = shapes.get(&spec.name)?.clone();
        Some((spec, vec![Piece { name: spec.name.clone(), shape }]))
    }));
    Ok(places)
}

fn check_dtype(dtype: DType) -> Result<()> {
    match dtype {
        DType::BF16 | DType::F16 | DType::F32 | DType::F64 => Ok(()),
        dtype => Err(Error::TrainingType { dtype }),
    }
}
