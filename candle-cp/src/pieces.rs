//! The slices of all ranks as pieces in sequence order: what a recurrence runs along.

use crate::layout::SequenceLayout;
use crate::tokens::Tokens;
use std::ops::Range;

/// Tokens that lie next to each other both in the row and in the slice of the rank that owns them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The rank.
    pub owner: usize,
    /// Places in the owner's slice.
    pub local: Range<usize>,
    /// Indices in the padded row; as long as `local`.
    pub global: Range<usize>,
}

/// The pieces of all ranks, in the order of the row, which they cover once. None is empty.
pub(crate) fn pieces(layout: &SequenceLayout) -> Vec<Piece> {
    let mut all = Vec::new();
    for owner in 0..layout.ranks() {
        let mut start = 0;
        for global in layout.ranges(owner) {
            let local = start..start + global.len();
            start = local.end;
            all.push(Piece { owner, local, global: global.clone() });
        }
    }
    all.sort_by_key(|piece| piece.global.start);
    all
}

/// Document of a token of the padded row; `None` for padding, that of the layout included.
pub(crate) fn document(tokens: &Tokens, row: usize, index: usize) -> Option<i64> {
    tokens.documents()[row].get(index).copied().filter(|&id| id >= 0)
}

/// True if the token belongs to the same document as the one before it, so that a recurrence goes on from there.
pub(crate) fn continues(tokens: &Tokens, row: usize, index: usize) -> bool {
    let id = document(tokens, row, index);
    index > 0 && id.is_some() && id == document(tokens, row, index - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_row_in_order() {
        let owners = |layout: &SequenceLayout| pieces(layout).iter().map(|p| p.owner).collect::<Vec<_>>();
        assert_eq!(owners(&SequenceLayout::contiguous(10, 3).unwrap()), [0, 1, 2]);
        assert_eq!(owners(&SequenceLayout::head_tail(10, 2).unwrap()), [0, 1, 0]);
        // Rank 1 holds adjacent tokens in the wrong order: two pieces. Rank 2 has nothing and gets a token of padding.
        let layout = SequenceLayout::from_ranges(9, vec![vec![7..9, 0..3], vec![5..7, 3..5], vec![]]).unwrap();
        let of = |owner, local, global| Piece { owner, local, global };
        let expected = [of(0, 2..5, 0..3), of(1, 2..4, 3..5), of(1, 0..2, 5..7), of(0, 0..2, 7..9), of(2, 0..1, 9..10)];
        assert_eq!(pieces(&layout), expected);
    }

    #[test]
    fn documents_go_on_up_to_their_last_token() {
        let row = vec![5, 5, -1, -1, 3, 4, 4];
        let tokens = Tokens::new(vec![row], vec![vec![-1; 7]]).unwrap();
        let found: Vec<_> = (0..9).map(|i| continues(&tokens, 0, i)).collect();
        assert_eq!(found, [false, true, false, false, false, false, true, false, false]);
        assert_eq!((document(&tokens, 0, 1), document(&tokens, 0, 3), document(&tokens, 0, 7)), (Some(5), None, None));
    }
}
