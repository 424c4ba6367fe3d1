//! Which instructions the kernels take on this machine.

use pulp::WithSimd;

use crate::pairs::Pairs;

struct Name;

impl WithSimd for Name {
    type Output = &'static str;

    fn with_simd<S: pulp::Simd>(self, _: S) -> Self::Output {
        let name = std::any::type_name::<S>();
        let known = [("V4", "AVX-512"), ("V3", "AVX2"), ("Neon", "NEON")];
        let found =
            known.into_iter().find(|(vectors, _)| name.rsplit("::").next().is_some_and(|n| n.starts_with(vectors)));
        found.map_or("portable", |(_, told)| told)
    }
}

/// The instructions that products of f32, and of bf16, are made with; for a person to read.
///
/// ```
/// let told = candle_cp_kernels::instructions();
/// assert!(told.starts_with("f32 by "));
/// ```
pub fn instructions() -> String {
    let vectors = pulp::Arch::new().dispatch(Name);
    let bf16 = match Pairs::detect() {
        Some(Pairs::Tiles) => "AMX tiles",
        Some(Pairs::Vectors) => "AVX-512 pairs",
        None => "f32 after widening",
    };
    format!("f32 by {vectors}, bf16 by {bf16}")
}
