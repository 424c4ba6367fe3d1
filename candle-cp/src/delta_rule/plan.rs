//! Which tokens a rank runs along, and which states have to pass between pieces. Every rank makes the same of it.

use crate::layout::SequenceLayout;
use crate::pieces::{Piece, continues, document, pieces};
use crate::tokens::Tokens;
use candle_cp_kernels::DeltaRun;

/// Adjacent tokens of one document in one piece of this rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OwnRun {
    /// Row and local tokens.
    pub run: DeltaRun,
    /// Number of the piece in sequence order.
    pub piece: usize,
    /// The document began in an earlier piece: the state before the run comes from there.
    pub continues: bool,
    /// The document goes on in a later piece.
    pub carries: bool,
}

impl OwnRun {
    /// One document fills the piece and reaches beyond on both sides.
    pub fn is_through(&self) -> bool {
        self.continues && self.carries
    }
}

/// A row of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Link {
    /// The first token belongs to the document of the token before it.
    pub continues: bool,
    /// So does the first token of the next piece to that of the last one.
    pub carries: bool,
    /// Continues, carries, and no document starts in between.
    pub through: bool,
}

/// The recurrence of a batch, as one rank sees it.
#[derive(Debug)]
pub(crate) struct StatePlan {
    /// Rows of the batch.
    pub(super) batch: usize,
    /// Tokens of this rank's slice.
    pub(super) local_len: usize,
    /// Sorted by row and local token.
    pub(super) runs: Vec<OwnRun>,
    /// Owners of the pieces, in sequence order.
    pub(super) owners: Vec<usize>,
    /// `[pieces][B]`.
    pub(super) links: Vec<Vec<Link>>,
    rank: usize,
}

impl StatePlan {
    pub fn new(layout: &SequenceLayout, tokens: &Tokens, rank: usize) -> Self {
        let pieces = pieces(layout);
        let rows = 0..tokens.batch();
        let links: Vec<Vec<Link>> =
            pieces.iter().map(|piece| rows.clone().map(|row| link(tokens, row, piece)).collect()).collect();
        let mut runs = Vec::new();
        for row in rows {
            for (number, piece) in pieces.iter().enumerate().filter(|(_, piece)| piece.owner == rank) {
                own_runs(tokens, row, number, piece, links[number][row], &mut runs);
            }
        }
        runs.sort_by_key(|own| (own.run.row, own.run.tokens.start));
        let owners = pieces.iter().map(|piece| piece.owner).collect();
        Self { batch: tokens.batch(), local_len: layout.local_len(rank), runs, owners, links, rank }
    }

    /// Whether any document lies in several pieces. Otherwise the ranks have nothing to tell each other.
    pub(crate) fn crosses(&self) -> bool {
        self.links.iter().flatten().any(|link| link.carries)
    }

    /// Numbers that each rank makes for the others, in forward and in backward, given those of a state and of a
    /// transition.
    pub(crate) fn made(&self, state: usize, transition: usize) -> [Vec<usize>; 2] {
        let ranks = self.owners.iter().max().map_or(0, |last| last + 1);
        let mut made = [vec![0; ranks], vec![0; ranks]];
        for (&owner, rows) in self.owners.iter().zip(&self.links) {
            for link in rows {
                made[0][owner] += usize::from(link.carries) * state + usize::from(link.through) * transition;
                made[1][owner] += usize::from(link.continues) * state;
            }
        }
        made
    }

    /// The (piece, row) for which `wanted` holds, in sequence order.
    pub(super) fn places(&self, wanted: impl Fn(Link) -> bool) -> impl Iterator<Item = (usize, usize)> {
        let all = self.links.iter().enumerate();
        all.flat_map(|(piece, rows)| rows.iter().enumerate().map(move |(row, &link)| ((piece, row), link)))
            .filter(move |&(_, link)| wanted(link))
            .map(|(place, _)| place)
    }

    /// Whether the state after each (piece, row) matters to this rank: it continues from there, or from what continues
    /// from there.
    pub(super) fn needed_states(&self) -> Vec<Vec<bool>> {
        let mut needed = vec![vec![false; self.batch]; self.owners.len()];
        for piece in (1..self.owners.len()).rev() {
            let own = self.owners[piece] == self.rank;
            let rows = self.links[piece].iter().zip(&needed[piece]);
            needed[piece - 1] = rows.map(|(link, &later)| link.continues && (own || (link.through && later))).collect();
        }
        needed
    }

    /// Whether the gradient of the state before each (piece, row) matters to this rank.
    pub(super) fn needed_gradients(&self) -> Vec<Vec<bool>> {
        let mut needed = vec![vec![false; self.batch]; self.owners.len()];
        for piece in 1..self.owners.len() {
            let own = self.owners[piece - 1] == self.rank;
            let rows = self.links[piece - 1].iter().zip(&needed[piece - 1]);
            needed[piece] = rows.map(|(link, &earlier)| link.carries && (own || (link.through && earlier))).collect();
        }
        needed
    }
}

fn link(tokens: &Tokens, row: usize, piece: &Piece) -> Link {
    let inside = piece.global.clone().skip(1);
    let continued = continues(tokens, row, piece.global.start);
    let carries = continues(tokens, row, piece.global.end);
    let through = continued && carries && inside.into_iter().all(|i| continues(tokens, row, i));
    Link { continues: continued, carries, through }
}

fn own_runs(tokens: &Tokens, row: usize, number: usize, piece: &Piece, link: Link, runs: &mut Vec<OwnRun>) {
    let local = |global: usize| piece.local.start + global - piece.global.start;
    let mut start = piece.global.start;
    while start < piece.global.end {
        let end = (start + 1..piece.global.end).find(|&i| !continues(tokens, row, i)).unwrap_or(piece.global.end);
        if document(tokens, row, start).is_some() {
            runs.push(OwnRun {
                run: DeltaRun { row, tokens: local(start)..local(end) },
                piece: number,
                continues: link.continues && start == piece.global.start,
                carries: link.carries && end == piece.global.end,
            });
        }
        start = end;
    }
}
