//! What plans leave out, exactly: hops, keys that travel, tiles that are visited.

mod common;

use candle_cp::{AttentionPlan, KEY_BLOCK, QUERY_BLOCK, SequenceLayout, Tokens, Trim};
use common::dense::allowed;
use common::draw;
use common::ring::{mask_rule, same_bits, tokens};
use common::{Case, Rule, Run, assert_outcome, block, dense, documents, layouts, ring};
use proptest::prelude::*;
use std::ops::Range;

fn plan(layout: &SequenceLayout, tokens: &Tokens, rule: Rule, rank: usize, trim: Trim) -> AttentionPlan {
    AttentionPlan::new(layout, tokens, &mask_rule(&rule), rank, trim).unwrap()
}

#[test]
fn hop_table() {
    let table = [
        (6, 4, 8, vec![1, 2]),
        (4, 4, 8, vec![1]),
        (5, 4, 8, vec![1]),
        (1, 4, 8, vec![]),
        (9, 4, 8, vec![1, 2]),
        (10, 4, 8, vec![1, 2, 3]),
        (100, 4, 8, vec![1, 2, 3, 4, 5, 6, 7]),
    ];
    for (window, local, ranks, expected) in table {
        let len = local * ranks;
        let layout = SequenceLayout::contiguous(len, ranks).unwrap();
        // All group ids -1: what a text-only batch of a vision model carries must not cost a hop.
        let text = Tokens::new(vec![vec![0; len]], vec![vec![-1; len]]).unwrap();
        for rule in [Rule::sliding(window), Rule::sliding(window).with_groups()] {
            for rank in 0..ranks {
                let plan = plan(&layout, &text, rule, rank, Trim::Live);
                assert_eq!(plan.distances(), expected, "window {window}, rank {rank}, {rule:?}");
                let hops = plan.hops().iter().filter(|hop| hop.send.is_some() || hop.receive.is_some());
                assert!(hops.map(|hop| hop.distance).all(|d| expected.contains(&d)));
            }
        }
        let all: Vec<usize> = (1..ranks).collect();
        let untrimmed = plan(&layout, &text, Rule::sliding(window), 0, Trim::Nothing);
        assert_eq!(untrimmed.distances(), all);
    }
}

#[test]
fn documents_trim_hops_too() {
    let layout = SequenceLayout::contiguous(32, 8).unwrap();
    let hops = |lengths: &[usize]| {
        let tokens = Tokens::new(vec![documents(lengths)], vec![vec![-1; 32]]).unwrap();
        plan(&layout, &tokens, Rule::CAUSAL, 0, Trim::Live).distances().to_vec()
    };
    assert_eq!(hops(&[4; 8]), [0; 0]);
    assert_eq!(hops(&[8; 4]), [1]);
    assert_eq!(hops(&[10, 12, 10]), [1, 2, 3]);
    assert_eq!(hops(&[10, 10, 12]), [1, 2]);
    assert_eq!(hops(&[32]), [1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn what_one_rank_sends_is_what_the_other_expects() {
    let case = long_case();
    for (name, layout) in layouts(case.len(), 4) {
        let plans: Vec<_> = (0..4).map(|r| plan(&layout, &tokens(&case), case.rule, r, Trim::Live)).collect();
        for (rank, sender) in plans.iter().enumerate() {
            for hop in sender.hops() {
                let expected = |peer: usize| plans[peer].hops().iter().find(|h| h.distance == hop.distance).unwrap();
                if let Some((to, keys)) = &hop.send {
                    assert_eq!(*to, (rank + hop.distance) % 4, "{name}");
                    let (from, edge) = expected(*to).receive.as_ref().unwrap();
                    assert_eq!((*from, &edge.keys), (rank, keys), "{name}");
                }
                if let Some((from, edge)) = &hop.receive {
                    assert_eq!(expected(*from).send, Some((rank, edge.keys.clone())), "{name}");
                }
            }
        }
    }
}

/// Two rows, 600 tokens: several tiles, documents, blocks, padding inside and at the end.
fn long_case() -> Case {
    let mut first = documents(&[130, 300, 170]);
    first[560..].fill(-1);
    let mut second = documents(&[600]);
    second[400..420].fill(-1);
    second[420..].fill(7);
    let groups = vec![block(600, &[100..140, 180..420]), block(600, &[0..3, 500..590])];
    let rule = Rule::sliding(150).with_groups();
    Case { documents: vec![first, second], groups, head_dim: 10, ..Case::plain(600, rule) }
}

/// One key head and one row, so that a backward pass has fewer heads than threads and cuts its tiles into parts.
fn one_head_case() -> Case {
    let case = Case::row(documents(&[400, 300]), block(700, &[250..300]), Rule::sliding(90).with_groups());
    Case { key_heads: 1, group: 2, ..case }
}

#[test]
fn trimmed_equals_untrimmed_bit_for_bit() {
    for case in [long_case(), one_head_case()] {
        let data = case.data();
        for ranks in [1, 2, 8] {
            for (name, layout) in layouts(case.len(), ranks) {
                for dtype in [candle_core::DType::F64, candle_core::DType::F32] {
                    let of = |trim| ring(&case, &data, &layout, Run { dtype, trim, ..Run::default() });
                    let (live, nothing) = (of(Trim::Live), of(Trim::Nothing));
                    for ((part, a), (_, b)) in live.parts().into_iter().zip(nothing.parts()) {
                        assert!(same_bits(a, b), "{part} differs for {dtype:?}, {name} over {ranks}");
                    }
                }
            }
        }
        let layout = SequenceLayout::head_tail(case.len(), 4).unwrap();
        let untrimmed = ring(&case, &data, &layout, Run { trim: Trim::Nothing, ..Run::default() });
        assert_outcome("untrimmed", &untrimmed, &dense(&case, &data));
    }
}

#[test]
fn sliding_layers_send_only_the_window() {
    let (len, window) = (8192, 1024);
    let tokens = Tokens::single_document(1, len);
    let edges = |layout: &SequenceLayout, rank: usize| -> Vec<usize> {
        let plan = plan(layout, &tokens, Rule::sliding(window), rank, Trim::Live);
        plan.hops().iter().filter_map(|hop| hop.receive.as_ref()).map(|(_, edge)| edge.key_count()).collect()
    };
    for ranks in [2, 4, 8] {
        // A neighbour's queries reach back 1023 keys; the grid rounds that up.
        let contiguous = SequenceLayout::contiguous(len, ranks).unwrap();
        assert_eq!(edges(&contiguous, 0), [0; 0]);
        assert!((1..ranks).all(|rank| edges(&contiguous, rank) == [1024]));
        let head_tail = SequenceLayout::head_tail(len, ranks).unwrap();
        let all: Vec<_> = (0..ranks).flat_map(|rank| edges(&head_tail, rank)).collect();
        assert!(!all.is_empty() && all.iter().all(|&keys| keys <= 1152), "{ranks} ranks: {all:?}");
    }
    let contiguous = SequenceLayout::contiguous(len, 8).unwrap();
    assert_eq!(plan(&contiguous, &tokens, Rule::sliding(window), 3, Trim::Live).distances(), [1]);
}

#[test]
fn a_sliding_layer_of_long_slices_sends_its_window_to_the_next_rank_only() {
    let (local, ranks, window) = (8192, 4, 1024);
    let tokens = Tokens::single_document(1, local * ranks);
    let layout = SequenceLayout::contiguous(local * ranks, ranks).unwrap();
    for rule in [Rule::sliding(window), Rule::sliding(window).with_groups()] {
        for rank in 0..ranks {
            let plan = plan(&layout, &tokens, rule, rank, Trim::Live);
            let sends: Vec<_> = plan.hops().iter().filter_map(|hop| hop.send.clone()).collect();
            // At most the window and a tile; here the window ends on the tile grid.
            let expected = vec![(rank + 1, vec![local - window..local])];
            assert_eq!(sends, if rank + 1 < ranks { expected } else { vec![] }, "rank {rank}");
            assert!(plan.keys_received() <= window + KEY_BLOCK);
        }
    }
}

fn pieces(range: &Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let range = range.clone();
    range.clone().step_by(size).map(move |start| start..(start + size).min(range.end))
}

/// Tiles on the grid by looking at every pair: (full, partial), and allowed pairs.
fn count_tiles(case: &Case, layout: &SequenceLayout, rank: usize) -> (usize, usize, usize) {
    let (mut full, mut partial, mut pairs) = (0, 0, 0);
    for (ids, groups) in case.documents.iter().zip(&case.groups) {
        let sees = |q: usize, k: usize| q < ids.len() && k < ids.len() && allowed(&case.rule, ids, groups, q, k);
        for queries in layout.ranges(rank).iter().flat_map(|r| pieces(r, QUERY_BLOCK)) {
            for keys in (0..layout.ranks()).flat_map(|r| layout.ranges(r)).flat_map(|r| pieces(r, KEY_BLOCK)) {
                let seen = queries.clone().map(|q| keys.clone().filter(|&k| sees(q, k)).count()).sum::<usize>();
                match seen {
                    0 => {}
                    n if n == queries.len() * keys.len() => full += 1,
                    _ => partial += 1,
                }
                pairs += seen;
            }
        }
    }
    (full, partial, pairs)
}

/// Keys of `key_rank` in tiles of which `query_rank` sees a key in some row, by looking at every pair.
fn count_keys(case: &Case, layout: &SequenceLayout, query_rank: usize, key_rank: usize) -> usize {
    let queries = layout.global_indices(query_rank);
    let seen = |k: usize| {
        case.documents.iter().zip(&case.groups).any(|(ids, groups)| {
            let inside = |q: usize| q < ids.len() && k < ids.len();
            queries.iter().any(|&q| inside(q) && allowed(&case.rule, ids, groups, q, k))
        })
    };
    let tiles = layout.ranges(key_rank).iter().flat_map(|range| pieces(range, KEY_BLOCK));
    tiles.filter(|tile| tile.clone().any(seen)).map(|tile| tile.len()).sum()
}

fn check_tiles(case: &Case, layout: &SequenceLayout) -> std::result::Result<(), TestCaseError> {
    for rank in 0..layout.ranks() {
        let plan = plan(layout, &tokens(case), case.rule, rank, Trim::Live);
        let (full, partial, pairs) = count_tiles(case, layout, rank);
        prop_assert_eq!((plan.tiles().full, plan.tiles().partial), (full, partial), "rank {}", rank);
        prop_assert_eq!(plan.tiles().live(), full + partial);
        prop_assert_eq!(plan.live_pairs()[rank], pairs, "pairs of rank {}", rank);
        let others = (0..layout.ranks()).filter(|&other| other != rank);
        let keys: usize = others.map(|other| count_keys(case, layout, rank, other)).sum();
        prop_assert_eq!(plan.keys_received(), keys, "keys that rank {} receives", rank);
    }
    Ok(())
}

proptest! {
    #![proptest_config(draw::config(60))]

    /// The queries of a block see one interval, up to rows of padding between documents; those are shorter than a tile
    /// of keys and never end one, so that the intervals find exactly the tiles that have an allowed pair.
    #[test]
    fn what_is_visited_and_sent_are_the_tiles_with_an_allowed_pair(case in draw::long_case(), layout in draw::layout(300)) {
        check_tiles(&case, &layout.layout(case.len()))?;
    }
}

#[test]
fn tiles_of_a_long_causal_row() {
    let case = Case::plain(1024, Rule::CAUSAL);
    let whole = SequenceLayout::contiguous(1024, 1).unwrap();
    let count = plan(&whole, &tokens(&case), case.rule, 0, Trim::Live).tiles();
    // A block of queries s..e sees the keys up to e - 1, and all of it those up to s.
    let blocks: Vec<_> = pieces(&(0..1024), QUERY_BLOCK).collect();
    assert_eq!(count.live(), blocks.iter().map(|b| (b.end - 1) / KEY_BLOCK + 1).sum::<usize>());
    assert_eq!(count.full, blocks.iter().map(|b| (b.start + 1) / KEY_BLOCK).sum::<usize>());
    let untrimmed = plan(&whole, &tokens(&case), case.rule, 0, Trim::Nothing).tiles();
    assert_eq!(untrimmed.live(), blocks.len() * 1024usize.div_ceil(KEY_BLOCK));
    // Head-tail gives every rank the same work.
    let layout = SequenceLayout::head_tail(1024, 4).unwrap();
    let balanced = plan(&layout, &tokens(&case), case.rule, 0, Trim::Live);
    let pairs = balanced.live_pairs();
    assert!(pairs.iter().all(|&n| n == pairs[0]) && pairs.iter().sum::<usize>() == 1024 * 1025 / 2);
}
