//! The embedded PTX: one module for each element type and head size, from `scripts/regenerate-ptx`.

use super::tiles::GpuElement;

/// One module of kernels.
#[derive(Debug, Clone, Copy)]
pub struct Compiled {
    /// A name that no other module has.
    pub name: &'static str,
    /// PTX ISA 8.4 for compute_80; any later architecture runs it.
    pub text: &'static str,
}

macro_rules! modules {
    ($($element:ident $name:literal $head:literal),* $(,)?) => {
        /// The module of an element type and padded head size, if there is one.
        pub fn compiled(element: GpuElement, padded_head: usize) -> Option<Compiled> {
            match (element, padded_head) {
                $((GpuElement::$element, $head) => Some(Compiled {
                    name: concat!("candle_cp_", $name, "_", $head),
                    text: include_str!(concat!("../../ptx/", $name, "_", $head, ".ptx")),
                }),)*
                _ => None,
            }
        }
    };
}

modules! {
    Bf16 "bf16" 64, Bf16 "bf16" 128, Bf16 "bf16" 256, Bf16 "bf16" 512,
    F16 "f16" 64, F16 "f16" 128, F16 "f16" 256, F16 "f16" 512,
    F32 "f32" 64, F32 "f32" 128, F32 "f32" 256, F32 "f32" 512,
}
