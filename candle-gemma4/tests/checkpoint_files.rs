//! Checkpoint folders that are broken or unusual, and saving over them.

mod support;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_gemma4::{Config, Error, FileFault, LoadOptions, Notice, Part, SaveOptions, Weights};
use safetensors::{Dtype, SafeTensors};
use support::{checkpoint, fixture, run, values};

const INDEX: &str = "model.safetensors.index.json";

type Tensors = HashMap<String, Tensor>;

fn config() -> Config {
    Config::from_folder(&checkpoint()).unwrap()
}

fn load(dir: &Path) -> candle_gemma4::Result<Weights> {
    Weights::load(dir, &config(), DType::F32, &Device::Cpu)
}

fn on_disk() -> Tensors {
    candle_core::safetensors::load(checkpoint().join("model.safetensors"), &Device::Cpu).unwrap()
}

/// A folder with one file of these tensors.
fn folder(tensors: &Tensors) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(tensors, dir.path().join("model.safetensors")).unwrap();
    dir
}

/// The tiny checkpoint saved in several files.
fn sharded(max_shard_bytes: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let options = SaveOptions::new().max_shard_bytes(max_shard_bytes);
    load(&checkpoint()).unwrap().save_with(dir.path(), &config(), &options).unwrap();
    dir
}

fn names(dir: &Path) -> BTreeSet<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

fn shards(dir: &Path) -> Vec<String> {
    names(dir).into_iter().filter(|name| name.ends_with(".safetensors")).collect()
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Type and bytes of every tensor in all files of a folder.
fn raw(dir: &Path) -> BTreeMap<String, (Dtype, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for name in shards(dir) {
        let bytes = std::fs::read(dir.join(name)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        all.extend(file.iter().map(|(name, x)| (name.to_string(), (x.dtype(), x.data().to_vec()))));
    }
    all
}

fn all_values(weights: &Weights) -> BTreeMap<String, Vec<f64>> {
    let variables = weights.variables().iter().map(|(name, var)| (name, var.as_tensor()));
    let constants = weights.buffers().iter().chain(weights.frozen());
    variables.chain(constants).map(|(name, x)| (name.clone(), values(x))).collect()
}

fn faults(error: Error) -> Vec<FileFault> {
    match error {
        Error::WeightFiles { faults, .. } => faults,
        other => panic!("{other}"),
    }
}

#[test]
fn absent_shards_are_named() {
    let toy = load(&fixture("weights/missing-shard")).unwrap_err();
    let message = toy.to_string();
    assert!(message.contains(INDEX), "{message}");
    let text = "1 of 2 weight file(s) cannot be used: model-00002-of-00002.safetensors is absent (2 tensor(s)";
    assert!(message.contains(text), "{message}");

    let dir = sharded(80_000);
    let shards = shards(dir.path());
    assert!(shards.len() > 3, "{shards:?}");
    let index = json(&dir.path().join(INDEX));
    let count = |name: &String| index["weight_map"].as_object().unwrap().values().filter(|file| *file == name).count();
    for name in &shards[1..3] {
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    let absent = |name: &String| FileFault::Absent { file: name.clone(), tensors: count(name) };
    assert_eq!(faults(load(dir.path()).unwrap_err()), [absent(&shards[1]), absent(&shards[2])]);
}

#[test]
fn short_shards_are_named_with_their_lengths() {
    let path = fixture("weights/short-shard");
    let found = std::fs::metadata(path.join("model-00002-of-00002.safetensors")).unwrap().len();
    let file = "model-00002-of-00002.safetensors".to_string();
    assert_eq!(faults(load(&path).unwrap_err()), [FileFault::Length { file, expected: found + 100, found }]);

    let dir = sharded(80_000);
    let mut expected = Vec::new();
    for (file, keep) in shards(dir.path()).into_iter().zip([5_000, 100]) {
        let path = dir.path().join(&file);
        let bytes = std::fs::read(&path).unwrap();
        let header_end = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap());
        std::fs::write(&path, &bytes[..keep]).unwrap();
        let found = keep as u64;
        expected.push(match found < header_end {
            true => FileFault::CutHeader { file, expected: header_end, found },
            false => FileFault::Length { file, expected: bytes.len() as u64, found },
        });
    }
    assert!(matches!(expected[..], [FileFault::Length { .. }, FileFault::CutHeader { .. }]));
    // Other mistakes of the folder do not hide it.
    std::fs::remove_file(dir.path().join(shards(dir.path()).last().unwrap())).unwrap();
    let found = faults(load(dir.path()).unwrap_err());
    assert_eq!(found[..2], expected[..]);
    assert!(matches!(found[2..], [FileFault::Absent { .. }]));
}

#[test]
fn a_file_of_any_bytes_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    for bytes in [&[][..], &[0xff; 7], &[0xff; 8], &[0xff; 500], &[0; 64], b"<html>an error page</html>"] {
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let error = load(dir.path()).unwrap_err();
        assert!(matches!(error, Error::WeightFile { .. } | Error::WeightFiles { .. }), "{bytes:?}: {error}");
    }
}

#[test]
fn the_index_decides_and_a_stray_file_is_told_once() {
    let dir = sharded(200_000);
    let zeros: Tensors = on_disk().into_iter().map(|(name, x)| (name, x.zeros_like().unwrap())).collect();
    let stray = dir.path().join("model.safetensors");
    candle_core::safetensors::save(&zeros, &stray).unwrap();
    let weights = load(dir.path()).unwrap();
    let original = load(&checkpoint()).unwrap();
    assert_eq!(all_values(&weights), all_values(&original));
    let index = dir.path().join(INDEX);
    assert_eq!(weights.notices(), [Notice::StrayFile { file: stray.clone(), index: index.clone() }]);
    assert!(weights.notices()[0].to_string().contains("model.safetensors was not read: "));
    assert!(original.notices().is_empty());
    // Not even a file that cannot be read matters.
    std::fs::write(&stray, "garbage").unwrap();
    assert_eq!(all_values(&load(dir.path()).unwrap()), all_values(&original));
    // An index of one file, which has the usual name.
    let single = folder(&on_disk());
    let map: BTreeMap<String, &str> = on_disk().into_keys().map(|name| (name, "model.safetensors")).collect();
    std::fs::write(single.path().join(INDEX), serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    assert!(load(single.path()).unwrap().notices().is_empty());
}

#[test]
fn names_with_another_beginning_are_told_apart_from_missing_ones() {
    let count = on_disk().len();
    let renamed = |rename: &dyn Fn(&str) -> String| {
        let tensors = on_disk().into_iter().map(|(name, x)| (rename(&name), x)).collect();
        load(folder(&tensors).path()).unwrap_err().to_string()
    };
    let wrapped = renamed(&|name| format!("base_model.{name}"));
    let text = format!("names begin with \"base_model.\" where \"\" is expected ({count} would fit)");
    assert!(wrapped.contains(&text), "{wrapped}");
    let first = "model.embed_vision.embedding_projection.weight, model.language_model.embed_tokens.weight, ";
    assert!(wrapped.contains(&format!("; {count} missing: {first}")), "{wrapped}");
    assert!(wrapped.contains(&format!("; {count} unexpected: base_model.{}", &first[..40])), "{wrapped}");

    let old = renamed(&|name| name.replace("model.language_model.", "language_model.model."));
    let text = "names begin with \"language_model.model.\" where \"model.language_model.\" is expected (";
    assert!(old.contains(text), "{old}");

    let one = renamed(&|name| name.replace("layers.3.self_attn.q_norm", "layers.3.self_attn.query_norm"));
    let text = "; 1 missing: model.language_model.layers.3.self_attn.q_norm.weight (nearest name in the checkpoint: \
                model.language_model.layers.3.self_attn.query_norm.weight); 1 unexpected: ";
    assert!(one.contains(text), "{one}");
    assert!(!one.contains("names begin"), "{one}");
}

#[test]
fn shards_hold_the_same_bits_and_say_what_transformers_wants_to_know() {
    let limit = 80_000;
    let dir = sharded(limit);
    let original = load(&checkpoint()).unwrap();
    assert_eq!(all_values(&load(dir.path()).unwrap()), all_values(&original));
    assert_eq!(raw(dir.path()), raw(&checkpoint()));

    let files = shards(dir.path());
    let expected: Vec<String> =
        (1..=files.len()).map(|n| format!("model-{n:05}-of-{:05}.safetensors", files.len())).collect();
    assert_eq!(files, expected);
    let index = json(&dir.path().join(INDEX));
    let total: usize = raw(dir.path()).values().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    let mut listed = 0;
    for name in &files {
        let bytes = std::fs::read(dir.path().join(name)).unwrap();
        let (header_len, header) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
        let size = bytes.len() - 8 - header_len;
        assert!(size as u64 <= limit, "{name}: {size}");
        for tensor in header.offset_keys() {
            assert_eq!(index["weight_map"][&tensor], name.as_str());
            listed += 1;
        }
    }
    assert_eq!(index["weight_map"].as_object().unwrap().len(), listed);
    // A tensor over the limit gets a file of its own.
    let lonely = sharded(1);
    assert_eq!(shards(lonely.path()).len(), on_disk().len());
    assert_eq!(all_values(&load(lonely.path()).unwrap()), all_values(&original));
}

#[test]
fn nothing_of_an_earlier_save_is_left() {
    let dir = sharded(80_000);
    let many = shards(dir.path()).len();
    let others = ["adapter_model.safetensors", "model-notes.txt", "tokenizer.json"];
    for name in others {
        std::fs::write(dir.path().join(name), "x").unwrap();
    }
    std::fs::write(dir.path().join("model.safetensors"), "stray").unwrap();
    let weights = load(dir.path()).unwrap();
    for limit in [200_000, u64::MAX, 80_000, 200_000, 200_000] {
        // Values differ from save to save, so that a file that survives would show.
        let name = "model.language_model.norm.weight";
        let changed = (weights.variables()[name].as_tensor() * 1.5).unwrap();
        weights.variables()[name].set(&changed).unwrap();
        weights.save_with(dir.path(), &config(), &SaveOptions::new().max_shard_bytes(limit)).unwrap();
        let again = load(dir.path()).unwrap();
        assert_eq!(all_values(&again), all_values(&weights), "{limit}");
        assert!(again.notices().is_empty(), "{:?}", again.notices());
        let mut left = names(dir.path());
        for name in others.into_iter().chain(["config.json"]) {
            assert!(left.remove(name), "{name}");
        }
        match limit {
            u64::MAX => assert_eq!(left, BTreeSet::from(["model.safetensors".to_string()])),
            _ => {
                assert!(left.remove(INDEX));
                let files = json(&dir.path().join(INDEX));
                let files = files["weight_map"].as_object().unwrap().values();
                assert_eq!(left, files.map(|file| file.as_str().unwrap().to_string()).collect());
                assert_eq!(left.len() == many, limit == 80_000);
            }
        }
    }
}

#[test]
fn a_save_that_fails_leaves_the_old_checkpoint() {
    let dir = sharded(80_000);
    let before = raw(dir.path());
    let listed = names(dir.path());
    let blocked =
        dir.path().join(".model-00002-of-00003.safetensors.{}.tmp".replace("{}", &std::process::id().to_string()));
    std::fs::create_dir(&blocked).unwrap();
    let weights = load(dir.path()).unwrap();
    let error = weights.save_with(dir.path(), &config(), &SaveOptions::new().max_shard_bytes(200_000)).unwrap_err();
    assert!(matches!(error, Error::Io { action: "write", .. }), "{error}");
    std::fs::remove_dir(&blocked).unwrap();
    assert_eq!(names(dir.path()), listed);
    assert_eq!(raw(dir.path()), before);
}

#[test]
fn a_save_that_stops_between_files_never_leaves_a_mixture() {
    let weights = load(&checkpoint()).unwrap();
    for (limit, same_names) in [(80_000, true), (200_000, false)] {
        let dir = sharded(80_000);
        let before = all_values(&load(dir.path()).unwrap());
        // Nothing can be moved to where a folder is; the files before it have been moved then.
        let last = shards(sharded(limit).path()).pop().unwrap();
        let blocked = dir.path().join(&last);
        let _ = std::fs::remove_file(&blocked);
        std::fs::create_dir_all(blocked.join("in the way")).unwrap();
        let halved = |x: &candle_core::Var| x.set(&(x.as_tensor() * 0.5).unwrap()).unwrap();
        weights.variables().values().for_each(halved);
        let options = SaveOptions::new().max_shard_bytes(limit);
        assert!(weights.save_with(dir.path(), &config(), &options).is_err());
        assert!(shards(dir.path()).contains(&last.replacen(&last[6..11], "00001", 1)), "the first file was moved");
        match same_names {
            true => assert!(load(dir.path()).unwrap_err().to_string().contains("neither model.safetensors nor")),
            false => assert_eq!(all_values(&load(dir.path()).unwrap()), before),
        }
    }
}

#[test]
fn a_frozen_tower_gets_no_gradient_and_is_written_back_byte_for_byte() {
    let mixed: Tensors = on_disk()
        .into_iter()
        .map(|(name, x)| {
            let dtype = match Part::of(&name) {
                Part::Vision => DType::BF16,
                _ => DType::F32,
            };
            (name, x.to_dtype(dtype).unwrap())
        })
        .collect();
    let dir = folder(&mixed);
    let case = support::Case::load(&fixture("gemma4-dense/goldens/case2_images.safetensors"));
    let trained = load(dir.path()).unwrap();
    let options = LoadOptions::new().freeze([Part::Vision]);
    let frozen = Weights::load_with(dir.path(), &config(), DType::F32, &Device::Cpu, &options).unwrap();
    assert_eq!(all_values(&frozen), all_values(&trained));
    assert!(frozen.frozen().contains_key("model.embed_vision.embedding_projection.weight"));
    assert!(frozen.variables().keys().all(|name| Part::of(name) == Part::Text));
    assert!(frozen.frozen().values().all(|x| !x.is_variable()));

    let (full, partial) = (run(&config(), &trained, &case), run(&config(), &frozen, &case));
    assert_eq!(values(&full.logits), values(&partial.logits));
    assert!(full.gradients.keys().any(|name| Part::of(name) == Part::Vision));
    assert_eq!(partial.gradients.keys().collect::<Vec<_>>(), frozen.variables().keys().collect::<Vec<_>>());
    for (name, gradient) in &partial.gradients {
        assert_eq!(values(gradient), values(&full.gradients[name]), "{name}");
    }

    for variable in frozen.variables().values() {
        variable.set(&(variable.as_tensor() * 1.25).unwrap()).unwrap();
    }
    let (before, out) = (raw(dir.path()), tempfile::tempdir().unwrap());
    for options in [SaveOptions::new(), SaveOptions::new().dtype(DType::F16).max_shard_bytes(100_000)] {
        frozen.save_with(out.path(), &config(), &options).unwrap();
        let after = raw(out.path());
        assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
        for (name, (dtype, bytes)) in &after {
            let same = (*dtype, bytes) == (before[name].0, &before[name].1);
            assert_eq!(same, !frozen.variables().contains_key(name), "{name}");
        }
    }
}

#[test]
fn trained_tensors_are_saved_in_the_type_asked_for_and_the_configuration_names_it() {
    let weights = load(&checkpoint()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    weights.save_with(dir.path(), &config(), &SaveOptions::new().dtype(DType::BF16)).unwrap();
    let saved = raw(dir.path());
    for (name, variable) in weights.variables() {
        assert_eq!(saved[name].0, Dtype::BF16, "{name}");
        let rounded = variable.to_dtype(DType::BF16).unwrap();
        let again = load(dir.path()).unwrap();
        assert_eq!(values(&again.variables()[name]), values(&rounded), "{name}");
    }
    for name in weights.buffers().keys() {
        assert_eq!(saved[name], raw(&checkpoint())[name], "{name}");
    }
    let written = json(&dir.path().join("config.json"));
    for part in [&written, &written["text_config"], &written["vision_config"]] {
        assert_eq!(part["dtype"], "bfloat16");
    }
    let mut expected = json(&checkpoint().join("config.json"));
    expected["dtype"] = "bfloat16".into();
    expected["text_config"]["dtype"] = "bfloat16".into();
    expected["vision_config"]["dtype"] = "bfloat16".into();
    assert_eq!(written, expected, "nothing else changes");
    let error = weights.save_with(dir.path(), &config(), &SaveOptions::new().dtype(DType::U8)).unwrap_err();
    assert!(matches!(error, Error::TrainingType { dtype: DType::U8 }));
}

#[test]
fn parts_are_told_by_names() {
    for (name, part) in [
        ("lm_head.weight", Part::Text),
        ("model.layers.0.mlp.up_proj.weight", Part::Text),
        ("model.language_model.embed_tokens_per_layer.weight", Part::Text),
        ("model.vision_tower.std_bias", Part::Vision),
        ("model.embed_vision.embedding_projection.weight", Part::Vision),
        ("model.vision_embedder.pos_embedding", Part::Vision),
        ("model.audio_tower.output_proj.bias", Part::Audio),
        ("model.embed_audio.embedding_projection.weight", Part::Audio),
    ] {
        assert_eq!(Part::of(name), part, "{name}");
    }
}
