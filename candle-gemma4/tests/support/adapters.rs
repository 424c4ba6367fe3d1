//! Adapters that PEFT made for tiny models, and runs with them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{CpContext, LayoutKind};
use candle_gemma4::{Config, Error, LoadOptions, Model, Part, Recompute, Weights};

use super::{Case, fixture, variant};

/// A folder that `make_lora.py` made: adapters and what PEFT computes with them.
#[derive(Debug, Clone)]
pub struct Golden {
    pub name: &'static str,
    pub base: PathBuf,
    /// Name in the golden file, and the input.
    pub cases: Vec<(&'static str, PathBuf)>,
}

impl Golden {
    pub fn of_fixture(name: &'static str, cases: &[&'static str]) -> Self {
        let family = fixture(&format!("gemma4-{name}"));
        let case = |&case| (case, family.join("goldens").join(format!("{case}.safetensors")));
        Self { name, base: family.join("checkpoint"), cases: cases.iter().map(case).collect() }
    }

    pub fn of_variant(name: &'static str) -> Self {
        Self { name, base: variant(name), cases: vec![("case", variant(name).join("case.safetensors"))] }
    }

    pub fn all() -> [Self; 5] {
        [
            Self::of_fixture("dense", &["case2_images"]),
            Self::of_fixture("effective", &["case2_images", "case5_audio"]),
            Self::of_variant("clipped"),
            Self::of_variant("moe"),
            Self::of_variant("unified"),
        ]
    }

    pub fn adapter(&self) -> PathBuf {
        variant("lora").join(self.name)
    }

    pub fn config(&self) -> Config {
        Config::from_folder(&self.base).unwrap()
    }

    pub fn bare(&self, dtype: DType) -> Weights {
        frozen(&self.base, dtype)
    }

    /// The same adapters, which drop this share of their inputs.
    pub fn dropping(&self, share: f64) -> Weights {
        let dir = tempfile::tempdir().unwrap();
        let (tensors, config) = ("adapter_model.safetensors", "adapter_config.json");
        std::fs::copy(self.adapter().join(tensors), dir.path().join(tensors)).unwrap();
        let text = std::fs::read_to_string(self.adapter().join(config)).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["lora_dropout"] = share.into();
        std::fs::write(dir.path().join(config), json.to_string()).unwrap();
        let mut weights = self.bare(DType::F32);
        weights.load_lora(dir.path(), &self.config()).unwrap();
        weights
    }

    pub fn weights(&self, dtype: DType) -> Weights {
        let mut weights = self.bare(dtype);
        weights.load_lora(&self.adapter(), &self.config()).unwrap();
        weights
    }
}

/// Weights that are all frozen.
pub fn frozen(base: &Path, dtype: DType) -> Weights {
    let options = LoadOptions::new().freeze(Part::ALL);
    Weights::load_with(base, &Config::from_folder(base).unwrap(), dtype, &Device::Cpu, &options).unwrap()
}

/// One forward and backward pass over all ranks.
pub struct Pass {
    /// Of the whole batch.
    pub logits: Tensor,
    pub loss: f64,
    /// Summed over ranks; variables without a gradient are absent.
    pub gradients: BTreeMap<String, Tensor>,
}

/// On this many ranks; nothing that is frozen may have a gradient.
pub fn pass(config: &Config, weights: &Weights, case: &Path, ranks: usize, recompute: fn() -> Recompute) -> Pass {
    let case = Case::load(case);
    let mut of_ranks = threads::run(ranks, &threads::Options::default(), |comm| {
        let tokens = case.tokens();
        let context = CpContext::new(comm.clone(), LayoutKind::HeadTail.layout(&tokens, ranks, &[])?, tokens)?;
        let dropping = weights.with_dropout(7, 3, &context);
        let model = Model::new(config, dropping.as_ref().unwrap_or(weights))?;
        let embeds = model.embed(&case.inputs(), &mut ())?;
        let local = model.shard(&embeds, case.get("input.input_ids"), &context)?;
        let recompute = recompute();
        let hidden = model.decode_with(&local, &context, &recompute, &mut ())?;
        let loss = model.loss(&hidden, &context.shard_labels(case.get("input.labels"))?)?;
        let store = recompute.backward(&loss)?;
        for (name, tensor) in weights.frozen() {
            assert!(store.get(tensor).is_none(), "{name} is frozen and has a gradient");
        }
        let mut gradients = BTreeMap::new();
        for (name, variable) in weights.variables() {
            if let Some(gradient) = store.get(variable) {
                gradients.insert(name.clone(), comm.all_reduce_sum(gradient)?);
            }
        }
        let logits = context.gather(&model.logits(&hidden)?, 1)?;
        let loss = comm.all_reduce_sum(&loss)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        Ok::<_, Error>(Pass { logits, loss, gradients })
    })
    .unwrap();
    of_ranks.swap_remove(0)
}
