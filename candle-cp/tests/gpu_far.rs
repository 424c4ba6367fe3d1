//! Index arithmetic of the GPU kernels past 2^32: rows of numbers that lie gigabytes apart, and batch rows with very high
//! numbers. Only what is touched is there.

mod common;
#[path = "common/direct.rs"]
mod direct;

use candle_cp_kernels::gpu::GpuElement;
use common::devices::{DEVICES, ELEMENTS, dtype};
use common::ratio::{Pairs, rounded_data};
use common::ring::same_bits;
use common::{Case, Outcome, Rule, documents};
use direct::{Direct, Placing, Problem, kernel_alone};
use ptx_emulator::{Fault, Module};

/// Elements from one batch row, head and token to the next: of each, some multiple that occurs is past 2^32, and what is
/// left of it in 32 bits is nobody's row.
const FAR: [usize; 3] = [(1 << 33) + (1 << 14), (1 << 32) + (1 << 12), (1 << 27) + (1 << 10)];
const ROWS_BEFORE: usize = 1 << 27;

fn case(len: usize, head_dim: usize, group: usize) -> Case {
    let rows = vec![documents(&[len]), documents(&[len - 5, 5])];
    let groups = vec![vec![-1; len]; 2];
    let (key_heads, scale) = (if head_dim > 64 { 1 } else { 2 }, 2.0 / (head_dim as f64).sqrt());
    Case { documents: rows, groups, key_heads, head_dim, group, scale, ..Case::plain(len, Rule::sliding(len - 10)) }
}

fn placed(case: &Case, element: GpuElement, placing: Placing) -> Direct {
    let problem = Problem {
        pairs: Pairs::of(case),
        places: vec![(0..case.len() as u32).map(Some).collect(); case.batch()],
        chunks: vec![0..20, 20..case.len()],
    };
    Direct::new((element, DEVICES[0]), problem, &rounded_data(&case.data(), dtype(element)), placing)
}

fn outcome(case: &Case, element: GpuElement, placing: Placing) -> Outcome {
    let mut direct = placed(case, element, placing);
    let module = direct.module();
    direct.outcome(&module).unwrap_or_else(|fault| panic!("{element:?}, {placing:?}: {fault}"))
}

fn assert_same(found: &Outcome, expected: &Outcome) {
    for ((part, found), (_, expected)) in found.parts().into_iter().zip(expected.parts()) {
        assert!(same_bits(found, expected), "{part}");
    }
}

/// Aligned rows and rows that are not, one query head per key head and several.
#[test]
fn results_do_not_depend_on_where_rows_lie() {
    for (len, head_dim, group) in [(80, 64, 2), (80, 60, 1), (40, 128, 2), (36, 256, 2), (36, 512, 1)] {
        let case = case(len, head_dim, group);
        for element in ELEMENTS {
            let near = outcome(&case, element, Placing::default());
            let far = outcome(&case, element, Placing { strides: Some(FAR), rows_before: ROWS_BEFORE });
            assert_same(&far, &near);
        }
    }
}

/// A change of a line of PTX, given the register that it sets.
type Change = fn(&str) -> String;

/// What is past 32 bits is lost.
const CUT: Change = |to| format!("and.b64 {to}, {to}, 4294967295;");
/// What is past 32 bits is a fault.
const TRAPPED: Change = |to| {
    format!("{{ .reg .b64 %past; .reg .pred %far; shr.u64 %past, {to}, 32; setp.ne.s64 %far, %past, 0; @%far trap; }}")
};

/// The text with a change after one of its 64-bit products.
fn changed(text: &str, line: usize, change: Change) -> String {
    let lines = text.lines().enumerate().map(|(number, content)| match content.trim().strip_prefix("mul.lo.s64") {
        Some(product) if number == line => {
            format!("{content} {}", change(product.split(',').next().expect("a register").trim()))
        }
        _ => content.to_string(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Products of one kernel that are tried, of those that are past 32 bits.
const AT_MOST: usize = 4;

/// Whether a kernel of another text does the same as the right one.
fn is_same(direct: &mut Direct, (kernel, text): (&str, &str), module: &Module, right: &Outcome) -> bool {
    let changed = Module::parse(text).unwrap_or_else(|error| panic!("{error}"));
    let same = |found: Result<Vec<f64>, Fault>, right: &[f64]| found.is_ok_and(|found| same_bits(&found, right));
    match kernel {
        "forward" => same(direct.forward(&changed, module).map(|(out, _)| out), &right.out),
        "backward_queries" => same(direct.gradient_of_queries(&changed), &right.dq),
        _ => same(direct.gradients_of_keys(&changed).map(|both| both.concat()), &[&right.dk[..], &right.dv].concat()),
    }
}

#[test]
fn a_product_in_32_bits_is_found() {
    // The second of three tiles of a chunk is a full one.
    let case = Case { documents: vec![documents(&[150])], groups: vec![vec![-1; 150]], ..case(150, 64, 2) };
    let mut direct = placed(&case, GpuElement::F16, Placing { strides: Some(FAR), rows_before: ROWS_BEFORE });
    let module = direct.module();
    let right = direct.outcome(&module).unwrap_or_else(|fault| panic!("{fault}"));
    // Forward comes last, since backward reads what it left.
    for kernel in ["backward_queries", "backward_keys", "forward"] {
        let text = kernel_alone(direct.text(), kernel);
        let products = text.lines().enumerate().filter(|(_, line)| line.trim().starts_with("mul.lo.s64"));
        let products: Vec<usize> = products.map(|(number, _)| number).collect();
        let mut is_right = |text: &str| is_same(&mut direct, (kernel, text), &module, &right);
        assert!(is_right(&text), "{kernel} alone is right");
        let mut tried = 0;
        // Neighbours are far from each other; no kernel has a multiple of 233 products.
        for i in 0..products.len() {
            let line = products[i * 233 % products.len()];
            if tried < AT_MOST && !is_right(&changed(&text, line, TRAPPED)) {
                tried += 1;
                let content = text.lines().nth(line).expect("a line");
                assert!(!is_right(&changed(&text, line, CUT)), "{kernel}: {content}");
            }
        }
        assert_eq!(tried, AT_MOST, "{kernel}");
    }
}
