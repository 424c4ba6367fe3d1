//! Loading, checking, saving and filling weights.

mod support;

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_gemma4::{Config, Error, Mismatch, Model, Role, Weights, tensors};
use support::{checkpoint, difference, edited_config, fixture, values, variant};

type Tensors = HashMap<String, Tensor>;

fn base() -> (Config, Tensors) {
    let tensors = candle_core::safetensors::load(checkpoint().join("model.safetensors"), &Device::Cpu).unwrap();
    (Config::from_folder(&checkpoint()).unwrap(), tensors)
}

fn write(dir: &Path, name: &str, tensors: &Tensors) {
    candle_core::safetensors::save(tensors, dir.join(name)).unwrap();
}

fn load(dir: &Path, config: &Config) -> candle_gemma4::Result<Weights> {
    Weights::load(dir, config, DType::F32, &Device::Cpu)
}

/// Loads a folder with just these tensors, which must not fit.
fn mismatch(config: &Config, tensors: &Tensors) -> (Mismatch, String) {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "model.safetensors", tensors);
    let error = load(dir.path(), config).unwrap_err();
    let message = error.to_string();
    match error {
        Error::Mismatch { mismatch, .. } => (*mismatch, message),
        other => panic!("{other}"),
    }
}

fn assert_equal(a: &Weights, b: &Weights) {
    assert_eq!(a.variables().keys().collect::<Vec<_>>(), b.variables().keys().collect::<Vec<_>>());
    assert_eq!(a.buffers().keys().collect::<Vec<_>>(), b.buffers().keys().collect::<Vec<_>>());
    for (name, var) in a.variables() {
        assert_eq!(values(var), values(&b.variables()[name]), "{name}");
    }
    for (name, buffer) in a.buffers() {
        assert_eq!(values(buffer), values(&b.buffers()[name]), "{name}");
    }
}

#[test]
fn the_table_of_names_is_that_of_the_checkpoint() {
    let (config, tensors_on_disk) = base();
    let mut expected: Vec<_> = tensors(&config).into_iter().map(|spec| (spec.name, spec.shape)).collect();
    expected.sort();
    let mut found: Vec<_> = tensors_on_disk.iter().map(|(name, x)| (name.clone(), x.dims().to_vec())).collect();
    found.sort();
    assert_eq!(expected, found);
    let weights = load(&checkpoint(), &config).unwrap();
    let buffers = weights.buffers().keys().filter(|name| !name.ends_with("layer_scalar"));
    assert_eq!(buffers.collect::<Vec<_>>(), ["model.vision_tower.std_bias", "model.vision_tower.std_scale"]);
    assert_eq!(weights.buffers().len(), 8);
    assert_eq!(weights.variables().len() + weights.buffers().len(), found.len());
}

#[test]
fn all_differences_are_reported_at_once() {
    let (config, mut tensors) = base();
    for layer in 0..6 {
        tensors.remove(&format!("model.language_model.layers.{layer}.self_attn.q_proj.weight")).unwrap();
    }
    tensors.insert("model.audio_tower.weight".into(), Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap());
    let norm = "model.language_model.norm.weight";
    tensors.insert(norm.into(), Tensor::zeros(31, DType::F32, &Device::Cpu).unwrap());
    let (mismatch, message) = mismatch(&config, &tensors);
    assert_eq!((mismatch.missing.len(), mismatch.unexpected.len(), mismatch.misshaped.len()), (6, 1, 1));
    assert_eq!(
        (mismatch.misshaped[0].found.as_slice(), mismatch.misshaped[0].expected.as_slice()),
        (&[31][..], &[32][..])
    );
    assert!(message.contains("; 6 missing: model.language_model.layers.0.self_attn.q_proj.weight, "), "{message}");
    assert!(message.contains("layers.4.self_attn.q_proj.weight, ..."), "{message}");
    assert!(!message.contains("layers.5.self_attn.q_proj"), "only five are shown: {message}");
    assert!(message.contains("; 1 unexpected: model.audio_tower.weight;"), "{message}");
    assert!(message.ends_with(&format!("; 1 with a wrong shape: {norm} ([31], config.json gives [32])")), "{message}");
}

#[test]
fn the_head_is_in_the_file_exactly_if_it_is_untied() {
    let (tied, mut tensors) = base();
    let untied = edited_config(&[("tie_word_embeddings", "false")]);
    assert_eq!(mismatch(&untied, &tensors).0.missing, ["lm_head.weight"]);
    let head = (&tensors["model.language_model.embed_tokens.weight"] * 2.0).unwrap();
    tensors.insert("lm_head.weight".into(), head.clone());
    assert_eq!(mismatch(&tied, &tensors).0.unexpected, ["lm_head.weight"]);
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "model.safetensors", &tensors);
    let weights = load(dir.path(), &untied).unwrap();
    let model = Model::new(&untied, &weights).unwrap();
    assert_eq!(difference(model.head_vh(), &head), 0.0);
}

#[test]
fn a_broken_file_is_a_typed_error() {
    let (config, _) = base();
    let whole = std::fs::read(checkpoint().join("model.safetensors")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let header_end = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let kept = [(whole.len() - 1, whole.len()), (whole.len() / 2, whole.len()), (100, header_end), (8, header_end)];
    for (keep, expected) in kept.into_iter().chain([(3, 8), (0, 8)]) {
        std::fs::write(&path, &whole[..keep]).unwrap();
        let error = load(dir.path(), &config).unwrap_err();
        assert!(matches!(error, Error::WeightFiles { files: 1, .. }), "{keep} bytes: {error}");
        let message = error.to_string();
        assert!(message.contains("model.safetensors is cut short ("), "{message}");
        assert!(message.contains(&expected.to_string()) && message.contains(&format!("{keep} ")), "{message}");
    }
    std::fs::write(&path, [whole.as_slice(), &[0]].concat()).unwrap();
    let message = load(dir.path(), &config).unwrap_err().to_string();
    let lengths = format!("is too long ({} bytes expected by its header, {} found)", whole.len(), whole.len() + 1);
    assert!(message.contains(&lengths), "{message}");
    for content in ["version https://git-lfs.github.com/spec/v1\n", "\x02\0\0\0\0\0\0\0no"] {
        std::fs::write(&path, content).unwrap();
        let error = load(dir.path(), &config).unwrap_err();
        assert!(matches!(error, Error::WeightFile { .. }), "{error}");
        assert!(error.to_string().contains("model.safetensors: not a usable safetensors file"), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
    let message = load(dir.path(), &config).unwrap_err().to_string();
    assert!(message.contains("neither model.safetensors nor model.safetensors.index.json"), "{message}");
}

/// Two files, cut in the middle of the names, and their index.
fn write_shards(dir: &Path, tensors: &Tensors) -> serde_json::Value {
    let mut names: Vec<&String> = tensors.keys().collect();
    names.sort();
    let mut map = serde_json::Map::new();
    for (number, part) in names.chunks(names.len().div_ceil(2)).enumerate() {
        let file = format!("model-{number}.safetensors");
        let part: Tensors = part.iter().map(|&name| (name.clone(), tensors[name].clone())).collect();
        write(dir, &file, &part);
        map.extend(part.keys().map(|name| (name.clone(), file.clone().into())));
    }
    let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    write_index(dir, &index);
    index
}

fn write_index(dir: &Path, index: &serde_json::Value) {
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn several_files_behind_an_index_are_one_checkpoint() {
    let (config, tensors) = base();
    let dir = tempfile::tempdir().unwrap();
    write_shards(dir.path(), &tensors);
    assert_equal(&load(dir.path(), &config).unwrap(), &load(&checkpoint(), &config).unwrap());
}

#[test]
fn an_index_that_lies_is_refused() {
    let (config, tensors) = base();
    let dir = tempfile::tempdir().unwrap();
    let good = write_shards(dir.path(), &tensors);
    let refusal = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut index = good.clone();
        change(&mut index["weight_map"]);
        write_index(dir.path(), &index);
        load(dir.path(), &config).unwrap_err().to_string()
    };
    let absent = refusal(&|map| map["ghost.weight"] = "model-0.safetensors".into());
    assert!(absent.ends_with("tensor ghost.weight should be in model-0.safetensors but is not"), "{absent}");
    let outside = refusal(&|map| map["ghost.weight"] = "../model-0.safetensors".into());
    assert!(outside.contains("\"../model-0.safetensors\" is not the name of a file in the same folder"), "{outside}");
    let no_file = refusal(&|map| map["ghost.weight"] = "model-7.safetensors".into());
    assert!(no_file.contains("model-7.safetensors is absent (1 tensor(s) should be in it)"), "{no_file}");
    std::fs::copy(dir.path().join("model-0.safetensors"), dir.path().join("model-2.safetensors")).unwrap();
    let double = refusal(&|map| map["ghost.weight"] = "model-2.safetensors".into());
    assert!(double.contains("is both in model-0.safetensors and in model-2.safetensors"), "{double}");
}

#[test]
fn every_floating_point_type_is_converted_and_others_are_refused() {
    let (config, tensors) = base();
    let dir = tempfile::tempdir().unwrap();
    let name = "model.language_model.norm.weight";
    for dtype in [DType::BF16, DType::F16, DType::F64] {
        let converted = tensors.iter().map(|(name, x)| (name.clone(), x.to_dtype(dtype).unwrap())).collect();
        write(dir.path(), "model.safetensors", &converted);
        for target in [DType::F32, DType::BF16] {
            let weights = Weights::load(dir.path(), &config, target, &Device::Cpu).unwrap();
            let expected = converted[name].to_dtype(target).unwrap();
            assert_eq!(weights.variables()[name].dtype(), target);
            assert_eq!(values(&weights.variables()[name]), values(&expected), "{dtype:?} to {target:?}");
        }
    }
    let mut whole_numbers = tensors.clone();
    whole_numbers.insert(name.into(), tensors[name].to_dtype(DType::I64).unwrap());
    write(dir.path(), "model.safetensors", &whole_numbers);
    let message = load(dir.path(), &config).unwrap_err().to_string();
    assert!(message.ends_with(&format!("tensor {name} has type I64; allowed: BF16, F16, F32, F64")), "{message}");
    let error = Weights::load(dir.path(), &config, DType::U32, &Device::Cpu).unwrap_err();
    assert!(matches!(error, Error::TrainingType { dtype: DType::U32 }));
}

#[test]
fn saved_weights_load_bit_for_bit() {
    let (config, _) = base();
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let weights = Weights::load(&checkpoint(), &config, dtype, &Device::Cpu).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("made/by/save");
        weights.save(&folder, &config).unwrap();
        weights.save(&folder, &config).unwrap(); // over an older one
        let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        files.sort();
        assert_eq!(files, ["config.json", "model.safetensors"], "nothing else is left behind");
        let config_again = Config::from_folder(&folder).unwrap();
        assert_eq!(config_again.text, config.text);
        // A folder in another type says so; else the text is the one that was read.
        assert_eq!(config_again == config, dtype == DType::F32);
        assert_equal(&Weights::load(&folder, &config_again, dtype, &Device::Cpu).unwrap(), &weights);
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    }
}

#[test]
fn saving_where_no_folder_can_be_is_a_typed_error() {
    let (config, _) = base();
    let weights = load(&checkpoint(), &config).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    assert!(matches!(weights.save(&file, &config), Err(Error::Io { action: "create", .. })));
}

#[test]
fn both_config_spellings_give_the_same_model() {
    let (config, _) = base();
    let resaved = std::fs::read_to_string(fixture("gemma4-dense/config_resaved.json")).unwrap();
    let resaved = Config::from_json(&resaved).unwrap();
    assert_eq!(tensors(&resaved), tensors(&config));
    let case = support::Case::load(&fixture("gemma4-dense/goldens/case2_images.safetensors"));
    let logits = |config: &Config| support::run(config, &load(&checkpoint(), config).unwrap(), &case).logits;
    assert_eq!(values(&logits(&resaved)), values(&logits(&config)));
}

#[test]
fn text_only_checkpoints_keep_their_names() {
    let folder = variant("text_only");
    let config = Config::from_folder(&folder).unwrap();
    let names = |dir: &Path| {
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let mut names = safetensors::SafeTensors::read_metadata(&bytes).unwrap().1.offset_keys();
        names.sort();
        names
    };
    let written = names(&folder);
    assert!(written.contains(&"model.layers.2.self_attn.q_norm.weight".to_string()));
    let loaded = load(&folder, &config).unwrap();
    let random = Weights::random(&config, DType::F32, &Device::Cpu, 2).unwrap();
    for weights in [&loaded, &random] {
        let dir = tempfile::tempdir().unwrap();
        weights.save(dir.path(), &config).unwrap();
        assert_eq!(names(dir.path()), written);
        let again = Config::from_folder(dir.path()).unwrap();
        assert_eq!(again, config);
        assert_equal(&load(dir.path(), &again).unwrap(), weights);
        Model::new(&again, weights).unwrap();
    }
    let untied = config.to_json().replace("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    let untied = Config::from_json(&untied).unwrap();
    let mut expected = written.clone();
    expected.insert(0, "lm_head.weight".to_string());
    let weights = Weights::random(&untied, DType::F32, &Device::Cpu, 2).unwrap();
    let mut found: Vec<String> = weights.variables().keys().chain(weights.buffers().keys()).cloned().collect();
    found.sort();
    assert_eq!(found, expected);
    let head = weights.variables()["lm_head.weight"].as_tensor();
    assert_eq!(difference(Model::new(&untied, &weights).unwrap().head_vh(), head), 0.0);
}

#[test]
fn fresh_weights_depend_on_the_seed_only() {
    let (config, _) = base();
    let random = |seed| Weights::random(&config, DType::F32, &Device::Cpu, seed).unwrap();
    assert_equal(&random(3), &random(3));
    let name = "model.language_model.layers.0.mlp.up_proj.weight";
    assert_ne!(values(&random(3).variables()[name]), values(&random(4).variables()[name]));
    let deeper = edited_config(&[("vision_config.num_hidden_layers", "3"), ("vision_config.hidden_size", "28")]);
    let deeper = Weights::random(&deeper, DType::F32, &Device::Cpu, 3).unwrap();
    assert_eq!(values(&random(3).variables()[name]), values(&deeper.variables()[name]));
}

#[test]
fn fresh_weights_have_the_documented_spread() {
    let config = edited_config(&[("vision_config.initializer_range", "0.5")]);
    let weights = Weights::random(&config, DType::F64, &Device::Cpu, 11).unwrap();
    for spec in tensors(&config) {
        let found = match spec.is_trained() {
            true => values(&weights.variables()[&spec.name]),
            false => values(&weights.buffers()[&spec.name]),
        };
        let root_mean_square = (found.iter().map(|v| v * v).sum::<f64>() / found.len() as f64).sqrt();
        match spec.role {
            Role::Matrix { fan_in, .. } => {
                let expected = match spec.name.contains("vision_tower") || spec.name.contains("embed_vision") {
                    true => 0.5,
                    false => (fan_in as f64).powf(-0.5),
                };
                let ratio = root_mean_square / expected;
                assert!((ratio - 1.0).abs() < 4.0 / (found.len() as f64).sqrt(), "{}: {ratio}", spec.name);
            }
            Role::HeadNorm => assert!(found.iter().all(|&v| v == (found.len() as f64).powf(-0.25))),
            Role::Norm => assert!(found.iter().all(|&v| v == 1.0), "{}", spec.name),
            Role::Bias => assert!(found.iter().all(|&v| v == 0.0), "{}", spec.name),
            Role::Buffer { .. } => {
                let neutral = if spec.name.ends_with("std_bias") { 0.0 } else { 1.0 };
                assert!(found.iter().all(|&v| v == neutral), "{}", spec.name);
            }
            Role::LogUniform { .. } | Role::Unused => unreachable!("this model has none"),
        }
    }
}

#[test]
fn weights_of_another_configuration_are_refused() {
    let (config, _) = base();
    let other = edited_config(&[("text_config.intermediate_size", "48")]);
    let weights = Weights::random(&other, DType::F32, &Device::Cpu, 0).unwrap();
    let message = Model::new(&config, &weights).unwrap_err().to_string();
    assert!(message.contains("layers.0.mlp.gate_proj.weight: shape [48, 32] found, [64, 32] needed"), "{message}");
    let text_only = edited_config(&[("vision_config", "null")]);
    let weights = Weights::random(&text_only, DType::F32, &Device::Cpu, 0).unwrap();
    let message = Model::new(&config, &weights).unwrap_err().to_string();
    assert!(message.contains("model.vision_tower") && message.ends_with("it is missing"), "{message}");
}
