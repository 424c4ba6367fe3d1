//! What every rank knows of the whole batch: documents, groups and positions of all tokens.

use crate::error::{Error, Result};
use crate::mask::{MaskRule, TokenAt};
use candle_cp_kernels::Bounds;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Metadata of the full, unsharded batch, `[B][S]` each. A clone is cheap and shares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokens {
    documents: Arc<[Vec<i64>]>,
    groups: Arc<[Vec<i64>]>,
    len: usize,
}

impl Tokens {
    /// `documents` holds a document id per token, negative for padding; `groups` the id of the block of tokens that may
    /// see each other ahead (an image), negative for none.
    ///
    /// # Errors
    /// Rows of different lengths or counts, no row, a document or a group (within its document) that is not contiguous.
    pub fn new(documents: Vec<Vec<i64>>, groups: Vec<Vec<i64>>) -> Result<Self> {
        let len = documents.first().map_or(0, Vec::len);
        if documents.is_empty() || len == 0 {
            return Err(Error::argument("documents", "empty", "a batch has rows and tokens", "pass one id per token"));
        }
        if documents.len() != groups.len() {
            let given = format!("{} rows of documents and {} of groups", documents.len(), groups.len());
            return Err(Error::argument(
                "groups",
                given,
                "both need the same rows",
                "use -1 for tokens without a group",
            ));
        }
        for (row, (d, g)) in documents.iter().zip(&groups).enumerate() {
            if d.len() != len || g.len() != len {
                let given = format!("row {row} with {} documents and {} groups", d.len(), g.len());
                let allowed = format!("every row needs {len} of each, as row 0 has");
                return Err(Error::argument("documents", given, allowed, "pad rows with document -1, group -1"));
            }
            check_contiguous("documents", row, d, |_| 0)?;
            check_contiguous("groups", row, g, |i| d[i])?;
        }
        Ok(Self { documents: documents.into(), groups: groups.into(), len })
    }

    /// Rows of one document each, without groups or padding.
    ///
    /// # Panics
    /// If `batch` or `len` is 0.
    pub fn single_document(batch: usize, len: usize) -> Self {
        assert!(batch > 0 && len > 0, "a batch has rows and tokens");
        Self { documents: vec![vec![0; len]; batch].into(), groups: vec![vec![-1; len]; batch].into(), len }
    }

    /// Batch rows.
    pub fn batch(&self) -> usize {
        self.documents.len()
    }

    /// Tokens per row, the row's own padding included.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Document ids, `[B][S]`.
    pub fn documents(&self) -> &[Vec<i64>] {
        &self.documents
    }

    /// Group ids, `[B][S]`.
    pub fn groups(&self) -> &[Vec<i64>] {
        &self.groups
    }

    /// Positions that restart at 0 in every document; padding continues the count. `[B][S]`.
    pub fn positions(&self) -> Vec<Vec<i64>> {
        self.documents
            .iter()
            .map(|row| {
                let mut next = 0;
                (0..row.len())
                    .map(|i| {
                        let starts = i > 0 && row[i] != row[i - 1] && row[i] >= 0;
                        let position = if starts { 0 } else { next };
                        next = position + 1;
                        position
                    })
                    .collect()
            })
            .collect()
    }

    /// One token, with its index in the row as position.
    pub fn at(&self, row: usize, index: usize) -> TokenAt {
        TokenAt { position: index as i64, document: self.documents[row][index], group: self.groups[row][index] }
    }

    /// The keys that every token of `row` may see, as intervals of row indices. Padding sees nothing.
    pub fn bounds(&self, row: usize, rule: &MaskRule) -> Vec<Bounds> {
        let (documents, groups) = (&self.documents[row], &self.groups[row]);
        let mut bounds = Vec::with_capacity(self.len);
        for document in runs(0..self.len, |i| documents[i]) {
            if documents[document.start] < 0 {
                bounds.resize(document.end, Bounds::default());
                continue;
            }
            for group in runs(document.clone(), |i| groups[i]) {
                let grouped = groups[group.start] >= 0;
                for i in group.clone() {
                    let group = if grouped { group.clone() } else { i..i + 1 };
                    bounds.push(rule.bounds(i as u32, narrow(&document), narrow(&group)));
                }
            }
        }
        bounds
    }
}

fn narrow(range: &Range<usize>) -> Range<u32> {
    range.start as u32..range.end as u32
}

/// Maximal runs of equal ids inside `range`.
fn runs(range: Range<usize>, id: impl Fn(usize) -> i64) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        (start < range.end).then(|| {
            let first = id(start);
            let end = (start..range.end).find(|&i| id(i) != first).unwrap_or(range.end);
            let run = start..end;
            start = end;
            run
        })
    })
}

/// Ids >= 0 must not come back after another one; `scope` is what an id belongs to.
fn check_contiguous(what: &'static str, row: usize, ids: &[i64], scope: impl Fn(usize) -> i64) -> Result<()> {
    let mut seen = BTreeSet::new();
    let mut last = None;
    for (i, &id) in ids.iter().enumerate() {
        let key = (scope(i), id);
        if last != Some(key) && id >= 0 && !seen.insert(key) {
            let given = format!("id {id} again at row {row}, token {i}, after other ids");
            return Err(Error::argument(
                what,
                given,
                "an id has to be one contiguous run",
                "give every document and every image block an id of its own",
            ));
        }
        last = Some(key);
    }
    Ok(())
}
