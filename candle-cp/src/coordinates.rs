//! Attention between tokens given by coordinates, on one rank: for tools and for queries and keys that are not slices
//! of one row.

use crate::attention::ring_attention;
use crate::comm::{Communicator, Local};
use crate::error::{Error, Result};
use crate::mask::MaskRule;
use crate::plan::AttentionPlan;
use candle_core::Tensor;
use candle_cp_kernels::{Bounds, Order};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Positions, documents and groups of tokens, `[B][S]` each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coordinates {
    /// Position inside the document, not negative.
    pub positions: Vec<Vec<i64>>,
    /// Document, negative for padding.
    pub documents: Vec<Vec<i64>>,
    /// Group, negative for none; contiguous within a document.
    pub groups: Vec<Vec<i64>>,
}

/// Attention of queries `[B, Hq, Sq, D]` over keys and values `[B, Hkv, Sk, D]` under `rule`, with scores multiplied by
/// `scale`. Any subset of the tokens of a batch may be given, in any order. Returns the output and the log-sum-exp
/// `[B, Hq, Sq]`; the output is differentiable.
///
/// # Errors
/// Coordinates that do not fit the tensors or are out of range; shapes and types as for
/// [`crate::CpContext::attend`].
pub fn attend_with_coordinates(
    (q_bhsd, k_bhsd, v_bhsd): (&Tensor, &Tensor, &Tensor),
    rule: &MaskRule,
    scale: f64,
    query: &Coordinates,
    key: &Coordinates,
) -> Result<(Tensor, Tensor)> {
    let (batch, keys) = (k_bhsd.dim(0)?, k_bhsd.dim(2)?);
    check("query", query, batch, q_bhsd.dim(2)?)?;
    check("key", key, batch, keys)?;
    let mut bounds = Vec::with_capacity(batch);
    let mut segments = Vec::with_capacity(batch);
    for row in 0..batch {
        let line = Line::new(&[query, key], row)?;
        let tokens = 0..query.positions[row].len();
        bounds.push(tokens.map(|i| line.bounds(query, row, i, rule)).collect());
        segments.push(line.segments(key, row));
    }
    let plan = Arc::new(AttentionPlan::of_chunk(bounds, &segments, keys));
    let comm: Arc<dyn Communicator> = Arc::new(Local::new());
    ring_attention(&comm, &plan, (q_bhsd, k_bhsd, v_bhsd), Order::HeadsFirst, scale)
}

fn check(what: &'static str, c: &Coordinates, batch: usize, len: usize) -> Result<()> {
    for (name, rows) in [("positions", &c.positions), ("documents", &c.documents), ("groups", &c.groups)] {
        if rows.len() != batch || rows.iter().any(|row| row.len() != len) {
            let lengths: Vec<_> = rows.iter().map(Vec::len).collect();
            let allowed = format!("the tensor has {batch} rows of {len} tokens");
            return Err(Error::argument(what, format!("{name} of lengths {lengths:?}"), allowed, "pass one per token"));
        }
    }
    Ok(())
}

/// The documents of one batch row laid out one after the other, so that one number is a token's place.
struct Line {
    documents: BTreeMap<i64, Range<u32>>,
    groups: BTreeMap<(i64, i64), Range<u32>>,
}

impl Line {
    fn new(all: &[&Coordinates], row: usize) -> Result<Self> {
        let mut lengths = BTreeMap::<i64, i64>::new();
        let mut spans = BTreeMap::<(i64, i64), Range<i64>>::new();
        for c in all {
            for ((&p, &d), &g) in c.positions[row].iter().zip(&c.documents[row]).zip(&c.groups[row]) {
                if d < 0 {
                    continue;
                }
                if p < 0 {
                    return Err(Error::argument("position", p, "positions start at 0", "count inside the document"));
                }
                let length = lengths.entry(d).or_default();
                *length = (*length).max(p + 1);
                if g >= 0 {
                    let span = spans.entry((d, g)).or_insert(p..p + 1);
                    *span = span.start.min(p)..span.end.max(p + 1);
                }
            }
        }
        let total: i64 = lengths.values().sum();
        if total > 1 << 31 {
            return Err(Error::argument("positions", total, "a row has at most 2^31 positions", "split the row"));
        }
        let mut next = 0u32;
        let mut documents = BTreeMap::new();
        for (document, length) in lengths {
            documents.insert(document, next..next + length as u32);
            next += length as u32;
        }
        let place = |d: i64, p: i64| documents[&d].start + p as u32;
        let groups = spans.into_iter().map(|((d, g), s)| ((d, g), place(d, s.start)..place(d, s.end))).collect();
        Ok(Self { documents, groups })
    }

    fn place(&self, c: &Coordinates, row: usize, i: usize) -> Option<u32> {
        let document = self.documents.get(&c.documents[row][i])?;
        Some(document.start + c.positions[row][i] as u32)
    }

    fn bounds(&self, c: &Coordinates, row: usize, i: usize, rule: &MaskRule) -> Bounds {
        let Some(place) = self.place(c, row, i) else { return Bounds::default() };
        let document = c.documents[row][i];
        let group = self.groups.get(&(document, c.groups[row][i])).cloned().unwrap_or(place..place + 1);
        rule.bounds(place, self.documents[&document].clone(), group)
    }

    /// Runs of keys at consecutive places: (key indices, first place). Padding is left out.
    fn segments(&self, c: &Coordinates, row: usize) -> Vec<(Range<usize>, u32)> {
        let mut out: Vec<(Range<usize>, u32)> = Vec::new();
        for i in 0..c.positions[row].len() {
            let Some(place) = self.place(c, row, i) else { continue };
            match out.last_mut() {
                Some((keys, first)) if keys.end == i && *first + keys.len() as u32 == place => keys.end = i + 1,
                _ => out.push((i..i + 1, place)),
            }
        }
        out
    }
}
