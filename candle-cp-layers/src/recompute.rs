//! Recomputation: a part of the graph that is thrown away after forward and run again in backward.
//!
//! Candle has no hook for this, so the part is one operator. Forward runs it outside of the graph and keeps its inputs
//! only. Backward runs it again on fresh leaves, seeds that small graph with the incoming gradient and hands on the
//! gradients of the inputs; those of the weights inside, which the operator does not know as inputs, are collected and
//! joined with the rest afterwards. Sums have the order that they have without recomputation, so gradients have the
//! same bits (but for a weight that several parts share).

use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_cp::with_backward;

use crate::error::{Error, Result};

/// Whether a forward pass keeps what happens inside its decoder layers, or runs them again in backward.
///
/// One value belongs to one loss: pass it to the `decode_with` of a model, then call
/// [`Recompute::backward`] in place of the loss's own. A clone shares what was collected.
///
/// Every rank has to make the same choice: a layer that runs again exchanges its keys and values again.
#[derive(Debug, Clone)]
pub struct Recompute {
    /// `None` if it is off.
    collected: Option<Arc<Mutex<Collected>>>,
    sink: Option<Arc<dyn GradientSink>>,
    /// The decoder layer that parts belong to from here on.
    layer: Option<usize>,
}

/// Takes gradients of weights while backward goes on.
pub trait GradientSink: std::fmt::Debug + Send + Sync {
    /// Backward is through with all recomputed layers above `layer`, counted from 0. `gradients` are weights inside of them
    /// with their gradients, those that were not taken before; a weight may come several times, for a sum, and one that had
    /// no part in forward does not come. What is taken is not in the result of [`Recompute::backward`] any more.
    ///
    /// All ranks come here in the same order, with the same layers.
    ///
    /// # Errors
    /// Ends backward.
    fn take(&self, layer: usize, gradients: Vec<(Tensor, Tensor)>) -> candle_cp::Result<()>;
}

/// What backward leaves beside Candle's own store.
#[derive(Debug, Default)]
struct Collected {
    /// Weights and their gradients, in the order in which backward came to them.
    gradients: Vec<(Tensor, Tensor)>,
    /// The lowest layer that backward has come to.
    lowest: Option<usize>,
    /// The first failure inside of a part, before Candle's error type took its kind away.
    error: Option<Error>,
}

/// What runs again: from as many inputs as it has been given.
type Stage = dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync;

impl Recompute {
    /// Layers run again in backward; only their inputs are kept.
    pub fn on() -> Self {
        Self { collected: Some(Arc::default()), sink: None, layer: None }
    }

    /// As [`Recompute::on`], and gradients are given away layer by layer.
    pub fn into_sink(sink: Arc<dyn GradientSink>) -> Self {
        Self { sink: Some(sink), ..Self::on() }
    }

    /// Everything is kept; backward is Candle's own.
    pub fn off() -> Self {
        Self { collected: None, sink: None, layer: None }
    }

    /// For the parts of a decoder layer, counted from 0. All of its parts have to lie, in the graph, behind all parts of the
    /// layers below.
    #[must_use]
    pub fn of_layer(&self, layer: usize) -> Self {
        Self { layer: Some(layer), ..self.clone() }
    }

    /// The gradients of `loss`, of recomputed parts as well.
    ///
    /// # Errors
    /// A tensor operation or an exchange with another rank failed.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        let Some(collected) = &self.collected else { return Ok(loss.backward()?) };
        *lock(collected) = Collected::default();
        let done = loss.backward();
        let Collected { gradients, error, .. } = take(&mut *lock(collected));
        if let Some(error) = error {
            return Err(error);
        }
        let mut store = done?;
        for (weight, gradient) in gradients {
            let sum = match store.remove(&weight) {
                Some(other) => (other + gradient)?,
                None => gradient,
            };
            store.insert(&weight, sum);
        }
        Ok(store)
    }

    /// Runs a part of the model on `N` inputs, one to three of them: hidden states, keys and values of an earlier layer. `part` must do the same each time that it runs:
    /// with recomputation on it runs twice, the second time with its inputs as leaves of a graph of its own.
    pub fn run<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        part: impl Fn([&Tensor; N]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        self.run_in_two(inputs, |_| Ok(Vec::new()), move |inputs, _| part(inputs))
    }

    /// As [`Recompute::run`], for a part in two stages: `second` gets the inputs and what `first` makes of them.
    /// Backward holds the graph of one stage at a time, for which `first` runs once more.
    pub fn run_in_two<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        first: impl Fn([&Tensor; N]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
        second: impl Fn([&Tensor; N], &[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let Some(collected) = &self.collected else { return second(inputs, &first(inputs)?) };
        let detached = inputs.map(Tensor::detach);
        let output = second(detached.each_ref(), &first(detached.each_ref())?)?.detach();
        let mut inputs = inputs.map(Tensor::clone);
        if !inputs[0].track_op() {
            // The weights inside need backward to come here, even if no input leads to anything that is trained.
            inputs[0] = Var::from_tensor(&inputs[0])?.as_tensor().clone();
        }
        let part = Recomputed {
            first: Box::new(move |inputs| first(std::array::from_fn(|i| &inputs[i]))),
            second: Box::new(move |inputs| Ok(vec![second(std::array::from_fn(|i| &inputs[i]), &inputs[N..])?])),
            collected: collected.clone(),
            sink: self.sink.clone().zip(self.layer),
        };
        let backward = move |inputs: [&Tensor; N], grad: &Tensor| {
            let mut gradients = part.backward(&inputs, grad)?.into_iter();
            Ok(std::array::from_fn(|_| gradients.next()))
        };
        Ok(with_backward("recomputed", inputs.each_ref(), output, backward)?)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part whose output was computed outside of the graph.
struct Recomputed {
    first: Box<Stage>,
    /// Gets the inputs and then what `first` made.
    second: Box<Stage>,
    collected: Arc<Mutex<Collected>>,
    /// Who is told of the layer that this part belongs to.
    sink: Option<(Arc<dyn GradientSink>, usize)>,
}

impl Recomputed {
    /// Gradients of the inputs, in their order.
    fn backward(&self, inputs: &[&Tensor], grad: &Tensor) -> candle_core::Result<Vec<Tensor>> {
        self.checked(self.tell_sink())?;
        let inputs: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
        let middle = self.checked((self.first)(&inputs))?;
        let has_first = !middle.is_empty();
        let given = inputs.iter().cloned().chain(middle.into_iter().map(|x| x.detach()));
        let mut of_inputs = self.pull(&self.second, leaves(given)?, vec![grad.clone()])?;
        if has_first {
            let of_middle = of_inputs.split_off(inputs.len());
            let through_first = self.pull(&self.first, leaves(inputs.into_iter())?, of_middle)?;
            let sums = of_inputs.iter().zip(&through_first).map(|(direct, through)| direct + through);
            of_inputs = sums.collect::<candle_core::Result<_>>()?;
        }
        Ok(of_inputs)
    }

    /// Gives away what the layers above have left, at the first part of a layer.
    fn tell_sink(&self) -> Result<()> {
        let Some((sink, layer)) = &self.sink else { return Ok(()) };
        let mut collected = lock(&self.collected);
        match collected.lowest.replace(*layer) {
            Some(lowest) if lowest == *layer => return Ok(()),
            Some(lowest) => assert!(*layer < lowest, "backward came from layer {lowest} back to layer {layer}"),
            None => {}
        }
        let gradients = take(&mut collected.gradients);
        drop(collected);
        Ok(sink.take(*layer, gradients)?)
    }

    /// Runs a stage on leaves and backward through it from the gradients of its outputs. Returns the gradients of the
    /// leaves; those of the weights are collected.
    fn pull(&self, stage: &Stage, leaves: Vec<Tensor>, grads: Vec<Tensor>) -> candle_core::Result<Vec<Tensor>> {
        let outputs = self.checked(stage(&leaves))?;
        let seeds = outputs.iter().zip(grads).map(|(output, grad)| seed(output, grad));
        let root = seeds.reduce(|sum, seed| sum? + seed?).expect("a stage that is pulled has outputs")?;
        drop(outputs);
        let mut store = root.backward()?;
        let of_leaf = |leaf: &Tensor| store.remove(leaf).map_or_else(|| leaf.zeros_like(), Ok);
        let of_leaves = leaves.iter().map(of_leaf).collect::<candle_core::Result<_>>()?;
        let weights = root.sorted_nodes().into_iter().filter(|node| node.is_variable());
        let gradients = weights.filter_map(|weight| Some((weight.clone(), store.remove(weight)?)));
        lock(&self.collected).gradients.extend(gradients);
        Ok(of_leaves)
    }

    /// Keeps an error for [`Recompute::backward`], as Candle's type only takes its text.
    fn checked<T>(&self, done: Result<T>) -> candle_core::Result<T> {
        done.map_err(|error| {
            let text = candle_core::Error::msg(&error);
            lock(&self.collected).error.get_or_insert(error);
            text
        })
    }
}

/// Each as the start of a new graph; the originals go one by one.
fn leaves(tensors: impl Iterator<Item = Tensor>) -> candle_core::Result<Vec<Tensor>> {
    tensors.map(|x| Ok(Var::from_tensor(&x)?.as_tensor().clone())).collect()
}

/// A scalar whose gradient with respect to `output` is `grad`. It has one type whatever the output's: those of a stage are
/// summed.
fn seed(output: &Tensor, grad: Tensor) -> candle_core::Result<Tensor> {
    let scalar = Tensor::zeros((), DType::F32, output.device())?;
    with_backward("seed", [output], scalar, move |_, _| Ok([Some(grad.clone())]))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::fused::testing::random;

    fn var(dims: &[usize], seed: u64) -> candle_core::Result<Tensor> {
        Ok(Var::from_tensor(&random(dims, DType::F32, seed)?)?.as_tensor().clone())
    }

    fn bits(x: &Tensor) -> candle_core::Result<Vec<u32>> {
        Ok(x.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
    }

    /// A weight that two parts and the code between them use, a part with three inputs, and one whose input leads to
    /// nothing that is trained.
    fn gradients(recompute: &Recompute, weights: &[Tensor; 3]) -> Result<Vec<Vec<u32>>> {
        let [w, v, u] = weights.clone();
        let start = random(&[4, 5], DType::F32, 9)?;
        let inside = w.clone();
        let x = recompute.run([&start], move |[x]| Ok((x.matmul(&inside)?.tanh()? * 0.7)?))?;
        let x = x.matmul(&w)?;
        let (key, value) = (x.narrow(0, 0, 2)?, (&x.narrow(0, 2, 2)? * &v)?);
        let (inside, other) = (w.clone(), u.clone());
        let first = move |[x, _, value]: [&Tensor; 3]| Ok(vec![x.matmul(&inside)?.narrow(0, 1, 2)?, (value * &other)?]);
        let y = recompute.run_in_two([&x, &key, &value], first, |[x, key, value], middle| {
            let mixed = (middle[0].mul(key)? + &middle[1])?;
            Ok(((mixed + value.sqr()?)? * x.narrow(0, 0, 2)?)?)
        })?;
        let loss = (y.sqr()?.sum_all()? + w.sqr()?.sum_all()?)?;
        let store = recompute.backward(&loss)?;
        let gradient = |weight: &Tensor| bits(store.get(weight).expect("every weight is used"));
        Ok(weights.iter().map(gradient).collect::<candle_core::Result<_>>()?)
    }

    #[test]
    fn gradients_have_the_same_bits() -> Result<()> {
        let weights = [var(&[5, 5], 1)?, var(&[2, 5], 2)?, var(&[2, 5], 3)?];
        let recompute = Recompute::on();
        let found = gradients(&recompute, &weights)?;
        // The shared weight has four gradients, which recomputation adds in another order.
        let plain = gradients(&Recompute::off(), &weights)?;
        assert_eq!(found[1..], plain[1..]);
        let close = |(a, b): (&u32, &u32)| {
            let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
            (a - b).abs() <= 1e-5 * a.abs().max(1.0)
        };
        assert!(found[0].iter().zip(&plain[0]).all(close), "{found:?} {plain:?}");
        assert_eq!(gradients(&recompute, &weights)?, found, "a value can be used again");
        Ok(())
    }

    #[test]
    fn what_passes_between_stages_may_have_several_types() -> Result<()> {
        let w = Var::from_tensor(&random(&[3, 3], DType::BF16, 1)?)?.as_tensor().clone();
        let x = random(&[2, 3], DType::BF16, 2)?;
        let gradient = |recompute: Recompute| {
            let inside = w.clone();
            let first = move |[x]: [&Tensor; 1]| {
                let short = x.matmul(&inside)?;
                Ok(vec![short.to_dtype(DType::F64)?.exp()?, short.sqr()?])
            };
            let y = recompute.run_in_two([&x], first, |[x], middle| {
                Ok((x.to_dtype(DType::F64)? * (&middle[0] + middle[1].to_dtype(DType::F64)?)?)?)
            })?;
            let store = recompute.backward(&y.sum_all()?)?;
            Ok::<_, Error>(bits(&store.get(&w).expect("used").to_dtype(DType::F32)?)?)
        };
        assert_eq!(gradient(Recompute::on())?, gradient(Recompute::off())?);
        Ok(())
    }

    #[test]
    fn only_inputs_are_kept_and_the_part_runs_twice() -> Result<()> {
        let runs = Arc::new(Mutex::new(Vec::new()));
        let (w, x) = (var(&[3, 3], 1)?, var(&[2, 3], 2)?);
        let recompute = Recompute::on();
        let (log, inside) = (runs.clone(), w.clone());
        let y = recompute.run([&x], move |[x]| {
            lock(&log).push(x.track_op());
            Ok(x.matmul(&inside)?)
        })?;
        assert_eq!(*lock(&runs), [false]);
        let nodes = y.sorted_nodes();
        assert_eq!(nodes.iter().map(|node| node.id()).collect::<Vec<_>>(), [y.id(), x.id()]);
        let store = recompute.backward(&y.sum_all()?)?;
        assert_eq!(*lock(&runs), [false, true]);
        let ones = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
        assert_eq!(bits(store.get(&w).expect("collected"))?, bits(&x.detach().t()?.matmul(&ones)?)?);
        Ok(())
    }

    /// The layer, and the gradients of weights.
    type Taken = (usize, Vec<(Tensor, Tensor)>);

    /// Notes what it takes; fails at a layer.
    #[derive(Debug, Default)]
    struct Noting {
        taken: Mutex<Vec<Taken>>,
        fails_at: Option<usize>,
    }

    impl GradientSink for Noting {
        fn take(&self, layer: usize, gradients: Vec<(Tensor, Tensor)>) -> candle_cp::Result<()> {
            lock(&self.taken).push((layer, gradients));
            match self.fails_at {
                Some(at) if at == layer => {
                    let (rank, operation) = (1, "a sum".to_string());
                    Err(candle_cp::Error::PeerLeft { rank, operation, peer: 2 })
                }
                _ => Ok(()),
            }
        }
    }

    /// Three layers of two parts each, each with a weight; the loss after `recompute.backward`.
    fn layered(recompute: &Recompute, weights: &[Tensor]) -> Result<GradStore> {
        let mut x = random(&[2, 3], DType::F32, 5)?;
        for (place, weight) in weights.iter().enumerate() {
            let weight = weight.clone();
            x = recompute.of_layer(place / 2).run([&x], move |[x]| Ok((x.matmul(&weight)?.tanh()? + x)?))?;
        }
        recompute.backward(&x.sqr()?.sum_all()?)
    }

    #[test]
    fn gradients_are_given_away_layer_by_layer() -> Result<()> {
        let weights: Vec<Tensor> = (0..6).map(|seed| var(&[3, 3], seed)).collect::<candle_core::Result<_>>()?;
        let whole = layered(&Recompute::on(), &weights)?;
        let sink = Arc::new(Noting::default());
        let rest = layered(&Recompute::into_sink(sink.clone()), &weights)?;
        let taken = take(&mut *lock(&sink.taken));
        let layers: Vec<(usize, usize)> = taken.iter().map(|(layer, gradients)| (*layer, gradients.len())).collect();
        assert_eq!(layers, [(2, 0), (1, 2), (0, 2)]);
        for (place, weight) in weights.iter().enumerate() {
            let given = taken.iter().flat_map(|(_, gradients)| gradients).find(|(of, _)| of.id() == weight.id());
            let found = given.map(|(_, gradient)| gradient).or(rest.get(weight)).expect("each has a gradient");
            assert_eq!((given.is_none(), rest.get(weight).is_some()), (place < 2, place < 2), "weight {place}");
            assert_eq!(bits(found)?, bits(whole.get(weight).expect("used"))?);
        }
        let sink = Arc::new(Noting { fails_at: Some(1), ..Noting::default() });
        let error = layered(&Recompute::into_sink(sink), &weights).unwrap_err();
        assert!(matches!(error, Error::Cp(candle_cp::Error::PeerLeft { peer: 2, .. })), "{error}");
        Ok(())
    }

    #[test]
    fn an_error_in_backward_keeps_its_kind() -> Result<()> {
        let x = var(&[2], 1)?;
        let recompute = Recompute::on();
        let second = Mutex::new(false);
        let y = recompute.run([&x], move |[x]| match std::mem::replace(&mut *lock(&second), true) {
            false => Ok(x.clone()),
            true => Err(Error::TrainingType { dtype: DType::U8 }),
        })?;
        let loss = y.sum_all()?;
        assert!(matches!(recompute.backward(&loss), Err(Error::TrainingType { dtype: DType::U8 })));
        Ok(())
    }
}
