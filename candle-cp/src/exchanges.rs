//! What ranks of linear attention layers exchange, as numbers: for planning a run without making it.

use crate::conv::HaloPlan;
use crate::delta_rule::StatePlan;
use crate::layout::SequenceLayout;
use crate::tokens::Tokens;
use candle_cp_kernels::DeltaHeads;

/// Numbers that each rank gives to all others in one delta rule; `None` where nothing crosses a border and no rank says a
/// word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateExchange {
    /// In forward, by rank.
    pub states: Vec<usize>,
    /// In backward, by rank.
    pub gradients: Vec<usize>,
}

/// What the gated delta rule of such heads gathers over the ranks of a layout.
pub fn state_exchange(layout: &SequenceLayout, tokens: &Tokens, heads: &DeltaHeads) -> Option<StateExchange> {
    let plan = StatePlan::new(layout, tokens, 0);
    plan.crosses().then(|| {
        let state = heads.value_heads * heads.key_dim * heads.value_dim;
        let transition = heads.value_heads * heads.key_dim * heads.key_dim;
        let [states, gradients] = plan.made(state, transition);
        StateExchange { states, gradients }
    })
}

/// Rows of halos that one rank sends and receives at each hop of a causal convolution of `taps` taps: at every distance
/// at which any two ranks exchange something. Their gradients go the other way.
pub fn halo_exchange(layout: &SequenceLayout, tokens: &Tokens, rank: usize, taps: usize) -> Vec<[usize; 2]> {
    HaloPlan::new(layout, tokens, rank, taps).row_counts()
}
