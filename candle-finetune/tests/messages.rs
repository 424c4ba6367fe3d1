//! What is said where a checkpoint folder, a cache and a model do not fit together.

// One Hub for several tests; this one does not use every behaviour of it.
#[allow(dead_code)]
mod fake_hub;

use std::fs;
use std::path::{Path, PathBuf};

use candle_finetune::Encoder;
use candle_finetune::hub::{HubOptions, resolve_model};
use candle_finetune::jsonl::Lines;
use candle_gemma4::Config;
use serde_json::{Value, json};

#[track_caller]
fn holds(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message}\nwithout: {part}");
    }
}

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint")
}

/// The checkpoint's configuration with some fields set, by their pointers.
fn config(fields: &[(&str, Value)]) -> Config {
    let mut json: Value = serde_json::from_slice(&fs::read(checkpoint().join("config.json")).unwrap()).unwrap();
    for (pointer, value) in fields {
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        json.pointer_mut(parent).unwrap()[name] = value.clone();
    }
    Config::from_json(&json.to_string()).unwrap()
}

fn text_model() -> Config {
    let json: Value = serde_json::from_slice(&fs::read(checkpoint().join("config.json")).unwrap()).unwrap();
    Config::from_json(&json["text_config"].to_string()).unwrap()
}

/// What is said about a file of one line.
fn refused(config: &Config, template: Option<&str>, line: Value) -> String {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"] {
        fs::copy(checkpoint().join(name), dir.path().join(name)).unwrap();
    }
    if let Some(template) = template {
        fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    }
    image::RgbImage::new(24, 12).save(dir.path().join("ok.png")).unwrap();
    let path = dir.path().join("data.jsonl");
    fs::write(&path, line.to_string()).unwrap();
    let encoder = match Encoder::from_folder(dir.path(), std::sync::Arc::new(config.clone())) {
        Ok(encoder) => encoder,
        Err(error) => return error.to_string(),
    };
    Lines::read(&path, encoder).unwrap_err().to_string()
}

fn picture() -> Value {
    json!({"messages": [{"role": "user", "content": [{"type": "image", "image": "ok.png"}]}, {"role": "assistant", "content": "A."}]})
}

#[test]
fn a_model_that_takes_no_pictures() {
    holds(&refused(&text_model(), None, picture()), &["line 1: pictures cannot be used: this model takes no pictures"]);
}

#[test]
fn a_tokenizer_of_another_checkpoint() {
    let config = config(&[("/image_token_id", json!(30))]);
    let parts =
        ["<|image|> is token 19 of the tokenizer", "image_token_id of config.json is 30", "from one checkpoint"];
    let message = refused(&config, None, picture());
    holds(&message, &parts[1..]);
    assert!(message.contains("<|image|> is token "), "{message}");
}

#[test]
fn texts_need_a_first_and_a_last_token() {
    let text = json!({"text": "A text."});
    for (pointers, field) in [
        (&["/text_config/bos_token_id"][..], "text_config.bos_token_id"),
        // What is null at the top is looked for below.
        (&["/eos_token_id", "/text_config/eos_token_id"], "eos_token_id"),
    ] {
        let changes: Vec<_> = pointers.iter().map(|&pointer| (pointer, Value::Null)).collect();
        let message = refused(&config(&changes), None, text.clone());
        holds(&message, &[&format!("line 1: config.json has no {field}, which plain texts need")]);
    }
}

#[test]
fn pictures_beyond_the_positions_of_the_model() {
    let message = refused(&config(&[("/vision_config/position_embedding_size", json!(32))]), None, picture());
    holds(
        &message,
        &[
            "line 1: picture 1 (ok.png): is 132 x 60 pixels after resizing, which is 33 patches along a side",
            "the model has positions for 32 (vision_config.position_embedding_size)",
            "closer to a square",
        ],
    );
}

#[test]
fn a_template_that_writes_no_answer() {
    let skips = "{% for m in messages if m.content %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}";
    let line = json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]});
    let message = refused(&config(&[]), Some(skips), line);
    holds(&message, &["line 1: nothing to learn: the template writes no answer of an assistant"]);
}

#[test]
fn a_cache_that_cannot_be_written() {
    let hub =
        fake_hub::FakeHub::start(&[("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", b"x")]);
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    fs::write(&cache, "a file in the way").unwrap();
    let options = HubOptions { endpoint: hub.endpoint(), ..HubOptions::new(cache.clone()) };
    let error = resolve_model("org/tiny", &options, &mut |_| ()).unwrap_err();
    assert!(!error.is_usage());
    holds(&error.to_string(), &["cannot ", &cache.display().to_string()]);
}
