//! What is adapted and how.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::str::FromStr;

use super::error::LoraError;
use crate::weights::Part;

/// PEFT's word for all projections.
pub(super) const ALL_LINEAR: &str = "all-linear";

/// Settings of the adapters.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraOptions {
    pub(crate) rank: usize,
    pub(super) alpha: f64,
    pub(crate) dropout: f64,
    pub(super) targets: LoraTargets,
    pub(super) parts: BTreeSet<Part>,
}

/// Which modules get an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoraTargets {
    /// Every projection but the head.
    AllLinear,
    /// The modules that have one of these paths, or whose path ends with a dot and one of these: `q_proj`,
    /// `3.mlp.down_proj`.
    Names(Vec<String>),
}

impl FromStr for LoraTargets {
    type Err = Infallible;

    /// `all-linear`, or names with commas between them.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        if text.trim().eq_ignore_ascii_case(ALL_LINEAR) {
            return Ok(Self::AllLinear);
        }
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(Self::Names(names.map(str::to_string).collect()))
    }
}

impl LoraOptions {
    /// Adapters of this rank, scaled by `alpha / rank`, for all projections of the text model, without dropout.
    pub fn new(rank: usize, alpha: f64) -> Self {
        Self { rank, alpha, dropout: 0.0, targets: LoraTargets::AllLinear, parts: BTreeSet::from([Part::Text]) }
    }

    /// Which modules.
    #[must_use]
    pub fn targets(mut self, targets: LoraTargets) -> Self {
        self.targets = targets;
        self
    }

    /// In which parts of the model modules are looked for.
    #[must_use]
    pub fn parts(mut self, parts: impl IntoIterator<Item = Part>) -> Self {
        self.parts = parts.into_iter().collect();
        self
    }

    /// The share of an adapter's inputs that is dropped in training, from 0 to less than 1; the others are scaled up.
    /// See [`Weights::with_dropout`](crate::Weights::with_dropout).
    #[must_use]
    pub fn dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }

    /// Width between `A` and `B`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// What the adapters' results are multiplied with, times the rank.
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// The share of an adapter's inputs that is dropped in training.
    pub fn dropout_share(&self) -> f64 {
        self.dropout
    }

    /// The factor on an adapter's result.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    pub(super) fn check(&self) -> Result<(), LoraError> {
        let setting = |setting, value: f64, allowed| Err(LoraError::Setting { setting, value, allowed });
        if self.rank == 0 {
            return setting("rank", 0.0, "a whole number from 1 on; usual are 8 to 64");
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return setting("alpha", self.alpha, "a finite number above 0; usual are once or twice the rank");
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return setting("dropout", self.dropout, "0, or a number between 0 and 1");
        }
        match &self.targets {
            LoraTargets::Names(names) if names.is_empty() => Err(LoraError::NoTargets),
            _ if self.parts.is_empty() => Err(LoraError::NoParts),
            _ => Ok(()),
        }
    }
}
