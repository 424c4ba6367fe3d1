//! What one step did.

use serde::Serialize;

/// What one step did; a line of `metrics.jsonl`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepReport {
    /// The step, from 1.
    pub step: usize,
    /// Mean cross entropy over the learned tokens of the whole batch, before the step.
    pub loss: f64,
    /// Norm of all gradients, before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens of the batch that are not padding, over all ranks.
    pub tokens: usize,
    /// Learned tokens of the batch, over all ranks.
    pub label_tokens: usize,
    /// `tokens` over the duration of this step.
    pub tokens_per_s: f64,
    /// Seconds since training began.
    pub seconds: f64,
}
