//! The types that queries, keys and values may have.

use crate::arithmetic::Plain;
use crate::backward::{self, Gradients, Saved};
use crate::forward::{self, Forward};
use crate::heads::Heads;
use crate::pairs::Pairs;
use crate::real::Real;
use crate::tile::{Bounds, QueryTile};
use half::{bf16, f16};
use rayon::prelude::*;
use std::borrow::Cow;
use std::fmt::Debug;

/// f32, f64, bf16 or f16. Sums run in f32, those of f64 in f64.
pub trait Element: Copy + Default + Debug + PartialEq + Send + Sync + 'static {
    /// What sums run in.
    type Acc: Real;
    /// To the accumulation type, exact.
    fn widen(self) -> Self::Acc;
    /// From the accumulation type, rounded to nearest.
    fn narrow(x: Self::Acc) -> Self;

    /// A slice in the accumulation type; borrowed where it is that already.
    fn widen_all(data: &[Self]) -> Cow<'_, [Self::Acc]>;
    /// Back from the accumulation type.
    fn narrow_all(sums: Vec<Self::Acc>) -> Vec<Self>;

    /// As [`crate::forward_chunk`], compiled for this type.
    #[doc(hidden)]
    fn forward_chunk(
        state: &mut Forward<Self::Acc>,
        operands: [&Heads<Self>; 3],
        tiles: &[QueryTile],
        bounds: &[Vec<Bounds>],
        scale: Self::Acc,
    );
    /// As [`crate::backward_chunk`], compiled for this type.
    #[doc(hidden)]
    fn backward_chunk(
        gradients: &mut Gradients<Self::Acc>,
        saved: Saved<Self>,
        key_value: [&Heads<Self>; 2],
        keys: usize,
        tiles: &[QueryTile],
    ) -> (Vec<Self::Acc>, Vec<Self::Acc>);
}

/// Runs a block with the arithmetic for a type: for bf16 the machine's own products, if it has any.
macro_rules! arithmetic {
    (bf16, $a:ident => $body:expr) => {
        match Pairs::detect() {
            Some($a) => $body,
            None => {
                let $a = Plain::<bf16>::new();
                $body
            }
        }
    };
    ($t:ident, $a:ident => $body:expr) => {{
        let $a = Plain::<$t>::new();
        $body
    }};
}

macro_rules! element {
    ($t:ident, $acc:ident, $widen:expr, $narrow:expr, $widen_all:expr, $narrow_all:expr) => {
        impl Element for $t {
            type Acc = $acc;

            #[inline(always)]
            fn widen(self) -> $acc {
                $widen(self)
            }

            #[inline(always)]
            fn narrow(x: $acc) -> Self {
                $narrow(x)
            }

            fn widen_all(data: &[Self]) -> Cow<'_, [$acc]> {
                $widen_all(data)
            }

            fn narrow_all(sums: Vec<$acc>) -> Vec<Self> {
                $narrow_all(sums)
            }

            fn forward_chunk(
                state: &mut Forward<$acc>,
                operands: [&Heads<Self>; 3],
                tiles: &[QueryTile],
                bounds: &[Vec<Bounds>],
                scale: $acc,
            ) {
                arithmetic!($t, a => forward::chunk(a, state, operands, tiles, bounds, scale));
            }

            fn backward_chunk(
                gradients: &mut Gradients<$acc>,
                saved: Saved<Self>,
                key_value: [&Heads<Self>; 2],
                keys: usize,
                tiles: &[QueryTile],
            ) -> (Vec<$acc>, Vec<$acc>) {
                arithmetic!($t, a => backward::chunk(a, gradients, saved, key_value, keys, tiles))
            }
        }
    };
}

fn widened<T: Element>(data: &[T]) -> Cow<'_, [T::Acc]> {
    Cow::Owned(data.iter().map(|x| x.widen()).collect())
}

fn narrowed<T: Element>(sums: Vec<T::Acc>) -> Vec<T> {
    sums.into_par_iter().with_min_len(1 << 16).map(T::narrow).collect()
}

element!(f32, f32, |x| x, |x| x, Cow::Borrowed, |sums| sums);
element!(f64, f64, |x| x, |x| x, Cow::Borrowed, |sums| sums);
element!(bf16, f32, bf16::to_f32, bf16::from_f32, widened, narrowed);
element!(f16, f32, f16::to_f32, f16::from_f32, widened, narrowed);
