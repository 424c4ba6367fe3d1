//! Traces of rank threads: every message and every piece of work is there, in an order that holds whatever the clock says.

mod common;

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::{CommStats, Local, Row, Span, Tag, Traffic, threads};
use candle_cp::{Communicator, ConvActivation, CpContext, DeltaHeads, Error, MaskRule, SequenceLayout, Tokens};
use common::ring::options;
use std::sync::Arc;

const RANKS: usize = 3;
const LEN: usize = 48;

/// What one rank recorded, what it counted meanwhile, and the bits of its gradients.
struct Traced {
    spans: Vec<Span>,
    before: CommStats,
    after: CommStats,
    bits: Vec<u64>,
}

fn traced(work: impl Fn(&CpContext) -> candle_cp::Result<Vec<Tensor>> + Sync, on: bool) -> Vec<Traced> {
    let ranks = threads::run(RANKS, &options(), |comm: Arc<dyn Communicator>| {
        let layout = SequenceLayout::head_tail(LEN, RANKS)?;
        let context = CpContext::new(comm.clone(), layout, Tokens::single_document(1, LEN))?;
        comm.barrier()?;
        let before = comm.stats();
        if on {
            comm.trace().start();
        }
        let results = work(&context)?;
        let spans = comm.trace().stop();
        let after = comm.stats();
        let bits = results.iter().map(|x| x.flatten_all()?.to_vec1::<f64>());
        let bits = bits.collect::<candle_core::Result<Vec<_>>>()?.concat().into_iter().map(f64::to_bits).collect();
        // Nothing after the end.
        comm.barrier()?;
        assert!(comm.trace().stop().is_empty());
        Ok::<_, Error>(Traced { spans, before, after, bits })
    });
    ranks.unwrap()
}

/// Numbers that differ, the same on every rank.
fn numbers(shape: &[usize]) -> candle_core::Result<Tensor> {
    let count = shape.iter().product::<usize>();
    (Tensor::arange(0f64, count as f64, &Device::Cpu)? * 0.7)?.sin()?.reshape(shape)
}

fn attention(context: &CpContext) -> candle_cp::Result<Vec<Tensor>> {
    let x = Var::from_tensor(&numbers(&[1, 2, LEN, 4])?)?;
    let local = context.shard(&x, 2)?;
    let out = context.attend(&local, &local, &local, &MaskRule::causal(), 0.5)?;
    let gradients = out.sqr()?.sum_all()?.backward()?;
    Ok(vec![out.detach(), gradients.get(&x).expect("a gradient").clone()])
}

fn gathered(context: &CpContext) -> candle_cp::Result<Vec<Tensor>> {
    let x = Var::from_tensor(&numbers(&[1, LEN, 2, 4])?)?;
    let local = context.shard(&x, 1)?;
    let keys = context.gather_keys(&local, &local, &MaskRule::causal())?;
    let out = context.attend_gathered(&local, &keys, 0.5)?;
    let out = (out + context.attend_gathered(&local, &keys, 0.25)?)?;
    let gradients = out.sqr()?.sum_all()?.backward()?;
    Ok(vec![out.detach(), gradients.get(&x).expect("a gradient").clone()])
}

fn recurrences(context: &CpContext) -> candle_cp::Result<Vec<Tensor>> {
    let heads = DeltaHeads { key_heads: 1, value_heads: 2, key_dim: 4, value_dim: 4 };
    let x = Var::from_tensor(&numbers(&[1, LEN, heads.width()])?)?;
    let weight = numbers(&[heads.width(), 4])?;
    let local = context.shard(&x, 1)?;
    let qkv = context.causal_conv(&local, &weight, ConvActivation::Silu)?;
    let gates = local.narrow(2, 0, 2)?.contiguous()?;
    let out = context.delta_rule(&qkv, &gates.abs()?.neg()?, &gates.sqr()?, &heads)?;
    let gradients = out.sqr()?.sum_all()?.backward()?;
    Ok(vec![out.detach(), gradients.get(&x).expect("a gradient").clone()])
}

fn of<'a>(spans: &'a [Span], row: Row, name: &'static str) -> impl Iterator<Item = &'a Span> {
    spans.iter().filter(move |span| span.row == row && span.name == name)
}

/// The span of a row and name with a tag's call and step.
fn tagged<'a>(spans: &'a [Span], row: Row, name: &'static str, tag: (u64, u64)) -> &'a Span {
    let mut found = of(spans, row, name).filter(|s| (s.number("call"), s.number("step")) == (Some(tag.0), Some(tag.1)));
    let span = found.next().unwrap_or_else(|| panic!("no {name} {tag:?} among {spans:#?}"));
    assert!(found.next().is_none(), "{name} {tag:?} is there twice");
    span
}

#[test]
fn every_message_that_was_counted_is_a_transfer_and_every_exchange_a_wait() {
    for work in [attention, gathered, recurrences] {
        for (rank, Traced { spans, before, after, .. }) in traced(work, true).iter().enumerate() {
            let mut messages = 0;
            for kind in Traffic::ALL {
                let transfers: Vec<_> = of(spans, Row::Transfers, kind.name()).collect();
                let (before, after) = (before.of(kind), after.of(kind));
                assert_eq!(transfers.len(), after.messages_sent - before.messages_sent, "rank {rank}, {kind:?}");
                let bytes: u64 = transfers.iter().map(|span| span.number("bytes").unwrap()).sum();
                assert_eq!(bytes as usize, after.bytes_sent - before.bytes_sent, "rank {rank}, {kind:?}");
                assert!(transfers.iter().all(|span| span.number("to").is_some_and(|to| to != rank as u64)));
                let waits = of(spans, Row::Waits, kind.name()).count();
                assert_eq!(waits > 0, after.waited > before.waited, "rank {rank}, {kind:?}");
                assert!(waits >= transfers.len(), "rank {rank}, {kind:?}: each sent message is waited for");
                messages += transfers.len();
            }
            assert!(messages > 0 && spans.iter().all(|span| span.begin <= span.end));
        }
    }
}

/// At each hop the message is posted before the chunk of the hop before is worked on, and taken after the receiver has
/// worked on it. So the earliest rank's message travels while both ends compute, whatever the speed of either.
#[test]
fn what_the_ring_sends_travels_while_chunks_are_computed() {
    let all = traced(attention, true);
    let kind = Traffic::KeyValue.name();
    let calls: Vec<u64> = of(&all[0].spans, Row::Transfers, kind).map(|span| span.number("call").unwrap()).collect();
    let (forward, backward) = (*calls.iter().min().unwrap(), *calls.iter().max().unwrap());
    assert!(forward < backward && calls.len() == 2 * (RANKS - 1), "{calls:?}");
    for (name, call) in [("attention forward", forward), ("attention backward", backward)] {
        let work = |rank: usize, hop| tagged(&all[rank].spans, Row::Compute, name, (call, hop));
        for hop in 1..RANKS as u64 {
            let mut covered = 0;
            for (rank, Traced { spans, .. }) in all.iter().enumerate() {
                let message = tagged(spans, Row::Transfers, kind, (call, hop));
                let to = message.number("to").unwrap() as usize;
                assert_eq!(to, (rank + hop as usize) % RANKS);
                assert!(message.begin <= work(rank, hop - 1).begin, "posted before the chunk before is begun");
                assert!(work(to, hop - 1).end <= message.end, "taken after the receiver is done with the one before");
                assert!(message.end <= work(to, hop).begin, "and before it is worked on");
                assert!(message.end <= tagged(&all[to].spans, Row::Waits, kind, (call, hop)).end);
                let during = |span: &Span| message.begin <= span.begin && span.end <= message.end;
                covered += usize::from(during(work(to, hop - 1)));
            }
            assert!(covered > 0, "hop {hop}: a message travels during a whole chunk of its receiver");
        }
    }
    // The way home: after the gradient is there; its owner expects it after its own chunk of the hop, and takes it in a wait.
    let (kind, name) = (Traffic::KeyValueGradient.name(), "attention backward");
    for Traced { spans, .. } in &all {
        for hop in 1..RANKS as u64 {
            let message = tagged(spans, Row::Transfers, kind, (backward, hop));
            assert!(tagged(spans, Row::Compute, name, (backward, hop)).end <= message.begin);
            let owner = &all[message.number("to").unwrap() as usize].spans;
            assert!(tagged(owner, Row::Compute, name, (backward, hop)).end <= message.end);
            assert!(message.end <= tagged(owner, Row::Waits, kind, (backward, hop)).end);
        }
    }
}

#[test]
fn work_has_names() {
    let counts = |work: fn(&CpContext) -> candle_cp::Result<Vec<Tensor>>, names: &[(&'static str, usize)]| {
        for Traced { spans, .. } in traced(work, true) {
            for (name, count) in names {
                assert_eq!(of(&spans, Row::Compute, name).count(), *count, "{name}");
            }
        }
    };
    counts(attention, &[("attention forward", RANKS), ("attention backward", RANKS)]);
    counts(gathered, &[("gather keys", RANKS), ("attention forward", 2 * RANKS), ("attention backward", 2 * RANKS)]);
    // Before and after the exchange of states.
    counts(recurrences, &[("delta rule forward", 2), ("delta rule backward", 2)]);
    counts(recurrences, &[("convolution forward", 1), ("convolution backward", 1)]);
}

#[test]
fn a_trace_changes_no_bit_and_nothing_is_recorded_unasked() {
    for work in [attention, gathered, recurrences] {
        for (with, without) in traced(work, true).iter().zip(traced(work, false)) {
            assert_eq!(with.bits, without.bits);
            assert!(!with.spans.is_empty() && without.spans.is_empty());
        }
    }
}

#[test]
fn groups_of_a_rank_share_its_trace_and_name_ranks_of_the_world() {
    let all = threads::run(4, &options(), |world| {
        let pair = world.split(world.rank() % 2)?;
        pair.trace().start();
        let tag = Tag { traffic: Traffic::Halo, call: 7, step: 1 };
        let token = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
        world.exchange(tag, Some(((world.rank() + 2) % 4, token)), None)?;
        pair.barrier()?;
        Ok::<_, Error>(world.trace().stop())
    });
    for (rank, spans) in all.unwrap().iter().enumerate() {
        // Never taken, so it has not arrived.
        assert_eq!(of(spans, Row::Transfers, "halo").count(), 0);
        let barrier: Vec<_> = of(spans, Row::Transfers, "barrier").map(|span| span.number("to")).collect();
        assert_eq!(barrier, [Some((rank as u64 + 2) % 4)]);
    }
}

#[test]
fn one_rank_alone_records_its_work() {
    let comm = Local::new();
    comm.trace().start();
    drop(comm.trace().span(Row::Step, "a").with("n", 5));
    comm.trace().start();
    let open = comm.split(0).unwrap().trace().span(Row::Compute, "b");
    drop(comm.trace().span(Row::Compute, "c"));
    drop(open);
    let spans = comm.trace().stop();
    assert_eq!(spans.iter().map(|span| span.name).collect::<Vec<_>>(), ["c", "b"], "from the last start on");
    assert!(spans[1].begin <= spans[0].begin && spans[0].end <= spans[1].end);
}
