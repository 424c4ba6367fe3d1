//! The mixture of experts of a text model.

use candle_cp_layers::{Fields, Result};

/// Experts in place of the MLP of every decoder layer; each token goes to a few of them, and to the shared one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeConfig {
    /// Number of experts of a layer, without the shared one.
    pub num_experts: usize,
    /// Number of experts that a token goes to, from 1 to `num_experts`.
    pub top_k: usize,
    /// Width inside an expert.
    pub intermediate_size: usize,
    /// Width inside the shared expert.
    pub shared_intermediate_size: usize,
}

/// Fields that a model with experts needs.
pub(super) const REQUIRED: [&str; 4] =
    ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"];

impl MoeConfig {
    /// Reads the fields of the text model that speak of experts.
    pub(super) fn read(fields: &Fields) -> Result<Self> {
        fields.refuse_feature("output_router_logits", "the auxiliary loss of routers is")?;
        if !fields.flag("norm_topk_prob", true)? {
            return Err(fields.refuse("norm_topk_prob", "weights of the chosen experts sum to 1 here; allowed: true"));
        }
        if fields.get("mlp_only_layers").and_then(|list| list.as_array()).is_some_and(|list| !list.is_empty()) {
            return Err(fields.refuse("mlp_only_layers", "every layer has experts here; allowed: an empty list"));
        }
        let config = Self {
            num_experts: fields.listed("num_experts")?,
            top_k: fields.size("num_experts_per_tok")?,
            intermediate_size: fields.size("moe_intermediate_size")?,
            shared_intermediate_size: fields.size("shared_expert_intermediate_size")?,
        };
        if config.top_k > config.num_experts {
            let reason = format!("must be from 1 to num_experts, which is {}", config.num_experts);
            return Err(fields.refuse("num_experts_per_tok", reason));
        }
        Ok(config)
    }
}
