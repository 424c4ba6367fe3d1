//! Token ids against transformers.

mod support;

use candle_vlm_processor::TextTokenizer;
use support::{fixture, json};

#[test]
fn ids_equal_those_of_transformers() {
    let cases = json(&fixture("tokenizer_cases.json"));
    let folders =
        [("gemma4-dense", fixture("gemma4-dense/checkpoint")), ("qwen3_5-dense", fixture("qwen3_5-dense/checkpoint"))];
    for (name, folder) in folders {
        let tokenizer = TextTokenizer::from_folder(&folder).unwrap();
        let cases = cases[name].as_array().unwrap();
        assert!(!cases.is_empty());
        for case in cases {
            let text = case["text"].as_str().unwrap();
            for (field, add_special) in [("ids", false), ("ids_with_special", true)] {
                let tokens = tokenizer.encode(text, add_special).unwrap();
                assert_eq!(serde_json::json!(tokens.ids), case[field], "{name} {field} of {text:?}");
                assert_eq!(tokens.offsets.len(), tokens.ids.len());
            }
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), case["decoded"].as_str().unwrap());
        }
    }
}

#[test]
fn the_first_token_is_not_added_twice() {
    let tokenizer = TextTokenizer::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap();
    assert_eq!(tokenizer.special_tokens()["bos_token"], "<bos>");
    let bos = tokenizer.id("<bos>").unwrap();
    let count = |text: &str| tokenizer.encode_chat(text).unwrap().ids.iter().filter(|&&id| id == bos).count();
    assert_eq!(count("<bos><|turn>user\nHi<turn|>\n"), 1);
    assert_eq!(count("<|turn>user\nHi<turn|>\n"), 1);
}

#[test]
fn a_saved_limit_does_not_cut_training_data() {
    let folder = tempfile::tempdir().unwrap();
    let mut saved = json(&fixture("gemma4-dense/checkpoint/tokenizer.json"));
    saved["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    saved["padding"] = serde_json::json!({"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"});
    std::fs::write(folder.path().join("tokenizer.json"), saved.to_string()).unwrap();
    let tokens = TextTokenizer::from_folder(folder.path()).unwrap().encode("The picture shows a red circle.", false);
    assert_eq!(tokens.unwrap().ids.len(), 12);
}

#[test]
fn offsets_are_bytes_of_the_text() {
    let tokenizer = TextTokenizer::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap();
    let text = "déjà vu 🙂 red";
    let tokens = tokenizer.encode(text, false).unwrap();
    assert_eq!(tokens.offsets.first().unwrap().start, 0);
    assert_eq!(tokens.offsets.last().unwrap().end, text.len());
    assert!(tokens.offsets.windows(2).all(|w| w[0].start <= w[1].start && w[0].end <= w[1].end));
}
