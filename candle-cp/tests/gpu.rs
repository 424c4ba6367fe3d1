//! The GPU kernels, run by the emulator, against the dense reference by the error-ratio rule.

mod common;
#[path = "common/emulated.rs"]
mod emulated;

use candle_cp_kernels::gpu::{GpuElement, compiled};
use common::devices::{DEVICES, ELEMENTS, dtype};
use common::draw::{self, LayoutDraw};
use common::ratio::{composed_attention, kernel_deviation, rounded_data};
use common::{Case, Rule, Strides, block, dense, documents};
use emulated::Gpu;
use proptest::prelude::*;
use ptx_emulator::CopyLanding;
use std::collections::BTreeSet;

/// Compares with the dense reference; `composed` computations in the same type give the measure.
fn check(name: &str, gpu: &Gpu, case: &Case, layout: &candle_cp::SequenceLayout, element: GpuElement) {
    let dtype = dtype(element);
    let data = rounded_data(&case.data(), dtype);
    let reference = dense(case, &data);
    let composed = composed_attention(case, &data, dtype).unwrap();
    let found = gpu.ring(case, &data, layout);
    if let Some(text) = kernel_deviation(name, dtype, (&found, &composed, &reference)) {
        panic!("{text}");
    }
}

/// A case of a drawn shape that tensor cores and the mask both matter in, of at most `rows` rows of queries: of larger
/// ones, batch rows and key heads are left out.
fn gpu_case(
    lengths: std::ops::RangeInclusive<usize>,
    head_dims: Vec<usize>,
    rows: usize,
) -> impl Strategy<Value = Case> {
    draw::case_of(lengths, head_dims, vec![1, 5, 17, 64, 100, usize::MAX], 90).prop_map(move |mut case| {
        while case.batch() > 1 && case.batch() * case.query_heads() * case.len() > rows {
            case.documents.pop();
            case.groups.pop();
        }
        let key_heads = if case.query_heads() * case.len() > rows { 1 } else { case.key_heads };
        // Scores of a few units, whatever the head size.
        Case { key_heads, scale: 2.0 / (case.head_dim as f64).sqrt(), ..case }
    })
}

/// How operands lie in memory, whether rows start on odd addresses, and when copies land.
type Memories = (Strides, bool, CopyLanding);

fn memories() -> impl Strategy<Value = Memories> {
    let landing = prop::sample::select(vec![CopyLanding::AtWait, CopyLanding::AtIssue]);
    (draw::strides(), prop::bool::weighted(0.2), landing)
}

fn compare(case: &Case, layout: &LayoutDraw, device: usize, (strides, odd, landing): Memories, element: usize) {
    let element = ELEMENTS[element];
    let device = if element == GpuElement::F32 && case.head_dim > 256 { 0 } else { device };
    let mut gpu = Gpu::new(element, case.head_dim, DEVICES[device]);
    (gpu.strides, gpu.odd, gpu.landing) = (strides, odd, landing);
    let name = format!("{element:?}, device {device}, {strides:?} {odd}, {} ranks, {case:?}", layout.ranks);
    check(&name, &gpu, case, &layout.layout(case.len()), element);
}

proptest! {
    #![proptest_config(draw::config(120))]

    #[test]
    fn small_heads(
        case in gpu_case(1..=100, vec![64, 64, 40, 3], 600), layout in draw::layout(70), device in 0usize..3,
        memories in memories(), element in 0usize..3,
    ) {
        compare(&case, &layout, device, memories, element);
    }
}

proptest! {
    #![proptest_config(draw::config(28))]

    #[test]
    fn heads_of_128(
        case in gpu_case(1..=70, vec![128, 72], 300), layout in draw::layout(70), device in 0usize..3,
        memories in memories(), element in 0usize..3,
    ) {
        compare(&case, &layout, device, memories, element);
    }

    #[test]
    fn heads_of_256(
        case in gpu_case(1..=50, vec![256, 160], 200), layout in draw::layout(50), device in 0usize..3,
        memories in memories(), element in 0usize..3,
    ) {
        compare(&case, &layout, device, memories, element);
    }

    #[test]
    fn heads_of_512(
        case in gpu_case(1..=30, vec![512, 300], 120), layout in draw::layout(40), device in 0usize..3,
        memories in memories(), element in 0usize..3,
    ) {
        compare(&case, &layout, device, memories, element);
    }
}

/// Every kernel of every table at least once, over several tiles in both directions.
#[test]
fn every_kernel() {
    for (head_dim, len) in [(64, 230), (128, 200), (256, 150), (512, 90)] {
        let ids = documents(&[len / 2, 1, len - len / 2 - 1]);
        let rule = Rule::sliding(len / 3).with_groups();
        let row = Case::row(ids, block(len, &[10..30, len / 2 - 9..len / 2]), rule);
        let case = Case { head_dim, key_heads: 1, group: 2, scale: 2.0 / (head_dim as f64).sqrt(), ..row };
        for element in ELEMENTS {
            let mut ran = BTreeSet::new();
            for (number, device) in DEVICES.into_iter().enumerate() {
                if element == GpuElement::F32 && (number > 0 && head_dim == 512 || number == 1) {
                    continue;
                }
                let gpu = Gpu::new(element, head_dim, device);
                let layout = candle_cp::SequenceLayout::head_tail(len, 2).unwrap();
                check(&format!("{element:?} {head_dim} {device:?}"), &gpu, &case, &layout, element);
                ran.extend(gpu.ran.lock().unwrap().drain(..));
            }
            let text = compiled(element, head_dim).expect("a module").text;
            let entries = text.lines().filter_map(|line| line.strip_prefix(".visible .entry "));
            let entries: BTreeSet<String> = entries.map(|line| line.trim_end_matches('(').to_string()).collect();
            assert_eq!(ran, entries, "{element:?} {head_dim}");
        }
    }
}
