//! GPUs and element types that kernels are tested for.

use candle_core::DType;
use candle_cp::gpu::{GpuElement, GpuLimits};

pub const ELEMENTS: [GpuElement; 3] = [GpuElement::Bf16, GpuElement::F16, GpuElement::F32];

/// sm_90, sm_80, sm_89.
pub const DEVICES: [GpuLimits; 3] = [
    GpuLimits { capability: (9, 0), shared_bytes: 227 << 10 },
    GpuLimits { capability: (8, 0), shared_bytes: 163 << 10 },
    GpuLimits { capability: (8, 9), shared_bytes: 99 << 10 },
];

pub fn dtype(element: GpuElement) -> DType {
    match element {
        GpuElement::Bf16 => DType::BF16,
        GpuElement::F16 => DType::F16,
        GpuElement::F32 => DType::F32,
    }
}
