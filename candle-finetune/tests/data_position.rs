//! Going on in the middle of the data gives what an unbroken run would have got.

use std::fs;
use std::path::{Path, PathBuf};

use candle_finetune::jsonl::Lines;
use candle_finetune::{Batch, Encoder, Packer, Position};
use candle_gemma4::Config;
use tempfile::TempDir;

const SAMPLES: usize = 10;

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint")
}

/// Ten samples of one length, each with a digit of its own, and the tokens of one.
fn lines(dir: &TempDir) -> (Lines, usize) {
    let path = dir.path().join("ten.jsonl");
    let text: String = (0..SAMPLES).map(|digit| format!("{{\"text\":\"{digit}\"}}\n")).collect();
    fs::write(&path, text).unwrap();
    let lines =
        Lines::read(&path, Encoder::from_folder(&checkpoint(), std::sync::Arc::new(config())).unwrap()).unwrap();
    let len = lines.sample(0).unwrap().len();
    (lines, len)
}

fn config() -> Config {
    Config::from_folder(&checkpoint()).unwrap()
}

/// What tells the samples of a batch apart: the ids of each row.
fn ids(batches: &[Batch]) -> Vec<Vec<u32>> {
    batches.iter().flat_map(|batch| batch.ids.clone()).collect()
}

#[test]
fn a_run_that_stops_in_the_second_epoch_goes_on_in_its_order() {
    let dir = tempfile::tempdir().unwrap();
    let (lines, len) = lines(&dir);
    let config = config();
    // A sample fills a row: batches of two samples, five batches to an epoch.
    let new = || Packer::new(Box::new(lines.training(7)), &config, 2, len);
    let mut unbroken = new();
    let all: Vec<Batch> = (0..15).map(|_| unbroken.next_training_batch().unwrap()).collect();

    let mut stopped = new();
    (0..7).for_each(|_| drop(stopped.next_training_batch().unwrap()));
    let text = serde_json::to_string(&stopped.position()).unwrap();
    assert_eq!(text, r#"{"epoch":1,"taken":4}"#);
    let position: Position = serde_json::from_str(&text).unwrap();
    for _rank in 0..4 {
        let mut resumed = new();
        resumed.seek(position).unwrap();
        let rest: Vec<Batch> = (7..15).map(|_| resumed.next_training_batch().unwrap()).collect();
        assert_eq!(rest, all[7..]);
        assert_eq!(resumed.position(), unbroken.position());
    }

    let mut expected = ids(&all[..5]);
    expected.sort();
    expected.dedup();
    assert_eq!(expected.len(), SAMPLES);
    let epochs: Vec<Vec<Vec<u32>>> = all.chunks(5).map(ids).collect();
    for (number, epoch) in epochs.iter().enumerate() {
        let mut sorted = epoch.clone();
        sorted.sort();
        assert_eq!(sorted, expected, "epoch {number}");
        assert!(epochs[..number].iter().all(|earlier| earlier != epoch), "epoch {number} repeats an order");
    }
}
