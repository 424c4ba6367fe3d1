//! Model tensors that some files hold in pieces.
//!
//! A table for all models: a tensor of a model is the elements of its pieces, one piece after the other. Experts are
//! the only case. A model has them stacked, `experts.gate_up_proj [E, 2I, H]` (gate rows, then up rows of each expert)
//! and `experts.down_proj [E, H, I]`; other files have `experts.N.gate_proj.weight [I, H]`,
//! `experts.N.up_proj.weight [I, H]` and `experts.N.down_proj.weight [H, I]`.

use std::collections::BTreeMap;

use crate::spec::TensorSpec;

/// Stacked tensor of the experts: its name after `experts.`, and the matrices that make up an expert's rows of it.
const STACKED_EXPERTS: [(&str, &[&str]); 2] =
    [("gate_up_proj", &["gate_proj", "up_proj"]), ("down_proj", &["down_proj"])];

/// A tensor as files are expected to hold it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
}

/// The pieces that files hold in place of a tensor, in order; `None` if it is held whole everywhere.
fn split(spec: &TensorSpec) -> Option<Vec<Piece>> {
    let (prefix, last) = spec.name.rsplit_once('.')?;
    let &[experts, rows, columns] = spec.shape.as_slice() else { return None };
    if prefix.rsplit('.').next() != Some("experts") {
        return None;
    }
    let (_, matrices) = STACKED_EXPERTS.iter().find(|(name, _)| *name == last)?;
    let shape = vec![rows / matrices.len(), columns];
    let piece = |expert: usize, matrix: &str| Piece {
        name: format!("{prefix}.{expert}.{matrix}.weight"),
        shape: shape.clone(),
    };
    Some(
        (0..experts)
            .flat_map(|expert| matrices.iter().map(move |matrix| (expert, matrix)))
            .map(|(e, m)| piece(e, m))
            .collect(),
    )
}

/// How files hold a tensor: in pieces if they lack the whole and have at least one piece, else whole.
pub(super) fn resolve(spec: &TensorSpec, found: &BTreeMap<String, Vec<usize>>) -> Vec<Piece> {
    let whole = Piece { name: spec.name.clone(), shape: spec.shape.clone() };
    if found.contains_key(&spec.name) {
        return vec![whole];
    }
    match split(spec) {
        Some(pieces) if pieces.iter().any(|piece| found.contains_key(&piece.name)) => pieces,
        _ => vec![whole],
    }
}
