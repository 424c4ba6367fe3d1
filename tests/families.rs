//! Training of every family of Gemma 4: twenty steps are the same on one, two and four ranks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{Communicator, CpContext, LayoutKind, Tokens};
use candle_cp_examples::case::Case;
use candle_finetune::{AdamW, AdamWConfig, Error, Gradients};
use candle_gemma4::{Config, Inputs, Model, Tap, Weights};

const STEPS: usize = 20;
const MAX_NORM: f64 = 1.0;
const SPLITS: [(usize, LayoutKind); 4] =
    [(2, LayoutKind::HeadTail), (2, LayoutKind::Contiguous), (4, LayoutKind::HeadTail), (4, LayoutKind::Balanced)];

/// A tiny checkpoint, and the inputs that steps take in turn.
#[derive(Clone, Copy)]
struct Family {
    name: &'static str,
    cases: &'static [&'static str],
    rate: f64,
    /// In place of the checkpoint's `rms_norm_eps`.
    eps: Option<f64>,
}

/// Experts chosen by a token: layer, row and place of the token to their indices, best first.
type Choices = BTreeMap<(usize, usize, usize), Vec<i64>>;

/// What a step did.
struct Step {
    loss: f64,
    grad_norm: f64,
    choices: Choices,
}

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(family)
}

impl Family {
    fn config(self) -> Config {
        let text = std::fs::read_to_string(fixture(self.name).join("checkpoint/config.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        if let Some(eps) = self.eps {
            json["text_config"]["rms_norm_eps"] = eps.into();
        }
        Config::from_json(&json.to_string()).unwrap()
    }

    fn cases(self) -> Vec<Case> {
        let golden = |case: &&str| fixture(self.name).join(format!("goldens/{case}.safetensors"));
        self.cases.iter().map(|case| Case::load(&golden(case)).unwrap()).collect()
    }
}

fn inputs(case: &Case) -> Inputs {
    let get = |name: &str| case.get(name).cloned();
    Inputs {
        input_ids_bs: get("input.input_ids").unwrap(),
        pixel_values: get("input.pixel_values"),
        image_position_ids: get("input.image_position_ids"),
        input_features: get("input.input_features"),
        input_features_mask: get("input.input_features_mask"),
    }
}

fn tokens(case: &Case) -> Tokens {
    let documents = case.documents().unwrap();
    let no_groups = || documents.iter().map(|row| vec![-1; row.len()]).collect();
    let groups = case.rows("input.vision_group_ids").unwrap().unwrap_or_else(no_groups);
    Tokens::new(documents, groups).unwrap()
}

/// Keeps the router's choices of a rank's slice.
struct RouterTap<'a> {
    context: &'a CpContext,
    choices: Choices,
}

impl Tap for RouterTap<'_> {
    fn record(&mut self, name: &str, x: &Tensor) -> candle_core::Result<()> {
        let Some(layer) = name.strip_prefix("router.top_k_index.") else { return Ok(()) };
        let layer: usize = layer.parse().expect("a layer's number");
        let places = self.context.layout().global_indices(self.context.rank());
        for (row, tokens) in x.to_vec3::<i64>()?.into_iter().enumerate() {
            let real = places.iter().zip(tokens).filter(|&(&place, _)| place < self.context.layout().len());
            self.choices.extend(real.map(|(&place, experts)| ((layer, row, place), experts)));
        }
        Ok(())
    }
}

/// One rank's part of training.
fn train(family: Family, dtype: DType, layout: LayoutKind, comm: Arc<dyn Communicator>) -> Result<Vec<Step>, Error> {
    let folder = fixture(family.name).join("checkpoint");
    let config = family.config();
    let weights = Weights::load(&folder, &config, dtype, &Device::Cpu)?;
    let model = Model::new(&config, &weights)?;
    let mut optimizer = AdamW::new(weights.variables(), AdamWConfig::default())?;
    let cases = family.cases();
    let mut steps = Vec::with_capacity(STEPS);
    for case in cases.iter().cycle().take(STEPS) {
        let (inputs, tokens) = (inputs(case), tokens(case));
        let layout = layout.layout(&tokens, comm.size(), &config.text.layer_work())?;
        let context = CpContext::new(comm.clone(), layout, tokens)?;
        let labels = context.shard_labels(case.get("input.labels").expect("labels"))?;
        let local = model.shard(&model.embed(&inputs, &mut ())?, &inputs.input_ids_bs, &context)?;
        let mut tap = RouterTap { context: &context, choices: Choices::new() };
        let loss = model.loss(&model.decode(&local, &context, &mut tap)?, &labels)?;
        let gradients = Gradients::collect(&loss.backward()?, weights.variables())?;
        let gradients = gradients.sum_over_ranks(comm.as_ref())?;
        let grad_norm = gradients.norm()?;
        let loss = comm.all_reduce_sum(&loss.to_dtype(DType::F64)?)?.to_scalar::<f64>()?;
        optimizer.step(&gradients.clip(grad_norm, MAX_NORM)?, family.rate)?;
        steps.push(Step { loss, grad_norm, choices: tap.choices });
    }
    Ok(steps)
}

/// The steps of a group, with the choices of all its ranks.
fn curve(family: Family, dtype: DType, ranks: usize, layout: LayoutKind) -> Vec<Step> {
    let all = threads::run(ranks, &threads::Options::default(), |comm| train(family, dtype, layout, comm)).unwrap();
    let join = |mut first: Vec<Step>, rank: Vec<Step>| {
        for (step, other) in first.iter_mut().zip(rank) {
            assert_eq!((step.loss, step.grad_norm), (other.loss, other.grad_norm), "ranks disagree");
            step.choices.extend(other.choices);
        }
        first
    };
    all.into_iter().reduce(join).unwrap()
}

fn off(one: f64, many: f64) -> f64 {
    ((one - many) / one).abs()
}

/// In f64 a difference is a fault; in f32 it may be rounding, which training amplifies.
fn assert_same_training(family: Family, dtype: DType, tolerance: f64, splits: &[(usize, LayoutKind)]) {
    let reference = curve(family, dtype, 1, LayoutKind::Contiguous);
    let cases = family.cases();
    let golden = cases[0].get("out.loss_mean").unwrap().to_vec1::<f32>().unwrap()[0];
    let starts_there = family.eps.is_some() || off(f64::from(golden), reference[0].loss) < 1e-5;
    assert!(starts_there, "{}: {} is not the loss of the golden, {golden}", family.name, reference[0].loss);
    let (first, last) = (reference[0].loss, reference[STEPS - STEPS % cases.len() - cases.len()].loss);
    assert!(last < 0.95 * first, "{}: nothing was learned, {first} to {last}", family.name);
    for &(ranks, layout) in splits {
        for (index, (one, many)) in reference.iter().zip(curve(family, dtype, ranks, layout)).enumerate() {
            let place = format!("{}, {dtype:?}, {ranks} ranks, {layout}, step {}", family.name, index + 1);
            assert!(one.choices == many.choices, "{place}: routers choose other experts");
            let differences = [off(one.loss, many.loss), off(one.grad_norm, many.grad_norm)];
            let close = differences.iter().all(|&difference| difference <= tolerance);
            assert!(close, "{place}: loss and norm are off by {differences:?}");
        }
    }
}

#[test]
fn dense() {
    let family = Family { name: "gemma4-dense", cases: &["case2_images", "case4_packed"], rate: 2e-4, eps: None };
    assert_same_training(family, DType::F32, 1e-5, &SPLITS);
}

#[test]
fn experts() {
    let family = Family { name: "gemma4-moe", cases: &["case2_images", "case4_packed"], rate: 1e-4, eps: None };
    assert_same_training(family, DType::F32, 1e-5, &SPLITS);
    let choices = curve(family, DType::F32, 1, LayoutKind::Contiguous).pop().unwrap().choices;
    assert_eq!(choices.len(), 5 * 96, "every layer's router is recorded for every token");
}

#[test]
fn effective() {
    let family = Family {
        name: "gemma4-effective",
        cases: &["case2_images", "case5_audio", "case4_packed"],
        rate: 2e-4,
        eps: None,
    };
    assert_same_training(family, DType::F64, 1e-9, &SPLITS[2..3]);
    // In f32 the norms of this tiny checkpoint amplify rounding to 1e-3 and more within 20 steps: some of the vectors of
    // width 8 in per-layer blocks nearly vanish before their norm. With a larger constant in the norms they do not.
    assert_same_training(Family { eps: Some(0.3), ..family }, DType::F32, 1e-5, &SPLITS);
}

#[test]
fn unified() {
    let family = Family { name: "gemma4-unified", cases: &["case2_images", "case4_packed"], rate: 2e-4, eps: None };
    assert_same_training(family, DType::F32, 1e-5, &SPLITS);
}
