//! Which rows go to which expert.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};

use super::RealRows;

/// The assignments of rows to experts, those of one expert side by side.
///
/// An assignment is a pair of a real row and one of its chosen experts. They are ordered by expert, and for one expert by
/// row; sums over assignments run in this order, which no number of threads changes.
#[derive(Debug)]
pub struct Dispatch {
    /// Number of rows, padding included.
    pub(super) rows: usize,
    /// Number of real rows.
    pub(super) real: usize,
    /// Number of experts of a row.
    pub(super) top_k: usize,
    /// Number of experts.
    pub(super) experts: usize,
    /// Experts with rows, in ascending order.
    pub(super) groups: Vec<Group>,
    /// The row of each assignment.
    pub(super) row: Vec<u32>,
    /// The place of each assignment in the flattened `[real rows, top_k]`.
    pub(super) slot: Arc<[u32]>,
}

/// One expert's assignments.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub(super) expert: usize,
    pub(super) range: Range<usize>,
}

impl Dispatch {
    /// From the chosen experts of every real row, `[real rows, top_k]` flattened.
    pub fn new(real: &RealRows, top_k: usize, experts: usize, chosen_rk: &[u32]) -> Result<Self> {
        if chosen_rk.len() != real.len() * top_k {
            bail!("{} chosen experts for {} rows with {top_k} each", chosen_rk.len(), real.len());
        }
        if let Some(expert) = chosen_rk.iter().find(|&&expert| expert as usize >= experts) {
            bail!("expert {expert} was chosen; there are {experts}");
        }
        let mut counts = vec![0; experts];
        chosen_rk.iter().for_each(|&expert| counts[expert as usize] += 1);
        let mut groups = Vec::new();
        let mut next = vec![0; experts];
        let mut end = 0;
        for (expert, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            next[expert] = end;
            groups.push(Group { expert, range: end..end + count });
            end += count;
        }
        let (mut row, mut slot) = (vec![0; end], vec![0; end]);
        for (place, &expert) in chosen_rk.iter().enumerate() {
            let at = &mut next[expert as usize];
            row[*at] = real.row(place / top_k);
            slot[*at] = place as u32;
            *at += 1;
        }
        Ok(Self { rows: real.total(), real: real.len(), top_k, experts, groups, row, slot: slot.into() })
    }

    /// Experts that have rows.
    pub fn busy_experts(&self) -> usize {
        self.groups.len()
    }

    /// Number of assignments.
    pub(super) fn len(&self) -> usize {
        self.row.len()
    }
}
