//! Live work of each rank, and the layout that evens it out.
//!
//! Everything but attention costs the same for every token, so ranks own equally many tokens; attention costs what is
//! live, and that depends on documents, windows and image blocks. Fewer pieces mean fewer keys that travel and fewer
//! cut tiles, so the row is cut as coarsely as balance allows.

use crate::error::{Error, Result};
use crate::layout::SequenceLayout;
use crate::mask::MaskRule;
use crate::tokens::Tokens;
use candle_cp_kernels::{Bounds, KEY_BLOCK};
use std::ops::Range;

/// The layers of a model that share a mask rule, and what one allowed (query, key) pair costs in all of them together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerWork {
    /// Their mask rule.
    pub rule: MaskRule,
    /// Layers times query heads times head size.
    pub weight: f64,
}

/// Largest work over the mean that [`SequenceLayout::balanced`] is content with.
const GOAL: f64 = 1.05;

/// Pieces per rank that are tried, in this order.
const PIECES: [usize; 13] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128];

/// Attention work of each rank, in allowed pairs times [`LayerWork::weight`], over all batch rows and `layers`.
///
/// # Errors
/// A layout for rows of another length; no layers, or weights that are not positive.
pub fn live_work(layout: &SequenceLayout, tokens: &Tokens, layers: &[LayerWork]) -> Result<Vec<f64>> {
    if layout.len() != tokens.len() {
        let given = format!("for {} tokens", layout.len());
        let allowed = format!("the batch has {} per row", tokens.len());
        return Err(Error::argument("layout", given, allowed, "make the layout for the batch"));
    }
    let work = Work::new(tokens, layers, layout.padded_len())?;
    let of_rank = |rank: usize| layout.ranges(rank).iter().flat_map(|range| work.of(range)).sum();
    Ok((0..layout.ranks()).map(of_rank).collect())
}

/// What the ranks wait for: the largest work of each kind of layer, summed, over the mean. Ranks meet in every layer, so
/// that being ahead in one does not make up for being behind in another. At least the largest sum over its mean.
fn unevenness(shares: &[Share]) -> f64 {
    let kinds = shares[0].work.len();
    let of = |kind: usize| shares.iter().map(move |share| share.work[kind]);
    let largest: f64 = (0..kinds).map(|kind| of(kind).fold(0.0, f64::max)).sum();
    let total: f64 = (0..kinds).map(|kind| of(kind).sum::<f64>()).sum();
    if total > 0.0 { largest * shares.len() as f64 / total } else { 1.0 }
}

/// `ranges[rank]` of equally many tokens each: a partition of `len` tokens padded to a multiple of `ranks`.
pub(crate) fn balanced_ranges(tokens: &Tokens, ranks: usize, layers: &[LayerWork]) -> Result<Vec<Vec<Range<usize>>>> {
    let local = tokens.len().div_ceil(ranks);
    let work = Work::new(tokens, layers, local * ranks)?;
    let mut best = (f64::INFINITY, Vec::new());
    for pieces in PIECES.into_iter().filter(|&pieces| pieces <= local) {
        let shares = deal(&work, ranks, local, pieces);
        let uneven = unevenness(&shares);
        if uneven < best.0 {
            best = (uneven, shares);
        }
        if uneven <= GOAL {
            break;
        }
    }
    Ok(best.1.into_iter().map(|share| share.pieces.into_iter().map(|piece| piece.tokens).collect()).collect())
}

/// Work of the queries before each position of the padded row, by kind of layer: `sums[kind][i]` is that of `0..i`.
struct Work {
    sums: Vec<Vec<f64>>,
}

impl Work {
    fn new(tokens: &Tokens, layers: &[LayerWork], padded_len: usize) -> Result<Self> {
        let fix = "pass one entry per kind of layer, with layers times heads times head size as its weight";
        if layers.is_empty() {
            return Err(Error::argument("layers", "empty", "live work is that of at least one layer", fix));
        }
        if let Some(LayerWork { weight, .. }) = layers.iter().find(|l| !(l.weight.is_finite() && l.weight > 0.0)) {
            return Err(Error::argument("layers", format!("weight {weight}"), "a weight is above 0", fix));
        }
        let of_kind = |LayerWork { rule, weight }: &LayerWork| {
            let mut pairs = vec![0usize; padded_len + 1];
            for row in 0..tokens.batch() {
                let bounds = tokens.bounds(row, rule);
                pairs[1..].iter_mut().zip(&bounds).for_each(|(pairs, bounds)| *pairs += Bounds::len(bounds));
            }
            let before = pairs.iter().scan(0, |sum, &pairs| {
                *sum += pairs;
                Some(*sum as f64 * weight)
            });
            before.collect()
        };
        Ok(Self { sums: layers.iter().map(of_kind).collect() })
    }

    /// By kind of layer.
    fn of(&self, range: &Range<usize>) -> Vec<f64> {
        self.sums.iter().map(|sums| sums[range.end] - sums[range.start]).collect()
    }
}

/// A contiguous part of the row.
#[derive(Debug, Clone)]
struct Piece {
    tokens: Range<usize>,
    /// By kind of layer.
    work: Vec<f64>,
}

/// What one rank is given.
#[derive(Debug, Clone)]
struct Share {
    /// By kind of layer.
    work: Vec<f64>,
    pieces: Vec<Piece>,
}

impl Share {
    fn total(&self) -> f64 {
        self.work.iter().sum()
    }

    fn take(&mut self, piece: Piece) {
        self.work.iter_mut().zip(&piece.work).for_each(|(sum, work)| *sum += work);
        self.pieces.push(piece);
    }
}

/// One share per rank, the heaviest first: what the ranks are given of one or more rounds of pieces.
type Round = Vec<Share>;

fn spread(round: &Round) -> f64 {
    round[0].total() - round[round.len() - 1].total()
}

fn sort(round: &mut Round) {
    let start = |share: &Share| share.pieces[0].tokens.start;
    round.sort_by(|a, b| b.total().total_cmp(&a.total()).then_with(|| start(a).cmp(&start(b))));
}

/// Gives every rank `pieces` pieces of the row, of the same lengths on every rank, so that their work is about equal.
///
/// The pieces of a length are sorted by work and cut into rounds of one per rank; then the two rounds that differ
/// most in themselves are joined, heavy to light, until one is left (the balanced largest-first differencing method of
/// Tsai, 1992). That evens out the sum over the kinds of layers; exchanges of single pieces then even out each kind.
fn deal(work: &Work, ranks: usize, local: usize, pieces: usize) -> Vec<Share> {
    let mut rounds = rounds(work, ranks, local, pieces);
    while rounds.len() > 1 {
        // Sorted by spread; stable, so the result is the same on every rank.
        rounds.sort_by(|a, b| spread(a).total_cmp(&spread(b)));
        let (mut heavy, mut light) = (rounds.pop().expect("two"), rounds.pop().expect("two"));
        light.reverse();
        heavy.iter_mut().zip(light).for_each(|(a, b)| b.pieces.into_iter().for_each(|piece| a.take(piece)));
        sort(&mut heavy);
        rounds.push(heavy);
    }
    let mut shares = rounds.pop().expect("at least one piece");
    for _ in 0..2 * ranks {
        if unevenness(&shares) <= GOAL || !exchange(&mut shares) {
            break;
        }
    }
    shares.iter_mut().for_each(|share| share.pieces.sort_unstable_by_key(|piece| piece.tokens.start));
    shares.sort_by_key(|share| share.pieces[0].tokens.start);
    shares
}

fn rounds(work: &Work, ranks: usize, local: usize, pieces: usize) -> Vec<Round> {
    let mut start = 0;
    let mut rounds = Vec::with_capacity(pieces);
    for (length, count) in lengths(local, pieces) {
        let mut all: Vec<Share> = (0..count * ranks)
            .map(|i| {
                let tokens = start + i * length..start + (i + 1) * length;
                let work = work.of(&tokens);
                Share { work: work.clone(), pieces: vec![Piece { tokens, work }] }
            })
            .collect();
        start += count * ranks * length;
        sort(&mut all);
        rounds.extend(all.chunks(ranks).map(<[Share]>::to_vec));
    }
    rounds
}

/// Exchanges a piece of the rank that is furthest from the mean for one of the same length, where that brings the ranks
/// nearest to it, in squares over all kinds of layers. False if no exchange does.
fn exchange(shares: &mut [Share]) -> bool {
    let ranks = shares.len() as f64;
    let mean: Vec<f64> = (0..shares[0].work.len())
        .map(|kind| shares.iter().map(|share| share.work[kind]).sum::<f64>() / ranks)
        .collect();
    // Of a share that gains `plus` and loses `minus`.
    let distance = |share: &Share, plus: &[f64], minus: &[f64]| -> f64 {
        (0..mean.len()).map(|kind| (share.work[kind] + plus[kind] - minus[kind] - mean[kind]).powi(2)).sum()
    };
    let nothing = vec![0.0; mean.len()];
    let now = |share: &Share| distance(share, &nothing, &nothing);
    let worst = (0..shares.len()).max_by(|&a, &b| now(&shares[a]).total_cmp(&now(&shares[b]))).expect("a rank");
    let mut best = (0.0, None);
    for other in (0..shares.len()).filter(|&other| other != worst) {
        let before = now(&shares[worst]) + now(&shares[other]);
        for (i, mine) in shares[worst].pieces.iter().enumerate() {
            for (j, theirs) in shares[other].pieces.iter().enumerate() {
                if mine.tokens.len() != theirs.tokens.len() {
                    continue;
                }
                let after = distance(&shares[worst], &theirs.work, &mine.work)
                    + distance(&shares[other], &mine.work, &theirs.work);
                // Against rounding, which could turn in a circle.
                if after - before < best.0 && after < 0.999 * before {
                    best = (after - before, Some((other, i, j)));
                }
            }
        }
    }
    let Some((other, i, j)) = best.1 else { return false };
    let (mine, theirs) = (shares[worst].pieces.swap_remove(i), shares[other].pieces.swap_remove(j));
    for (share, lost, gained) in [(worst, &mine, &theirs), (other, &theirs, &mine)] {
        shares[share].work.iter_mut().zip(&lost.work).for_each(|(sum, work)| *sum -= work);
        shares[share].take(gained.clone());
    }
    true
}

/// `pieces` lengths that add up to `local`: (length, how many). Multiples of the tile size but for the last one, if the
/// pieces are long enough for that.
fn lengths(local: usize, pieces: usize) -> Vec<(usize, usize)> {
    let unit = if local >= pieces * KEY_BLOCK { KEY_BLOCK } else { 1 };
    let (units, rest) = (local / unit, local % unit);
    let (short, longer) = (units / pieces * unit, units % pieces);
    let all = [(short + unit, longer), (short, pieces - longer - 1), (short + rest, 1)];
    all.into_iter().filter(|&(_, count)| count > 0).collect()
}
