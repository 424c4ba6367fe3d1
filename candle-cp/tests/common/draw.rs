//! Random cases and layouts for proptest, built from plain numbers so that they shrink to something readable.

use super::case::{Case, Rule};
use super::ring::{Strides, named_layout};
use candle_cp::{LayoutKind, SequenceLayout};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};

/// Fixed seed, nothing written to disk.
pub fn config(cases: u32) -> Config {
    Config {
        cases,
        rng_seed: RngSeed::Fixed(20_250_714),
        failure_persistence: None,
        max_shrink_time: 20_000,
        ..Config::default()
    }
}

/// A layout before the length is known.
#[derive(Debug, Clone)]
pub struct LayoutDraw {
    pub ranks: usize,
    kind: usize,
    /// (length, rank, whether it goes to the front) of the pieces, dealt out over and over.
    pieces: Vec<(usize, usize, bool)>,
    pad: usize,
}

impl LayoutDraw {
    pub fn layout(&self, len: usize) -> SequenceLayout {
        if let Some(kind) = LayoutKind::ALL.get(self.kind) {
            return named_layout(*kind, len, self.ranks);
        }
        let total = len + self.pad;
        let mut ranges = vec![Vec::new(); self.ranks];
        let mut next = 0;
        for &(length, rank, front) in self.pieces.iter().cycle() {
            if next == total {
                break;
            }
            let range = next..(next + length).min(total);
            next = range.end;
            let of_rank = &mut ranges[rank % self.ranks];
            of_rank.insert(if front { 0 } else { of_rank.len() }, range);
        }
        SequenceLayout::from_ranges(len, ranges).expect("a partition")
    }
}

prop_compose! {
    pub fn layout(max_piece: usize)(
        ranks in prop::sample::select(vec![1, 2, 3, 4, 8]),
        kind in 0usize..6,
        pieces in prop::collection::vec((1..=max_piece, 0usize..24, any::<bool>()), 1..12),
        pad in 0usize..6,
    ) -> LayoutDraw {
        LayoutDraw { ranks, kind, pieces, pad }
    }
}

/// Documents and padding of one row, dealt out over and over until the row is full.
#[derive(Debug, Clone)]
struct RowDraw {
    /// (length, whether it is padding).
    segments: Vec<(usize, bool)>,
    /// (tokens without a group, tokens of a group).
    blocks: Vec<(usize, usize)>,
    pad_tail: usize,
}

impl RowDraw {
    fn documents(&self, len: usize) -> Vec<i64> {
        let mut ids = Vec::new();
        for (number, &(length, padding)) in self.segments.iter().cycle().enumerate() {
            if ids.len() >= len {
                break;
            }
            // Neither sorted nor dense, and never twice: 7 and 10007 have no common factor.
            let id = if padding && self.segments.len() > 1 { -1 } else { (number as i64 * 7 + 3) % 10_007 };
            ids.extend(std::iter::repeat_n(id, length));
        }
        ids.truncate(len);
        let tail = len.saturating_sub(self.pad_tail);
        ids[tail..].fill(-1);
        ids
    }

    /// Blocks may cross document borders: an id counts within its document.
    fn groups(&self, documents: &[i64]) -> Vec<i64> {
        let mut ids = Vec::new();
        for (number, &(gap, length)) in self.blocks.iter().cycle().enumerate() {
            if ids.len() >= documents.len() {
                break;
            }
            ids.extend(std::iter::repeat_n(-1, gap));
            ids.extend(std::iter::repeat_n(number as i64, length));
        }
        ids.truncate(documents.len());
        ids.iter().zip(documents).map(|(&g, &d)| if d < 0 { -1 } else { g }).collect()
    }
}

prop_compose! {
    fn row(max_segment: usize, max_block: usize)(
        segments in prop::collection::vec((1..=max_segment, prop::bool::weighted(0.2)), 1..6),
        blocks in prop::collection::vec((0..=max_block, 1..=max_block), 1..5),
        pad_tail in prop_oneof![2 => Just(0), 1 => 0usize..20],
    ) -> RowDraw {
        RowDraw { segments, blocks, pad_tail }
    }
}

fn rule(windows: Vec<usize>) -> impl Strategy<Value = Rule> {
    let window = prop_oneof![1 => Just(None), 3 => prop::sample::select(windows).prop_map(Some)];
    let causal = (window, any::<bool>(), 0..4).prop_map(|(window, both_sides, groups)| Rule {
        causal: true,
        window,
        both_sides,
        groups: groups > 1,
        whole_groups: groups == 3,
    });
    prop_oneof![5 => causal, 1 => Just(Rule::BIDIRECTIONAL)]
}

pub fn strides() -> impl Strategy<Value = Strides> {
    prop::sample::select(vec![
        Strides::Contiguous,
        Strides::TokenMajor,
        Strides::DimensionMajor,
        Strides::HeadsAfterTokens,
    ])
}

prop_compose! {
    pub fn case_of(lengths: std::ops::RangeInclusive<usize>, head_dims: Vec<usize>, windows: Vec<usize>, segment: usize)(
        len in lengths,
        rows in prop::collection::vec(row(segment, segment / 2), 1..=3),
        rule in rule(windows),
        key_heads in 1usize..=2,
        group in prop::sample::select(vec![1, 2, 3, 7]),
        head_dim in prop::sample::select(head_dims),
        seed in 0..u64::MAX,
    ) -> Case {
        let documents: Vec<_> = rows.iter().map(|row| row.documents(len)).collect();
        let groups = rows.iter().zip(&documents).map(|(row, documents)| row.groups(documents)).collect();
        Case { documents, groups, rule, key_heads, group, head_dim, scale: 0.7, spread: 1.0, seed }
    }
}

/// Rows of up to 70 tokens: many documents, blocks and borders.
pub fn short_case() -> impl Strategy<Value = Case> {
    case_of(1..=70, vec![1, 2, 6, 10, 16], vec![0, 1, 2, 5, 17, 64, 1000, usize::MAX], 30)
}

/// Large head sizes.
pub fn wide_case() -> impl Strategy<Value = Case> {
    case_of(1..=60, vec![33, 80, 192], vec![1, 9, 300], 40)
}

/// Rows of several key tiles, with documents long enough for full tiles.
pub fn long_case() -> impl Strategy<Value = Case> {
    case_of(257..=700, vec![2, 6, 10], vec![3, 100, 128, 129, 300, 5000], 600)
}
