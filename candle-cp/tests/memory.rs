//! What travels and what is alive, by the communicator's own counters.

mod common;

use candle_core::{DType, Device, Tensor, Var};
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

/// Bytes of keys and gradients sent by each rank in forward and in backward.
type PassBytes = [[usize; 2]; 2];

/// One attention layer in f32 over `layout`: what every rank sent, and its plan.
fn bytes_by_pass(case: &Case, layout: &SequenceLayout) -> Vec<(PassBytes, AttentionPlan)> {
    let data = case.data();
    let all = threads::run(layout.ranks(), &options(), |comm| {
        let context = CpContext::new(comm.clone(), layout.clone(), tokens(case))?;
        let slice = |x: &[f64], shape| -> candle_cp::Result<Var> {
            let full = Tensor::from_slice(x, shape, &Device::Cpu)?.to_dtype(DType::F32)?;
            Ok(Var::from_tensor(&context.shard(&full, 2)?)?)
        };
        let q = slice(&data.q, case.query_shape())?;
        let (k, v) = (slice(&data.k, case.key_shape())?, slice(&data.v, case.key_shape())?);
        let sent = || -> candle_cp::Result<[usize; 2]> {
            comm.barrier()?;
            Ok([Traffic::KeyValue, Traffic::KeyValueGradient].map(|traffic| comm.stats().of(traffic).bytes_sent))
        };
        let rule = mask_rule(&case.rule);
        let out = context.attend(&q, &k, &v, &rule, case.scale)?;
        let forward = sent()?;
        out.sum_all()?.backward()?;
        let both = sent()?;
        let backward = [both[0] - forward[0], both[1] - forward[1]];
        Ok::<_, candle_cp::Error>(([forward, backward], context.plan(&rule)?.as_ref().clone()))
    });
    all.unwrap()
}

#[test]
fn bytes_of_each_layer_type_in_each_pass() {
    const LAYERS: [(Rule, usize, usize); 2] = [(Rule::sliding(100), 4, 16), (Rule::CAUSAL, 2, 32)];
    for (rule, key_heads, head_dim) in LAYERS {
        let case = Case { key_heads, group: 2, head_dim, ..Case::plain(1024, rule) };
        let per_key = key_heads * head_dim * 2 * size_of::<f32>();
        for (name, layout) in layouts(1024, 4) {
            for (rank, (bytes, plan)) in bytes_by_pass(&case, &layout).into_iter().enumerate() {
                let keys = plan.hops().iter().filter_map(|hop| hop.send.as_ref()).flat_map(|(_, ranges)| ranges);
                let (sent, received) = (keys.map(|range| range.len()).sum::<usize>(), plan.keys_received());
                // Forward sends keys and values; backward sends them again, and gradients the other way, also in f32.
                let expected = [[sent * per_key, 0], [sent * per_key, received * per_key]];
                assert_eq!(bytes, expected, "{rule:?}, {name}, rank {rank}");
                if name == "contiguous" {
                    // 256 keys per rank: the window reaches into one tile of the rank before; a full layer takes it all.
                    let by_hand = if rule == Rule::CAUSAL { 256 * (3 - rank) } else { 128 * usize::from(rank < 3) };
                    assert_eq!(sent, by_hand, "{rule:?}, rank {rank}");
                }
            }
        }
    }
}

#[test]
fn the_op_keeps_no_more_than_its_inputs_between_passes() {
    // Nothing remote may stay alive between forward and backward: keys are sent again instead.
    let case = Case::plain(64, Rule::CAUSAL);
    let layout = SequenceLayout::contiguous(64, RANKS).unwrap();
    let alive = threads::run(RANKS, &options(), |comm| {
        let context = CpContext::new(comm, layout.clone(), tokens(&case))?;
        let x = Tensor::from_vec(case.data().k, case.key_shape(), &Device::Cpu)?;
        let full = Var::from_tensor(&x)?;
        let x = context.shard(&full, 2)?;
        let out = context.attend(&x, &x, &x, &mask_rule(&case.rule), 0.5)?;
        context.comm().barrier()?;
        let alive = context.comm().stats().of(Traffic::KeyValue).bytes_alive;
        assert!(numbers(&out)?.iter().all(|x| x.is_finite()));
        Ok::<_, candle_cp::Error>(alive)
    });
    assert_eq!(alive.unwrap(), [0; RANKS]);
}
