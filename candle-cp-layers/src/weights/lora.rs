//! Adapters beside a model's own tensors: adding, loading, saving, merging.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::CpContext;

use super::files::WeightFiles;
use super::mismatch::Mismatch;
use super::pieces::Piece;
use super::save::{self, Content, Contents};
use super::{Part, SaveOptions, Weights, config_text};
use crate::error::{Error, Result};
use crate::lora::config_file::{self, AdapterConfig};
use crate::lora::modules::{self, ENDS, Module};
use crate::lora::{Adapter, DropoutStep, LoraError, LoraOptions, LoraReport, TargetMatches};
use crate::norm::wide;
use crate::random;
use crate::spec::ModelConfig;

/// The file with the adapters' matrices.
const ADAPTER_FILE: &str = "adapter_model.safetensors";

/// The adapters that a model has.
#[derive(Debug)]
pub(super) struct Attached {
    options: LoraOptions,
    /// By the name of the matrix that they belong to.
    modules: BTreeMap<String, Module>,
}

impl Weights {
    /// Adds fresh adapters, which change nothing until they are trained, and freezes everything else:
    /// [`Weights::variables`] are then the adapters' matrices under PEFT's names, in f32 (f64 for f64 weights). Equal
    /// arguments give equal numbers, on any rank and machine.
    ///
    /// Models made before know nothing of it. Parts that were loaded frozen ([`LoadOptions::freeze`]) are saved byte for
    /// byte, others in the type they were loaded in.
    ///
    /// [`LoadOptions::freeze`]: super::LoadOptions::freeze
    ///
    /// # Errors
    /// [`Error::Lora`]: a setting is out of range, a part is not in this model, a target matches nothing, or there are
    /// adapters already.
    pub fn add_lora(&mut self, config: &dyn ModelConfig, options: &LoraOptions, seed: u64) -> Result<LoraReport> {
        self.check_unadapted()?;
        let (modules, targets) = modules::select(config, options)?;
        let (dtype, device) = self.adapter_type();
        let mut variables = BTreeMap::new();
        for module in modules.values() {
            let [a, b] = module.tensors();
            let [a_shape, b_shape] = module.shapes(options.rank());
            // As PEFT: Kaiming's rule with a = sqrt(5) comes to one over the root of the number of inputs.
            let bound = (module.inputs as f64).powf(-0.5);
            let a_ri = random::uniform(&a, &a_shape, bound, dtype, &device, seed)?;
            variables.insert(a, Var::from_tensor(&a_ri)?);
            variables.insert(b, Var::zeros(&b_shape, dtype, &device)?);
        }
        Ok(self.attach(options.clone(), modules, variables, targets))
    }

    /// Whether [`Weights::add_lora`] can add such adapters to a model of this configuration.
    ///
    /// # Errors
    /// As [`Weights::add_lora`].
    pub fn check_lora(config: &dyn ModelConfig, options: &LoraOptions) -> Result<()> {
        modules::select(config, options)?;
        Ok(())
    }

    /// The matrices that get such adapters, each with the shapes of its adapter's two matrices.
    ///
    /// # Errors
    /// As [`Weights::add_lora`].
    pub fn lora_shapes(config: &dyn ModelConfig, options: &LoraOptions) -> Result<BTreeMap<String, [[usize; 2]; 2]>> {
        let (modules, _) = modules::select(config, options)?;
        Ok(modules.into_iter().map(|(matrix, module)| (matrix, module.shapes(options.rank()))).collect())
    }

    /// Loads adapters from a folder of [`Weights::save_adapter`] or of PEFT, to go on with them; the rest is as for
    /// [`Weights::add_lora`]. Rank, alpha, dropout and modules are those of the folder. Which modules have an adapter is
    /// told by the tensors; a list of targets must agree with them.
    ///
    /// # Errors
    /// A file cannot be read; its tensors are not those of adapters of this model ([`Error::Mismatch`]);
    /// [`Error::Lora`]: the configuration asks for something that is not supported, such as DoRA, or there are adapters
    /// already.
    pub fn load_lora(&mut self, dir: &Path, config: &dyn ModelConfig) -> Result<LoraReport> {
        self.check_unadapted()?;
        let AdapterConfig { options, listed } = config_file::read(dir)?;
        let path = dir.join(ADAPTER_FILE);
        let files = WeightFiles::open_single(path.clone())?;
        let modules = adapted_modules(&files, &path, config, &options, listed.as_deref())?;
        if let (Some(targets), Some(module)) = (&listed, modules.values().find(|module| !module.is_listed(&listed))) {
            return Err(config_file::unlisted(dir, &module.path, targets).into());
        }
        let (dtype, device) = self.adapter_type();
        let mut variables = BTreeMap::new();
        for module in modules.values() {
            for (name, shape) in module.tensors().into_iter().zip(module.shapes(options.rank())) {
                let variable = Var::zeros(&shape, dtype, &device)?;
                files.fill(&variable, [name.as_str()].into_iter())?;
                variables.insert(name, variable);
            }
        }
        let parts: BTreeSet<Part> = modules.values().map(|module| module.part).collect();
        let count = |&part| (part, modules.values().filter(|module| module.part == part).count());
        let targets =
            vec![TargetMatches { target: dir.display().to_string(), modules: parts.iter().map(count).collect() }];
        Ok(self.attach(options.parts(parts.clone()), modules, variables, targets))
    }

    /// The settings of the adapters, if there are any.
    pub fn lora(&self) -> Option<&LoraOptions> {
        self.lora.as_ref().map(|attached| &attached.options)
    }

    /// The same weights for one training step, in which adapters drop a share of their inputs; `None` if there is nothing
    /// to drop. A model made from the result drops; others do not, which is what evaluation wants. It
    /// shares storage with this one, so making it takes next to no time or memory.
    ///
    /// What is dropped is a function of seed, step, module and the token's place in the whole batch: the same for every
    /// layout over ranks, and again in backward with [`Recompute`](crate::Recompute). `context` is that of the batch the
    /// model is used on, and of no other.
    pub fn with_dropout(&self, seed: u64, step: u64, context: &CpContext) -> Option<Self> {
        let share = self.lora()?.dropout;
        let dropout = Some(DropoutStep::new(share, seed, step, context));
        (share > 0.0).then(|| Self { dropout, ..self.clone() })
    }

    /// Writes the adapters into a folder, which is made if need be, as PEFT does: `adapter_model.safetensors` and
    /// `adapter_config.json`. `base_model` is the folder of the model that they belong to, or its name on the Hub,
    /// perhaps with `@revision` behind it. Both files are written beside their places first and then moved.
    ///
    /// The targets in the configuration are the full paths of the modules: in a model with towers PEFT would find
    /// modules by `q_proj` that were not adapted here.
    ///
    /// # Errors
    /// There are no adapters, or a file cannot be written.
    pub fn save_adapter(&self, dir: &Path, base_model: &str) -> Result<()> {
        let attached = self.lora.as_ref().ok_or(LoraError::Absent)?;
        let failed = |cause| Error::Io { action: "create", path: dir.to_path_buf(), cause };
        std::fs::create_dir_all(dir).map_err(failed)?;
        let mut contents = Contents::new();
        for (name, variable) in &self.variables {
            let (tensor, dtype) = (variable.as_tensor(), variable.dtype());
            contents.insert(name.clone(), Content::Tensor { tensor, dtype });
        }
        let paths: BTreeSet<&str> = attached.modules.values().map(|module| module.path.as_str()).collect();
        let text = config_file::text(&attached.options, &paths, base_model)?;
        save::save_pair(&dir.join(ADAPTER_FILE), &contents, &dir.join(config_file::ADAPTER_CONFIG_FILE), &text)
    }

    /// As [`Weights::save_with`], with the adapters worked into the matrices that they belong to: the matrix plus
    /// `alpha / rank` times `B A`, computed in f32 (f64 for f64), in the type that the files loaded from have, or that of
    /// the options. All other tensors are written as without adapters.
    ///
    /// # Errors
    /// There are no adapters; and as [`Weights::save_with`].
    pub fn save_merged(&self, dir: &Path, config: &dyn ModelConfig, options: &SaveOptions) -> Result<()> {
        let attached = self.lora.as_ref().ok_or(LoraError::Absent)?;
        let mut contents = self.unchanged(options);
        for (name, module) in &attached.modules {
            let dtype = match (options.dtype, self.kept_dtype(name)?) {
                (Some(dtype), _) | (None, Some(dtype)) => dtype,
                (None, None) => self.get(name, &[module.outputs, module.inputs])?.dtype(),
            };
            let merged = move || self.merged(module)?.to_dtype(dtype).map_err(Error::from);
            let shape = vec![module.outputs, module.inputs];
            contents.insert(name.clone(), Content::Computed { compute: Box::new(merged), shape, dtype });
        }
        let unkept = self.frozen.iter().find(|(name, _)| self.kept(name).is_none()).map(|(_, tensor)| tensor.dtype());
        let text = match options.dtype.or(unkept) {
            Some(dtype) => config_text::with_dtype(&config.to_json(), dtype)?,
            None => config.to_json(),
        };
        self.write(dir, &contents, options, &text)
    }

    /// The adapter of a matrix of this name and shape, if it has one.
    pub fn adapter(&self, matrix: &str, [outputs, inputs]: [usize; 2]) -> Result<Option<Adapter>> {
        let Some(attached) = &self.lora else { return Ok(None) };
        let Some(module) = attached.modules.get(matrix) else { return Ok(None) };
        let rank = attached.options.rank();
        let [a, b] = module.tensors();
        Ok(Some(Adapter {
            a_ri: self.get(&a, &[rank, inputs])?,
            b_or: self.get(&b, &[outputs, rank])?,
            scale: attached.options.scale(),
            dropout: self.dropout.as_ref().map(|step| step.of_module(&module.path, module.part == Part::Text)),
        }))
    }

    pub(super) fn check_unadapted(&self) -> Result<()> {
        match self.lora {
            None => Ok(()),
            Some(_) => Err(LoraError::Twice.into()),
        }
    }

    /// Type and device of the adapters.
    fn adapter_type(&self) -> (DType, Device) {
        let variables = self.variables.values().map(Var::as_tensor);
        let first = variables.chain(self.frozen.values()).next().expect("every model has an embedding table");
        (wide(first.dtype()), first.device().clone())
    }

    fn attach(
        &mut self,
        options: LoraOptions,
        modules: BTreeMap<String, Module>,
        variables: BTreeMap<String, Var>,
        targets: Vec<TargetMatches>,
    ) -> LoraReport {
        let parameters = variables.values().map(|variable| variable.elem_count()).sum();
        let report = LoraReport { targets, modules: modules.len(), parameters };
        let base = std::mem::replace(&mut self.variables, variables);
        self.frozen.extend(base.into_iter().map(|(name, variable)| (name, variable.as_tensor().detach())));
        self.lora = Some(Arc::new(Attached { options, modules }));
        report
    }

    /// A matrix with its adapter worked in.
    fn merged(&self, module: &Module) -> Result<Tensor> {
        let shape = [module.outputs, module.inputs];
        let adapter = self.adapter(&module.matrix, shape)?.ok_or(LoraError::Absent)?;
        let exact = match self.kept(&module.matrix) {
            // As the file has it, which may be more exact than what was loaded.
            Some((kept, tensor)) => {
                let dtype = kept.files.dtype(&tensor.pieces[0])?;
                let exact = Tensor::zeros(&shape, wide(dtype), &Device::Cpu)?;
                kept.files.fill(&exact, tensor.pieces.iter().map(String::as_str))?;
                exact
            }
            None => {
                let loaded = self.get(&module.matrix, &shape)?;
                loaded.to_dtype(wide(loaded.dtype()))?
            }
        };
        Ok((&exact + adapter.product_oi()?.to_dtype(exact.dtype())?.to_device(exact.device())?)?)
    }
}

impl Module {
    /// Whether a list of targets, if there is one, names it by PEFT's rule.
    fn is_listed(&self, listed: &Option<Vec<String>>) -> bool {
        listed.as_ref().is_none_or(|targets| targets.iter().any(|target| modules::is_named(&self.path, target)))
    }
}

/// The modules that have an adapter in a file, or must have one by the list of targets, after a check that the file has
/// exactly their tensors.
fn adapted_modules(
    files: &WeightFiles,
    path: &Path,
    config: &dyn ModelConfig,
    options: &LoraOptions,
    listed: Option<&[String]>,
) -> Result<BTreeMap<String, Module>> {
    let shapes = files.shapes();
    if !shapes.keys().any(|name| name.ends_with(ENDS[0])) {
        return Err(LoraError::Empty { path: path.to_path_buf() }.into());
    }
    let is_there = |module: &Module| module.tensors().iter().any(|name| shapes.contains_key(name));
    let is_named = |module: &Module| {
        listed.is_some_and(|targets| targets.iter().any(|target| modules::is_named(&module.path, target)))
    };
    let adapted = modules::modules(config).into_iter().filter(|module| is_there(module) || is_named(module));
    let adapted: BTreeMap<String, Module> = adapted.map(|module| (module.matrix.clone(), module)).collect();
    let pieces = |module: &Module| {
        let shapes = module.shapes(options.rank()).map(Vec::from);
        let pairs = module.tensors().into_iter().zip(shapes);
        pairs.map(|(name, shape)| Piece { name, shape }).collect::<Vec<_>>()
    };
    let wanted: Vec<Piece> = adapted.values().flat_map(pieces).collect();
    let mismatch = Mismatch::between(&wanted, &BTreeSet::new(), &shapes);
    match mismatch.is_empty() {
        true => Ok(adapted),
        false => Err(Error::Mismatch { path: path.to_path_buf(), mismatch: Box::new(mismatch) }),
    }
}
