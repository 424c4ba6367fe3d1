//! The one object that a model is handed: everything that depends on the rank, the layout and the batch.

use crate::attention::{self, ring_attention};
use crate::comm::{Communicator, Local};
use crate::conv;
use crate::delta_rule::{self, StatePlan};
use crate::error::Result;
use crate::gathered::{self, GatheredKeys};
use crate::gpu::{self, GpuDevice};
use crate::layout::SequenceLayout;
use crate::mask::MaskRule;
use crate::plan::{AttentionPlan, Trim};
use crate::shard::{self, ShardedLabels};
use crate::tokens::Tokens;
use candle_core::{Device, Tensor};
use candle_cp_kernels::{ConvActivation, DeltaHeads, Order};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

/// Context of one batch on one rank. A clone is cheap and shares the plans.
///
/// Every rank makes one with the same layout and tokens and then makes the same calls in the same order. The loss of
/// the batch is the sum of the ranks' losses, and so is its gradient.
#[derive(Debug, Clone)]
pub struct CpContext(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    comm: Arc<dyn Communicator>,
    layout: SequenceLayout,
    tokens: Tokens,
    trim: Trim,
    plans: Mutex<BTreeMap<MaskRule, Arc<AttentionPlan>>>,
    states: OnceLock<Arc<StatePlan>>,
}

impl CpContext {
    /// The context of `comm`'s rank.
    ///
    /// # Errors
    /// A layout for another number of ranks or tokens.
    pub fn new(comm: Arc<dyn Communicator>, layout: SequenceLayout, tokens: Tokens) -> Result<Self> {
        Self::with_trim(comm, layout, tokens, Trim::Live)
    }

    /// As [`CpContext::new`], choosing what plans leave out.
    ///
    /// # Errors
    /// As [`CpContext::new`].
    pub fn with_trim(comm: Arc<dyn Communicator>, layout: SequenceLayout, tokens: Tokens, trim: Trim) -> Result<Self> {
        if layout.ranks() != comm.size() || layout.len() != tokens.len() {
            let given = format!("for {} tokens over {} ranks", layout.len(), layout.ranks());
            let allowed = format!("the batch has {} tokens per row and the group {} ranks", tokens.len(), comm.size());
            return Err(crate::Error::argument("layout", given, allowed, "make the layout from both"));
        }
        Ok(Self(Arc::new(Inner { comm, layout, tokens, trim, plans: Mutex::default(), states: OnceLock::new() })))
    }

    /// One rank that owns everything.
    ///
    /// # Errors
    /// Rows that are too long.
    pub fn single(tokens: Tokens) -> Result<Self> {
        Self::new(Arc::new(Local::new()), SequenceLayout::contiguous(tokens.len(), 1)?, tokens)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.0.comm.rank()
    }

    /// Ranks that share the sequence.
    pub fn size(&self) -> usize {
        self.0.comm.size()
    }

    /// Who owns which tokens.
    pub fn layout(&self) -> &SequenceLayout {
        &self.0.layout
    }

    /// Metadata of the full batch.
    pub fn tokens(&self) -> &Tokens {
        &self.0.tokens
    }

    /// The group.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.0.comm
    }

    /// This rank's part of a full-sequence tensor along `dim`, padded with 0: out of place and differentiable. The
    /// gradient reaches exactly the owned rows.
    ///
    /// # Errors
    /// Another length along `dim`.
    pub fn shard(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        self.shard_fill(x, dim, 0.0)
    }

    /// As [`CpContext::shard`] with another value for padding.
    ///
    /// # Errors
    /// As [`CpContext::shard`].
    pub fn shard_fill(&self, x: &Tensor, dim: usize, fill: f64) -> Result<Tensor> {
        shard::shard(&self.0.layout, self.rank(), x, dim, fill)
    }

    /// The full, unpadded tensor from all ranks' slices, on every rank. In backward, the ranks' gradients of the full
    /// tensor are summed and each rank gets its rows.
    ///
    /// # Errors
    /// Another length along `dim`, or a failing peer.
    pub fn gather(&self, local: &Tensor, dim: usize) -> Result<Tensor> {
        shard::gather(&self.0.layout, &self.0.comm, local, dim)
    }

    /// Position of each local token inside its document, `[B, S_local]` u32; padding continues the count.
    ///
    /// # Errors
    /// None but Candle's.
    pub fn positions(&self, device: &Device) -> Result<Tensor> {
        let mut rows = self.0.tokens.positions();
        let local = self.0.layout.global_indices(self.rank());
        for row in &mut rows {
            for _ in row.len()..self.0.layout.padded_len() {
                row.push(row.last().map_or(0, |last| last + 1));
            }
        }
        let positions: Vec<u32> = rows.iter().flat_map(|row| local.iter().map(|&i| row[i] as u32)).collect();
        Ok(Tensor::from_vec(positions, (rows.len(), local.len()), device)?)
    }

    /// Labels `[B, S]` (not shifted, full row) shifted, counted and sharded. A token is never scored against the first
    /// token of another document.
    ///
    /// # Errors
    /// Labels of another shape than the batch.
    pub fn shard_labels(&self, labels_bs: &Tensor) -> Result<ShardedLabels> {
        shard::shard_labels(&self.0.layout, self.rank(), self.0.tokens.documents(), labels_bs)
    }

    /// The plan for a mask rule, made on first use.
    ///
    /// # Errors
    /// None after construction.
    pub fn plan(&self, rule: &MaskRule) -> Result<Arc<AttentionPlan>> {
        let mut plans = self.0.plans.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(plan) = plans.get(rule) {
            return Ok(plan.clone());
        }
        let plan = AttentionPlan::new(&self.0.layout, &self.0.tokens, rule, self.rank(), self.0.trim)?;
        let plan = Arc::new(plan);
        plans.insert(*rule, plan.clone());
        Ok(plan)
    }

    /// Attention of the local queries `[B, Hq, S_local, D]` over the keys and values `[B, Hkv, S_local, D]` of all
    /// ranks, scores multiplied by `scale`. Query head `h` reads key head `h / (Hq / Hkv)`. Types: f32, f64, bf16, f16;
    /// sums run in f32 (f64 for f64). A query without any key gets output 0 and gradient 0.
    ///
    /// A NaN in a query or key reaches the outputs of the queries that may see it; a NaN or infinity in a value, and in
    /// backward any NaN, may also reach other queries of the same tile. Every rank has to call it, and later to call backward.
    ///
    /// # Errors
    /// Shapes or types that do not fit each other or the context; a failing peer.
    pub fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, rule: &MaskRule, scale: f64) -> Result<Tensor> {
        Ok(self.attend_with_lse(q, k, v, rule, scale)?.0)
    }

    /// As [`CpContext::attend`], with the log-sum-exp of the scaled scores: `[B, Hq, S_local]` in the accumulation
    /// type, -inf for a query without keys, outside of the graph.
    ///
    /// # Errors
    /// As [`CpContext::attend`].
    pub fn attend_with_lse(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        rule: &MaskRule,
        scale: f64,
    ) -> Result<(Tensor, Tensor)> {
        ring_attention(&self.0.comm, &self.plan(rule)?, (q, k, v), Order::HeadsFirst, scale)
    }

    /// As [`CpContext::attend_with_lse`], with kernels that run on `device`: what `attend` does for tensors of CUDA
    /// devices, for others that have the trait. The log-sum-exp is in f32.
    ///
    /// # Errors
    /// As [`CpContext::attend`]; a type or head size without a kernel.
    pub fn attend_on(
        &self,
        device: &Arc<dyn GpuDevice>,
        (q, k, v): (&Tensor, &Tensor, &Tensor),
        rule: &MaskRule,
        order: Order,
        scale: f64,
    ) -> Result<(Tensor, Tensor)> {
        let plan = self.plan(rule)?;
        attention::check(&plan, q, k, v, order)?;
        gpu::ring_attention(device.clone(), &self.0.comm, &plan, (q, k, v), order, scale)
    }

    /// As [`CpContext::attend`] with heads after tokens, as projections give them: query and output `[B, S_local, Hq, D]`,
    /// key and value `[B, S_local, Hkv, D]`. Saves the passes over memory that transposing takes in both directions.
    ///
    /// # Errors
    /// As [`CpContext::attend`].
    pub fn attend_bshd(&self, q: &Tensor, k: &Tensor, v: &Tensor, rule: &MaskRule, scale: f64) -> Result<Tensor> {
        Ok(ring_attention(&self.0.comm, &self.plan(rule)?, (q, k, v), Order::TokensFirst, scale)?.0)
    }

    /// Sends keys and values `[B, S_local, Hkv, D]` to the ranks that need them under `rule`, and keeps what arrives, so
    /// that several layers can attend to it with [`CpContext::attend_gathered`]. Backward sends the sum of those layers'
    /// gradients home. Every rank has to call it, and later to call backward.
    ///
    /// Worth its memory for layers that share keys and values: they travel once in each direction instead of once per
    /// layer.
    ///
    /// # Errors
    /// Shapes or types that do not fit each other or the context; a failing peer.
    pub fn gather_keys(&self, k_bshd: &Tensor, v_bshd: &Tensor, rule: &MaskRule) -> Result<GatheredKeys> {
        gathered::gather(&self.0.comm, &self.plan(rule)?, rule, (k_bshd, v_bshd), None)
    }

    /// As [`CpContext::gather_keys`], for kernels that run on `device`: what it does for tensors of CUDA devices, for
    /// others that have the trait. [`CpContext::attend_gathered`] runs there.
    ///
    /// # Errors
    /// As [`CpContext::gather_keys`].
    pub fn gather_keys_on(
        &self,
        device: &Arc<dyn GpuDevice>,
        (k_bshd, v_bshd): (&Tensor, &Tensor),
        rule: &MaskRule,
    ) -> Result<GatheredKeys> {
        gathered::gather(&self.0.comm, &self.plan(rule)?, rule, (k_bshd, v_bshd), Some(device.clone()))
    }

    /// Attention of the local queries `[B, S_local, Hq, D]` over gathered keys and values, under the rule with which they
    /// were gathered; otherwise as [`CpContext::attend_bshd`], without a word between the ranks.
    ///
    /// # Errors
    /// Keys of another context, or queries that do not fit the keys.
    pub fn attend_gathered(&self, q_bshd: &Tensor, keys: &GatheredKeys, scale: f64) -> Result<Tensor> {
        gathered::attend(&self.plan(keys.rule())?, q_bshd, keys, scale, self.0.comm.trace())
    }

    /// The gated delta rule over the documents of the whole row, of which this rank passes in its slice.
    ///
    /// `qkv_bsc` `[B, S_local, 2 Hk dk + Hv dv]` holds queries, keys and values of all heads one after the other; queries
    /// and keys are normalised here (`x / sqrt(sum of x^2 + 1e-6)`) and queries multiplied by `dk^-0.5`. `g_bsh`
    /// `[B, S_local, Hv]` is the log of the decay, at most 0, `beta_bsh` `[B, S_local, Hv]` the strength of writing. Value
    /// head `h` reads key head `h / (Hv / Hk)`. Per value head and token, with a state `S` `[dk, dv]` that starts as zeros
    /// in every document:
    ///
    /// ```text
    /// S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
    /// ```
    ///
    /// Returns `[B, S_local, Hv, dv]` in the type of `qkv_bsc`: f32, f64, bf16 or f16. The state and all sums are f32 (f64 for
    /// f64). Padding has output 0 and gradient 0. Every rank has to call it, and later to call backward. The CPU only.
    ///
    /// # Errors
    /// Shapes or types that do not fit each other or the context; a tensor that is not on the CPU; a failing peer.
    pub fn delta_rule(
        &self,
        qkv_bsc: &Tensor,
        g_bsh: &Tensor,
        beta_bsh: &Tensor,
        heads: &DeltaHeads,
    ) -> Result<Tensor> {
        let Inner { comm, layout, tokens, states, .. } = &*self.0;
        let plan = states.get_or_init(|| Arc::new(StatePlan::new(layout, tokens, comm.rank())));
        delta_rule::delta_rule(comm, plan, (qkv_bsc, g_bsh, beta_bsh), heads)
    }

    /// Causal depthwise convolution along the row, then the activation: with `weight_ck` `[C, K]` or `[C, 1, K]`,
    /// `y[t, c] = sum over j of weight[c, j] * x[t - (K - 1) + j, c]`, where tokens of another document count as 0. The last
    /// tap meets the token itself. `x_bsc` `[B, S_local, C]` is this rank's slice; slices and their pieces may be shorter
    /// than K. Types: f32, f64, bf16, f16, the same for both; sums run in f32 (f64 for f64). Padding gets output 0 and
    /// gradient 0. Returns `[B, S_local, C]`.
    ///
    /// The weight's gradient is this rank's part, to be summed over ranks as all gradients of weights are. Every rank has to
    /// call it, and later to call backward. The CPU only.
    ///
    /// # Errors
    /// Shapes or types that do not fit each other or the context; a tensor that is not on the CPU; a failing peer.
    pub fn causal_conv(&self, x_bsc: &Tensor, weight_ck: &Tensor, activation: ConvActivation) -> Result<Tensor> {
        conv::causal_conv(&self.0.comm, &self.0.layout, &self.0.tokens, x_bsc, weight_ck, activation)
    }
}
