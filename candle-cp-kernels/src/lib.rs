//! Attention kernels of `candle-cp`, free of any tensor library.
//!
//! A kernel works on one *chunk* of keys at a time and continues a running softmax, so the chunks of a
//! sequence may arrive one after the other from other ranks. What a query may see is given as one
//! half-open interval of key positions per query ([`Bounds`]); which blocks of keys a block of queries
//! has to visit is given by [`QueryTile`]s. Nothing here knows of masks as matrices, of documents or of
//! windows.
//!
//! Shapes: query, output `[B, Hq, Sq, D]`; key, value `[B, Hkv, Sk, D]`, with `Hq = G * Hkv`. The query
//! heads of a group share one pass over their keys: inside a tile they are stacked as rows `(query, g)`.
//!
//! Operands are f32, f64, bf16 or f16 ([`Element`]); sums run in f32 (f64 for f64), on rayon's threads. Matrix products
//! of f32 and f64 are micro-kernels written once against `pulp`'s vectors and compiled for AVX-512, AVX2 and NEON,
//! chosen at run time, with a portable fallback. bf16 is multiplied by AMX tiles or AVX-512's bf16 pairs where the machine
//! has them, and elsewhere widened tile by tile, as f16 is everywhere.

mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
mod arithmetic;
mod backward;
mod compiled;
mod conv;
mod cross_entropy;
mod delta_rule;
mod element;
mod forward;
pub mod gpu;
mod heads;
mod instructions;
mod matmul;
mod pack;
mod pairs;
mod real;
mod softmax;
#[cfg(test)]
mod tests;
mod tile;

pub use backward::{Gradients, Saved, backward_chunk, output_dot};
pub use conv::{CausalConv, ConvActivation, ConvRow};
pub use cross_entropy::{CrossEntropy, cross_entropy_row};
pub use delta_rule::{
    DeltaBackward, DeltaBackwardRun, DeltaBlocks, DeltaForward, DeltaForwardRun, DeltaGradients, DeltaHeads,
    DeltaInputs, DeltaPassed, DeltaRun, delta_initial_gradients, delta_states, delta_transitions,
};
pub use element::Element;
pub use forward::{Forward, forward_chunk};
pub use heads::{Heads, Order, Shape};
pub use instructions::instructions;
pub use real::Real;
pub use tile::{Bounds, KEY_BLOCK, KeyRun, QUERY_BLOCK, QueryTile, TileCount};
