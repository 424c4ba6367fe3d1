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
    Ok((0..layout.ranks()).map(|rank| layout.ranges(rank).iter().map(|range| work.of(range)).sum()).collect())
}

/// Largest over mean; 1 if there is no work.
fn unevenness(work: &[f64]) -> f64 {
    let (largest, sum) = work.iter().fold((0.0, 0.0), |(largest, sum), &w| (f64::max(largest, w), sum + w));
    if sum > 0.0 { largest * work.len() as f64 / sum } else { 1.0 }
}

/// `ranges[rank]` of equally many tokens each: a partition of `len` tokens padded to a multiple of `ranks`.
pub(crate) fn balanced_ranges(tokens: &Tokens, ranks: usize, layers: &[LayerWork]) -> Result<Vec<Vec<Range<usize>>>> {
    let local = tokens.len().div_ceil(ranks);
    let work = Work::new(tokens, layers, local * ranks)?;
    let mut best = (f64::INFINITY, Vec::new());
    for pieces in PIECES.into_iter().filter(|&pieces| pieces <= local) {
        let shares = deal(&work, ranks, local, pieces);
        let uneven = unevenness(&shares.iter().map(|share| share.work).collect::<Vec<_>>());
        if uneven < best.0 {
            best = (uneven, shares.into_iter().map(|share| share.pieces).collect());
        }
        if uneven <= GOAL {
            break;
        }
    }
    Ok(best.1)
}

/// Work of the queries before each position of the padded row: `sums[i]` is that of `0..i`.
struct Work {
    sums: Vec<f64>,
}

impl Work {
    fn new(tokens: &Tokens, layers: &[LayerWork], padded_len: usize) -> Result<Self> {
        let fix = "pass one entry per kind of layer, with layers times heads times head size as its weight";
        if layers.is_empty() {
            return Err(Error::argument("layers", "empty", "live work is that of at least one layer", fix));
        }
        let mut per_token = vec![0.0; padded_len];
        for LayerWork { rule, weight } in layers {
            if !(weight.is_finite() && *weight > 0.0) {
                return Err(Error::argument("layers", format!("weight {weight}"), "a weight is above 0", fix));
            }
            for row in 0..tokens.batch() {
                let pairs = tokens.bounds(row, rule);
                per_token.iter_mut().zip(&pairs).for_each(|(work, pairs)| *work += weight * Bounds::len(pairs) as f64);
            }
        }
        let mut sums = Vec::with_capacity(padded_len + 1);
        sums.push(0.0);
        sums.extend(per_token.iter().scan(0.0, |sum, work| {
            *sum += work;
            Some(*sum)
        }));
        Ok(Self { sums })
    }

    fn of(&self, range: &Range<usize>) -> f64 {
        self.sums[range.end] - self.sums[range.start]
    }
}

/// Pieces that one rank is given.
#[derive(Debug, Clone)]
struct Share {
    work: f64,
    pieces: Vec<Range<usize>>,
}

/// One share per rank, the heaviest first: what the ranks are given of one or more rounds of pieces.
type Round = Vec<Share>;

fn spread(round: &Round) -> f64 {
    round[0].work - round[round.len() - 1].work
}

fn sort(round: &mut Round) {
    round.sort_by(|a, b| b.work.total_cmp(&a.work).then_with(|| a.pieces[0].start.cmp(&b.pieces[0].start)));
}

/// Gives every rank `pieces` pieces of the row, of the same lengths on every rank, so that their work is about equal.
///
/// The pieces of a length are sorted by work and cut into rounds of one per rank; then the two rounds that differ
/// most in themselves are joined, heavy to light, until one is left (the balanced largest-first differencing method of
/// Tsai, 1992).
fn deal(work: &Work, ranks: usize, local: usize, pieces: usize) -> Vec<Share> {
    let mut rounds = rounds(work, ranks, local, pieces);
    while rounds.len() > 1 {
        // Sorted by spread; stable, so the result is the same on every rank.
        rounds.sort_by(|a, b| spread(a).total_cmp(&spread(b)));
        let (mut heavy, mut light) = (rounds.pop().expect("two"), rounds.pop().expect("two"));
        light.reverse();
        for (a, b) in heavy.iter_mut().zip(light) {
            a.work += b.work;
            a.pieces.extend(b.pieces);
        }
        sort(&mut heavy);
        rounds.push(heavy);
    }
    let mut shares = rounds.pop().expect("at least one piece");
    shares.iter_mut().for_each(|share| share.pieces.sort_unstable_by_key(|piece| piece.start));
    shares.sort_by_key(|share| share.pieces[0].start);
    shares
}

fn rounds(work: &Work, ranks: usize, local: usize, pieces: usize) -> Vec<Round> {
    let mut start = 0;
    let mut rounds = Vec::with_capacity(pieces);
    for (length, count) in lengths(local, pieces) {
        let mut all: Vec<Share> = (0..count * ranks)
            .map(|i| {
                let piece = start + i * length..start + (i + 1) * length;
                Share { work: work.of(&piece), pieces: vec![piece] }
            })
            .collect();
        start += count * ranks * length;
        sort(&mut all);
        rounds.extend(all.chunks(ranks).map(<[Share]>::to_vec));
    }
    rounds
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
