//! Documents in one row do not touch each other, and attention composes: packed rows, several layers, odd views.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{CpContext, MaskRule, Result, Tokens};
use common::ring::{mask_rule, numbers, options, tokens};
use common::{
    Case, Data, Outcome, Rule, Run, Strides, assert_exact, assert_outcome, block, dense, documents, layouts, ring,
};

const A: usize = 11;
const B: usize = 9;

/// Tokens `range` of every head of `[1, H, len, D]`.
fn slice(x: &[f64], len: usize, width: usize, range: std::ops::Range<usize>) -> Vec<f64> {
    x.chunks(len * width).flat_map(|head| head[range.start * width..range.end * width].iter().copied()).collect()
}

#[test]
fn a_document_alone_equals_the_document_in_a_packed_row() {
    for rule in [Rule::CAUSAL, Rule::sliding(4).with_groups(), Rule::BIDIRECTIONAL] {
        let packed = Case::row(documents(&[A, B]), block(A + B, &[3..8, 9..13]), rule);
        let data = packed.data();
        for (range, name) in [(0..A, "first"), (A..A + B, "second")] {
            let groups = packed.groups[0][range.clone()].to_vec();
            let alone = Case::row(vec![0; range.len()], groups, rule);
            let d = packed.head_dim;
            let part = |x: &[f64]| slice(x, A + B, d, range.clone());
            let own = Data { q: part(&data.q), k: part(&data.k), v: part(&data.v), d_out: part(&data.d_out) };
            for ranks in [1, 2, 3, 4, 8] {
                let pairs = layouts(A + B, ranks).into_iter().zip(layouts(range.len(), ranks));
                for ((layout_name, together), (_, apart)) in pairs {
                    let in_row = ring(&packed, &data, &together, Run::default());
                    let expected = Outcome {
                        out: part(&in_row.out),
                        lse: slice(&in_row.lse, A + B, 1, range.clone()),
                        dq: part(&in_row.dq),
                        dk: part(&in_row.dk),
                        dv: part(&in_row.dv),
                    };
                    let actual = ring(&alone, &own, &apart, Run::default());
                    assert_outcome(&format!("{name} document, {layout_name} over {ranks}"), &actual, &expected);
                }
            }
        }
    }
}

/// Two attention layers on top of each other and one beside them, all in one graph.
fn three_attentions(case: &Case, x: &Tensor, context: &CpContext) -> Result<Tensor> {
    let local = context.shard(x, 1)?;
    let heads = |x: &Tensor| -> Result<Tensor> { Ok(x.reshape((x.dim(0)?, x.dim(1)?, 2, 5))?.transpose(1, 2)?) };
    let merge = |x: &Tensor| -> Result<Tensor> {
        let (batch, _, len, _) = x.dims4()?;
        Ok(x.transpose(1, 2)?.reshape((batch, len, 10))?)
    };
    let h = heads(&local)?;
    let first = context.attend(&h, &h, &h, &mask_rule(&case.rule), 0.7)?;
    let second = context.attend(&first, &h, &first, &MaskRule::causal(), 0.5)?;
    let beside = context.attend(&h, &first, &h, &MaskRule::sliding(2), 0.9)?;
    merge(&((second + beside)? * first)?)
}

#[test]
fn attention_composes_in_depth_and_side_by_side() {
    let case = Case::row(documents(&[12, 7]), block(19, &[4..9]), Rule::sliding(5).with_groups());
    let random = Case { key_heads: 1, group: 1, head_dim: 10, ..case.clone() }.data();
    let run = |context: &CpContext| -> Result<(Vec<f64>, Vec<f64>)> {
        let x = Var::from_slice(&random.q, (1, 19, 10), &Device::Cpu)?;
        let cotangent = context.shard(&Tensor::from_slice(&random.d_out, (1, 19, 10), &Device::Cpu)?, 1)?;
        let out = three_attentions(&case, &x, context)?;
        let gradients = (&out * cotangent)?.sum_all()?.backward()?;
        let gradient = gradients.get(&x).expect("backward reaches the embeddings on every rank");
        let gradient = context.comm().all_reduce_sum(gradient)?;
        Ok((numbers(&context.gather(&out.detach(), 1)?)?, numbers(&gradient)?))
    };
    let single = run(&CpContext::single(tokens(&case)).unwrap()).unwrap();
    for ranks in [2, 3, 4, 8] {
        for (name, layout) in layouts(19, ranks) {
            let all =
                threads::run(ranks, &options(), |comm| run(&CpContext::new(comm, layout.clone(), tokens(&case))?));
            let all = all.unwrap();
            assert_exact(&format!("{name} over {ranks}: out"), &all[0].0, &single.0);
            assert_exact(&format!("{name} over {ranks}: gradient"), &all[0].1, &single.1);
        }
    }
}

/// Forward and the three gradients of one attention call on one rank.
fn attend_once(q: &Var, k: &Tensor, v: &Tensor, leaves: [&Var; 2], cotangent: &Tensor) -> Result<Vec<Vec<f64>>> {
    let context = CpContext::single(Tokens::single_document(2, 7))?;
    let out = context.attend(q, k, v, &MaskRule::causal(), 0.6)?;
    let gradients = (&out * cotangent)?.sum_all()?.backward()?;
    let of = |x: &Var| numbers(gradients.get(x).expect("a gradient"));
    Ok(vec![numbers(&out)?, of(q)?, of(leaves[0])?, of(leaves[1])?])
}

#[test]
fn views_of_any_strides_give_the_same_as_copies() -> Result<()> {
    let random = |shape: &[usize], seed: u64| -> Result<Tensor> {
        let case =
            Case { key_heads: 1, group: 1, head_dim: 1, seed, ..Case::plain(shape.iter().product(), Rule::CAUSAL) };
        Ok(Tensor::from_slice(&case.data().q, shape, &Device::Cpu)?)
    };
    let q = Var::from_tensor(&random(&[2, 4, 7, 6], 1)?)?;
    let cotangent = random(&[2, 4, 7, 6], 2)?;
    // A fused projection [B, S, heads, D], cut by heads: strides larger than the view, an offset, a gap.
    let fused = Var::from_tensor(&random(&[2, 7, 5, 6], 3)?)?;
    let cut = |head: usize| fused.narrow(2, head, 2)?.transpose(1, 2);
    let views = attend_once(&q, &cut(0)?, &cut(3)?, [&fused, &fused], &cotangent)?;
    let copies = attend_once(&q, &cut(0)?.contiguous()?, &cut(3)?.contiguous()?, [&fused, &fused], &cotangent)?;
    // Keys and values that all heads share, with a stride of 0.
    let shared = Var::from_tensor(&random(&[2, 1, 7, 6], 4)?)?;
    let wide = shared.broadcast_as((2, 4, 7, 6))?;
    let broadcast = attend_once(&q, &wide, &wide, [&shared, &shared], &cotangent)?;
    let native = attend_once(&q, &shared, &shared, [&shared, &shared], &cotangent)?;
    for (a, b) in views.iter().zip(&copies).chain(broadcast.iter().zip(&native)) {
        assert!(common::magnitude(b) > 0.1);
        assert_exact("result", a, b);
    }
    Ok(())
}

#[test]
fn a_cotangent_of_stride_zero_is_read_right() -> Result<()> {
    let case = Case::plain(9, Rule::CAUSAL);
    let ones = Data { d_out: vec![1.0; case.data().d_out.len()], ..case.data() };
    let context = CpContext::single(tokens(&case))?;
    let var = |x: &[f64], shape| Var::from_slice(x, shape, &Device::Cpu);
    let (q, k, v) =
        (var(&ones.q, case.query_shape())?, var(&ones.k, case.key_shape())?, var(&ones.v, case.key_shape())?);
    // sum_all hands back one number, broadcast.
    let out = context.attend(&q, &k, &v, &MaskRule::causal(), case.scale)?;
    let gradients = out.sum_all()?.backward()?;
    let expected = dense(&case, &ones);
    for (name, x, expected) in [("dq", &q, &expected.dq), ("dk", &k, &expected.dk), ("dv", &v, &expected.dv)] {
        assert_exact(name, &numbers(gradients.get(x).expect("a gradient"))?, expected);
    }
    assert_eq!(out.dtype(), DType::F64);
    Ok(())
}

#[test]
fn heads_after_tokens_is_the_same_attention() {
    let mut case = Case::row(documents(&[A, B]), block(A + B, &[3..8, 9..13]), Rule::sliding(4).with_groups());
    (case.key_heads, case.group) = (2, 3);
    let data = case.data();
    let expected = dense(&case, &data);
    for ranks in [1, 3, 4] {
        for (name, layout) in layouts(A + B, ranks) {
            let run = Run { strides: Strides::HeadsAfterTokens, ..Run::default() };
            let actual = ring(&case, &data, &layout, run);
            assert_outcome(&format!("{name} over {ranks}"), &actual, &expected);
        }
    }
}
