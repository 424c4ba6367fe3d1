//! Recorded results: `fixtures/attention`.

use crate::case::{Case, Data, Placing};
use crate::dense::Outcome;
use crate::error::{Error, Result};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::Path;

/// Every case of a folder with what it gives.
///
/// # Errors
/// Files that are missing or not as expected.
pub fn golden(folder: &Path) -> Result<Vec<(Case, Data, Outcome)>> {
    let path = folder.join("index.json");
    let bad = |reason: String| Error::Golden { path: path.clone(), reason };
    let text = std::fs::read(&path).map_err(|e| bad(e.to_string()))?;
    let index: Value = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    let cases = index["cases"].as_array().filter(|cases| !cases.is_empty());
    let cases = cases.ok_or_else(|| bad("there is no list of cases".into()))?;
    cases.iter().enumerate().map(|(number, entry)| one(folder, number, entry)).collect()
}

fn one(folder: &Path, number: usize, entry: &Value) -> Result<(Case, Data, Outcome)> {
    let file = entry["file"].as_str().unwrap_or_default();
    let path = folder.join(file);
    let bad = |reason: String| Error::Golden { path: path.clone(), reason };
    let bytes = std::fs::read(&path).map_err(|e| bad(e.to_string()))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| bad(e.to_string()))?;
    let tensor = |name: &str| tensors.tensor(name).map_err(|e| bad(format!("{name}: {e}")));
    let floats = |name: &str| -> Result<Vec<f64>> {
        let view = tensor(name)?;
        match view.dtype() {
            Dtype::F32 => Ok(view.data().chunks_exact(4).map(|x| f64::from(f32::from_le_bytes(word(x)))).collect()),
            other => Err(bad(format!("{name} is {other:?}; it should be F32"))),
        }
    };
    let integers = |name: &str| -> Result<Vec<i64>> {
        let view = tensor(name)?;
        match view.dtype() {
            Dtype::I64 => Ok(view.data().chunks_exact(8).map(|x| i64::from_le_bytes(word(x))).collect()),
            other => Err(bad(format!("{name} is {other:?}; it should be I64"))),
        }
    };
    let dims = |name: &str| -> Result<[usize; 4]> {
        tensor(name)?.shape().try_into().map_err(|_| bad(format!("{name} should have 4 dimensions")))
    };
    let ([batch, query_heads, queries, head_dim], [_, key_heads, keys, _]) = (dims("q")?, dims("k")?);
    let mask: Vec<bool> = tensor("mask")?.data().iter().map(|&seen| seen != 0).collect();
    if mask.len() != batch * queries * keys {
        return Err(bad(format!("mask has {} entries; it should be {}", mask.len(), batch * queries * keys)));
    }
    // Every other one over three ranks.
    let ranks = if number.is_multiple_of(2) { 1 } else { 3 };
    let parts = |len: usize| (0..ranks).map(|r| (r * len / ranks..(r + 1) * len / ranks).collect()).collect();
    let case = Case {
        name: file.into(),
        batch,
        key_heads,
        group: query_heads / key_heads,
        head_dim,
        queries,
        keys,
        scale: entry["scale"].as_f64().ok_or_else(|| bad("the index has no scale".into()))?,
        mask,
        positions: positions(&integers("k_doc")?, &integers("k_pos")?, keys),
        query_ranks: parts(queries),
        key_ranks: parts(keys),
        placing: Placing { tokens_first: number.is_multiple_of(3), odd: false },
    };
    let data = Data { q: floats("q")?, k: floats("k")?, v: floats("v")?, d_out: floats("dout")? };
    let [out, lse, dq, dk, dv] = ["out", "lse", "dq", "dk", "dv"].map(floats);
    Ok((case, data, Outcome { out: out?, lse: lse?, dq: dq?, dk: dk?, dv: dv? }))
}

fn word<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("chunks of exactly this length")
}

/// Keys numbered by document and position, so that what a query sees is consecutive.
fn positions(documents: &[i64], places: &[i64], keys: usize) -> Vec<u32> {
    let rows = documents.chunks(keys).zip(places.chunks(keys));
    rows.flat_map(|(documents, places)| {
        let mut order: Vec<usize> = (0..keys).collect();
        order.sort_by_key(|&key| (documents[key], places[key]));
        let mut out = vec![0; keys];
        order.into_iter().enumerate().for_each(|(position, key)| out[key] = position as u32);
        out
    })
    .collect()
}
