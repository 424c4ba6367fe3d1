//! Gradients come home to the rank that owns the key: with one-hot inputs every number of a gradient belongs to one
//! pair of query and key, so that a gradient of the wrong key or from the wrong chunk cannot hide in a sum.

mod common;

use candle_cp::SequenceLayout;
use common::dense::allowed;
use common::{Case, Data, Rule, Run, assert_exact, block, documents, layouts, ring};

const LEN: usize = 13;

/// One head of size `LEN`, so that one-hot rows name a token.
fn case() -> Case {
    let rule = Rule::sliding(6).with_groups();
    let case = Case::row(documents(&[9, 4]), block(LEN, &[3..8]), rule);
    Case { key_heads: 1, group: 1, head_dim: LEN, scale: 0.8, ..case }
}

fn one_hot(factor: f64) -> Vec<f64> {
    (0..LEN * LEN).map(|i| if i / LEN == i % LEN { factor } else { 0.0 }).collect()
}

/// `[query][key]`, by hand.
fn probabilities(case: &Case, data: &Data) -> Vec<f64> {
    let mut all = Vec::new();
    for i in 0..LEN {
        let weight = |j: usize| {
            let dot: f64 = (0..LEN).map(|d| data.q[i * LEN + d] * data.k[j * LEN + d]).sum();
            let seen = allowed(&case.rule, &case.documents[0], &case.groups[0], i, j);
            if seen { (case.scale * dot).exp() } else { 0.0 }
        };
        let weights: Vec<f64> = (0..LEN).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        all.extend(weights.iter().map(|w| w / sum));
    }
    all
}

fn transposed(x: &[f64]) -> Vec<f64> {
    (0..LEN * LEN).map(|i| x[i % LEN * LEN + i / LEN]).collect()
}

#[track_caller]
fn for_every_layout(check: impl Fn(&str, &SequenceLayout)) {
    for ranks in [3, 4, 8] {
        layouts(LEN, ranks).iter().for_each(|(name, layout)| check(&format!("{name} over {ranks}"), layout));
    }
}

#[test]
fn value_gradient_of_every_pair_reaches_its_key() {
    let case = case();
    let data = Data { v: one_hot(1.0), d_out: one_hot(1.0), ..case.data() };
    let p = probabilities(&case, &data);
    for_every_layout(|name, layout| {
        let result = ring(&case, &data, layout, Run::default());
        // out[query][d] picks v[key = d]; dv[key][d] picks d_out[query = d].
        assert_exact(&format!("{name}: out"), &result.out, &p);
        assert_exact(&format!("{name}: dv"), &result.dv, &transposed(&p));
    });
}

#[test]
fn key_and_query_gradient_of_every_pair_reaches_its_owner() {
    let case = case();
    let factor = 1.7;
    let random = case.data();
    let pair_gradient = |data: &Data| -> Vec<f64> {
        let p = probabilities(&case, data);
        let mut all = Vec::new();
        for i in 0..LEN {
            let dot = |j: usize| (0..LEN).map(|d| data.d_out[i * LEN + d] * data.v[j * LEN + d]).sum::<f64>();
            let mean: f64 = (0..LEN).map(|j| p[i * LEN + j] * dot(j)).sum();
            all.extend((0..LEN).map(|j| p[i * LEN + j] * (dot(j) - mean) * case.scale * factor));
        }
        all
    };
    let by_query = Data { q: one_hot(factor), ..random.clone() };
    let by_key = Data { k: one_hot(factor), ..random };
    for_every_layout(|name, layout| {
        // dk[key][d] picks q[query = d].
        let dk = ring(&case, &by_query, layout, Run::default()).dk;
        assert_exact(&format!("{name}: dk"), &dk, &transposed(&pair_gradient(&by_query)));
        // dq[query][d] picks k[key = d].
        let dq = ring(&case, &by_key, layout, Run::default()).dq;
        assert_exact(&format!("{name}: dq"), &dq, &pair_gradient(&by_key));
    });
}

#[test]
fn digits_tell_which_keys_a_query_saw_and_which_queries_a_key_served() {
    let case = Case { head_dim: 1, ..case() };
    let powers: Vec<f64> = (0..LEN).map(|i| 10f64.powi(i as i32)).collect();
    let sees = |i: usize, j: usize| allowed(&case.rule, &case.documents[0], &case.groups[0], i, j);
    let count = |i: usize| (0..LEN).filter(|&j| sees(i, j)).count() as f64;
    // Equal scores: a query averages its keys.
    let d_out = (0..LEN).map(|i| powers[i] * count(i)).collect();
    let data = Data { q: vec![0.0; LEN], k: vec![0.0; LEN], v: powers.clone(), d_out };
    for_every_layout(|name, layout| {
        let result = ring(&case, &data, layout, Run::default());
        for i in 0..LEN {
            let seen: f64 = (0..LEN).filter(|&j| sees(i, j)).map(|j| powers[j]).sum();
            assert_eq!((result.out[i] * count(i)).round(), seen, "{name}: keys of query {i}");
            let served: f64 = (0..LEN).filter(|&q| sees(q, i)).map(|q| powers[q]).sum();
            assert_eq!(result.dv[i].round(), served, "{name}: queries of key {i}");
        }
    });
}
