//! Devices that runs are planned for.

use std::str::FromStr;

use crate::error::{Error, Result};

/// Rates of attention for one head size.
#[derive(Debug, Clone, Copy, PartialEq)]
struct AttentionRate {
    /// Heads up to this size.
    head_dim: usize,
    /// Operations per second in forward and in backward, on pairs that are seen.
    rates: [f64; 2],
}

/// A device: how much it holds, computes and sends.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceSpec {
    /// Name on the command line.
    pub name: &'static str,
    /// Bytes of memory.
    pub memory: u64,
    /// Dense bf16 (f32 on CPUs) operations per second, as the maker gives them.
    pub peak: f64,
    /// Of these, what large matrix products reach.
    pub achieved: f64,
    /// Devices that share a fast link.
    pub per_node: usize,
    /// Bytes per second and direction between devices of one node.
    pub link_inside: f64,
    /// The same between nodes, per device.
    pub link_outside: f64,
    /// The CPU's own kernels.
    pub is_cpu: bool,
    attention: &'static [AttentionRate],
}

const fn rate(head_dim: usize, forward: f64, backward: f64) -> AttentionRate {
    AttentionRate { head_dim, rates: [forward, backward] }
}

/// What our kernels let expect on Hopper, 8,192 tokens: benchmarks/gpu_figures_h200-a100_2026-11-30.md. The H100 has the
/// multiprocessors and the clock of the H200; attention does not wait for memory.
const HOPPER: [AttentionRate; 4] =
    [rate(64, 154e12, 155e12), rate(128, 197e12, 153e12), rate(256, 247e12, 147e12), rate(512, 189e12, 82e12)];

/// The same file, A100.
const AMPERE: [AttentionRate; 4] =
    [rate(64, 96e12, 97e12), rate(128, 123e12, 96e12), rate(256, 153e12, 93e12), rate(512, 82e12, 41e12)];

/// A Xeon's two cores in f32: benchmarks/attention_xeon-2core_2026-11-29.md.
const XEON: [AttentionRate; 1] = [rate(usize::MAX, 180e9, 170e9)];

/// NVIDIA's data sheet: 141 GB HBM3e, 989 TFLOP/s dense bf16, NVLink 900 GB/s both ways; one 400 Gbit/s port per GPU.
const H200: DeviceSpec = DeviceSpec {
    name: "h200",
    memory: 141_000_000_000,
    peak: 989e12,
    achieved: 495e12,
    per_node: 8,
    link_inside: 450e9,
    link_outside: 50e9,
    is_cpu: false,
    attention: &HOPPER,
};

/// All devices. Memory, peak and links are the makers' figures; half of the peak is what large products usually reach.
const DEVICES: [DeviceSpec; 4] = [
    H200,
    // 80 GB HBM3, otherwise the same.
    DeviceSpec { name: "h100", memory: 80_000_000_000, ..H200 },
    // 80 GB HBM2e, 312 TFLOP/s dense bf16, NVLink 600 GB/s both ways; one 200 Gbit/s port per GPU.
    DeviceSpec {
        name: "a100",
        memory: 80_000_000_000,
        peak: 312e12,
        achieved: 156e12,
        per_node: 8,
        link_inside: 300e9,
        link_outside: 25e9,
        is_cpu: false,
        attention: &AMPERE,
    },
    // Two cores of a Xeon with 32 GB, products in f32 as that file has them; 10 Gbit/s Ethernet between machines, copies in
    // memory inside of one.
    DeviceSpec {
        name: "cpu",
        memory: 32_000_000_000,
        peak: 330e9,
        achieved: 280e9,
        per_node: 1,
        link_inside: 10e9,
        link_outside: 1.25e9,
        is_cpu: true,
        attention: &XEON,
    },
];

/// Share of a device's memory that is left to driver, libraries and gaps between tensors.
const RESERVE: f64 = 0.05;

impl DeviceSpec {
    /// Bytes that a run may take.
    pub fn usable(&self) -> u64 {
        (self.memory as f64 * (1.0 - RESERVE)) as u64
    }

    /// The devices that there are.
    pub fn all() -> &'static [Self] {
        &DEVICES
    }

    /// Operations per second of attention in forward and in backward, for heads of this size.
    pub fn attention(&self, head_dim: usize) -> [f64; 2] {
        let fits = self.attention.iter().find(|rate| head_dim <= rate.head_dim);
        fits.or(self.attention.last()).map_or([self.achieved; 2], |rate| rate.rates)
    }

    /// Bytes per second and direction in a group of so many ranks, which lie next to each other.
    pub fn link(&self, ranks: usize) -> f64 {
        if ranks <= self.per_node { self.link_inside } else { self.link_outside }
    }

    /// With other links.
    #[must_use]
    pub fn with_bandwidth(self, bytes_per_second: f64) -> Self {
        Self { link_inside: bytes_per_second, link_outside: bytes_per_second, ..self }
    }
}

impl FromStr for DeviceSpec {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        DEVICES.iter().find(|device| device.name == name).cloned().ok_or_else(|| {
            let names: Vec<&str> = DEVICES.iter().map(|device| device.name).collect();
            Error::flag(
                "--device",
                name,
                names.join(", "),
                "name one of them, and its links with --bandwidth if they differ",
            )
        })
    }
}
