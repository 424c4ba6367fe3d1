//! Groups within groups: who is in them, whose messages are whose, and sums that are on their way meanwhile.

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{Expected, Mesh, Tag, Traffic, share, threads};
use candle_cp::{Communicator, Error};
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
            assert!(shares.iter().all(|s| [count / size, count / size + 1].contains(&(s.end - s.start))));
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
        let first = first.finish()?;
        let gathered = sums.start_all_gather(&first, 0, Traffic::AllReduce)?;
        let second = second.finish()?;
        assert_eq!(second.to_vec1::<f64>()?, [6.0 * rank as f64]);
        let gathered = Tensor::cat(&gathered.finish()?, 0)?.to_vec1::<f64>()?;
        assert_eq!(gathered, (0..8).map(|i| f64::from(4 * i + 60)).collect::<Vec<_>>());
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
