//! Random documents, padding, layouts, heads and decays.

use crate::reference::{Case, assert_exact};
use candle_cp::{DeltaHeads, SequenceLayout};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};

/// (length, whether it is padding), dealt out over and over until the row is full.
fn documents(segments: &[(usize, bool)], len: usize) -> Vec<i64> {
    let mut ids = Vec::new();
    for (number, &(length, padding)) in segments.iter().cycle().enumerate() {
        if ids.len() >= len {
            break;
        }
        ids.extend(std::iter::repeat_n(if padding { -1 } else { number as i64 }, length));
    }
    ids.truncate(len);
    ids
}

/// Pieces (length, rank, whether it goes to the front), dealt out over and over; the last rank may get nothing.
fn layout(kind: usize, len: usize, ranks: usize, pieces: &[(usize, usize, bool)]) -> SequenceLayout {
    match kind {
        0 => return SequenceLayout::contiguous(len, ranks).unwrap(),
        1 => return SequenceLayout::head_tail(len, ranks).unwrap(),
        _ => {}
    }
    let mut ranges = vec![Vec::new(); ranks];
    let mut next = 0;
    for &(length, rank, front) in pieces.iter().cycle() {
        if next >= len {
            break;
        }
        let of_rank: &mut Vec<_> = &mut ranges[rank % ranks];
        of_rank.insert(if front { 0 } else { of_rank.len() }, next..next + length);
        next += length;
    }
    SequenceLayout::from_ranges(len, ranges).unwrap()
}

proptest! {
    #![proptest_config(Config {
        cases: 150,
        rng_seed: RngSeed::Fixed(20_261_130),
        failure_persistence: None,
        ..Config::default()
    })]

    #[test]
    fn equals_the_recurrence(
        len in 1usize..200,
        rows in prop::collection::vec(prop::collection::vec((1usize..90, prop::bool::weighted(0.15)), 1..6), 1..=3),
        (kind, ranks) in (0usize..4, 1usize..=8),
        pieces in prop::collection::vec((1usize..60, 0usize..24, any::<bool>()), 1..9),
        (key_heads, group, key_dim, value_dim) in (1usize..=2, 1usize..=3, 1usize..=9, 1usize..=9),
        decays in prop::collection::vec(prop::sample::select(vec![0.0, -1e-3, -0.1, -1.0, -8.0, -50.0]), 1..4),
        seed in any::<u64>(),
    ) {
        let documents = rows.iter().map(|row| documents(row, len)).collect();
        let heads = DeltaHeads { key_heads, value_heads: key_heads * group, key_dim, value_dim };
        let case = Case { documents, heads, decays, seed };
        assert_exact(&case, &layout(kind, len, ranks, &pieces));
    }
}
