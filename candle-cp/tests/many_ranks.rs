//! 56 rows padded to 256 over 128 ranks: most ranks have no label, and nothing may be lost or counted twice.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{CpContext, LossOptions, MaskRule, Result, SequenceLayout, Tokens, linear_cross_entropy};
use common::loss_reference::cross_entropy;
use common::ring::numbers;
use common::{Case, Rule, assert_exact};
use std::time::Duration;

const ROWS: usize = 56;
const RANKS: usize = 128;
const WIDTH: usize = 6;
const VOCABULARY: usize = 11;

/// `rows * WIDTH` numbers.
fn random(rows: usize, seed: u64) -> Vec<f64> {
    Case { key_heads: 1, group: 1, head_dim: WIDTH, seed, ..Case::plain(rows, Rule::CAUSAL) }.data().q
}

fn labels() -> Vec<i64> {
    (0..ROWS as i64).map(|i| (i * 7 + 3) % VOCABULARY as i64).collect()
}

/// Piece r and piece 255 - r, of one token each: ranks 0..56 hold one row each, the others padding.
fn layout() -> SequenceLayout {
    let layout = SequenceLayout::head_tail(ROWS, RANKS).unwrap();
    assert_eq!((layout.padded_len(), layout.local_len(0)), (256, 2));
    layout
}

struct Part {
    loss: f64,
    d_embeds: Vec<f64>,
    d_weight: Vec<f64>,
    labels: usize,
}

fn one_rank(context: &CpContext, attend: bool) -> Result<Part> {
    let embeds = Var::from_slice(&random(ROWS, 1), (1, ROWS, WIDTH), &Device::Cpu)?;
    let weight = Var::from_slice(&random(VOCABULARY, 2), (VOCABULARY, WIDTH), &Device::Cpu)?;
    let labels = Tensor::from_vec(labels(), (1, ROWS), &Device::Cpu)?;
    let local = context.shard(&embeds, 1)?;
    let hidden = if attend {
        let heads = local.unsqueeze(1)?;
        (context.attend(&heads, &heads, &heads, &MaskRule::causal(), 0.8)?.squeeze(1)? + local)?
    } else {
        local
    };
    let local_labels = context.shard_fill(&labels, 1, -100.0)?;
    let loss = linear_cross_entropy(&hidden, &weight, &local_labels, &LossOptions::new(ROWS as f64))?;
    let gradients = loss.backward()?;
    let of = |x: &Var| numbers(gradients.get(x).expect("the graph is attached, label or not"));
    let count = local_labels.flatten_all()?.to_vec1::<i64>()?.into_iter().filter(|&l| l != -100).count();
    Ok(Part {
        loss: loss.to_dtype(DType::F64)?.to_scalar()?,
        d_embeds: of(&embeds)?,
        d_weight: of(&weight)?,
        labels: count,
    })
}

fn run(attend: bool) -> Vec<Part> {
    let options = threads::Options { deadline: Duration::from_secs(30), stack_bytes: 2 << 20 };
    let all = threads::run(RANKS, &options, |comm| {
        one_rank(&CpContext::new(comm, layout(), Tokens::single_document(1, ROWS))?, attend)
    });
    all.unwrap()
}

fn total(parts: &[Part], of: impl Fn(&Part) -> &[f64]) -> Vec<f64> {
    let mut sum = vec![0.0; of(&parts[0]).len()];
    parts.iter().for_each(|part| sum.iter_mut().zip(of(part)).for_each(|(sum, x)| *sum += x));
    sum
}

#[test]
fn loss_and_gradients_equal_the_unpadded_reference() {
    let parts = run(false);
    assert_eq!(parts.iter().filter(|p| p.labels == 0).count(), 72);
    assert_eq!(parts.iter().map(|p| p.labels).sum::<usize>(), ROWS);
    let reference = cross_entropy(&random(ROWS, 1), &random(VOCABULARY, 2), &labels(), ROWS as f64, None);
    assert_exact("loss", &[parts.iter().map(|p| p.loss).sum()], &[reference.loss]);
    assert_exact("embedding gradient", &total(&parts, |p| &p.d_embeds), &reference.d_hidden);
    assert_exact("weight gradient", &total(&parts, |p| &p.d_weight), &reference.d_weight);
    for part in parts.iter().filter(|p| p.labels == 0) {
        assert_eq!(part.loss, 0.0);
        assert!(part.d_embeds.iter().chain(&part.d_weight).all(|&x| x == 0.0));
    }
}

#[test]
fn the_same_through_attention_equals_one_rank() {
    let parts = run(true);
    let single = one_rank(&CpContext::single(Tokens::single_document(1, ROWS)).unwrap(), true).unwrap();
    assert_exact("loss", &[parts.iter().map(|p| p.loss).sum()], &[single.loss]);
    assert_exact("embedding gradient", &total(&parts, |p| &p.d_embeds), &single.d_embeds);
    assert_exact("weight gradient", &total(&parts, |p| &p.d_weight), &single.d_weight);
}
