//! Folders of adapters, as PEFT writes and reads them, and models with adapters worked in.

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device};
use candle_gemma4::{Config, Error, LoraOptions, Model, Part, Recompute, SaveOptions, Weights};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use support::adapters::{Golden, frozen, pass};
use support::{difference, largest, values};

const TENSORS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// Type, shape and bytes of every tensor in a file.
type Raw = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn raw(path: &Path) -> Raw {
    let bytes = std::fs::read(path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt", "{}", path.display());
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter().map(|(name, x)| (name.to_string(), (x.dtype(), x.shape().to_vec(), x.data().to_vec()))).collect()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn dense() -> Golden {
    Golden::of_fixture("dense", &["case2_images"])
}

#[test]
fn what_peft_wrote_is_written_again() {
    for golden in Golden::all() {
        let (config, mut weights) = (golden.config(), golden.bare(DType::F32));
        let report = weights.load_lora(&golden.adapter(), &config).unwrap();
        let expected = raw(&golden.adapter().join(TENSORS));
        assert_eq!(2 * report.modules, expected.len(), "{}", golden.name);
        let (dir, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        weights.save_adapter(dir.path(), "org/name").unwrap();
        assert_eq!(raw(&dir.path().join(TENSORS)), expected, "{}", golden.name);

        let (found, peft) = (read_json(&dir.path().join(CONFIG)), read_json(&golden.adapter().join(CONFIG)));
        assert_eq!(found["base_model_name_or_path"], "org/name");
        for field in ["r", "lora_alpha", "lora_dropout", "peft_type", "bias", "use_dora", "use_rslora"] {
            // Without a point where PEFT has none.
            assert_eq!(found[field], peft[field], "{}: {field}", golden.name);
        }
        // Full paths, one per module.
        let paths = found["target_modules"].as_array().unwrap();
        assert_eq!(paths.len(), report.modules);
        assert!(
            paths.iter().all(
                |path| expected.contains_key(&format!("base_model.model.{}.lora_A.weight", path.as_str().unwrap()))
            )
        );
        let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "nothing else is left: {names:?}");

        let mut reloaded = golden.bare(DType::F32);
        let report_again = reloaded.load_lora(dir.path(), &config).unwrap();
        assert_eq!((report_again.modules, report_again.parameters), (report.modules, report.parameters));
        reloaded.save_adapter(again.path(), "org/name").unwrap();
        for file in [TENSORS, CONFIG] {
            let bytes = |dir: &Path| std::fs::read(dir.join(file)).unwrap();
            assert!(bytes(dir.path()) == bytes(again.path()), "{}: {file}", golden.name);
        }
    }
}

#[test]
fn a_merged_model_gives_the_same_logits_and_keeps_other_tensors() {
    for golden in Golden::all() {
        let (config, weights) = (golden.config(), golden.weights(DType::F32));
        let dir = tempfile::tempdir().unwrap();
        weights.save_merged(dir.path(), &config, &SaveOptions::new()).unwrap();
        let merged = frozen(dir.path(), DType::F32);
        for (case, path) in &golden.cases {
            let run = |weights| pass(&config, weights, path, 1, Recompute::off).logits;
            let (with, folded, bare) = (run(&weights), run(&merged), run(&golden.bare(DType::F32)));
            let (off, effect) = (difference(&with, &folded), difference(&with, &bare));
            assert!(off < 1e-4 && effect > 100.0 * off, "{}, {case}: {off:e} of {effect:e}", golden.name);
        }
        let (before, after) = (raw(&golden.base.join("model.safetensors")), raw(&dir.path().join("model.safetensors")));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
        let changed = before.iter().filter(|(name, tensor)| after[*name] != **tensor).count();
        assert_eq!(2 * changed, weights.variables().len(), "{}", golden.name);
        assert_eq!(read_json(&dir.path().join("config.json")), read_json(&golden.base.join("config.json")));
    }
}

/// Merged in f32 from the numbers in the file, rounded once.
#[test]
fn a_merged_model_has_the_type_of_its_files() {
    let golden = dense();
    let config = golden.config();
    let base = tempfile::tempdir().unwrap();
    let short = SaveOptions::new().dtype(DType::BF16);
    let whole = Weights::load(&golden.base, &config, DType::F32, &Device::Cpu).unwrap();
    whole.save_with(base.path(), &config, &short).unwrap();
    let name = "model.language_model.layers.1.mlp.down_proj";
    let matrix = |dir: &Path| {
        let tensors = candle_core::safetensors::load(dir.join("model.safetensors"), &Device::Cpu).unwrap();
        tensors[&format!("{name}.weight")].clone()
    };
    let plain = SaveOptions::new;
    for (base, loaded, options, expected) in [
        (base.path(), DType::F32, plain(), DType::BF16),
        (base.path(), DType::BF16, plain(), DType::BF16),
        (base.path(), DType::BF16, plain().dtype(DType::F32), DType::F32),
        (&golden.base, DType::BF16, plain(), DType::F32),
    ] {
        let config = Config::from_folder(base).unwrap();
        let mut weights = frozen(base, loaded);
        weights.load_lora(&golden.adapter(), &config).unwrap();
        let dir = tempfile::tempdir().unwrap();
        weights.save_merged(dir.path(), &config, &options).unwrap();
        let adapter =
            |end: &str| weights.variables()[&format!("base_model.model.{name}.lora_{end}.weight")].as_tensor().clone();
        let added = (adapter("B").matmul(&adapter("A")).unwrap() * 3.0).unwrap();
        let exact = (matrix(base).to_dtype(DType::F32).unwrap() + added).unwrap();
        let found = matrix(dir.path());
        assert_eq!(found.dtype(), expected);
        assert_eq!(values(&found), values(&exact.to_dtype(expected).unwrap()));
        let text = if expected == DType::F32 { "float32" } else { "bfloat16" };
        assert_eq!(read_json(&dir.path().join("config.json"))["dtype"], text);
    }
}

/// Frozen only by the adapters: nothing is lost where there is no file to copy from.
#[test]
fn fresh_weights_are_merged_and_saved_whole() {
    let config = dense().config();
    let mut weights = Weights::random(&config, DType::F32, &Device::Cpu, 4).unwrap();
    let all = weights.variables().len() + weights.buffers().len();
    weights.add_lora(&config, &LoraOptions::new(2, 2.0), 4).unwrap();
    let dir = tempfile::tempdir().unwrap();
    weights.save_merged(dir.path(), &config, &SaveOptions::new().max_shard_bytes(100_000)).unwrap();
    let merged = Weights::load(dir.path(), &config, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(merged.variables().len() + merged.buffers().len(), all);
    for (name, tensor) in weights.frozen() {
        assert_eq!(values(tensor), values(&merged.variables()[name]), "{name}: B is zero");
    }
}

#[test]
fn each_way_to_save_is_asked_for_by_name() {
    let golden = dense();
    let (config, dir) = (golden.config(), tempfile::tempdir().unwrap());
    let attached = golden.weights(DType::F32).save(dir.path(), &config).unwrap_err().to_string();
    assert_eq!(
        attached,
        "these weights have LoRA adapters: use `save_adapter` for the adapters, `save_merged` for the whole model"
    );
    let absent = "these weights have no LoRA adapters; call `add_lora` or `load_lora` first";
    let bare = golden.bare(DType::F32);
    assert_eq!(bare.save_adapter(dir.path(), "x").unwrap_err().to_string(), absent);
    assert_eq!(bare.save_merged(dir.path(), &config, &SaveOptions::new()).unwrap_err().to_string(), absent);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = golden.weights(DType::F32).save_adapter(&file, "x").unwrap_err();
    assert!(matches!(error, Error::Io { action: "create", .. }), "{error}");
}

/// A folder with PEFT's adapters of the dense model and a changed configuration.
fn changed(change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let (dir, golden) = (tempfile::tempdir().unwrap(), dense());
    std::fs::copy(golden.adapter().join(TENSORS), dir.path().join(TENSORS)).unwrap();
    let mut json = read_json(&golden.adapter().join(CONFIG));
    change(&mut json);
    std::fs::write(dir.path().join(CONFIG), json.to_string()).unwrap();
    dir
}

fn load(dir: &Path) -> Result<Weights, Error> {
    let mut weights = dense().bare(DType::F32);
    weights.load_lora(dir, &dense().config()).map(|_| weights)
}

#[test]
fn what_is_not_supported_is_refused_by_field() {
    let plain = "not supported; only plain LoRA is";
    for (field, value, reason) in [
        ("peft_type", json!("IA3"), "must be \"LORA\""),
        ("peft_type", Value::Null, "must be \"LORA\""),
        ("r", json!(0), "must be a whole number from 1 on"),
        ("r", json!(2.5), "must be a whole number from 1 on"),
        ("lora_alpha", json!("8"), "must be a number"),
        ("lora_alpha", Value::Null, "must be a number"),
        ("lora_dropout", json!("0"), "must be a number"),
        ("bias", json!("all"), "trained biases are not supported, only \"none\""),
        ("init_lora_weights", json!("pissa"), "starts that change the base model are not supported"),
        ("target_modules", json!(["q_proj", 3]), "must be a list of names or a pattern"),
        ("target_modules", json!([]), "must be a list of names or a pattern"),
        ("use_dora", json!(true), plain),
        ("use_rslora", json!(true), plain),
        ("lora_bias", json!(true), plain),
        ("fan_in_fan_out", json!(true), plain),
        ("rank_pattern", json!({"q_proj": 4}), plain),
        ("alpha_pattern", json!({"q_proj": 4}), plain),
        ("modules_to_save", json!(["lm_head"]), plain),
        ("target_parameters", json!(["experts.down_proj"]), plain),
        ("trainable_token_indices", json!([1]), plain),
        ("loftq_config", json!({"loftq_bits": 4}), plain),
        ("layer_replication", json!([[0, 4]]), plain),
        ("something_new", json!(1), plain),
    ] {
        let dir = changed(|json| json[field] = value.clone());
        let message = load(dir.path()).unwrap_err().to_string();
        let start = format!("{}: {field} is {value}: {reason}", dir.path().join(CONFIG).display());
        assert!(message.starts_with(&start), "{message}\n{start}");
    }
    let dir = changed(|json| drop(json.as_object_mut().unwrap().remove("r")));
    assert!(load(dir.path()).unwrap_err().to_string().contains("r is absent: must be"));
    let dir = changed(|json| json["lora_dropout"] = json!(1.5));
    assert!(load(dir.path()).unwrap_err().to_string().contains("LoRA dropout is 1.5"));
    let dir = changed(|json| json["something_new"] = json!({}));
    assert!(load(dir.path()).is_ok(), "says that it is not used");
}

#[test]
fn targets_and_tensors_must_agree() {
    let dir = changed(|json| {
        json["target_modules"].as_array_mut().unwrap().retain(|name| !name.as_str().unwrap().ends_with("up_proj"))
    });
    let message = load(dir.path()).unwrap_err().to_string();
    assert!(
        message.contains("target_modules is [")
            && message.contains("has one for model.language_model.layers.0.mlp.up_proj, which"),
        "{message}"
    );
    // PEFT would give the towers' projections adapters as well, which are not there.
    let dir = changed(|json| json["target_modules"].as_array_mut().unwrap().push(json!("input_proj")));
    let mismatch = match load(dir.path()).unwrap_err() {
        Error::Mismatch { mismatch, .. } => *mismatch,
        other => panic!("{other}"),
    };
    assert_eq!(mismatch.missing.len(), 2);
    assert_eq!(mismatch.missing[0], "base_model.model.model.vision_tower.patch_embedder.input_proj.lora_A.weight");
    // A pattern, and lists that are narrowed, are not read: the tensors tell.
    for targets in [json!(".*"), json!(["q_proj"])] {
        let dir = changed(|json| {
            json["layers_to_transform"] = json!([0, 1, 2, 3, 4, 5]);
            json["target_modules"] = targets;
        });
        assert_eq!(load(dir.path()).unwrap().variables().len(), 80);
    }
}

#[test]
fn files_that_are_not_those_of_this_model_are_refused() {
    let (dense, effective) = (dense(), Golden::of_fixture("effective", &[]));
    let mut weights = dense.bare(DType::F32);
    let message = weights.load_lora(&effective.adapter(), &dense.config()).unwrap_err().to_string();
    assert!(message.contains("the tensors do not fit config.json") && message.contains("unexpected"), "{message}");
    let dir = changed(|json| json["r"] = json!(3));
    let message = load(dir.path()).unwrap_err().to_string();
    assert!(message.contains("80 with a wrong shape"), "{message}");

    let dir = changed(|_| ());
    std::fs::copy(dense.base.join("model.safetensors"), dir.path().join(TENSORS)).unwrap();
    let message = load(dir.path()).unwrap_err().to_string();
    assert!(message.ends_with("no tensor ends with .lora_A.weight; this is no file of LoRA adapters"), "{message}");
    let bytes = std::fs::read(dense.adapter().join(TENSORS)).unwrap();
    std::fs::write(dir.path().join(TENSORS), &bytes[..bytes.len() - 9]).unwrap();
    assert!(load(dir.path()).unwrap_err().to_string().contains("is cut short"));
    for (file, action) in [(TENSORS, "read"), (CONFIG, "read")] {
        std::fs::remove_file(dir.path().join(file)).unwrap();
        let message = load(dir.path()).unwrap_err().to_string();
        assert!(message.starts_with(&format!("cannot {action} {}", dir.path().join(file).display())), "{message}");
    }
    std::fs::write(dir.path().join(CONFIG), "[]").unwrap();
    assert!(matches!(load(dir.path()).unwrap_err(), Error::Json { .. }));
    // A refusal leaves the weights as they were.
    let model = Model::new(&dense.config(), &weights).unwrap();
    assert!(weights.lora().is_none() && weights.variables().is_empty() && largest(model.head_vh()) > 0.0);
}

/// Adapters in a short type, as other tools write them, are trained in f32.
#[test]
fn short_adapters_are_widened() {
    let golden = dense();
    let dir = changed(|_| ());
    let tensors = candle_core::safetensors::load(golden.adapter().join(TENSORS), &Device::Cpu).unwrap();
    let short: std::collections::HashMap<_, _> =
        tensors.iter().map(|(name, x)| (name.clone(), x.to_dtype(DType::BF16).unwrap())).collect();
    candle_core::safetensors::save(&short, dir.path().join(TENSORS)).unwrap();
    for (name, variable) in load(dir.path()).unwrap().variables() {
        assert_eq!(variable.dtype(), DType::F32);
        assert_eq!(values(variable), values(&short[name]));
    }
    assert_eq!(Part::of("base_model.model.model.vision_tower.a.linear.lora_A.weight"), Part::Vision);
}
