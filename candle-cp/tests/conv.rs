//! The short causal convolution: goldens, and the plain rule in f64 on any layout.

mod common;

use candle_core::{DType, Device, Result, Tensor, Var, safetensors};
use candle_cp::comm::{Traffic, threads};
use candle_cp::{ConvActivation, CpContext, SequenceLayout, Tokens};
use common::draw::{self, LayoutDraw};
use common::ring::{numbers, options, run_all, same_bits};
use common::{EXACT, deviation, documents, layouts};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// One convolution, apart from how it is sharded.
#[derive(Debug, Clone)]
struct Case {
    /// `[B][S]`, negative for padding.
    documents: Vec<Vec<i64>>,
    channels: usize,
    taps: usize,
    silu: bool,
    /// `x` is a view with tokens innermost.
    transposed: bool,
}

/// Row-major numbers: `x`, `d_out` `[B, S, C]`, `weight` `[C, K]`. Padding holds NaN: nobody may read it.
struct Data {
    x: Vec<f64>,
    weight: Vec<f64>,
    d_out: Vec<f64>,
}

#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    out: Vec<f64>,
    dx: Vec<f64>,
    dw: Vec<f64>,
    /// The part of `dw` of every rank.
    parts: Vec<Vec<f64>>,
}

impl Case {
    fn row(documents: Vec<i64>, taps: usize) -> Self {
        Self { documents: vec![documents], channels: 5, taps, silu: true, transposed: false }
    }

    fn len(&self) -> usize {
        self.documents[0].len()
    }

    fn shape(&self) -> (usize, usize, usize) {
        (self.documents.len(), self.len(), self.channels)
    }

    fn data(&self) -> Data {
        let mut rng = StdRng::seed_from_u64(self.len() as u64);
        let mut fill = |count: usize| -> Vec<f64> { (0..count).map(|_| rng.random_range(-1.5..1.5)).collect() };
        let ids: Vec<i64> = self.documents.concat();
        let mut data = Data {
            x: fill(ids.len() * self.channels),
            weight: fill(self.channels * self.taps),
            d_out: fill(ids.len() * self.channels),
        };
        for numbers in [&mut data.x, &mut data.d_out] {
            let padding = numbers.chunks_mut(self.channels).zip(&ids).filter(|(_, id)| **id < 0);
            padding.for_each(|(row, _)| row.fill(f64::NAN));
        }
        data
    }

    /// The rule in plain loops over all pairs of a token and one at most `K - 1` before it.
    fn reference(&self, data: &Data, layout: &SequenceLayout) -> Outcome {
        let (len, c, k) = (self.len(), self.channels, self.taps);
        let mut owner = vec![0; layout.padded_len()];
        for rank in 0..layout.ranks() {
            layout.global_indices(rank).into_iter().for_each(|i| owner[i] = rank);
        }
        let zeros = || vec![0.0; data.x.len()];
        let (mut out, mut dx, mut dw) = (zeros(), zeros(), vec![0.0; data.weight.len()]);
        let mut parts = vec![dw.clone(); layout.ranks()];
        for (row, ids) in self.documents.iter().enumerate() {
            for t in (0..len).filter(|&t| ids[t] >= 0) {
                let seen: Vec<_> = (0..len).filter(|&s| s <= t && t - s < k && ids[s] == ids[t]).collect();
                for channel in 0..c {
                    let at = |token: usize| (row * len + token) * c + channel;
                    let tap = |s: usize| channel * k + (k - 1 - (t - s));
                    let y: f64 = seen.iter().map(|&s| data.weight[tap(s)] * data.x[at(s)]).sum();
                    let sigmoid = 1.0 / (1.0 + (-y).exp());
                    let (value, slope) = match self.silu {
                        true => (y * sigmoid, sigmoid + y * sigmoid * (1.0 - sigmoid)),
                        false => (y, 1.0),
                    };
                    out[at(t)] = value;
                    for &s in &seen {
                        let gradient = data.d_out[at(t)] * slope;
                        dx[at(s)] += gradient * data.weight[tap(s)];
                        dw[tap(s)] += gradient * data.x[at(s)];
                        parts[owner[t]][tap(s)] += gradient * data.x[at(s)];
                    }
                }
            }
        }
        Outcome { out, dx, dw, parts }
    }

    fn activation(&self) -> ConvActivation {
        if self.silu { ConvActivation::Silu } else { ConvActivation::None }
    }

    fn tokens(&self) -> Tokens {
        let groups = self.documents.iter().map(|row| vec![-1; row.len()]).collect();
        Tokens::new(self.documents.clone(), groups).expect("documents")
    }

    /// As a model runs it, on rank threads.
    fn run(&self, data: &Data, layout: &SequenceLayout, dtype: DType) -> Outcome {
        let all = threads::run(layout.ranks(), &options(), |comm| {
            let context = CpContext::new(comm, layout.clone(), self.tokens())?;
            let leaf = |x: &[f64], shape: &[usize]| {
                Var::from_tensor(&Tensor::from_slice(x, shape, &Device::Cpu)?.to_dtype(dtype)?)
            };
            let (b, s, c) = self.shape();
            let (x, weight) = (leaf(&data.x, &[b, s, c])?, leaf(&data.weight, &[c, self.taps])?);
            let mut local = context.shard(&x, 1)?;
            if self.transposed {
                local = local.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
            }
            let out = context.causal_conv(&local, &weight, self.activation())?;
            let d_out = leaf(&data.d_out, &[b, s, c])?;
            let d_out = context.shard(&d_out, 1)?;
            let gradients = (&out * d_out)?.sum_all()?.backward()?;
            let of = |x: &Var| gradients.get(x).expect("backward reaches every input on every rank").clone();
            let part = of(&weight);
            let [dx, dw] = [&of(&x), &part].map(|x| context.comm().all_reduce_sum(x));
            for (i, global) in context.layout().global_indices(context.rank()).into_iter().enumerate() {
                let zero = || Ok::<_, candle_cp::Error>(numbers(&out.narrow(1, i, 1)?)?.iter().all(|&x| x == 0.0));
                assert!(global < s || zero()?, "output of padding");
            }
            let out = numbers(&context.gather(&out.detach(), 1)?)?;
            Ok::<_, candle_cp::Error>((out, numbers(&dx?)?, numbers(&dw?)?, numbers(&part)?))
        });
        let all = all.expect("the ranks run");
        let (out, dx, dw, _) = all[0].clone();
        assert!(all.iter().all(|(o, x, w, _)| same_bits(o, &out) && same_bits(x, &dx) && same_bits(w, &dw)));
        Outcome { out, dx, dw, parts: all.into_iter().map(|(_, _, _, part)| part).collect() }
    }
}

fn difference(actual: &Outcome, expected: &Outcome, tolerance: f64) -> Option<String> {
    let named =
        [("out", &actual.out, &expected.out), ("dx", &actual.dx, &expected.dx), ("dw", &actual.dw, &expected.dw)];
    let parts = actual.parts.iter().zip(&expected.parts).map(|(a, b)| ("a rank's dw", a, b));
    named.into_iter().chain(parts).find_map(|(name, a, b)| deviation(name, a, b, tolerance))
}

/// Over every layout and 1 to 8 ranks, with and without the activation.
#[track_caller]
fn assert_everywhere(case: &Case) {
    let data = case.data();
    for silu in [true, false] {
        let case = Case { silu, ..case.clone() };
        for ranks in 1..=8 {
            for (name, layout) in layouts(case.len(), ranks) {
                let expected = case.reference(&data, &layout);
                if let Some(text) = difference(&case.run(&data, &layout, DType::F64), &expected, EXACT) {
                    panic!("{name} over {ranks} ranks, {} taps, silu {silu}: {text}", case.taps);
                }
            }
        }
    }
}

#[test]
fn several_documents() {
    for taps in [1, 2, 4, 7] {
        assert_everywhere(&Case::row(documents(&[37, 51, 40]), taps));
    }
}

#[test]
fn documents_of_one_token() {
    assert_everywhere(&Case::row(documents(&[1; 11]), 4));
    assert_everywhere(&Case::row(documents(&[1, 1, 9, 1, 2, 1, 1, 7, 1]), 4));
}

#[test]
fn documents_that_end_around_a_slice_border() {
    for lengths in [[8, 8, 8], [7, 9, 8], [9, 7, 8], [10, 4, 10]] {
        assert_everywhere(&Case::row(documents(&lengths), 4));
    }
}

#[test]
fn slices_shorter_than_the_filter() {
    for lengths in [&[10][..], &[7, 3], &[2, 1, 7]] {
        for taps in [4, 7, 12] {
            assert_everywhere(&Case::row(documents(lengths), taps));
        }
    }
}

#[test]
fn ranks_with_padding_only() {
    let mut ids = documents(&[9, 5]);
    ids.resize(32, -1);
    assert_everywhere(&Case::row(ids, 4));
    // Padding first, and between documents.
    assert_everywhere(&Case::row([vec![-1; 10], vec![3; 9], vec![-1; 2], vec![8; 5], vec![-1; 6]].concat(), 4));
}

#[test]
fn rows_of_different_documents() {
    let mut padded = documents(&[20]);
    padded.resize(31, -1);
    let documents = vec![documents(&[11, 13, 7]), padded];
    assert_everywhere(&Case { documents, transposed: true, ..Case::row(vec![0], 4) });
}

#[test]
fn more_tokens_and_channels_than_a_kernel_takes_at_once() {
    let mut case = Case { channels: 261, ..Case::row(documents(&[300, 237, 3]), 4) };
    let layout = SequenceLayout::head_tail(case.len(), 3).expect("a layout");
    for silu in [true, false] {
        case.silu = silu;
        let data = case.data();
        let (actual, expected) = (case.run(&data, &layout, DType::F64), case.reference(&data, &layout));
        assert_eq!(difference(&actual, &expected, EXACT), None);
    }
}

proptest! {
    #![proptest_config(draw::config(200))]

    #[test]
    fn random_rows_equal_the_rule(
        case in draw::short_case(),
        layout in draw::layout(9),
        channels in 1usize..4,
        taps in 1usize..8,
        silu in any::<bool>(),
        transposed in any::<bool>(),
    ) {
        let case = Case { documents: case.documents, channels, taps, silu, transposed };
        let (data, layout): (_, SequenceLayout) = (case.data(), LayoutDraw::layout(&layout, case.len()));
        let (actual, expected) = (case.run(&data, &layout, DType::F64), case.reference(&data, &layout));
        if let Some(text) = difference(&actual, &expected, EXACT) {
            return Err(TestCaseError::fail(text));
        }
    }
}

#[test]
fn goldens() -> Result<()> {
    for name in ["single", "documents", "initial_state"] {
        let path = format!("{}/../fixtures/delta_rule/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let tensors = safetensors::load(path, &Device::Cpu)?;
        let of = |name: &str| numbers(&tensors[name]).expect("a golden tensor");
        let (weight, ids) = (&tensors["conv.weight"], tensors["doc_ids"].to_vec2::<i64>()?);
        assert_eq!(weight.dims(), [24, 1, 4]);
        let case = Case { documents: ids, channels: 24, ..Case::row(vec![0], 4) };
        let data = Data { x: of("conv.x"), weight: of("conv.weight"), d_out: of("conv.dout") };
        for ranks in [1, 2, 3, 4, 8] {
            for (layout_name, layout) in layouts(case.len(), ranks) {
                // Computed in f64, stored in f32.
                for (dtype, tolerance) in [(DType::F64, 1e-7), (DType::F32, 1e-6)] {
                    let actual = case.run(&data, &layout, dtype);
                    let parts = actual.parts.clone();
                    let expected = Outcome { out: of("conv.out"), dx: of("conv.dx"), dw: of("conv.dweight"), parts };
                    let found = difference(&actual, &expected, tolerance);
                    assert_eq!(found, None, "{name}, {layout_name} over {ranks} ranks in {dtype:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn short_types_sum_in_f32() {
    let case = Case { channels: 35, ..Case::row(documents(&[29, 1, 40]), 4) };
    let layout = SequenceLayout::head_tail(case.len(), 3).expect("a layout");
    for (dtype, places) in [(DType::F32, 24), (DType::BF16, 8), (DType::F16, 11)] {
        let rounded = |x: &[f64]| {
            let x = Tensor::from_slice(x, x.len(), &Device::Cpu).and_then(|x| x.to_dtype(dtype));
            numbers(&x.expect("numbers")).expect("numbers")
        };
        let data = case.data();
        let data = Data { x: rounded(&data.x), weight: rounded(&data.weight), d_out: rounded(&data.d_out) };
        let (mut actual, expected) = (case.run(&data, &layout, dtype), case.reference(&data, &layout));
        // The sum over ranks is the caller's, and its roundings too: parts are compared instead.
        actual.dw.clone_from(&expected.dw);
        // One rounding at the end, and those of sums in f32.
        let tolerance = 0.5f64.powi(places) + 2e-6;
        assert_eq!(difference(&actual, &expected, tolerance), None, "{dtype:?}");
    }
}

/// Bytes that every rank sends: halos, then their gradients.
fn bytes(case: &Case, layout: &SequenceLayout) -> Vec<[usize; 2]> {
    let all = threads::run(layout.ranks(), &options(), |comm| {
        let context = CpContext::new(comm, layout.clone(), case.tokens())?;
        let (b, _, c) = case.shape();
        let x = Var::ones((b, layout.local_len(context.rank()), c), DType::BF16, &Device::Cpu)?;
        let weight = Tensor::ones((c, case.taps), DType::BF16, &Device::Cpu)?;
        context.causal_conv(&x, &weight, ConvActivation::Silu)?.sum_all()?.backward()?;
        let stats = context.comm().stats();
        let sent = [Traffic::Halo, Traffic::HaloGradient].map(|kind| stats.of(kind).bytes_sent);
        assert_eq!(stats.bytes_sent(), sent.iter().sum::<usize>());
        Ok::<_, candle_cp::Error>(sent)
    });
    all.expect("the ranks run")
}

#[test]
fn what_travels_does_not_grow_with_the_sequence() {
    let contiguous = |lengths: &[usize]| {
        let case = Case::row(documents(lengths), 4);
        bytes(&case, &SequenceLayout::contiguous(case.len(), 4).expect("a layout"))
    };
    // Three tokens of five channels, in bf16 and as sums in f32.
    let (token, gradient) = (3 * 5 * 2, 3 * 5 * 4);
    let expected = [[token, 0], [token, gradient], [token, gradient], [0, gradient]];
    assert_eq!(contiguous(&[32]), expected);
    assert_eq!(contiguous(&[3200]), expected);
    // Nothing for documents that start with a slice, one token for one that starts a token earlier.
    assert_eq!(contiguous(&[8, 8, 8, 8]), [[0; 2]; 4]);
    assert_eq!(contiguous(&[7, 25])[..2], [[token / 3, 0], [token, gradient / 3]]);
    let head_tail = |len| bytes(&Case::row(vec![0; len], 4), &SequenceLayout::head_tail(len, 4).expect("a layout"));
    assert_eq!(head_tail(32), head_tail(3200));
}

#[test]
fn frozen_inputs_change_nothing_for_the_others() -> Result<()> {
    let case = Case::row(documents(&[7, 9]), 4);
    let layout = SequenceLayout::contiguous(case.len(), 3).expect("a layout");
    let data = case.data();
    let expected = case.run(&data, &layout, DType::F64);
    let all = threads::run(3, &options(), |comm| {
        let context = CpContext::new(comm, layout.clone(), case.tokens())?;
        let x = Var::from_slice(&data.x, case.shape(), &Device::Cpu)?;
        let weight = Var::from_slice(&data.weight, (5, 1, 4), &Device::Cpu)?;
        let d_out = context.shard(&Tensor::from_slice(&data.d_out, case.shape(), &Device::Cpu)?, 1)?;
        let convolve = |x: &Tensor, weight: &Tensor| {
            let out = context.causal_conv(&context.shard(x, 1)?, weight, ConvActivation::Silu)?;
            Ok::<_, candle_cp::Error>((out * &d_out)?.sum_all()?)
        };
        // One rank may know less than another: messages do not depend on what is frozen where.
        let frozen = if context.rank() == 1 { weight.detach() } else { weight.as_tensor().clone() };
        let loss = convolve(&x, &frozen)?;
        let gradients = loss.backward()?;
        assert_eq!(gradients.get(&weight).is_none(), context.rank() == 1);
        let dx = gradients.get(&x).expect("tracked");
        assert!(same_bits(&numbers(dx)?, &numbers(loss.backward()?.get(&x).expect("tracked"))?), "backward again");
        let dx = numbers(&context.comm().all_reduce_sum(dx)?)?;
        let gradients = convolve(&x.detach(), &weight)?.backward()?;
        let dw = gradients.get(&weight).expect("tracked");
        assert_eq!(dw.dims(), [5, 1, 4]);
        assert!(gradients.get(&x).is_none());
        Ok::<_, candle_cp::Error>((dx, numbers(dw)?))
    });
    for (rank, (dx, part)) in all.expect("the ranks run").into_iter().enumerate() {
        assert!(same_bits(&dx, &expected.dx) && same_bits(&part, &expected.parts[rank]), "rank {rank}");
    }
    Ok(())
}

#[test]
fn a_rank_that_does_not_take_part_is_named() {
    let layout = SequenceLayout::contiguous(12, 3).expect("a layout");
    let (ended, _) = run_all(3, options().deadline, |comm| {
        let context = CpContext::new(comm, layout.clone(), Tokens::single_document(1, 12))?;
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
        if context.rank() > 0 {
            context.causal_conv(&zeros(&[1, 4, 2])?, &zeros(&[2, 4])?, ConvActivation::None)?;
        }
        Ok(())
    });
    let text = ended[1].clone().expect_err("rank 0 sent nothing");
    assert!(text.starts_with("rank 1: Halo (call 0, step 1) waits for rank 0, which has already returned"), "{text}");
}

#[test]
fn bad_input_is_named() -> Result<()> {
    let context = CpContext::single(Tokens::single_document(2, 6)).expect("a context");
    let refused = |x: (&[usize], DType), weight: (&[usize], DType), text: &str| -> Result<()> {
        let [x, weight] = [x, weight].map(|(shape, dtype)| Tensor::zeros(shape, dtype, &Device::Cpu));
        let error = context.causal_conv(&x?, &weight?, ConvActivation::Silu).expect_err("refused");
        assert_eq!(error.to_string(), text);
        Ok(())
    };
    let (x, weight) = (&[2, 6, 3][..], &[3, 4][..]);
    for shape in [&[3][..], &[3, 2, 4], &[3, 0], &[0, 4], &[3, 1, 1, 4]] {
        let text = format!(
            "weight is {shape:?}, but one filter per channel is [C, K] or [C, 1, K], with at least one tap; \
             reshape the filters to [C, K]"
        );
        refused((x, DType::F32), (shape, DType::F32), &text)?;
    }
    for shape in [&[2, 6][..], &[1, 6, 3], &[2, 5, 3], &[2, 6, 4]] {
        let text = format!(
            "x is {shape:?}, but this rank has [2, 6, 3], by context and weight; shard it with the context that \
             convolves, and pass the weight of the same layer"
        );
        refused((shape, DType::F32), (weight, DType::F32), &text)?;
    }
    let text = "dtype is F32 x and BF16 weight, but both need the same type; convert one of them";
    refused((x, DType::F32), (weight, DType::BF16), text)?;
    let text = "dtype is U32, but the short convolution runs in f32, f64, bf16 and f16; convert x and weight";
    refused((x, DType::U32), (weight, DType::U32), text)
}
