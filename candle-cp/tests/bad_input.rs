//! Bad input is refused with a message that says what was given, what is allowed and what to do.

mod common;

use candle_core::{DType, Device, Tensor};
use candle_cp::{
    AttentionPlan, CpContext, Error, LayerWork, LayoutKind, MaskRule, Result, SequenceLayout, Tokens, Trim,
    comm::Local, live_work,
};
use std::sync::Arc;

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T>, name: &str, text: &str) {
    let error = result.expect_err("bad input");
    assert!(matches!(&error, Error::Argument { argument, .. } if *argument == name), "{error:?}");
    assert_eq!(error.to_string(), text);
}

/// 7 tokens in 2 rows on one rank.
fn attend(q: &[usize], k: &[usize], v: &[usize], types: [DType; 3]) -> Result<Tensor> {
    let context = CpContext::single(Tokens::single_document(2, 7))?;
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let (q, k, v) = (zeros(q, types[0])?, zeros(k, types[1])?, zeros(v, types[2])?);
    context.attend(&q, &k, &v, &MaskRule::causal(), 1.0)
}

const F32: [DType; 3] = [DType::F32; 3];

#[test]
fn shapes_that_do_not_fit() {
    let good = [2, 2, 7, 4];
    attend(&good, &good, &good, F32).expect("the baseline is fine");
    let rank = "they are [B, H, S, D], and k and v have one shape; project and transpose them so";
    let heads = "q and k have the same batch and head size; check the projections";
    let local = "this rank has 2 rows of 7 queries and 7 keys; shard the tensors with the context that attends";
    let check = |q: &[usize], k: &[usize], v: &[usize], text: &str| {
        assert_refused(attend(q, k, v, F32), "q, k, v", &format!("q, k, v is q {q:?}, k {k:?}, v {v:?}, but {text}"));
    };
    check(&[2, 2, 7], &good, &good, rank);
    check(&good, &[2, 7, 4], &[2, 7, 4], rank);
    check(&good, &good, &[2, 1, 7, 4], rank);
    check(&[1, 2, 7, 4], &good, &good, heads);
    check(&[2, 2, 7, 3], &good, &good, heads);
    check(&[2, 2, 7, 0], &[2, 2, 7, 0], &[2, 2, 7, 0], heads);
    check(&[2, 2, 6, 4], &good, &good, local);
    check(&good, &[2, 2, 8, 4], &[2, 2, 8, 4], local);
    check(&[3, 2, 7, 4], &[3, 2, 7, 4], &[3, 2, 7, 4], local);
}

#[test]
fn heads_that_do_not_divide() {
    for (query_heads, key_heads) in [(3, 2), (2, 3), (1, 2), (0, 2), (2, 0)] {
        let (q, k) = ([2, query_heads, 7, 4], [2, key_heads, 7, 4]);
        let text = format!(
            "q, k, v is q {q:?}, k {k:?}, v {k:?}, but the query heads are a multiple of the key heads; \
             check the head counts of the configuration"
        );
        assert_refused(attend(&q, &k, &k, F32), "q, k, v", &text);
    }
}

#[test]
fn types_that_do_not_fit() {
    let good = [2, 2, 7, 4];
    let mixed = attend(&good, &good, &good, [DType::F32, DType::F64, DType::F32]);
    assert_refused(mixed, "dtype", "dtype is F32, F64, F32, but q, k and v need the same type; convert them");
    let mixed = attend(&good, &good, &good, [DType::F32, DType::F32, DType::BF16]);
    assert_refused(mixed, "dtype", "dtype is F32, F32, BF16, but q, k and v need the same type; convert them");
    for dtype in [DType::I64, DType::U32, DType::U8] {
        let text = format!("dtype is {dtype:?}, but attention runs in f32, f64, bf16 and f16; convert q, k, v");
        assert_refused(attend(&good, &good, &good, [dtype; 3]), "dtype", &text);
    }
}

#[test]
fn a_layout_for_another_batch_or_group() {
    let context = |layout| CpContext::new(Arc::new(Local::new()), layout, Tokens::single_document(1, 12));
    assert_refused(
        context(SequenceLayout::contiguous(13, 1).unwrap()),
        "layout",
        "layout is for 13 tokens over 1 ranks, but the batch has 12 tokens per row and the group 1 ranks; \
         make the layout from both",
    );
    assert_refused(
        context(SequenceLayout::head_tail(12, 2).unwrap()),
        "layout",
        "layout is for 12 tokens over 2 ranks, but the batch has 12 tokens per row and the group 1 ranks; \
         make the layout from both",
    );
    let (layout, tokens) = (SequenceLayout::contiguous(13, 1).unwrap(), Tokens::single_document(1, 12));
    assert_refused(
        AttentionPlan::new(&layout, &tokens, &MaskRule::causal(), 0, Trim::Live),
        "layout",
        "layout is for 13 tokens, but the batch has 12 per row; make the layout for the batch",
    );
}

#[test]
fn layouts_that_cannot_be() {
    let text = |len: usize, ranks: usize| {
        let fix = "pass the row's length and the ranks";
        format!("layout is {len} tokens over {ranks} ranks, but both have to be at least 1; {fix}")
    };
    for (len, ranks) in [(0, 2), (5, 0), (0, 0)] {
        assert_refused(SequenceLayout::contiguous(len, ranks), "layout", &text(len, ranks));
        assert_refused(SequenceLayout::head_tail(len, ranks), "layout", &text(len, ranks));
    }
    let layers = [LayerWork { rule: MaskRule::causal(), weight: 1.0 }];
    for kind in LayoutKind::ALL {
        assert_refused(kind.layout(&Tokens::single_document(1, 5), 0, &layers), "layout", &text(5, 0));
    }
    let long = (1usize << 31) + 1;
    let text = format!("len is {long}, but a row has at most 2^31 tokens; split the row");
    assert_refused(SequenceLayout::contiguous(long, 4), "len", &text);
    let ranges = |len, ranges: &[&[std::ops::Range<usize>]]| {
        SequenceLayout::from_ranges(len, ranges.iter().map(|r| r.to_vec()).collect())
    };
    let fix = "; list every token once";
    let cover = "but they have to cover the row once";
    assert_refused(ranges(9, &[&[0..4], &[5..9]]), "ranges", &format!("ranges is a gap at 4..5, {cover}{fix}"));
    assert_refused(ranges(9, &[&[1..4], &[4..9]]), "ranges", &format!("ranges is a gap at 0..1, {cover}{fix}"));
    assert_refused(ranges(9, &[&[0..5], &[4..9]]), "ranges", &format!("ranges is an overlap at 4..5, {cover}{fix}"));
    assert_refused(ranges(9, &[&[0..4], &[4..8]]), "ranges", &format!("ranges is 8 tokens, but the row has 9{fix}"));
    assert_refused(
        ranges(9, &[]),
        "layout",
        "layout is 9 tokens over 0 ranks, but both have to be at least 1; pass the row's length and the ranks",
    );
}

#[test]
fn a_padded_length_beyond_the_kernels_positions() {
    let result = SequenceLayout::from_ranges(9, vec![vec![0..1 << 33]]);
    assert!(matches!(result, Err(Error::Argument { .. })), "positions are 32 bits wide: {result:?}");
}

#[test]
fn balance_without_layers_or_with_weights_that_weigh_nothing() {
    let tokens = Tokens::single_document(1, 12);
    let layout = SequenceLayout::contiguous(12, 2).unwrap();
    let fix = "pass one entry per kind of layer, with layers times heads times head size as its weight";
    let check = |weights: &[f64], text: &str| {
        let layers: Vec<_> = weights.iter().map(|&weight| LayerWork { rule: MaskRule::causal(), weight }).collect();
        let text = format!("layers is {text}; {fix}");
        assert_refused(SequenceLayout::balanced(&tokens, 2, &layers), "layers", &text);
        assert_refused(LayoutKind::Balanced.layout(&tokens, 2, &layers), "layers", &text);
        assert_refused(live_work(&layout, &tokens, &layers), "layers", &text);
    };
    check(&[], "empty, but live work is that of at least one layer");
    check(&[1.0, 0.0], "weight 0, but a weight is above 0");
    check(&[-2.0], "weight -2, but a weight is above 0");
    check(&[f64::NAN], "weight NaN, but a weight is above 0");
    check(&[f64::INFINITY], "weight inf, but a weight is above 0");
    let other = SequenceLayout::contiguous(13, 2).unwrap();
    let layers = [LayerWork { rule: MaskRule::causal(), weight: 1.0 }];
    assert_refused(
        live_work(&other, &tokens, &layers),
        "layout",
        "layout is for 13 tokens, but the batch has 12 per row; make the layout for the batch",
    );
}

#[test]
fn an_unknown_layout_name() {
    let name = "zigzag".parse::<LayoutKind>();
    assert_refused(
        name,
        "layout",
        "layout is \"zigzag\", but the layouts are contiguous, head-tail and balanced; \
         use head-tail unless ranks should own one piece",
    );
    for kind in LayoutKind::ALL {
        assert_eq!(kind.to_string().parse::<LayoutKind>().unwrap(), kind);
    }
}

#[test]
fn documents_and_groups_that_come_back() {
    let tokens = |documents: &[i64], groups: &[i64]| Tokens::new(vec![documents.to_vec()], vec![groups.to_vec()]);
    let fix = "but an id has to be one contiguous run; give every document and every image block an id of its own";
    let none = [-1; 5];
    assert_refused(
        tokens(&[0, 0, 1, 0, 0], &none),
        "documents",
        &format!("documents is id 0 again at row 0, token 3, after other ids, {fix}"),
    );
    assert_refused(
        tokens(&[0, 0, -1, -1, 0], &none),
        "documents",
        &format!("documents is id 0 again at row 0, token 4, after other ids, {fix}"),
    );
    assert_refused(
        tokens(&[0; 5], &[2, 2, -1, 2, -1]),
        "groups",
        &format!("groups is id 2 again at row 0, token 3, after other ids, {fix}"),
    );
    tokens(&[0, 0, -1, 1, -1], &none).expect("padding may come back");
    tokens(&[0, 0, 0, 1, 1], &[-1, 4, -1, 4, -1]).expect("a group id counts within its document");
}

#[test]
fn rows_that_disagree() {
    assert_refused(
        Tokens::new(vec![], vec![]),
        "documents",
        "documents is empty, but a batch has rows and tokens; pass one id per token",
    );
    assert_refused(
        Tokens::new(vec![vec![]], vec![vec![]]),
        "documents",
        "documents is empty, but a batch has rows and tokens; pass one id per token",
    );
    assert_refused(
        Tokens::new(vec![vec![0; 3]], vec![vec![0; 3]; 2]),
        "groups",
        "groups is 1 rows of documents and 2 of groups, but both need the same rows; \
         use -1 for tokens without a group",
    );
    assert_refused(
        Tokens::new(vec![vec![0; 3], vec![0; 4]], vec![vec![-1; 3], vec![-1; 4]]),
        "documents",
        "documents is row 1 with 4 documents and 4 groups, but every row needs 3 of each, as row 0 has; \
         pad rows with document -1, group -1",
    );
    assert_refused(
        Tokens::new(vec![vec![0; 3]], vec![vec![-1; 2]]),
        "documents",
        "documents is row 0 with 3 documents and 2 groups, but every row needs 3 of each, as row 0 has; \
         pad rows with document -1, group -1",
    );
}
