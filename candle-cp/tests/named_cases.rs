//! Cases that broke other systems, by name, forward and backward against the dense reference at every layout.

mod common;

use candle_cp::{CpContext, LayoutKind, MaskRule, SequenceLayout, Tokens, comm::threads};
use common::ring::{mask_rule, options, tokens};
use common::{Case, Rule, Run, assert_every_layout, assert_outcome, block, dense, documents, ring};
use std::ops::Range;

const RANKS: [usize; 5] = [1, 2, 3, 4, 8];
const SLIDING: Rule = Rule::sliding(5).with_groups();

fn one_document(len: usize, blocks: &[Range<usize>], rule: Rule) -> Case {
    Case::row(vec![0; len], block(len, blocks), rule)
}

/// How many ranks hold a part of `tokens` in a contiguous layout of `len` tokens over 4 ranks.
fn owners(len: usize, tokens: &Range<usize>) -> usize {
    let layout = SequenceLayout::contiguous(len, 4).unwrap();
    (0..4).filter(|&r| layout.ranges(r).iter().any(|own| own.start < tokens.end && tokens.start < own.end)).count()
}

fn distances(case: &Case, kind: LayoutKind, ranks: usize) -> Vec<usize> {
    let all = threads::run(ranks, &options(), |comm| {
        let context = CpContext::new(comm, kind.layout(&tokens(case), ranks, &[])?, tokens(case))?;
        Ok::<_, candle_cp::Error>(context.plan(&mask_rule(&case.rule))?.distances().to_vec())
    });
    let mut all = all.unwrap();
    assert!(all.windows(2).all(|w| w[0] == w[1]), "ranks disagree about the ring: {all:?}");
    all.swap_remove(0)
}

#[test]
fn image_block_crosses_one_rank_border() {
    assert_eq!(owners(16, &(6..10)), 2);
    assert_every_layout(&one_document(16, &[6..10], SLIDING), &RANKS);
}

#[test]
fn image_block_crosses_two_rank_borders() {
    assert_eq!(owners(16, &(6..14)), 3);
    assert_every_layout(&one_document(16, &[6..14], SLIDING), &RANKS);
}

#[test]
fn image_block_is_longer_than_the_window() {
    let case = one_document(20, &[4..15], Rule::sliding(3).with_groups());
    assert_every_layout(&case, &RANKS);
    let bounded = Case { rule: case.rule.with_both_sides(), ..case.clone() };
    assert_every_layout(&bounded, &RANKS);
    let data = case.data();
    let difference = common::max_difference(&dense(&case, &data).out, &dense(&bounded, &data).out);
    assert!(difference > 1e-3, "the two rules of a window differ in such a block");
}

#[test]
fn image_block_is_longer_than_a_slice() {
    assert_eq!(owners(16, &(3..13)), 4);
    assert_every_layout(&one_document(16, &[3..13], SLIDING), &RANKS);
}

#[test]
fn image_block_touches_the_pad_tail() {
    // Padding of the layout: 13 tokens become 16.
    assert_every_layout(&one_document(13, &[9..13], SLIDING), &RANKS);
    // Padding of the row itself.
    let mut ids = vec![0; 16];
    ids[12..].fill(-1);
    assert_every_layout(&Case::row(ids, block(16, &[8..12]), SLIDING), &RANKS);
}

#[test]
fn group_id_on_padding_is_ignored() {
    let mut ids = vec![0; 16];
    ids[12..].fill(-1);
    assert_every_layout(&Case::row(ids, block(16, &[8..16]), SLIDING), &RANKS);
}

#[test]
fn two_image_blocks_one_token_apart_at_a_border() {
    for blocks in [[5..8, 9..12], [4..7, 8..11]] {
        assert_every_layout(&one_document(16, &blocks, SLIDING), &RANKS);
    }
}

#[test]
fn two_adjacent_image_blocks_do_not_see_each_other() {
    assert_every_layout(&one_document(16, &[4..8, 8..12], SLIDING), &RANKS);
}

#[test]
fn image_block_crosses_a_document_border() {
    // The same group id on both sides: the document decides.
    assert_every_layout(&Case::row(documents(&[7, 9]), block(16, &[4..11]), SLIDING), &RANKS);
}

#[test]
fn key_is_needed_from_the_next_rank() {
    let case = one_document(16, &[6..10], Rule::sliding(2).with_groups());
    assert_eq!(distances(&case, LayoutKind::Contiguous, 4), [1, 3], "distance 3 of 4 is the next rank");
    let without = Case { rule: Rule::sliding(2), ..case.clone() };
    assert_eq!(distances(&without, LayoutKind::Contiguous, 4), [1]);
    assert_every_layout(&case, &RANKS);
}

#[test]
fn document_border_at_before_and_after_a_slice_border() {
    for lengths in [[8, 8], [7, 9], [9, 7]] {
        for rule in [Rule::CAUSAL, Rule::sliding(3), Rule::BIDIRECTIONAL] {
            assert_every_layout(&Case::row(documents(&lengths), vec![-1; 16], rule), &RANKS);
        }
    }
}

#[test]
fn document_lies_over_three_slices() {
    assert_eq!(owners(16, &(5..14)), 3);
    for rule in [Rule::CAUSAL, Rule::BIDIRECTIONAL] {
        assert_every_layout(&Case::row(documents(&[5, 9, 2]), vec![-1; 16], rule), &RANKS);
    }
}

#[test]
fn single_token_documents() {
    for rule in [Rule::CAUSAL, Rule::sliding(4), Rule::BIDIRECTIONAL] {
        assert_every_layout(&Case::row(documents(&[1; 11]), vec![-1; 11], rule), &RANKS);
    }
    let case = Case::row(documents(&[1; 11]), vec![-1; 11], Rule::CAUSAL);
    let data = case.data();
    let result = ring(&case, &data, &SequenceLayout::contiguous(11, 3).unwrap(), Run::default());
    assert!(result.dq.iter().chain(&result.dk).all(|&x| x.abs() < 1e-15), "a token alone has no choice");
}

#[test]
fn fewer_tokens_than_ranks() {
    for len in [1, 2, 3, 7] {
        assert_every_layout(&Case::plain(len, Rule::CAUSAL), &[2, 3, 4, 8]);
    }
}

#[test]
fn a_rank_has_only_padding() {
    // 5 tokens over 4 ranks: 2 each, so that the last rank has none.
    let layout = SequenceLayout::contiguous(5, 4).unwrap();
    assert!(layout.ranges(3).iter().all(|r| r.start >= 5));
    assert_every_layout(&Case::plain(5, Rule::CAUSAL), &RANKS);
    // Padding of the row itself: half of the ranks.
    let mut ids = vec![0; 16];
    ids[8..].fill(-1);
    assert_every_layout(&Case::row(ids, vec![-1; 16], Rule::CAUSAL), &RANKS);
}

#[test]
fn a_rank_owns_nothing() {
    let layout = SequenceLayout::from_ranges(9, vec![vec![4..9], vec![], vec![0..4]]).unwrap();
    let case = Case::plain(9, Rule::CAUSAL);
    let data = case.data();
    assert_outcome("empty rank", &ring(&case, &data, &layout, Run::default()), &dense(&case, &data));
}

#[test]
fn more_ranks_than_real_tokens() {
    let mut ids = vec![-1; 12];
    ids[4..7].fill(0);
    assert_every_layout(&Case::row(ids, vec![-1; 12], Rule::CAUSAL), &[4, 8]);
}

#[test]
fn ranks_take_part_in_different_steps_of_the_ring() {
    // Rank 0 owns nothing and the tokens of the others alternate, so that every rank skips other distances.
    for ranks in [4, 5, 7] {
        for stride in 1..ranks {
            let mut ranges = vec![Vec::new(); ranks];
            (0..3 * ranks).for_each(|i| ranges[1 + i * stride % (ranks - 1)].push(i..i + 1));
            let layout = SequenceLayout::from_ranges(3 * ranks, ranges).unwrap();
            for rule in [Rule::CAUSAL, Rule::sliding(2), Rule::sliding(4)] {
                let case = Case::plain(3 * ranks, rule);
                let data = case.data();
                let result = ring(&case, &data, &layout, Run::default());
                assert_outcome("ragged ring", &result, &dense(&case, &data));
            }
        }
    }
}

#[test]
fn scores_up_to_300_on_both_sides() {
    let case = Case { spread: 11.0, scale: 1.0, ..Case::plain(40, Rule::CAUSAL) };
    let data = case.data();
    let largest = |sign: f64| {
        let scores = data.q.chunks(6).flat_map(|q| data.k.chunks(6).map(move |k| (q, k)));
        scores.map(|(q, k)| sign * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>()).fold(0.0, f64::max)
    };
    assert!(largest(1.0) > 300.0 && largest(-1.0) > 300.0, "{} and {}", largest(1.0), largest(-1.0));
    assert_every_layout(&case, &RANKS);
}

#[test]
fn rows_without_a_key_give_zeros() {
    let mut row = vec![-1; 14];
    row[3..6].fill(2);
    let case = Case {
        documents: vec![vec![-1; 14], row, vec![0; 14]],
        groups: vec![vec![-1; 14]; 3],
        ..Case::plain(14, Rule::CAUSAL)
    };
    assert_every_layout(&case, &RANKS);
    let data = case.data();
    let result = ring(&case, &data, &SequenceLayout::contiguous(14, 3).unwrap(), Run::default());
    for (name, values) in result.parts() {
        assert!(values.iter().all(|x| !x.is_nan()), "NaN in {name}");
        let (heads, per_row) = (case.batch(), values.len() / case.batch());
        assert_eq!(heads, 3);
        let empty = if name == "lse" { f64::NEG_INFINITY } else { 0.0 };
        assert!(values[..per_row].iter().all(|&x| x == empty), "{name} of a row of padding");
    }
}

#[test]
fn a_nan_key_reaches_only_the_queries_that_may_see_it() {
    let case = Case::row(documents(&[5, 6]), vec![-1; 11], Rule::CAUSAL);
    let mut data = case.data();
    let clean = dense(&case, &data);
    // Key 7 of both key heads, in the second document.
    for head in 0..2 {
        data.k[(head * 11 + 7) * case.head_dim] = f64::NAN;
    }
    let layout = SequenceLayout::head_tail(11, 2).unwrap();
    let all = threads::run(2, &options(), |comm| {
        let context = CpContext::new(comm, layout.clone(), tokens(&case))?;
        common::ring::one_rank(&case, &data, &context, Run::default())
    });
    let out = &all.unwrap()[0].out;
    for (i, (a, b)) in out.chunks(case.head_dim).zip(clean.out.chunks(case.head_dim)).enumerate() {
        match i % 11 {
            0..7 => common::assert_exact("out", a, b),
            query => assert!(a.iter().all(|x| x.is_nan()), "query {query} sees the NaN"),
        }
    }
}

#[test]
fn a_nan_query_has_a_nan_result() {
    let case = Case::row(documents(&[5, 6]), vec![-1; 11], Rule::CAUSAL);
    let mut data = case.data();
    // Query 7 of the first head.
    data.q[7 * case.head_dim] = f64::NAN;
    let layout = SequenceLayout::head_tail(11, 2).unwrap();
    let all = threads::run(2, &options(), |comm| {
        let context = CpContext::new(comm, layout.clone(), tokens(&case))?;
        common::ring::one_rank(&case, &data, &context, Run::default())
    });
    let out = &all.unwrap()[0].out;
    for (i, row) in out.chunks(case.head_dim).enumerate() {
        assert_eq!(row.iter().all(|x| x.is_nan()), i == 7, "row {i}");
    }
}

#[test]
fn every_head_size_and_group_size() {
    for head_dim in [1, 6, 10, 80, 192] {
        for group in [1, 2, 3, 7] {
            let case = Case { head_dim, group, scale: 0.3, ..one_document(13, &[4..9], SLIDING) };
            let data = case.data();
            let result = ring(&case, &data, &SequenceLayout::head_tail(13, 3).unwrap(), Run::default());
            assert_outcome(&format!("head size {head_dim}, group {group}"), &result, &dense(&case, &data));
        }
    }
}

#[test]
fn every_window_up_to_longer_than_the_row() {
    for window in [0, 1, 2, 11, 12, 13, usize::MAX] {
        for rule in [
            Rule::sliding(window),
            Rule::sliding(window).with_groups(),
            Rule::sliding(window).with_whole_groups(),
            Rule::sliding(window).with_both_sides().with_groups(),
        ] {
            assert_every_layout(&one_document(12, &[3..8], rule), &[3]);
        }
    }
}

#[test]
fn the_rule_for_one_pair_is_the_reference_rule() {
    let (ids, groups) = (documents(&[6, 9, 5]), block(20, &[2..5, 4..10, 13..18]));
    let all = Tokens::new(vec![ids.clone()], vec![groups.clone()]).unwrap();
    for window in [None, Some(0), Some(1), Some(3), Some(100), Some(usize::MAX)] {
        for (both_sides, grouped) in (0..6).map(|i| (i % 2 == 1, i / 2)) {
            let (causal, whole_groups) = (true, grouped == 2);
            let rule = Rule { causal, window, both_sides, groups: grouped > 0, whole_groups };
            let mask: MaskRule = mask_rule(&rule);
            for (q, k) in (0..20).flat_map(|q| (0..20).map(move |k| (q, k))) {
                let expected = common::dense::allowed(&rule, &ids, &groups, q, k);
                assert_eq!(mask.allowed(all.at(0, q), all.at(0, k)), expected, "{rule:?}: query {q}, key {k}");
            }
        }
    }
}
