//! Who needs which rows of whom, and how they travel.

use crate::comm::{Communicator, Expected, Tag, Traffic};
use crate::element::{Element, with_cpu_storage};
use crate::error::Result;
use crate::layout::SequenceLayout;
use crate::pieces::{self, Piece};
use crate::tokens::Tokens;
use candle_core::{Device, Tensor, WithDType};
use candle_cp_kernels::Real;
use std::collections::BTreeSet;

/// One piece of this rank's slice in one batch row.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Rows before it that its first tokens read.
    pub halo: usize,
    /// For every token, how many of those before it belong to its document, at most `K - 1`; `None` for padding.
    pub reach: Vec<Option<usize>>,
}

/// Where a row of a halo comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Source {
    owner: usize,
    /// Row of the owner's slice `[B S_local, C]`.
    row: usize,
}

/// An exchange with the ranks `distance` ahead and behind.
#[derive(Debug, PartialEq, Eq)]
struct Hop {
    distance: usize,
    /// Who gets which of this rank's rows.
    send: Message,
    /// Who sends which rows of this rank's halo.
    receive: Message,
}

/// The peer and the rows, one after the other; none if there are no rows.
type Message = Option<(usize, Vec<usize>)>;

/// The halos of one rank. All ranks compute matching ones.
#[derive(Debug)]
pub(crate) struct HaloPlan {
    runs: Vec<Run>,
    /// This rank's halo, run by run.
    halo: Vec<Source>,
    rank: usize,
    /// The distances at which any two ranks exchange something.
    hops: Vec<Hop>,
}

impl HaloPlan {
    pub fn new(layout: &SequenceLayout, tokens: &Tokens, rank: usize, taps: usize) -> Self {
        let pieces = pieces::pieces(layout);
        let halos: Vec<_> = (0..layout.ranks()).map(|r| halo(layout, tokens, &pieces, r, taps)).collect();
        Self { runs: runs(layout, tokens, rank, taps), halo: halos[rank].clone(), rank, hops: hops(&halos, rank) }
    }

    /// Rows sent and received at every hop.
    pub fn row_counts(&self) -> Vec<[usize; 2]> {
        let rows = |message: &Message| message.as_ref().map_or(0, |(_, rows)| rows.len());
        self.hops.iter().map(|hop| [rows(&hop.send), rows(&hop.receive)]).collect()
    }

    /// In the order of the batch rows, then of the local tokens.
    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The rows of the halo `[H, C]`, run by run, given this rank's `x` `[B S_local, C]`.
    pub fn fetch<T: Element>(&self, comm: &dyn Communicator, x: &[T], channels: usize) -> Result<Vec<T>> {
        let own = |row: usize| &x[row * channels..][..channels];
        let mut halo = vec![T::default(); self.halo.len() * channels];
        for (row, source) in halo.chunks_mut(channels).zip(&self.halo) {
            if source.owner == self.rank {
                row.copy_from_slice(own(source.row));
            }
        }
        let place = |row: usize, x: &[T]| halo[row * channels..][..channels].copy_from_slice(x);
        self.trade(comm, Traffic::Halo, |hop| (&hop.send, &hop.receive), channels, own, place)?;
        Ok(halo)
    }

    /// Adds the gradients of all halos in which this rank's rows are to `d_x` `[B S_local, C]`: first those of its own,
    /// `d_halo` `[H, C]`, then those of the ranks ahead, the nearest first.
    pub fn give_back<A: Real + WithDType>(
        &self,
        comm: &dyn Communicator,
        d_halo: &[A],
        d_x: &mut [A],
        channels: usize,
    ) -> Result<()> {
        let mut add = |row: usize, gradient: &[A]| {
            d_x[row * channels..][..channels].iter_mut().zip(gradient).for_each(|(sum, &x)| *sum += x);
        };
        for (gradient, source) in d_halo.chunks(channels).zip(&self.halo) {
            if source.owner == self.rank {
                add(source.row, gradient);
            }
        }
        let of = |row: usize| &d_halo[row * channels..][..channels];
        self.trade(comm, Traffic::HaloGradient, |hop| (&hop.receive, &hop.send), channels, of, add)
    }

    /// At every hop sends the rows of one message, as `row` gives them, and hands `each` those of the other.
    fn trade<'a, X: WithDType>(
        &self,
        comm: &dyn Communicator,
        traffic: Traffic,
        way: impl Fn(&Hop) -> (&Message, &Message),
        channels: usize,
        row: impl Fn(usize) -> &'a [X],
        mut each: impl FnMut(usize, &[X]),
    ) -> Result<()> {
        let call = comm.next_call();
        let mut posted = Vec::with_capacity(self.hops.len());
        // All of them before the first is waited for: they are small.
        for hop in &self.hops {
            let (out, back) = way(hop);
            let send = match out {
                Some((to, rows)) => {
                    let numbers: Vec<X> = rows.iter().flat_map(|&i| row(i)).copied().collect();
                    Some((*to, Tensor::from_vec(numbers, (rows.len(), channels), &Device::Cpu)?))
                }
                None => None,
            };
            let receive = back.as_ref().map(|(from, rows)| Expected {
                from: *from,
                shape: Some(vec![rows.len(), channels]),
                dtype: X::DTYPE,
            });
            posted.push((back, comm.exchange(Tag { traffic, call, step: hop.distance }, send, receive)?));
        }
        for (message, pending) in posted {
            let (Some((_, rows)), Some(received)) = (message, pending.wait()?) else { continue };
            let on_cpu = received.tensor.to_device(&Device::Cpu)?;
            with_cpu_storage(&on_cpu, |storage, layout| {
                let numbers = super::slice::<X>(storage, layout)?;
                rows.iter().zip(numbers.chunks(channels)).for_each(|(&row, x)| each(row, x));
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// How many tokens directly before the one at `index` belong to its document, at most `most`; `None` for padding.
fn reach(tokens: &Tokens, row: usize, index: usize, most: usize) -> Option<usize> {
    pieces::document(tokens, row, index)?;
    let steps = (1..=most.min(index)).take_while(|back| pieces::continues(tokens, row, index + 1 - back));
    Some(steps.count())
}

fn runs(layout: &SequenceLayout, tokens: &Tokens, rank: usize, taps: usize) -> Vec<Run> {
    let all = (0..tokens.batch()).flat_map(|row| layout.ranges(rank).iter().map(move |range| (row, range)));
    all.map(|(row, range)| {
        let first = reach(tokens, row, range.start, taps - 1);
        let mut last = first;
        let mut of = |index| {
            if index > range.start {
                last = match (pieces::continues(tokens, row, index), last) {
                    (true, Some(reach)) => Some((reach + 1).min(taps - 1)),
                    _ => pieces::document(tokens, row, index).map(|_| 0),
                };
            }
            last
        };
        Run { halo: first.unwrap_or(0), reach: range.clone().map(&mut of).collect() }
    })
    .collect()
}

/// Where the rows of a rank's halo are, in the order of its runs.
fn halo(layout: &SequenceLayout, tokens: &Tokens, pieces: &[Piece], rank: usize, taps: usize) -> Vec<Source> {
    let source = |row: usize, index: usize| {
        let piece = &pieces[pieces.partition_point(|piece| piece.global.end <= index)];
        let local = piece.local.start + index - piece.global.start;
        Source { owner: piece.owner, row: row * layout.local_len(piece.owner) + local }
    };
    let mut all = Vec::new();
    for row in 0..tokens.batch() {
        for range in layout.ranges(rank) {
            let count = reach(tokens, row, range.start, taps - 1).unwrap_or(0);
            all.extend((range.start - count..range.start).map(|index| source(row, index)));
        }
    }
    all
}

fn hops(halos: &[Vec<Source>], rank: usize) -> Vec<Hop> {
    let ranks = halos.len();
    let ahead = |needer: usize, owner: usize| (needer + ranks - owner) % ranks;
    let pairs = halos.iter().enumerate().flat_map(|(needer, halo)| halo.iter().map(move |s| (needer, s.owner)));
    let distances: BTreeSet<_> = pairs.map(|(needer, owner)| ahead(needer, owner)).filter(|&d| d > 0).collect();
    let message = |peer, rows: Vec<usize>| (!rows.is_empty()).then_some((peer, rows));
    let hop = |distance: usize| {
        let (to, from) = ((rank + distance) % ranks, (rank + ranks - distance) % ranks);
        let sent = halos[to].iter().filter(|source| source.owner == rank).map(|source| source.row);
        let received = halos[rank].iter().enumerate().filter(|(_, source)| source.owner == from).map(|(i, _)| i);
        Hop { distance, send: message(to, sent.collect()), receive: message(from, received.collect()) }
    };
    distances.into_iter().map(hop).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(documents: &[i64]) -> Tokens {
        Tokens::new(vec![documents.to_vec()], vec![vec![-1; documents.len()]]).expect("documents")
    }

    fn source(owner: usize, row: usize) -> Source {
        Source { owner, row }
    }

    #[test]
    fn pieces_shorter_than_the_halo_need_rows_of_several_ranks() {
        // Eight ranks, ten tokens: two each, the last three hold padding only.
        let layout = SequenceLayout::contiguous(10, 8).expect("a layout");
        let plan = |rank| HaloPlan::new(&layout, &tokens(&[0, 0, 0, 0, 0, 0, 0, 1, 1, 1]), rank, 4);
        assert_eq!(plan(2).halo, [source(0, 1), source(1, 0), source(1, 1)]);
        // Token 7 is the first of its document, and the second of rank 3.
        assert_eq!(plan(3).runs, [Run { halo: 3, reach: vec![Some(3), Some(0)] }]);
        assert_eq!(plan(4).runs, [Run { halo: 1, reach: vec![Some(1), Some(2)] }]);
        assert_eq!(plan(4).halo, [source(3, 1)]);
        assert_eq!(plan(5).runs, [Run { halo: 0, reach: vec![None, None] }]);
        let (one, two) = (plan(3).hops, plan(7).hops);
        assert_eq!(one[0], Hop { distance: 1, send: Some((4, vec![1])), receive: Some((2, vec![1, 2])) });
        assert_eq!(one[1], Hop { distance: 2, send: None, receive: Some((1, vec![0])) });
        // Every rank enters the same exchanges.
        assert_eq!(two.iter().map(|hop| hop.distance).collect::<Vec<_>>(), [1, 2]);
        assert!(two.iter().all(|hop| hop.send.is_none() && hop.receive.is_none()));
    }

    #[test]
    fn a_rank_is_its_own_neighbour() {
        let layout = SequenceLayout::from_ranges(6, vec![vec![4..6, 0..3], vec![3..4]]).expect("a layout");
        let plan = HaloPlan::new(&layout, &Tokens::single_document(2, 6), 0, 3);
        // In its slice of 5 tokens, token 2 is at place 4; token 3 belongs to rank 1.
        assert_eq!(plan.halo, [source(0, 4), source(1, 0), source(0, 9), source(1, 1)]);
        assert_eq!(plan.hops, [Hop { distance: 1, send: Some((1, vec![3, 4, 8, 9])), receive: Some((1, vec![1, 3])) }]);
    }
}
