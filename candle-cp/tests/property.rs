//! The ring against the dense reference on random cases and layouts, in f64.

mod common;

use common::draw::{self, LayoutDraw};
use common::{Case, EXACT, Run, Strides, dense, deviation, ring};
use proptest::prelude::*;

fn compare(case: &Case, layout: &LayoutDraw, strides: Strides) -> Result<(), TestCaseError> {
    let data = case.data();
    let expected = dense(case, &data);
    let actual = ring(case, &data, &layout.layout(case.len()), Run { strides, ..Run::default() });
    for ((name, a), (_, b)) in actual.parts().into_iter().zip(expected.parts()) {
        if let Some(text) = deviation(name, a, b, EXACT) {
            return Err(TestCaseError::fail(text));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(draw::config(250))]

    #[test]
    fn short_rows_equal_the_dense_reference(
        case in draw::short_case(), layout in draw::layout(20), strides in draw::strides(),
    ) {
        compare(&case, &layout, strides)?;
    }
}

proptest! {
    #![proptest_config(draw::config(60))]

    #[test]
    fn large_heads_equal_the_dense_reference(
        case in draw::wide_case(), layout in draw::layout(20), strides in draw::strides(),
    ) {
        compare(&case, &layout, strides)?;
    }

    #[test]
    fn rows_of_several_tiles_equal_the_dense_reference(
        case in draw::long_case(), layout in draw::layout(300), strides in draw::strides(),
    ) {
        compare(&case, &layout, strides)?;
    }
}
