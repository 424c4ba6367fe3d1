//! Gradients of one step on their way to sums over all ranks, bucket by bucket.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, TensorId, Var};
use candle_cp::Communicator;
use candle_cp::comm::{Reducing, Traffic, share};
use candle_cp_layers::GradientSink;

use crate::buckets::{Bucket, Buckets, ON_THE_WAY};
use crate::error::Result;
use crate::gradients::{Gradients, sum_of_squares};
use crate::optimizer::state_dtype;

/// Gradients of one step on one rank. A bucket's sum begins when backward is through with its layers, if these are
/// recomputed, and otherwise at the end.
#[derive(Debug)]
pub(crate) struct Sums {
    /// Only for this; other messages may be on their way meanwhile.
    comm: Arc<dyn Communicator>,
    buckets: Arc<Buckets>,
    traffic: Traffic,
    device: Device,
    /// By the tensor of the parameter.
    names: HashMap<TensorId, (String, DType)>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// This rank's gradients that no sum has taken yet.
    gradients: BTreeMap<String, Tensor>,
    /// Sums that have begun.
    begun: usize,
    on_the_way: VecDeque<Reducing>,
    shares: Vec<Tensor>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} sums have begun", self.begun)
    }
}

impl Sums {
    /// Nothing yet. `traffic` is what the sums are counted as.
    pub fn new(
        comm: Arc<dyn Communicator>,
        buckets: Arc<Buckets>,
        variables: &BTreeMap<String, Var>,
        traffic: Traffic,
        device: &Device,
    ) -> Self {
        let id = |(name, var): (&String, &Var)| (var.as_tensor().id(), (name.clone(), state_dtype(var.dtype())));
        let (names, device) = (variables.iter().map(id).collect(), device.clone());
        Self { comm, buckets, traffic, device, names, state: Mutex::default() }
    }

    /// Adds what one backward pass gave for `variables`.
    pub fn add(&self, store: &GradStore, variables: &BTreeMap<String, Var>) -> Result<()> {
        for var in variables.values() {
            if let Some(gradient) = store.get(var.as_tensor()) {
                self.add_one(&mut self.lock(), var.as_tensor(), gradient.clone())?;
            }
        }
        Ok(())
    }

    fn add_one(&self, state: &mut State, weight: &Tensor, gradient: Tensor) -> candle_core::Result<()> {
        // Backward also comes to leaves that are no parameters.
        let Some((name, dtype)) = self.names.get(&weight.id()) else { return Ok(()) };
        let gradient = gradient.to_dtype(*dtype)?;
        let sum = match state.gradients.remove(name) {
            Some(sum) => (sum + gradient)?,
            None => gradient,
        };
        state.gradients.insert(name.clone(), sum);
        Ok(())
    }

    /// Begins the sum of the next bucket.
    fn begin(&self, state: &mut State) -> Result<()> {
        if state.on_the_way.len() == ON_THE_WAY {
            self.take_in(state)?;
        }
        let bucket = &self.buckets.all()[state.begun];
        let gradients = &mut state.gradients;
        let flat = bucket.flat(state_dtype(bucket.dtype), &self.device, |name| gradients.remove(name))?;
        state.on_the_way.push_back(self.comm.start_reduce_scatter(&flat, self.traffic)?);
        state.begun += 1;
        Ok(())
    }

    /// Waits for the sum that began first.
    fn take_in(&self, state: &mut State) -> Result<()> {
        let first = state.on_the_way.pop_front().expect("one is on its way");
        state.shares.push(first.finish()?);
        Ok(())
    }

    /// This rank's shares of all sums. Every rank has to call it.
    pub fn finish(&self) -> Result<Shares> {
        let mut state = self.lock();
        while state.begun < self.buckets.all().len() {
            self.begin(&mut state)?;
        }
        while !state.on_the_way.is_empty() {
            self.take_in(&mut state)?;
        }
        let late: Vec<_> = state.gradients.keys().collect();
        assert!(late.is_empty(), "gradients came behind the sums of their layers: {late:?}");
        let shares = std::mem::take(&mut state.shares);
        Ok(Shares { comm: self.comm.clone(), buckets: self.buckets.clone(), shares })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the gradients of one backward pass layer by layer.
#[derive(Debug)]
pub(crate) struct Layers {
    /// Where they go.
    pub sums: Arc<Sums>,
    /// No other pass of the step comes after it, so that a layer's sum can begin.
    pub last: bool,
}

impl GradientSink for Layers {
    fn take(&self, layer: usize, gradients: Vec<(Tensor, Tensor)>) -> candle_cp::Result<()> {
        let mut state = self.sums.lock();
        for (weight, gradient) in gradients {
            self.sums.add_one(&mut state, &weight, gradient)?;
        }
        if self.last { self.sums.begin_above(&mut state, layer) } else { Ok(()) }
    }
}

impl Sums {
    /// Begins the sums of all layers above one.
    fn begin_above(&self, state: &mut State, layer: usize) -> candle_cp::Result<()> {
        let done = |bucket: &Bucket| bucket.layer.is_some_and(|of| of > layer);
        while self.buckets.all().get(state.begun).is_some_and(done) {
            self.begin(state).map_err(|error| match error {
                crate::Error::Cp(error) => error,
                other => candle_core::Error::wrap(other).into(),
            })?;
        }
        Ok(())
    }
}

/// This rank's share of the sum of each bucket, in one dimension.
#[derive(Debug, Clone)]
pub(crate) struct Shares {
    comm: Arc<dyn Communicator>,
    buckets: Arc<Buckets>,
    shares: Vec<Tensor>,
}

impl Shares {
    /// Root of the sum of all squares over all ranks, in f64; each element counts once. The same bits on every rank.
    pub fn norm(&self) -> Result<f64> {
        let Some(first) = self.shares.first() else { return Ok(0.0) };
        // Read back once: each reading waits for the device.
        let mut total = Tensor::zeros((), DType::F64, first.device())?;
        for share in &self.shares {
            total = (total + sum_of_squares(share)?)?;
        }
        Ok(self.comm.all_reduce_sum(&total.reshape(1)?)?.to_vec1::<f64>()?[0].sqrt())
    }

    /// Scales all gradients by the same factor so that their norm is at most `max_norm`; `norm` is what [`Shares::norm`]
    /// gave.
    pub fn clip(self, norm: f64, max_norm: f64) -> Result<Self> {
        if norm <= max_norm {
            return Ok(self);
        }
        let factor = max_norm / norm;
        let shares = self.shares.into_iter().map(|share| Ok((share * factor)?)).collect::<Result<_>>()?;
        Ok(Self { shares, ..self })
    }

    /// What this rank has of each parameter's gradient.
    pub fn own(&self) -> Result<Gradients> {
        let mut own = BTreeMap::new();
        for (bucket, values) in self.buckets.all().iter().zip(&self.shares) {
            let elements = share(bucket.count, self.comm.size(), self.comm.rank());
            for (name, _, place) in bucket.parts(elements) {
                own.insert(name.to_string(), values.narrow(0, place.start, place.len())?);
            }
        }
        Ok(Gradients::from_named(own))
    }

    /// The whole gradients of `variables`, which every rank gets. Every rank has to call it.
    pub fn whole(&self, variables: &BTreeMap<String, Var>) -> Result<Gradients> {
        let gather = |share: &Tensor| self.comm.start_all_gather(share, 0, Traffic::AllReduce);
        let on_the_way = self.shares.iter().map(gather).collect::<candle_cp::Result<Vec<_>>>()?;
        let mut whole = BTreeMap::new();
        for (bucket, gathering) in self.buckets.all().iter().zip(on_the_way) {
            let flat = Tensor::cat(&gathering.finish()?, 0)?;
            for (name, place) in &bucket.parameters {
                let gradient = flat.narrow(0, place.start, place.len())?.reshape(variables[name].shape())?;
                whole.insert(name.clone(), gradient);
            }
        }
        Ok(Gradients::from_named(whole))
    }

    /// The first parameter, in name order, whose gradient has an entry that is not finite on any rank, and
    /// that entry. Every rank has to call it.
    pub fn not_finite(&self) -> Result<Option<(String, f64)>> {
        let own = self.own()?;
        let mut names: Vec<&str> =
            self.buckets.all().iter().flat_map(|bucket| &bucket.parameters).map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        let place = |name: &str| names.binary_search(&name).expect("all parameters are listed");
        let found = own.not_finite()?.map_or([f64::INFINITY, 0.0], |(name, value)| [place(name) as f64, value]);
        let all = self.comm.all_gather(&Tensor::new(&found, &Device::Cpu)?)?;
        let all = all.iter().map(Tensor::to_vec1::<f64>).collect::<candle_core::Result<Vec<_>>>()?;
        let first = all.into_iter().filter(|found| found[0].is_finite()).min_by(|a, b| a[0].total_cmp(&b[0]));
        Ok(first.map(|found| (names[found[0] as usize].to_string(), found[1])))
    }
}
