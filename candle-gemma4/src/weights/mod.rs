//! A model's tensors under their names in a checkpoint.

mod files;
mod mismatch;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor, Var};

pub use self::mismatch::{Mismatch, WrongShape};
use crate::config::{CONFIG_FILE, Config};
use crate::error::{Error, Result};
use crate::names::{self, TensorSpec};
use crate::random;

/// The trained tensors and the buffers of one model. All have one type and live on one device.
///
/// The maps iterate in name order, which is also the order in which gradients are summed over ranks.
#[derive(Debug, Clone)]
pub struct Weights {
    variables: BTreeMap<String, Var>,
    buffers: BTreeMap<String, Tensor>,
}

impl Weights {
    /// Loads `model.safetensors`, or the files that `model.safetensors.index.json` lists, and converts to `dtype`.
    ///
    /// # Errors
    /// A file is absent, cut short or has tensors of a type other than BF16, F16, F32, F64; or its tensors are not
    /// exactly those the configuration asks for ([`Error::Mismatch`] lists all differences at once).
    pub fn load(dir: &Path, config: &Config, dtype: DType, device: &Device) -> Result<Self> {
        check_dtype(dtype)?;
        let files = files::WeightFiles::open(dir)?;
        let specs = names::tensors(config);
        let mismatch = Mismatch::between(&specs, &files.shapes());
        if !mismatch.is_empty() {
            let path = files.path().to_path_buf();
            return Err(Error::Mismatch { path, mismatch: Box::new(mismatch) });
        }
        Self::collect(&specs, |spec| files.tensor(&spec.name, dtype, device))
    }

    /// Fresh weights; equal arguments give equal numbers, on any rank and machine.
    ///
    /// A matrix or table is normal with standard deviation `max(initializer_range, 1 / sqrt(inputs per row))`,
    /// norm weights are 1 (those over query and key heads `head_dim^(-1/4)`), biases 0.
    ///
    /// # Errors
    /// `dtype` is not a floating point type that can be trained in.
    pub fn random(config: &Config, dtype: DType, device: &Device, seed: u64) -> Result<Self> {
        check_dtype(dtype)?;
        let specs = names::tensors(config);
        Self::collect(&specs, |spec| Ok(random::tensor(spec, dtype, device, seed)?))
    }

    /// Writes `model.safetensors` (one file, in the type the weights have) and `config.json` into a folder, which
    /// is made if need be. Each file is written beside its place first and then moved there, so that a crash leaves
    /// the old file whole.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, dir: &Path, config: &Config) -> Result<()> {
        let failed = |cause| Error::Io { action: "create", path: dir.to_path_buf(), cause };
        std::fs::create_dir_all(dir).map_err(failed)?;
        let variables = self.variables.iter().map(|(name, var)| (name.as_str(), var.as_tensor()));
        let buffers = self.buffers.iter().map(|(name, tensor)| (name.as_str(), tensor));
        files::save_tensors(&dir.join(files::SINGLE_FILE), variables.chain(buffers))?;
        files::save_text(&dir.join(CONFIG_FILE), &config.to_json())
    }

    /// The tensors that training changes.
    pub fn variables(&self) -> &BTreeMap<String, Var> {
        &self.variables
    }

    /// The tensors that belong to the model but are not trained: layer scalars, the standardization of image
    /// features.
    pub fn buffers(&self) -> &BTreeMap<String, Tensor> {
        &self.buffers
    }

    /// One tensor by name, checked against the shape the configuration gives it.
    pub(crate) fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let variable = self.variables.get(name).map(Var::as_tensor);
        let found = variable.or_else(|| self.buffers.get(name));
        let wrong = |reason: String| Error::Weight { name: name.to_string(), reason };
        let tensor = found.ok_or_else(|| wrong("it is missing".to_string()))?;
        match tensor.dims() == shape {
            true => Ok(tensor.clone()),
            false => Err(wrong(format!("shape {:?} found, {shape:?} needed", tensor.dims()))),
        }
    }

    fn collect(specs: &[TensorSpec], mut make: impl FnMut(&TensorSpec) -> Result<Tensor>) -> Result<Self> {
        let mut weights = Self { variables: BTreeMap::new(), buffers: BTreeMap::new() };
        for spec in specs {
            let tensor = make(spec)?;
            match spec.is_trained() {
                true => drop(weights.variables.insert(spec.name.clone(), Var::from_tensor(&tensor)?)),
                false => drop(weights.buffers.insert(spec.name.clone(), tensor)),
            }
        }
        Ok(weights)
    }
}

fn check_dtype(dtype: DType) -> Result<()> {
    match dtype {
        DType::BF16 | DType::F16 | DType::F32 | DType::F64 => Ok(()),
        dtype => Err(Error::TrainingType { dtype }),
    }
}
