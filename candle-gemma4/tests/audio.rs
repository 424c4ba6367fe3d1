//! The audio tower: batches of clips, half types, freezing, and what is refused. Its numbers are in `goldens.rs`.

mod support;

use std::collections::BTreeMap;

use candle_core::{DType, Device, IndexOp, Tensor};
use candle_gemma4::{Config, Error, Inputs, LoadOptions, Model, Part, Weights};
use support::{Case, assert_close, difference, fixture, largest, run, values, variant};

const AUDIO: u32 = 20;

/// The tiny E2B.
fn effective(dtype: DType) -> (Config, Weights) {
    let folder = fixture("gemma4-effective/checkpoint");
    let config = Config::from_folder(&folder).unwrap();
    let weights = Weights::load(&folder, &config, dtype, &Device::Cpu).unwrap();
    (config, weights)
}

fn load_variant(name: &str) -> (Config, Weights, Case) {
    let folder = variant(name);
    let config = Config::from_folder(&folder).unwrap();
    let weights = Weights::load(&folder, &config, DType::F32, &Device::Cpu).unwrap();
    (config, weights, Case::load(&folder.join("case.safetensors")))
}

fn case5() -> Case {
    Case::load(&fixture("gemma4-effective/goldens/case5_audio.safetensors"))
}

fn taps(model: &Model, inputs: &Inputs) -> BTreeMap<String, Tensor> {
    let mut taps = BTreeMap::new();
    model.embed(inputs, &mut taps).unwrap();
    taps
}

fn error(inputs: &Inputs) -> String {
    let (config, weights) = effective(DType::F32);
    Model::new(&config, &weights).unwrap().embed(inputs, &mut ()).unwrap_err().to_string()
}

/// A row with one text token before and after each run of placeholders.
fn row(runs: &[usize]) -> Tensor {
    let runs = runs.iter().flat_map(|&run| std::iter::repeat_n(AUDIO, run).chain([300]));
    let row: Vec<u32> = std::iter::once(300).chain(runs).collect();
    Tensor::new(row, &Device::Cpu).unwrap().unsqueeze(0).unwrap()
}

#[test]
fn the_tower_records_its_stages() {
    let (config, weights) = effective(DType::F32);
    let taps = taps(&Model::new(&config, &weights).unwrap(), &case5().inputs());
    let audio: Vec<_> = taps.iter().filter(|(name, _)| name.starts_with("audio.")).collect();
    let shapes: Vec<_> = audio.iter().map(|(name, x)| (name.as_str(), x.dims())).collect();
    let expected: [(&str, &[usize]); 4] = [
        ("audio.features", &[1, 10, 32]),
        ("audio.layer.0", &[1, 10, 16]),
        ("audio.subsample", &[1, 10, 16]),
        ("audio.tower_out", &[1, 10, 24]),
    ];
    assert_eq!(shapes, expected);
}

/// Nothing of a frozen tower is kept for the backward pass; what follows it is trained as before.
#[test]
fn a_frozen_tower_builds_no_graph() {
    let folder = fixture("gemma4-effective/checkpoint");
    let (config, trained) = effective(DType::F32);
    let options = LoadOptions::new().freeze([Part::Audio]);
    let frozen = Weights::load_with(&folder, &config, DType::F32, &Device::Cpu, &options).unwrap();
    let features = |weights: &Weights| {
        let taps = taps(&Model::new(&config, weights).unwrap(), &case5().inputs());
        taps["audio.features"].clone()
    };
    assert!(features(&trained).track_op());
    assert!(!features(&frozen).track_op());
    let (found, expected) = (run(&config, &frozen, &case5()), run(&config, &trained, &case5()));
    assert_eq!(found.loss, expected.loss);
    assert!(found.gradients.keys().all(|name| !name.contains("audio")));
    let audio = expected.gradients.keys().filter(|name| name.contains("audio")).count();
    assert_eq!(expected.gradients.len() - found.gradients.len(), audio);
    let name = "model.language_model.layers.0.mlp.up_proj.weight";
    assert_eq!(difference(&found.gradients[name], &expected.gradients[name]), 0.0);
}

/// Hugging Face's own features are off by a root mean square of 0.0090 and 0.0009 in these types.
#[test]
fn half_types_run_forward_and_backward() {
    let case = case5();
    for (dtype, tolerance) in [(DType::BF16, 0.014), (DType::F16, 0.0015)] {
        let (config, weights) = effective(dtype);
        let run = run(&config, &weights, &case);
        let features = run.taps["audio.features"].to_dtype(DType::F32).unwrap();
        let squares = (features - case.get("audio.features")).unwrap().sqr().unwrap().mean_all().unwrap();
        let off = squares.to_scalar::<f32>().unwrap().sqrt();
        assert!(off < tolerance, "{dtype:?}: features off by {off}");
        let name = "model.audio_tower.subsample_conv_projection.layer0.conv.weight";
        assert!(
            values(&run.gradients[name]).iter().all(|value| value.is_finite()) && largest(&run.gradients[name]) > 0.0
        );
    }
}

#[test]
fn a_clip_in_a_batch_is_what_it_is_alone() {
    let (config, weights, case) = load_variant("clipped");
    let model = Model::new(&config, &weights).unwrap();
    let together = &taps(&model, &case.inputs())["audio.features"];
    let features = case.get("input.input_features");
    for (clip, frames, soft) in [(0, 33, 9), (1, 26, 7)] {
        let ids = std::iter::once(2u32).chain(std::iter::repeat_n(config.audio_token_id.unwrap(), soft));
        let inputs = Inputs {
            input_features: Some(features.i((clip..clip + 1, ..frames)).unwrap()),
            input_features_mask: Some(Tensor::ones((1, frames), DType::U8, &Device::Cpu).unwrap()),
            ..Inputs::text(Tensor::from_iter(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap())
        };
        let alone = &taps(&model, &inputs)["audio.features"];
        assert_close("features", &alone.i(0).unwrap(), &together.i((clip, ..soft)).unwrap(), 1e-5);
    }
}

#[test]
fn what_padding_frames_hold_does_not_matter() {
    let (config, weights, case) = load_variant("audio");
    let model = Model::new(&config, &weights).unwrap();
    let mut inputs = case.inputs();
    let plain = model.embed(&inputs, &mut ()).unwrap();
    let mask = inputs.input_features_mask.as_ref().unwrap().to_dtype(DType::F32).unwrap();
    let noise = ((1.0 - mask).unwrap() * 9.0).unwrap().unsqueeze(2).unwrap();
    inputs.input_features = Some(inputs.input_features.unwrap().broadcast_add(&noise).unwrap());
    assert_eq!(difference(&plain, &model.embed(&inputs, &mut ()).unwrap()), 0.0);
}

#[test]
fn clips_fill_their_placeholders_in_order() {
    let (config, weights, case) = load_variant("clipped");
    let model = Model::new(&config, &weights).unwrap();
    let found = model.embed(&case.inputs(), &mut ()).unwrap();
    let features = case.get("audio.features");
    let ids = case.get("input.input_ids").to_vec2::<i64>().unwrap();
    for (clip, soft) in [(0, 9), (1, 7)] {
        let start = ids[clip].iter().position(|&id| id == i64::from(config.audio_token_id.unwrap())).unwrap();
        let spliced = found.i((clip, start..start + soft)).unwrap();
        assert_close("embeddings", &spliced, &features.i((clip, ..soft)).unwrap(), 1e-5);
    }
}

#[test]
fn runs_that_clips_do_not_fill_are_refused() {
    let inputs = |runs: &[usize]| Inputs { input_ids_bs: row(runs), ..case5().inputs() };
    let message = error(&inputs(&[8]));
    let expected = "row 0, tokens from 1: 8 audio clip placeholder(s), but the next audio clip(s) (from audio clip 0 \
                    on) give 9 feature(s); every run of placeholders must be filled exactly by whole audio clips";
    assert!(message.starts_with(expected), "{message}");
    let left = error(&inputs(&[]));
    assert!(left.starts_with("1 audio clip(s) given, but the placeholders of the batch take only 0"), "{left}");
    let none = error(&Inputs::text(row(&[3])));
    assert!(none.contains("3 audio clip placeholder(s), but the next audio clip(s)"), "{none}");
}

#[test]
fn features_and_mask_must_fit_the_tower_and_each_other() {
    let good = Inputs { input_ids_bs: row(&[9]), ..case5().inputs() };
    let (features, mask) = (good.input_features.clone().unwrap(), good.input_features_mask.clone().unwrap());
    let message =
        |input_features, input_features_mask| error(&Inputs { input_features, input_features_mask, ..good.clone() });
    let narrow = features.narrow(2, 0, 12).unwrap();
    let expected = "input input_features: found [1, 40, 12]; expected [clips, frames, mels] with 13 to 16 mels";
    assert!(message(Some(narrow), Some(mask.clone())).starts_with(expected));
    let expected = "input input_features_mask: found [1, 39]; expected [1, 40], to fit input_features";
    assert_eq!(message(Some(features.clone()), Some(mask.narrow(1, 0, 39).unwrap())), expected);
    let expected = "input input_features_mask: found a value of 2; expected 1 for real frames, 0 for padding";
    assert_eq!(message(Some(features.clone()), Some((&mask + &mask).unwrap())), expected);
    assert!(message(Some(features.clone()), None).starts_with("input input_features_mask: found none"));
    assert!(message(None, Some(mask)).starts_with("input input_features: found none"));
}

#[test]
fn a_model_without_a_tower_takes_no_audio() {
    let config = Config::from_folder(&support::checkpoint()).unwrap();
    let weights = Weights::load(&support::checkpoint(), &config, DType::F32, &Device::Cpu).unwrap();
    let inputs = Inputs { input_ids_bs: row(&[]), ..case5().inputs() };
    let message = Model::new(&config, &weights).unwrap().embed(&inputs, &mut ()).unwrap_err().to_string();
    assert_eq!(message, "input input_features: found audio; expected none: this model has no audio_config");
}

/// The configuration of the tiny E2B with one value of `audio_config` replaced, or removed.
fn refusal(field: &str, value: Option<&str>) -> String {
    let text = std::fs::read_to_string(fixture("gemma4-effective/checkpoint/config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let audio = json["audio_config"].as_object_mut().unwrap();
    match value {
        Some(value) => drop(audio.insert(field.to_string(), serde_json::from_str(value).unwrap())),
        None => drop(audio.remove(field)),
    }
    match Config::from_json(&json.to_string()) {
        Ok(_) => panic!("{field} = {value:?} is accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn settings_that_cannot_be_run_are_refused() {
    let cases = [
        ("model_type", "\"whisper\"", "allowed: \"gemma4_audio\""),
        ("hidden_act", "\"gelu\"", "allowed: \"silu\""),
        ("hidden_size", "0", "a whole number from 1"),
        ("hidden_size", "15", "must be even"),
        ("num_attention_heads", "3", "must divide hidden_size 16"),
        ("subsampling_conv_channels", "[16, 4, 4]", "a list of 2 whole numbers from 1"),
        ("subsampling_conv_channels", "[16,0]", "a list of 2 whole numbers from 1"),
        ("subsampling_conv_channels", "[3,4]", "the first must be at least 4"),
        ("attention_context_left", "0", "a whole number from 1"),
        ("attention_context_right", "-1", "a whole number from 0"),
        ("attention_logit_cap", "0", "a number above 0"),
        ("attention_invalid_logits_value", "-1e39", "in the range of f32"),
        ("residual_weight", "0", "a number above 0"),
        ("gradient_clipping", "-1", "a number above 0"),
        ("use_clipped_linears", "1", "true or false is needed"),
    ];
    for (field, value, reason) in cases {
        let message = refusal(field, Some(value));
        let names_field = message.starts_with(&format!("config.json: audio_config.{field} is "));
        assert!(names_field && message.contains(reason), "{field} = {value}: {message}");
    }
    let lacking = refusal("conv_kernel_size", None);
    assert_eq!(lacking, "config.json lacks 1 required field(s): audio_config.conv_kernel_size");
}

#[test]
fn absent_settings_have_the_values_of_the_library() {
    let text = std::fs::read_to_string(fixture("gemma4-effective/checkpoint/config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let audio = json["audio_config"].as_object_mut().unwrap();
    let optional = ["residual_weight", "attention_logit_cap", "attention_invalid_logits_value", "use_clipped_linears"];
    for field in optional.into_iter().chain(["gradient_clipping", "initializer_range", "hidden_act", "model_type"]) {
        audio.remove(field).unwrap();
    }
    let config = Config::from_json(&json.to_string()).unwrap();
    assert_eq!(config.audio, Config::from_json(&text).unwrap().audio);
    assert!(config.audio.unwrap().use_clipped_linears);
}

#[test]
fn bounds_that_are_no_numbers_are_refused() {
    let (config, weights, _) = load_variant("clipped");
    let mut all: std::collections::HashMap<String, Tensor> = weights.buffers().clone().into_iter().collect();
    all.extend(weights.variables().iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())));
    let name = "model.audio_tower.layers.1.self_attn.post.output_max";
    all.insert(name.to_string(), Tensor::new(f32::NAN, &Device::Cpu).unwrap());
    let dir = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(&all, dir.path().join("model.safetensors")).unwrap();
    let weights = Weights::load(dir.path(), &config, DType::F32, &Device::Cpu).unwrap();
    match Model::new(&config, &weights).unwrap_err() {
        Error::Weight { name: found, reason } => {
            assert_eq!((found.as_str(), reason.as_str()), (name, "a bound cannot be NaN"));
        }
        other => panic!("{other}"),
    }
}

/// Raw frames of unified models: a norm without weight and a projection; no golden holds them.
#[test]
fn frames_of_unified_models_fill_their_placeholders() {
    let text = std::fs::read_to_string(fixture("gemma4-unified/checkpoint/config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["audio_config"] = serde_json::json!({"audio_embed_dim": 6, "rms_norm_eps": 0.3});
    let config = Config::from_json(&json.to_string()).unwrap();
    let weights = Weights::random(&config, DType::F32, &Device::Cpu, 3).unwrap();
    let frames: Vec<f32> = (0..24).map(|n| (n as f32).sin()).collect();
    let frames = Tensor::from_vec(frames, (2, 2, 6), &Device::Cpu).unwrap();
    let inputs = Inputs {
        input_features: Some(frames.clone()),
        input_features_mask: Some(Tensor::new(&[[1u8, 0], [1, 1]], &Device::Cpu).unwrap()),
        ..Inputs::text(row(&[1, 2]))
    };
    let embeds = Model::new(&config, &weights).unwrap().embed(&inputs, &mut ()).unwrap();
    let mean_square = (frames.sqr().unwrap().mean_keepdim(2).unwrap() + 0.3).unwrap();
    let normed = frames.broadcast_div(&mean_square.sqrt().unwrap()).unwrap();
    let weight = &weights.variables()["model.embed_audio.embedding_projection.weight"];
    let expected = normed.broadcast_matmul(&weight.t().unwrap()).unwrap();
    for (token, clip, frame) in [(1, 0, 0), (3, 1, 0), (4, 1, 1)] {
        let found = embeds.i((0, token)).unwrap();
        assert_close("embedding", &found, &expected.i((clip, frame)).unwrap(), 1e-5);
    }
}
