//! Which tokens of the row each rank owns.

use crate::balance::{LayerWork, balanced_ranges};
use crate::error::{Error, Result};
use crate::tokens::Tokens;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The layouts with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayoutKind {
    /// Rank `r` owns the `r`-th of P equal pieces.
    Contiguous,
    /// Rank `r` owns pieces `r` and `2P - 1 - r` of 2P equal ones: causal work is the same on every rank.
    HeadTail,
    /// Pieces chosen by the live work of the batch: [`SequenceLayout::balanced`].
    Balanced,
}

impl LayoutKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Contiguous, Self::HeadTail, Self::Balanced];

    /// The layout of a batch over `ranks`. `layers` are those of the model; only [`LayoutKind::Balanced`] looks at them.
    ///
    /// # Errors
    /// As [`SequenceLayout::contiguous`] and [`SequenceLayout::balanced`].
    pub fn layout(self, tokens: &Tokens, ranks: usize, layers: &[LayerWork]) -> Result<SequenceLayout> {
        match self {
            Self::Contiguous => SequenceLayout::contiguous(tokens.len(), ranks),
            Self::HeadTail => SequenceLayout::head_tail(tokens.len(), ranks),
            Self::Balanced => SequenceLayout::balanced(tokens, ranks, layers),
        }
    }
}

impl fmt::Display for LayoutKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Contiguous => "contiguous",
            Self::HeadTail => "head-tail",
            Self::Balanced => "balanced",
        })
    }
}

impl FromStr for LayoutKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.to_string() == name).ok_or_else(|| {
            let allowed = "the layouts are contiguous, head-tail and balanced";
            Error::argument("layout", format!("{name:?}"), allowed, "use head-tail unless ranks should own one piece")
        })
    }
}

/// Which global token ranges each rank owns, in local order. The global index of a token is the only coordinate:
/// positions, masks, plans, sharding and gathering are functions of it.
///
/// ```
/// # use candle_cp::SequenceLayout;
/// let layout = SequenceLayout::head_tail(14, 2)?;
/// assert_eq!(layout.padded_len(), 16);
/// assert_eq!(layout.ranges(0), &[0..4, 12..16]);
/// assert_eq!(layout.global_indices(1), [4, 5, 6, 7, 8, 9, 10, 11]);
/// # Ok::<(), candle_cp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceLayout {
    len: usize,
    padded_len: usize,
    ranges: Vec<Vec<Range<usize>>>,
}

impl SequenceLayout {
    /// Equal consecutive pieces, padded at the end to a multiple of `ranks`.
    ///
    /// # Errors
    /// No tokens, no ranks, or more than 2^31 tokens.
    pub fn contiguous(len: usize, ranks: usize) -> Result<Self> {
        check(len, ranks)?;
        let local = len.div_ceil(ranks);
        let ranges = (0..ranks).map(|r| vec![r * local..(r + 1) * local]).collect();
        Ok(Self { len, padded_len: local * ranks, ranges })
    }

    /// Pieces `r` and `2P - 1 - r` of 2P, padded at the end to a multiple of 2P. With one rank, the whole row in order.
    ///
    /// # Errors
    /// As [`SequenceLayout::contiguous`].
    pub fn head_tail(len: usize, ranks: usize) -> Result<Self> {
        check(len, ranks)?;
        let piece = len.div_ceil(2 * ranks);
        let padded_len = 2 * ranks * piece;
        let at = |i: usize| i * piece..(i + 1) * piece;
        let ranges = (0..ranks).map(|r| merge([at(r), at(2 * ranks - 1 - r)])).collect();
        Ok(Self { len, padded_len, ranges })
    }

    /// Equally many tokens per rank, in as few pieces as it takes to make the attention work of the ranks about equal in
    /// every kind of layer: the largest work of each, summed, at most 1.05 times the mean, or as near to it as 128 pieces
    /// per rank come. Pieces lie on the tile grid where they are long enough. The row is padded at the end to a multiple
    /// of `ranks`. Made from metadata alone, the same on every rank; `layers` are the kinds of layers of the model.
    ///
    /// # Errors
    /// As [`SequenceLayout::contiguous`]; no layers, or weights that are not positive.
    pub fn balanced(tokens: &Tokens, ranks: usize, layers: &[LayerWork]) -> Result<Self> {
        check(tokens.len(), ranks)?;
        Self::from_ranges(tokens.len(), balanced_ranges(tokens, ranks, layers)?)
    }

    /// Any partition: `ranges[rank]` in local order. Together they cover `0..padded` once, for some `padded >= len`;
    /// ranks may own different amounts. A rank that is given nothing gets one token of padding at the end.
    ///
    /// # Errors
    /// A gap, an overlap, less than `len` tokens, an empty list.
    pub fn from_ranges(len: usize, ranges: Vec<Vec<Range<usize>>>) -> Result<Self> {
        check(len, ranges.len())?;
        let mut ranges: Vec<_> = ranges.into_iter().map(merge).collect();
        let mut all: Vec<_> = ranges.iter().flatten().cloned().collect();
        all.sort_by_key(|r| r.start);
        let fix = "list every token once";
        let mut next = 0;
        for range in all {
            if range.start != next {
                let what = if range.start > next { "a gap" } else { "an overlap" };
                let given = format!("{what} at {}..{}", range.start.min(next), range.start.max(next));
                return Err(Error::argument("ranges", given, "they have to cover the row once", fix));
            }
            next = range.end;
        }
        if next < len {
            return Err(Error::argument("ranges", format!("{next} tokens"), format!("the row has {len}"), fix));
        }
        // Candle drops an operand that is empty, and the graph behind it: every rank gets something to hold.
        for range in ranges.iter_mut().filter(|r| r.is_empty()) {
            range.push(next..next + 1);
            next += 1;
        }
        check(next, ranges.len())?;
        Ok(Self { len, padded_len: next, ranges })
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.ranges.len()
    }

    /// Tokens of the row before the layout's padding.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tokens of the row with the layout's padding at its end.
    pub fn padded_len(&self) -> usize {
        self.padded_len
    }

    /// Global ranges of `rank`, in local order.
    pub fn ranges(&self, rank: usize) -> &[Range<usize>] {
        &self.ranges[rank]
    }

    /// Tokens that `rank` holds, padding included.
    pub fn local_len(&self, rank: usize) -> usize {
        self.ranges[rank].iter().map(Range::len).sum()
    }

    /// Global index of every local token of `rank`.
    pub fn global_indices(&self, rank: usize) -> Vec<usize> {
        self.ranges[rank].iter().cloned().flatten().collect()
    }

    /// For every global index of the padded row, its place in the concatenation of all ranks' slices.
    pub(crate) fn gather_indices(&self) -> Vec<u32> {
        let mut places = vec![0; self.padded_len];
        for (place, global) in self.ranges.iter().flatten().cloned().flatten().enumerate() {
            places[global] = place as u32;
        }
        places
    }
}

fn check(len: usize, ranks: usize) -> Result<()> {
    if ranks == 0 || len == 0 {
        let given = format!("{len} tokens over {ranks} ranks");
        return Err(Error::argument(
            "layout",
            given,
            "both have to be at least 1",
            "pass the row's length and the ranks",
        ));
    }
    // Positions are u32 in the kernels.
    if len.saturating_add(2 * ranks) > 1 << 31 {
        return Err(Error::argument("len", len, "a row has at most 2^31 tokens", "split the row"));
    }
    Ok(())
}

/// Drops empty ranges and joins adjacent ones.
fn merge(ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => out.push(range),
        }
    }
    out
}
