//! An index and a weight file, apart by the first `|||`: weights, or an error.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use candle_core::{DType, Device};
use candle_gemma4::{Config, Weights};
use libfuzzer_sys::fuzz_target;

const APART: &[u8] = b"|||";

static CONFIG: LazyLock<Config> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint");
    Config::from_folder(&folder).expect("the fixture is sound")
});

fuzz_target!(|bytes: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder for the files");
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join(name), bytes).expect("the folder takes a file");
    };
    match bytes.windows(APART.len()).position(|window| window == APART) {
        Some(at) => {
            write("model.safetensors.index.json", &bytes[..at]);
            write("model-00001-of-00001.safetensors", &bytes[at + APART.len()..]);
        }
        None => write("model.safetensors", bytes),
    }
    let _ = Weights::load(folder.path(), &*CONFIG, DType::F32, &Device::Cpu);
});
