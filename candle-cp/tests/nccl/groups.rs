//! Groups within groups over NCCL, and sums of which each rank keeps its share.

use super::{Comm, DTYPES, LONG, expect, numbers, place, run, run_with, tag, tensor, values};
use candle_core::{DType, Device, Tensor};
use candle_cp::Error;
use candle_cp::comm::{Mesh, Traffic, nccl, share, threads};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A deadline that is waited for, but within which groups are made on a machine that does other things as well.
const ENOUGH: Duration = Duration::from_secs(3);

fn small(values: impl IntoIterator<Item = usize>) -> Tensor {
    let values: Vec<f64> = values.into_iter().map(|x| x as f64).collect();
    Tensor::new(values, &Device::Cpu).unwrap()
}

fn sum(comm: &Comm, rank: usize) -> f64 {
    values(&comm.all_reduce_sum(&small([rank])).unwrap())[0]
}

#[test]
fn ranks_of_one_color_are_together_in_their_order() {
    for colors in [[0, 0, 0, 0], [1, 0, 1, 0], [3, usize::MAX, usize::MAX, 3], [9, 8, 7, 6], [5, 2, 2, 2]] {
        run(LONG, |world, device, size| {
            let rank = world.rank();
            let group = world.split(colors[rank]).unwrap();
            let members: Vec<usize> = (0..size).filter(|&r| colors[r] == colors[rank]).collect();
            let place = members.iter().position(|&r| r == rank).unwrap();
            assert_eq!((group.rank(), group.size()), (place, members.len()));
            assert_eq!((0..group.size()).map(|r| group.world_rank(r)).collect::<Vec<_>>(), members);

            assert_eq!(sum(&group, rank), members.iter().sum::<usize>() as f64);
            for (r, slice) in
                group.all_gather(&tensor(&numbers(rank, 1, 9), DType::F32, device)).unwrap().iter().enumerate()
            {
                assert_eq!(values(slice), numbers(members[r], 1, 9));
            }
            let x = tensor(&numbers(rank, 2, 30), DType::BF16, device);
            let last = members.len() - 1;
            assert_eq!(values(&group.broadcast(&x, last).unwrap()), numbers(members[last], 2, 30));
            if last > 0 {
                let (to, from) = ((place + 1) % members.len(), (place + last) % members.len());
                let pending = group.exchange(tag(1), Some((to, x)), expect(from, &[30], DType::BF16)).unwrap();
                assert_eq!(values(&pending.wait().unwrap().unwrap().tensor), numbers(members[from], 2, 30));
            }
            let error = group.exchange(tag(2), None, expect(members.len(), &[1], DType::F32)).err().unwrap();
            assert!(error.to_string().contains(&format!("peer is {}", members.len())), "{error}");
            group.barrier().unwrap();

            let inner = group.split(usize::from(place == 0)).unwrap();
            let expected = if place == 0 { members[0] } else { members[1..].iter().sum() };
            assert_eq!(sum(&inner, rank), expected as f64);
            drop(group);
            assert_eq!(inner.world_rank(inner.rank()), rank, "a group outlives the one it was made of");
            inner.barrier().unwrap();
            assert_eq!(sum(world, rank), (0..size).sum::<usize>() as f64);
        });
    }
}

#[test]
fn a_mesh_sums_in_both_directions() {
    run(LONG, |world, _, size| {
        for context in (1..=size).filter(|context| size.is_multiple_of(*context)) {
            let (rank, replicas) = (world.rank(), size / context);
            let mesh = Mesh::new(world.clone(), context).unwrap();
            let (replica, place) = (rank / context, rank % context);
            assert_eq!((mesh.replica(), mesh.context().rank(), mesh.replicas()), (replica, place, replicas));
            let of_context: usize = (0..context).map(|c| replica * context + c).sum();
            let of_data: usize = (0..replicas).map(|r| r * context + place).sum();
            assert_eq!(sum(mesh.context(), rank), of_context as f64);
            assert_eq!(sum(mesh.data(), rank), of_data as f64);
        }
    });
}

/// Messages between the same two ranks in three groups, alike but for their numbers, and sums on their way meanwhile.
#[test]
fn what_is_on_its_way_in_one_group_leaves_the_others_alone() {
    run(LONG, |world, device, size| {
        let rank = world.rank();
        let (sums, rings) =
            (world.split(0).unwrap(), [world.split(7).unwrap(), world.split(7).unwrap(), world.clone()]);
        let first = sums.start_reduce_scatter(&small((0..8).map(|i| i + 10 * rank)), Traffic::AllReduce).unwrap();
        let second = sums.start_reduce_scatter(&small((0..size).map(|i| i * rank)), Traffic::AllReduce).unwrap();
        let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
        let post = |(step, ring): (usize, &Comm)| {
            let x = tensor(&numbers(rank, step, 3000), DType::F32, device).copy().unwrap();
            ring.exchange(tag(1), Some((to, x)), expect(from, &[3000], DType::F32)).unwrap()
        };
        let mut posted: Vec<_> = rings.iter().enumerate().map(post).collect();
        let all: usize = (0..size).sum();
        assert_eq!(values(&second.finish().unwrap()), [(all * rank) as f64]);
        assert_eq!(sum(&rings[0], rank), all as f64, "behind an exchange that nobody has waited for");
        for step in [2, 0] {
            let received = posted.remove(step).wait().unwrap().unwrap();
            assert_eq!(values(&received.tensor), numbers(from, step, 3000));
        }
        // The last one is waited for by another thread.
        let last = posted.pop().unwrap();
        let received = std::thread::scope(|scope| scope.spawn(move || last.wait()).join()).unwrap().unwrap().unwrap();
        assert_eq!(values(&received.tensor), numbers(from, 1, 3000));
        let first = first.finish().unwrap();
        let gathered = sums.start_all_gather(&first, 0, Traffic::AllReduce).unwrap();
        world.barrier().unwrap();
        let gathered: Vec<f64> = gathered.finish().unwrap().iter().flat_map(values).collect();
        assert_eq!(gathered, (0..8).map(|i| (size * i + 10 * all) as f64).collect::<Vec<_>>());
        let stats = world.stats();
        assert_eq!(stats.of(Traffic::KeyValue).messages_sent, 3, "counters are those of the rank");
        assert_eq!(sums.stats(), stats);
    });
}

/// A ring goes on while an exchange in another group still waits for a rank that is late.
#[test]
fn a_late_rank_holds_up_its_own_groups_only() {
    let rounds = AtomicUsize::new(0);
    run(LONG, |world, device, size| {
        if size < 4 {
            return;
        }
        let mesh = Mesh::new(world.clone(), 2).unwrap();
        let post = |group: &Comm, step: usize| {
            let x = tensor(&numbers(world.rank(), step, 500), DType::F32, device);
            let other = 1 - group.rank();
            group.exchange(tag(step), Some((other, x)), expect(other, &[500], DType::F32)).unwrap()
        };
        // Ranks connect when they first talk.
        post(mesh.data(), 1).wait().unwrap();
        if mesh.replica() == 1 {
            while rounds.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let late = post(mesh.data(), 2);
        for step in 3..6 {
            let received = post(mesh.context(), step).wait().unwrap().unwrap();
            assert_eq!(values(&received.tensor), numbers(world.rank() ^ 1, step, 500));
        }
        rounds.fetch_add(1, Ordering::SeqCst);
        assert_eq!(values(&late.wait().unwrap().unwrap().tensor), numbers(world.rank() ^ 2, 2, 500));
    });
}

#[test]
fn each_rank_gets_its_share_of_a_sum() {
    run(LONG, |world, device, size| {
        let rank = world.rank();
        let mut sent = 0;
        let counts = [0, 1, size - 1, size, 3 * size + 1, 6 * size, 1000 * size - 1];
        for (i, count) in counts.into_iter().enumerate() {
            for (on, dtype) in [(device, DTYPES[i]), (&Device::Cpu, DTYPES[(i + 3) % 7])] {
                let small = |rank: usize| numbers(rank, count, count).into_iter().map(|x| x % 50.0).collect::<Vec<_>>();
                let x = tensor(&small(rank), dtype, on).reshape((1, count)).unwrap();
                let mine = share(count, size, rank);
                let expected: Vec<f64> = mine.clone().map(|i| (0..size).map(|r| small(r)[i]).sum()).collect();
                let part = world.reduce_scatter_sum(&x).unwrap();
                assert_eq!(values(&part), expected, "{dtype:?}, {count} elements");
                assert_eq!(
                    (part.dims(), part.dtype(), part.device().is_cpu()),
                    (&[mine.len()][..], dtype, on.is_cpu())
                );
                let started = world.start_reduce_scatter(&x.to_device(&Device::Cpu).unwrap(), Traffic::AllReduce);
                assert_eq!(values(&started.unwrap().finish().unwrap()), expected, "{dtype:?}, {count} elements");
                sent += (count - mine.len()) * dtype.size_in_bytes();
            }
        }
        let counters = [Traffic::ReduceScatter, Traffic::AllReduce].map(|traffic| world.stats().of(traffic));
        assert_eq!(counters.map(|c| (c.bytes_sent, c.bytes_alive)), [(sent, 0), (sent, 0)]);
        assert_eq!(counters[0].bytes_received, counters[1].bytes_received);
        // A slice of a larger tensor starts elsewhere.
        let slice = tensor(&numbers(rank, 0, 3 * size), DType::F32, device).narrow(0, size, size + 1).unwrap();
        let mine = share(size + 1, size, rank);
        let expected = mine.map(|i| (0..size).map(|r| numbers(r, 0, 3 * size)[size + i]).sum());
        assert_eq!(values(&world.reduce_scatter_sum(&slice).unwrap()), expected.collect::<Vec<f64>>());
    });
}

/// As those of rank threads, with what making groups costs.
#[test]
fn counters_of_groups_are_those_of_rank_threads() {
    let calls = |world: &Comm| {
        let group = world.split(world.rank() / 2)?;
        group.reduce_scatter_sum(&small(0..7))?;
        group.all_reduce_sum(&small(0..5))?;
        let kinds =
            [Traffic::Gather, Traffic::ReduceScatter, Traffic::AllReduce].map(|traffic| group.stats().of(traffic));
        Ok::<_, Error>(kinds.map(|counter| (counter.messages_sent, counter.bytes_sent, counter.bytes_received)))
    };
    if let Some(ours) = run(LONG, |world, _, _| calls(world).unwrap()) {
        assert_eq!(ours, threads::run(ours.len(), &threads::Options::default(), |world| calls(&world)).unwrap());
    }
}

#[test]
fn a_failure_in_one_group_ends_all() {
    // Rank 1 says that it has failed, in a group where not all are.
    let posted = AtomicUsize::new(0);
    run(LONG, |world, device, size| {
        let rank = world.rank();
        let pair = world.split(rank / 2).unwrap();
        if rank < 2 {
            // Ranks connect when they first talk.
            let x = tensor(&[1.0], DType::F32, device);
            let other = pair.exchange(tag(0), Some((1 - rank, x)), expect(1 - rank, &[1], DType::F32)).unwrap();
            other.wait().unwrap();
        }
        let (start, last) = (Instant::now(), size - 1);
        let error = match rank {
            1 => {
                while posted.load(Ordering::SeqCst) == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                pair.abort("no more data");
                assert_eq!(world.peer_failure(), None);
                let error = world.barrier().unwrap_err().to_string();
                assert!(error.contains("the group has ended before: no more data"), "{error}");
                return;
            }
            0 => {
                // Of two groups that wait, both let the device go on.
                let never = pair.exchange(tag(1), None, expect(1, &[4], DType::F32)).unwrap();
                posted.store(1, Ordering::SeqCst);
                let ended = world.barrier();
                drop(never);
                let x = tensor(&numbers(0, 0, 5), DType::F32, device).copy().unwrap();
                assert_eq!(values(&x), numbers(0, 0, 5));
                ended
            }
            _ if rank == last => world.barrier(),
            _ => world.split(0).map(|_| ()),
        };
        let error = error.unwrap_err();
        assert!(matches!(&error, Error::PeerFailed { peer: 1, message, .. } if message == "no more data"), "{error}");
        assert!(start.elapsed() < LONG, "before the deadline");
        for group in [world, &pair] {
            assert_eq!(group.peer_failure(), Some((1, "no more data".to_string())));
            assert!(matches!(group.barrier().unwrap_err(), Error::PeerFailed { peer: 1, .. }));
        }
    });
}

#[test]
fn errors_in_a_group_name_ranks_of_the_world() {
    // The last two ranks: one of them sends something else.
    run(LONG, |world, _, size| {
        let rank = world.rank();
        let group = world.split(usize::from(rank + 2 >= size)).unwrap();
        if rank + 2 < size {
            return group;
        }
        let other = 2 * size - 3 - rank;
        let error = group.all_reduce_sum(&small(0..if rank + 1 == size { 4 } else { 5 })).unwrap_err();
        assert!(matches!(error, Error::Mismatch { rank: r, peer, .. } if (r, peer) == (rank, other)), "{error}");
        let later = world.barrier().unwrap_err().to_string();
        assert!(later.contains("the group has ended before: rank") && later.contains("expects AllReduce"), "{later}");
        // Left alone only when the others have seen the same: leaving tells them.
        group
    });
    // Or nothing at all.
    run(ENOUGH, |world, _, size| {
        let rank = world.rank();
        let group = world.split(usize::from(rank + 2 >= size)).unwrap();
        if rank + 1 != size {
            return group;
        }
        let error = group.exchange(tag(1), None, expect(0, &[2], DType::F32)).and_then(|p| p.wait()).err().unwrap();
        assert!(matches!(error, Error::Timeout { rank: r, peer, .. } if r == rank && peer == size - 2), "{error}");
        group
    });
    run(ENOUGH, |world, _, size| {
        let rank = world.rank();
        let group = world.split(usize::from(rank + 2 >= size)).unwrap();
        if rank + 1 != size {
            return group;
        }
        let error = group.barrier().unwrap_err().to_string();
        let who = if size == 2 { "all 2 ranks".to_string() } else { format!("ranks [{}, {rank}]", rank - 1) };
        let begin = format!("rank {rank}: Barrier (call 0, step 0) with {who} (1 bytes) failed: not complete within");
        assert!(error.starts_with(&begin), "{error}");
        group
    });
}

#[test]
fn an_nccl_that_cannot_split_is_told_and_works_otherwise() {
    const OLD: &str = "libnccl-old.so.2";
    let Ok(device) = Device::new_cuda_with_stream(0) else { return };
    let options = nccl::Options { library: Some(OLD.into()), ..Default::default() };
    if let Err(error) = nccl::connect(&device, &place(0, 1, 1), &options) {
        eprintln!("not tested: {error}");
        return;
    }
    run_with(&options, |world, _, size| {
        let error = world.split(world.rank() % 2).unwrap_err();
        assert!(matches!(&error, Error::Library { library: "NCCL", searched, .. } if searched == OLD), "{error}");
        let said = "rank 0 has NCCL 2.17.1, but groups of ranks need NCCL 2.18.0 or newer; install a newer one";
        assert!(error.to_string().contains(said), "{error}");
        assert!(Mesh::new(world.clone(), 1).is_err());
        assert_eq!(sum(world, world.rank()), (0..size).sum::<usize>() as f64);
    });
}
