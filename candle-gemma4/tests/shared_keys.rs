//! Layers that share keys and values, with per-layer embeddings: loss and every gradient over ranks against a dense f64
//! reference in which nothing is shared.

#[path = "shared_keys/reference.rs"]
mod reference;
mod support;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{CpContext, LayoutKind, Tokens};
use candle_gemma4::{Config, Error, Inputs, Model, Weights};
use reference::{Batch, Reference, Shared};
use support::{values, variant};

/// Full, sliding, full, sliding; then two sliding layers and a full one that read keys of those before.
const MODEL: &str = "effective";
/// The layers that lend keys and values, and how many layers read each.
const SOURCES: [(usize, usize); 2] = [(2, 1), (3, 2)];
const TOLERANCE: f64 = 1e-9;

/// Two rows of packed documents of 47 tokens, which nothing divides: padding at the end of one, a document of one token,
/// padding tokens inside of documents, tokens without labels.
fn batch() -> Batch {
    let documents = |lengths: &[(i64, usize)]| -> Vec<i64> {
        lengths.iter().flat_map(|&(document, length)| vec![document; length]).collect()
    };
    let documents = vec![documents(&[(4, 13), (0, 1), (2, 33)]), documents(&[(0, 22), (1, 16), (-1, 9)])];
    let mut state = 5u64;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % limit) as i64
    };
    let mut id = |document: &i64| match below(8) {
        _ if *document < 0 => 4, // the padding token
        0 => 4,
        _ => 12 + below(52),
    };
    let ids: Vec<Vec<i64>> = documents.iter().map(|row| row.iter().map(&mut id).collect()).collect();
    let mut place = 0;
    let mut label = |id: &i64| {
        place += 1;
        if place % 5 == 0 { -100 } else { *id }
    };
    let labels = ids.iter().map(|row| row.iter().map(&mut label).collect()).collect();
    Batch { ids, documents, labels }
}

/// Loss and gradients by name.
struct Results {
    loss: f64,
    gradients: BTreeMap<String, Vec<f64>>,
}

fn expected(shared: Shared) -> Results {
    let reference = Reference::load(&variant(MODEL), shared).unwrap();
    let loss = reference.loss(&batch()).unwrap();
    let store = loss.backward().unwrap();
    let gradients = reference.variables.iter();
    let gradients = gradients.filter_map(|(name, var)| Some((name.clone(), values(store.get(var)?)))).collect();
    Results { loss: loss.to_scalar().unwrap(), gradients }
}

/// Summed over ranks.
fn found(ranks: usize, layout: LayoutKind) -> Results {
    let all = threads::run(ranks, &threads::Options::default(), |comm| {
        let config = Config::from_folder(&variant(MODEL))?;
        let weights = Weights::load(&variant(MODEL), &config, DType::F64, &Device::Cpu)?;
        let model = Model::new(&config, &weights)?;
        let Batch { ids, documents, labels } = batch();
        let groups = documents.iter().map(|row| vec![-1; row.len()]).collect();
        let tokens = Tokens::new(documents, groups)?;
        let layout = layout.layout(&tokens, ranks, &config.text.layer_work())?;
        let context = CpContext::new(comm, layout, tokens)?;
        let ids = Tensor::new(ids, &Device::Cpu)?;
        let labels = context.shard_labels(&Tensor::new(labels, &Device::Cpu)?)?;
        let embeds = model.embed(&Inputs::text(ids.clone()), &mut ())?;
        let hidden = model.decode(&model.shard(&embeds, &ids, &context)?, &context, &mut ())?;
        let loss = model.loss(&hidden, &labels)?;
        let store = loss.backward()?;
        let gradients = weights.variables().iter();
        let gradients = gradients.filter_map(|(name, var)| Some((name.clone(), values(store.get(var)?)))).collect();
        Ok::<_, Error>(Results { loss: loss.to_scalar()?, gradients })
    });
    let add = |mut sum: Results, other: Results| {
        assert!(sum.gradients.keys().eq(other.gradients.keys()), "ranks train different tensors");
        sum.loss += other.loss;
        for (sum, other) in sum.gradients.values_mut().zip(other.gradients.values()) {
            sum.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
        }
        sum
    };
    all.unwrap().into_iter().reduce(add).unwrap()
}

/// Largest difference, relative to the largest entry of `expected`; NaN is infinite.
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let worst = |x: f64, d: f64| if d.is_nan() { f64::INFINITY } else { x.max(d.abs()) };
    let largest = expected.iter().copied().fold(0.0, worst);
    assert!(largest > 0.0, "a gradient of zeros tells nothing");
    found.iter().zip(expected).map(|(a, b)| a - b).fold(0.0, worst) / largest
}

#[test]
fn gradients_equal_an_unshared_reference() {
    let expected = expected(Shared::Trained);
    for (ranks, layout) in [1, 3, 4].into_iter().flat_map(|ranks| LayoutKind::ALL.map(|layout| (ranks, layout))) {
        let place = format!("{ranks} ranks, {layout}");
        let found = found(ranks, layout);
        assert!((found.loss - expected.loss).abs() < 1e-12 * expected.loss, "{place}: {} loss", found.loss);
        let names = |results: &Results| results.gradients.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&expected), "{place}");
        for (name, gradient) in &found.gradients {
            let off = difference(gradient, &expected.gradients[name]);
            assert!(off < TOLERANCE, "{place}: {name} is off by {off:e} of its largest entry");
        }
    }
}

/// The comparison above can see a gradient that does not come back from the layers that read.
#[test]
fn every_source_is_trained_by_the_layers_that_read_it() {
    let (all, without) = (expected(Shared::Trained), expected(Shared::Constant));
    for (layer, readers) in SOURCES {
        for tensor in ["self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "input_layernorm"] {
            let name = format!("model.language_model.layers.{layer}.{tensor}.weight");
            let off = difference(&without.gradients[&name], &all.gradients[&name]);
            assert!(off > 1e-2, "{readers} readers of {name} give it {off:e} of its gradient");
        }
    }
    // And the sharing layers' own fillers have none.
    let fillers = ["layers.4.self_attn.k_proj", "layers.6.self_attn.v_proj"];
    for filler in fillers {
        assert!(!all.gradients.contains_key(&format!("model.language_model.{filler}.weight")), "{filler}");
    }
}
