//! Reading fixtures and comparing tensors.
#![allow(dead_code)] // every test program uses a part of this

pub mod adapters;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::{CpContext, Tokens};
use candle_gemma4::{Config, Inputs, Model, Weights};

/// A file or folder in the workspace's fixtures.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(path)
}

/// The folder of a tiny model whose settings are unlike the released ones.
pub fn variant(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/variants").join(name)
}

/// The tiny checkpoint's folder.
pub fn checkpoint() -> PathBuf {
    fixture("gemma4-dense/checkpoint")
}

pub fn config_text() -> String {
    std::fs::read_to_string(checkpoint().join("config.json")).unwrap()
}

/// The tiny checkpoint's configuration with some values replaced: `("text_config.head_dim", "7")`; the value
/// `absent` removes the field.
pub fn edited(changes: &[(&str, &str)]) -> String {
    let mut json: serde_json::Value = serde_json::from_str(&config_text()).unwrap();
    for (path, value) in changes {
        let (parents, field) = path.rsplit_once('.').unwrap_or(("", path));
        let mut at = &mut json;
        for parent in parents.split('.').filter(|parent| !parent.is_empty()) {
            at = &mut at[parent];
        }
        match *value {
            "absent" => drop(at.as_object_mut().unwrap().remove(field)),
            value => at[field] = serde_json::from_str(value).unwrap(),
        }
    }
    json.to_string()
}

pub fn edited_config(changes: &[(&str, &str)]) -> Config {
    Config::from_json(&edited(changes)).unwrap()
}

/// One case file and what it says about documents and images.
pub struct Case {
    pub tensors: HashMap<String, Tensor>,
}

impl Case {
    pub fn load(path: &Path) -> Self {
        Self { tensors: candle_core::safetensors::load(path, &Device::Cpu).unwrap() }
    }

    pub fn get(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("no {name} in the case"))
    }

    pub fn inputs(&self) -> Inputs {
        Inputs {
            input_ids_bs: self.get("input.input_ids").clone(),
            pixel_values: self.tensors.get("input.pixel_values").cloned(),
            image_position_ids: self.tensors.get("input.image_position_ids").cloned(),
            input_features: self.tensors.get("input.input_features").cloned(),
            input_features_mask: self.tensors.get("input.input_features_mask").cloned(),
        }
    }

    /// Documents from the ids of a packed case or the mask of a padded one.
    pub fn tokens(&self) -> Tokens {
        let groups = match self.tensors.get("input.vision_group_ids") {
            Some(groups) => groups.to_vec2::<i64>().unwrap(),
            None => {
                let (rows, tokens) = self.get("input.input_ids").dims2().unwrap();
                vec![vec![-1; tokens]; rows]
            }
        };
        let documents = match (self.tensors.get("input.doc_ids"), self.tensors.get("input.attention_mask")) {
            (Some(documents), _) => documents.to_vec2::<i64>().unwrap(),
            (None, Some(mask)) => {
                (mask - 1.0).unwrap().to_vec2::<i64>().unwrap() // 1, 0 become document 0 and padding -1
            }
            (None, None) => groups.iter().map(|row| vec![0; row.len()]).collect(),
        };
        Tokens::new(documents, groups).unwrap()
    }

    pub fn context(&self) -> CpContext {
        CpContext::single(self.tokens()).unwrap()
    }

    /// `[batch, tokens]`, 1 where results count.
    pub fn counts(&self) -> Option<Tensor> {
        self.tensors.get("input.attention_mask").map(|mask| mask.to_dtype(DType::F32).unwrap())
    }
}

/// Results of one forward and backward pass on one rank.
pub struct Run {
    pub taps: BTreeMap<String, Tensor>,
    pub logits: Tensor,
    pub loss: f64,
    pub num_valid: usize,
    /// By parameter name; a parameter without a gradient is absent.
    pub gradients: BTreeMap<String, Tensor>,
    pub embeds_gradient: Tensor,
}

pub fn run(config: &Config, weights: &Weights, case: &Case) -> Run {
    let model = Model::new(config, weights).unwrap();
    let context = case.context();
    let labels = context.shard_labels(case.get("input.labels")).unwrap();

    let mut taps = BTreeMap::new();
    let embeds = model.embed(&case.inputs(), &mut taps).unwrap();
    let ids = case.get("input.input_ids");
    let local = model.shard(&embeds, ids, &context).unwrap();
    let hidden = model.decode(&local, &context, &mut taps).unwrap();
    let loss = model.loss(&hidden, &labels).unwrap();
    let store = loss.backward().unwrap();
    let gradients = weights.variables().iter();
    let gradients = gradients.filter_map(|(name, var)| Some((name.clone(), store.get(var)?.clone()))).collect();

    let leaf = Var::from_tensor(&embeds.detach()).unwrap();
    let local = model.shard(&leaf, ids, &context).unwrap();
    let from_leaf = model.decode(&local, &context, &mut ()).unwrap();
    let store = model.loss(&from_leaf, &labels).unwrap().backward().unwrap();
    Run {
        taps,
        logits: model.logits(&hidden).unwrap(),
        loss: loss.to_dtype(DType::F64).unwrap().to_scalar::<f64>().unwrap(),
        num_valid: labels.count,
        gradients,
        embeds_gradient: store.get(&leaf).unwrap().clone(),
    }
}

/// Small numbers that all differ, from -0.2 to 0.2.
pub fn numbers(shape: &[usize], start: f64) -> Tensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| (0.2 * (start + 1.7 * i as f64).sin()) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

pub fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap()
}

pub fn largest(x: &Tensor) -> f64 {
    values(x).into_iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// Largest difference; NaN counts as infinite.
pub fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims(), "shapes differ");
    let pairs = values(a).into_iter().zip(values(b));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, |largest, d| if d.is_nan() { f64::INFINITY } else { largest.max(d) })
}

pub fn assert_close(name: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    let worst = difference(found, expected);
    assert!(worst <= tolerance, "{name}: off by {worst:e}, allowed {tolerance:e}");
}

/// Compares every gradient with a golden file: within 1e-3 of its largest entry, and 1e-7 at the least.
pub fn assert_gradients(run: &Run, golden: &HashMap<String, Tensor>) {
    let mut names: Vec<&String> = golden.keys().collect();
    names.sort();
    let mut expected: Vec<&str> = run.gradients.keys().map(String::as_str).collect();
    expected.push("inputs_embeds");
    expected.sort();
    assert_eq!(names, expected, "other tensors have gradients");
    for name in names {
        let found = match name.as_str() {
            "inputs_embeds" => &run.embeds_gradient,
            name => &run.gradients[name],
        };
        assert_close(name, found, &golden[name], (1e-3 * largest(&golden[name])).max(1e-7));
    }
}

/// Compares everything a case file holds about the forward pass.
pub fn assert_forward(run: &Run, case: &Case) {
    let mask = |x: &Tensor| match case.counts() {
        None => x.clone(),
        Some(counts) => {
            let (batch, tokens) = counts.dims2().unwrap();
            let flat = x.reshape((batch, tokens, ())).unwrap();
            flat.broadcast_mul(&counts.unsqueeze(2).unwrap()).unwrap()
        }
    };
    // Where a computation goes wrong first is what a failure should name.
    let stage = |name: &str| {
        ["vision.", "audio.", "rope.", "mid.inputs", "mid.per", "router.", "mid.h"]
            .iter()
            .position(|s| name.starts_with(s))
    };
    let mut names: Vec<&String> = case.tensors.keys().collect();
    names.sort_by_key(|name| (stage(name).unwrap_or(usize::MAX), *name));
    for name in names {
        let golden = case.get(name);
        let found = || run.taps.get(name).unwrap_or_else(|| panic!("{name} is not recorded"));
        match name.split_once('.').unwrap() {
            ("mid", _) => assert_close(name, &mask(found()), &mask(golden), 2e-4),
            ("router", what) => assert_router(what, found(), golden, case.counts().as_ref()),
            ("rope", _) => assert_close(name, found(), golden, 1e-5),
            ("vision", "features" | "tower_out") | ("audio", _) => assert_close(name, found(), golden, 2e-4),
            ("vision", _) => {
                let is_real = case.get("input.image_position_ids").narrow(2, 0, 1).unwrap().ge(0i64).unwrap();
                let real = |x: &Tensor| x.broadcast_mul(&is_real.to_dtype(DType::F32).unwrap()).unwrap();
                assert_close(name, &real(found()), &real(golden), 2e-4);
            }
            ("input" | "mask" | "out", _) => {}
            _ => panic!("{name}: not compared"),
        }
    }
    assert_eq!(run.num_valid as i64, case.get("out.num_valid").to_vec1::<i64>().unwrap()[0]);
    let loss = case.get("out.loss_mean").to_vec1::<f32>().unwrap()[0];
    assert!((run.loss - f64::from(loss)).abs() <= 1e-4, "loss {} instead of {loss}", run.loss);
    assert_close("out.logits", &mask(&run.logits), &mask(case.get("out.logits")), 5e-4);
}

/// Router results are `[batch, tokens, n]` here and `[batch * tokens, n]` in goldens; choices have to be the same ones.
fn assert_router(what: &str, found: &Tensor, golden: &Tensor, counts: Option<&Tensor>) {
    let found = found.flatten_to(1).unwrap().to_dtype(DType::F32).unwrap();
    let golden = golden.to_dtype(DType::F32).unwrap();
    let mask = |x: Tensor| match counts {
        None => x,
        Some(counts) => x.broadcast_mul(&counts.flatten_all().unwrap().unsqueeze(1).unwrap()).unwrap(),
    };
    let tolerance = if what.starts_with("top_k_index") { 0.0 } else { 1e-4 };
    assert_close(&format!("router.{what}"), &mask(found), &mask(golden), tolerance);
}
