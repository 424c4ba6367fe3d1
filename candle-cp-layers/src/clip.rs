//! Bounds that values are cut to.

use candle_core::{DType, Result, Tensor};

use crate::error::Error;
use crate::weights::Weights;

/// The names of a clipped projection's four bounds, and the values that cut nothing.
pub const BOUNDS: [(&str, f64); 4] = [
    ("input_min", f64::NEG_INFINITY),
    ("input_max", f64::INFINITY),
    ("output_min", f64::NEG_INFINITY),
    ("output_max", f64::INFINITY),
];

/// A closed interval; a bound may be infinite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Lower bound.
    pub min: f64,
    /// Upper bound.
    pub max: f64,
}

impl Interval {
    /// Values outside become the bound they passed. Gradients go through values inside, bounds included, and no
    /// others: Candle's `clamp` would halve those of values on a bound.
    pub fn clamp(self, x: &Tensor) -> Result<Tensor> {
        let bound = |value: f64| Tensor::new(value, x.device())?.to_dtype(x.dtype())?.broadcast_as(x.shape());
        let mut y = x.clone();
        if self.min > f64::NEG_INFINITY {
            y = x.detach().lt(self.min)?.where_cond(&bound(self.min)?, &y)?;
        }
        if self.max < f64::INFINITY {
            y = x.detach().gt(self.max)?.where_cond(&bound(self.max)?, &y)?;
        }
        Ok(y)
    }
}

/// What a clipped projection cuts its input and its output to.
#[derive(Debug, Clone, Copy)]
pub struct Clip {
    /// Of what goes in.
    pub input: Interval,
    /// Of what comes out.
    pub output: Interval,
}

impl Clip {
    /// Reads the four scalars under a projection's name.
    pub fn new(weights: &Weights, projection: &str) -> crate::error::Result<Self> {
        let bound = |name: &str| {
            let name = format!("{projection}.{name}");
            let value = weights.get(&name, &[])?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            match value.is_nan() {
                false => Ok(value),
                true => Err(Error::Weight { name, reason: "a bound cannot be NaN".to_string() }),
            }
        };
        Ok(Self {
            input: Interval { min: bound("input_min")?, max: bound("input_max")? },
            output: Interval { min: bound("output_min")?, max: bound("output_max")? },
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn values_inside_and_on_the_bounds_keep_their_gradient() -> Result<()> {
        let x = Var::new(&[-3f64, -1.0, -0.5, 2.0, 2.5, f64::INFINITY], &Device::Cpu)?;
        let scale = Tensor::new(&[1f64, 2.0, 3.0, 4.0, 5.0, 6.0], &Device::Cpu)?;
        let run = |min, max| -> Result<(Vec<f64>, Vec<f64>)> {
            let y = Interval { min, max }.clamp(&x)?;
            let gradients = (&y * &scale)?.sum_all()?.backward()?;
            Ok((y.to_vec1()?, gradients.get(&x).unwrap().to_vec1()?))
        };
        let infinite = f64::INFINITY;
        assert_eq!(run(-1.0, 2.0)?, (vec![-1.0, -1.0, -0.5, 2.0, 2.0, 2.0], vec![0.0, 2.0, 3.0, 4.0, 0.0, 0.0]));
        assert_eq!(run(-infinite, 2.0)?.0, [-3.0, -1.0, -0.5, 2.0, 2.0, 2.0]);
        assert_eq!(run(-infinite, 2.0)?.1, [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]);
        assert_eq!(run(-1.0, infinite)?.1, [0.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(run(-infinite, infinite)?.0, x.to_vec1::<f64>()?);
        Ok(())
    }

    #[test]
    fn no_number_stays_no_number() -> Result<()> {
        let x = Tensor::new(&[f32::NAN, 7.0], &Device::Cpu)?;
        let y = Interval { min: -1.0, max: 1.0 }.clamp(&x)?.to_vec1::<f32>()?;
        assert!(y[0].is_nan() && y[1] == 1.0);
        Ok(())
    }
}
