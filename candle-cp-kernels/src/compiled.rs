//! The hot loops, compiled here for each type and instruction set.
//!
//! Generic code is compiled in the crate that uses it, with that crate's settings; these are not generic, so that they
//! are fast in every build, tests included.

use crate::conv;
use crate::cross_entropy::Row;
use crate::delta_rule;
use crate::matmul::Product;
use crate::softmax::{Probabilities, Rescale, ScoreGradient, Softmax};

/// Private part of [`crate::Real`].
pub trait Compiled: Sized {
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn multiply(product: Product<Self, Self>);
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn softmax(tile: Softmax<Self>);
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn rescale(rows: Rescale<Self>);
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn probabilities(tile: Probabilities<Self>);
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn score_gradient(tile: ScoreGradient<Self>);
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn cross_entropy(row: Row<'_, '_, Self>) -> f64;
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn conv_forward(block: conv::ForwardBlock<'_, '_, Self>);
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn conv_backward(block: conv::BackwardBlock<'_, '_, Self>);
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn delta_forward(task: delta_rule::Forward<Self>) -> delta_rule::Passed<Self>;
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn delta_backward(task: delta_rule::Backward<Self>) -> Vec<Self>;
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn delta_initial_gradient(task: delta_rule::InitialGradient<Self>) -> Vec<Self>;
}

macro_rules! compile {
    ($($t:ty),*) => {$(
        #[allow(private_interfaces)]
        impl Compiled for $t {
            fn multiply(product: Product<Self, Self>) {
                pulp::Arch::new().dispatch(product);
            }
            fn softmax(tile: Softmax<Self>) {
                pulp::Arch::new().dispatch(tile);
            }
            fn rescale(rows: Rescale<Self>) {
                pulp::Arch::new().dispatch(rows);
            }
            fn probabilities(tile: Probabilities<Self>) {
                pulp::Arch::new().dispatch(tile);
            }
            fn score_gradient(tile: ScoreGradient<Self>) {
                pulp::Arch::new().dispatch(tile);
            }
            fn cross_entropy(row: Row<'_, '_, Self>) -> f64 {
                pulp::Arch::new().dispatch(row)
            }
            fn conv_forward(block: conv::ForwardBlock<'_, '_, Self>) {
                pulp::Arch::new().dispatch(block);
            }
            fn conv_backward(block: conv::BackwardBlock<'_, '_, Self>) {
                pulp::Arch::new().dispatch(block);
            }
            fn delta_forward(task: delta_rule::Forward<Self>) -> delta_rule::Passed<Self> {
                pulp::Arch::new().dispatch(task)
            }
            fn delta_backward(task: delta_rule::Backward<Self>) -> Vec<Self> {
                pulp::Arch::new().dispatch(task)
            }
            fn delta_initial_gradient(task: delta_rule::InitialGradient<Self>) -> Vec<Self> {
                pulp::Arch::new().dispatch(task)
            }
        }
    )*};
}
compile!(f32, f64);
