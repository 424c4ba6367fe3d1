//! How close is close: the tolerance of every tensor by its name, and the rows that are not compared.

use candle_core::DType;

/// Largest difference that passes, for one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// Equal, entry by entry.
    Exact,
    /// This much, whatever the entries are.
    Absolute(f64),
    /// `factor` of the largest compared entry, but never less than `at_least`.
    OfLargest {
        /// Share of the largest absolute entry.
        factor: f64,
        /// Absolute difference that always passes.
        at_least: f64,
    },
    /// `factor · max(1, |entry|)`, for each entry on its own.
    PerEntry {
        /// Share of the entry.
        factor: f64,
    },
}

impl Tolerance {
    /// The difference that passes at an entry with the expected value `entry`, in a tensor whose largest absolute
    /// finite entry is `largest`.
    pub fn allowed(self, entry: f64, largest: f64) -> f64 {
        match self {
            Self::Exact => 0.0,
            Self::Absolute(limit) => limit,
            Self::OfLargest { factor, at_least } => (factor * largest).max(at_least),
            Self::PerEntry { factor } if entry.is_finite() => factor * entry.abs().max(1.0),
            Self::PerEntry { factor } => factor,
        }
    }
}

const LOGITS: f64 = 5e-4;
const MEAN_LOSS: f64 = 1e-4;
const HIDDEN: f64 = 2e-4;
const ROUTER: f64 = 1e-4;

/// Tolerance of a gradient of the mean loss: 1e-3 of its largest entry, never below 1e-7.
pub const GRADIENT: Tolerance = Tolerance::OfLargest { factor: 1e-3, at_least: 1e-7 };

/// Tolerance of a tensor of a model case; `targets` is the number of counted labels, by which the tolerance of the mean
/// loss is scaled for the sum. `None` for a name that is no result of a model.
pub fn of_model_tensor(name: &str, targets: f64) -> Option<Tolerance> {
    let tolerance = match name {
        "out.logits" | "out.logits_at_positions" => Tolerance::Absolute(LOGITS),
        "out.loss_mean" | "out.token_loss" => Tolerance::Absolute(MEAN_LOSS),
        "out.loss_sum" => Tolerance::Absolute(MEAN_LOSS * targets.max(1.0)),
        "out.num_valid" => Tolerance::Exact,
        _ if name.starts_with("input.") || name.starts_with("mask.") => Tolerance::Exact,
        _ if name.starts_with("router.top_k_index.") => Tolerance::Exact,
        _ if name.starts_with("router.") => Tolerance::Absolute(ROUTER),
        _ if ["rope.", "vision.", "audio.", "mid."].iter().any(|p| name.starts_with(p)) => Tolerance::Absolute(HIDDEN),
        _ => return None,
    };
    Some(tolerance)
}

/// Tolerance of a result of attention alone, computed in `dtype` (f64 or f32); `largest_score` is the largest absolute
/// scaled score of a visible pair. `None` for a name that is no result of attention.
pub fn of_attention_tensor(name: &str, dtype: DType, largest_score: f64) -> Option<Tolerance> {
    let factor = match dtype {
        DType::F64 => 2e-7,
        _ if largest_score >= 80.0 => 2e-5,
        _ => 5e-6,
    };
    match name {
        "mask" => Some(Tolerance::Exact),
        "lse" => Some(Tolerance::PerEntry { factor: 2e-6 }),
        "out" | "dq" | "dk" | "dv" => Some(Tolerance::OfLargest { factor, at_least: factor }),
        _ => None,
    }
}

/// What the leading axes of a tensor count, which decides the rows that are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// Tokens, `B·S` leading rows: padding is left out.
    Tokens,
    /// Positions, `3·B·S` leading rows if they have three axes: padding is left out. Those with one axis are compared
    /// everywhere.
    Positions,
    /// Tokens named by `out.positions`: padding is left out.
    ListedTokens,
    /// Image patches, `images·patches` leading rows: padded patches are left out.
    Patches,
    /// Anything else: everything is compared.
    Other,
}

/// The rows of a tensor of a model case.
pub fn rows_of(name: &str) -> RowKind {
    match name {
        "out.loss_sum" | "out.num_valid" | "out.loss_mean" | "out.positions" => RowKind::Other,
        "input.position_ids" => RowKind::Positions,
        "out.logits_at_positions" => RowKind::ListedTokens,
        "vision.patch_embed" => RowKind::Patches,
        _ if name.starts_with("vision.layer.") => RowKind::Patches,
        _ if ["out.", "mid.", "mask.", "router."].iter().any(|p| name.starts_with(p)) => RowKind::Tokens,
        _ => RowKind::Other,
    }
}
