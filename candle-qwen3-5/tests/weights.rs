//! Loading, saving and filling weights.

mod support;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_qwen3_5::{Config, LoadOptions, Model, Part, Role, Weights, tensors};
use safetensors::{Dtype, SafeTensors};
use support::{Case, FAMILIES, Settings, checkpoint, difference, fixture, load, run, values, variant};

type Raw = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Type, shape and bytes of every tensor of a folder.
fn raw(dir: &Path) -> Raw {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter().map(|(name, x)| (name.to_string(), (x.dtype(), x.shape().to_vec(), x.data().to_vec()))).collect()
}

#[test]
fn the_table_of_names_is_that_of_the_checkpoint() {
    for family in FAMILIES {
        let config = Config::from_folder(&checkpoint(family)).unwrap();
        let mut expected: Vec<_> = tensors(&config).into_iter().map(|spec| (spec.name, spec.shape)).collect();
        expected.sort();
        let on_disk = raw(&checkpoint(family));
        let own = on_disk.iter().filter(|(name, _)| !name.starts_with("mtp."));
        let found: Vec<_> = own.map(|(name, (_, shape, _))| (name.clone(), shape.clone())).collect();
        assert_eq!(expected, found);
        let (weights, _) = load(&checkpoint(family), DType::F32);
        assert_eq!(weights.variables().len(), found.len(), "everything is trained");
    }
}

#[test]
fn a_saved_folder_has_the_bytes_it_was_loaded_from() {
    for family in FAMILIES {
        let config = Config::from_folder(&checkpoint(family)).unwrap();
        let before = raw(&checkpoint(family));
        assert_eq!(before.keys().filter(|name| name.starts_with("mtp.")).count(), 4);
        for parts in [&[][..], &[Part::Vision], &Part::ALL] {
            let options = LoadOptions::new().freeze(parts.iter().copied());
            let weights = Weights::load_with(&checkpoint(family), &config, DType::F32, &Device::Cpu, &options).unwrap();
            assert!(weights.variables().keys().all(|name| !name.starts_with("mtp.")));
            let dir = tempfile::tempdir().unwrap();
            weights.save(dir.path(), &config).unwrap();
            assert_eq!(raw(dir.path()), before);
            assert_eq!(Config::from_folder(dir.path()).unwrap().text, config.text);
        }
    }
}

#[test]
fn files_may_have_no_head_for_several_tokens_or_a_larger_one() {
    let config = Config::from_folder(&checkpoint(FAMILIES[0])).unwrap();
    let mut tensors = candle_core::safetensors::load(checkpoint(FAMILIES[0]).join("model.safetensors"), &Device::Cpu);
    let tensors = tensors.as_mut().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let write = |tensors: &HashMap<String, Tensor>| {
        candle_core::safetensors::save(tensors, dir.path().join("model.safetensors")).unwrap();
        Weights::load(dir.path(), &config, DType::F32, &Device::Cpu)
    };
    let layer = Tensor::ones((2, 3), DType::BF16, &Device::Cpu).unwrap();
    tensors.insert("mtp.layers.1.mlp.experts.7.up_proj.weight".into(), layer);
    let saved = tempfile::tempdir().unwrap();
    write(tensors).unwrap().save(saved.path(), &config).unwrap();
    assert_eq!(raw(saved.path()), raw(dir.path()));
    tensors.retain(|name, _| !name.starts_with("mtp."));
    assert_eq!(write(tensors).unwrap().variables().len(), tensors.len());
    tensors.insert("mtpx.weight".into(), Tensor::ones(1, DType::F32, &Device::Cpu).unwrap());
    let error = write(tensors).unwrap_err().to_string();
    assert!(error.contains("1 unexpected: mtpx.weight"), "{error}");
}

/// The experts of one layer as transformers saves them, in place of the stacked ones.
#[test]
fn experts_may_be_stacked_or_one_tensor_each() {
    let folder = checkpoint("qwen3_5-moe");
    let config = Config::from_folder(&folder).unwrap();
    let mut tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    let one_by_one = candle_core::safetensors::load(fixture("qwen3_5-moe/per_expert.safetensors"), &Device::Cpu);
    let one_by_one = one_by_one.unwrap();
    assert_eq!(one_by_one.len(), 24);
    let layer = one_by_one.keys().next().unwrap().split(".experts.").next().unwrap().to_string();
    for stacked in ["gate_up_proj", "down_proj"] {
        tensors.remove(&format!("{layer}.experts.{stacked}")).unwrap();
    }
    tensors.extend(one_by_one);
    let dir = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
    let weights = Weights::load(dir.path(), &config, DType::F32, &Device::Cpu).unwrap();
    let saved = tempfile::tempdir().unwrap();
    weights.save(saved.path(), &config).unwrap();
    assert_eq!(raw(saved.path()), raw(&folder));
}

#[test]
fn text_only_folders_come_back_as_they_were() {
    for name in ["dense", "moe"] {
        let folder = variant(name);
        let case = Case::load(&folder.join("case.safetensors"));
        let config = Config::from_folder(&folder).unwrap();
        let (weights, _) = load(&folder, DType::F32);
        let dir = tempfile::tempdir().unwrap();
        weights.save(dir.path(), &config).unwrap();
        let [before, after] = [&folder, dir.path()].map(|folder| run(folder, &case, &Settings::SINGLE));
        assert_eq!(difference(&before.logits, &after.logits), 0.0);
    }
}

#[test]
fn fresh_weights_are_those_of_the_roles_and_run() {
    for family in FAMILIES {
        let config = Config::from_folder(&checkpoint(family)).unwrap();
        let weights = Weights::random(&config, DType::F32, &Device::Cpu, 3).unwrap();
        for spec in tensors(&config) {
            let found = values(&weights.variables()[&spec.name]);
            match spec.role {
                Role::Matrix { .. } => assert!(found.iter().any(|&v| v != found[0]), "{}", spec.name),
                Role::Norm => assert!(found.iter().all(|&v| v == 1.0), "{}", spec.name),
                Role::Bias => assert!(found.iter().all(|&v| v == 0.0), "{}", spec.name),
                Role::LogUniform { .. } => {
                    assert!(spec.name.ends_with("A_log"));
                    assert!(found.iter().all(|&v| (0.01f64.ln()..=16f64.ln()).contains(&v)), "{found:?}");
                }
                other => panic!("{}: {other:?}", spec.name),
            }
        }
        for (end, fresh) in [("q_norm.weight", 0.0), ("input_layernorm.weight", 0.0), ("dt_bias", 1.0)] {
            let mut named = weights.variables().iter().filter(|(name, _)| name.ends_with(end));
            assert!(named.clone().count() > 1 && named.all(|(_, x)| values(x).iter().all(|&v| v == fresh)), "{end}");
        }
        Model::new(&config, &weights).unwrap();
    }
}
