//! When one rank goes wrong, every rank ends in time with an error that names it and the operation.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{Communicator, CpContext, Error, MaskRule, Result, SequenceLayout, Tokens};
use common::ring::{options, run_all};
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANKS: usize = 4;
const BAD: usize = 2;

/// What the bad rank does instead of taking part.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Act {
    Fails,
    Panics,
    ReturnsEarly,
    StaysSilent,
}

const ACTS: [Act; 4] = [Act::Fails, Act::Panics, Act::ReturnsEarly, Act::StaysSilent];
const SHORT: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(60);

impl Act {
    /// Silence ends at the deadline; everything else has to be noticed long before.
    fn deadline(self) -> Duration {
        if self == Self::StaysSilent { SHORT } else { LONG }
    }

    /// `None` if the rank should go on.
    fn perform(self) -> Option<Result<()>> {
        match self {
            Self::Fails => Some(Err(Error::Candle(candle_core::Error::Msg("no more memory".into())))),
            Self::Panics => panic!("index out of bounds, says the test"),
            Self::ReturnsEarly => Some(Ok(())),
            Self::StaysSilent => {
                std::thread::sleep(2 * SHORT);
                None
            }
        }
    }
}

/// Runs `healthy` on all ranks, with `act` on the bad one; returns each rank's error text.
fn texts(
    act: Act,
    healthy: impl Fn(&Arc<dyn Communicator>, &dyn Fn() -> Option<Result<()>>) -> Result<()> + Sync,
) -> Vec<String> {
    let start = Instant::now();
    let (ended, group) = run_all(RANKS, act.deadline(), |comm| {
        let rank = comm.rank();
        healthy(&comm, &|| if rank == BAD { act.perform() } else { None })
    });
    assert!(start.elapsed() < Duration::from_secs(10), "{act:?} took {:?}", start.elapsed());
    let Err(Error::RankFailed { rank, cause }) = group else { panic!("{act:?}: the group ended with {group:?}") };
    match act {
        Act::Fails => assert_eq!((rank, cause.to_string().as_str()), (BAD, "no more memory")),
        Act::Panics => {
            assert_eq!((rank, cause.to_string().as_str()), (BAD, "panicked: index out of bounds, says the test"));
        }
        Act::ReturnsEarly => assert!(cause.to_string().contains(&format!("rank {BAD}")), "{cause}"),
        Act::StaysSilent => assert!(cause.to_string().contains("got no answer"), "{cause}"),
    }
    let text = |(rank, result): (usize, std::result::Result<(), String>)| match result {
        Err(text) => text,
        Ok(()) if act == Act::ReturnsEarly && rank == BAD => String::new(),
        Ok(()) => panic!("{act:?}: rank {rank} did not notice"),
    };
    ended.into_iter().enumerate().map(text).collect()
}

fn assert_named(act: Act, operation: &str, texts: &[String]) {
    for (rank, text) in texts.iter().enumerate().filter(|(rank, _)| *rank != BAD) {
        assert!(text.starts_with(&format!("rank {rank}: {operation}")), "{act:?}, rank {rank}: {text}");
        assert!(text.contains(&format!("rank {BAD}")), "{act:?}, rank {rank} does not name rank {BAD}: {text}");
        let reason = match act {
            Act::Fails => "no more memory",
            Act::Panics => "index out of bounds, says the test",
            Act::ReturnsEarly => "has already returned",
            Act::StaysSilent => "within 500ms",
        };
        assert!(text.contains(reason), "{act:?}, rank {rank}: {text}");
    }
}

#[test]
fn in_every_collective() {
    type Collective = fn(&dyn Communicator, &Tensor) -> Result<()>;
    let collectives: [(&str, Collective); 4] = [
        ("AllReduce (call 0", |c, x| c.all_reduce_sum(x).map(|_| ())),
        ("Gather (call 0", |c, x| c.all_gather(x).map(|_| ())),
        ("Broadcast (call 0", |c, x| c.broadcast(x, BAD).map(|_| ())),
        ("Barrier (call 0", |c, _| c.barrier()),
    ];
    for (name, collective) in collectives {
        for act in ACTS {
            let texts = texts(act, |comm, bad| {
                let x = Tensor::zeros(8, DType::F32, &Device::Cpu)?;
                bad().unwrap_or_else(|| collective(comm.as_ref(), &x))
            });
            assert_named(act, name, &texts);
        }
    }
}

/// Bidirectional attention over 4 ranks: everyone needs everyone.
fn attend(comm: &Arc<dyn Communicator>, head_dim: usize, dtype: DType) -> Result<(Var, Tensor)> {
    let layout = SequenceLayout::contiguous(12, RANKS)?;
    let context = CpContext::new(comm.clone(), layout, Tokens::single_document(1, 12))?;
    let x = Var::ones((1, 2, 3, head_dim), dtype, &Device::Cpu)?;
    let out = context.attend(&x, &x, &x, &MaskRule::bidirectional(), 1.0)?;
    Ok((x, out))
}

#[test]
fn before_the_ring() {
    for act in ACTS {
        let texts = texts(act, |comm, bad| bad().unwrap_or_else(|| attend(comm, 4, DType::F32).map(|_| ())));
        assert_named(act, "KeyValue (call 0, step ", &texts);
    }
}

#[test]
fn between_forward_and_backward() {
    for act in ACTS {
        let texts = texts(act, |comm, bad| {
            let (_, out) = attend(comm, 4, DType::F32)?;
            match bad() {
                Some(result) => result,
                None => Ok(out.sum_all()?.backward().map(|_| ())?),
            }
        });
        // A slow rank may still be in forward.
        assert_named(act, "KeyValue", &texts);
    }
}

#[test]
fn in_the_middle_of_a_ring() {
    // A ring of the same shape by hand: the bad rank answers the first step and then fails.
    use candle_cp::comm::{Expected, Tag, Traffic};
    for act in ACTS {
        let texts = texts(act, |comm, bad| {
            let (rank, call) = (comm.rank(), comm.next_call());
            for step in 1..RANKS {
                if step == 2
                    && let Some(result) = bad()
                {
                    return result;
                }
                let x = Tensor::zeros(5, DType::F32, &Device::Cpu)?;
                let (to, from) = ((rank + step) % RANKS, (rank + RANKS - step) % RANKS);
                let expected = Expected { from, shape: Some(vec![5]), dtype: DType::F32 };
                let tag = Tag { traffic: Traffic::KeyValue, call, step };
                comm.exchange(tag, Some((to, x)), Some(expected))?.wait()?;
            }
            Ok(())
        });
        if act == Act::StaysSilent {
            // Rank 3 waits for rank 0, which waits for the silent one: either deadline may pass first.
            assert!(texts.iter().all(|text| text.contains("within 500ms")), "{texts:?}");
        } else {
            assert_named(act, "KeyValue (call 0, step ", &texts);
        }
    }
}

/// All ranks end with an error, and at least the ones next to the bad rank say what came instead.
fn assert_mismatch(f: impl Fn(&Arc<dyn Communicator>) -> Result<()> + Sync, parts: &[&str]) {
    let start = Instant::now();
    let (ended, group) = run_all(RANKS, LONG, |comm| f(&comm));
    assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
    assert!(matches!(group, Err(Error::RankFailed { .. })), "{group:?}");
    for (rank, result) in ended.into_iter().enumerate() {
        let text = result.expect_err("every rank notices");
        for part in [&format!("rank {rank}: ") as &str, "every rank has to make the same calls"].iter().chain(parts) {
            assert!(text.contains(part), "rank {rank} does not say {part:?}: {text}");
        }
        assert!(text.contains(&format!("rank {BAD}")), "rank {rank} does not name rank {BAD}: {text}");
    }
}

#[test]
fn another_shape_in_a_sum() {
    let f = |comm: &Arc<dyn Communicator>| {
        let len = if comm.rank() == BAD { 12 } else { 8 };
        comm.all_reduce_sum(&Tensor::zeros(len, DType::F32, &Device::Cpu)?).map(|_| ())
    };
    assert_mismatch(f, &["AllReduce (call 0, step", "F32 [3]", "F32 [2]"]);
}

#[test]
fn another_shape_in_a_gather() {
    let f = |comm: &Arc<dyn Communicator>| {
        let len = if comm.rank() == BAD { 12 } else { 8 };
        comm.all_gather(&Tensor::zeros(len, DType::F32, &Device::Cpu)?).map(|_| ())
    };
    assert_mismatch(f, &["Gather (call 0, step", "[12]", "[8]"]);
}

#[test]
fn another_type_in_a_broadcast() {
    let f = |comm: &Arc<dyn Communicator>| {
        let dtype = if comm.rank() == BAD { DType::BF16 } else { DType::F32 };
        comm.broadcast(&Tensor::zeros(3, dtype, &Device::Cpu)?, BAD)?;
        comm.barrier()
    };
    assert_mismatch(f, &["Broadcast (call 0, step 0) with BF16 [3]", "with F32 [3]"]);
}

#[test]
fn another_collective() {
    let f = |comm: &Arc<dyn Communicator>| {
        let x = Tensor::zeros(8, DType::F32, &Device::Cpu)?;
        if comm.rank() == BAD { comm.all_gather(&x).map(|_| ()) } else { comm.barrier() }
    };
    assert_mismatch(f, &["Barrier (call 0, step", "Gather (call 0, step"]);
}

#[test]
fn another_head_size_or_type_in_attention() {
    let f = |comm: &Arc<dyn Communicator>| {
        let head_dim = if comm.rank() == BAD { 6 } else { 4 };
        attend(comm, head_dim, DType::F32).map(|_| ())
    };
    assert_mismatch(f, &["KeyValue (call 0, step", "F32 [2, 1, 2, 3, 4]", "F32 [2, 1, 2, 3, 6]"]);
    let f = |comm: &Arc<dyn Communicator>| {
        let dtype = if comm.rank() == BAD { DType::F64 } else { DType::F32 };
        attend(comm, 4, dtype).map(|_| ())
    };
    assert_mismatch(f, &["KeyValue (call 0, step", "F32 [2, 1, 2, 3, 4]", "F64 [2, 1, 2, 3, 4]"]);
}

#[test]
fn one_attention_call_more_than_the_others() {
    let f = |comm: &Arc<dyn Communicator>| {
        if comm.rank() == BAD {
            attend(comm, 4, DType::F32)?;
        }
        attend(comm, 4, DType::F32)?;
        comm.barrier()
    };
    assert_mismatch(f, &["Barrier (call 1, step", "KeyValue (call 1, step"]);
}

#[test]
fn an_echo_is_told_from_a_cause() {
    let (mut echoes, mut causes) = (0, 0);
    for act in [Act::Fails, Act::ReturnsEarly] {
        let seen = std::sync::Mutex::new(Vec::new());
        let result = threads::run(RANKS, &options(), |comm| {
            if comm.rank() == BAD {
                return act.perform().expect("it does not go on");
            }
            let result = comm.barrier();
            seen.lock().unwrap().extend(result.as_ref().err().map(Error::is_peer_failure));
            result
        });
        causes += usize::from(matches!(result, Err(Error::RankFailed { .. })));
        echoes += seen.into_inner().unwrap().into_iter().filter(|echo| *echo).count();
    }
    assert_eq!((echoes, causes), (2 * (RANKS - 1), 2));
}

#[test]
fn a_failed_group_leaves_nothing_behind() {
    for _ in 0..3 {
        texts(Act::Fails, |comm, bad| bad().unwrap_or_else(|| comm.barrier()));
        let sums = threads::run(RANKS, &options(), |comm| {
            let one = Tensor::ones(1, DType::F32, &Device::Cpu)?;
            Ok::<_, Error>(comm.all_reduce_sum(&one)?.to_vec1::<f32>()?[0])
        });
        assert_eq!(sums.unwrap(), [4.0; RANKS]);
    }
}
