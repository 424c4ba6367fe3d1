//! What is drawn, and what the results are compared with.

use candle_cp_kernels::gpu::GpuElement;
use device_check::{Case, Data, ELEMENTS, HEADS, Placing, Sizes, composed, dense, draw, live_pairs};
use std::collections::BTreeSet;

const SIZES: Sizes = Sizes([60, 50, 40, 30]);

#[test]
fn random_cases_cover_what_kernels_have_to_do() {
    let (mut seen, mut ranks) = (BTreeSet::new(), BTreeSet::new());
    for number in 0..240 {
        let (case, data) = draw(number, ELEMENTS[number as usize % 3], number as usize / 3 % 4, SIZES);
        ranks.insert(case.query_ranks.len());
        seen.insert(format!("head {}", case.head_dim));
        seen.insert(format!("group {}", case.group));
        seen.insert(format!("{:?}", case.placing));
        let blind = (0..case.batch * case.queries)
            .filter(|row| case.seen(row / case.queries, row % case.queries).next().is_none())
            .count();
        seen.insert(format!("queries without keys {}", blind > 0));
        seen.insert(format!("keys ahead {}", (0..case.queries).any(|i| case.seen(0, i).any(|j| j > i))));
        // Every token is on one rank.
        let mut tokens: Vec<usize> = case.query_ranks.concat();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..case.queries).collect::<Vec<_>>());
        let again = draw(number, ELEMENTS[number as usize % 3], number as usize / 3 % 4, SIZES);
        assert_eq!((again.0.mask, again.1.q), (case.mask, data.q));
    }
    assert_eq!(ranks, [1, 2, 3, 4, 8].into());
    // 12 head sizes, 4 groups, 4 placings, both of each of two.
    let heads: BTreeSet<usize> = HEADS.concat().into_iter().collect();
    assert_eq!(seen.len(), heads.len() + 4 + 4 + 2 + 2, "{seen:?}");
}

/// Two queries of size 1 over two keys, of which the first query sees one.
fn by_hand() -> (Case, Data) {
    let case = Case {
        name: "by hand".into(),
        batch: 1,
        key_heads: 1,
        group: 1,
        head_dim: 1,
        queries: 3,
        keys: 2,
        scale: 0.5,
        mask: vec![true, false, true, true, false, false],
        positions: vec![0, 1],
        query_ranks: Vec::new(),
        key_ranks: Vec::new(),
        placing: Placing::default(),
    };
    // Scores of the second query: 0 and ln 3.
    let k = vec![0.0, 2.0 * 3f64.ln()];
    (case, Data { q: vec![5.0, 1.0, 1.0], k, v: vec![2.0, 6.0], d_out: vec![1.0, 8.0, 1.0] })
}

#[test]
fn the_reference_is_what_paper_gives() {
    let (case, data) = by_hand();
    let found = dense(&case, &data);
    let close = |found: &[f64], expected: &[f64]| {
        assert!(found.iter().zip(expected).all(|(a, b)| a == b || (a - b).abs() < 1e-12), "{found:?} {expected:?}");
    };
    // Probabilities 1; 1/4 and 3/4. Gradients of scores 0; -6 and 6, times the scale.
    close(&found.out, &[2.0, 5.0, 0.0]);
    close(&found.lse, &[0.0, 4f64.ln(), f64::NEG_INFINITY]);
    close(&found.dv, &[1.0 + 2.0, 6.0]);
    close(&found.dk, &[-3.0, 3.0]);
    close(&found.dq, &[0.0, 6.0 * 3f64.ln(), 0.0]);
}

#[test]
fn the_measure_rounds_as_its_type_does() {
    for (element, least, most) in
        [(GpuElement::F32, 1e-9, 1e-5), (GpuElement::F16, 1e-5, 1e-2), (GpuElement::Bf16, 1e-4, 1e-1)]
    {
        for class in 0..HEADS.len() {
            let (case, data) = draw(3, element, class, Sizes([50; 4]));
            let (reference, found) = (dense(&case, &data), composed(&case, &data, element));
            for (a, b) in [(reference.out, found.out), (reference.dq, found.dq), (reference.dk, found.dk)] {
                let largest = a.iter().fold(0.0, |x: f64, y| x.max(y.abs()));
                let error = a.iter().zip(b).fold(0.0, |x: f64, (a, b)| x.max((a - b).abs())) / largest;
                assert!((least..most).contains(&error), "{element:?} {class}: {error:e}");
            }
        }
    }
}

#[test]
fn pairs_are_counted_one_by_one() {
    for (tokens, window) in [(7, None), (7, Some(1)), (9, Some(4)), (3, Some(100))] {
        let sees = |q: usize, k: usize| k <= q && window.is_none_or(|window| q - k < window);
        let all = (0..tokens).map(|q| (0..tokens).filter(|&k| sees(q, k)).count()).sum::<usize>();
        assert_eq!(live_pairs(tokens, window), all);
    }
}
