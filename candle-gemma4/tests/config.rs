//! What `config.json` may say, and the words with which the rest is refused.

mod support;

use candle_cp::{LayerWork, MaskRule};
use candle_gemma4::{Architecture, Config, Error, LayerKind, RopeKind, vision_groups};
use support::{checkpoint, config_text, edited, edited_config, fixture, variant};

fn refusal(changes: &[(&str, &str)]) -> String {
    match Config::from_json(&edited(changes)) {
        Ok(_) => panic!("{changes:?} is accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn every_setting_is_read() {
    let config = Config::from_folder(&checkpoint()).unwrap();
    let text = &config.text;
    assert_eq!((text.vocab_size, text.hidden_size, text.layers[0].intermediate_size), (512, 32, 64));
    assert_eq!((text.num_hidden_layers, text.num_attention_heads, text.sliding_window), (6, 4, 16));
    let layers: Vec<_> = text.layers.iter().map(|l| (l.kind, l.head_dim, l.num_key_value_heads)).collect();
    let (sliding, full) = ((LayerKind::Sliding, 16, 2), (LayerKind::Full, 32, 1));
    assert_eq!(layers, [sliding, sliding, full, sliding, sliding, full]);
    assert!(text.layers.iter().all(|layer| layer.keys_are_values == (layer.kind == LayerKind::Full)));
    assert_eq!(text.final_logit_softcapping, Some(8.0));
    assert!(text.bidirectional_images && config.tie_word_embeddings && !text.attention_bias);
    let rope = text.rope(LayerKind::Full).unwrap();
    assert_eq!((rope.kind, rope.theta, rope.partial_rotary_factor), (RopeKind::Proportional, 1e6, 0.25));
    assert_eq!(
        (text.pad_token_id, text.bos_token_id, config.eos_token_ids.as_slice()),
        (Some(0), Some(2), &[1, 15][..])
    );
    let vision = config.vision.as_ref().unwrap();
    assert_eq!((vision.patch_size, vision.pooling_kernel_size, vision.position_embedding_size), (4, 3, 128));
    assert_eq!((vision.rope_theta, vision.standardize, vision.patch_len()), (100.0, true, 48));
    assert_eq!((config.image_token_id, config.boi_token_id, config.eoi_token_id), (19, 17, 21));
    assert_eq!(config.to_json(), config_text());
}

#[test]
fn work_of_the_layers() {
    let text = Config::from_folder(&checkpoint()).unwrap().text;
    // Four sliding layers and two full ones, 4 query heads each.
    let sliding = LayerWork { rule: MaskRule::sliding(16).with_groups(), weight: 4.0 * 4.0 * 16.0 };
    assert_eq!(text.layer_work(), [sliding, LayerWork { rule: MaskRule::causal(), weight: 2.0 * 4.0 * 32.0 }]);
    let mut full = text.clone();
    full.layers.retain(|layer| layer.kind == LayerKind::Full);
    assert_eq!(full.layer_work().len(), 1);
}

#[test]
fn both_spellings_of_layer_sizes_agree() {
    let old = Config::from_folder(&checkpoint()).unwrap();
    let new = std::fs::read_to_string(fixture("gemma4-dense/config_resaved.json")).unwrap();
    let new = Config::from_json(&new).unwrap();
    assert_eq!(old.text, new.text);
    assert_eq!(old.vision, new.vision);
}

#[test]
fn global_key_heads_count_only_where_keys_are_values() {
    let config = edited_config(&[("text_config.attention_k_eq_v", "false")]);
    assert_eq!(config.text.layers[2].num_key_value_heads, 2);
    assert!(!config.text.layers[2].keys_are_values);
    assert_eq!(config.text.layers[2].head_dim, 32);
}

#[test]
fn other_values_are_kept() {
    let config = edited_config(&[
        ("text_config.rms_norm_eps", "1e-5"),
        ("vision_config.rms_norm_eps", "2e-4"),
        ("text_config.rope_parameters.sliding_attention.rope_theta", "5000"),
        ("text_config.rope_parameters.full_attention.factor", "8"),
        ("vision_config.rope_parameters.rope_theta", "77.5"),
        ("text_config.final_logit_softcapping", "null"),
        ("text_config.use_bidirectional_attention", "null"),
        ("text_config.pad_token_id", "null"),
        ("text_config.attention_bias", "true"),
        ("tie_word_embeddings", "false"),
        ("video_token_id", "null"),
    ]);
    assert_eq!((config.text.rms_norm_eps, config.vision.as_ref().unwrap().rms_norm_eps), (1e-5, 2e-4));
    assert_eq!(config.text.rope(LayerKind::Sliding).unwrap().theta, 5000.0);
    assert_eq!(config.text.rope(LayerKind::Full).unwrap().factor, 8.0);
    assert_eq!(config.vision.as_ref().unwrap().rope_theta, 77.5);
    assert_eq!((config.text.final_logit_softcapping, config.text.pad_token_id), (None, None));
    assert!(!config.text.bidirectional_images && config.text.attention_bias && !config.tie_word_embeddings);
    assert_eq!(config.video_token_id, None);
}

#[test]
fn the_top_level_decides_on_the_tied_head() {
    let absent = edited_config(&[("tie_word_embeddings", "absent"), ("text_config.tie_word_embeddings", "false")]);
    assert!(absent.tie_word_embeddings);
}

#[test]
fn text_only_models_have_no_tower() {
    for vision in ["null", "absent"] {
        let config = edited_config(&[("vision_config", vision), ("image_token_id", "absent")]);
        assert!(config.vision.is_none());
    }
}

/// The text-only variant's configuration with the given changes.
fn text_only(changes: impl Fn(&mut serde_json::Value)) -> candle_gemma4::Result<Config> {
    let text = std::fs::read_to_string(variant("text_only").join("config.json")).unwrap();
    let mut json = serde_json::from_str(&text).unwrap();
    changes(&mut json);
    Config::from_json(&json.to_string())
}

#[test]
fn a_text_only_checkpoint_has_its_settings_at_the_top() {
    let config = text_only(|_| ()).unwrap();
    assert_eq!(config.architecture, Architecture::TextOnly);
    assert!(config.vision.is_none() && config.tie_word_embeddings);
    assert_eq!((config.eos_token_ids.as_slice(), config.text.pad_token_id), (&[1, 5][..], Some(3)));
    let layer = |index: usize| (config.text.layers[index].head_dim, config.text.layers[index].num_key_value_heads);
    assert_eq!((layer(1), layer(2)), ((8, 3), (12, 2)));
    assert!(vision_groups(&[9, 10, 11, 9], &config).iter().all(|&group| group == -1), "all ids are text");
    let older = text_only(|json| {
        json.as_object_mut().unwrap().remove("per_layer_config");
        (json["global_head_dim"], json["num_global_key_value_heads"]) = (12.into(), 2.into());
    });
    assert_eq!(older.unwrap().text, config.text);

    let message = |changes: &dyn Fn(&mut serde_json::Value)| text_only(changes).unwrap_err().to_string();
    let missing = message(&|json| json["head_dim"] = serde_json::Value::Null);
    assert_eq!(missing, "config.json lacks 1 required field(s): head_dim");
    let odd = message(&|json| json["per_layer_config"]["4"]["head_dim"] = 9.into());
    assert!(odd.starts_with("config.json: head_dim is 9: the head size of layer 4 must be even"), "{odd}");
    let tower = message(&|json| json["vision_config"] = serde_json::json!({}));
    assert!(tower.contains("vision_config is an object: a text-only model"), "{tower}");
}

#[test]
fn proportional_frequencies_use_the_full_head_size() {
    let config = Config::from_folder(&checkpoint()).unwrap();
    let full = config.text.rope(LayerKind::Full).unwrap().inverse_frequencies(32);
    assert_eq!(full.len(), 16);
    assert!((full[3] - 1e6f64.powf(-6.0 / 32.0)).abs() < 1e-15);
    assert!(full[4..].iter().all(|&frequency| frequency == 0.0), "a quarter of the pairs turn");
}

#[test]
fn all_missing_fields_are_named_at_once() {
    let message = refusal(&[
        ("text_config.hidden_size", "absent"),
        ("text_config.rms_norm_eps", "null"),
        ("vision_config.patch_size", "absent"),
        ("image_token_id", "absent"),
    ]);
    let names = "text_config.hidden_size, text_config.rms_norm_eps, vision_config.patch_size, image_token_id";
    assert_eq!(message, format!("config.json lacks 4 required field(s): {names}"));
    assert!(refusal(&[("text_config", "absent")]).ends_with("1 required field(s): text_config"));
    assert!(refusal(&[("model_type", "absent")]).ends_with("1 required field(s): model_type"));
    assert!(refusal(&[("text_config.global_head_dim", "absent")]).ends_with(": text_config.global_head_dim"));
    let rope = "text_config.rope_parameters.full_attention";
    assert!(refusal(&[(rope, "absent")]).ends_with(&format!("1 required field(s): {rope}")));
    let theta = "text_config.rope_parameters.sliding_attention.rope_theta";
    assert!(refusal(&[(theta, "absent")]).ends_with(&format!("1 required field(s): {theta}")));
}

#[test]
fn what_cannot_run_is_refused_with_field_and_value() {
    let cases = [
        (
            "model_type",
            "\"qwen3_5\"",
            "model family is not supported yet; allowed: \"gemma4\", \"gemma4_text\", \"gemma4_unif",
        ),
        ("text_config.model_type", "\"gemma3_text\"", "not supported yet; allowed: \"gemma4_text\""),
        ("vision_config.model_type", "\"siglip\"", "not supported yet; allowed: \"gemma4_vision\""),
        ("text_config.hidden_size_per_layer_input", "-8", "a whole number from 0"),
        ("text_config.num_kv_shared_layers", "6", "must be below num_hidden_layers 6"),
        ("text_config.num_kv_shared_layers", "4", "layer 2 is \"full_attention\" and no layer before layer 2 is"),
        ("text_config.attention_dropout", "0.1", "attention dropout is not supported yet"),
        ("text_config.hidden_activation", "\"silu\"", "allowed: \"gelu_pytorch_tanh\""),
        ("text_config.use_bidirectional_attention", "\"all\"", "allowed: null, \"vision\""),
        ("text_config.final_logit_softcapping", "0", "a number above 0 is needed"),
        ("text_config.hidden_size", "0", "a whole number from 1"),
        ("text_config.hidden_size", "32.5", "a whole number from 1"),
        ("text_config.sliding_window", "-4", "a whole number from 1"),
        ("text_config.num_hidden_layers", "5", "layer_types has 6 entries"),
        ("text_config.pad_token_id", "512", "must be below vocab_size 512"),
        ("text_config.num_attention_heads", "3", "must be a multiple of the 2 key heads of layer 0"),
        ("text_config.global_head_dim", "33", "must be even"),
        ("text_config.attention_bias", "1", "true or false is needed"),
        ("text_config.rope_parameters.full_attention.rope_type", "\"yarn\"", "allowed: \"default\", \"linear\""),
        ("text_config.rope_parameters.full_attention.partial_rotary_factor", "1.5", "a number from 0 to 1"),
        ("text_config.rope_parameters.sliding_attention.partial_rotary_factor", "0.5", "it must be 1"),
        ("text_config.rope_parameters.sliding_attention.factor", "2", "has no factor"),
        ("vision_config.use_clipped_linears", "1", "true or false is needed"),
        ("vision_config.attention_bias", "true", "biases in the vision tower are not supported yet"),
        ("vision_config.attention_dropout", "0.2", "attention dropout is not supported yet"),
        ("vision_config.hidden_activation", "\"gelu\"", "allowed: \"gelu_pytorch_tanh\""),
        ("vision_config.head_dim", "14", "must be a multiple of 4"),
        ("vision_config.num_key_value_heads", "4", "must be a multiple of num_key_value_heads 4"),
        ("vision_config.rope_parameters.rope_type", "\"linear\"", "allowed: \"axial\", \"default\""),
    ];
    for (field, value, reason) in cases {
        let message = refusal(&[(field, value)]);
        let names_field = message.contains(&format!("{field} is {value}: "))
            || (field.ends_with("_head_dim") && message.contains("text_config.head_dim is 33"))
            || (field.ends_with("vision_config.num_key_value_heads") && message.contains("num_attention_heads is 2"));
        assert!(names_field, "{field} = {value}: {message}");
        assert!(message.contains(reason), "{field} = {value}: {message}");
    }
}

/// What would only fail at the first placeholder, on the ranks that hold one.
#[test]
fn per_layer_embeddings_need_a_row_for_padding() {
    let on = ("text_config.hidden_size_per_layer_input", "8");
    let small = [on, ("text_config.vocab_size_per_layer_input", "5"), ("text_config.pad_token_id", "5")];
    let message = refusal(&small);
    assert!(message.contains("pad_token_id is 5: must be below vocab_size_per_layer_input 5"), "{message}");
    let message = refusal(&[on, ("text_config.pad_token_id", "null")]);
    assert!(message.contains("text_config.pad_token_id is null: a token id is needed"), "{message}");
    let text = text_only(|json| {
        json["hidden_size_per_layer_input"] = 8.into();
        json["pad_token_id"] = serde_json::Value::Null;
    });
    assert!(text.unwrap().text.per_layer.is_some(), "a text has no placeholders");
}

#[test]
fn the_side_of_merged_patches_follows_from_two_others() {
    let text = std::fs::read_to_string(fixture("gemma4-unified/checkpoint/config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["vision_config"]["model_patch_size"] = 8.into();
    assert!(Config::from_json(&json.to_string()).is_ok());
    json["vision_config"]["model_patch_size"] = 48.into();
    let message = Config::from_json(&json.to_string()).unwrap_err().to_string();
    let expected = "vision_config.model_patch_size is 48: must be patch_size times pooling_kernel_size, 8";
    assert!(message.contains(expected), "{message}");
    json["vision_config"]["model_patch_size"] = serde_json::Value::Null;
    json["vision_config"]["patch_size"] = i32::MAX.into();
    let message = Config::from_json(&json.to_string()).unwrap_err().to_string();
    let expected = "vision_config.patch_size is 2147483647: times pooling_kernel_size is ";
    assert!(message.contains(expected) && message.contains("at most 4096 make a patch"), "{message}");
}

#[test]
fn features_of_other_checkpoints_are_refused() {
    let types = "[\"full_attention\", \"linear_attention\"]";
    let layers = [("text_config.layer_types", types), ("text_config.num_hidden_layers", "2")];
    assert!(refusal(&layers).contains("layer type \"linear_attention\" is not supported yet"));
    let types = "[\"full_attention\", \"sliding_attention\"]";
    let layers = [("text_config.layer_types", types), ("text_config.num_hidden_layers", "2")];
    assert!(refusal(&layers).contains("the last layer must be \"full_attention\""));
}

#[test]
fn layer_overrides_are_checked() {
    let overrides = |value| refusal(&[("text_config.per_layer_config", value)]);
    assert!(overrides("{\"9\": {\"head_dim\": 32}}").contains("per_layer_config is \"9\": a layer index from 0 to 5"));
    let unknown = overrides("{\"2\": {\"rope\": 1}}");
    assert!(unknown.contains("per_layer_config.2.rope is 1: not supported yet; allowed: head_dim"), "{unknown}");
    let uneven = overrides("{\"2\": {\"head_dim\": 32}, \"5\": {\"head_dim\": 16}}");
    assert!(uneven.contains("layer 5 differs from an earlier full_attention layer with 32"), "{uneven}");
}

#[test]
fn text_that_is_not_json_is_named() {
    let error = Config::from_json("{\"model_type\": ").unwrap_err();
    assert!(matches!(error, Error::Json { .. }));
    assert!(error.to_string().starts_with("the configuration is not valid JSON: EOF"));
    let error = Config::from_folder(&fixture("nowhere")).unwrap_err();
    assert!(error.to_string().contains("nowhere/config.json"), "{error}");
}

#[test]
fn groups_are_maximal_runs_of_image_and_video_tokens() {
    let config = Config::from_folder(&checkpoint()).unwrap(); // image 19, video 23
    let groups = vision_groups(&[5, 19, 19, 23, 21, 7, 19, 17, 19], &config);
    assert_eq!(groups, [-1, 0, 0, 0, -1, -1, 1, -1, 2]);
    assert_eq!(vision_groups(&[19, 19], &config), [0, 0]);
    assert!(vision_groups(&[], &config).is_empty());
}
