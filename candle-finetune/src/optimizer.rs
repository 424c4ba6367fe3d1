//! AdamW with decoupled weight decay; its state is kept in f32 (f64 for f64 parameters) and named by parameter.

mod in_place;

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};

use self::in_place::{Average, Move};
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
    /// The parameter itself in f32 (f64), so that small steps are not lost in a narrow type.
    pub master: Tensor,
    /// Running mean of the gradient.
    pub mean: Tensor,
    /// Running mean of its square.
    pub square: Tensor,
}

impl Moments {
    /// One step. On the CPU each tensor changes in place, in one pass over memory.
    fn advance(&mut self, gradient: &Tensor, (beta1, beta2): (f64, f64), step: &Move) -> Result<()> {
        if gradient.device().is_cpu() {
            self.mean.inplace_op2(gradient, &Average { keep: beta1, squared: false })?;
            self.square.inplace_op2(gradient, &Average { keep: beta2, squared: true })?;
            self.master.inplace_op3(&self.mean, &self.square, step)?;
            return Ok(());
        }
        self.advance_by_tensors(gradient, (beta1, beta2), step)
    }

    /// The same by tensor operations, for other devices.
    fn advance_by_tensors(&mut self, gradient: &Tensor, (beta1, beta2): (f64, f64), step: &Move) -> Result<()> {
        self.mean = ((&self.mean * beta1)? + (gradient * (1.0 - beta1))?)?;
        self.square = ((&self.square * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
        let root = ((&self.square * step.square_factor)?.sqrt()? + step.eps)?;
        self.master = ((&self.master * step.decay)? - ((&self.mean * step.rate)? / root)?)?;
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
        let mut moments = BTreeMap::new();
        for (name, var) in variables {
            let master = var.as_tensor().detach().to_dtype(state_dtype(var.dtype()))?.copy()?;
            // Two tensors of zeros: each is updated in place.
            let (mean, square) = (master.zeros_like()?, master.zeros_like()?);
            moments.insert(name.clone(), Moments { master, mean, square });
        }
        Ok(Self { config, variables: variables.clone(), moments, steps: 0 })
    }

    /// One step: every variable moves, those without a gradient by their momentum and weight decay only.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn step(&mut self, gradients: &Gradients, rate: f64) -> Result<()> {
        self.steps += 1;
        let AdamWConfig { beta1, beta2, eps, weight_decay } = self.config;
        let correct1 = 1.0 - beta1.powi(self.steps as i32);
        let correct2 = 1.0 - beta2.powi(self.steps as i32);
        for (name, var) in &self.variables {
            let state = self.moments.get_mut(name).expect("every variable has its moments");
            let gradient = match gradients.named().get(name) {
                Some(gradient) => gradient.to_dtype(state.master.dtype())?.contiguous()?,
                None => state.master.zeros_like()?,
            };
            let decay = if var.rank() > 1 { 1.0 - rate * weight_decay } else { 1.0 };
            let step = Move { decay, rate: rate / correct1, square_factor: 1.0 / correct2, eps };
            state.advance(&gradient, (beta1, beta2), &step)?;
            var.set(&state.master.to_dtype(var.dtype())?)?;
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

/// The type in which gradients and optimizer state of a parameter are kept.
pub(crate) fn state_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn named(name: &str, tensor: Tensor) -> Gradients {
        Gradients::from_named(BTreeMap::from([(name.to_string(), tensor)]))
    }

    /// Two steps computed by hand in exact arithmetic: betas 0.9 and 0.5, eps 0, rate 0.1, decay 0.5.
    /// Step 1, g = 2: mean 0.2 / 0.1 = 2, square 2 / 0.5 = 4, update 0.1 * 2 / 2.
    /// Step 2, g = -1: mean 0.08 / 0.19, square 1.5 / 0.75 = 2, update 0.1 * (0.08 / 0.19) / sqrt(2).
    #[test]
    fn two_steps_by_hand() -> Result<()> {
        let config = AdamWConfig { beta1: 0.9, beta2: 0.5, eps: 0.0, weight_decay: 0.5 };
        let device = Device::Cpu;
        let second_update = 0.1 * (0.08 / 0.19) / 2f64.sqrt();
        for (rank, decay) in [(1, 1.0), (2, 0.95)] {
            let shape = vec![1usize; rank];
            let var = Var::from_tensor(&Tensor::full(3.0f64, shape.as_slice(), &device)?)?;
            let variables = BTreeMap::from([("w".to_string(), var.clone())]);
            let mut optimizer = AdamW::new(&variables, config)?;
            let value = || Ok::<_, candle_core::Error>(var.flatten_all()?.to_vec1::<f64>()?[0]);

            optimizer.step(&named("w", Tensor::full(2.0f64, shape.as_slice(), &device)?), 0.1)?;
            let first = 3.0 * decay - 0.1;
            assert!((value()? - first).abs() < 1e-12, "{} {first}", value()?);

            optimizer.step(&named("w", Tensor::full(-1.0f64, shape.as_slice(), &device)?), 0.1)?;
            let second = first * decay - second_update;
            assert!((value()? - second).abs() < 1e-12, "{} {second}", value()?);
            assert_eq!(optimizer.steps(), 2);
        }
        Ok(())
    }

    #[test]
    fn in_place_and_by_tensors_are_the_same() -> Result<()> {
        let row = |values: [f64; 3]| Tensor::new(&values, &Device::Cpu);
        let moments = || -> Result<Moments> {
            Ok(Moments { master: row([1.0, -2.0, 3.0])?, mean: row([0.1, 0.2, -0.3])?, square: row([0.5, 0.0, 2.0])? })
        };
        let step = Move { decay: 0.9, rate: 0.3, square_factor: 1.7, eps: 1e-3 };
        let gradient = row([-4.0, 0.5, 0.25])?;
        let (mut in_place, mut by_tensors) = (moments()?, moments()?);
        in_place.advance(&gradient, (0.8, 0.7), &step)?;
        by_tensors.advance_by_tensors(&gradient, (0.8, 0.7), &step)?;
        for (found, expected) in [
            (in_place.master, by_tensors.master),
            (in_place.mean, by_tensors.mean),
            (in_place.square, by_tensors.square),
        ] {
            for (found, expected) in found.to_vec1::<f64>()?.into_iter().zip(expected.to_vec1::<f64>()?) {
                assert!((found - expected).abs() < 1e-14, "{found} {expected}");
            }
        }
        Ok(())
    }

    #[test]
    fn eps_is_added_to_the_root() -> Result<()> {
        let var = Var::new(&[1.0f64], &Device::Cpu)?;
        let variables = BTreeMap::from([("w".to_string(), var.clone())]);
        let mut optimizer = AdamW::new(&variables, AdamWConfig { eps: 3.0, ..AdamWConfig::default() })?;
        optimizer.step(&named("w", Tensor::new(&[1.0f64], &Device::Cpu)?), 0.1)?;
        assert!((var.to_vec1::<f64>()?[0] - (1.0 - 0.1 / (1.0 + 3.0))).abs() < 1e-12);
        Ok(())
    }

    #[test]
    fn small_steps_of_bf16_weights_add_up_in_the_master() -> Result<()> {
        let var = Var::from_tensor(&Tensor::new(&[1.0f32], &Device::Cpu)?.to_dtype(DType::BF16)?)?;
        let variables = BTreeMap::from([("w".to_string(), var.clone())]);
        let mut optimizer = AdamW::new(&variables, AdamWConfig::default())?;
        // A step of 1e-4 is below the resolution of bf16 at 1 (2^-8); 100 of them are not.
        for _ in 0..100 {
            optimizer.step(&named("w", Tensor::new(&[1.0f32], &Device::Cpu)?), 1e-4)?;
        }
        assert_eq!(optimizer.moments()["w"].master.dtype(), DType::F32);
        let value = var.to_dtype(DType::F32)?.to_vec1::<f32>()?[0];
        assert!((value - 0.99).abs() < 0.003, "{value}");
        Ok(())
    }

    #[test]
    fn a_parameter_without_gradient_only_decays() -> Result<()> {
        let var = Var::new(&[[2.0f32]], &Device::Cpu)?;
        let variables = BTreeMap::from([("w".to_string(), var.clone())]);
        let mut optimizer = AdamW::new(&variables, AdamWConfig { weight_decay: 0.5, ..AdamWConfig::default() })?;
        optimizer.step(&Gradients::from_named(BTreeMap::new()), 0.1)?;
        assert_eq!(var.to_vec2::<f32>()?, [[1.9]]);
        Ok(())
    }
}
