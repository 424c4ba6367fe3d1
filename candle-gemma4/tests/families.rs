//! What config.json says of the families beside the dense one.

mod support;

use candle_gemma4::{Architecture, Config, LayerKind, MoeConfig, PerLayerConfig};
use support::{edited_config, fixture, variant};

fn config(family: &str) -> Config {
    Config::from_folder(&fixture(&format!("{family}/checkpoint"))).unwrap()
}

/// The configuration of a folder with one value replaced.
fn changed(folder: &std::path::Path, path: &str, value: &str) -> String {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    *json.pointer_mut(path).unwrap_or_else(|| panic!("no {path}")) = serde_json::from_str(value).unwrap();
    json.to_string()
}

fn refusal(family: &str, path: &str, value: &str) -> String {
    let text = changed(&fixture(&format!("{family}/checkpoint")), path, value);
    Config::from_json(&text).unwrap_err().to_string()
}

#[test]
fn the_last_layers_read_the_keys_of_the_last_of_their_type() {
    let text = config("gemma4-effective").text; // s f s s f | s s f
    let keys: Vec<_> = text.layers.iter().map(|layer| layer.keys_of).collect();
    assert_eq!(keys, [None, None, None, None, None, Some(3), Some(3), Some(4)]);
    let widths: Vec<_> = text.layers.iter().map(|layer| layer.intermediate_size).collect();
    assert_eq!(widths, [48, 48, 48, 48, 48, 96, 96, 96]);
    let plain = Config::from_folder(&variant("effective_plain_mlp")).unwrap().text;
    assert!(plain.layers.iter().any(|layer| layer.keys_of.is_some()));
    assert!(plain.layers.iter().all(|layer| layer.intermediate_size == plain.layers[0].intermediate_size));
    let uneven = "{\"1\": {\"num_key_value_heads\": 2, \"head_dim\": 32}, \"4\": {\"num_key_value_heads\": 4, \
                  \"head_dim\": 32}, \"7\": {\"num_key_value_heads\": 2, \"head_dim\": 32}}";
    let text = std::fs::read_to_string(fixture("gemma4-effective/checkpoint/config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["text_config"]["per_layer_config"] = serde_json::from_str(uneven).unwrap();
    let message = Config::from_json(&json.to_string()).unwrap_err().to_string();
    assert!(message.contains("layer 7 has 2 key heads, but reads those of layer 4, which has 4"), "{message}");
}

#[test]
fn absent_per_layer_settings_are_those_of_released_models() {
    let per_layer = |changes: &[(&str, &str)]| edited_config(changes).text.per_layer;
    assert_eq!(per_layer(&[]), None);
    let absent =
        [("text_config.hidden_size_per_layer_input", "absent"), ("text_config.vocab_size_per_layer_input", "absent")];
    assert_eq!(per_layer(&absent), Some(PerLayerConfig { vocab_size: 262_144, width: 256 }));
    assert_eq!(per_layer(&[("text_config.hidden_size_per_layer_input", "null")]), None);
    assert_eq!(config("gemma4-effective").text.per_layer, Some(PerLayerConfig { vocab_size: 512, width: 8 }));
}

#[test]
fn experts_are_read_and_checked() {
    let moe = MoeConfig { num_experts: 8, top_k: 2, intermediate_size: 16 };
    assert_eq!(config("gemma4-moe").text.moe, Some(moe));
    assert!(refusal("gemma4-moe", "/text_config/top_k_experts", "9").contains("text_config.top_k_experts is 9"));
    assert!(refusal("gemma4-moe", "/text_config/num_experts", "null").contains("text_config.num_experts"));
}

#[test]
fn unified_models_have_embedders_in_place_of_towers() {
    let config = config("gemma4-unified");
    assert_eq!(config.architecture, Architecture::Unified);
    assert!(config.vision.is_none() && config.text.per_layer.is_none() && config.text.moe.is_none());
    let embedder = config.patch_embedder.as_ref().unwrap();
    assert_eq!((embedder.patch_len(), embedder.width, embedder.position_embedding_size), (192, 24, 16));
    // Image blocks are whole and on every layer.
    let rule = |kind| config.text.mask_rule(kind);
    assert_eq!(rule(LayerKind::Full), candle_cp::MaskRule::causal().with_whole_groups());
    assert_eq!(rule(LayerKind::Sliding), candle_cp::MaskRule::sliding(16).with_whole_groups());
    for (path, value, reason) in [
        ("/vision_config/output_proj_dims", "25", "vision_config.output_proj_dims is 25: must be mm_embed_dim 24"),
        ("/vision_config/mm_posemb_size", "null", "vision_config.mm_posemb_size"),
        ("/vision_config/model_type", "\"gemma4_vision\"", "allowed: \"gemma4_unified_vision\""),
        ("/text_config/model_type", "\"gemma4_text\"", "allowed: \"gemma4_unified_text\""),
        ("/text_config/use_bidirectional_attention", "\"all\"", "allowed: null, \"vision\""),
        ("/audio_config", "{}", "audio_config.audio_embed_dim, audio_config.rms_norm_eps"),
        ("/audio_config", "{\"audio_embed_dim\": 640, \"rms_norm_eps\": 1e-6, \"hidden_size\": 3}", "hidden_size is 3"),
    ] {
        let message = refusal("gemma4-unified", path, value);
        assert!(message.contains(reason), "{path} = {value}: {message}");
    }
}
