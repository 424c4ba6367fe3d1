//! AdamW with decoupled weight decay; its state is kept in f32 (f64 for f64 parameters) and named by parameter.

mod in_place;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};

use self::in_place::{Average, Move};
pub use self::state::StateFault;
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

/// What is kept for one parameter, each with its shape.
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
    fn new(var: &Var) -> Result<Self> {
        let dtype = state_dtype(var.dtype());
        let zeros = || Tensor::zeros(var.shape(), dtype, var.device());
        let master = needs_master(var).then(|| var.as_tensor().detach().to_dtype(dtype)).transpose()?;
        // Two tensors of zeros: each is updated in place.
        Ok(Self { master, mean: zeros()?, square: zeros()? })
    }

    /// One step. On the CPU each tensor changes in place, in one pass over memory.
    fn advance(&mut self, var: &Var, gradient: &Tensor, betas: (f64, f64), step: &Move) -> Result<()> {
        if !gradient.device().is_cpu() {
            return self.advance_by_tensors(var, gradient, betas, step);
        }
        self.mean.inplace_op2(gradient, &Average { keep: betas.0, squared: false })?;
        self.square.inplace_op2(gradient, &Average { keep: betas.1, squared: true })?;
        let master = self.master.as_ref().unwrap_or(var.as_tensor());
        master.inplace_op3(&self.mean, &self.square, step)?;
        match &self.master {
            Some(master) => Ok(var.set(&master.to_dtype(var.dtype())?)?),
            None => Ok(()),
        }
    }

    /// The same by tensor operations, for other devices.
    fn advance_by_tensors(&mut self, var: &Var, gradient: &Tensor, betas: (f64, f64), step: &Move) -> Result<()> {
        self.mean = ((&self.mean * betas.0)? + (gradient * (1.0 - betas.0))?)?;
        self.square = ((&self.square * betas.1)? + (gradient.sqr()? * (1.0 - betas.1))?)?;
        let root = ((&self.square * step.square_factor)?.sqrt()? + step.eps)?;
        let master = self.master.as_ref().unwrap_or(var.as_tensor()).detach();
        let moved = ((master * step.decay)? - ((&self.mean * step.rate)? / root)?)?;
        var.set(&moved.to_dtype(var.dtype())?)?;
        self.master = self.master.is_some().then_some(moved);
        Ok(())
    }
}

/// The optimizer. Equal gradients on every rank give equal weights on every rank.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    variables: BTreeMap<String, Var>,
    moments: BTreeMap<String, Moments>,
    steps: usize,
}

impl AdamW {
    /// Fresh state for named variables.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn new(variables: &BTreeMap<String, Var>, config: AdamWConfig) -> Result<Self> {
        let moments = variables.iter().map(|(name, var)| Ok((name.clone(), Moments::new(var)?)));
        Ok(Self { config, variables: variables.clone(), moments: moments.collect::<Result<_>>()?, steps: 0 })
    }

    /// One step: every variable moves, those without a gradient by their momentum and weight decay only.
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
        for (name, var) in &self.variables {
            let state = self.moments.get_mut(name).expect("every variable has its moments");
            let gradient = match gradients.named().get(name) {
                Some(gradient) => gradient.to_dtype(state.mean.dtype())?.contiguous()?,
                None => state.mean.zeros_like()?,
            };
            let decay = if var.rank() > 1 { 1.0 - rate * weight_decay } else { 1.0 };
            let step = Move { decay, rate: rate / correct1, square_factor: 1.0 / correct2, eps };
            state.advance(var, &gradient, (beta1, beta2), &step)?;
        }
        Ok(())
    }

    /// Steps taken so far.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The state by parameter name.
    pub fn moments(&self) -> &BTreeMap<String, Moments> {
        &self.moments
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
