//! An optimizer whose state is spread over ranks (ZeRO, stage 1): each moves its own elements of the parameters and hands
//! them to the others.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use candle_cp::Communicator;
use candle_cp::comm::{Expected, Gathering, Tag, Traffic, share};

use super::state::{self, Entry, MASTER, MEAN, SQUARE};
use super::{AdamW, AdamWConfig, needs_master, part_of, state_dtype, write};
use crate::buckets::{Bucket, Buckets, ON_THE_WAY};
use crate::error::Result;
use crate::gradients::Gradients;

/// The state of this rank's elements. The shares of all ranks are equal but for an element of each bucket, so that none has
/// more to keep or to do than the others.
///
/// In a file it looks like the state of one rank: any number of ranks may go on with it.
#[derive(Debug)]
pub struct Spread {
    comm: Arc<dyn Communicator>,
    buckets: Arc<Buckets>,
    variables: BTreeMap<String, Var>,
    own: AdamW,
}

/// Says that no further tensor is asked for.
const NO_MORE: i64 = -1;

impl Spread {
    pub(crate) fn new(
        comm: Arc<dyn Communicator>,
        buckets: Arc<Buckets>,
        variables: &BTreeMap<String, Var>,
        config: AdamWConfig,
    ) -> Result<Self> {
        let own = AdamW::of_own(variables, &buckets.owned(comm.size(), comm.rank()), config)?;
        Ok(Self { comm, buckets, variables: variables.clone(), own })
    }

    /// From a file that [`AdamW::save`] or [`Spread::save`] wrote, on any number of ranks.
    pub(crate) fn load(
        comm: Arc<dyn Communicator>,
        buckets: Arc<Buckets>,
        variables: &BTreeMap<String, Var>,
        config: AdamWConfig,
        path: &Path,
    ) -> Result<Self> {
        let own = AdamW::load_own(variables, &buckets.owned(comm.size(), comm.rank()), config, path)?;
        Ok(Self { comm, buckets, variables: variables.clone(), own })
    }

    /// This rank's part.
    pub fn own(&self) -> &AdamW {
        &self.own
    }

    /// Moves this rank's elements, whose gradients are given, and gets the others from their ranks. All ranks call it and
    /// end with the same bits.
    ///
    /// # Errors
    /// A tensor operation or an exchange with another rank failed.
    pub fn step(&mut self, gradients: &Gradients, rate: f64) -> Result<()> {
        self.own.step(gradients, rate)?;
        let (rank, size) = (self.comm.rank(), self.comm.size());
        let mut on_the_way = VecDeque::new();
        for bucket in self.buckets.all() {
            if on_the_way.len() == ON_THE_WAY {
                self.take_in(on_the_way.pop_front().expect("there are some"))?;
            }
            let parts = bucket.parts(share(bucket.count, size, rank)).map(|(name, range, _)| self.part(name, &range));
            let flat = match parts.collect::<Result<Vec<_>>>()?.as_slice() {
                [] => Tensor::zeros(0, bucket.dtype, &self.device())?,
                // A copy: the memory of the parameter changes while other ranks may still read what was sent.
                [one] => one.force_contiguous()?,
                parts => Tensor::cat(parts, 0)?,
            };
            on_the_way.push_back((bucket, self.comm.start_all_gather(&flat, 0, Traffic::Gather)?));
        }
        on_the_way.into_iter().try_for_each(|gathered| self.take_in(gathered))
    }

    /// Waits for the elements of other ranks.
    fn take_in(&self, (bucket, gathering): (&Bucket, Gathering)) -> Result<()> {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        for (owner, flat) in gathering.finish()?.iter().enumerate().filter(|(owner, _)| *owner != rank) {
            for (name, range, place) in bucket.parts(share(bucket.count, size, owner)) {
                write(&self.part(name, &range)?, &flat.narrow(0, place.start, place.len())?)?;
            }
        }
        Ok(())
    }

    fn part(&self, name: &str, range: &Range<usize>) -> Result<Tensor> {
        part_of(&self.variables[name], Some(range))
    }

    fn device(&self) -> Device {
        self.variables.values().next().map_or(Device::Cpu, |var| var.device().clone())
    }

    /// Writes the state of all ranks from rank 0, tensor by tensor, while the others [serve](Self::serve) their parts until
    /// rank 0 [says](Self::saved) that it is done.
    ///
    /// # Errors
    /// The file cannot be written, or another rank failed.
    pub fn save(&self, path: &Path) -> Result<()> {
        let tensors = self.tensors();
        let entry = |(place, (prefix, name)): (usize, &(&'static str, String))| {
            let var = &self.variables[name];
            let make = move || self.collect(place);
            (format!("{prefix}{name}"), Entry::new(state_dtype(var.dtype()), var.dims(), make))
        };
        let mut entries: BTreeMap<String, Entry> = tensors.iter().enumerate().map(entry).collect();
        entries.extend([self.own.steps_entry()?]);
        state::write(path, &entries)
    }

    /// Rank 0: ends the [`Spread::serve`] of the others.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn saved(&self) -> Result<()> {
        self.next(NO_MORE).map(|_| ())
    }

    /// The other ranks: hands rank 0 what it asks for.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn serve(&self) -> Result<()> {
        loop {
            match usize::try_from(self.next(NO_MORE)?) {
                Ok(place) => drop(self.collect_at(place)?),
                Err(_) => return Ok(()),
            }
        }
    }

    /// What rank 0 wants next.
    fn next(&self, wanted: i64) -> Result<i64> {
        Ok(self.comm.broadcast(&Tensor::new(&[wanted], &Device::Cpu)?, 0)?.to_vec1::<i64>()?[0])
    }

    /// All tensors of the state, the same list on every rank.
    fn tensors(&self) -> Vec<(&'static str, String)> {
        let of = |(name, var): (&String, &Var)| {
            let kinds = [MEAN, SQUARE].into_iter().chain(needs_master(var).then_some(MASTER));
            kinds.map(|kind| (kind, name.clone())).collect::<Vec<_>>()
        };
        self.variables.iter().flat_map(of).collect()
    }

    /// Rank 0: one tensor of the state, whole.
    fn collect(&self, place: usize) -> Result<Tensor> {
        self.next(place as i64)?;
        Ok(self.collect_at(place)?.expect("rank 0 collects"))
    }

    /// Every rank: its part goes to rank 0, which has the whole tensor then.
    fn collect_at(&self, place: usize) -> Result<Option<Tensor>> {
        let (kind, name) = &self.tensors()[place];
        let mine = self.own.slots.get(name).and_then(|slot| slot.moments.kinds().find(|(other, _)| other == kind));
        let mine = mine.map(|(_, tensor)| tensor.clone());
        let tag = Tag { traffic: Traffic::Gather, call: self.comm.next_call(), step: place };
        if self.comm.rank() > 0 {
            if let Some(part) = mine {
                self.comm.exchange(tag, Some((0, part)), None)?.wait()?;
            }
            return Ok(None);
        }
        let var = &self.variables[name];
        let whole = Tensor::zeros(var.elem_count(), state_dtype(var.dtype()), var.device())?;
        let of = |rank: usize| self.range_of(name, rank);
        if let (Some(part), Some(range)) = (mine, of(0)) {
            whole.slice_set(&part, 0, range.start)?;
        }
        for from in 1..self.comm.size() {
            let Some(range) = of(from) else { continue };
            let expected = Expected { from, shape: Some(vec![range.len()]), dtype: whole.dtype() };
            let received = self.comm.exchange(tag, None, Some(expected))?.wait()?.expect("a message was expected");
            whole.slice_set(&received.tensor.to_device(whole.device())?, 0, range.start)?;
        }
        Ok(Some(whole.reshape(var.shape())?))
    }

    /// What a rank has of a parameter.
    fn range_of(&self, name: &str, rank: usize) -> Option<Range<usize>> {
        let of_bucket = |bucket: &Bucket| {
            let found = bucket.parts(share(bucket.count, self.comm.size(), rank)).find(|(other, ..)| *other == name);
            found.map(|(_, range, _)| range)
        };
        self.buckets.all().iter().find_map(of_bucket)
    }
}

#[cfg(test)]
mod tests {
    use candle_cp::comm::threads;

    use super::*;

    /// Each share lies within one parameter, whose memory the others must not be handed: they write to theirs meanwhile.
    #[test]
    fn ranks_that_write_do_not_wait_for_ranks_that_read() -> Result<()> {
        let ends = threads::run(3, &threads::Options::default(), |comm| {
            let var = Var::from_vec((0..96).map(|i| i as f32).collect(), (12, 8), &Device::Cpu)?;
            let variables = BTreeMap::from([("w".to_string(), var.clone())]);
            let buckets = Arc::new(Buckets::new(&variables, |_| None));
            let mut spread = Spread::new(comm.clone(), buckets.clone(), &variables, AdamWConfig::default())?;
            for step in 0..2000 {
                let own = buckets.owned(3, comm.rank());
                let gradient = |range: &Range<usize>| Tensor::full(1.0 + step as f32, range.len(), &Device::Cpu);
                let gradients = own.iter().map(|(name, range)| Ok((name.clone(), gradient(range)?)));
                let gradients = Gradients::from_named(gradients.collect::<candle_core::Result<_>>()?);
                spread.step(&gradients, 1e-3)?;
            }
            Ok::<_, crate::Error>(var.flatten_all()?.to_vec1::<f32>()?)
        })?;
        assert!(ends[0] == ends[1] && ends[1] == ends[2]);
        // Equal gradients move all numbers alike, but for what weight decay takes.
        let moved = |i: usize| i as f32 - ends[0][i];
        assert!((1..96).all(|i| moved(i) > moved(0)) && moved(0) > 1.0);
        Ok(())
    }
}
