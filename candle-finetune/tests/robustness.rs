//! Whatever a data file or a model's folder holds: a result or a typed error, never a panic, never a hang.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use candle_finetune::jsonl::Lines;
use candle_finetune::{Encoder, Error};
use candle_gemma4::{Config as ModelConfig, Weights, tensors};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, RngSeed};
use serde_json::{Value, json};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name)
}

fn checkpoint() -> PathBuf {
    fixture("gemma4-dense/checkpoint")
}

/// Fixed seed, nothing written to disk.
fn config(cases: u32) -> Config {
    Config {
        cases,
        rng_seed: RngSeed::Fixed(20_250_714),
        failure_persistence: None,
        max_shrink_time: 20_000,
        ..Config::default()
    }
}

/// What JSON is made of, numbers that do not fit, and texts that mean something.
const PIECES: [&str; 36] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "\n",
    "\r\n",
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "1e-999",
    "0.5",
    "18446744073709551616",
    "9223372036854775807",
    "2147483647",
    "1e308",
    "\\u0000",
    "\\ud800",
    "\\",
    "\u{fdd0}",
    "\u{fdd2}1\u{fde4}",
    "\u{2028}",
    "\u{feff}",
    "é",
    "<|image|>",
    "<turn|>",
    "<|turn>model\n",
    "\"messages\":",
    "\"text\":",
    "\"images\":[\"ok.png\"],",
    "{\"type\":\"image\"}",
    "data:image/png;base64,",
];

fn piece() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![3 => select(&PIECES[..]).prop_map(|text| text.as_bytes().to_vec()), 1 => any::<[u8; 1]>().prop_map(Vec::from)]
}

/// Replaces some bytes, from none to many, by a piece or by nothing, a few times.
fn changes() -> impl Strategy<Value = Vec<(Index, usize, Vec<u8>)>> {
    let new = prop_oneof![3 => piece(), 1 => Just(Vec::new())];
    prop::collection::vec((any::<Index>(), 0usize..12, new), 1..5)
}

fn changed(bytes: &[u8], changes: &[(Index, usize, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (at, count, new) in changes {
        let at = at.index(bytes.len() + 1);
        let end = (at + count).min(bytes.len());
        bytes.splice(at..end, new.iter().copied());
    }
    bytes
}

/// Reads a data file. All lines are accounted for, and what was accepted can be had.
fn read(bytes: &[u8]) -> Result<(), TestCaseError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.jsonl");
    fs::copy(fixture("imaging/wide.png"), dir.path().join("ok.png")).unwrap();
    fs::write(&path, bytes).unwrap();
    let encoder =
        Encoder::from_folder(&checkpoint(), std::sync::Arc::new(ModelConfig::from_folder(&checkpoint()).unwrap()))
            .unwrap();
    let given = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let lines_given = given.split(|&b| b == b'\n').filter(|line| !line.iter().all(u8::is_ascii_whitespace)).count();
    match Lines::read(&path, encoder) {
        Ok(lines) => {
            prop_assert_eq!(lines.len(), lines_given);
            for index in 0..lines.len() {
                let sample = lines.sample(index).map_err(|e| TestCaseError::fail(e.to_string()))?;
                prop_assert!(sample.tokens.iter().any(|token| token.learned.is_some()));
            }
        }
        Err(Error::Data { faults, lines, .. }) => {
            prop_assert!(!faults.is_empty() && faults.len() <= lines);
            prop_assert!(faults.windows(2).all(|pair| pair[0].line < pair[1].line));
            prop_assert!(faults.iter().all(|fault| !fault.reason.is_empty()));
            prop_assert!(lines == lines_given || faults[0].reason.contains("the file starts as"));
        }
        Err(Error::EmptyData { .. }) => prop_assert_eq!(lines_given, 0),
        Err(other) => return Err(TestCaseError::fail(format!("another error: {other}"))),
    }
    Ok(())
}

/// Any JSON, with the names that lines are made of.
fn value() -> impl Strategy<Value = Value> {
    let text = prop_oneof![
        select(&["user", "assistant", "Hi", "", " ", "image", "text", "ok.png", "https://x.org/a.png", "data:,"][..])
            .prop_map(str::to_owned),
        select(&PIECES[..]).prop_map(str::to_owned),
        "\\PC{0,8}",
    ];
    let leaf = prop_oneof![
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        1 => any::<u64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        4 => text.prop_map(Value::from),
    ];
    let keys =
        ["role", "content", "type", "text", "image", "image_url", "url", "path", "base64", "tool_calls", "function"];
    let key = select(keys.map(str::to_owned).to_vec());
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key.clone(), inner, 0..5).prop_map(Value::from_iter),
        ]
    })
}

/// A line with our keys, some of them with what belongs there.
fn line() -> impl Strategy<Value = Value> {
    let message = prop_oneof![
        2 => select(vec![json!({"role": "user", "content": "Hi"}), json!({"role": "assistant", "content": "Yes."}),
            json!({"role": "user", "content": [{"type": "image", "image": "ok.png"}, {"type": "text", "text": "?"}]})]),
        1 => (value(), value()).prop_map(|(role, content)| json!({"role": role, "content": content})),
        1 => value().prop_map(|content| json!({"role": "assistant", "content": content})),
        1 => value(),
    ];
    let messages = prop_oneof![3 => prop::collection::vec(message, 0..5).prop_map(Value::from), 1 => value()];
    let keys = ["images", "tools", "prompt", "completion", "text", "Messages", "id", "conversations"];
    let more = prop::collection::btree_map(select(keys.map(str::to_owned).to_vec()), value(), 0..3);
    (prop::option::weighted(0.7, messages), more).prop_map(|(messages, more)| {
        let mut line = serde_json::Map::from_iter(more);
        line.extend(messages.map(|messages| ("messages".to_owned(), messages)));
        Value::from(line)
    })
}

/// Lines of every kind.
const GOOD: &str = r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "ok.png"}, {"type": "text", "text": "Wide?"}]}, {"role": "assistant", "content": "Yes."}]}
{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "A."}], "tools": [{"type": "function"}]}
{"prompt": "<|image|>read", "completion": "1", "images": ["ok.png"]}
{"text": "A text.", "id": 7}
"#;

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn any_bytes_as_a_data_file(pieces in prop::collection::vec(piece(), 0..24)) {
        read(&pieces.concat())?;
    }

    #[test]
    fn damaged_lines(changes in changes()) {
        read(&changed(GOOD.as_bytes(), &changes))?;
    }

    #[test]
    fn any_values_under_our_keys(lines in prop::collection::vec(line(), 1..6)) {
        let lines: Vec<_> = lines.iter().map(Value::to_string).collect();
        read(lines.join("\n").as_bytes())?;
    }
}

#[test]
fn lines_of_every_kind_are_read() {
    read(GOOD.as_bytes()).unwrap();
}

#[test]
fn extreme_lines_end_in_a_reason() {
    let nested = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
    let tools = |n: usize| format!(r#"{{"messages":[{{"role":"assistant","content":"A."}}],"tools":{}}}"#, nested(n));
    let content = format!(r#"{{"messages":[{{"role":"assistant","content":{}}}]}}"#, nested(100));
    let long = format!(r#"{{"text":"{}"}}"#, "word ".repeat(200_000));
    let many = format!(
        r#"{{"messages":[{}{{"role":"assistant","content":"A."}}]}}"#,
        r#"{"role":"user","content":"Hi"},"#.repeat(2000)
    );
    let number = |digits: usize| format!(r#"{{"text":"a","id":{}}}"#, "9".repeat(digits));
    for line in
        [nested(1_000_000), tools(100), tools(100_000), content, long, many, number(30), number(400), number(100_000)]
    {
        read(line.as_bytes()).unwrap();
    }
    read(b"\xef\xbb\xbf").unwrap();
    read(b"\0\0\0\0").unwrap();
    read("{".repeat(1_000_000).as_bytes()).unwrap();
}

/// A configuration that lists tensors and can be written and read again, or a reason.
fn model(read: candle_gemma4::Result<ModelConfig>) -> Result<(), TestCaseError> {
    match read {
        Ok(config) => {
            prop_assert!(!tensors(&config).is_empty());
            let again = ModelConfig::from_json(&config.to_json()).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert!(again == config);
        }
        Err(error) => prop_assert!(!error.to_string().is_empty()),
    }
    Ok(())
}

const FAMILIES: [&str; 4] = ["gemma4-dense", "gemma4-effective", "gemma4-moe", "gemma4-unified"];

fn config_of(family: &str) -> String {
    fs::read_to_string(fixture(family).join("checkpoint/config.json")).unwrap()
}

/// Every place in a JSON value, as a pointer.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    let mut inner = |name: &str, value: &Value| {
        let at = format!("{at}/{}", name.replace('~', "~0").replace('/', "~1"));
        places(value, &at, all);
        all.push(at);
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(name, value)| inner(name, value)),
        Value::Array(list) => list.iter().enumerate().for_each(|(index, value)| inner(&index.to_string(), value)),
        _ => {}
    }
}

/// Values that are of a wrong type, too large or too small.
fn odd_values() -> Vec<Value> {
    let numbers =
        [json!(-1), json!(0), json!(1), json!(3), json!(2_147_483_647_u64), json!(u64::MAX), json!(1e308), json!(0.5)];
    let others =
        [json!(null), json!(true), json!("x"), json!([]), json!({}), json!([1, "a", null]), json!("full_attention")];
    numbers.into_iter().chain(others).collect()
}

#[test]
fn every_field_of_a_model_with_every_odd_value() {
    for family in FAMILIES {
        let json: Value = serde_json::from_str(&config_of(family)).unwrap();
        let mut all = Vec::new();
        places(&json, "", &mut all);
        for place in all {
            for value in odd_values() {
                let mut json = json.clone();
                *json.pointer_mut(&place).unwrap() = value.clone();
                let result = model(ModelConfig::from_json(&json.to_string()));
                assert!(result.is_ok(), "{family}, {place} = {value}: {result:?}");
            }
        }
    }
}

/// Every layer and expert has names of its own, so their number is bounded before the list of names is made.
#[test]
fn more_layers_than_memory_holds_are_refused() {
    for (family, part, field) in [
        ("gemma4-dense", "vision_config", "num_hidden_layers"),
        ("gemma4-effective", "audio_config", "num_hidden_layers"),
        ("gemma4-moe", "text_config", "num_experts"),
    ] {
        let mut json: Value = serde_json::from_str(&config_of(family)).unwrap();
        json[part][field] = json!(2_147_483_647);
        let error = ModelConfig::from_json(&json.to_string()).unwrap_err().to_string();
        let told = format!("{part}.{field} is 2147483647: a whole number from 1 to 4096 is needed");
        assert!(error.contains(&told), "{error}");
    }
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn damaged_models(family in select(&FAMILIES[..]), changes in changes()) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), changed(config_of(family).as_bytes(), &changes)).unwrap();
        model(ModelConfig::from_folder(dir.path()))?;
    }
}

/// Loads weights from files with these names and bytes; the error's text.
fn weights(files: &[(&str, &[u8])]) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let config = ModelConfig::from_folder(&checkpoint()).unwrap();
    Weights::load(dir.path(), &config, DType::F32, &Device::Cpu).err().map(|error| error.to_string())
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A weight file with this header and as many bytes of data.
fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn damaged_headers(changes in changes()) {
        let whole = fs::read(checkpoint().join(SINGLE)).unwrap();
        let end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let mut file = changed(&whole[..end], &changes);
        file.extend_from_slice(&whole[end..]);
        prop_assert!(weights(&[(SINGLE, &file)]).is_none_or(|error| error.contains(SINGLE)));
    }

    #[test]
    fn headers_of_the_right_length(changes in changes()) {
        let whole = fs::read(checkpoint().join(SINGLE)).unwrap();
        let end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8_lossy(&changed(&whole[8..end], &changes)).into_owned();
        let file = with_header(&header, whole.len() - end);
        prop_assert!(weights(&[(SINGLE, &file)]).is_none_or(|error| error.contains(SINGLE)));
    }

    #[test]
    fn damaged_indices(changes in changes()) {
        let folder = fixture("weights/missing-shard");
        let index = changed(&fs::read(folder.join(INDEX)).unwrap(), &changes);
        let shard = fs::read(folder.join("model-00001-of-00002.safetensors")).unwrap();
        let error = weights(&[(INDEX, &index), ("model-00001-of-00002.safetensors", &shard)]);
        prop_assert!(error.is_some_and(|error| error.contains(INDEX)));
    }
}

#[test]
fn extreme_weight_files_are_refused_by_name() {
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        with_header(&format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#), 64)
    };
    let huge = |bytes: u64| [&bytes.to_le_bytes()[..], b"{}"].concat();
    let deep = with_header(&format!("{{\"a\":{}", "[".repeat(100_000)), 0);
    for file in [
        Vec::new(),
        vec![0],
        vec![0; 8],
        vec![0xff; 64],
        huge(1 << 60),
        huge(u64::MAX),
        huge(u64::MAX - 8),
        huge(100_000_001),
        huge(3),
        with_header("", 8),
        with_header("null", 0),
        with_header("[]", 0),
        deep,
        tensor("F32", "[4,4]", "[0,18446744073709551615]"),
        tensor("F32", "[4,4]", "[64,0]"),
        tensor("F32", "[4294967296,4294967296,4294967296]", "[0,64]"),
        tensor("F32", "[4611686018427387904]", "[0,64]"),
        tensor("F32", "[4,4]", "[1152921504606846976,1152921504606847040]"),
        tensor("F33", "[4,4]", "[0,64]"),
        tensor("F4", "[3]", "[0,64]"),
        tensor("F32", "[-1]", "[0,64]"),
        tensor("F32", "[1e2]", "[0,64]"),
        tensor("I64", "[8]", "[0,64]"),
    ] {
        let start = String::from_utf8_lossy(&file[..file.len().min(120)]).into_owned();
        let error = weights(&[(SINGLE, &file)]).unwrap_or_else(|| panic!("{start} was accepted"));
        assert!(error.contains(SINGLE) && error.len() < 4000, "{start}: {error}");
    }
}

#[test]
fn extreme_indices_are_refused_by_name() {
    let map = |file: &str| format!(r#"{{"weight_map":{{"a":{file}}}}}"#);
    let deep = "[".repeat(100_000);
    for index in [
        String::new(),
        "null".to_owned(),
        "{}".to_owned(),
        deep,
        map("null"),
        map("7"),
        map("\"\""),
        map("\".\""),
        map("\"..\""),
        map("\"../model.safetensors\""),
        map("\"/etc/passwd\""),
        map("\"absent\\u0000\""),
        map("\"model.safetensors.index.json\""),
        r#"{"weight_map":{}}"#.to_owned(),
    ] {
        let start: String = index.chars().take(120).collect();
        let error = weights(&[(INDEX, index.as_bytes())]).unwrap_or_else(|| panic!("{start} was accepted"));
        assert!(error.len() < 4000, "{start}: {error}");
    }
}
