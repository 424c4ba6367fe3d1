//! What travels and what is alive, by the communicator's own counters.

mod common;

use candle_cp::comm::{Counter, Traffic, threads};
use candle_cp::{AttentionPlan, CpContext, SequenceLayout};
use common::ring::{mask_rule, numbers, one_rank, options, tokens};
use common::{Case, Rule, Run, block, documents, layouts};

const RANKS: usize = 8;

/// Counters and plan of every rank after one forward and backward pass.
fn counters(case: &Case, layout: &SequenceLayout) -> Vec<(Counter, Counter, AttentionPlan)> {
    let data = case.data();
    let all = threads::run(RANKS, &options(), |comm| {
        let context = CpContext::new(comm, layout.clone(), tokens(case))?;
        one_rank(case, &data, &context, Run::default())?;
        // A rank is done when its peers have taken what it sent; all of them have after a barrier.
        context.comm().barrier()?;
        let stats = context.comm().stats();
        let plan = context.plan(&mask_rule(&case.rule))?.as_ref().clone();
        Ok::<_, candle_cp::Error>((stats.of(Traffic::KeyValue), stats.of(Traffic::KeyValueGradient), plan))
    });
    all.unwrap()
}

fn bytes_per_key(case: &Case) -> usize {
    2 * case.batch() * case.key_heads * case.head_dim * size_of::<f64>()
}

#[test]
fn at_most_two_remote_chunks_are_alive() {
    let case = Case { key_heads: 2, group: 1, ..Case::plain(400, Rule::CAUSAL) };
    for (name, layout) in layouts(400, RANKS) {
        let largest = (0..RANKS).map(|r| layout.local_len(r)).max().unwrap();
        let chunk = largest * bytes_per_key(&case);
        let all = counters(&case, &layout);
        for (rank, (keys, gradients, _)) in all.iter().enumerate() {
            assert!(keys.peak_bytes_alive <= 2 * chunk, "{name}, rank {rank}: {keys:?}, a chunk is {chunk} bytes");
            assert!(gradients.peak_bytes_alive <= 2 * chunk, "{name}, rank {rank}: {gradients:?}");
            assert_eq!((keys.bytes_alive, gradients.bytes_alive), (0, 0), "{name}, rank {rank}");
        }
        assert!(all.iter().any(|(keys, _, _)| keys.peak_bytes_alive >= chunk), "{name}: the counters count");
    }
}

#[test]
fn bytes_sent_are_what_the_plans_say() {
    let rule = Rule::sliding(40).with_groups();
    let case = Case::row(documents(&[250, 150]), block(400, &[90..130]), rule);
    for (name, layout) in layouts(400, RANKS) {
        let all = counters(&case, &layout);
        for (rank, (keys, gradients, plan)) in all.iter().enumerate() {
            let sent: usize =
                plan.hops().iter().filter_map(|h| h.send.as_ref()).flat_map(|(_, r)| r).map(|r| r.len()).sum();
            let messages = plan.hops().iter().filter(|h| h.send.is_some()).count();
            let (sent, received) = (sent * bytes_per_key(&case), plan.keys_received() * bytes_per_key(&case));
            // Keys travel in forward and once more in backward; gradients travel the other way.
            assert_eq!(keys.bytes_sent, 2 * sent, "{name}, rank {rank}");
            assert_eq!(keys.bytes_received, 2 * received, "{name}, rank {rank}");
            assert_eq!(keys.messages_sent, 2 * messages, "{name}, rank {rank}");
            assert_eq!(gradients.bytes_sent, received, "{name}, rank {rank}");
            assert_eq!(gradients.bytes_received, sent, "{name}, rank {rank}");
        }
        assert!(all.iter().any(|(keys, _, _)| keys.bytes_sent > 0), "{name}");
    }
}

#[test]
fn the_op_keeps_no_more_than_its_inputs_between_passes() {
    // Nothing remote may stay alive between forward and backward: keys are sent again instead.
    let case = Case::plain(64, Rule::CAUSAL);
    let layout = SequenceLayout::contiguous(64, RANKS).unwrap();
    let alive = threads::run(RANKS, &options(), |comm| {
        let context = CpContext::new(comm, layout.clone(), tokens(&case))?;
        let x = candle_core::Tensor::from_vec(case.data().k, case.key_shape(), &candle_core::Device::Cpu)?;
        let full = candle_core::Var::from_tensor(&x)?;
        let x = context.shard(&full, 2)?;
        let out = context.attend(&x, &x, &x, &mask_rule(&case.rule), 0.5)?;
        context.comm().barrier()?;
        let alive = context.comm().stats().of(Traffic::KeyValue).bytes_alive;
        assert!(numbers(&out)?.iter().all(|x| x.is_finite()));
        Ok::<_, candle_cp::Error>(alive)
    });
    assert_eq!(alive.unwrap(), [0; RANKS]);
}
