//! The tensors that experts add to a decoder layer.

use super::{Role, TensorSpec};
use crate::config::MoeConfig;

/// Norms of a layer with experts beside those that every layer has.
pub(crate) const POST_MLP_NORM: &str = "post_feedforward_layernorm_1";
pub(crate) const PRE_EXPERTS_NORM: &str = "pre_feedforward_layernorm_2";
pub(crate) const POST_EXPERTS_NORM: &str = "post_feedforward_layernorm_2";

/// What experts add to the layer whose tensors start with `prefix`. `range` is the text model's `initializer_range`.
///
/// The router's `scale` and `per_expert_scale` are vectors of ones when fresh, like the weights of norms.
pub(crate) fn tensors(prefix: &str, hidden: usize, moe: &MoeConfig, range: f64) -> Vec<TensorSpec> {
    let (experts, width) = (moe.num_experts, moe.intermediate_size);
    let matrix = |fan_in| Role::Matrix { fan_in, range };
    let norm = |name| (format!("{name}.weight"), vec![hidden], Role::Norm);
    let specs = [
        ("router.proj.weight".to_string(), vec![experts, hidden], matrix(hidden)),
        ("router.scale".to_string(), vec![hidden], Role::Norm),
        ("router.per_expert_scale".to_string(), vec![experts], Role::Norm),
        ("experts.gate_up_proj".to_string(), vec![experts, 2 * width, hidden], matrix(hidden)),
        ("experts.down_proj".to_string(), vec![experts, hidden, width], matrix(width)),
        norm(POST_MLP_NORM),
        norm(PRE_EXPERTS_NORM),
        norm(POST_EXPERTS_NORM),
    ];
    let named = |(name, shape, role)| TensorSpec { name: format!("{prefix}.{name}"), shape, role };
    specs.into_iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names and shapes of layer 0 of the tiny released-style checkpoint with experts.
    #[test]
    fn names_and_shapes_are_those_of_checkpoints() {
        let moe = MoeConfig { num_experts: 8, top_k: 2, intermediate_size: 16 };
        let mut found: Vec<String> = Vec::new();
        for spec in tensors("model.language_model.layers.0", 32, &moe, 0.02) {
            assert!(spec.is_trained());
            found.push(format!("{} {:?}", spec.name, spec.shape));
        }
        found.sort();
        let expected = [
            "experts.down_proj [8, 32, 16]",
            "experts.gate_up_proj [8, 32, 32]",
            "post_feedforward_layernorm_1.weight [32]",
            "post_feedforward_layernorm_2.weight [32]",
            "pre_feedforward_layernorm_2.weight [32]",
            "router.per_expert_scale [8]",
            "router.proj.weight [8, 32]",
            "router.scale [32]",
        ];
        assert_eq!(found, expected.map(|name| format!("model.language_model.layers.0.{name}")));
    }
}
