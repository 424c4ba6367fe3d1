//! A model's projections under the names that PEFT sees, and which of them a target means.

use std::collections::{BTreeMap, BTreeSet};

use super::error::LoraError;
use super::options::{ALL_LINEAR, LoraOptions, LoraTargets};
use super::report::TargetMatches;
use crate::spec::{LM_HEAD, ModelConfig, Role, TensorSpec};
use crate::weights::Part;

/// What PEFT puts before a module's path.
pub const PREFIX: &str = "base_model.model.";
/// Ends of the names of an adapter's two matrices.
pub const ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// A projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Name of its matrix in a checkpoint.
    pub matrix: String,
    /// Path of the module in transformers' model.
    pub path: String,
    pub part: Part,
    pub outputs: usize,
    pub inputs: usize,
}

impl Module {
    /// `None` if the tensor is not the matrix of a projection that can be adapted.
    fn new(config: &dyn ModelConfig, spec: &TensorSpec) -> Option<Self> {
        let &[outputs, inputs] = spec.shape.as_slice() else { return None };
        let is_matrix = matches!(spec.role, Role::Matrix { .. });
        let name = spec.name.strip_suffix(".weight").filter(|_| is_matrix && other_kind(&spec.name).is_none())?;
        let (path, part) = (config.module_path(name), Part::of(name));
        Some(Self { matrix: spec.name.clone(), path, part, outputs, inputs })
    }

    /// Names of its `A` and `B` in an adapter file.
    pub fn tensors(&self) -> [String; 2] {
        ENDS.map(|end| format!("{PREFIX}{}{end}", self.path))
    }

    /// Shapes of its `A` and `B`.
    pub fn shapes(&self, rank: usize) -> [[usize; 2]; 2] {
        [[rank, self.inputs], [self.outputs, rank]]
    }

    /// The paths that targets are compared with: its own, and that of the wrapper around it.
    fn paths(&self) -> impl Iterator<Item = &str> {
        [Some(self.path.as_str()), self.path.strip_suffix(".linear")].into_iter().flatten()
    }

    fn is_meant_by(&self, target: &str) -> bool {
        self.paths().any(|path| is_named(path, target))
    }
}

/// PEFT's rule.
pub fn is_named(path: &str, target: &str) -> bool {
    path.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// What a tensor is, if it is no projection that can be adapted.
fn other_kind(name: &str) -> Option<&'static str> {
    let segments: Vec<&str> = name.split('.').collect();
    let has = |segment: &str| segments.contains(&segment);
    if name == LM_HEAD {
        Some("the head")
    } else if has("embed_tokens")
        || has("embed_tokens_per_layer")
        || has("position_embedding_table")
        || has("pos_embed")
    {
        Some("an embedding table")
    } else if has("experts") {
        Some("a stack of experts' matrices")
    } else if segments.ends_with(&["mlp", "gate", "weight"]) {
        // PEFT adapts modules of projections only; this one is of another type.
        Some("a router")
    } else if ["conv", "conv1d", "depthwise_conv1d", "patch_embed"].into_iter().any(has) {
        Some("a convolution")
    } else {
        None
    }
}

/// All projections that can be adapted.
pub fn modules(config: &dyn ModelConfig) -> Vec<Module> {
    let specs = config.tensors();
    specs.iter().filter_map(|spec| Module::new(config, spec)).collect()
}

/// The modules that get an adapter, by the name of their matrix, and what each target matched.
pub fn select(
    config: &dyn ModelConfig,
    options: &LoraOptions,
) -> Result<(BTreeMap<String, Module>, Vec<TargetMatches>), LoraError> {
    options.check()?;
    let all = modules(config);
    if let Some(&part) = options.parts.iter().find(|&&part| !all.iter().any(|module| module.part == part)) {
        return Err(LoraError::AbsentPart { part });
    }
    let chosen: Vec<&Module> = all.iter().filter(|module| options.parts.contains(&module.part)).collect();
    let names = match &options.targets {
        LoraTargets::AllLinear => {
            let matches = vec![counted(ALL_LINEAR, &chosen, &options.parts)];
            return Ok((by_matrix(chosen), matches));
        }
        LoraTargets::Names(names) => names,
    };
    let (mut selected, mut matches) = (Vec::new(), Vec::new());
    for target in names {
        let meant: Vec<&Module> = chosen.iter().copied().filter(|module| module.is_meant_by(target)).collect();
        if meant.is_empty() {
            return Err(no_match(config, target, &all, &options.parts));
        }
        matches.push(counted(target, &meant, &options.parts));
        selected.extend(meant);
    }
    Ok((by_matrix(selected), matches))
}

fn by_matrix(modules: Vec<&Module>) -> BTreeMap<String, Module> {
    modules.into_iter().map(|module| (module.matrix.clone(), module.clone())).collect()
}

fn counted(target: &str, modules: &[&Module], parts: &BTreeSet<Part>) -> TargetMatches {
    let count = |&part| (part, modules.iter().filter(|module| module.part == part).count());
    TargetMatches { target: target.to_string(), modules: parts.iter().map(count).collect() }
}

/// Why a target matches nothing.
fn no_match(config: &dyn ModelConfig, target: &str, all: &[Module], parts: &BTreeSet<Part>) -> LoraError {
    let count = |&part: &Part| all.iter().filter(|module| module.part == part && module.is_meant_by(target)).count();
    let elsewhere: Vec<_> = Part::ALL.iter().map(|part| (*part, count(part))).filter(|(_, count)| *count > 0).collect();
    if elsewhere.is_empty()
        && let Some((name, what)) = other_tensor(config, target)
    {
        return LoraError::NotLinear { target: target.to_string(), name, what };
    }
    let paths: Vec<&str> = all.iter().filter(|module| parts.contains(&module.part)).flat_map(Module::paths).collect();
    let known: BTreeSet<&str> =
        paths.iter().map(|path| last_segments(path, 1)).filter(|name| *name != "linear").collect();
    let segments = target.split('.').count();
    let nearest = paths.iter().map(|path| last_segments(path, segments));
    let nearest = nearest.map(|name| (strsim::levenshtein(target, name), name)).min();
    let nearest = nearest.filter(|(distance, name)| 3 * distance <= target.len().max(name.len()));
    LoraError::NoMatch {
        target: target.to_string(),
        parts: parts.iter().copied().collect(),
        elsewhere,
        nearest: nearest.map(|(_, name)| name.to_string()),
        known: known.into_iter().map(str::to_string).collect(),
    }
}

/// The first tensor, or the module that holds it, that a target names and that is no projection.
fn other_tensor(config: &dyn ModelConfig, target: &str) -> Option<(String, &'static str)> {
    let head = (LM_HEAD.to_string(), other_kind(LM_HEAD));
    let specs = config.tensors().into_iter();
    let mut others = specs.map(|spec| (spec.name.clone(), other_kind(&spec.name))).chain([head]);
    others.find_map(|(name, kind)| {
        let module = name.strip_suffix(".weight").unwrap_or(&name);
        let holder = module.strip_suffix(".gate_up_proj").unwrap_or(module);
        kind.filter(|_| is_named(module, target) || is_named(holder, target)).map(|kind| (name.clone(), kind))
    })
}

/// The last `count` segments of a path, or all of it.
fn last_segments(path: &str, count: usize) -> &str {
    let start = path.rmatch_indices('.').nth(count.saturating_sub(1)).map_or(0, |(dot, _)| dot + 1);
    &path[start..]
}
