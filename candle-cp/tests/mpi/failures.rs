//! What goes wrong, and in what the other ranks are meanwhile.

use crate::cases::Comm;
use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{Expected, Tag, Traffic};
use candle_cp::{Error, Result};
use std::time::Duration;

/// The rank that goes wrong.
const BAD: usize = 1;

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
}

/// Two ranks send each other a tensor, and expect one of rank 0's kind.
fn exchange(comm: &Comm, mine: (Tag, Tensor), expected: (Tag, &[usize], DType)) -> Result<()> {
    let other = (comm.rank() + 1) % comm.size();
    let from = (comm.rank() + comm.size() - 1) % comm.size();
    let sent = comm.exchange(mine.0, Some((other, mine.1)), None)?;
    let expected_of = Expected { from, shape: Some(expected.1.to_vec()), dtype: expected.2 };
    comm.exchange(expected.0, None, Some(expected_of))?.wait()?;
    sent.wait()?;
    Ok(())
}

fn tag_of(call: u64) -> Tag {
    Tag { traffic: Traffic::KeyValue, call, step: 1 }
}

pub fn shape(comm: Comm) -> Result<()> {
    let shape: &[usize] = if comm.rank() == BAD { &[2, 3] } else { &[3, 2] };
    exchange(&comm, (tag_of(0), zeros(shape, DType::F32)), (tag_of(0), shape, DType::F32))
}

pub fn dtype(comm: Comm) -> Result<()> {
    let dtype = if comm.rank() == BAD { DType::BF16 } else { DType::F32 };
    exchange(&comm, (tag_of(0), zeros(&[4], dtype)), (tag_of(0), &[4], dtype))
}

pub fn tag(comm: Comm) -> Result<()> {
    let tag = tag_of(if comm.rank() == BAD { 9 } else { 0 });
    exchange(&comm, (tag, zeros(&[4], DType::F32)), (tag, &[4], DType::F32))
}

fn die() -> ! {
    // The others are waiting when it happens: what they wait for has been posted.
    std::thread::sleep(Duration::from_millis(300));
    // SAFETY: ends this process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("killed");
}

/// A few messages, so that all are connected.
fn warm_up(comm: &Comm) -> Result<()> {
    let sum = comm.all_reduce_sum(&Tensor::new(&[1f32; 8], &Device::Cpu)?)?.to_vec1::<f32>()?;
    assert_eq!(sum, [comm.size() as f32; 8]);
    Ok(())
}

pub fn killed_in_exchange(comm: Comm) -> Result<()> {
    warm_up(&comm)?;
    if comm.rank() == BAD {
        die();
    }
    // Rank 0 waits for the one that dies, rank 2 for one that lives and never answers; both send to the one that dies.
    let (to, from) = if comm.rank() == 0 { (BAD, BAD) } else { (BAD, 0) };
    let tag = Tag { call: comm.next_call(), ..tag_of(0) };
    let expected = Expected { from, shape: Some(vec![5]), dtype: DType::U8 };
    comm.exchange(tag, Some((to, zeros(&[1 << 20], DType::F32))), None)?;
    comm.exchange(tag, None, Some(expected))?.wait()?;
    Ok(())
}

pub fn killed_in_collective(comm: Comm) -> Result<()> {
    warm_up(&comm)?;
    if comm.rank() == BAD {
        die();
    }
    comm.all_reduce_sum(&zeros(&[1 << 20], DType::F32))?;
    Ok(())
}

pub fn killed_in_split(comm: Comm) -> Result<()> {
    if comm.rank() == BAD {
        die();
    }
    comm.split(comm.rank())?;
    Ok(())
}

/// Later calls fail, too.
pub fn killed_while_computing(comm: Comm) -> Result<()> {
    warm_up(&comm)?;
    if comm.rank() == BAD {
        die();
    }
    while comm.peer_failure().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    comm.barrier()
}

pub fn stopped(comm: Comm) -> Result<()> {
    warm_up(&comm)?;
    if comm.rank() == BAD {
        // SAFETY: stops this process; the launcher kills it in the end.
        unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
    }
    comm.all_reduce_sum(&zeros(&[3], DType::F32))?;
    Ok(())
}

pub fn error(comm: Comm) -> Result<()> {
    warm_up(&comm)?;
    if comm.rank() == BAD {
        return Err(Error::Candle(candle_core::Error::Msg("no more memory".into())));
    }
    comm.barrier()
}

pub fn leaves(comm: Comm) -> Result<()> {
    warm_up(&comm)?;
    if comm.rank() == BAD { Ok(()) } else { comm.barrier() }
}

pub fn panic(comm: Comm) -> Result<()> {
    warm_up(&comm)?;
    if comm.rank() == BAD {
        panic!("as planned");
    }
    comm.barrier()
}
