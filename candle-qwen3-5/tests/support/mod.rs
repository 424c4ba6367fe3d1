//! Reading fixtures, running models on any number of ranks, comparing tensors.
#![allow(dead_code)] // every test program uses a part of this

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{Communicator, CpContext, LayerWork, LayoutKind, MaskRule, Tokens};
use candle_qwen3_5::{Config, Error, Inputs, Model, Recompute, Weights};

pub const FAMILIES: [&str; 2] = ["qwen3_5-dense", "qwen3_5-moe"];

/// A file or folder in the workspace's fixtures.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(path)
}

/// The folder of a tiny model whose settings are unlike the released ones.
pub fn variant(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/variants").join(name)
}

/// The tiny checkpoint's folder.
pub fn checkpoint(family: &str) -> PathBuf {
    fixture(&format!("{family}/checkpoint"))
}

pub fn config_text(family: &str) -> String {
    std::fs::read_to_string(checkpoint(family).join("config.json")).unwrap()
}

/// The tiny checkpoint's configuration with some values replaced: `("text_config.head_dim", "7")`; the value
/// `absent` removes the field.
pub fn edited(family: &str, changes: &[(&str, &str)]) -> String {
    let mut json: serde_json::Value = serde_json::from_str(&config_text(family)).unwrap();
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

/// A model and its weights.
pub fn load(folder: &Path, dtype: DType) -> (Weights, Model) {
    let config = Config::from_folder(folder).unwrap();
    let weights = Weights::load(folder, &config, dtype, &Device::Cpu).unwrap();
    let model = Model::new(&config, &weights).unwrap();
    (weights, model)
}

/// One case file and what it says about documents and positions.
#[derive(Clone)]
pub struct Case {
    pub tensors: HashMap<String, Tensor>,
}

impl Case {
    pub fn load(path: &Path) -> Self {
        Self { tensors: candle_core::safetensors::load(path, &Device::Cpu).unwrap() }
    }

    pub fn golden(family: &str, name: &str) -> Self {
        Self::load(&fixture(&format!("{family}/goldens/{name}.safetensors")))
    }

    pub fn get(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("no {name} in the case"))
    }

    pub fn inputs(&self) -> Inputs {
        Inputs {
            input_ids_bs: self.get("input.input_ids").clone(),
            position_ids_abs: self.tensors.get("input.position_ids").cloned(),
            pixel_values: self.tensors.get("input.pixel_values").cloned(),
            image_grid_thw: self.tensors.get("input.image_grid_thw").cloned(),
        }
    }

    /// Documents from the ids of a packed case or the mask of a padded one.
    pub fn tokens(&self) -> Tokens {
        let (rows, tokens) = self.get("input.input_ids").dims2().unwrap();
        let documents = match (self.tensors.get("input.doc_ids"), self.tensors.get("input.attention_mask")) {
            (Some(documents), _) => documents.to_vec2::<i64>().unwrap(),
            (None, Some(mask)) => {
                (mask - 1.0).unwrap().to_vec2::<i64>().unwrap() // 1, 0 become document 0 and padding -1
            }
            (None, None) => vec![vec![0; tokens]; rows],
        };
        Tokens::new(documents, vec![vec![-1; tokens]; rows]).unwrap()
    }

    pub fn context(&self, comm: Arc<dyn Communicator>, layout: LayoutKind) -> CpContext {
        let tokens = self.tokens();
        let work = [LayerWork { rule: MaskRule::causal(), weight: 1.0 }];
        let layout = layout.layout(&tokens, comm.size(), &work).unwrap();
        CpContext::new(comm, layout, tokens).unwrap()
    }

    /// `[batch, tokens]`, 1 where results count.
    pub fn counts(&self) -> Option<Tensor> {
        self.tensors.get("input.attention_mask").map(|mask| mask.to_dtype(DType::F32).unwrap())
    }
}

/// How a case is run.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    pub ranks: usize,
    pub layout: LayoutKind,
    pub dtype: DType,
    pub recompute: fn() -> Recompute,
}

impl Settings {
    pub const SINGLE: Self =
        Self { ranks: 1, layout: LayoutKind::Contiguous, dtype: DType::F32, recompute: Recompute::off };

    pub fn new(ranks: usize, layout: LayoutKind) -> Self {
        Self { ranks, layout, ..Self::SINGLE }
    }
}

/// Results of one forward and backward pass: what ranks have of the row put together, sums over ranks.
pub struct Run {
    pub taps: BTreeMap<String, Tensor>,
    pub logits: Tensor,
    pub loss: f64,
    pub num_valid: usize,
    /// By parameter name; a parameter without a gradient is absent.
    pub gradients: BTreeMap<String, Tensor>,
}

/// What a rank hands over.
struct Part {
    taps: BTreeMap<String, Tensor>,
    logits: Tensor,
    loss: Tensor,
    num_valid: usize,
    gradients: BTreeMap<String, Tensor>,
}

/// The gradient of the merged embeddings is named `inputs_embeds`.
pub fn run(folder: &Path, case: &Case, settings: &Settings) -> Run {
    let options = threads::Options::default();
    let parts = threads::run(settings.ranks, &options, |comm| run_rank(folder, case, settings, comm));
    let mut parts = parts.unwrap().into_iter();
    let first = parts.next().unwrap();
    let mut run = Run {
        loss: values(&first.loss)[0],
        taps: first.taps,
        logits: first.logits,
        num_valid: first.num_valid,
        gradients: first.gradients,
    };
    for part in parts {
        run.loss += values(&part.loss)[0];
        assert_eq!(run.gradients.keys().collect::<Vec<_>>(), part.gradients.keys().collect::<Vec<_>>());
        for (name, gradient) in part.gradients {
            let sum = (&run.gradients[&name] + gradient).unwrap();
            run.gradients.insert(name, sum);
        }
    }
    run
}

fn run_rank(folder: &Path, case: &Case, settings: &Settings, comm: Arc<dyn Communicator>) -> Result<Part, Error> {
    let (weights, model) = load(folder, settings.dtype);
    let context = case.context(comm, settings.layout);
    let labels = context.shard_labels(case.get("input.labels"))?;
    let inputs = case.inputs();
    let mut taps = BTreeMap::new();
    let embeds = model.embed(&inputs, &mut taps)?;
    let mut decoded = BTreeMap::new();
    let decode = |embeds: &Tensor, recompute: &Recompute, taps: &mut BTreeMap<String, Tensor>| {
        let local = model.shard(embeds, inputs.position_ids_abs.as_ref(), &context)?;
        let hidden = model.decode_with(&local, &context, recompute, taps)?;
        let loss = model.loss(&hidden, &labels)?;
        Ok::<_, Error>((hidden, loss))
    };
    let recompute = (settings.recompute)();
    let (hidden, loss) = decode(&embeds, &recompute, &mut decoded)?;
    let store = recompute.backward(&loss)?;
    let gradients = weights.variables().iter();
    let gradients = gradients.filter_map(|(name, var)| Some((name.clone(), store.get(var)?.clone())));
    let mut gradients: BTreeMap<_, _> = gradients.collect();

    let leaf = Var::from_tensor(&embeds.detach())?;
    let recompute = (settings.recompute)();
    let (_, again) = decode(&leaf, &recompute, &mut BTreeMap::new())?;
    let of_embeds = recompute.backward(&again)?.get(&leaf).unwrap().clone();
    gradients.insert("inputs_embeds".into(), of_embeds);

    // Rank 0 puts together what the decoder recorded; router results are `[batch, tokens, n]` like all others.
    for (name, x) in decoded {
        taps.insert(name, context.gather(&x.detach(), 1)?);
    }
    let logits = context.gather(&model.logits(&hidden.detach())?, 1)?;
    Ok(Part { taps, logits, loss: loss.detach(), num_valid: labels.count, gradients })
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

#[track_caller]
pub fn assert_close(name: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    let worst = difference(found, expected);
    assert!(worst <= tolerance, "{name}: off by {worst:e}, allowed {tolerance:e}");
}

/// Compares every gradient with a golden file: within 1e-3 of its largest entry, and 1e-7 at the least.
#[track_caller]
pub fn assert_gradients(run: &Run, golden: &HashMap<String, Tensor>) {
    let mut names: Vec<&String> = golden.keys().collect();
    names.sort();
    assert_eq!(names, run.gradients.keys().collect::<Vec<_>>(), "other tensors have gradients");
    for name in names {
        assert_close(name, &run.gradients[name], &golden[name], (1e-3 * largest(&golden[name])).max(1e-7));
    }
}

/// Compares everything a case file holds about the forward pass.
#[track_caller]
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
    let stages = ["vision.", "rope.", "mid.inputs", "router.", "mid.h"];
    let stage = |name: &str| stages.iter().position(|stage| name.starts_with(stage)).unwrap_or(usize::MAX);
    let mut names: Vec<&String> = case.tensors.keys().collect();
    names.sort_by_key(|name| (stage(name), *name));
    for name in names {
        let golden = case.get(name);
        let found = || run.taps.get(name).unwrap_or_else(|| panic!("{name} is not recorded"));
        match name.split_once('.').unwrap() {
            ("mid", _) => assert_close(name, &mask(found()), &mask(golden), 2e-4),
            ("router", what) => {
                let flat = |x: &Tensor| x.reshape(((), golden.dim(1).unwrap())).unwrap();
                let rows = |x: &Tensor| match case.counts() {
                    None => flat(x).to_dtype(DType::F32).unwrap(),
                    Some(counts) => {
                        let counts = counts.flatten_all().unwrap().unsqueeze(1).unwrap();
                        flat(x).to_dtype(DType::F32).unwrap().broadcast_mul(&counts).unwrap()
                    }
                };
                let tolerance = if what.starts_with("top_k_index") { 0.0 } else { 2e-4 };
                assert_close(name, &rows(found()), &rows(golden), tolerance);
            }
            ("rope", _) => assert_close(name, found(), golden, 1e-5),
            ("vision", _) => assert_close(name, found(), golden, 2e-4),
            ("out", "logits_at_positions") => {
                let positions = case.get("out.positions");
                let logits = run.logits.squeeze(0).unwrap().index_select(positions, 0).unwrap();
                assert_close(name, &logits, golden, 5e-4);
            }
            ("input" | "mask" | "out", _) => {}
            _ => panic!("{name}: not compared"),
        }
    }
    assert_eq!(run.num_valid as i64, case.get("out.num_valid").to_vec1::<i64>().unwrap()[0]);
    let loss = case.get("out.loss_mean").to_vec1::<f32>().unwrap()[0];
    assert!((run.loss - f64::from(loss)).abs() <= 1e-4, "loss {} instead of {loss}", run.loss);
    if let Some(logits) = case.tensors.get("out.logits") {
        assert_close("out.logits", &mask(&run.logits), &mask(logits), 5e-4);
    }
}
