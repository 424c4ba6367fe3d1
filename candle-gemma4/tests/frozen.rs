//! Towers that are loaded frozen: no gradients there, and the same bits everywhere else.

mod support;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{CpContext, LayoutKind};
use candle_gemma4::{Config, Error, LoadOptions, Model, Part, Weights};
use support::{Case, fixture};

type Bits = BTreeMap<String, Vec<u32>>;

fn bits(x: &Tensor) -> Vec<u32> {
    x.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Loss and gradients of rank `r` at `[r]`; no frozen tensor has one.
fn run(family: &str, case: &str, options: &LoadOptions, ranks: usize) -> Vec<Bits> {
    let folder = fixture(&format!("{family}/checkpoint"));
    let case = Case::load(&fixture(&format!("{family}/goldens/{case}.safetensors")));
    let all = threads::run(ranks, &threads::Options::default(), |comm| {
        let config = Config::from_folder(&folder)?;
        let weights = Weights::load_with(&folder, &config, DType::F32, &Device::Cpu, options)?;
        let model = Model::new(&config, &weights)?;
        let tokens = case.tokens();
        let layout = LayoutKind::HeadTail.layout(&tokens, ranks, &[])?;
        let context = CpContext::new(comm, layout, tokens)?;
        let embeds = model.embed(&case.inputs(), &mut ())?;
        let local = model.shard(&embeds, case.get("input.input_ids"), &context)?;
        let hidden = model.decode(&local, &context, &mut ())?;
        let loss = model.loss(&hidden, &context.shard_labels(case.get("input.labels"))?)?;
        let store = loss.backward()?;
        for (name, tensor) in weights.frozen() {
            assert!(store.get(tensor).is_none(), "{family}: {name} is frozen and has a gradient");
        }
        let gradients = weights.variables().iter();
        let gradients = gradients.filter_map(|(name, var)| Some((name.clone(), bits(store.get(var)?))));
        Ok::<_, Error>(gradients.chain([("loss".to_string(), bits(&loss))]).collect::<Bits>())
    });
    all.unwrap()
}

#[test]
fn text_is_trained_as_if_nothing_were_frozen() {
    let towers = LoadOptions::new().freeze([Part::Vision, Part::Audio]);
    for (family, case, part) in [
        ("gemma4-dense", "case2_images", Part::Vision),
        ("gemma4-moe", "case2_images", Part::Vision),
        ("gemma4-effective", "case2_images", Part::Vision),
        ("gemma4-effective", "case5_audio", Part::Audio),
        ("gemma4-unified", "case2_images", Part::Vision),
    ] {
        for ranks in [1, 2] {
            let trained = run(family, case, &LoadOptions::new(), ranks);
            let frozen = run(family, case, &towers, ranks);
            for (rank, (mut trained, frozen)) in trained.into_iter().zip(frozen).enumerate() {
                let place = format!("{family}, {case}, rank {rank} of {ranks}");
                let all = trained.len();
                trained.retain(|name, _| Part::of(name) == Part::Text);
                assert!(trained.len() < all, "{place}: {part} is not trained without being frozen");
                assert_eq!(trained.keys().collect::<Vec<_>>(), frozen.keys().collect::<Vec<_>>(), "{place}");
                for (name, bits) in &trained {
                    assert!(*bits == frozen[name], "{place}: {name} differs");
                }
            }
        }
    }
}

#[test]
fn patterns_freeze_what_they_name() {
    let folder = fixture("gemma4-effective/checkpoint");
    let config = Config::from_folder(&folder).unwrap();
    let load = |patterns: &[&str]| {
        let options = LoadOptions::new().freeze_matching(patterns.iter().copied())?;
        Weights::load_with(&folder, &config, DType::F32, &Device::Cpu, &options)
    };
    let all = load(&[]).unwrap();
    let patterns = ["*embed_tokens*", "model.language_model.layers.[01].*"];
    let some = load(&patterns).unwrap();
    let expected = |name: &str| {
        name.contains("embed_tokens")
            || ["0", "1"].iter().any(|i| name.starts_with(&format!("model.language_model.layers.{i}.")))
    };
    for name in all.variables().keys() {
        assert_eq!(some.frozen().contains_key(name), expected(name), "{name}");
        assert_eq!(some.variables().contains_key(name), !expected(name), "{name}");
    }
    assert!(some.frozen().keys().any(|name| name.contains("embed_tokens_per_layer")));
    assert_eq!(some.frozen().len() + some.variables().len(), all.variables().len());

    let text = load(&["model.language_model.norm.wieght"]).unwrap_err().to_string();
    assert!(text.starts_with("freeze \"model.language_model.norm.wieght\": no trained tensor of this model"), "{text}");
    assert!(text.ends_with("the nearest is model.language_model.norm.weight"), "{text}");
    let text = load(&["layers.[0"]).unwrap_err().to_string();
    assert!(
        text.contains("freeze \"layers.[0\": ") && text.contains("at character") && text.contains("[abc]"),
        "{text}"
    );
}
