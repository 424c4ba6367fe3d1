//! The gated delta rule under context parallelism against the plain recurrence.

mod reference;

use candle_cp::DeltaHeads;
use reference::{Case, assert_exact, heads, layouts, row};

fn over_ranks(case: &Case, ranks: impl IntoIterator<Item = usize>) {
    for ranks in ranks {
        for layout in layouts(case.len(), ranks) {
            assert_exact(case, &layout);
        }
    }
}

#[test]
fn documents_of_odd_lengths() {
    over_ranks(&Case::new(vec![row(&[37, 51, 40])]), 1..=8);
}

#[test]
fn one_document_passes_through_every_piece() {
    over_ranks(&Case::new(vec![row(&[300])]), [1, 2, 3, 4, 5, 8]);
}

#[test]
fn documents_of_one_token() {
    let lengths: Vec<usize> = (0..60).map(|i| if i % 13 == 7 { 9 } else { 1 }).collect();
    over_ranks(&Case::new(vec![row(&lengths)]), [1, 3, 8]);
}

#[test]
fn borders_at_the_edges_of_slices() {
    let case = Case::new(vec![row(&[16, 32, 16, 48, 16])]);
    over_ranks(&case, [1, 2, 4, 8]);
}

#[test]
fn ranks_with_only_padding() {
    let mut documents = row(&[30, 21]);
    documents.extend([-1; 45]);
    over_ranks(&Case::new(vec![documents]), [1, 3, 4, 8]);
    // Padding in between, too, and a batch of padding.
    let mut documents = row(&[30, 21]);
    documents.extend([-1; 45]);
    documents.extend([9; 30]);
    over_ranks(&Case::new(vec![documents]), [1, 4, 7]);
    over_ranks(&Case::new(vec![vec![-1; 20]]), [1, 3]);
}

#[test]
fn rows_shorter_than_the_ranks() {
    for len in [1, 2, 5, 9] {
        over_ranks(&Case::new(vec![row(&[len])]), [1, 2, 8]);
    }
}

#[test]
fn rows_of_a_batch_have_their_own_documents() {
    let mut padded = row(&[70, 3, 17]);
    padded.extend([-1; 38]);
    over_ranks(&Case::new(vec![row(&[37, 51, 40]), row(&[128]), padded]), [1, 2, 3, 8]);
}

#[test]
fn strong_decay_and_none() {
    for decays in [vec![-50.0], vec![0.0], vec![0.0, -50.0, -1e-3, -700.0], vec![-1e-6, -30.0]] {
        over_ranks(&Case { decays, ..Case::new(vec![row(&[90, 81])]) }, [1, 3]);
    }
}

#[test]
fn more_chunks_than_a_block() {
    let case = Case { heads: heads(3, 4), ..Case::new(vec![row(&[5, 2300])]) };
    over_ranks(&case, [1, 2]);
}

#[test]
fn heads_of_many_sizes() {
    for (key_dim, value_dim) in [(1, 1), (16, 16), (64, 128), (128, 64), (80, 33), (130, 144)] {
        for (key_heads, value_heads) in [(1, 1), (1, 3), (2, 2)] {
            let heads = DeltaHeads { key_heads, value_heads, key_dim, value_dim };
            over_ranks(&Case { heads, ..Case::new(vec![row(&[20, 75])]) }, [1, 3]);
        }
    }
}
