//! Attention between tokens given by coordinates: any subset of a batch's tokens, in any order.

mod common;

use candle_core::{Device, Tensor, Var};
use candle_cp::{Coordinates, Result, attend_with_coordinates};
use common::dense::dense_between;
use common::draw;
use common::ring::{mask_rule, numbers};
use common::{Case, Data, EXACT, Outcome, deviation};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Positions inside the document; padding gets any.
fn positions(documents: &[i64]) -> Vec<i64> {
    let start = |i: usize| documents.iter().position(|&d| d == documents[i]).unwrap();
    (0..documents.len()).map(|i| (i - start(i)) as i64).collect()
}

fn coordinates(case: &Case, chosen: &[usize]) -> Coordinates {
    let pick = |row: &Vec<i64>| chosen.iter().map(|&i| row[i]).collect::<Vec<_>>();
    Coordinates {
        positions: case.documents.iter().map(|d| pick(&positions(d))).collect(),
        documents: case.documents.iter().map(pick).collect(),
        groups: case.groups.iter().map(pick).collect(),
    }
}

/// Some tokens in random order: at least one.
fn choose(len: usize, rng: &mut StdRng) -> Vec<usize> {
    let mut all: Vec<usize> = (0..len).collect();
    if rng.random_bool(0.5) {
        all.shuffle(rng);
    }
    let first = rng.random_range(0..len);
    all[first..rng.random_range(first + 1..=len)].to_vec()
}

/// Tokens `chosen` of `[B, H, S, width]`.
fn pick(x: &[f64], len: usize, width: usize, chosen: &[usize]) -> Vec<f64> {
    x.chunks(len * width)
        .flat_map(|head| chosen.iter().flat_map(|&i| head[i * width..(i + 1) * width].to_vec()))
        .collect()
}

fn attend(case: &Case, data: &Data, queries: &[usize], keys: &[usize]) -> Result<Outcome> {
    let (b, h, len, d) = case.query_shape();
    let var = |x: &[f64], heads, chosen: &[usize]| {
        Var::from_vec(pick(x, len, d, chosen), (b, heads, chosen.len(), d), &Device::Cpu)
    };
    let (q, k, v) =
        (var(&data.q, h, queries)?, var(&data.k, case.key_heads, keys)?, var(&data.v, case.key_heads, keys)?);
    let (query, key) = (coordinates(case, queries), coordinates(case, keys));
    let (out, lse) = attend_with_coordinates((&q, &k, &v), &mask_rule(&case.rule), case.scale, &query, &key)?;
    let d_out = Tensor::from_vec(pick(&data.d_out, len, d, queries), out.shape(), &Device::Cpu)?;
    let gradients = (&out * d_out)?.sum_all()?.backward()?;
    let of = |x: &Var| numbers(gradients.get(x).expect("a leaf"));
    Ok(Outcome { out: numbers(&out)?, lse: numbers(&lse)?, dq: of(&q)?, dk: of(&k)?, dv: of(&v)? })
}

proptest! {
    #![proptest_config(draw::config(150))]

    #[test]
    fn any_subset_in_any_order_equals_the_dense_reference(case in draw::short_case()) {
        let mut rng = StdRng::seed_from_u64(case.seed);
        let (queries, keys) = (choose(case.len(), &mut rng), choose(case.len(), &mut rng));
        let data = case.data();
        let actual = attend(&case, &data, &queries, &keys).unwrap();
        let expected = dense_between(&case, &data, &queries, &keys);
        let (len, d) = (case.len(), case.head_dim);
        let expected = [
            pick(&expected.out, len, d, &queries),
            pick(&expected.lse, len, 1, &queries),
            pick(&expected.dq, len, d, &queries),
            pick(&expected.dk, len, d, &keys),
            pick(&expected.dv, len, d, &keys),
        ];
        for ((name, a), b) in actual.parts().into_iter().zip(&expected) {
            if let Some(text) = deviation(name, a, b, EXACT) {
                return Err(TestCaseError::fail(text));
            }
        }
    }
}

#[test]
fn coordinates_that_do_not_fit_are_named() {
    let case = Case::plain(4, common::Rule::CAUSAL);
    let data = case.data();
    let all = [0, 1, 2, 3];
    let zeros = |heads| Tensor::zeros((1, heads, 4, 6), candle_core::DType::F64, &Device::Cpu).unwrap();
    let (q, k) = (zeros(4), zeros(2));
    let good = coordinates(&case, &all);
    let refuse = |query: &Coordinates, key: &Coordinates| {
        let result = attend_with_coordinates((&q, &k, &k), &mask_rule(&case.rule), 1.0, query, key);
        result.unwrap_err().to_string()
    };
    let short = coordinates(&case, &[0, 1]);
    let text = "is positions of lengths [2], but the tensor has 1 rows of 4 tokens; pass one per token";
    assert_eq!(refuse(&short, &good), format!("query {text}"));
    assert_eq!(refuse(&good, &short), format!("key {text}"));
    let negative = Coordinates { positions: vec![vec![0, 1, -2, 3]], ..good.clone() };
    let text = "position is -2, but positions start at 0; count inside the document";
    assert_eq!(refuse(&good, &negative), text);
    let far = Coordinates { positions: vec![vec![0, 1, 2, 1 << 40]], ..good.clone() };
    assert!(refuse(&good, &far).contains("at most 2^31 positions"));
    assert!(attend(&case, &data, &all, &all).is_ok());
}
