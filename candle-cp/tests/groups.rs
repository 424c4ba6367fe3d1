//! Groups within groups: who is in them, whose messages are whose, and sums that are on their way meanwhile.

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{Expected, Mesh, Pending, Tag, Traffic, share, threads};
use candle_cp::{Communicator, Error};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::time::Duration;

type Result<T> = std::result::Result<T, Error>;

fn run<T: Send>(
    size: usize,
    rank: impl Fn(std::sync::Arc<dyn Communicator>) -> Result<T> + Sync,
) -> std::result::Result<Vec<T>, Error> {
    threads::run(size, &threads::Options { deadline: Duration::from_secs(20), ..Default::default() }, rank)
}

fn numbers(values: impl IntoIterator<Item = usize>) -> Tensor {
    let values: Vec<f64> = values.into_iter().map(|x| x as f64).collect();
    Tensor::new(values, &Device::Cpu).unwrap()
}

#[test]
fn ranks_of_one_color_are_together_in_their_order() {
    let found = run(7, |world| {
        let rank = world.rank();
        let group = world.split(rank % 3)?;
        let names: Vec<usize> = (0..group.size()).map(|r| group.world_rank(r)).collect();
        let sum = group.all_reduce_sum(&numbers([rank, 100 * rank]))?.to_vec1::<f64>()?;
        let within = group.split(usize::from(group.rank() == 0))?;
        let (inner, all) = (within.all_gather(&numbers([rank]))?, world.all_gather(&numbers([rank]))?);
        assert_eq!(all.len(), 7);
        let inner: Vec<f64> = inner.iter().map(|x| Ok(x.to_vec1::<f64>()?[0])).collect::<Result<_>>()?;
        Ok((group.rank(), names, sum, inner))
    });
    for (rank, (place, names, sum, inner)) in found.unwrap().into_iter().enumerate() {
        let expected: Vec<usize> = (0..7).filter(|r| r % 3 == rank % 3).collect();
        let total: usize = expected.iter().sum();
        assert_eq!((place, &names, sum), (rank / 3, &expected, vec![total as f64, 100.0 * total as f64]));
        let others: Vec<f64> = expected[1..].iter().map(|&r| r as f64).collect();
        assert_eq!(inner, if place == 0 { vec![rank as f64] } else { others });
    }
}

#[test]
fn shares_follow_each_other() {
    for count in [0, 1, 5, 12, usize::MAX] {
        for size in [1, 2, 5, 7] {
            let shares: Vec<_> = (0..size).map(|rank| share(count, size, rank)).collect();
            assert_eq!((shares[0].start, shares[size - 1].end), (0, count));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(shares.iter().all(|s| [count / size, count.div_ceil(size)].contains(&(s.end - s.start))));
        }
    }
}

#[test]
fn a_share_of_the_sum_has_the_bits_of_the_sum() {
    for (size, count) in [(1, 5), (2, 1), (3, 10), (5, 3), (4, 1001)] {
        run(size, |comm| {
            let x = Tensor::arange(0f32, count as f32, &Device::Cpu)?;
            let x = ((x + comm.rank() as f64 * 0.37)? * (1.1 + comm.rank() as f64))?.sin()?;
            let whole = comm.all_reduce_sum(&x)?;
            let mine = share(count, size, comm.rank());
            let part = whole.narrow(0, mine.start, mine.len())?.to_vec1::<f32>()?;
            assert_eq!(comm.reduce_scatter_sum(&x)?.to_vec1::<f32>()?, part, "{size} ranks, {count} numbers");
            let before = comm.stats().of(Traffic::ReduceScatter);
            assert_eq!(before.bytes_sent, 4 * (count - mine.len()), "each rank sends what is others' shares");
            assert_eq!(before.bytes_alive, 0);
            Ok(())
        })
        .unwrap();
    }
}

/// Sums that were started, messages of a ring in another group, further sums: whatever is waited for first.
#[test]
fn what_is_on_its_way_in_one_group_leaves_the_others_alone() {
    run(4, |world| {
        let (ring, rank) = (world.split(world.rank() / 2)?, world.rank());
        let sums = world.split(0)?;
        let first = sums.start_reduce_scatter(&numbers((0..8).map(|i| i + 10 * rank)), Traffic::AllReduce)?;
        let second = sums.start_reduce_scatter(&numbers((0..4).map(|i| i * rank)), Traffic::AllReduce)?;
        let other = 1 - ring.rank();
        let tag = Tag { traffic: Traffic::KeyValue, call: ring.next_call(), step: 1 };
        let expected = Expected { from: other, shape: Some(vec![1]), dtype: DType::F64 };
        let came = ring.exchange(tag, Some((other, numbers([rank]))), Some(expected))?.wait()?.unwrap();
        assert_eq!(came.tensor.to_vec1::<f64>()?, [(rank ^ 1) as f64]);
        assert_eq!(world.all_reduce_sum(&numbers([1]))?.to_vec1::<f64>()?, [4.0]);
        let second = second.finish()?;
        assert_eq!(second.to_vec1::<f64>()?, [6.0 * rank as f64]);
        let first = first.finish()?;
        let gathered = sums.start_all_gather(&first, 0, Traffic::AllReduce)?;
        let gathered = Tensor::cat(&gathered.finish()?, 0)?.to_vec1::<f64>()?;
        assert_eq!(gathered, (0..8).map(|i| f64::from(4 * i + 60)).collect::<Vec<_>>());
        Ok(())
    })
    .unwrap();
}

/// Sums started in one order and finished in another on every second rank.
#[test]
fn sums_are_finished_in_any_order() {
    for size in [2, 3, 5] {
        run(size, |comm| {
            let rank = comm.rank();
            let start = |k: usize| {
                let mine = numbers((0..10).map(|i| i + k * rank));
                Ok::<_, Error>((k, comm.start_reduce_scatter(&mine, Traffic::ReduceScatter)?))
            };
            let mut sums = (0..4).map(start).collect::<Result<Vec<_>>>()?;
            if rank % 2 == 1 {
                sums.reverse();
            }
            for (k, sum) in sums {
                let expected: Vec<f64> =
                    share(10, size, rank).map(|i| (size * i + k * size * (size - 1) / 2) as f64).collect();
                assert_eq!(sum.finish()?.to_vec1::<f64>()?, expected);
            }
            Ok(())
        })
        .unwrap();
    }
}

fn tag(call: u64, step: usize) -> Tag {
    Tag { traffic: Traffic::KeyValue, call, step }
}

/// Numbers that say whose message it is.
fn message(from: usize, call: u64, len: usize) -> Tensor {
    numbers((0..len).map(|i| (i * 7 + from * 31 + call as usize * 13) % 101))
}

/// Rounds of exchanges with every other rank in several groups, posted in one order and waited for in another one on each
/// rank; some are dropped.
#[test]
fn exchanges_are_waited_for_in_any_order_or_not_at_all() {
    for size in 2..5 {
        run(size, |comm| {
            let groups = [comm.clone(), comm.split(0)?, comm.split(0)?];
            let mut common = StdRng::seed_from_u64(5);
            let mut own = StdRng::seed_from_u64(comm.rank() as u64);
            for call in 0..12 {
                let mut pending: Vec<(Box<dyn Pending>, Tensor)> = Vec::new();
                for (group, channel) in groups.iter().enumerate() {
                    for step in 1..size {
                        let len = common.random_range(0..9);
                        let call = call * 10 + group as u64;
                        let (to, from) = ((comm.rank() + step) % size, (comm.rank() + size - step) % size);
                        let expected = Expected { from, shape: (group != 1).then(|| vec![len]), dtype: DType::F64 };
                        let sent = message(comm.rank(), call, len);
                        let exchange = channel.exchange(tag(call, step), Some((to, sent)), Some(expected))?;
                        pending.push((exchange, message(from, call, len)));
                    }
                }
                pending.shuffle(&mut own);
                for (exchange, expected) in pending {
                    if own.random_range(0..4) == 0 {
                        drop(exchange);
                        continue;
                    }
                    let came = exchange.wait()?.expect("a message was expected");
                    assert_eq!(came.tensor.to_vec1::<f64>()?, expected.to_vec1::<f64>()?);
                }
            }
            let stats = comm.stats().of(Traffic::KeyValue);
            assert_eq!((stats.bytes_alive, stats.messages_sent), (0, 36 * (size - 1)));
            comm.barrier()
        })
        .unwrap();
    }
}

/// A receive that is given up before its message is sent, and one after.
#[test]
fn a_dropped_exchange_takes_nothing_from_those_after_it() {
    run(2, |comm| {
        let (other, signal) = (1 - comm.rank(), comm.split(0)?);
        let expected = || Some(Expected { from: other, shape: Some(vec![3]), dtype: DType::F64 });
        for (call, early) in [(0, true), (2, false)] {
            if comm.rank() == 0 {
                if !early {
                    signal.barrier()?;
                }
                drop(comm.exchange(tag(call, 0), None, expected())?);
                if early {
                    signal.barrier()?;
                }
                let came = comm.exchange(tag(call + 1, 0), None, expected())?.wait()?.expect("a message was expected");
                assert_eq!(came.tensor.to_vec1::<f64>()?, message(1, call + 1, 3).to_vec1::<f64>()?);
                continue;
            }
            if early {
                signal.barrier()?;
            }
            let sent = [call, call + 1].map(|n| comm.exchange(tag(n, 0), Some((other, message(1, n, 3))), None));
            if !early {
                signal.barrier()?;
            }
            for exchange in sent {
                assert!(exchange?.wait()?.is_none());
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Transposed views and parts of a graph travel as plain tensors.
#[test]
fn what_comes_is_contiguous_and_without_a_graph() {
    run(2, |comm| {
        let other = 1 - comm.rank();
        let weight = candle_core::Var::from_tensor(&message(comm.rank(), 0, 6).reshape((2, 3))?)?;
        let sent = (weight.as_tensor() * 2.0)?.t()?;
        let expected = Expected { from: other, shape: Some(vec![3, 2]), dtype: DType::F64 };
        let came = comm.exchange(tag(0, 0), Some((other, sent)), Some(expected))?.wait()?.expect("expected").tensor;
        assert!(came.is_contiguous() && !came.track_op());
        let theirs = (message(other, 0, 6).reshape((2, 3))?.t()? * 2.0)?;
        assert_eq!(came.to_vec2::<f64>()?, theirs.to_vec2::<f64>()?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn errors_in_a_group_name_ranks_of_the_world_and_reach_all() {
    let error = run(5, |world| {
        let group = world.split(usize::from(world.rank() >= 3))?;
        if world.rank() == 4 {
            return group.all_reduce_sum(&numbers([1, 2])).map(|_| ());
        }
        group.all_reduce_sum(&numbers([1]))?;
        world.barrier()
    });
    let text = error.unwrap_err().to_string();
    assert!(
        text.starts_with("rank 3 failed: rank 3: AllReduce") || text.starts_with("rank 4 failed: rank 4: AllReduce"),
        "{text}"
    );
    assert!(text.contains("from rank 4, which sent") || text.contains("from rank 3, which sent"), "{text}");

    let error = run(3, |world| {
        let pair = world.split(usize::from(world.rank() == 0))?;
        let tag = Tag { traffic: Traffic::KeyValue, call: 0, step: 0 };
        let out = pair.exchange(tag, Some((pair.size(), numbers([1]))), None).map(|_| ());
        assert!(pair.exchange(tag, Some((pair.rank(), numbers([1]))), None).is_err(), "nobody talks to itself");
        out
    });
    assert!(error.unwrap_err().to_string().contains("can talk to the other ranks; use a rank of the group"));
}

#[test]
fn a_mesh_has_neighbours_along_the_context() {
    for (context, replicas) in [(1, 3), (3, 1), (2, 3), (3, 2)] {
        let places = run(context * replicas, |world| {
            let mesh = Mesh::new(world, context)?;
            let sum = |comm: &dyn Communicator| {
                Ok::<_, Error>(comm.all_reduce_sum(&numbers([mesh.world().rank()]))?.to_vec1::<f64>()?[0])
            };
            let sums = (sum(mesh.context().as_ref())?, sum(mesh.data().as_ref())?);
            assert_eq!((mesh.context().size(), mesh.replicas()), (context, replicas));
            Ok((mesh.replica(), mesh.context().rank(), sums))
        });
        for (rank, found) in places.unwrap().into_iter().enumerate() {
            let (replica, place) = (rank / context, rank % context);
            let of_context: usize = (0..context).map(|c| replica * context + c).sum();
            let of_data: usize = (0..replicas).map(|r| r * context + place).sum();
            assert_eq!(found, (replica, place, (of_context as f64, of_data as f64)));
        }
    }
    for context in [0, 2, 4] {
        let error = run(3, |world| Mesh::new(world, context).map(|_| ())).unwrap_err().to_string();
        assert!(error.contains(&format!("context is {context}, but there are 3 ranks")), "{error}");
    }
}
