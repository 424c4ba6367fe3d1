//! Fresh weights from a seed: the same numbers on every rank, machine and number of threads.
//!
//! - A matrix or table with `fan_in` inputs per row is normal with standard deviation
//!   `max(initializer_range, 1 / sqrt(fan_in))`. The released `initializer_range` of 0.02 suits widths of
//!   thousands; at a width of 64 it would leave every signal 6 times too small, and the second term takes over.
//! - Norm weights are 1, except those over query and key heads: attention has no scale of its own, so they start
//!   at `head_dim^(-1/4)` each, which makes the scores as large as the usual `1 / sqrt(head_dim)` would.
//! - Rates whose logarithm is trained lie evenly between two bounds.
//! - Biases are 0; buffers have the value that changes nothing.

use std::f64::consts::TAU;

use candle_core::{DType, Device, Tensor};

use crate::spec::{Role, TensorSpec};

/// A fresh tensor. Its numbers depend on the seed, the name and the shape only.
pub fn tensor(spec: &TensorSpec, dtype: DType, device: &Device, seed: u64) -> candle_core::Result<Tensor> {
    let shape = spec.shape.as_slice();
    let count: usize = shape.iter().product();
    let values: Vec<f64> = match spec.role {
        Role::Matrix { fan_in, range } => {
            let deviation = range.max(1.0 / (fan_in as f64).sqrt());
            Normal::new(seed, &spec.name).take(count).map(|value| value * deviation).collect()
        }
        Role::Bias | Role::Unused => vec![0.0; count],
        Role::Norm => vec![1.0; count],
        Role::HeadNorm => vec![(count as f64).powf(-0.25); count],
        Role::LogUniform { low, high } => {
            let mut stream = Normal::new(seed, &spec.name);
            (0..count).map(|_| (low + (high - low) * stream.uniform()).ln()).collect()
        }
        Role::Buffer { fresh } => vec![fresh; count],
    };
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// Even numbers between minus this bound and the bound; they depend on the seed, the name and the shape only.
pub fn uniform(
    name: &str,
    shape: &[usize],
    bound: f64,
    dtype: DType,
    device: &Device,
    seed: u64,
) -> candle_core::Result<Tensor> {
    let mut stream = Normal::new(seed, name);
    let count = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|_| (2.0 * stream.uniform() - 1.0) * bound).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// The step of SplitMix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// What SplitMix64 makes of a state: bits that look independent for states that differ in anything.
pub fn mix(state: u64) -> u64 {
    let mut bits = state.wrapping_add(STEP);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// FNV-1a.
pub fn name_hash(name: &str) -> u64 {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, hash)
}

/// Standard normal numbers: SplitMix64 bits through the Box-Muller transform. Written out here because saved
/// results name a seed, and a generator from a library may change its stream with a version.
struct Normal {
    state: u64,
    spare: Option<f64>,
}

impl Normal {
    /// A stream for one tensor: the name is hashed (FNV-1a) into the seed, so that adding a tensor to a model
    /// leaves the others as they were.
    fn new(seed: u64, name: &str) -> Self {
        let mut stream = Self { state: seed, spare: None };
        stream.state = stream.bits() ^ name_hash(name);
        stream
    }

    fn bits(&mut self) -> u64 {
        let bits = mix(self.state);
        self.state = self.state.wrapping_add(STEP);
        bits
    }

    /// Uniform in (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

impl Iterator for Normal {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        if let Some(value) = self.spare.take() {
            return Some(value);
        }
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        let (sin, cos) = (TAU * self.uniform()).sin_cos();
        self.spare = Some(radius * sin);
        Some(radius * cos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_those_of_even_numbers() {
        let role = Role::LogUniform { low: 0.5, high: 8.0 };
        let spec = TensorSpec { name: "a".into(), shape: vec![4000], role };
        let values = tensor(&spec, DType::F64, &Device::Cpu, 7).unwrap().exp().unwrap().to_vec1::<f64>().unwrap();
        assert!(values.iter().all(|value| (0.5..=8.0 + 1e-9).contains(value)));
        let mean = values.iter().sum::<f64>() / 4000.0;
        assert!((mean - 4.25).abs() < 0.15, "{mean}");
        let low = values.iter().filter(|value| **value < 1.25).count();
        assert!((320..480).contains(&low), "{low} of 4000 in the lowest tenth");
    }

    #[test]
    fn numbers_are_standard_normal_and_depend_on_seed_and_name() {
        let draw = |seed, name| Normal::new(seed, name).take(20_000).collect::<Vec<_>>();
        let values = draw(7, "a");
        let moment = |power: i32| values.iter().map(|v| v.powi(power)).sum::<f64>() / values.len() as f64;
        assert!(moment(1).abs() < 0.03, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.05, "variance {}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.3, "fourth moment {}", moment(4));
        assert_eq!(values, draw(7, "a"));
        assert_ne!(values[0], draw(7, "b")[0]);
        assert_ne!(values[0], draw(8, "a")[0]);
    }
}
