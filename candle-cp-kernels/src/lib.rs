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
//! The CPU kernels run in f32 and f64 on rayon's threads. Their matrix products are micro-kernels written once against
//! `pulp`'s vectors and compiled for AVX-512, AVX2 and NEON, chosen at run time, with a portable fallback.

mod backward;
mod compiled;
mod cross_entropy;
mod forward;
mod heads;
mod matmul;
mod pack;
mod real;
mod softmax;
mod tile;

pub use backward::{Gradients, Saved, backward_chunk, output_dot};
pub use cross_entropy::{CrossEntropy, cross_entropy_row};
pub use forward::{Forward, forward_chunk};
pub use heads::{Heads, Shape};
pub use real::Real;
pub use tile::{Bounds, KEY_BLOCK, KeyRun, QUERY_BLOCK, QueryTile, TileCount};
