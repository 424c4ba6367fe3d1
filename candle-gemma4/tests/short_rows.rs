//! Rows with fewer tokens than there are ranks: most ranks have no real token and no keys that anyone needs.

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{CpContext, LayoutKind, Tokens};
use candle_gemma4::{Config, Error, Inputs, Model, Recompute, Weights};
use support::{fixture, values};

/// Two tokens beside one and padding.
const IDS: [[i64; 2]; 2] = [[40, 41], [43, 0]];
const DOCUMENTS: [[i64; 2]; 2] = [[0, 0], [0, -1]];

/// The loss and every gradient, summed over ranks.
fn run(folder: &Path, ranks: usize, recompute: fn() -> Recompute) -> BTreeMap<String, Vec<f64>> {
    let config = Config::from_folder(folder).unwrap();
    let all = threads::run(ranks, &threads::Options::default(), |comm| {
        let weights = Weights::load(folder, &config, DType::F64, &Device::Cpu)?;
        let model = Model::new(&config, &weights)?;
        let tokens = Tokens::new(DOCUMENTS.map(Vec::from).into(), vec![vec![-1; 2]; 2])?;
        let layout = LayoutKind::HeadTail.layout(&tokens, ranks, &[])?;
        let context = CpContext::new(comm.clone(), layout, tokens)?;
        let ids = Tensor::new(&IDS, &Device::Cpu)?;
        let embeds = model.embed(&Inputs::text(ids.clone()), &mut ())?;
        let recompute = recompute();
        let mut taps = BTreeMap::new();
        let hidden = model.decode_with(&model.shard(&embeds, &ids, &context)?, &context, &recompute, &mut taps)?;
        let loss = model.loss(&hidden, &context.shard_labels(&ids)?)?;
        let store = recompute.backward(&loss)?;
        let sum = |x: &Tensor| Ok::<_, Error>(values(&comm.all_reduce_sum(x)?));
        let mut results = BTreeMap::from([("loss".to_string(), sum(&loss.detach())?)]);
        for (name, var) in weights.variables() {
            let gradient = store.get(var.as_tensor()).cloned();
            results.insert(name.clone(), sum(&gradient.map_or_else(|| var.zeros_like(), Ok)?)?);
        }
        Ok::<_, Error>(results)
    });
    all.unwrap().swap_remove(ranks - 1)
}

#[test]
fn equal_one_rank() {
    for family in ["gemma4-dense", "gemma4-moe", "gemma4-effective", "gemma4-unified"] {
        let folder = fixture(&format!("{family}/checkpoint"));
        let expected = run(&folder, 1, Recompute::off);
        assert!(expected["loss"][0] > 1.0, "{family}");
        for (ranks, recompute) in [(3, Recompute::off as fn() -> Recompute), (8, Recompute::off), (8, Recompute::on)] {
            let found = run(&folder, ranks, recompute);
            for (name, expected) in &expected {
                let differences = found[name].iter().zip(expected).map(|(a, b)| (a - b).abs());
                let is_close = differences.fold(0.0, |worst: f64, d| if d.is_nan() { d } else { worst.max(d) }) < 1e-9;
                assert!(is_close, "{family}, cp {ranks}: {name}");
            }
        }
    }
}
