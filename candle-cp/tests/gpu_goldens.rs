//! The attention goldens by the GPU kernels in the emulator: each with the mask of its file, queries and keys being any
//! tokens, and those of whole rows on three ranks by the rule.

mod common;
#[path = "common/direct.rs"]
mod direct;
#[path = "common/emulated.rs"]
mod emulated;

use candle_core::{DType, Device, Tensor};
use candle_cp::{LayoutKind, gpu::GpuElement};
use common::devices::{DEVICES, ELEMENTS, dtype};
use common::ratio::{Pairs, composed_pairs, kernel_deviation, rounded_data};
use common::ring::named_layout;
use common::{Case, Data, Outcome, Rule, magnitude, max_difference};
use direct::{Direct, Placing, Problem};
use emulated::Gpu;
use ptx_emulator::CopyLanding;
use std::collections::HashMap;
use std::path::PathBuf;

const SLIDING_12: Rule = Rule::sliding(12).with_groups();
const SLIDING_16: Rule = Rule::sliding(16).with_groups();

/// File, rule and scale, as in `index.json`.
const GOLDENS: [(&str, Rule, f64); 15] = [
    ("d16_bidirectional_padded", Rule::BIDIRECTIONAL, 0.25),
    ("d16_full", Rule::CAUSAL, 1.0),
    ("d16_full_docs_mqa", Rule::CAUSAL, 1.0),
    ("d16_full_ignores_vision", Rule::CAUSAL, 1.0),
    ("d16_shard_all_keys", SLIDING_12, 1.0),
    ("d16_shard_one_peer", SLIDING_12, 1.0),
    ("d16_shard_one_peer_full", Rule::CAUSAL, 1.0),
    ("d16_sliding", SLIDING_12, 1.0),
    ("d16_sliding_vision", SLIDING_12, 1.0),
    ("d16_sliding_vision_docs", SLIDING_12, 1.0),
    ("d16_sliding_vision_padded", SLIDING_12, 1.0),
    ("d256_sliding_vision_docs", SLIDING_16, 1.0),
    ("d512_full_docs", Rule::CAUSAL, 1.0),
    ("d64_full_docs", Rule::CAUSAL, 1.0),
    ("d64_sliding_vision_docs", SLIDING_16, 1.0),
];

fn folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "fixtures", "attention"].iter().collect()
}

struct Golden {
    tensors: HashMap<String, Tensor>,
    rule: Rule,
    scale: f64,
}

impl Golden {
    fn load((file, rule, scale): (&str, Rule, f64)) -> Self {
        let path = folder().join(file).with_extension("safetensors");
        Self { tensors: candle_core::safetensors::load(path, &Device::Cpu).expect("a golden"), rule, scale }
    }

    fn numbers(&self, name: &str) -> Vec<f64> {
        common::ring::numbers(&self.tensors[name]).expect("numbers")
    }

    fn integers(&self, name: &str) -> Vec<Vec<i64>> {
        self.tensors[name].to_vec2().expect("integers [B, S]")
    }

    fn data(&self) -> Data {
        let [q, k, v, d_out] = ["q", "k", "v", "dout"].map(|name| self.numbers(name));
        Data { q, k, v, d_out }
    }

    fn expected(&self) -> Outcome {
        let [out, lse, dq, dk, dv] = ["out", "lse", "dq", "dk", "dv"].map(|name| self.numbers(name));
        Outcome { out, lse, dq, dk, dv }
    }

    fn pairs(&self) -> Pairs {
        let shape = |name: &str| self.tensors[name].dims4().expect("[B, H, S, D]");
        let allowed = self.numbers("mask").iter().map(|&seen| seen == 1.0).collect();
        Pairs { query_shape: shape("q"), key_shape: shape("k"), allowed, scale: self.scale }
    }

    /// Documents one after the other, tokens in the order of their positions; keys in two chunks of uneven lengths.
    fn problem(&self) -> Problem {
        let of_row = |(documents, positions): (Vec<i64>, Vec<i64>)| {
            let place =
                |(document, position): (&i64, &i64)| (*document >= 0).then(|| (document * 1000 + position) as u32);
            documents.iter().zip(&positions).map(place).collect()
        };
        let places = self.integers("k_doc").into_iter().zip(self.integers("k_pos")).map(of_row).collect();
        let keys = self.pairs().key_shape.2;
        Problem { pairs: self.pairs(), places, chunks: vec![0..keys / 3, keys / 3..keys] }
    }

    /// The golden as a case of whole rows, if it is one.
    fn case(&self) -> Option<Case> {
        let same = |name: &str| self.integers(&format!("q_{name}")) == self.integers(&format!("k_{name}"));
        if !["doc", "pos", "group"].into_iter().all(same) {
            return None;
        }
        let Pairs { query_shape: (_, query_heads, _, head_dim), key_shape: (_, key_heads, ..), .. } = self.pairs();
        Some(Case {
            documents: self.integers("k_doc"),
            groups: self.integers("k_group"),
            rule: self.rule,
            key_heads,
            group: query_heads / key_heads,
            head_dim,
            scale: self.scale,
            spread: 1.0,
            seed: 0,
        })
    }
}

/// What is off by more than f32 may be: 5e-6 of the largest entry, and 2e-6 of each log-sum-exp. No score of the goldens
/// comes near 80, from where on a wider tolerance would hold.
fn assert_golden(name: &str, found: &Outcome, expected: &Outcome, factor: f64) {
    for ((part, found), (_, expected)) in found.parts().into_iter().zip(expected.parts()) {
        if part == "lse" {
            for (found, expected) in found.iter().zip(expected) {
                let off = max_difference(&[*found], &[*expected]);
                assert!(off <= 2e-6 * expected.abs().max(1.0) || found == expected, "{name}: lse is off by {off:e}");
            }
            continue;
        }
        let off = max_difference(found, expected);
        let allowed = factor * magnitude(expected).max(1.0);
        assert!(off <= allowed, "{name}: {part} is off by {off:e}, allowed {allowed:e}");
    }
}

#[test]
fn the_table_is_the_folder() {
    let files = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_string())
        .collect();
    names.sort();
    assert_eq!(names, GOLDENS.map(|(name, ..)| name));
    // What the short types are compared with is the goldens' own computation.
    for golden in GOLDENS {
        let loaded = Golden::load(golden);
        let composed = composed_pairs(&loaded.pairs(), &loaded.data(), DType::F64).unwrap();
        assert_golden(golden.0, &composed, &loaded.expected(), 2e-7);
    }
}

#[test]
fn by_their_own_masks() {
    for (number, golden) in GOLDENS.into_iter().enumerate() {
        let loaded = Golden::load(golden);
        for element in ELEMENTS {
            // f32 with head size 512 runs on the first device only.
            let device = if element == GpuElement::F32 { 0 } else { number % DEVICES.len() };
            let data = rounded_data(&loaded.data(), dtype(element));
            let mut direct = Direct::new((element, DEVICES[device]), loaded.problem(), &data, Placing::default());
            direct.landing = if number % 2 == 0 { CopyLanding::AtWait } else { CopyLanding::AtIssue };
            let module = direct.module();
            let found = direct.outcome(&module).unwrap_or_else(|fault| panic!("{}: {fault}", golden.0));
            compare(golden.0, &loaded, element, &data, &found);
        }
    }
}

#[test]
fn whole_rows_on_three_ranks() {
    let mut whole = 0;
    for golden in GOLDENS {
        let loaded = Golden::load(golden);
        let Some(case) = loaded.case() else { continue };
        whole += 1;
        let layout = named_layout(LayoutKind::HeadTail, case.len(), 3);
        // One of the short types.
        for element in [GpuElement::F32, [GpuElement::Bf16, GpuElement::F16][whole % 2]] {
            let data = rounded_data(&loaded.data(), dtype(element));
            let found = Gpu::new(element, case.head_dim, DEVICES[0]).ring(&case, &data, &layout);
            compare(&format!("{} on ranks", golden.0), &loaded, element, &data, &found);
        }
    }
    assert_eq!(whole, 12);
}

/// f32 against the golden, short types by the error ratio on the rounded numbers.
fn compare(name: &str, golden: &Golden, element: GpuElement, data: &Data, found: &Outcome) {
    if element == GpuElement::F32 {
        return assert_golden(name, found, &golden.expected(), 5e-6);
    }
    let (pairs, dtype) = (golden.pairs(), dtype(element));
    let reference = composed_pairs(&pairs, data, DType::F64).unwrap();
    let composed = composed_pairs(&pairs, data, dtype).unwrap();
    if let Some(text) = kernel_deviation(name, dtype, (found, &composed, &reference)) {
        panic!("{text}");
    }
}
