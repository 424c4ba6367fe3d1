//! What no number may reach: NaN with the GPU kernels in the emulator, and queries that see no key.

mod common;
#[path = "common/emulated.rs"]
mod emulated;

use candle_cp::SequenceLayout;
use common::dense::allowed;
use common::devices::{DEVICES, ELEMENTS, dtype};
use common::ratio::{composed_attention, kernel_deviation, rounded_data};
use common::ring::same_bits;
use common::{Case, Outcome, Rule, block, dense, documents};
use emulated::Gpu;

/// Two query heads for each of two key heads.
fn case(documents: Vec<i64>, rule: Rule) -> Case {
    let len = documents.len();
    let groups = block(len, &[len / 2 - 4..len / 2 + 4]);
    Case { head_dim: 64, scale: 0.25, ..Case::row(documents, groups, rule) }
}

/// Asserts that outputs and log-sum-exps are NaN where they have to be, and elsewhere those of `clean`, bit for bit.
fn assert_reach(name: &str, found: &Outcome, clean: &Outcome, reached: impl Fn(usize) -> bool) {
    let width = found.out.len() / found.lse.len();
    for (row, (out, lse)) in found.out.chunks(width).zip(&found.lse).enumerate() {
        if reached(row) {
            assert!(out.iter().all(|x| x.is_nan()) && lse.is_nan(), "{name}: row {row} sees the NaN");
        } else {
            let clean = (&clean.out[row * width..][..width], &clean.lse[row..=row]);
            assert!(same_bits(out, clean.0) && same_bits(&[*lse], clean.1), "{name}: row {row} does not see the NaN");
        }
    }
}

/// Over ranks, so that the NaN arrives with a chunk as well as in a rank's own keys; in masked tiles and in full ones.
#[test]
fn a_nan_key_or_query_reaches_who_may_see_it() {
    let windowed = case(documents(&[50, 41]), Rule::sliding(30).with_groups());
    let full = case(documents(&[200]), Rule::CAUSAL);
    // With the keys and queries that get a NaN.
    for (case, layout, places) in [
        (windowed, SequenceLayout::head_tail(91, 3).unwrap(), &[(20, 70), (60, 45)][..]),
        (full, SequenceLayout::contiguous(200, 2).unwrap(), &[(60, 45)][..]),
    ] {
        let (len, d) = (case.len(), case.head_dim);
        let (ids, groups) = (&case.documents[0], &case.groups[0]);
        for element in ELEMENTS {
            let gpu = Gpu::new(element, d, DEVICES[0]);
            let data = rounded_data(&case.data(), dtype(element));
            let clean = gpu.ring(&case, &data, &layout);
            let name = format!("{element:?}, {:?}", case.rule);
            // A key of the second key head, and a query of the first head.
            for &(key, query) in places {
                let mut broken = data.clone();
                broken.k[(len + key) * d + 5] = f64::NAN;
                broken.q[query * d + 63] = f64::NAN;
                let sees = |row: usize| row / len >= 2 && allowed(&case.rule, ids, groups, row % len, key);
                let found = gpu.ring(&case, &broken, &layout);
                assert_reach(&name, &found, &clean, |row| sees(row) || row == query);
            }
        }
    }
}

/// Three rows over three ranks: nothing but padding, three tokens between padding, tokens only.
fn with_blind_queries() -> Case {
    let mut row = vec![-1; 40];
    row[13..16].fill(2);
    Case {
        documents: vec![vec![-1; 40], row, documents(&[25, 15])],
        groups: vec![vec![-1; 40]; 3],
        ..case(vec![0; 40], Rule::sliding(9))
    }
}

#[test]
fn queries_without_keys_give_zeros() {
    let case = with_blind_queries();
    let (len, heads, d) = (case.len(), case.query_heads(), case.head_dim);
    let blind = |row: usize| case.documents[row / len / heads][row % len] < 0;
    for element in ELEMENTS {
        let gpu = Gpu::new(element, d, DEVICES[0]);
        let data = rounded_data(&case.data(), dtype(element));
        let (reference, composed) = (dense(&case, &data), composed_attention(&case, &data, dtype(element)).unwrap());
        // Padding to a multiple of the ranks is blind as well.
        for layout in [SequenceLayout::head_tail(len, 3).unwrap(), SequenceLayout::contiguous(len, 3).unwrap()] {
            let found = gpu.ring(&case, &data, &layout);
            assert_eq!(kernel_deviation("blind", dtype(element), (&found, &composed, &reference)), None);
            for (name, numbers) in found.parts() {
                assert!(numbers.iter().all(|x| !x.is_nan()), "NaN in {name}");
            }
            for row in (0..found.lse.len()).filter(|&row| blind(row)) {
                assert!(found.out[row * d..][..d].iter().all(|&x| x == 0.0), "output of row {row}");
                assert!(found.dq[row * d..][..d].iter().all(|&x| x == 0.0), "gradient of row {row}");
                assert_eq!(found.lse[row], f64::NEG_INFINITY);
            }
            for key in (0..found.dk.len() / d).filter(|key| case.documents[key / len / case.key_heads][key % len] < 0) {
                let gradients = [&found.dk[key * d..][..d], &found.dv[key * d..][..d]].concat();
                assert!(gradients.iter().all(|&x| x == 0.0), "gradient of key {key}");
            }
        }
    }
}

/// NaN in queries and keys of padding reaches nobody in forward.
#[test]
fn padding_is_seen_by_nobody() {
    let case = with_blind_queries();
    let (len, d) = (case.len(), case.head_dim);
    let layout = SequenceLayout::head_tail(len, 3).unwrap();
    for element in ELEMENTS {
        let gpu = Gpu::new(element, d, DEVICES[0]);
        let data = rounded_data(&case.data(), dtype(element));
        let clean = gpu.ring(&case, &data, &layout);
        let mut broken = data.clone();
        for (numbers, heads) in [(&mut broken.q, case.query_heads()), (&mut broken.k, case.key_heads)] {
            for (row, numbers) in numbers.chunks_mut(d).enumerate() {
                if case.documents[row / len / heads][row % len] < 0 {
                    numbers.fill(f64::NAN);
                }
            }
        }
        assert_reach(&format!("{element:?}"), &gpu.ring(&case, &broken, &layout), &clean, |_| false);
    }
}
