//! The mask as a rule: which keys a query may see.

use candle_cp_kernels::Bounds;
use std::ops::Range;

/// What one token is, as far as a mask is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenAt {
    /// Position; comparable within a document.
    pub position: i64,
    /// Document, negative for padding.
    pub document: i64,
    /// Block of tokens that may see each other (the soft tokens of an image), negative for none.
    pub group: i64,
}

/// A mask rule. Whether query `q` may see key `k`:
///
/// `doc[q] == doc[k] >= 0  and  in_window  and  (k <= q  or  (groups and group[q] == group[k] >= 0))`
///
/// The window bounds the past, `k > q - window`, as Hugging Face transformers has it; with
/// [`MaskRule::with_both_sides`] it is `|q - k| < window`, as Google's own code and vLLM have it. The two differ only
/// inside a group longer than the window. With [`MaskRule::with_whole_groups`] the window does not cut a group at all:
///
/// `doc[q] == doc[k] >= 0  and  ((in_window and k <= q)  or  group[q] == group[k] >= 0)`
///
/// A bidirectional rule drops the condition on order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MaskRule {
    causal: bool,
    window: Option<usize>,
    both_sides: bool,
    groups: bool,
    whole_groups: bool,
}

impl MaskRule {
    /// Every key of the document up to the query.
    pub fn causal() -> Self {
        Self { causal: true, window: None, both_sides: false, groups: false, whole_groups: false }
    }

    /// The last `window` keys of the document, the query's own included. 0 is taken as 1: a token sees itself.
    pub fn sliding(window: usize) -> Self {
        Self { window: Some(window.max(1)), ..Self::causal() }
    }

    /// Every key of the document, before and after the query.
    pub fn bidirectional() -> Self {
        Self { causal: false, ..Self::causal() }
    }

    /// Tokens of the same group also see each other ahead.
    pub fn with_groups(self) -> Self {
        Self { groups: true, ..self }
    }

    /// Tokens of the same group see each other, however far apart they are.
    pub fn with_whole_groups(self) -> Self {
        Self { groups: true, whole_groups: true, ..self }
    }

    /// The window bounds what lies ahead as well.
    pub fn with_both_sides(self) -> Self {
        Self { both_sides: true, ..self }
    }

    /// The window, if there is one.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// The rule itself, for one pair.
    pub fn allowed(&self, q: TokenAt, k: TokenAt) -> bool {
        let in_window = self.window.is_none_or(|window| {
            let distance = q.position - k.position;
            let window = i64::try_from(window).unwrap_or(i64::MAX);
            distance < window && (!self.both_sides || -distance < window)
        });
        let together = self.groups && q.group >= 0 && q.group == k.group;
        let whole = self.whole_groups && together;
        let in_order = !self.causal || k.position <= q.position || together;
        q.document == k.document && q.document >= 0 && (whole || (in_window && in_order))
    }

    /// The keys of one query as an interval of positions. They are one because documents and groups are contiguous
    /// and a group contains its query. `document` and `group` are the positions they span (`group` just the query if
    /// it has none).
    pub(crate) fn bounds(&self, position: u32, document: Range<u32>, group: Range<u32>) -> Bounds {
        let mut first = document.start;
        let mut end = match (self.causal, self.groups) {
            (false, _) => document.end,
            (true, true) => group.end.min(document.end),
            (true, false) => position + 1,
        };
        if let Some(window) = self.window {
            let window = u32::try_from(window).unwrap_or(u32::MAX);
            first = first.max((position + 1).saturating_sub(window));
            if self.both_sides {
                end = end.min(position.saturating_add(window));
            }
        }
        if self.whole_groups {
            first = first.min(group.start.max(document.start));
            end = end.max(group.end.min(document.end));
        }
        Bounds { first, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_the_rule() {
        let token = |p: u32| TokenAt {
            position: i64::from(p),
            document: if p < 9 { 0 } else { 1 },
            group: if (3..8).contains(&p) { 0 } else { -1 },
        };
        let base = [MaskRule::causal(), MaskRule::bidirectional(), MaskRule::sliding(1), MaskRule::sliding(3)];
        let rules = base
            .into_iter()
            .flat_map(|r| [r, r.with_groups(), r.with_whole_groups()])
            .flat_map(|r| [r, r.with_both_sides()]);
        for rule in rules {
            for q in 0..20 {
                let document = if q < 9 { 0..9 } else { 9..20 };
                let group = if (3..8).contains(&q) { 3..8 } else { q..q + 1 };
                let bounds = rule.bounds(q, document, group);
                for k in 0..20 {
                    let inside = bounds.first <= k && k < bounds.end;
                    assert_eq!(inside, rule.allowed(token(q), token(k)), "{rule:?} q {q} k {k}");
                }
            }
        }
    }
}
