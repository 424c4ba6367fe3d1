//! A data file of any bytes: samples, or a report of its lines.
#![no_main]

use std::path::Path;

use candle_finetune::jsonl::Lines;
use candle_finetune::{Encoder, Error};
use candle_gemma4::Config;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint");
    let config = Config::from_folder(&checkpoint).expect("the fixture is sound");
    let encoder = Encoder::from_folder(&checkpoint, std::sync::Arc::new(config)).expect("the fixture is sound");
    let folder = tempfile::tempdir().expect("a folder for the file");
    let path = folder.path().join("data.jsonl");
    std::fs::write(&path, bytes).expect("the folder takes a file");
    match Lines::read(&path, encoder) {
        Ok(lines) => (0..lines.len()).for_each(|index| drop(lines.sample(index).expect("it was checked"))),
        Err(Error::Data { lines, faults, .. }) => assert!(!faults.is_empty() && faults.len() <= lines),
        Err(error) => assert!(matches!(error, Error::EmptyData { .. }), "{error}"),
    }
});
