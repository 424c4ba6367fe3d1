//! Collectives of rank threads, and of one rank alone.

mod common;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{Expected, Local, Tag, Traffic, threads};
use candle_cp::{Communicator, Error, Result};
use common::ring::options;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZES: std::ops::RangeInclusive<usize> = 1..=5;

fn run<T: Send>(size: usize, f: impl Fn(&dyn Communicator) -> Result<T> + Sync) -> Vec<T> {
    threads::run(size, &options(), |comm| f(comm.as_ref())).unwrap()
}

fn tensor(x: &[f64]) -> Tensor {
    Tensor::new(x, &Device::Cpu).unwrap()
}

#[test]
fn ranks_know_themselves_and_results_come_in_rank_order() {
    for size in SIZES {
        let expected: Vec<_> = (0..size).map(|rank| (rank, size)).collect();
        assert_eq!(run(size, |c| Ok((c.rank(), c.size()))), expected);
    }
}

#[test]
fn sums_have_the_same_bits_on_every_rank_and_are_added_in_rank_order() {
    for size in SIZES {
        // Shorter than the group, longer, and not a multiple; magnitudes for which the order matters.
        for len in [0usize, 1, 3, 7, 64] {
            let value = |rank: usize, i: usize| [1e16, 1.0, -1e16, 3.0, 0.1][(rank + i) % 5] + i as f64;
            let mine = |rank: usize| (0..len).map(|i| value(rank, i)).collect::<Vec<f64>>();
            let sums = run(size, |c| Ok(c.all_reduce_sum(&tensor(&mine(c.rank())))?.to_vec1::<f64>()?));
            let expected: Vec<u64> =
                (0..len).map(|i| (1..size).fold(value(0, i), |sum, rank| sum + value(rank, i)).to_bits()).collect();
            for (rank, sum) in sums.iter().enumerate() {
                let bits: Vec<u64> = sum.iter().map(|x| x.to_bits()).collect();
                assert_eq!(bits, expected, "rank {rank} of {size}, {len} elements");
            }
        }
    }
}

#[test]
fn sums_keep_shape_and_type() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::I64] {
        let sums = run(3, |c| {
            let x = Tensor::full(c.rank() as f32, (2, 3, 2), &Device::Cpu)?.to_dtype(dtype)?;
            let sum = c.all_reduce_sum(&x.transpose(0, 1)?)?;
            Ok((sum.dims().to_vec(), sum.dtype(), sum.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?))
        });
        assert!(sums.iter().all(|sum| *sum == (vec![3, 2, 2], dtype, vec![3.0; 12])), "{sums:?}");
        let scalars = run(4, |c| {
            let sum = c.all_reduce_sum(&Tensor::new(c.rank() as f64, &Device::Cpu)?.to_dtype(dtype)?)?;
            Ok(sum.to_dtype(DType::F64)?.to_scalar::<f64>()?)
        });
        assert_eq!(scalars, [6.0; 4]);
    }
}

#[test]
fn gather_in_rank_order() {
    for size in SIZES {
        let all = run(size, |c| {
            let parts = c.all_gather(&tensor(&[c.rank() as f64, 7.0]))?;
            Ok(parts.iter().map(|p| p.to_vec1::<f64>()).collect::<candle_core::Result<Vec<_>>>()?)
        });
        let expected: Vec<_> = (0..size).map(|rank| vec![rank as f64, 7.0]).collect();
        assert!(all.iter().all(|parts| *parts == expected));
    }
}

#[test]
fn uneven_gather_takes_other_sizes_along_one_dimension_even_none() {
    for size in SIZES {
        let shapes = run(size, |c| {
            let x = Tensor::zeros((2, c.rank(), 3), DType::F32, &Device::Cpu)?;
            let parts = c.all_gather_uneven(&x, 1, Traffic::Gather)?;
            Ok(parts.iter().map(|p| p.dims().to_vec()).collect::<Vec<_>>())
        });
        let expected: Vec<_> = (0..size).map(|rank| vec![2, rank, 3]).collect();
        assert!(shapes.iter().all(|s| *s == expected), "{shapes:?}");
    }
}

#[test]
fn broadcast_from_every_root() {
    for size in SIZES {
        for root in 0..size {
            let all = run(size, |c| Ok(c.broadcast(&tensor(&[c.rank() as f64; 3]), root)?.to_vec1::<f64>()?));
            assert_eq!(all, vec![vec![root as f64; 3]; size]);
        }
    }
}

#[test]
fn collectives_in_a_row_do_not_mix() {
    let all = run(4, |c| {
        let mut seen = Vec::new();
        for round in 0..20 {
            let x = tensor(&[(c.rank() + round) as f64]);
            seen.extend(c.all_reduce_sum(&x)?.to_vec1::<f64>()?);
            c.barrier()?;
            seen.extend(c.broadcast(&x, round % 4)?.to_vec1::<f64>()?);
            seen.extend(Tensor::cat(&c.all_gather(&x)?, 0)?.to_vec1::<f64>()?);
        }
        Ok(seen)
    });
    let round = |n: usize| {
        let n = n as f64;
        vec![6.0 + 4.0 * n, n + n % 4.0, n, n + 1.0, n + 2.0, n + 3.0]
    };
    let expected: Vec<f64> = (0..20).flat_map(round).collect();
    assert!(all.iter().all(|seen| *seen == expected));
}

#[test]
fn results_are_outside_of_the_graph() {
    run(2, |c| {
        let x = candle_core::Var::zeros(3, DType::F32, &Device::Cpu)?;
        assert!(!c.all_reduce_sum(&x)?.track_op());
        assert!(c.all_gather(&x)?.iter().all(|t| !t.track_op()));
        assert!(!c.broadcast(&x, 0)?.track_op());
        Ok(())
    });
}

#[test]
fn counters_count_by_kind() {
    let stats = run(3, |c| {
        c.all_gather(&tensor(&[0.0; 5]))?;
        c.broadcast(&tensor(&[0.0; 4]), 1)?;
        Ok(c.stats())
    });
    for (rank, stats) in stats.iter().enumerate() {
        let (gather, broadcast) = (stats.of(Traffic::Gather), stats.of(Traffic::Broadcast));
        assert_eq!((gather.messages_sent, gather.bytes_sent, gather.bytes_received), (2, 80, 80));
        let expected = if rank == 1 { (2, 64, 0) } else { (0, 0, 32) };
        assert_eq!((broadcast.messages_sent, broadcast.bytes_sent, broadcast.bytes_received), expected);
        assert_eq!(stats.of(Traffic::KeyValue), Default::default());
        assert_eq!(stats.bytes_sent(), gather.bytes_sent + broadcast.bytes_sent);
    }
}

#[test]
fn kinds_are_listed_in_their_order_with_names_of_their_own() {
    assert!(Traffic::ALL.is_sorted());
    for (place, kind) in Traffic::ALL.into_iter().enumerate() {
        assert_eq!(kind.index(), place);
        // `KeyValue` is `key_value`.
        let words = kind.name().split('_').map(|word| word[..1].to_uppercase() + &word[1..]);
        assert_eq!(words.collect::<String>(), format!("{kind:?}"));
    }
}

#[test]
fn one_rank_alone_has_nobody_to_exchange_with() {
    let local: Arc<dyn Communicator> = Arc::new(Local::new());
    let x = tensor(&[1.0, 2.0]);
    assert_eq!(local.all_reduce_sum(&x).unwrap().to_vec1::<f64>().unwrap(), [1.0, 2.0]);
    assert_eq!(local.all_gather(&x).unwrap().len(), 1);
    assert_eq!(local.broadcast(&x, 0).unwrap().to_vec1::<f64>().unwrap(), [1.0, 2.0]);
    local.barrier().unwrap();
    let tag = Tag { traffic: Traffic::KeyValue, call: 0, step: 1 };
    let expected = Expected { from: 1, shape: None, dtype: DType::F32 };
    let error = local.exchange(tag, None, Some(expected)).err().expect("refused");
    assert!(matches!(&error, Error::Argument { argument: "peer", .. }), "{error}");
    assert!(local.broadcast(&x, 3).is_err());
}

#[test]
fn a_peer_outside_of_the_group_is_refused() {
    for peer in [3, 7, usize::MAX] {
        let result = threads::run(3, &options(), |c| c.broadcast(&tensor(&[1.0]), peer).map(|_| ()));
        let error = result.unwrap_err().to_string();
        assert!(error.contains(&format!("peer is {peer}")) && error.contains("use a rank of the group"), "{error}");
    }
    let error = threads::run(0, &options(), |_| Ok::<_, Error>(())).unwrap_err().to_string();
    assert_eq!(error, "size is 0, but a group has at least one rank; use 1 for no sharding");
}

#[test]
fn waiting_is_counted_once_and_by_its_kind() {
    let late = Duration::from_millis(3);
    let all = run(3, |c| {
        let (mut blocked, token) = (Duration::ZERO, tensor(&[1.0]));
        for _ in 0..4 {
            // The last rank is late, and every wait of the others lies inside of what they clock themselves.
            if c.rank() == 2 {
                std::thread::sleep(late);
            }
            let began = Instant::now();
            c.all_gather(&token)?;
            blocked += began.elapsed();
        }
        let before = c.stats();
        let began = Instant::now();
        c.barrier()?;
        Ok((before, blocked, c.stats(), began.elapsed()))
    });
    for (rank, (before, blocked, after, barrier)) in all.iter().enumerate() {
        let waited = before.of(Traffic::Gather).waited;
        assert!(Duration::ZERO < waited && waited <= *blocked, "rank {rank}: {waited:?} of {blocked:?}");
        assert_eq!(before.waited(), waited, "rank {rank}: nothing else was called");
        let at_barrier = after.of(Traffic::Barrier).waited;
        assert!(Duration::ZERO < at_barrier && at_barrier <= *barrier, "rank {rank}: {at_barrier:?} of {barrier:?}");
        assert_eq!(after.waited(), waited + at_barrier, "rank {rank}");
    }
    assert_eq!(Local::new().stats().waited(), Duration::ZERO);
}
