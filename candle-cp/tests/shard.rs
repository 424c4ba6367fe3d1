//! Sharding and gathering: round trips, gradients, positions and labels.

mod common;

use candle_core::{DType, Device, IndexOp, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{CpContext, Result, SequenceLayout, Tokens};
use common::ring::{numbers, options};
use common::{Case, Rule, assert_exact, block, documents, layouts};

fn random(shape: &[usize], seed: u64) -> Result<Tensor> {
    let case = Case { key_heads: 1, group: 1, head_dim: 1, seed, ..Case::plain(shape.iter().product(), Rule::CAUSAL) };
    Ok(Tensor::from_slice(&case.data().q, shape, &Device::Cpu)?)
}

/// Runs `f` on every rank of every layout of rows of `len` tokens.
fn everywhere<T: Send>(len: usize, f: impl Fn(&CpContext) -> Result<T> + Sync) -> Vec<(SequenceLayout, Vec<T>)> {
    let all = [1, 2, 3, 4, 8].into_iter().flat_map(|ranks| layouts(len, ranks));
    let run = |(name, layout): (String, SequenceLayout)| {
        let results = threads::run(layout.ranks(), &options(), |comm| {
            f(&CpContext::new(comm, layout.clone(), Tokens::single_document(2, len))?)
        });
        (layout.clone(), results.unwrap_or_else(|e| panic!("{name} over {}: {e}", layout.ranks())))
    };
    all.map(run).collect()
}

#[test]
fn gather_undoes_shard_along_every_dimension() {
    for dim in 0..3 {
        let mut shape = [2, 3, 4];
        shape[dim] = 11;
        let x = random(&shape, 1).unwrap();
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let x = x.to_dtype(dtype).unwrap();
            let expected = numbers(&x).unwrap();
            for (_, ranks) in everywhere(11, |c| numbers(&c.gather(&c.shard(&x, dim)?, dim)?)) {
                assert!(ranks.iter().all(|r| *r == expected), "dimension {dim}, {dtype:?}");
            }
        }
    }
    let ids = Tensor::arange(0i64, 11, &Device::Cpu).unwrap();
    for (_, ranks) in everywhere(11, |c| Ok(c.gather(&c.shard(&ids, 0)?, 0)?.to_vec1::<i64>()?)) {
        assert!(ranks.iter().all(|r| *r == (0..11).collect::<Vec<i64>>()));
    }
}

#[test]
fn shard_takes_the_owned_rows_in_local_order_and_pads() {
    let x = random(&[2, 11, 3], 2).unwrap();
    let all = everywhere(11, |c| numbers(&c.shard_fill(&x, 1, 7.0)?));
    for (layout, ranks) in all {
        for (rank, local) in ranks.iter().enumerate() {
            let row = |b: usize, i: usize| if i < 11 { numbers(&x.i((b, i)).unwrap()).unwrap() } else { vec![7.0; 3] };
            let indices = layout.global_indices(rank);
            let expected: Vec<f64> = (0..2).flat_map(|b| indices.iter().flat_map(move |&i| row(b, i))).collect();
            assert_eq!(*local, expected, "rank {rank} of {layout:?}");
        }
    }
}

#[test]
fn shard_gradient_reaches_exactly_the_owned_rows() {
    let x = random(&[2, 11, 3], 3).unwrap();
    let all = everywhere(11, |c| {
        let x = Var::from_tensor(&x)?;
        // The gradient of the sum of squares is 2 x, never 0.
        let gradients = c.shard(&x, 1)?.sqr()?.sum_all()?.backward()?;
        numbers(gradients.get(&x).expect("attached, owner of real tokens or not"))
    });
    let x = numbers(&x).unwrap();
    for (layout, ranks) in all {
        for (rank, gradient) in ranks.iter().enumerate() {
            let owned = layout.global_indices(rank);
            for (i, (&g, &x)) in gradient.iter().zip(&x).enumerate() {
                let expected = if owned.contains(&(i / 3 % 11)) { 2.0 * x } else { 0.0 };
                assert_eq!(g, expected, "element {i}, rank {rank} of {layout:?}");
            }
        }
    }
}

#[test]
fn gather_gradient_is_the_owners_rows_of_the_sum_over_ranks() {
    let cotangent = |rank: usize| random(&[2, 11, 3], 100 + rank as u64);
    let all = everywhere(11, |c| {
        let local = Var::from_tensor(&c.shard(&random(&[2, 11, 3], 4)?, 1)?)?;
        let loss = (c.gather(&local, 1)? * cotangent(c.rank())?)?.sum_all()?;
        let gradients = loss.backward()?;
        numbers(gradients.get(&local).expect("attached"))
    });
    for (layout, ranks) in all {
        let total: Vec<Vec<f64>> = (0..layout.ranks()).map(|r| numbers(&cotangent(r).unwrap()).unwrap()).collect();
        for (rank, gradient) in ranks.iter().enumerate() {
            let at = |b: usize, i: usize, d: usize| -> f64 {
                if i < 11 { total.iter().map(|t| t[(b * 11 + i) * 3 + d]).sum() } else { 0.0 }
            };
            let indices = layout.global_indices(rank);
            let expected: Vec<f64> = (0..2)
                .flat_map(|b| indices.iter().flat_map(move |&i| (0..3).map(move |d| (b, i, d))))
                .map(|(b, i, d)| at(b, i, d))
                .collect();
            assert_exact(&format!("rank {rank} of {layout:?}"), gradient, &expected);
        }
    }
}

#[test]
fn positions_restart_in_documents_and_go_on_through_padding() {
    let mut ids = documents(&[4, 3, 4]);
    ids[9..].fill(-1);
    let tokens = Tokens::new(vec![ids], vec![vec![-1; 11]]).unwrap();
    assert_eq!(tokens.positions(), [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]]);
    let layout = SequenceLayout::contiguous(11, 3).unwrap();
    let ranks = threads::run(3, &options(), |comm| {
        let positions = CpContext::new(comm, layout.clone(), tokens.clone())?.positions(&Device::Cpu)?;
        assert_eq!(positions.dtype(), DType::U32);
        Ok::<_, candle_cp::Error>(positions.to_vec2::<u32>()?.remove(0))
    });
    assert_eq!(ranks.unwrap(), [[0, 1, 2, 3], [0, 1, 2, 0], [1, 2, 3, 4]]);
}

#[test]
fn labels_are_shifted_on_the_full_row_and_never_cross_documents() {
    let mut ids = documents(&[4, 1, 4, 2]);
    ids[9..].fill(-1);
    let tokens = Tokens::new(vec![ids, vec![0; 11]], vec![block(11, &[1..3]), vec![-1; 11]]).unwrap();
    let mut labels: Vec<i64> = (0..22).collect();
    labels[14] = -100;
    let labels = Tensor::from_vec(labels, (2, 11), &Device::Cpu).unwrap();
    // Token 3 is not scored against the first token of the next document (4), nor 4 against 5, nor 8 against padding.
    let shifted = [
        vec![1, 2, 3, -100, -100, 6, 7, 8, -100, -100, -100, -100],
        vec![12, 13, -100, 15, 16, 17, 18, 19, 20, 21, -100, -100],
    ];
    for (name, layout) in layouts(11, 4).into_iter().take(2) {
        let ranks = threads::run(4, &options(), |comm| {
            let local = CpContext::new(comm, layout.clone(), tokens.clone())?.shard_labels(&labels)?;
            Ok::<_, candle_cp::Error>((local.count, local.labels_bs.to_vec2::<i64>()?))
        });
        for (rank, (count, rows)) in ranks.unwrap().into_iter().enumerate() {
            assert_eq!(count, 6 + 9, "counted before sharding");
            for (row, expected) in rows.iter().zip(&shifted) {
                let of = |i: usize| expected.get(i).copied().unwrap_or(-100);
                let expected: Vec<i64> = layout.global_indices(rank).into_iter().map(of).collect();
                assert_eq!(*row, expected, "{name}, rank {rank}");
            }
        }
    }
}

#[test]
fn a_wrong_length_is_an_error() {
    let context = CpContext::single(Tokens::single_document(1, 11)).unwrap();
    let x = random(&[1, 10, 3], 5).unwrap();
    let expected = "a tensor of shape [1, 10, 3], but dimension 1 has to be 11 tokens";
    for (name, error) in [("x", context.shard(&x, 1).unwrap_err()), ("local", context.gather(&x, 1).unwrap_err())] {
        assert!(error.to_string().starts_with(&format!("{name} is {expected}")), "{error}");
    }
    let error = context.shard(&x, 5).unwrap_err().to_string();
    assert!(error.contains("dimension 5 has to be 11 tokens"), "{error}");
    for (shape, text) in [((1, 10), "dimension 1 has to be 11"), ((2, 11), "2 rows of labels, but the batch has 1")] {
        let labels = Tensor::zeros(shape, DType::I64, &Device::Cpu).unwrap();
        let error = context.shard_labels(&labels).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}
