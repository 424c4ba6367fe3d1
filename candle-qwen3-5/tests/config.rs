//! What `config.json` may say, and the words with which the rest is refused.

mod support;

use candle_cp::{LayerWork, MaskRule};
use candle_qwen3_5::{Architecture, Config, DeltaNetConfig, Error, LayerKind, MlpConfig, MoeConfig};
use support::{checkpoint, config_text, edited, variant};

const DENSE: &str = "qwen3_5-dense";
const MOE: &str = "qwen3_5-moe";

fn read(family: &str, changes: &[(&str, &str)]) -> Config {
    Config::from_json(&edited(family, changes)).unwrap()
}

#[track_caller]
fn assert_refused(family: &str, changes: &[(&str, &str)], words: &str) {
    match Config::from_json(&edited(family, changes)) {
        Ok(_) => panic!("{changes:?} is accepted"),
        Err(error) => assert!(error.to_string().contains(words), "{error}"),
    }
}

#[test]
fn every_setting_is_read() {
    use LayerKind::{Full, Linear};
    let config = Config::from_folder(&checkpoint(DENSE)).unwrap();
    let text = &config.text;
    assert_eq!(config.architecture, Architecture::Dense);
    assert_eq!((text.vocab_size, text.hidden_size, text.mlp), (512, 32, MlpConfig::Dense(64)));
    assert_eq!((text.num_attention_heads, text.num_key_value_heads, text.head_dim), (4, 2, 32));
    assert_eq!(text.layers, [Linear, Linear, Linear, Full, Linear, Full]);
    let delta = DeltaNetConfig { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 16, kernel: 4 };
    assert_eq!((text.delta_net, delta.channels(), delta.value_width()), (delta, 128, 64));
    assert_eq!((text.rope.theta, text.rope.turning, text.rope.sections), (1e7, 16, [3, 3, 2]));
    assert_eq!((text.rms_norm_eps, text.initializer_range, text.attention_bias), (1e-6, 0.02, false));
    assert_eq!((text.pad_token_id, text.bos_token_id, config.eos_token_ids.as_slice()), (None, None, &[500][..]));
    assert_eq!((config.image_token_id, config.video_token_id), (504, 505));
    assert_eq!((config.vision_start_token_id, config.vision_end_token_id), (501, 502));
    assert!(!config.tie_word_embeddings);
    let vision = &config.vision.as_ref().unwrap().shape;
    assert_eq!((vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size), (2, 24, 2, 40));
    assert_eq!((vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size), (4, 2, 2));
    assert_eq!((vision.num_position_embeddings, vision.out_hidden_size, vision.in_channels), (36, 32, 3));
    assert_eq!(vision.rope_theta, 1e4);
    assert_eq!(config.to_json(), config_text(DENSE));
    let moe = Config::from_folder(&checkpoint(MOE)).unwrap();
    let experts = MoeConfig { num_experts: 8, top_k: 2, intermediate_size: 16, shared_intermediate_size: 24 };
    assert_eq!((moe.architecture, moe.text.mlp), (Architecture::Moe, MlpConfig::Moe(experts)));
}

#[test]
fn absent_settings_are_those_of_the_library() {
    let base = Config::from_folder(&checkpoint(DENSE)).unwrap();
    let absent = [
        "text_config.layer_types",
        "text_config.rope_parameters.partial_rotary_factor",
        "text_config.rope_parameters.mrope_section",
        "text_config.rope_parameters.rope_type",
        "text_config.rope_parameters.mrope_interleaved",
        "text_config.attention_bias",
        "tie_word_embeddings",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    ];
    let config = read(DENSE, &absent.map(|field| (field, "absent")));
    let full = (0..6).filter(|&layer| config.text.layers[layer] == LayerKind::Full);
    assert_eq!(full.collect::<Vec<_>>(), [3]);
    assert_eq!((config.text.rope.turning, config.text.rope.sections), (8, [11, 11, 10]));
    assert_eq!((config.image_token_id, config.video_token_id), (248_056, 248_057));
    assert_eq!((config.vision_start_token_id, config.vision_end_token_id), (248_053, 248_054));
    assert_eq!(config.tie_word_embeddings, base.tie_word_embeddings);
    let beside = [
        ("text_config.rope_parameters.partial_rotary_factor", "absent"),
        ("text_config.partial_rotary_factor", "0.75"),
        ("text_config.layer_types", "absent"),
        ("text_config.full_attention_interval", "2"),
        ("text_config.tie_word_embeddings", "true"),
    ];
    let config = read(DENSE, &beside);
    assert_eq!(config.text.rope.turning, 24);
    assert_eq!(config.text.layers[..4], [LayerKind::Linear, LayerKind::Full].repeat(2));
    assert!(!config.tie_word_embeddings, "the one of the whole file decides");
}

#[test]
fn text_only_models_are_their_own_configuration() {
    let dense = Config::from_folder(&variant("dense")).unwrap();
    assert_eq!((dense.architecture, dense.vision.is_none()), (Architecture::DenseText, true));
    assert!(dense.tie_word_embeddings && dense.text.attention_bias);
    assert_eq!((dense.text.pad_token_id, dense.eos_token_ids.as_slice()), (Some(2), &[7, 9][..]));
    let moe = Config::from_folder(&variant("moe")).unwrap();
    assert_eq!(moe.architecture, Architecture::MoeText);
    let json = std::fs::read_to_string(variant("dense").join("config.json")).unwrap();
    let error = Config::from_json(&json.replacen('{', "{\"vision_config\": {},", 1)).unwrap_err().to_string();
    assert!(error.contains("vision_config is an object: a text-only model"), "{error}");
}

#[test]
fn work_of_the_layers() {
    let text = Config::from_folder(&checkpoint(DENSE)).unwrap().text;
    assert_eq!(text.layer_work(), [LayerWork { rule: MaskRule::causal(), weight: 2.0 * 4.0 * 32.0 }]);
}

#[test]
fn all_missing_fields_are_named() {
    let changes = [
        ("text_config.linear_conv_kernel_dim", "absent"),
        ("text_config.rope_parameters", "null"),
        ("text_config.intermediate_size", "absent"),
        ("vision_config.depth", "absent"),
    ];
    let Err(Error::MissingFields { mut fields }) = Config::from_json(&edited(DENSE, &changes)) else {
        panic!("accepted or another error");
    };
    fields.sort();
    let mut expected = changes.map(|(field, _)| field.to_string());
    expected.sort();
    assert_eq!(fields, expected);
    assert_refused(DENSE, &[("vision_config", "null")], "lacks 1 required field(s): vision_config");
    assert_refused(DENSE, &[("text_config", "absent")], "text_config");
    assert_refused(DENSE, &[("model_type", "absent")], "model_type");
    assert_refused(MOE, &[("text_config.num_experts", "absent")], "text_config.num_experts");
    assert_refused(DENSE, &[("text_config.rope_parameters.rope_theta", "absent")], "rope_parameters.rope_theta");
}

#[test]
fn what_cannot_run_is_refused_by_name() {
    for (field, value, words) in [
        ("model_type", "\"qwen3_vl\"", "allowed: \"qwen3_5\", \"qwen3_5_text\", \"qwen3_5_moe\", \"qwen3_5_moe_text\""),
        ("text_config.model_type", "\"qwen3_5_moe_text\"", "text_config.model_type"),
        ("text_config.hidden_act", "\"gelu\"", "allowed: \"silu\""),
        ("text_config.attention_dropout", "0.1", "attention dropout"),
        ("text_config.attn_output_gate", "false", "text_config.attn_output_gate is false"),
        ("text_config.mamba_ssm_dtype", "\"bfloat16\"", "allowed: \"float32\""),
        ("text_config.layer_types", "[\"sliding_attention\"]", "num_hidden_layers is 6: layer_types has 1 entries"),
        ("text_config.num_key_value_heads", "3", "must be a multiple of num_key_value_heads 3"),
        ("text_config.linear_num_value_heads", "3", "must be a multiple of linear_num_key_heads 2"),
        ("text_config.linear_conv_kernel_dim", "0", "text_config.linear_conv_kernel_dim is 0"),
        ("text_config.rope_parameters.rope_type", "\"yarn\"", "allowed: \"default\""),
        ("text_config.rope_parameters.mrope_interleaved", "false", "interleaved"),
        ("text_config.rope_parameters.mrope_section", "[4, 4]", "a list of 3 whole numbers"),
        ("text_config.rope_parameters.partial_rotary_factor", "0.1", "an even number of the 32 dimensions"),
        ("text_config.rope_parameters.partial_rotary_factor", "1.5", "above 0 and at most 1"),
        ("text_config.pad_token_id", "512", "must be below vocab_size 512"),
        ("vision_config.model_type", "\"qwen3_vl\"", "allowed: \"qwen3_5_vision\""),
        ("vision_config.hidden_act", "\"silu\"", "allowed: \"gelu_pytorch_tanh\""),
        ("vision_config.deepstack_visual_indexes", "[1]", "features of inner layers"),
        ("vision_config.out_hidden_size", "33", "must be the text model's hidden_size 32"),
        ("vision_config.rope_parameters", "{\"rope_type\": \"yarn\"}", "allowed: \"axial\", \"default\""),
    ] {
        assert_refused(DENSE, &[(field, value)], words);
    }
    let types = "[\"linear_attention\",\"full_attention\",\"conv\",\"full_attention\",\"full_attention\"]";
    assert_refused(MOE, &[("text_config.layer_types", types)], "layer type \"conv\" is not supported yet");
    for (field, value, words) in [
        ("text_config.output_router_logits", "true", "auxiliary loss"),
        ("text_config.norm_topk_prob", "false", "text_config.norm_topk_prob is false"),
        ("text_config.num_experts_per_tok", "9", "must be from 1 to num_experts, which is 8"),
        ("text_config.mlp_only_layers", "[0]", "every layer has experts"),
    ] {
        assert_refused(MOE, &[(field, value)], words);
    }
    for accepted in ["\"qwen3_5_vision\"", "\"qwen3_5\"", "null"] {
        read(DENSE, &[("vision_config.model_type", accepted)]);
    }
}
