//! Ranks over NCCL, as threads with a GPU each: with as many as the machine has, up to four, or on the fake driver and
//! NCCL of `fake_gpu`, which have no kernels. So the tests only copy on the device.

#[path = "nccl/groups.rs"]
mod groups;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{Expected, Tag, Traffic, nccl, threads};
use candle_cp::{Communicator, Error, LaunchEnvironment, Result, launch_environment_from};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(400);
const DTYPES: [DType; 7] = [DType::U8, DType::U32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];

type Comm = Arc<dyn Communicator>;

/// As torchrun tells on one machine.
fn place(rank: usize, size: usize, port: u16) -> LaunchEnvironment {
    let (rank, size, port) = (rank.to_string(), size.to_string(), port.to_string());
    let value = |name: &str| match name {
        "RANK" | "LOCAL_RANK" => Some(rank.clone()),
        "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => Some(size.clone()),
        "MASTER_ADDR" => Some("127.0.0.1".to_string()),
        "MASTER_PORT" => Some(port.clone()),
        _ => None,
    };
    launch_environment_from(value).unwrap().unwrap()
}

/// Counts a rank as through when it is dropped, also by a panic.
struct Ended<'a>(&'a AtomicUsize);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Runs `f` on every rank; `None` (and a line that says so) on a machine with fewer than two GPUs.
fn run<T: Send>(deadline: Duration, f: impl Fn(&Comm, &Device, usize) -> T + Sync) -> Option<Vec<T>> {
    run_with(&nccl::Options { deadline, ..Default::default() }, f)
}

fn run_with<T: Send>(options: &nccl::Options, f: impl Fn(&Comm, &Device, usize) -> T + Sync) -> Option<Vec<T>> {
    let size = (0..4).take_while(|&i| Device::new_cuda_with_stream(i).is_ok()).count();
    if size < 2 {
        eprintln!("not tested: {size} GPUs");
        return None;
    }
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ended = AtomicUsize::new(0);
    Some(std::thread::scope(|scope| {
        let start = |rank: usize| {
            let (f, ended) = (&f, &ended);
            scope.spawn(move || {
                let device = Device::new_cuda_with_stream(rank).unwrap();
                if rank % 2 == 1 {
                    // Half of the ranks do without cudarc's own events, so that ours are tested.
                    // SAFETY: the tests use the device's own stream only.
                    unsafe { device.as_cuda_device().unwrap().disable_event_tracking() };
                }
                let place = place(rank, size, port);
                let comm = nccl::connect(&device, &place, options).unwrap();
                assert_eq!((comm.rank(), comm.size()), (rank, size));
                let guard = Ended(ended);
                let result = f(&comm, &device, size);
                drop(guard);
                // Nobody leaves before all are through, or have failed: leaving is not what is tested.
                while ended.load(Ordering::SeqCst) < size {
                    std::thread::sleep(Duration::from_millis(1));
                }
                result
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }))
}

fn tag(step: usize) -> Tag {
    Tag { traffic: Traffic::KeyValue, call: 0, step }
}

/// Numbers that tell senders and steps apart and that all types hold.
fn numbers(rank: usize, step: usize, len: usize) -> Vec<f64> {
    (0..len).map(|i| ((rank * 31 + step * 7 + i) % 100) as f64).collect()
}

fn tensor(values: &[f64], dtype: DType, device: &Device) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_device(device).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    let host = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    host.flatten_all().unwrap().to_vec1().unwrap()
}

fn expect(from: usize, shape: &[usize], dtype: DType) -> Option<Expected> {
    Some(Expected { from, shape: Some(shape.to_vec()), dtype })
}

#[test]
fn exchanges_of_every_type_in_flight_together() {
    run(LONG, |comm, device, size| {
        let rank = comm.rank();
        for (call, dtype) in DTYPES.into_iter().enumerate() {
            let post = |step: usize| {
                let (to, from) = ((rank + step) % size, (rank + size - step) % size);
                // A copy on the device that the message has to wait for, of memory that is released at once.
                let x = tensor(&numbers(rank, step, 5000), dtype, device).reshape((2, 2500)).unwrap().copy().unwrap();
                let tag = Tag { call: call as u64, ..tag(step) };
                comm.exchange(tag, Some((to, x)), expect(from, &[2, 2500], dtype)).unwrap()
            };
            let posted: Vec<_> = (1..size).map(post).collect();
            for (step, pending) in (1..size).zip(posted) {
                let received = pending.wait().unwrap().unwrap();
                assert!(received.tensor.device().is_cuda() && received.tensor.dims() == [2, 2500]);
                let copied = received.tensor.copy().unwrap();
                drop(received);
                assert_eq!(values(&copied), numbers((rank + size - step) % size, step, 5000), "{dtype:?}, step {step}");
            }
        }
        let counter = comm.stats().of(Traffic::KeyValue);
        assert_eq!((counter.messages_sent, counter.bytes_alive), (7 * (size - 1), 0));
        assert_eq!(counter.bytes_sent, counter.bytes_received);
        assert!(counter.peak_bytes_alive > 0 && counter.waited > Duration::ZERO);
    });
}

#[test]
fn messages_wait_for_what_the_device_still_computes() {
    run(LONG, |comm, device, size| {
        let rank = comm.rank();
        let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
        let slowly = |step: usize| {
            let mut x = tensor(&numbers(rank, step, 1000), DType::F32, device);
            for _ in 0..200 {
                x = x.copy().unwrap();
            }
            x
        };
        let pending = comm.exchange(tag(1), Some((to, slowly(1))), expect(from, &[1000], DType::F32)).unwrap();
        assert_eq!(values(&pending.wait().unwrap().unwrap().tensor), numbers(from, 1, 1000));
        for (r, slice) in comm.all_gather(&slowly(2)).unwrap().iter().enumerate() {
            assert_eq!(values(slice), numbers(r, 2, 1000));
        }
        assert_eq!(values(&comm.broadcast(&slowly(3), 1).unwrap()), numbers(1, 3, 1000));
    });
}

#[test]
fn any_shape_no_elements_one_way_and_no_wait() {
    run(LONG, |comm, device, size| {
        let (rank, dtype) = (comm.rank(), DType::F32);
        let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
        // The receiver learns the shape; the CPU's tensors come back to the CPU.
        let x = tensor(&numbers(rank, 1, 3 * rank), dtype, &Device::Cpu).reshape((rank, 3)).unwrap();
        let any = Some(Expected { from, shape: None, dtype });
        let received = comm.exchange(tag(1), Some((to, x)), any).unwrap().wait().unwrap().unwrap();
        assert!(received.tensor.device().is_cpu() && received.tensor.dims() == [from, 3]);
        assert_eq!(values(&received.tensor), numbers(from, 1, 3 * from));
        // Odd ranks do not wait, and let go of what they send while the others are late.
        if rank % 2 == 0 {
            std::thread::sleep(Duration::from_millis(30));
        }
        let x = tensor(&numbers(rank, 2, 4000), dtype, device);
        let pending = comm.exchange(tag(2), Some((to, x)), expect(from, &[4000], dtype)).unwrap();
        if rank % 2 == 0 && from % 2 == 1 {
            assert_eq!(values(&pending.wait().unwrap().unwrap().tensor), numbers(from, 2, 4000));
        } else {
            drop(pending);
        }
        // From rank 0 to rank 1 only, of scalars.
        match rank {
            0 => {
                let x = Tensor::new(7f32, device).unwrap();
                assert!(comm.exchange(tag(3), Some((1, x)), None).unwrap().wait().unwrap().is_none());
            }
            1 => {
                let received = comm.exchange(tag(3), None, expect(0, &[], dtype)).unwrap().wait().unwrap().unwrap();
                assert_eq!((values(&received.tensor), received.tensor.dims()), (vec![7.0], &[][..]));
            }
            _ => assert!(comm.exchange(tag(3), None, None).unwrap().wait().unwrap().is_none()),
        }
        for peer in [rank, size, usize::MAX] {
            let error = comm.exchange(tag(4), None, expect(peer, &[1], dtype)).err().unwrap().to_string();
            assert!(error.contains(&format!("peer is {peer}")), "{error}");
        }
    });
}

#[test]
fn collectives_on_the_gpu_and_from_the_cpu() {
    run(LONG, |comm, device, size| {
        let rank = comm.rank();
        for (on, dtype) in DTYPES.into_iter().flat_map(|dtype| [(device, dtype), (&Device::Cpu, dtype)]) {
            let x = tensor(&numbers(rank, 0, 24), dtype, on).reshape((2, 3, 4)).unwrap();
            let sum = comm.all_reduce_sum(&x).unwrap();
            let expected: Vec<f64> = (0..24).map(|i| (0..size).map(|r| numbers(r, 0, 24)[i]).sum()).collect();
            assert_eq!(values(&sum), expected, "{dtype:?}");
            assert_eq!((sum.dims(), sum.dtype(), sum.device().is_cpu()), (&[2, 3, 4][..], dtype, on.is_cpu()));
            for (r, slice) in comm.all_gather(&x).unwrap().iter().enumerate() {
                assert_eq!((values(slice), slice.dims()), (numbers(r, 0, 24), x.dims()));
                assert_eq!(slice.device().is_cpu(), on.is_cpu());
            }
            for root in 0..size {
                assert_eq!(values(&comm.broadcast(&x, root).unwrap()), numbers(root, 0, 24));
            }
            // Other sizes along dimension 1, none on rank 0.
            let x = tensor(&numbers(rank, 1, 6 * rank), dtype, on).reshape((2, rank, 3)).unwrap();
            for (r, slice) in comm.all_gather_uneven(&x, 1, Traffic::Gather).unwrap().iter().enumerate() {
                assert_eq!((values(slice), slice.dims()), (numbers(r, 1, 6 * r), &[2, r, 3][..]));
            }
            comm.barrier().unwrap();
        }
        let empty = Tensor::zeros((0, 3), DType::F32, device).unwrap();
        assert_eq!(comm.all_reduce_sum(&empty).unwrap().dims(), [0, 3]);
        assert_eq!(comm.all_gather(&empty).unwrap().len(), size);
        // A slice of a larger tensor starts elsewhere.
        let part = tensor(&numbers(rank, 2, 10), DType::F32, device).narrow(0, 4, 3).unwrap();
        assert_eq!(values(&comm.all_gather(&part).unwrap()[1]), numbers(1, 2, 10)[4..7]);
        assert!(comm.broadcast(&part, size).unwrap_err().to_string().contains(&format!("peer is {size}")));
        let narrow = Tensor::zeros(3, DType::I16, &Device::Cpu).unwrap();
        assert!(comm.all_gather(&narrow).unwrap_err().to_string().contains("dtype is I16"));
    });
}

/// The same calls on rank threads: the same counters, but for times.
#[test]
fn counters_are_those_of_rank_threads() {
    let calls = |comm: &Comm| -> Result<[(usize, usize, usize); 4]> {
        let x = tensor(&numbers(comm.rank(), 0, 16), DType::F32, &Device::Cpu);
        comm.all_gather(&x)?;
        comm.broadcast(&x, 1)?;
        comm.all_reduce_sum(&x)?;
        comm.barrier()?;
        let stats = comm.stats();
        Ok([Traffic::Gather, Traffic::Broadcast, Traffic::AllReduce, Traffic::Barrier].map(|traffic| {
            let counter = stats.of(traffic);
            (counter.messages_sent, counter.bytes_sent, counter.bytes_received)
        }))
    };
    if let Some(ours) = run(LONG, |comm, _, _| calls(comm).unwrap()) {
        assert_eq!(ours, threads::run(ours.len(), &threads::Options::default(), |comm| calls(&comm)).unwrap());
    }
}

#[test]
fn ranks_out_of_step_are_told_and_the_group_ends() {
    for case in 0..5 {
        run(SHORT, |comm, device, size| {
            let rank = comm.rank();
            let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
            let (dims, dtype, step) = match (rank, case) {
                (0, 0) => (vec![3, 2], DType::F32, 1),
                (0, 1) => (vec![6000], DType::F32, 1),
                (0, 2) => (vec![2, 3], DType::BF16, 1),
                (0, 3) => (vec![2, 3], DType::F32, 2),
                (0, 4) => (vec![0, 3], DType::F32, 1),
                _ => (vec![2, 3], DType::F32, 1),
            };
            let x = tensor(&vec![1.0; dims.iter().product()], dtype, device).reshape(dims.as_slice()).unwrap();
            let pending = comm.exchange(tag(step), Some((to, x)), expect(from, &[2, 3], DType::F32));
            let result = pending.and_then(|pending| pending.wait());
            if rank == 1 {
                let error = result.unwrap_err();
                assert!(matches!(error, Error::Mismatch { rank: 1, peer: 0, .. }), "{error}");
                assert!(error.to_string().contains(&format!("step {step}) with {dtype:?} {dims:?}")), "{error}");
                let later = comm.barrier().unwrap_err().to_string();
                assert!(
                    later.contains("the group has ended before: rank 1: KeyValue (call 0, step 1) expects"),
                    "{later}"
                );
            }
        });
    }
    // In a collective all ranks see it, but the one that is out of step blames another.
    run(SHORT, |comm, _, size| {
        let rank = comm.rank();
        let x = tensor(&vec![1.0; if rank == 1 { 4 } else { 5 }], DType::F32, &Device::Cpu);
        let error =
            if rank % 2 == 0 { comm.all_reduce_sum(&x).map(|_| ()) } else { comm.all_reduce_sum(&x).map(|_| ()) };
        let error = error.unwrap_err();
        let blamed = usize::from(rank != 1);
        assert!(matches!(error, Error::Mismatch { peer, .. } if peer == blamed), "{error} of {size}");
    });
}

#[test]
fn silence_ends_at_the_deadline() {
    run(SHORT, |comm, device, size| {
        let rank = comm.rank();
        let start = Instant::now();
        if rank == 0 {
            std::thread::sleep(3 * SHORT);
            return;
        }
        let x = tensor(&numbers(rank, 0, 600), DType::F32, device);
        let (error, kind) = match rank {
            1 => {
                let pending = comm.exchange(tag(1), Some((0, x.clone())), expect(0, &[600], DType::F32));
                (pending.and_then(|pending| pending.wait()).err().unwrap(), 1)
            }
            _ => (comm.all_reduce_sum(&x).unwrap_err(), 2),
        };
        assert!(start.elapsed() >= SHORT && start.elapsed() < LONG);
        match kind {
            1 => assert!(matches!(error, Error::Timeout { rank: 1, peer: 0, bytes: 2400, .. }), "{error}"),
            _ => {
                let text = error.to_string();
                let begin =
                    format!("rank {rank}: AllReduce (call 0, step 0) with all {size} ranks (2400 bytes) failed");
                assert!(text.starts_with(&begin) && text.contains("not complete within 400ms"), "{text}");
            }
        }
        // The device is free again: what was computed is still there.
        assert_eq!(values(&x), numbers(rank, 0, 600));
        assert!(comm.broadcast(&x, 0).unwrap_err().to_string().contains("the group has ended before"));
    });
}

#[test]
fn the_librarys_own_words_are_in_the_error() {
    run(LONG, |comm, device, _| {
        // Only the fake refuses 13 bytes.
        if format!("{comm:?}").contains("NCCL 2.99.99") && comm.rank() < 2 {
            let peer = 1 - comm.rank();
            let x = tensor(&[1.0; 13], DType::U8, device);
            let error =
                comm.exchange(tag(1), Some((peer, x)), expect(peer, &[13], DType::U8)).err().unwrap().to_string();
            let begin = format!("rank {}: KeyValue (call 0, step 1) with rank {peer} (13 bytes) failed: ", comm.rank());
            assert!(error.starts_with(&begin), "{error}");
            assert!(error.ends_with("NCCL says: invalid argument; told by the fake"), "{error}");
        }
    });
}

#[test]
fn other_devices_are_refused() {
    let place = place(0, 1, 1);
    let connect = |device: &Device| nccl::connect(device, &place, &nccl::Options::default()).unwrap_err().to_string();
    assert!(connect(&Device::Cpu).contains("device is not a CUDA device"));
    match Device::new_cuda(0) {
        Ok(device) => assert!(connect(&device).contains("another stream in each thread")),
        Err(e) => assert!(!e.to_string().is_empty(), "no GPU here"),
    }
    if let Ok(device) = Device::new_cuda_with_stream(0) {
        let options = nccl::Options { library: Some("/nowhere/libnccl.so.2".into()), ..Default::default() };
        let error = nccl::connect(&device, &place, &options).unwrap_err();
        assert!(matches!(&error, Error::Library { searched, .. } if searched == "/nowhere/libnccl.so.2"), "{error}");
        let alone = nccl::connect(&device, &place, &nccl::Options::default()).unwrap();
        assert_eq!(values(&alone.all_reduce_sum(&Tensor::new(3f32, &device).unwrap()).unwrap()), [3.0]);
        alone.barrier().unwrap();
    }
}
