//! Low-rank adapters against PEFT, on one rank and several.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{CpContext, LayoutKind};
use candle_gemma4::{Config, Error, LoadOptions, Model, Part, Recompute, Weights};
use support::{Case, assert_close, fixture, largest, variant};

/// A folder that `make_lora.py` made: adapters and what PEFT computes with them.
#[derive(Debug, Clone)]
struct Golden {
    name: &'static str,
    base: PathBuf,
    /// Name in the golden file, and the input.
    cases: Vec<(&'static str, PathBuf)>,
}

impl Golden {
    fn of_fixture(name: &'static str, cases: &[&'static str]) -> Self {
        let family = fixture(&format!("gemma4-{name}"));
        let case = |&case| (case, family.join("goldens").join(format!("{case}.safetensors")));
        Self { name, base: family.join("checkpoint"), cases: cases.iter().map(case).collect() }
    }

    fn of_variant(name: &'static str) -> Self {
        Self { name, base: variant(name), cases: vec![("case", variant(name).join("case.safetensors"))] }
    }

    fn all() -> [Self; 5] {
        [
            Self::of_fixture("dense", &["case2_images"]),
            Self::of_fixture("effective", &["case2_images", "case5_audio"]),
            Self::of_variant("clipped"),
            Self::of_variant("moe"),
            Self::of_variant("unified"),
        ]
    }

    fn adapter(&self) -> PathBuf {
        variant("lora").join(self.name)
    }

    fn config(&self) -> Config {
        Config::from_folder(&self.base).unwrap()
    }

    fn bare(&self, dtype: DType) -> Weights {
        frozen(&self.base, dtype)
    }

    fn weights(&self, dtype: DType) -> Weights {
        let mut weights = self.bare(dtype);
        weights.load_lora(&self.adapter(), &self.config()).unwrap();
        weights
    }
}

fn frozen(base: &Path, dtype: DType) -> Weights {
    let options = LoadOptions::new().freeze(Part::ALL);
    Weights::load_with(base, &Config::from_folder(base).unwrap(), dtype, &Device::Cpu, &options).unwrap()
}

/// One forward and backward pass over all ranks.
struct Pass {
    /// Of the whole batch.
    logits: Tensor,
    loss: f64,
    /// Summed over ranks; variables without a gradient are absent.
    gradients: BTreeMap<String, Tensor>,
}

fn pass(config: &Config, weights: &Weights, case: &Path, ranks: usize, recompute: fn() -> Recompute) -> Pass {
    let case = Case::load(case);
    let mut of_ranks = threads::run(ranks, &threads::Options::default(), |comm| {
        let model = Model::new(config, weights)?;
        let tokens = case.tokens();
        let context = CpContext::new(comm.clone(), LayoutKind::HeadTail.layout(&tokens, ranks, &[])?, tokens)?;
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

#[test]
fn logits_loss_and_gradients_are_those_of_peft() {
    for golden in Golden::all() {
        let (config, weights) = (golden.config(), golden.weights(DType::F32));
        let expected = Case::load(&golden.adapter().join("golden.safetensors"));
        let mut trained = BTreeSet::new();
        for (case, path) in &golden.cases {
            for ranks in [1, 3, 4] {
                let place = format!("{}, {case}, {ranks} ranks", golden.name);
                let found = pass(&config, &weights, path, ranks, Recompute::off);
                let loss = expected.get(&format!("{case}.loss")).to_vec1::<f32>().unwrap()[0];
                assert!((found.loss - f64::from(loss)).abs() < 1e-4, "{place}: loss {} instead of {loss}", found.loss);
                assert_logits(&place, &found.logits, &Case::load(path), expected.get(&format!("{case}.logits")));
                assert_vector(&place, &weights, &found, expected.get(&format!("{case}.gradients")));
                trained.extend(found.gradients.into_keys());
            }
        }
        let names: BTreeSet<String> = weights.variables().keys().cloned().collect();
        assert_eq!(trained, names, "{}: every adapter has a gradient in one of the cases", golden.name);
    }
}

/// Every third token's logits for every eighth id; padding does not count.
fn assert_logits(place: &str, logits: &Tensor, case: &Case, expected: &Tensor) {
    let every = |x: &Tensor, dim: usize, step: usize| {
        let places: Vec<u32> = (0..x.dim(dim).unwrap() as u32).step_by(step).collect();
        x.index_select(&Tensor::new(places, &Device::Cpu).unwrap(), dim).unwrap()
    };
    let tokens = case.get("input.input_ids").dim(1).unwrap();
    let found = every(&every(&logits.narrow(1, 0, tokens).unwrap(), 1, 3), 2, 8);
    let counts = match case.counts() {
        Some(counts) => every(&counts, 1, 3).unsqueeze(2).unwrap(),
        None => Tensor::ones((1, 1, 1), DType::F32, &Device::Cpu).unwrap(),
    };
    let masked = |x: &Tensor| x.broadcast_mul(&counts).unwrap();
    assert_close(&format!("{place}: logits"), &masked(&found), &masked(expected), 5e-4);
}

/// All gradients one after the other, in the order of their names; each within 1e-3 of its largest entry.
fn assert_vector(place: &str, weights: &Weights, found: &Pass, expected: &Tensor) {
    let mut start = 0;
    for (name, variable) in weights.variables() {
        let count = variable.elem_count();
        let expected = expected.narrow(0, start, count).unwrap().reshape(variable.shape()).unwrap();
        start += count;
        match found.gradients.get(name) {
            Some(found) => {
                let tolerance = (1e-3 * largest(&expected)).max(1e-7);
                assert_close(&format!("{place}: {name}"), found, &expected, tolerance);
            }
            None => assert_eq!(largest(&expected), 0.0, "{place}: {name} has no gradient"),
        }
    }
    assert_eq!(start, expected.elem_count(), "{place}");
}
