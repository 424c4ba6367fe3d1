//! f32, bf16 and f16 against the f64 reference, by the error-ratio rule.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::{LossOptions, SequenceLayout, linear_cross_entropy};
use common::loss_reference::cross_entropy;
use common::ratio::{assert_ratio, composed_attention, composed_loss, rounded, rounded_data};
use common::ring::numbers;
use common::{Case, Data, Rule, Run, block, dense, documents, magnitude, ring};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn check_attention(name: &str, case: &Case, data: &Data, dtype: DType) {
    let data = rounded_data(data, dtype);
    let reference = dense(case, &data);
    let composed = composed_attention(case, &data, dtype).unwrap();
    // Backward gets its probabilities from the log-sum-exp, which f32 keeps to half a unit in the last place: against
    // a computation in f32 that counts, against one in 16 bits it does not.
    let slack = if dtype == DType::F32 { f64::from(f32::EPSILON) * magnitude(&reference.lse) } else { 0.0 };
    for ranks in [1, 2, 4] {
        let layout = SequenceLayout::head_tail(case.len(), ranks).unwrap();
        let actual = ring(case, &data, &layout, Run { dtype, ..Run::default() });
        for (((part, a), (_, c)), (_, r)) in actual.parts().into_iter().zip(composed.parts()).zip(reference.parts()) {
            assert_ratio(&format!("{name} over {ranks} ranks: {part}"), dtype, (a, c, r), slack);
        }
    }
}

#[test]
fn attention_in_every_type() {
    let rows = [
        ("causal", Case { head_dim: 16, ..Case::plain(150, Rule::CAUSAL) }),
        ("large head", Case { head_dim: 80, group: 3, scale: 0.11, ..Case::plain(90, Rule::CAUSAL) }),
        ("packed", {
            let rule = Rule::sliding(30).with_groups();
            Case::row(documents(&[70, 1, 60]), block(131, &[20..60, 100..110]), rule)
        }),
    ];
    for (name, case) in rows {
        for dtype in TYPES {
            check_attention(name, &case, &case.data(), dtype);
        }
    }
}

#[test]
fn scores_near_300_do_not_overflow_in_any_type() {
    let case = Case { spread: 11.0, scale: 1.0, ..Case::plain(140, Rule::CAUSAL) };
    let data = case.data();
    let largest = dense(&case, &data).lse.into_iter().fold(0.0, f64::max);
    assert!(largest > 300.0, "the largest score is about {largest}");
    for dtype in TYPES {
        check_attention("scores near 300", &case, &case.data(), dtype);
    }
    // All scores near -300: e^-300 is 0 in f32 unless the maximum is taken out.
    let near = |x: &[f64], center: f64| x.iter().map(|x| center + x / 100.0).collect::<Vec<_>>();
    let negative = Data { q: near(&data.q, 7.0), k: near(&data.k, -7.0), ..data };
    assert!(dense(&case, &negative).lse.iter().all(|&x| x < -250.0));
    check_attention("scores near -300", &case, &negative, DType::F32);
}

#[test]
fn loss_in_every_type() {
    const WIDTH: usize = 24;
    let numbers_of = |count: usize, spread: f64, seed: u64| {
        Case { key_heads: 1, group: 1, head_dim: WIDTH, spread, seed, ..Case::plain(count, Rule::CAUSAL) }.data().q
    };
    for dtype in TYPES {
        let (hidden, weight) = (rounded(&numbers_of(30, 2.0, 1), dtype), rounded(&numbers_of(57, 1.0, 2), dtype));
        let labels: Vec<i64> = (0..30).map(|i| if i % 5 == 0 { -100 } else { i * 11 % 57 }).collect();
        let reference = cross_entropy(&hidden, &weight, &labels, 24.0, Some(10.0));
        let composed = composed_loss((&hidden, &weight, &labels), 24.0, 10.0, dtype).unwrap();
        for chunk_tokens in [None, Some(7)] {
            let leaf = |x: &[f64]| {
                let x = Tensor::from_slice(x, (x.len() / WIDTH, WIDTH), &Device::Cpu).unwrap();
                Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap()
            };
            let (h, w) = (leaf(&hidden), leaf(&weight));
            let l = Tensor::new(labels.as_slice(), &Device::Cpu).unwrap();
            let options = LossOptions { softcap: Some(10.0), chunk_tokens, ..LossOptions::new(24.0) };
            let loss = linear_cross_entropy(&h, &w, &l, &options).unwrap();
            let gradients = loss.backward().unwrap();
            let of = |x: &Var| numbers(gradients.get(x).expect("attached")).unwrap();
            assert_ratio("loss", dtype, (&numbers(&loss).unwrap(), &[composed.loss], &[reference.loss]), 0.0);
            assert_ratio("hidden gradient", dtype, (&of(&h), &composed.d_hidden, &reference.d_hidden), 0.0);
            assert_ratio("weight gradient", dtype, (&of(&w), &composed.d_weight, &reference.d_weight), 0.0);
        }
    }
}
