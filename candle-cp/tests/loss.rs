//! Linear, soft cap and cross entropy in one operator, against plain loops.

mod common;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_cp::{LossOptions, Result, linear_cross_entropy};
use common::loss_reference::{Loss, cross_entropy};
use common::ring::numbers;
use common::{Case, Rule, assert_exact, deviation};

const TOKENS: usize = 21;
const WIDTH: usize = 5;
const VOCABULARY: usize = 37;

fn random(count: usize, spread: f64, seed: u64) -> Vec<f64> {
    Case { key_heads: 1, group: 1, head_dim: 1, spread, seed, ..Case::plain(count, Rule::CAUSAL) }.data().q
}

fn hidden() -> Vec<f64> {
    random(TOKENS * WIDTH, 3.0, 1)
}

fn weight() -> Vec<f64> {
    random(VOCABULARY * WIDTH, 2.0, 2)
}

/// Every fourth label is ignored; the first and last word occur.
fn labels() -> Vec<i64> {
    let of = |i: i64| if i % 4 == 1 { -100 } else { i * 9 % VOCABULARY as i64 };
    (0..TOKENS as i64).map(|i| if i == 2 { VOCABULARY as i64 - 1 } else { of(i) }).collect()
}

fn options(count: f64, softcap: Option<f64>, chunk_tokens: Option<usize>) -> LossOptions {
    LossOptions { count, softcap, chunk_tokens }
}

/// The operator on `[3, 7, H]`, times `factor`.
fn run(labels: &[i64], options: &LossOptions, dtype: DType, factor: f64) -> Result<Loss> {
    let leaf = |x: Vec<f64>, shape: &[usize]| -> Result<Var> {
        Ok(Var::from_tensor(&Tensor::from_vec(x, shape, &Device::Cpu)?.to_dtype(dtype)?)?)
    };
    let hidden = leaf(hidden(), &[3, TOKENS / 3, WIDTH])?;
    let weight = leaf(weight(), &[VOCABULARY, WIDTH])?;
    let labels = Tensor::from_slice(labels, (3, TOKENS / 3), &Device::Cpu)?;
    let loss = linear_cross_entropy(&hidden, &weight, &labels, options)?;
    let expected = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    assert_eq!((loss.dtype(), loss.rank()), (expected, 0));
    let gradients = (&loss * factor)?.backward()?;
    let of = |x: &Var| numbers(gradients.get(x).expect("the graph is attached"));
    Ok(Loss { loss: loss.to_dtype(DType::F64)?.to_scalar()?, d_hidden: of(&hidden)?, d_weight: of(&weight)? })
}

#[track_caller]
fn assert_loss(name: &str, actual: &Loss, expected: &Loss) {
    assert_exact(&format!("{name}: loss"), &[actual.loss], &[expected.loss]);
    assert_exact(&format!("{name}: hidden gradient"), &actual.d_hidden, &expected.d_hidden);
    assert_exact(&format!("{name}: weight gradient"), &actual.d_weight, &expected.d_weight);
}

#[test]
fn equals_plain_loops_with_and_without_soft_cap_in_any_chunks() -> Result<()> {
    let labels = labels();
    for softcap in [None, Some(30.0), Some(2.5)] {
        let expected = cross_entropy(&hidden(), &weight(), &labels, 15.0, softcap);
        assert!(common::magnitude(&expected.d_hidden) > 0.01 && common::magnitude(&expected.d_weight) > 0.01);
        for chunk in [None, Some(1), Some(4), Some(5), Some(7), Some(TOKENS), Some(1000), Some(0)] {
            let actual = run(&labels, &options(15.0, softcap, chunk), DType::F64, 1.0)?;
            assert_loss(&format!("cap {softcap:?}, chunk {chunk:?}"), &actual, &expected);
        }
    }
    Ok(())
}

#[test]
fn a_factor_on_the_loss_scales_the_gradients() -> Result<()> {
    let labels = labels();
    let once = run(&labels, &LossOptions::new(15.0), DType::F64, 1.0)?;
    let scaled = run(&labels, &LossOptions::new(15.0), DType::F64, -2.5)?;
    let times = |x: &[f64]| x.iter().map(|x| -2.5 * x).collect::<Vec<_>>();
    assert_exact("hidden gradient", &scaled.d_hidden, &times(&once.d_hidden));
    assert_exact("weight gradient", &scaled.d_weight, &times(&once.d_weight));
    Ok(())
}

#[test]
fn ignored_labels_add_nothing() -> Result<()> {
    let labels = labels();
    let result = run(&labels, &LossOptions::new(15.0), DType::F64, 1.0)?;
    for (token, gradient) in result.d_hidden.chunks(WIDTH).enumerate() {
        assert_eq!(gradient.iter().all(|&x| x == 0.0), labels[token] == -100, "token {token}");
    }
    Ok(())
}

#[test]
fn no_label_gives_zero_with_the_graph_attached() -> Result<()> {
    let all_ignored = vec![-100; TOKENS];
    for (labels, count) in [(&all_ignored, 0.0), (&all_ignored, 15.0), (&labels(), 0.0)] {
        for softcap in [None, Some(30.0)] {
            // `run` panics if backward does not reach both leaves.
            let result = run(labels, &options(count, softcap, Some(4)), DType::F64, 1.0)?;
            assert_eq!(result.loss, 0.0);
            assert!(result.d_hidden.iter().chain(&result.d_weight).all(|&x| x == 0.0));
        }
    }
    Ok(())
}

#[test]
fn no_token_gives_zero_with_the_graph_attached() -> Result<()> {
    let hidden = Var::zeros((1, 0, WIDTH), DType::F32, &Device::Cpu)?;
    let weight = Var::zeros((VOCABULARY, WIDTH), DType::F32, &Device::Cpu)?;
    let labels = Tensor::zeros((1, 0), DType::I64, &Device::Cpu)?;
    let loss = linear_cross_entropy(&hidden, &weight, &labels, &LossOptions::new(3.0))?;
    assert_eq!(loss.to_scalar::<f32>()?, 0.0);
    let gradients = loss.backward()?;
    assert!(numbers(gradients.get(&weight).expect("attached"))?.iter().all(|&x| x == 0.0));
    assert_eq!(gradients.get(&hidden).expect("attached").dims(), [1, 0, WIDTH]);
    Ok(())
}

#[test]
fn validation_without_gradients_gives_the_same_loss() -> Result<()> {
    let labels = labels();
    let expected = cross_entropy(&hidden(), &weight(), &labels, 15.0, Some(3.0));
    let hidden = Tensor::from_vec(hidden(), (TOKENS, WIDTH), &Device::Cpu)?;
    let weight = Tensor::from_vec(weight(), (VOCABULARY, WIDTH), &Device::Cpu)?;
    let labels = Tensor::from_vec(labels, TOKENS, &Device::Cpu)?;
    let loss = linear_cross_entropy(&hidden, &weight, &labels, &options(15.0, Some(3.0), Some(4)))?;
    assert_exact("loss", &[loss.to_scalar::<f64>()?], &[expected.loss]);
    assert!(!loss.track_op());
    Ok(())
}

#[test]
fn a_frozen_weight_leaves_the_hidden_gradient() -> Result<()> {
    let expected = cross_entropy(&hidden(), &weight(), &labels(), 15.0, None);
    let hidden = Var::from_slice(&hidden(), (TOKENS, WIDTH), &Device::Cpu)?;
    // A transposed weight, as a tied embedding may be stored.
    let weight = Tensor::from_vec(weight(), (VOCABULARY, WIDTH), &Device::Cpu)?.t()?.contiguous()?.t()?;
    let labels = Tensor::from_vec(labels(), TOKENS, &Device::Cpu)?;
    let gradients = linear_cross_entropy(&hidden, &weight, &labels, &LossOptions::new(15.0))?.backward()?;
    assert_exact("hidden gradient", &numbers(gradients.get(&hidden).expect("attached"))?, &expected.d_hidden);
    Ok(())
}

/// Hidden states, weight and labels of a large vocabulary: blocks of it, parts of several blocks, a last one cut short.
struct Large {
    hidden: Vec<f64>,
    weight: Vec<f64>,
    labels: Vec<i64>,
}

impl Large {
    const VOCABULARY: usize = 34 * 2048 + 77;
    const WIDTH: usize = 3;

    fn new() -> Self {
        let last = Self::VOCABULARY as i64 - 1;
        let labels = vec![-100, 0, 2047, -100, 2048, 65_536, last, -100];
        let weight = random(Self::VOCABULARY * Self::WIDTH, 2.0, 5);
        Self { hidden: random(labels.len() * Self::WIDTH, 3.0, 6), weight, labels }
    }

    fn leaves(&self, dtype: DType) -> Result<(Var, Var, Tensor)> {
        let leaf = |x: &[f64]| -> Result<Var> {
            let x = Tensor::from_slice(x, (x.len() / Self::WIDTH, Self::WIDTH), &Device::Cpu)?;
            Ok(Var::from_tensor(&x.to_dtype(dtype)?)?)
        };
        Ok((leaf(&self.hidden)?, leaf(&self.weight)?, Tensor::new(self.labels.as_slice(), &Device::Cpu)?))
    }

    fn run(&self, dtype: DType, options: &LossOptions) -> Result<Loss> {
        let (hidden, weight, labels) = self.leaves(dtype)?;
        let loss = linear_cross_entropy(&hidden, &weight, &labels, options)?;
        let gradients = loss.backward()?;
        let of = |x: &Var| numbers(gradients.get(x).expect("attached"));
        Ok(Loss { loss: loss.to_dtype(DType::F64)?.to_scalar()?, d_hidden: of(&hidden)?, d_weight: of(&weight)? })
    }
}

#[test]
fn a_large_vocabulary_equals_plain_loops() -> Result<()> {
    let large = Large::new();
    for softcap in [None, Some(5.0)] {
        let expected = cross_entropy(&large.hidden, &large.weight, &large.labels, 5.0, softcap);
        for chunk in [None, Some(2)] {
            let actual = large.run(DType::F64, &options(5.0, softcap, chunk))?;
            assert_loss(&format!("cap {softcap:?}, chunk {chunk:?}"), &actual, &expected);
        }
    }
    Ok(())
}

#[test]
fn the_number_of_threads_changes_no_bit() -> Result<()> {
    let large = Large::new();
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| large.run(DType::F32, &options(5.0, Some(5.0), Some(3))))
    };
    let (one, four) = (on(1)?, on(4)?);
    assert_eq!((one.loss, one.d_hidden, one.d_weight), (four.loss, four.d_hidden, four.d_weight));
    Ok(())
}

#[test]
fn a_transposed_weight_gives_the_same_in_every_type() -> Result<()> {
    let large = Large::new();
    let options = options(5.0, None, None);
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let (hidden, weight, labels) = large.leaves(dtype)?;
        let transposed = Var::from_tensor(&weight.t()?.contiguous()?)?;
        let loss = linear_cross_entropy(&hidden, &transposed.t()?, &labels, &options)?;
        let gradients = loss.backward()?;
        let expected = large.run(dtype, &options)?;
        // f32 and f64 read the weight where it is, so that products may add up in another order.
        let tolerance = if dtype == DType::F32 { 1e-6 } else { 1e-12 };
        let d_weight = gradients.get(&transposed).expect("attached").t()?.contiguous()?;
        let close = |name, actual: &Tensor, expected: &[f64]| -> Result<()> {
            assert_eq!(deviation(name, &numbers(actual)?, expected, tolerance), None, "{dtype:?}");
            Ok(())
        };
        close("loss", &loss, &[expected.loss])?;
        close("hidden gradient", gradients.get(&hidden).expect("attached"), &expected.d_hidden)?;
        close("weight gradient", &d_weight, &expected.d_weight)?;
    }
    Ok(())
}

#[test]
fn tokens_without_a_label_are_not_read() -> Result<()> {
    let labels = labels();
    let expected = cross_entropy(&hidden(), &weight(), &labels, 15.0, Some(3.0));
    let mut poisoned = hidden();
    let ignored = poisoned.chunks_mut(WIDTH).zip(&labels).filter(|(_, label)| **label == -100);
    ignored.for_each(|(row, _)| row.fill(f64::NAN));
    let hidden = Var::from_slice(&poisoned, (TOKENS, WIDTH), &Device::Cpu)?;
    let weight = Var::from_slice(&weight(), (VOCABULARY, WIDTH), &Device::Cpu)?;
    let labels = Tensor::from_vec(labels, TOKENS, &Device::Cpu)?;
    let loss = linear_cross_entropy(&hidden, &weight, &labels, &options(15.0, Some(3.0), Some(4)))?;
    let gradients = loss.backward()?;
    let of = |x: &Var| numbers(gradients.get(x).expect("attached"));
    let actual = Loss { loss: loss.to_scalar()?, d_hidden: of(&hidden)?, d_weight: of(&weight)? };
    assert_loss("NaN where labels are ignored", &actual, &expected);
    Ok(())
}

#[test]
fn backward_twice_gives_the_same_gradients() -> Result<()> {
    let hidden = Var::from_slice(&hidden(), (TOKENS, WIDTH), &Device::Cpu)?;
    let weight = Var::from_slice(&weight(), (VOCABULARY, WIDTH), &Device::Cpu)?;
    let labels = Tensor::from_vec(labels(), TOKENS, &Device::Cpu)?;
    let loss = linear_cross_entropy(&hidden, &weight, &labels, &options(15.0, Some(3.0), Some(4)))?;
    let (once, again) = ((&loss * 2.0)?.backward()?, (&loss * 2.0)?.backward()?);
    for x in [&hidden, &weight] {
        let of = |gradients: &GradStore| numbers(gradients.get(x).expect("attached"));
        assert_eq!(of(&once)?, of(&again)?);
    }
    Ok(())
}

#[test]
fn only_what_is_tracked_gets_a_gradient() -> Result<()> {
    let expected = cross_entropy(&hidden(), &weight(), &labels(), 15.0, None);
    let hidden = Var::from_slice(&hidden(), (TOKENS, WIDTH), &Device::Cpu)?;
    let weight = Var::from_slice(&weight(), (VOCABULARY, WIDTH), &Device::Cpu)?;
    let labels = Tensor::from_vec(labels(), TOKENS, &Device::Cpu)?;
    let options = LossOptions::new(15.0);
    let gradients = linear_cross_entropy(&hidden.detach(), &weight, &labels, &options)?.backward()?;
    assert_exact("weight gradient", &numbers(gradients.get(&weight).expect("attached"))?, &expected.d_weight);
    assert_eq!(gradients.get_ids().count(), 1);
    let gradients = linear_cross_entropy(&hidden, &weight.detach(), &labels, &options)?.backward()?;
    assert_exact("hidden gradient", &numbers(gradients.get(&hidden).expect("attached"))?, &expected.d_hidden);
    assert_eq!(gradients.get_ids().count(), 1);
    Ok(())
}

#[test]
fn large_logits_do_not_overflow() -> Result<()> {
    // Several blocks of words, with the largest logits in different ones.
    let (hidden, weight) = (random(4 * WIDTH, 300.0, 3), random(5 * VOCABULARY * WIDTH, 300.0, 4));
    let labels = [0, 5, 100, 184];
    let expected = cross_entropy(&hidden, &weight, &labels, 4.0, None);
    assert!(expected.loss > 1e4);
    let leaf = |x: &[f64]| -> Result<Var> {
        let x = Tensor::from_slice(x, (x.len() / WIDTH, WIDTH), &Device::Cpu)?.to_dtype(DType::F32)?;
        Ok(Var::from_tensor(&x)?)
    };
    let (hidden, weight) = (leaf(&hidden)?, leaf(&weight)?);
    let labels = Tensor::new(&labels, &Device::Cpu)?;
    let loss = linear_cross_entropy(&hidden, &weight, &labels, &LossOptions::new(4.0))?;
    let actual = f64::from(loss.to_scalar::<f32>()?);
    assert!((actual / expected.loss - 1.0).abs() < 1e-5, "{actual} instead of {}", expected.loss);
    let gradient = numbers(loss.backward()?.get(&hidden).expect("attached"))?;
    assert!(deviation("gradient", &gradient, &expected.d_hidden, 1e-5).is_none());
    Ok(())
}

#[track_caller]
fn assert_refused(hidden: (usize, usize), weight: DType, label: i64, count: f64, text: &str) {
    let zeros = |shape, dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let labels = Tensor::full(label, 4, &Device::Cpu).unwrap();
    let (hidden, weight) = (zeros(hidden, DType::F32), zeros((VOCABULARY, WIDTH), weight));
    let error = linear_cross_entropy(&hidden, &weight, &labels, &LossOptions::new(count)).unwrap_err();
    assert_eq!(error.to_string(), text);
}

#[test]
fn bad_input_is_named() {
    let (shape, dtype) = ((4, WIDTH), DType::F32);
    for label in [37, -1, -99, i64::MAX] {
        let text = format!("label is {label}, but labels are 0..37 or -100; check the tokenizer against the model");
        assert_refused(shape, dtype, label, 4.0, &text);
    }
    let text = "labels is [4] for hidden [3, 5], but one label per token; shard both with the same context";
    assert_refused((3, WIDTH), dtype, 0, 4.0, text);
    let text = "hidden is of shape [4, 10], but its last dimension is H = 5; pass the weight of the same model";
    assert_refused((4, 2 * WIDTH), dtype, 0, 4.0, text);
    let text = "dtype is F32 hidden and F64 weight, but both need the same type; convert one of them";
    assert_refused(shape, DType::F64, 0, 4.0, text);
    for (count, given) in [(-1.0, "-1"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
        let text = format!("count is {given}, but a count of labels is finite and not negative; count them");
        assert_refused(shape, dtype, 0, count, &text);
    }
    let zeros = |dtype| Tensor::zeros((4, WIDTH), dtype, &Device::Cpu).unwrap();
    let labels = Tensor::zeros(4, DType::I64, &Device::Cpu).unwrap();
    let error = linear_cross_entropy(&zeros(DType::U32), &zeros(DType::U32), &labels, &LossOptions::new(4.0));
    assert_eq!(error.unwrap_err().to_string(), "dtype is U32, but use f32, f64, bf16 or f16; convert both");
    for (cap, given) in [(0.0, "0"), (-30.0, "-30"), (f64::NAN, "NaN")] {
        let error = linear_cross_entropy(&zeros(dtype), &zeros(dtype), &labels, &options(4.0, Some(cap), None));
        let text = format!("softcap is {given}, but a soft cap is finite and above 0; pass None for no cap");
        assert_eq!(error.unwrap_err().to_string(), text);
    }
}
