//! Tensors that are kept unread, and experts in both layouts, on tables made up here.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use safetensors::{Dtype, SafeTensors};

use super::*;

type Tensors = HashMap<String, Tensor>;

/// Type, shape and bytes of every tensor in a file.
type Raw = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

const LAYER: &str = "model.language_model.layers.0";

fn fixture(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(path)
}

/// A model without anything: its tables are given by hand.
struct Bare;

impl ModelConfig for Bare {
    fn tensors(&self) -> Vec<TensorSpec> {
        Vec::new()
    }

    fn to_json(&self) -> String {
        "{}".to_string()
    }
}

fn spec(name: &str, shape: &[usize], role: Role) -> TensorSpec {
    TensorSpec { name: format!("{LAYER}.{name}"), shape: shape.to_vec(), role }
}

fn matrix(name: &str, shape: &[usize]) -> TensorSpec {
    spec(name, shape, Role::Matrix { fan_in: 1, range: 1.0 })
}

/// A folder with one file of these tensors.
fn folder(tensors: &Tensors) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(tensors, dir.path().join("model.safetensors")).unwrap();
    dir
}

fn raw(dir: &Path) -> Raw {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter().map(|(name, x)| (name.to_string(), (x.dtype(), x.shape().to_vec(), x.data().to_vec()))).collect()
}

fn load(dir: &Path, specs: &[TensorSpec], freeze: &[Part]) -> Result<Weights> {
    let options = LoadOptions::new().freeze(freeze.iter().copied());
    Weights::load_specs(WeightFiles::open(dir)?, specs, DType::F32, &Device::Cpu, &options)
}

fn saved(weights: &Weights) -> Raw {
    let dir = tempfile::tempdir().unwrap();
    weights.save(dir.path(), &Bare).unwrap();
    raw(dir.path())
}

/// Numbers that all differ.
fn numbers(shape: &[usize], start: f64) -> Tensor {
    let count = shape.iter().product::<usize>() as f64;
    let tensor = Tensor::arange(start, start + count, &Device::Cpu).unwrap().reshape(shape).unwrap();
    (tensor / 8.0).unwrap().to_dtype(DType::F32).unwrap()
}

#[test]
fn unread_tensors_may_be_there_in_any_type_and_shape_and_are_saved_unchanged() {
    let [read, half, whole, absent] = ["q_proj.weight", "k_proj.weight", "ids", "v_proj.weight"];
    let specs = [
        matrix(read, &[3, 2]),
        spec(half, &[3, 2], Role::Unused),
        spec(whole, &[3, 2], Role::Unused),
        spec(absent, &[3, 2], Role::Unused),
    ];
    let tensors = Tensors::from([
        (format!("{LAYER}.{read}"), numbers(&[3, 2], 1.0)),
        (format!("{LAYER}.{half}"), numbers(&[4], 50.0).to_dtype(DType::BF16).unwrap()),
        (format!("{LAYER}.{whole}"), Tensor::new(&[7i64, -1], &Device::Cpu).unwrap()),
    ]);
    let dir = folder(&tensors);
    let before = raw(dir.path());
    let weights = load(dir.path(), &specs, &[]).unwrap();
    assert_eq!(weights.variables().len() + weights.buffers().len() + weights.frozen().len(), 1);
    assert!(weights.get(&format!("{LAYER}.{half}"), &[4]).is_err());
    assert_eq!(saved(&weights), before);
    // Into the folder it came from, twice: the files that are mapped are replaced, not written into.
    for _ in 0..2 {
        weights.save(dir.path(), &Bare).unwrap();
        assert_eq!(raw(dir.path()), before);
    }
    let unlisted = load(dir.path(), &specs[..1], &[]).unwrap_err();
    assert!(unlisted.to_string().contains("2 unexpected"), "{unlisted}");
    let only_read = folder(&Tensors::from([(format!("{LAYER}.{read}"), numbers(&[3, 2], 1.0))]));
    assert_eq!(saved(&load(only_read.path(), &specs, &[]).unwrap()).len(), 1);
}

/// A model of one tensor, beside which files may hold a head for another purpose.
struct WithHead;

impl ModelConfig for WithHead {
    fn tensors(&self) -> Vec<TensorSpec> {
        vec![matrix("a.weight", &[2, 2]), TensorSpec { name: "head.read".into(), ..matrix("", &[2]) }]
    }

    fn unread_prefixes(&self) -> &'static [&'static str] {
        &["head."]
    }

    fn to_json(&self) -> String {
        "{}".to_string()
    }
}

#[test]
fn tensors_under_a_prefix_are_kept_unread() {
    let own = [(format!("{LAYER}.a.weight"), numbers(&[2, 2], 1.0)), ("head.read".into(), numbers(&[2], 9.0))];
    let beside = [
        ("head.fc.weight".to_string(), numbers(&[3, 5], 20.0).to_dtype(DType::F16).unwrap()),
        ("head.layers.0.experts.1.up_proj.weight".to_string(), numbers(&[7], 50.0)),
    ];
    let dir = folder(&own.iter().chain(&beside).cloned().collect());
    let before = raw(dir.path());
    let options = LoadOptions::default();
    let weights = Weights::load(dir.path(), &WithHead, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(weights.variables().len(), 2, "what the model lists is read although the prefix fits");
    assert_eq!(weights.frozen().len() + weights.buffers().len(), 0);
    assert_eq!(Weights::check(dir.path(), &WithHead, &options).unwrap(), 2);
    assert_eq!(saved(&weights), before);
    let bare = folder(&own.iter().cloned().collect());
    assert_eq!(saved(&Weights::load(bare.path(), &WithHead, DType::F32, &Device::Cpu).unwrap()).len(), 2);
    let other = [("heads.fc.weight".to_string(), numbers(&[1], 0.0))];
    let dir = folder(&own.into_iter().chain(other).collect());
    let error = Weights::check(dir.path(), &WithHead, &options).unwrap_err().to_string();
    assert!(error.contains("1 unexpected: heads.fc.weight"), "{error}");
}

#[test]
fn constants_and_frozen_tensors_keep_their_type_and_bytes() {
    let vision = TensorSpec { name: "model.vision_tower.a.weight".into(), ..matrix("", &[2, 2]) };
    let specs = [matrix("a.weight", &[2, 2]), spec("scalar", &[], Role::Buffer { fresh: 1.0 }), vision.clone()];
    // Not a number in f32, and a value that f32 cannot hold: neither would survive a conversion.
    let odd = Tensor::new(&[[f64::from_bits(0x7ff8_0000_0000_0001), 0.1], [1e300, -0.0]], &Device::Cpu).unwrap();
    let tensors = Tensors::from([
        (specs[0].name.clone(), numbers(&[2, 2], 0.0).to_dtype(DType::F16).unwrap()),
        (specs[1].name.clone(), Tensor::new(0.3f64, &Device::Cpu).unwrap()),
        (vision.name.clone(), odd),
    ]);
    let dir = folder(&tensors);
    let before = raw(dir.path());
    let weights = load(dir.path(), &specs, &[Part::Vision]).unwrap();
    assert_eq!(weights.variables().keys().collect::<Vec<_>>(), [&specs[0].name]);
    assert_eq!(weights.frozen().keys().collect::<Vec<_>>(), [&vision.name]);
    assert_eq!(weights.frozen()[&vision.name].dtype(), DType::F32);
    assert_eq!(weights.get(&specs[1].name, &[]).unwrap().to_scalar::<f32>().unwrap(), 0.3);
    let after = saved(&weights);
    assert_eq!(after[&specs[0].name].0, Dtype::F32, "trained tensors have the type they were trained in");
    for spec in &specs[1..] {
        assert_eq!(after[&spec.name], before[&spec.name], "{}", spec.name);
    }
    let all = [Part::Text, Part::Vision, Part::Audio];
    let frozen = load(dir.path(), &specs, &all).unwrap();
    assert_eq!(frozen.notices(), [Notice::NothingToFreeze { part: Part::Audio }]);
    assert!(frozen.variables().is_empty());
    assert_eq!(saved(&frozen), before);
}

/// The table of an expert block, and its tensors stacked: 3 experts, width 4, hidden 5.
fn experts() -> (Vec<TensorSpec>, Tensors) {
    let specs = vec![matrix("experts.gate_up_proj", &[3, 8, 5]), matrix("experts.down_proj", &[3, 5, 4])];
    let tensors = specs.iter().zip([0.0, 500.0]).map(|(spec, start)| (spec.name.clone(), numbers(&spec.shape, start)));
    let tensors = tensors.collect();
    (specs, tensors)
}

/// The same with one tensor per expert and projection.
fn one_by_one(stacked: &Tensors) -> Tensors {
    let mut tensors = Tensors::new();
    for expert in 0..3 {
        let rows = |name: &str, start, len| {
            let stack = &stacked[&format!("{LAYER}.experts.{name}")];
            stack.get(expert).unwrap().narrow(0, start, len).unwrap().contiguous().unwrap()
        };
        for (name, tensor) in [
            ("gate_proj", rows("gate_up_proj", 0, 4)),
            ("up_proj", rows("gate_up_proj", 4, 4)),
            ("down_proj", rows("down_proj", 0, 5)),
        ] {
            tensors.insert(format!("{LAYER}.experts.{expert}.{name}.weight"), tensor);
        }
    }
    tensors
}

#[test]
fn experts_are_read_in_both_layouts_and_saved_stacked() {
    let (specs, stacked) = experts();
    for dtype in [DType::F32, DType::BF16] {
        let in_type = |tensors: &Tensors| -> Tensors {
            tensors.iter().map(|(name, x)| (name.clone(), x.to_dtype(dtype).unwrap())).collect()
        };
        let (whole, pieces) = (folder(&in_type(&stacked)), folder(&in_type(&one_by_one(&stacked))));
        assert_eq!((raw(whole.path()).len(), raw(pieces.path()).len()), (2, 9));
        for freeze in [&[][..], &[Part::Text]] {
            let from_whole = load(whole.path(), &specs, freeze).unwrap();
            let from_pieces = load(pieces.path(), &specs, freeze).unwrap();
            for spec in &specs {
                let expected = in_type(&stacked)[&spec.name].to_dtype(DType::F32).unwrap();
                for weights in [&from_whole, &from_pieces] {
                    let found = weights.get(&spec.name, &spec.shape).unwrap();
                    let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    assert_eq!(values(&found), values(&expected), "{}", spec.name);
                }
            }
            assert_eq!(saved(&from_pieces), saved(&from_whole));
            if !freeze.is_empty() {
                assert_eq!(saved(&from_pieces), raw(whole.path()));
            }
        }
    }
}

#[test]
fn experts_that_are_incomplete_or_doubled_are_reported_by_the_names_of_the_file() {
    let (specs, stacked) = experts();
    let report = |tensors: &Tensors| match load(folder(tensors).path(), &specs, &[]).unwrap_err() {
        Error::Mismatch { mismatch, .. } => *mismatch,
        other => panic!("{other}"),
    };
    let mut pieces = one_by_one(&stacked);
    let lost = format!("{LAYER}.experts.1.up_proj.weight");
    pieces.remove(&lost).unwrap();
    let wrong = format!("{LAYER}.experts.2.down_proj.weight");
    pieces.insert(wrong.clone(), numbers(&[4, 5], 0.0));
    let found = report(&pieces);
    assert_eq!((found.missing, found.unexpected.len()), (vec![lost], 0));
    assert_eq!((found.misshaped[0].name.as_str(), found.misshaped.len()), (wrong.as_str(), 1));

    let mut both = one_by_one(&stacked);
    both.extend(stacked.clone());
    assert_eq!(report(&both).unexpected.len(), 9);
    assert_eq!(report(&Tensors::new()).missing, [specs[1].name.clone(), specs[0].name.clone()]);

    let mut mixed = one_by_one(&stacked);
    let odd = mixed.get_mut(&format!("{LAYER}.experts.2.gate_proj.weight")).unwrap();
    *odd = odd.to_dtype(DType::F16).unwrap();
    let message = load(folder(&mixed).path(), &specs, &[]).unwrap_err().to_string();
    assert!(message.contains("experts.gate_up_proj: its pieces have several types"), "{message}");
    assert!(message.contains("experts.2.gate_proj.weight F16"), "{message}");
}

#[test]
fn files_with_and_without_the_format_entry_are_read() {
    let mut loaded = Vec::new();
    for name in ["with", "without"] {
        let dir = tempfile::tempdir().unwrap();
        let file = fixture(&format!("weights/format/{name}.safetensors"));
        std::fs::copy(file, dir.path().join("model.safetensors")).unwrap();
        let table = raw(dir.path());
        let spec = |(name, (_, shape, _)): (&String, &(Dtype, Vec<usize>, Vec<u8>))| TensorSpec {
            name: name.clone(),
            shape: shape.clone(),
            role: Role::Bias,
        };
        let specs: Vec<TensorSpec> = table.iter().map(spec).collect();
        let weights = load(dir.path(), &specs, &[]).unwrap();
        loaded.push((table, weights.variables().len()));
    }
    assert_eq!(loaded[0], loaded[1]);
    assert!(loaded[0].1 > 0);
}
