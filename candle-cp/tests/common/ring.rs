//! A case on rank threads, the way a model would run it: shard, attend, backward on every rank, gather.

use super::case::{Case, Data, Rule};
use super::dense::Outcome;
use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{CpContext, Error, LayerWork, LayoutKind, MaskRule, Result, SequenceLayout, Tokens, Trim};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::sync::Arc;
use std::time::Duration;

/// How the local queries, keys and values lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Strides {
    /// `[B, H, S, D]`.
    Contiguous,
    /// `[B, S, H, D]`, as a projection leaves them.
    TokenMajor,
    /// `[B, H, D, S]`: the last dimension is strided.
    DimensionMajor,
    /// `[B, S, H, D]`, handed to the operator in this order.
    HeadsAfterTokens,
}

#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub dtype: DType,
    pub trim: Trim,
    pub strides: Strides,
}

impl Default for Run {
    fn default() -> Self {
        Self { dtype: DType::F64, trim: Trim::Live, strides: Strides::TokenMajor }
    }
}

/// Short deadline: a test that hangs fails soon.
pub fn options() -> threads::Options {
    threads::Options { deadline: Duration::from_secs(20), stack_bytes: 8 << 20 }
}

pub fn mask_rule(rule: &Rule) -> MaskRule {
    let base = match (rule.causal, rule.window) {
        (true, None) => MaskRule::causal(),
        (true, Some(window)) => MaskRule::sliding(window),
        (false, None) => MaskRule::bidirectional(),
        (false, Some(_)) => panic!("the crate has no bidirectional windows"),
    };
    let base = if rule.whole_groups { base.with_whole_groups() } else { base };
    let base = if rule.groups { base.with_groups() } else { base };
    if rule.both_sides { base.with_both_sides() } else { base }
}

pub fn tokens(case: &Case) -> Tokens {
    Tokens::new(case.documents.clone(), case.groups.clone()).expect("metadata of the case")
}

/// A layout by name. The balanced one is made for documents of 1, 2, 4, ... tokens, so that ranks own several pieces.
pub fn named_layout(kind: LayoutKind, len: usize, ranks: usize) -> SequenceLayout {
    let ids = (0..len).map(|i| i64::from((i + 1).ilog2())).collect();
    let tokens = Tokens::new(vec![ids], vec![vec![-1; len]]).expect("documents");
    let causal = LayerWork { rule: MaskRule::causal(), weight: 1.0 };
    let sliding = LayerWork { rule: MaskRule::sliding(len.div_ceil(9)), weight: 3.0 };
    kind.layout(&tokens, ranks, &[sliding, causal]).expect("a layout")
}

/// The layouts with a name and two random partitions of `len` tokens.
pub fn layouts(len: usize, ranks: usize) -> Vec<(String, SequenceLayout)> {
    let named = LayoutKind::ALL.into_iter().map(|kind| (kind.to_string(), named_layout(kind, len, ranks)));
    let random = (0..2).map(|seed| (format!("random {seed}"), random_layout(len, ranks, seed)));
    named.chain(random).collect()
}

/// Pieces of uneven lengths, dealt out at random and out of order, with up to three tokens of padding.
pub fn random_layout(len: usize, ranks: usize, seed: u64) -> SequenceLayout {
    let mut rng = StdRng::seed_from_u64(seed ^ (len as u64) << 8 ^ (ranks as u64) << 32);
    let total = len + rng.random_range(0..4);
    let mut cuts: Vec<usize> = (0..2 * ranks).map(|_| rng.random_range(0..=total)).collect();
    cuts.extend([0, total]);
    cuts.sort_unstable();
    let mut pieces: Vec<_> = cuts.windows(2).map(|w| w[0]..w[1]).collect();
    pieces.shuffle(&mut rng);
    let mut ranges = vec![Vec::new(); ranks];
    pieces.into_iter().for_each(|piece| ranges[rng.random_range(0..ranks)].push(piece));
    SequenceLayout::from_ranges(len, ranges).expect("a partition")
}

/// Runs the case and checks on the way that all ranks agree, that gradients stay on the rows their rank owns, and that
/// rows of padding get output 0 and log-sum-exp -inf.
pub fn ring(case: &Case, data: &Data, layout: &SequenceLayout, run: Run) -> Outcome {
    let all = threads::run(layout.ranks(), &options(), |comm| {
        let context = CpContext::with_trim(comm, layout.clone(), tokens(case), run.trim)?;
        one_rank(case, data, &context, run)
    });
    agreed(all.expect("the ranks run"))
}

/// What all ranks found, which has to be the same.
pub fn agreed(mut all: Vec<Outcome>) -> Outcome {
    let first = all.swap_remove(0);
    for other in &all {
        for ((name, a), (_, b)) in first.parts().into_iter().zip(other.parts()) {
            assert!(same_bits(a, b), "ranks disagree about the gathered {name}");
        }
    }
    first
}

/// Equal down to the sign of zero.
pub fn same_bits(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

pub fn one_rank(case: &Case, data: &Data, context: &CpContext, run: Run) -> Result<Outcome> {
    let (rule, scale) = (mask_rule(&case.rule), case.scale);
    one_rank_by(case, data, context, run, |[q, k, v]| {
        let (out, lse) = context.attend_with_lse(q, k, v, &rule, scale)?;
        if run.strides != Strides::HeadsAfterTokens {
            return Ok((out, lse));
        }
        let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
        Ok((context.attend_bshd(&q, &k, &v, &rule, scale)?.transpose(1, 2)?, lse))
    })
}

/// As [`one_rank`] with another way to attend, from local `[B, H, S, D]` to output and log-sum-exp.
pub fn one_rank_by(
    case: &Case,
    data: &Data,
    context: &CpContext,
    run: Run,
    attend: impl Fn([&Tensor; 3]) -> Result<(Tensor, Tensor)>,
) -> Result<Outcome> {
    let tensor = |x: &[f64], shape| Tensor::from_slice(x, shape, &Device::Cpu)?.to_dtype(run.dtype);
    let full = [
        Var::from_tensor(&tensor(&data.q, case.query_shape())?)?,
        Var::from_tensor(&tensor(&data.k, case.key_shape())?)?,
        Var::from_tensor(&tensor(&data.v, case.key_shape())?)?,
    ];
    let local = |x: &Tensor| restride(&context.shard(x, 2)?, run.strides);
    let [q, k, v] = [local(&full[0])?, local(&full[1])?, local(&full[2])?];
    let (out, lse) = attend([&q, &k, &v])?;
    let d_out = context.shard(&tensor(&data.d_out, case.query_shape())?, 2)?;
    let gradients = (&out * d_out)?.sum_all()?.backward()?;
    check_padding(context, &out, &lse)?;
    let mut sums = Vec::new();
    for x in &full {
        let gradient = gradients.get(x).expect("backward reaches every input on every rank");
        check_owned(context, gradient)?;
        sums.push(numbers(&context.comm().all_reduce_sum(gradient)?)?);
    }
    let [dq, dk, dv] = sums.try_into().expect("three inputs");
    let out = numbers(&context.gather(&out.detach(), 2)?)?;
    Ok(Outcome { out, lse: numbers(&context.gather(&lse, 2)?)?, dq, dk, dv })
}

fn restride(x: &Tensor, strides: Strides) -> Result<Tensor> {
    Ok(match strides {
        Strides::Contiguous => x.contiguous()?,
        Strides::TokenMajor | Strides::HeadsAfterTokens => x.transpose(1, 2)?.contiguous()?.transpose(1, 2)?,
        Strides::DimensionMajor => x.transpose(2, 3)?.contiguous()?.transpose(2, 3)?,
    })
}

pub fn numbers(x: &Tensor) -> Result<Vec<f64>> {
    Ok(x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

fn check_padding(context: &CpContext, out: &Tensor, lse: &Tensor) -> Result<()> {
    for (i, global) in context.layout().global_indices(context.rank()).into_iter().enumerate() {
        if global >= context.layout().len() {
            assert!(numbers(&out.narrow(2, i, 1)?)?.iter().all(|&x| x == 0.0), "output of padding");
            assert!(numbers(&lse.narrow(2, i, 1)?)?.iter().all(|&x| x == f64::NEG_INFINITY), "lse of padding");
        }
    }
    Ok(())
}

/// A rank's gradient of a full `[B, H, S, D]` tensor is zero where another rank owns the token.
fn check_owned(context: &CpContext, gradient: &Tensor) -> Result<()> {
    let mut foreign = vec![true; context.layout().padded_len()];
    context.layout().global_indices(context.rank()).into_iter().for_each(|i| foreign[i] = false);
    let (_, _, len, d) = gradient.dims4()?;
    for (i, token) in numbers(gradient)?.chunks(d).enumerate() {
        let token_index = i % len;
        assert!(!foreign[token_index] || token.iter().all(|&x| x == 0.0), "gradient outside of the owned rows");
    }
    Ok(())
}

/// What each rank of a group ended with.
pub type Ended<T> = Vec<std::result::Result<T, String>>;

/// Runs `f` on `size` ranks; returns what every single rank ended with, and what the group did.
pub fn run_all<T: Send + Clone>(
    size: usize,
    deadline: Duration,
    f: impl Fn(Arc<dyn candle_cp::Communicator>) -> Result<T> + Sync,
) -> (Ended<T>, Result<Vec<T>>) {
    let ended = std::sync::Mutex::new(vec![Err("panicked".to_string()); size]);
    let options = threads::Options { deadline, ..options() };
    let group = threads::run(size, &options, |comm| {
        let rank = comm.rank();
        let result = f(comm);
        let kept = result.as_ref().map(T::clone).map_err(Error::to_string);
        ended.lock().expect("no rank panics here")[rank] = kept;
        result
    });
    (ended.into_inner().expect("no rank panics here"), group)
}
