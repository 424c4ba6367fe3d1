//! Which modules targets mean, and what is said where they mean nothing.

mod support;

use std::collections::BTreeMap;

use candle_core::{DType, Device};
use candle_gemma4::{Config, Error, LoraError, LoraOptions, LoraReport, LoraTargets, Part, Weights};
use support::{fixture, variant};

fn config(family: &str) -> Config {
    Config::from_folder(&fixture(family).join("checkpoint")).unwrap()
}

fn add(config: &Config, options: &LoraOptions) -> Result<(Weights, LoraReport), Error> {
    let mut weights = Weights::random(config, DType::F32, &Device::Cpu, 1)?;
    let report = weights.add_lora(config, options, 1)?;
    Ok((weights, report))
}

fn options(targets: &str, parts: &[Part]) -> LoraOptions {
    LoraOptions::new(2, 4.0).targets(targets.parse().unwrap()).parts(parts.iter().copied())
}

fn refusal(family: &str, options: &LoraOptions) -> LoraError {
    match add(&config(family), options).err().unwrap() {
        Error::Lora(error) => *error,
        other => panic!("{other}"),
    }
}

/// How many modules, by part.
fn counts(family: &str, options: &LoraOptions) -> BTreeMap<Part, usize> {
    add(&config(family), options).unwrap().1.targets[0].modules.clone()
}

#[test]
fn matches_are_counted_by_part() {
    use Part::{Audio, Text, Vision};
    let q_proj = |parts: &[Part]| options("q_proj", parts);
    assert_eq!(counts("gemma4-effective", &q_proj(&Part::ALL)), BTreeMap::from([(Text, 8), (Vision, 2), (Audio, 1)]));
    assert_eq!(counts("gemma4-dense", &q_proj(&[Text, Vision])), BTreeMap::from([(Text, 6), (Vision, 2)]));
    assert_eq!(counts("gemma4-effective", &q_proj(&[Vision])), BTreeMap::from([(Vision, 2)]));
    let default = LoraOptions::new(2, 4.0).targets(LoraTargets::Names(vec!["q_proj".into()]));
    assert_eq!(counts("gemma4-effective", &default), BTreeMap::from([(Text, 8)]), "text only unless asked");
    // Layers that read the keys of another one have none to adapt, and where keys are values there are no others.
    assert_eq!(counts("gemma4-effective", &options("k_proj", &[Text])), BTreeMap::from([(Text, 5)]));
    assert_eq!(counts("gemma4-dense", &options("v_proj", &[Text])), BTreeMap::from([(Text, 4)]));
    // As PEFT counts them.
    let all = options("All-Linear", &Part::ALL);
    assert_eq!(counts("gemma4-effective", &all), BTreeMap::from([(Text, 67), (Vision, 16), (Audio, 14)]));
    let towers = options("all-linear", &[Text, Vision]);
    assert_eq!(counts("gemma4-dense", &towers), BTreeMap::from([(Text, 40), (Vision, 16)]));
    assert_eq!(counts("gemma4-moe", &towers), BTreeMap::from([(Text, 38), (Vision, 16)]));
    assert_eq!(counts("gemma4-unified", &towers), BTreeMap::from([(Text, 20), (Vision, 2)]));
}

#[test]
fn targets_are_ends_of_paths_as_in_peft() {
    let count = |target: &str| counts("gemma4-dense", &options(target, &[Part::Text, Part::Vision]))[&Part::Text];
    let vision = |target: &str| counts("gemma4-dense", &options(target, &[Part::Text, Part::Vision]))[&Part::Vision];
    assert_eq!((count("self_attn.q_proj"), vision("self_attn.q_proj")), (6, 2));
    assert_eq!((count("1.self_attn.q_proj"), vision("1.self_attn.q_proj")), (1, 1));
    assert_eq!((count("q_proj.linear"), vision("q_proj.linear")), (0, 2));
    assert_eq!((count("linear"), vision("linear")), (0, 14));
    assert_eq!(count("model.language_model.layers.3.mlp.up_proj"), 1);
    assert!(matches!(refusal("gemma4-dense", &options("proj", &[Part::Text])), LoraError::NoMatch { .. }));
    assert_eq!(counts("gemma4-moe", &options("proj", &[Part::Text]))[&Part::Text], 5, "the routers");
    // Experts' matrices of this name are no modules.
    assert_eq!(counts("gemma4-moe", &options("down_proj", &[Part::Text]))[&Part::Text], 5);
}

#[test]
fn a_module_that_two_targets_name_has_one_adapter() {
    let (weights, report) =
        add(&config("gemma4-dense"), &options("q_proj, 0.self_attn.q_proj", &[Part::Text])).unwrap();
    assert_eq!((report.modules, weights.variables().len()), (6, 12));
    let parameters: usize = weights.variables().values().map(|variable| variable.elem_count()).sum();
    assert_eq!(report.parameters, parameters);
    assert_eq!(
        report.to_string(),
        format!(
            "LoRA target q_proj: 6 text\nLoRA target 0.self_attn.q_proj: 1 text\nLoRA: 6 modules, {parameters} parameters"
        )
    );
    let names: Vec<&String> = weights.variables().keys().collect();
    assert_eq!(names[0], "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight");
    assert_eq!(weights.variables()[names[0]].dims(), [2, 32]);
    assert_eq!(names[1], "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_B.weight");
    assert_eq!(weights.variables()[names[1]].dims(), [64, 2]);
    assert!(weights.frozen().contains_key("model.language_model.embed_tokens.weight"));
}

/// transformers' unified models hold their embedder under another name than files do; PEFT goes by the module.
#[test]
fn names_are_those_of_modules() {
    let (weights, _) = add(&config("gemma4-unified"), &options("all-linear", &[Part::Vision])).unwrap();
    let names: Vec<&str> =
        weights.variables().keys().map(|name| name.strip_prefix("base_model.model.").unwrap()).collect();
    assert_eq!(
        names,
        [
            "model.embed_vision.multimodal_embedder.embedding_projection.lora_A.weight",
            "model.embed_vision.multimodal_embedder.embedding_projection.lora_B.weight",
            "model.embed_vision.patch_dense.lora_A.weight",
            "model.embed_vision.patch_dense.lora_B.weight",
        ]
    );
    let text_only = Config::from_folder(&variant("text_only")).unwrap();
    let (weights, _) = add(&text_only, &options("q_proj", &[Part::Text])).unwrap();
    let first = weights.variables().keys().next().unwrap();
    assert_eq!(first, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
}

#[test]
fn a_target_that_matches_nothing_is_told_with_its_neighbours() {
    let message = |family: &str, target: &str, parts: &[Part]| refusal(family, &options(target, parts)).to_string();
    assert_eq!(
        message("gemma4-dense", "qproj", &[Part::Text]),
        "LoRA target \"qproj\" matches no projection in the chosen part(s) text; did you mean q_proj?; their projections \
         are: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    );
    assert_eq!(
        message("gemma4-effective", "ffw_layer_1", &[Part::Text, Part::Vision]).split("; their").next().unwrap(),
        "LoRA target \"ffw_layer_1\" matches no projection in the chosen part(s) text, vision; it would match 2 in audio"
    );
    let found = refusal("gemma4-effective", &options("mlp.q_proj", &[Part::Vision]));
    match found {
        LoraError::NoMatch { nearest, parts, elsewhere, known, .. } => {
            assert_eq!((parts, elsewhere), (vec![Part::Vision], vec![]));
            assert_eq!(nearest.as_deref(), Some("mlp.up_proj"));
            assert!(known.contains(&"embedding_projection".to_string()) && !known.contains(&"linear".to_string()));
        }
        other => panic!("{other}"),
    }
    assert!(!message("gemma4-dense", "something_else", &[Part::Text]).contains("did you mean"));
    assert_eq!(
        message("gemma4-dense", "q_proj", &[Part::Text, Part::Audio]),
        "LoRA is asked for in the audio part, which this model does not have; leave it out"
    );
    // One good target does not hide a bad one.
    assert!(message("gemma4-dense", "q_proj,k_prj", &[Part::Text]).contains("\"k_prj\""));
}

#[test]
fn what_is_no_projection_is_refused_by_its_kind() {
    let text = |family: &str, target: &str| refusal(family, &options(target, &[Part::Text])).to_string();
    assert_eq!(
        text("gemma4-dense", "lm_head"),
        "LoRA target \"lm_head\" is the head (lm_head.weight), which cannot be adapted; targets are projections such as \
         q_proj"
    );
    assert!(
        text("gemma4-dense", "embed_tokens").contains("an embedding table (model.language_model.embed_tokens.weight)")
    );
    assert!(text("gemma4-effective", "embed_tokens_per_layer").contains("an embedding table"));
    for target in ["experts", "gate_up_proj", "experts.down_proj", "0.experts.gate_up_proj"] {
        let message = text("gemma4-moe", target);
        assert!(message.contains("a stack of experts' matrices (model.language_model.layers.0.experts."), "{message}");
    }
    let audio = |target: &str| refusal("gemma4-effective", &options(target, &[Part::Audio])).to_string();
    assert!(audio("depthwise_conv1d").contains("a convolution"));
    assert!(audio("layer0.conv").contains("a convolution"));
}

#[test]
fn settings_are_checked() {
    let message = |options: LoraOptions| refusal("gemma4-dense", &options).to_string();
    let allowed = "a whole number from 1 on; usual are 8 to 64";
    assert_eq!(message(LoraOptions::new(0, 1.0)), format!("LoRA rank is 0; allowed: {allowed}"));
    for alpha in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let message = message(LoraOptions::new(1, alpha));
        assert!(message.starts_with(&format!("LoRA alpha is {alpha}; allowed: a finite number above 0")), "{message}");
    }
    for dropout in [-0.1, 1.0, f64::NAN] {
        let message = message(LoraOptions::new(1, 1.0).dropout(dropout));
        assert!(
            message.starts_with(&format!("LoRA dropout is {dropout}; allowed: 0, or a number between")),
            "{message}"
        );
    }
    let none = message(LoraOptions::new(1, 1.0).targets(LoraTargets::Names(Vec::new())));
    assert_eq!(none, "no LoRA targets given; name modules such as q_proj and v_proj, or all-linear");
    let parts = message(LoraOptions::new(1, 1.0).parts([]));
    assert_eq!(parts, "no part of the model given for LoRA; choose from text, vision, audio");
    assert_eq!(" ,q_proj,, v_proj ".parse(), Ok(LoraTargets::Names(vec!["q_proj".into(), "v_proj".into()])));
}

#[test]
fn weights_have_adapters_once() {
    let config = config("gemma4-dense");
    let (mut weights, _) = add(&config, &LoraOptions::new(1, 1.0)).unwrap();
    let message = weights.add_lora(&config, &LoraOptions::new(1, 1.0), 1).unwrap_err().to_string();
    assert_eq!(message, "these weights have LoRA adapters already; load them anew to give them others");
    let folder = variant("lora").join("dense");
    assert_eq!(weights.load_lora(&folder, &config).unwrap_err().to_string(), message);
    assert_eq!(weights.lora().map(|options| (options.rank(), options.alpha())), Some((1, 1.0)));
}
