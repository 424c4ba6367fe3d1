//! AdamW with decoupled weight decay; its state is kept in f32 (f64 for f64 parameters) and named by parameter.

mod in_place;
mod spread;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Tensor, Var};

use self::in_place::{Average, Move};
pub use self::spread::Spread;
pub use self::state::StateFault;
use crate::buckets::Owned;
use crate::error::Result;
use crate::gradients::Gradients;

/// Settings of [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the mean of the gradients.
    pub beta1: f64,
    /// Decay of the mean of their squares.
    pub beta2: f64,
    /// Added to the root of the second mean.
    pub eps: f64,
    /// Share of a weight that a step at learning rate 1 takes away; applies to parameters of at least two dimensions.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.05 }
    }
}

/// What is kept for one parameter, each with its shape; for a part of a parameter in one dimension.
#[derive(Debug, Clone)]
pub struct Moments {
    /// The parameter itself in f32, so that small steps are not lost in a narrow type; `None` for a parameter in f32 or
    /// f64, which is its own master.
    pub master: Option<Tensor>,
    /// Running mean of the gradient.
    pub mean: Tensor,
    /// Running mean of its square.
    pub square: Tensor,
}

impl Moments {
    /// For a parameter or a part of one.
    fn new(part: &Tensor) -> Result<Self> {
        let dtype = state_dtype(part.dtype());
        let zeros = || Tensor::zeros(part.shape(), dtype, part.device());
        let master = (dtype != part.dtype()).then(|| part.to_dtype(dtype)).transpose()?;
        // Two tensors of zeros: each is updated in place.
        Ok(Self { master, mean: zeros()?, square: zeros()? })
    }

    /// One step. On the CPU each tensor changes in place, in one pass over memory. `part` has the parameter's own memory.
    fn advance(&mut self, part: &Tensor, gradient: &Tensor, betas: (f64, f64), step: &Move) -> Result<()> {
        if !gradient.device().is_cpu() {
            return self.advance_by_tensors(part, gradient, betas, step);
        }
        self.mean.inplace_op2(gradient, &Average { keep: betas.0, squared: false })?;
        self.square.inplace_op2(gradient, &Average { keep: betas.1, squared: true })?;
        self.master.as_ref().unwrap_or(part).inplace_op3(&self.mean, &self.square, step)?;
        self.master.as_ref().map_or(Ok(()), |master| write(part, master))
    }

    /// The same by tensor operations, for other devices.
    fn advance_by_tensors(&mut self, part: &Tensor, gradient: &Tensor, betas: (f64, f64), step: &Move) -> Result<()> {
        self.mean = ((&self.mean * betas.0)? + (gradient * (1.0 - betas.0))?)?;
        self.square = ((&self.square * betas.1)? + (gradient.sqr()? * (1.0 - betas.1))?)?;
        let root = ((&self.square * step.square_factor)?.sqrt()? + step.eps)?;
        let moved = ((self.master.as_ref().unwrap_or(part) * step.decay)? - ((&self.mean * step.rate)? / root)?)?;
        write(part, &moved)?;
        self.master = self.master.is_some().then_some(moved);
        Ok(())
    }
}

/// Puts numbers into the memory of `part`.
fn write(part: &Tensor, numbers: &Tensor) -> Result<()> {
    Ok(part.flatten_all()?.slice_set(&numbers.to_dtype(part.dtype())?.flatten_all()?, 0, 0)?)
}

/// A parameter, or the part of one that this rank moves.
#[derive(Debug)]
struct Slot {
    var: Var,
    /// Elements as they lie in memory; `None` for all.
    range: Option<Range<usize>>,
    moments: Moments,
}

/// The memory of a parameter or of a part of one, without a graph.
fn part_of(var: &Var, range: Option<&Range<usize>>) -> Result<Tensor> {
    let whole = var.as_tensor().detach();
    Ok(match range {
        Some(range) => whole.flatten_all()?.narrow(0, range.start, range.len())?,
        None => whole,
    })
}

/// The optimizer. Equal gradients on every rank give equal weights on every rank.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    slots: BTreeMap<String, Slot>,
    steps: usize,
}

impl AdamW {
    /// Fresh state for named variables.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn new(variables: &BTreeMap<String, Var>, config: AdamWConfig) -> Result<Self> {
        let fresh = |var: &Var| Moments::new(&part_of(var, None)?);
        let slots = variables.iter().map(|(name, var)| {
            let moments = fresh(var)?;
            Ok((name.clone(), Slot { var: var.clone(), range: None, moments }))
        });
        Ok(Self { config, slots: slots.collect::<Result<_>>()?, steps: 0 })
    }

    /// The same for some elements only: other ranks move the others.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub(crate) fn of_own(variables: &BTreeMap<String, Var>, owned: &Owned, config: AdamWConfig) -> Result<Self> {
        let slots = owned.iter().map(|(name, range)| {
            let (var, range) = (variables[name].clone(), Some(range.clone()));
            let moments = Moments::new(&part_of(&var, range.as_ref())?)?;
            Ok((name.clone(), Slot { var, range, moments }))
        });
        Ok(Self { config, slots: slots.collect::<Result<_>>()?, steps: 0 })
    }

    /// One step: every variable moves, those without a gradient by their momentum and weight decay only. Where this rank
    /// has a part of a variable, its gradient is that part's, in one dimension.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn step(&mut self, gradients: &Gradients, rate: f64) -> Result<()> {
        self.steps += 1;
        let AdamWConfig { beta1, beta2, eps, weight_decay } = self.config;
        // Far below the largest exponent both powers are 0.
        let exponent = i32::try_from(self.steps).unwrap_or(i32::MAX);
        let correct1 = 1.0 - beta1.powi(exponent);
        let correct2 = 1.0 - beta2.powi(exponent);
        for (name, Slot { var, range, moments }) in &mut self.slots {
            let gradient = match gradients.named().get(name) {
                Some(gradient) => gradient.to_dtype(moments.mean.dtype())?.contiguous()?,
                None => moments.mean.zeros_like()?,
            };
            let decay = if var.rank() > 1 { 1.0 - rate * weight_decay } else { 1.0 };
            let step = Move { decay, rate: rate / correct1, square_factor: 1.0 / correct2, eps };
            moments.advance(&part_of(var, range.as_ref())?, &gradient, (beta1, beta2), &step)?;
        }
        Ok(())
    }

    /// Steps taken so far.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The state by parameter name.
    pub fn moments(&self) -> impl Iterator<Item = (&str, &Moments)> {
        self.slots.iter().map(|(name, slot)| (name.as_str(), &slot.moments))
    }

    /// Bytes of the state that this rank has.
    pub fn state_bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        let of =
            |Moments { master, mean, square }: &Moments| bytes(mean) + bytes(square) + master.as_ref().map_or(0, bytes);
        self.slots.values().map(|slot| of(&slot.moments)).sum()
    }
}

/// The optimizer of a run.
#[derive(Debug)]
pub enum Optimizer {
    /// Every rank has all of the state.
    Whole(AdamW),
    /// Every rank has its share of the state.
    Spread(Spread),
}

impl Optimizer {
    /// What this rank has.
    pub fn own(&self) -> &AdamW {
        match self {
            Self::Whole(optimizer) => optimizer,
            Self::Spread(spread) => spread.own(),
        }
    }

    /// Steps taken so far.
    pub fn steps(&self) -> usize {
        self.own().steps()
    }

    /// Rank 0: writes the state. The other ranks call [`Optimizer::serve`] meanwhile, and rank 0 [`Optimizer::saved`] after it.
    ///
    /// # Errors
    /// The file cannot be written, or another rank failed.
    pub fn save(&self, path: &Path) -> Result<()> {
        match self {
            Self::Whole(optimizer) => optimizer.save(path),
            Self::Spread(spread) => spread.save(path),
        }
    }

    /// Rank 0: there is nothing more to save.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn saved(&self) -> Result<()> {
        if let Self::Spread(spread) = self { spread.saved() } else { Ok(()) }
    }

    /// The other ranks: hands rank 0 what it writes of theirs.
    ///
    /// # Errors
    /// Another rank failed.
    pub fn serve(&self) -> Result<()> {
        if let Self::Spread(spread) = self { spread.serve() } else { Ok(()) }
    }
}

/// Whether a parameter is in a type too narrow for small steps.
fn needs_master(var: &Var) -> bool {
    state_dtype(var.dtype()) != var.dtype()
}

/// The type in which gradients and optimizer state of a parameter are kept.
pub(crate) fn state_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
