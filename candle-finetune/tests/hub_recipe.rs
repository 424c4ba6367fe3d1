//! The recipe from a model's name to a fine-tuned folder, against a Hub on loopback.

use std::path::{Path, PathBuf};

use candle_core::Tensor;
use candle_finetune::hub::HubOptions;
use candle_finetune::{CHECKPOINT_FOLDER, Config, Job, Sources, run, train};

// One Hub for several tests; this one does not use every behaviour of it.
#[allow(dead_code)]
mod fake_hub;

use fake_hub::{Body, FakeHub};

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn a_name_becomes_a_fine_tuned_folder() {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint");
    let files: Vec<(String, Vec<u8>)> = checkpoint
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_string(), std::fs::read(path).unwrap()))
        .collect();
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect();
    let hub = FakeHub::start(&files);
    hub.repository().bodies = [Body::Cut(100_000), Body::Whole].into();
    let dir = tempfile::tempdir().unwrap();
    let chats = "{\"prompt\": \"Is it tall?\", \"completion\": \"No.\"}\n{\"text\": \"Tides rise and fall.\"}\n";
    std::fs::write(dir.path().join("chats.jsonl"), chats).unwrap();
    let named = Config {
        cp: 2,
        steps: Some(2),
        model: Some(PathBuf::from("org/tiny@v1.0")),
        data: Some(dir.path().join("chats.jsonl")),
        out: dir.path().join("out"),
        batch_rows: 1,
        seq_len: 64,
        ..Config::default()
    };
    let pause = std::time::Duration::from_millis(1);
    let options =
        HubOptions { endpoint: hub.endpoint(), retry_pause: pause, ..HubOptions::new(dir.path().join("cache")) };

    // A wrong setting is told before anything is asked of the Hub.
    let error = Config { steps: Some(0), ..named.clone() }.resolve(&options, &mut |_| ()).unwrap_err();
    assert!(error.to_string().starts_with("--steps \"0\"") && hub.take_log().is_empty(), "{error}");
    let mut missing = Config { model: Some(PathBuf::from("org/missing")), ..named.clone() };
    let error = missing.resolve(&options, &mut |_| ()).unwrap_err();
    assert!(error.is_usage() && error.to_string().starts_with("--model: there is no folder org/missing"), "{error}");

    let mut config = named.clone();
    config.resolve(&options, &mut |_| ()).unwrap();
    assert!(config.model_folder().unwrap().starts_with(dir.path().join("cache/models--org--tiny/snapshots")));
    let summary = run(&config, &|_, _| Ok(())).unwrap();

    let local = Config { model: Some(checkpoint), ..named };
    let expected = train(&Job::prepare(&local).unwrap(), &local, &|_, _| Ok(())).unwrap();
    assert_eq!(summary.loss, expected.reports[1].loss);
    let saved = Config { model: Some(config.out.join(CHECKPOINT_FOLDER)), sources: Sources::default(), ..config };
    let weights = Job::prepare(&saved).unwrap().weights(&saved).unwrap();
    assert_eq!(weights.variables().len(), expected.weights.variables().len());
    for ((name, found), expected) in weights.variables().iter().zip(expected.weights.variables().values()) {
        assert_eq!(values(found), values(expected), "{name}");
    }
}
