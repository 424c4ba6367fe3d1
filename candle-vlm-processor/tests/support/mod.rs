//! What the tests of this crate share.
#![allow(dead_code, missing_docs)]

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// A file or folder of this crate's test data.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// A file or folder of the workspace's fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name)
}

pub fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The lines of `chat.jsonl` in a folder.
pub fn chat_lines(folder: &Path) -> Vec<Line> {
    let text = std::fs::read_to_string(folder.join("chat.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// One line of a data file.
#[derive(serde::Deserialize)]
pub struct Line {
    pub messages: Vec<candle_vlm_processor::Message>,
}

/// A file of tensors.
pub struct Tensors(Vec<u8>);

impl Tensors {
    pub fn open(path: &Path) -> Self {
        Self(std::fs::read(path).unwrap())
    }

    fn view(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
    }

    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.view().names().iter().map(|n| n.to_string()).collect();
        names.sort();
        names
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.view().tensor(name).unwrap().shape().to_vec()
    }

    pub fn u8(&self, name: &str) -> Vec<u8> {
        let view = self.view();
        let tensor = view.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::U8, "{name}");
        tensor.data().to_vec()
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        let view = self.view();
        let tensor = view.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
        tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn i64(&self, name: &str) -> Vec<i64> {
        let view = self.view();
        let tensor = view.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::I64, "{name}");
        tensor.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

/// Bytes of the generator that `make_pictures.py` has as well.
pub fn noise(count: usize, seed: u32) -> Vec<u8> {
    let mut x = seed;
    (0..count)
        .map(|_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 24) as u8
        })
        .collect()
}

/// Largest difference of two lists of levels.
pub fn largest_difference(a: &[u8], b: &[u8]) -> u8 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0)
}
