//! Messages between two ranks: many at once, of any size and type, large ones, and those nobody waits for.

use crate::cases::Comm;
use crate::same::bits;
use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{Expected, Pending, Tag, Traffic, mpi};
use candle_cp::{Error, Result};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::time::{Duration, Instant};

const TYPES: [DType; 7] = [DType::U8, DType::U32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];

fn tag(call: u64, step: usize) -> Tag {
    Tag { traffic: Traffic::KeyValue, call, step }
}

/// Numbers that say whose message it is.
fn message(from: usize, call: u64, len: usize, dtype: DType) -> Result<Tensor> {
    let numbers: Vec<f64> = (0..len).map(|i| ((i * 7 + from * 31 + call as usize * 13) % 101) as f64).collect();
    Ok(Tensor::from_vec(numbers, len, &Device::Cpu)?.to_dtype(dtype)?)
}

/// Rounds of exchanges with every other rank in several groups, posted in one order and waited for in another.
pub fn many(comm: Comm) -> Result<()> {
    let groups = [comm.clone(), comm.split(0)?, comm.split(0)?];
    let mut common = StdRng::seed_from_u64(5);
    let mut own = StdRng::seed_from_u64(comm.rank() as u64);
    for call in 0..12 {
        let mut pending: Vec<(Box<dyn Pending>, Tensor)> = Vec::new();
        for (group, channel) in groups.iter().enumerate() {
            for step in 1..comm.size() {
                let any = common.random_range(0..5000);
                let len = [0, 1, 6, 7, 8, 333, any][common.random_range(0..7)];
                let dtype = TYPES[common.random_range(0..TYPES.len())];
                let call = call * 10 + group as u64;
                let (to, from) = ((comm.rank() + step) % comm.size(), (comm.rank() + comm.size() - step) % comm.size());
                let shape = (group != 1).then(|| vec![len]);
                let expected = Expected { from, shape, dtype };
                let sent = message(comm.rank(), call, len, dtype)?;
                let exchange = channel.exchange(tag(call, step), Some((to, sent)), Some(expected))?;
                pending.push((exchange, message(from, call, len, dtype)?));
            }
        }
        pending.shuffle(&mut own);
        for (exchange, expected) in pending {
            let came = exchange.wait()?.expect("a message was expected");
            assert_eq!(bits(&came.tensor)?, bits(&expected)?);
        }
    }
    let stats = comm.stats().of(Traffic::KeyValue);
    assert_eq!((stats.bytes_alive, stats.messages_sent), (0, 36 * (comm.size() - 1)));
    comm.barrier()
}

/// Every type there and back, as parts of larger tensors, and in every number of dimensions; others are refused.
pub fn all_types(comm: Comm) -> Result<()> {
    let other = 1 - comm.rank();
    for dtype in TYPES {
        for rank in 0..=8 {
            let shape = vec![2; rank];
            let whole = message(comm.rank(), 3, 4 << rank, dtype)?.reshape((4, ()))?;
            let part = whole.narrow(0, 1 + comm.rank(), 1)?.reshape(shape.clone())?;
            let theirs = message(other, 3, 4 << rank, dtype)?.reshape((4, ()))?.narrow(0, 1 + other, 1)?;
            let expected = Expected { from: other, shape: Some(shape.clone()), dtype };
            let tag = tag(comm.next_call(), rank);
            let came = comm.exchange(tag, Some((other, part)), Some(expected))?.wait()?.expect("expected");
            assert_eq!(came.tensor.dims(), shape);
            assert_eq!(bits(&came.tensor)?, bits(&theirs.reshape(shape)?)?);
        }
    }
    let refused = |tensor: Tensor| comm.exchange(tag(0, 0), Some((other, tensor)), None).map(|_| ()).unwrap_err();
    let text = refused(Tensor::zeros(3, DType::I32, &Device::Cpu)?).to_string();
    assert!(text.contains("dtype is I32 in KeyValue (call 0, step 0)"), "{text}");
    let text = refused(Tensor::zeros(vec![1; 9], DType::F32, &Device::Cpu)?).to_string();
    assert!(text.contains("tensors of up to 8 dimensions travel"), "{text}");
    comm.barrier()
}

/// A large message travels while its ranks compute: between posting and arrival neither calls anything that could move it,
/// only looks at its counters.
pub fn overlap(comm: Comm) -> Result<()> {
    let (other, len) = (1 - comm.rank(), 64 << 20);
    let expected = Expected { from: other, shape: Some(vec![len]), dtype: DType::U8 };
    let mine = Tensor::full(comm.rank() as u8, len, &Device::Cpu)?;
    let exchange = comm.exchange(tag(comm.next_call(), 0), Some((other, mine)), Some(expected))?;
    let (start, x) = (Instant::now(), Tensor::full(0.5f32, (64, 64), &Device::Cpu)?);
    let mut products = 0;
    while comm.stats().of(Traffic::KeyValue).bytes_received < len {
        assert!(start.elapsed() < Duration::from_secs(100), "it does not come by itself");
        assert_eq!(x.matmul(&x)?.get(0)?.get(0)?.to_scalar::<f32>()?, 16.0);
        products += 1;
    }
    assert!(products > 0, "computed meanwhile");
    let came = exchange.wait()?.expect("a message was expected").tensor;
    assert!(came.to_vec1::<u8>()?.iter().all(|&x| usize::from(x) == other));
    comm.barrier()
}

/// Exchanges that are dropped without a wait take nothing from those after them.
pub fn dropped(comm: Comm) -> Result<()> {
    let other = 1 - comm.rank();
    for call in 0..20 {
        let (len, dtype) = (1 << (call % 16), DType::F32);
        let expected = Expected { from: other, shape: Some(vec![len]), dtype };
        let sent = message(comm.rank(), call, len, dtype)?;
        let exchange = comm.exchange(tag(call, 0), Some((other, sent)), Some(expected))?;
        if call % 3 > 0 {
            let came = exchange.wait()?.expect("a message was expected").tensor;
            assert_eq!(bits(&came)?, bits(&message(other, call, len, dtype)?)?);
        }
    }
    Ok(())
}

/// MPI begins and ends once in a process.
pub fn connected_once(comm: Comm) -> Result<()> {
    let refused = || match mpi::connect(&mpi::Options::default()) {
        Err(Error::MpiStart { message }) => message,
        other => panic!("{other:?}"),
    };
    assert!(refused().contains("uses MPI already"));
    for piece_bytes in [0, 1 << 31] {
        let options = mpi::Options { piece_bytes, ..Default::default() };
        let text = mpi::connect(&options).unwrap_err().to_string();
        assert!(text.contains(&format!("piece_bytes is {piece_bytes}, but one message of MPI has 1 to")), "{text}");
    }
    comm.barrier()
}

/// More bytes than a C int counts, checked by a sum and at places beyond 2^31.
pub fn large(comm: Comm) -> Result<()> {
    let (other, len) = (1 - comm.rank(), (1usize << 31) + 4099);
    // One direction: a process holds one copy.
    let value = |i: usize| (i % 251) as u8;
    let tag = tag(comm.next_call(), 0);
    if comm.rank() == 0 {
        let all: Vec<u8> = (0..len).map(value).collect();
        let sent = Tensor::from_vec(all, len, &Device::Cpu)?;
        comm.exchange(tag, Some((other, sent)), None)?.wait()?;
    } else {
        let expected = Expected { from: other, shape: Some(vec![len]), dtype: DType::U8 };
        let came = comm.exchange(tag, None, Some(expected))?.wait()?.expect("a message was expected").tensor;
        assert_eq!(came.elem_count(), len);
        let (storage, _) = came.storage_and_layout();
        let candle_core::Storage::Cpu(storage) = &*storage else { panic!("on the CPU") };
        let wrong = storage.as_slice::<u8>()?.iter().enumerate().filter(|&(i, &x)| x != value(i)).count();
        assert_eq!(wrong, 0);
    }
    comm.barrier()
}
