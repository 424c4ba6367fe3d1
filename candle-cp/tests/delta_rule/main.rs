//! The gated delta rule under context parallelism against the plain recurrence.

mod goldens;
mod random;
mod reference;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{CommStats, Traffic};
use candle_cp::{CpContext, DeltaHeads, Error, SequenceLayout, Tokens};
use reference::{Case, assert_exact, differences, heads, layouts, on_ranks, recurrence, row};

fn over_ranks(case: &Case, ranks: impl IntoIterator<Item = usize>) {
    for ranks in ranks {
        for layout in layouts(case.len(), ranks) {
            assert_exact(case, &layout);
        }
    }
}

#[test]
fn documents_of_odd_lengths() {
    over_ranks(&Case::new(vec![row(&[37, 51, 40])]), 1..=8);
}

#[test]
fn one_document_passes_through_every_piece() {
    over_ranks(&Case::new(vec![row(&[300])]), [1, 2, 3, 4, 5, 8]);
}

#[test]
fn documents_of_one_token() {
    let lengths: Vec<usize> = (0..60).map(|i| if i % 13 == 7 { 9 } else { 1 }).collect();
    over_ranks(&Case::new(vec![row(&lengths)]), [1, 3, 8]);
}

#[test]
fn borders_at_the_edges_of_slices() {
    let case = Case::new(vec![row(&[16, 32, 16, 48, 16])]);
    over_ranks(&case, [1, 2, 4, 8]);
}

#[test]
fn ranks_with_only_padding() {
    let mut documents = row(&[30, 21]);
    documents.extend([-1; 45]);
    over_ranks(&Case::new(vec![documents]), [1, 3, 4, 8]);
    // Padding in between, too, and a batch of padding.
    let mut documents = row(&[30, 21]);
    documents.extend([-1; 45]);
    documents.extend([9; 30]);
    over_ranks(&Case::new(vec![documents]), [1, 4, 7]);
    over_ranks(&Case::new(vec![vec![-1; 20]]), [1, 3]);
}

#[test]
fn rows_shorter_than_the_ranks() {
    for len in [1, 2, 5, 9] {
        over_ranks(&Case::new(vec![row(&[len])]), [1, 2, 8]);
    }
}

#[test]
fn rows_of_a_batch_have_their_own_documents() {
    let mut padded = row(&[70, 3, 17]);
    padded.extend([-1; 38]);
    over_ranks(&Case::new(vec![row(&[37, 51, 40]), row(&[128]), padded]), [1, 2, 3, 8]);
}

#[test]
fn strong_decay_and_none() {
    for decays in [vec![-50.0], vec![0.0], vec![0.0, -50.0, -1e-3, -700.0], vec![-1e-6, -30.0]] {
        over_ranks(&Case { decays, ..Case::new(vec![row(&[90, 81])]) }, [1, 3]);
    }
}

#[test]
fn more_chunks_than_a_block() {
    let case = Case { heads: heads(3, 4), ..Case::new(vec![row(&[5, 2300])]) };
    over_ranks(&case, [1, 2]);
}

#[test]
fn heads_of_many_sizes() {
    for (key_dim, value_dim) in [(1, 1), (16, 16), (64, 128), (128, 64), (80, 33), (130, 144)] {
        for (key_heads, value_heads) in [(1, 1), (1, 3), (2, 2)] {
            let heads = DeltaHeads { key_heads, value_heads, key_dim, value_dim };
            over_ranks(&Case { heads, ..Case::new(vec![row(&[20, 75])]) }, [1, 3]);
        }
    }
}

/// Rounding of f32, and of inputs in short types, does not grow with the number of ranks or the strength of the decay.
#[test]
fn short_types_are_as_exact_as_they_can_be() {
    let decays = [vec![-0.02, -0.3, -2.0], vec![-1e-3], vec![-50.0, -1e-3]];
    for (dtype, allowed) in [(DType::F32, 3e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
        for decays in decays.clone() {
            let case = Case { decays, heads: heads(16, 16), ..Case::new(vec![row(&[37, 351, 40])]) };
            let mut data = case.data();
            // What the short type cannot hold is no error of the operator.
            for x in [&mut data.qkv, &mut data.g, &mut data.beta, &mut data.d_out] {
                let rounded = Tensor::new(&x[..], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                *x = reference::numbers(&rounded).unwrap();
            }
            let expected = recurrence(&case, &data);
            for layout in [1, 3, 8].into_iter().flat_map(|ranks| layouts(case.len(), ranks)) {
                let found: Vec<_> = on_ranks(&case, &data, &layout, dtype, |_| ()).into_iter().map(|f| f.0).collect();
                for (name, difference) in differences(&case, &expected, &layout, &found) {
                    assert!(difference <= allowed, "{dtype:?}: {name} is off by {difference:e} over {layout:?}");
                }
            }
        }
    }
}

/// Bytes that every rank sends: states, gradients of states, everything.
fn sent(case: &Case, layout: &SequenceLayout) -> Vec<[usize; 3]> {
    let look = |context: &CpContext| {
        let stats: CommStats = context.comm().stats();
        [stats.of(Traffic::State).bytes_sent, stats.of(Traffic::StateGradient).bytes_sent, stats.bytes_sent()]
    };
    on_ranks(case, &case.data(), layout, DType::F64, look).into_iter().map(|(_, sent)| sent).collect()
}

#[test]
fn bytes_do_not_grow_with_the_sequence() {
    let heads = heads(5, 7);
    let (state, transition) = (8 * 4 * 5 * 7, 8 * 4 * 5 * 5);
    let of = |len: usize| {
        let case = Case { heads, ..Case::new(vec![row(&[len])]) };
        sent(&case, &SequenceLayout::contiguous(len, 4).unwrap())
    };
    // The first rank has a state only, the last one nothing; the other way round for gradients. To three others each.
    let expected = [[state, 0], [state + transition, state], [state + transition, state], [0, state]]
        .map(|[s, g]| [3 * s, 3 * g, 3 * (s + g)]);
    assert_eq!(of(40), expected);
    assert_eq!(of(400), expected);
    // Head-tail: 0 and 7 meet the ends, the fourth rank's two pieces are one.
    let case = Case { heads, ..Case::new(vec![row(&[160])]) };
    let through = 3 * (state + transition);
    let found = sent(&case, &SequenceLayout::head_tail(160, 4).unwrap());
    let states: Vec<_> = found.iter().map(|sent| sent[0]).collect();
    assert_eq!(states, [3 * state, 2 * through, 2 * through, through]);
}

#[test]
fn documents_that_end_with_a_slice_send_nothing() {
    let nothing = |case: &Case, layout: SequenceLayout| assert!(sent(case, &layout).iter().all(|sent| sent[2] == 0));
    let whole = Case::new(vec![row(&[20, 20, 10, 10, 20])]);
    nothing(&whole, SequenceLayout::contiguous(80, 4).unwrap());
    nothing(&whole, SequenceLayout::contiguous(80, 1).unwrap());
    nothing(&Case::new(vec![vec![-1; 80]]), SequenceLayout::contiguous(80, 4).unwrap());
    // One border inside a document of one row: a single state, from the rank before it, and its gradient back.
    let one = Case::new(vec![row(&[20, 20, 10, 10, 20]), row(&[20, 40, 20])]);
    let state = 8 * 4 * 5 * 7;
    let expected = [[0, 0], [3 * state, 0], [0, 3 * state], [0, 0]].map(|[s, g]| [s, g, s + g]);
    assert_eq!(sent(&one, &SequenceLayout::contiguous(80, 4).unwrap()), expected);
}

#[test]
fn bad_input_is_refused() {
    let context = CpContext::single(Tokens::single_document(2, 7)).unwrap();
    let heads = DeltaHeads { key_heads: 2, value_heads: 4, key_dim: 3, value_dim: 5 };
    let run = |qkv: &[usize], g: &[usize], beta: &[usize], dtype, heads: &DeltaHeads| {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
        context.delta_rule(&zeros(qkv), &zeros(g), &zeros(beta), heads)
    };
    let refused = |result: candle_cp::Result<Tensor>, name: &str, text: &str| {
        let error = result.expect_err("bad input");
        assert!(matches!(&error, Error::Argument { argument, .. } if *argument == name), "{error:?}");
        assert_eq!(error.to_string(), text);
    };
    let (qkv, gates) = ([2, 7, 32], [2, 7, 4]);
    assert_eq!(run(&qkv, &gates, &gates, DType::F32, &heads).unwrap().dims(), [2, 7, 4, 5]);
    for (q, g, b) in
        [([2, 7, 33], gates, gates), ([2, 6, 32], gates, gates), (qkv, [2, 7, 2], gates), (qkv, gates, [1, 7, 4])]
    {
        let text = format!(
            "qkv, g, beta is qkv {q:?}, g {g:?}, beta {b:?}, but this rank has qkv [2, 7, 32], g and beta [2, 7, 4]; \
             shard the tensors with the context that runs the rule"
        );
        refused(run(&q, &g, &b, DType::F32, &heads), "qkv, g, beta", &text);
    }
    let text = "dtype is I64, but the delta rule runs in f32, f64, bf16 and f16; convert qkv, g, beta";
    refused(run(&qkv, &gates, &gates, DType::I64, &heads), "dtype", text);
    for wrong in [
        DeltaHeads { value_heads: 3, ..heads },
        DeltaHeads { key_heads: 0, ..heads },
        DeltaHeads { key_dim: 0, ..heads },
    ] {
        let text = format!(
            "heads is {wrong:?}, but sizes are at least 1 and the value heads a multiple of the key heads; check the \
             configuration"
        );
        refused(run(&qkv, &gates, &gates, DType::F32, &wrong), "heads", &text);
    }
}

/// A graph without gradients, twice over the same operator's result, and strided inputs.
#[test]
fn strided_inputs_and_two_backward_passes() {
    let case = Case::new(vec![row(&[9, 14])]);
    let data = case.data();
    let expected = recurrence(&case, &data);
    let context = CpContext::single(case.tokens()).unwrap();
    let strided = |x: &[f64]| {
        let x = Tensor::from_slice(x, (23, x.len() / 23), &Device::Cpu)?.t()?.contiguous()?.t()?.unsqueeze(0)?;
        candle_core::Var::from_tensor(&x)
    };
    let [qkv, g, beta] = [&data.qkv, &data.g, &data.beta].map(|x| strided(x).unwrap());
    let out = context.delta_rule(&qkv, &g, &beta, &case.heads).unwrap();
    let d_out = Tensor::from_slice(&data.d_out, out.dims(), &Device::Cpu).unwrap();
    let loss = (out * d_out).unwrap().sum_all().unwrap();
    for _ in 0..2 {
        let gradient = reference::numbers(loss.backward().unwrap().get(&qkv).unwrap()).unwrap();
        assert!(gradient.iter().zip(&expected.qkv).all(|(a, b)| (a - b).abs() < 1e-11));
    }
}
