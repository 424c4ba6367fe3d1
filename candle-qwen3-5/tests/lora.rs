//! Low-rank adapters of the text model against PEFT, on one rank and several.

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{Communicator, LayoutKind};
use candle_qwen3_5::{Config, Error, LoadOptions, LoraOptions, Model, Part, Weights};
use support::{Case, FAMILIES, assert_close, checkpoint, largest, values};

fn adapter(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lora").join(family)
}

fn frozen(family: &str) -> (Config, Weights) {
    let config = Config::from_folder(&checkpoint(family)).unwrap();
    let options = LoadOptions::new().freeze(Part::ALL);
    let weights = Weights::load_with(&checkpoint(family), &config, DType::F32, &Device::Cpu, &options);
    (config, weights.unwrap())
}

/// Logits, and loss and gradients of this rank's tokens.
fn rank(
    family: &str,
    case: &Case,
    comm: Arc<dyn Communicator>,
) -> Result<(Tensor, f64, BTreeMap<String, Tensor>), Error> {
    let (config, mut weights) = frozen(family);
    weights.load_lora(&adapter(family), &config)?;
    let model = Model::new(&config, &weights)?;
    let context = case.context(comm, LayoutKind::HeadTail);
    let inputs = case.inputs();
    let local = model.shard(&model.embed(&inputs, &mut ())?, inputs.position_ids_abs.as_ref(), &context)?;
    let hidden = model.decode(&local, &context, &mut ())?;
    let loss = model.loss(&hidden, &context.shard_labels(case.get("input.labels"))?)?;
    let store = loss.backward()?;
    let gradients = weights.variables().iter().map(|(name, var)| (name.clone(), store.get(var).unwrap().clone()));
    let logits = context.gather(&model.logits(&hidden)?, 1)?;
    Ok((logits.detach(), values(&loss)[0], gradients.collect()))
}

#[test]
fn logits_loss_and_gradients_are_those_of_peft() {
    for family in FAMILIES {
        let case = Case::golden(family, "case1_text");
        let golden = Case::load(&adapter(family).join("golden.safetensors"));
        for ranks in [1, 3] {
            let parts = threads::run(ranks, &threads::Options::default(), |comm| rank(family, &case, comm)).unwrap();
            let every = |x: &Tensor, dim: usize, step: usize| {
                let places: Vec<u32> = (0..x.dim(dim).unwrap() as u32).step_by(step).collect();
                x.index_select(&Tensor::new(places, &Device::Cpu).unwrap(), dim).unwrap()
            };
            assert_close(family, &every(&every(&parts[0].0, 1, 3), 2, 8), golden.get("logits"), 5e-4);
            let loss: f64 = parts.iter().map(|part| part.1).sum();
            assert!((loss - values(golden.get("loss"))[0]).abs() < 1e-4, "{family}: {loss}");
            let names: Vec<String> = parts[0].2.keys().map(|name| format!("grad.{name}")).collect();
            let mut expected: Vec<&String> = golden.tensors.keys().filter(|name| name.starts_with("grad.")).collect();
            expected.sort();
            assert_eq!(names.iter().collect::<Vec<_>>(), expected);
            for name in parts[0].2.keys() {
                let sum = parts.iter().map(|part| part.2[name].clone()).reduce(|a, b| (a + b).unwrap()).unwrap();
                let expected = golden.get(&format!("grad.{name}"));
                assert_close(name, &sum, expected, (1e-3 * largest(expected)).max(1e-7));
            }
        }
    }
}

/// `all-linear` means what it means to PEFT: the modules of projections, and neither experts nor routers.
#[test]
fn all_projections_are_those_of_peft() {
    for family in FAMILIES {
        let (config, mut weights) = frozen(family);
        weights.load_lora(&adapter(family), &config).unwrap();
        let (_, mut fresh) = frozen(family);
        fresh.add_lora(&config, &LoraOptions::new(2, 6.0), 1).unwrap();
        let shapes = |weights: &Weights| -> Vec<(String, Vec<usize>)> {
            weights.variables().iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect()
        };
        assert_eq!(shapes(&weights), shapes(&fresh));
        let target = "gate".parse().unwrap();
        let router = LoraOptions::new(2, 6.0).targets(target);
        assert!(Weights::check_lora(&config, &router).is_err());
    }
}
