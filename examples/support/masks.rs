//! Mask rules written out as dense matrices, to compare them with the masks of a case file.

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_cp::{Coordinates, MaskRule, TokenAt, Tokens};

/// Where every token of whole rows stands.
pub fn coordinates(tokens: &Tokens) -> Coordinates {
    Coordinates {
        positions: tokens.positions(),
        documents: tokens.documents().to_vec(),
        groups: tokens.groups().to_vec(),
    }
}

/// Which keys each query may attend to: `[B, 1, queries, keys]` u8, 1 = allowed.
///
/// # Errors
/// An error of Candle.
pub fn dense(rule: &MaskRule, query: &Coordinates, key: &Coordinates) -> Result<Tensor> {
    let at = |c: &Coordinates, row: usize, i: usize| TokenAt {
        position: c.positions[row][i],
        document: c.documents[row][i],
        group: c.groups[row][i],
    };
    let batch = query.positions.len();
    let (queries, keys) = (query.positions.first().map_or(0, Vec::len), key.positions.first().map_or(0, Vec::len));
    let mut allowed = Vec::with_capacity(batch * queries * keys);
    for row in 0..batch {
        for q in 0..queries {
            allowed.extend((0..keys).map(|k| u8::from(rule.allowed(at(query, row, q), at(key, row, k)))));
        }
    }
    Ok(Tensor::from_vec(allowed, (batch, 1, queries, keys), &Device::Cpu)?)
}
