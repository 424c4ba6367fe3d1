//! Whatever a settings file holds: settings that survive being written, or a report of its lines; never a panic.

use std::path::Path;

use candle_finetune::{Config, Error};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::RngSeed;

/// Fixed seed, nothing written to disk.
fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(20_250_714),
        failure_persistence: None,
        max_shrink_time: 20_000,
        ..ProptestConfig::default()
    }
}

/// Many settings, none of them the default.
const GOOD: &str = r#"[model]
path = "org/name@main"
dtype = "bf16"
freeze = ["vision", "*.layers.0.*"]
recompute = true

[lora]
rank = 8
alpha = 12.5
dropout = 0.25
targets = ["q_proj", "3.mlp.down_proj"]
parts = ["text", "vision"]
merge = true

[data]
train = 'C:\chats "new".jsonl'
validation_share = 0.125
seq_len = 1_024
truncate = true

[train]
epochs = 2
batch_rows = 3
accumulate = 4
learning_rate = 3e-4
schedule = "linear"
warmup = 0
rate_floor = 0.0
max_grad_norm = 0.5
seed = 7
validate_every = 10

[optimizer]
beta1 = 0.8
eps = 1e-9
weight_decay = 0

[parallel]
cp = 4
comm = "mpi"
layout = "balanced"

[out]
dir = "runs/é"
save_every = 5
keep = 1
tensorboard = true
trace = 3
"#;

const PIECES: [&str; 30] = [
    "[",
    "]",
    "[[",
    "]]",
    "=",
    "\n",
    "\"",
    "'''",
    "\"\"\"",
    "#",
    "{",
    "}",
    ",",
    ".",
    "\\u0000",
    "\\ud800",
    "\u{feff}",
    "-",
    "+",
    "_",
    "0x",
    "1e400",
    "nan",
    "-inf",
    "true",
    "1979-05-27",
    "99999999999999999999",
    "train",
    "steps",
    "lora",
];

/// Reads a settings file over the defaults; whether it was accepted.
fn read(text: &str) -> Result<bool, TestCaseError> {
    let path = Path::new("run.toml");
    let mut config = Config::default();
    match config.set_toml(text, path) {
        Ok(()) => {
            let written = config.to_toml();
            let mut again = Config::default();
            again.set_toml(&written, path).map_err(|error| TestCaseError::fail(format!("{error}\n{written}")))?;
            prop_assert_eq!(again.to_toml(), written);
            prop_assert_eq!(again, as_written(config));
            Ok(true)
        }
        Err(Error::Settings { faults, .. }) => {
            let lines = 1 + text.matches('\n').count();
            prop_assert!(!faults.is_empty() && faults.is_sorted_by_key(|fault| fault.line));
            prop_assert!(faults.iter().all(|fault| (1..=lines).contains(&fault.line) && !fault.reason.is_empty()));
            prop_assert_eq!(config, Config::default());
            Ok(false)
        }
        Err(other) => Err(TestCaseError::fail(format!("another error: {other}"))),
    }
}

/// The learning rate is always written, what adapters would be without a rank is not.
fn as_written(mut config: Config) -> Config {
    config.lr = Some(config.rate());
    if config.lora.rank.is_none() {
        (config.lora.dropout, config.lora.merge) = (0.0, false);
    }
    config
}

/// A value, in TOML, of every kind and of every size.
fn value() -> impl Strategy<Value = String> {
    let text = prop_oneof!["\\PC{0,12}", ".{0,6}", "[a-z_/.*,]{1,16}"];
    let quoted = text.prop_map(|text: String| toml::Value::String(text).to_string());
    let leaf = prop_oneof![
            any::<i64>().prop_map(|number| number.to_string()),
            (0..100_000i64).prop_map(|number| number.to_string()),
            any::<u64>().prop_map(|number| format!("\"{number}\"")),
            any::<f64>().prop_map(|number| toml::Value::Float(number).to_string()),
            (0.0..1.0).prop_map(|number: f64| format!("{number:?}")),
            any::<bool>().prop_map(|yes| yes.to_string()),
            select(
                &[
                    "\"f32\"",
                    "\"bf16\"",
                    "\"text\"",
                    "\"vision\"",
                    "\"cosine\"",
                    "\"cpu\"",
                    "\"balanced\"",
                    "1979-05-27"
                ][..]
            )
            .prop_map(str::to_string),
            quoted,
        ];
    leaf.prop_recursive(2, 6, 3, |inner| {
        let list = prop::collection::vec(inner.clone(), 0..3).prop_map(|values| format!("[{}]", values.join(", ")));
        prop_oneof![3 => list, 1 => inner.prop_map(|value| format!("{{ a = {value} }}"))]
    })
}

/// Lines with our keys and some value each, every key once.
fn settings() -> impl Strategy<Value = String> {
    let line = (any::<Index>(), value());
    prop::collection::btree_map(line.0.prop_map(|index| index.index(Config::SETTINGS.len())), line.1, 0..4).prop_map(
        |values| {
            let line = |(index, value): (usize, String)| format!("{} = {value}\n", Config::SETTINGS[index].key);
            values.into_iter().map(line).collect()
        },
    )
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn any_text(pieces in prop::collection::vec(prop_oneof![
        select(&PIECES[..]).prop_map(str::to_string),
        "\\PC{0,4}",
        ".{0,3}",
    ], 0..24)) {
        read(&pieces.concat())?;
    }

    #[test]
    fn any_values_under_our_keys(text in settings()) {
        read(&text)?;
    }

    #[test]
    fn damaged_files(changes in prop::collection::vec((any::<Index>(), 0..6usize, select(&PIECES[..])), 1..4)) {
        let mut signs: Vec<char> = GOOD.chars().collect();
        for (place, cut, piece) in changes {
            let start = place.index(signs.len() + 1);
            let end = (start + cut).min(signs.len());
            signs.splice(start..end, piece.chars());
        }
        read(&signs.into_iter().collect::<String>())?;
    }
}

#[test]
fn good_files_are_accepted() {
    for text in [GOOD, "", "# nothing\n", &GOOD.replace('\n', "\r\n"), &Config::default().to_toml()] {
        assert!(read(text).unwrap(), "{text}");
    }
}

#[test]
fn one_value_of_every_setting_survives() {
    for setting in Config::SETTINGS {
        let accepted = |value: &str| read(&format!("{} = {value}", setting.key)).unwrap();
        let values = [
            "1",
            "0.5",
            "true",
            "\"f32\"",
            "\"text\"",
            "\"cosine\"",
            "\"cpu\"",
            "\"balanced\"",
            "\"gemma4\"",
            "\"mpi\"",
        ];
        assert!(values.iter().any(|value| accepted(value)), "{setting:?}");
        for refused in ["{}", "[[1]]", "1979-05-27", "\"\""] {
            assert!(!accepted(refused), "{setting:?} = {refused}");
        }
    }
}

#[test]
fn extreme_texts_end_in_a_report() {
    for text in [
        "[".repeat(100_000),
        format!("a = {}", "[".repeat(100_000)),
        format!("a = {}", "{b=".repeat(100_000)),
        "a.".repeat(100_000),
        format!("[train]\nsteps = {}", "9".repeat(100_000)),
        format!("[{}]", "x".repeat(100_000)),
        "\0".to_string(),
        "train.steps = 1\ntrain.steps = 2".to_string(),
        "train = 1".to_string(),
        "[[train]]".to_string(),
    ] {
        let start: String = text.chars().take(60).collect();
        assert!(!read(&text).unwrap(), "{start}");
    }
}
