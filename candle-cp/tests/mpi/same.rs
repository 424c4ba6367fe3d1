//! The same on ranks over MPI as on rank threads, bit by bit.

use crate::cases::Comm;
use crate::common::ring::{Run, mask_rule, named_layout, one_rank, tokens};
use crate::common::{Case, Rule, block, documents};
use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::{Expected, Mesh, Tag, Traffic, share, threads};
use candle_cp::{ConvActivation, CpContext, DeltaHeads, Error, LayoutKind, LossOptions, Result, linear_cross_entropy};
use std::fmt::Debug;
use std::time::Duration;

/// Shape, type and numbers.
pub fn bits(x: &Tensor) -> Result<(Vec<usize>, String, Vec<u64>)> {
    let numbers = x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    Ok((x.dims().to_vec(), format!("{:?}", x.dtype()), numbers.into_iter().map(f64::to_bits).collect()))
}

/// What this rank gets has to be what the thread with its number gets.
fn same<T: PartialEq + Debug + Send>(comm: &Comm, what: &str, f: impl Fn(Comm) -> Result<T> + Sync) -> Result<()> {
    let mine = f(comm.clone())?;
    let options = threads::Options { deadline: Duration::from_secs(200), stack_bytes: 16 << 20 };
    let theirs = threads::run(comm.size(), &options, f)?.swap_remove(comm.rank());
    assert!(mine == theirs, "{what}, rank {} of {}:\n{mine:?}\nand as a thread\n{theirs:?}", comm.rank(), comm.size());
    Ok(())
}

fn wave(shape: &[usize], seed: usize) -> Result<Tensor> {
    let len = shape.iter().product::<usize>();
    let numbers: Vec<f64> = (0..len).map(|i| ((i * 37 + seed * 101) as f64 * 0.731).sin()).collect();
    Ok(Tensor::from_vec(numbers, shape, &Device::Cpu)?)
}

pub fn collectives(comm: Comm) -> Result<()> {
    same(&comm, "place", |c| Ok((c.rank(), c.size(), c.world_rank(c.rank()))))?;
    for len in [0usize, 1, 3, 7, 64, 3001] {
        let value = |rank: usize, i: usize| [1e16, 1.0, -1e16, 3.0, 0.1][(rank + i) % 5] + i as f64;
        let mine = |rank: usize| (0..len).map(|i| value(rank, i)).collect::<Vec<f64>>();
        same(&comm, "sum", |c| bits(&c.all_reduce_sum(&Tensor::new(mine(c.rank()), &Device::Cpu)?)?))?;
        same(&comm, "share", |c| bits(&c.reduce_scatter_sum(&Tensor::new(mine(c.rank()), &Device::Cpu)?)?))?;
    }
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64] {
        same(&comm, "sums of a type", |c| {
            let x = (wave(&[2, 3, 2], c.rank())? * 9.0)?.to_dtype(dtype)?;
            let sum = bits(&c.all_reduce_sum(&x.transpose(0, 1)?)?)?;
            Ok((sum, bits(&c.all_reduce_sum(&x.get(0)?.get(1)?.get(0)?)?)?))
        })?;
    }
    same(&comm, "gather", |c| c.all_gather(&wave(&[2], c.rank())?)?.iter().map(bits).collect::<Result<Vec<_>>>())?;
    same(&comm, "uneven gather", |c| {
        let parts = c.all_gather_uneven(&wave(&[2, c.rank(), 3], c.rank())?, 1, Traffic::Gather)?;
        parts.iter().map(bits).collect::<Result<Vec<_>>>()
    })?;
    for root in 0..comm.size() {
        same(&comm, "broadcast", |c| bits(&c.broadcast(&wave(&[3], c.rank())?, root)?))?;
    }
    same(&comm, "in a row", |c| {
        let mut seen = Vec::new();
        for round in 0..20 {
            let x = wave(&[1], c.rank() + round)?;
            seen.push(bits(&c.all_reduce_sum(&x)?)?);
            c.barrier()?;
            seen.push(bits(&c.broadcast(&x, round % c.size())?)?);
            seen.push(bits(&Tensor::cat(&c.all_gather(&x)?, 0)?)?);
        }
        Ok(seen)
    })?;
    same(&comm, "outside of the graph", |c| {
        let x = Var::zeros(3, DType::F32, &Device::Cpu)?;
        Ok((c.all_reduce_sum(&x)?.track_op(), c.all_gather(&x)?[0].track_op(), c.broadcast(&x, 0)?.track_op()))
    })?;
    same(&comm, "a peer outside of the group", |c| Ok(c.broadcast(&wave(&[1], 0)?, 9).unwrap_err().to_string()))?;
    counters(&comm)
}

/// What is counted since another moment, apart from time.
fn counters(comm: &Comm) -> Result<()> {
    same(comm, "counters", |c| {
        let kinds =
            [Traffic::Gather, Traffic::Broadcast, Traffic::AllReduce, Traffic::ReduceScatter, Traffic::KeyValue];
        let count = |c: &Comm| {
            kinds.map(|kind| {
                let of = c.stats().of(kind);
                [of.messages_sent, of.bytes_sent, of.bytes_received, of.bytes_alive]
            })
        };
        c.barrier()?;
        let before = count(&c);
        c.all_gather(&wave(&[5], 0)?)?;
        c.broadcast(&wave(&[4], 0)?, c.size() - 1)?;
        c.all_reduce_sum(&wave(&[11], 0)?)?;
        c.reduce_scatter_sum(&wave(&[11], 0)?)?;
        if c.size() > 1 {
            let (to, from) = ((c.rank() + 1) % c.size(), (c.rank() + c.size() - 1) % c.size());
            let tag = Tag { traffic: Traffic::KeyValue, call: c.next_call(), step: 0 };
            let expected = Expected { from, shape: None, dtype: DType::F64 };
            let came = c.exchange(tag, Some((to, wave(&[6], 0)?)), Some(expected))?.wait()?;
            assert_eq!(c.stats().of(Traffic::KeyValue).bytes_alive, 48, "of {came:?}");
        }
        let after = count(&c);
        Ok(std::array::from_fn::<_, 5, _>(|k| std::array::from_fn::<_, 4, _>(|i| after[k][i] - before[k][i])))
    })
}

pub fn groups(comm: Comm) -> Result<()> {
    same(&comm, "colors", |world| {
        let rank = world.rank();
        let group = world.split(rank % 3)?;
        let names: Vec<usize> = (0..group.size()).map(|r| group.world_rank(r)).collect();
        let sum = bits(&group.all_reduce_sum(&wave(&[2], rank)?)?)?;
        let within = group.split(usize::from(group.rank() == 0))?;
        let (inner, all) = (within.all_gather(&wave(&[1], rank)?)?, world.all_gather(&wave(&[1], rank)?)?);
        Ok((group.rank(), names, sum, bits(&Tensor::cat(&inner, 0)?)?, bits(&Tensor::cat(&all, 0)?)?))
    })?;
    for context in (1..=comm.size()).filter(|context| comm.size().is_multiple_of(*context)) {
        same(&comm, "mesh", |world| {
            let mesh = Mesh::new(world, context)?;
            let x = wave(&[37], mesh.world().rank())?;
            let sums = [mesh.context(), mesh.data(), mesh.world()].map(|group| bits(&group.all_reduce_sum(&x)?));
            let [context, data, world] = sums;
            Ok((mesh.replica(), mesh.replicas(), context?, data?, world?))
        })?;
    }
    same(&comm, "a mesh that does not fit", |world| {
        Ok(Mesh::new(world.clone(), world.size() + 1).map(|_| ()).unwrap_err().to_string())
    })?;
    same(&comm, "sums on their way", |world| {
        let (pair, sums, rank) = (world.split(world.rank() / 2)?, world.split(0)?, world.rank());
        let first = sums.start_reduce_scatter(&wave(&[8], rank)?, Traffic::AllReduce)?;
        let second = sums.start_reduce_scatter(&wave(&[4], rank + 9)?, Traffic::AllReduce)?;
        let between = bits(&pair.all_reduce_sum(&wave(&[1], rank)?)?)?;
        let whole = bits(&world.all_reduce_sum(&wave(&[1], rank)?)?)?;
        let first = first.finish()?;
        let gathered = sums.start_all_gather(&first, 0, Traffic::AllReduce)?;
        let second = bits(&second.finish()?)?;
        assert_eq!(first.elem_count(), share(8, world.size(), rank).len());
        Ok((between, whole, second, bits(&Tensor::cat(&gathered.finish()?, 0)?)?))
    })
}

/// Every operator of the crate that talks to other ranks, forward and backward.
pub fn operators(comm: Comm) -> Result<()> {
    let ids = documents(&[25, 7, 31]);
    let len = ids.len();
    let grouped = Case::row(ids.clone(), block(len, &[10..20]), Rule::sliding(9).with_groups());
    for case in [Case::plain(41, Rule::CAUSAL), grouped] {
        for kind in LayoutKind::ALL {
            let layout = named_layout(kind, case.len(), comm.size());
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                same(&comm, &format!("attention, {kind}, {dtype:?}"), |c| {
                    let context = CpContext::new(c, layout.clone(), tokens(&case))?;
                    let found = one_rank(&case, &case.data(), &context, Run { dtype, ..Run::default() })?;
                    let parts = found.parts().into_iter();
                    Ok(parts.map(|(_, x)| x.iter().map(|x| x.to_bits()).collect()).collect::<Vec<Vec<u64>>>())
                })?;
            }
        }
    }
    let case = Case::row(ids, vec![-1; len], Rule::CAUSAL);
    for kind in LayoutKind::ALL {
        let context = |c: Comm| CpContext::new(c, named_layout(kind, len, comm.size()), tokens(&case));
        same(&comm, "gathered keys", |c| gathered(&context(c)?, &case))?;
        same(&comm, "convolution", |c| convolution(&context(c)?))?;
        same(&comm, "delta rule", |c| delta_rule(&context(c)?))?;
        same(&comm, "loss", |c| loss(&context(c)?))?;
    }
    Ok(())
}

type Bits = Vec<(Vec<usize>, String, Vec<u64>)>;

/// A full tensor `[1, S, ...]`, and this rank's part of it.
fn input(context: &CpContext, shape: &[usize], seed: usize) -> Result<(Var, Tensor)> {
    let full = Var::from_tensor(&wave(shape, seed)?.to_dtype(DType::F32)?)?;
    let local = context.shard(&full, 1)?;
    Ok((full, local))
}

/// The whole output and the summed gradients of all inputs.
fn outcome(context: &CpContext, out: &Tensor, inputs: &[&Var]) -> Result<Bits> {
    let weights = context.shard(&wave(&full_shape(context, out), 77)?.to_dtype(out.dtype())?, 1)?;
    let gradients = (out * weights)?.sum_all()?.backward()?;
    let mut all = vec![bits(&context.gather(&out.detach(), 1)?)?];
    for input in inputs {
        let gradient = gradients.get(input).expect("backward reaches every input");
        all.push(bits(&context.comm().all_reduce_sum(gradient)?)?);
    }
    Ok(all)
}

fn full_shape(context: &CpContext, local: &Tensor) -> Vec<usize> {
    let mut shape = local.dims().to_vec();
    shape[1] = context.layout().len();
    shape
}

fn gathered(context: &CpContext, case: &Case) -> Result<Bits> {
    let len = case.len();
    let (key, local_key) = input(context, &[1, len, 2, 8], 1)?;
    let (value, local_value) = input(context, &[1, len, 2, 8], 2)?;
    let (query, local_query) = input(context, &[1, len, 4, 8], 3)?;
    let keys = context.gather_keys(&local_key, &local_value, &mask_rule(&case.rule))?;
    let once = context.attend_gathered(&local_query, &keys, 0.3)?;
    let out = (&once + context.attend_gathered(&(local_query * 0.5)?, &keys, 0.3)?)?;
    outcome(context, &out, &[&key, &value, &query])
}

fn convolution(context: &CpContext) -> Result<Bits> {
    let (x, local) = input(context, &[1, context.layout().len(), 5], 4)?;
    let weight = Var::from_tensor(&wave(&[5, 4], 5)?.to_dtype(DType::F32)?)?;
    outcome(context, &context.causal_conv(&local, &weight, ConvActivation::Silu)?, &[&x, &weight])
}

fn delta_rule(context: &CpContext) -> Result<Bits> {
    let (len, heads) = (context.layout().len(), DeltaHeads { key_heads: 1, value_heads: 2, key_dim: 6, value_dim: 5 });
    let (qkv, local) = input(context, &[1, len, 2 * 6 + 2 * 5], 6)?;
    let (decay, local_decay) = input(context, &[1, len, 2], 7)?;
    let (strength, local_strength) = input(context, &[1, len, 2], 8)?;
    let decays = local_decay.sqr()?.neg()?;
    let out = context.delta_rule(&local, &decays, &local_strength.sqr()?, &heads)?;
    outcome(context, &out, &[&qkv, &decay, &strength])
}

fn loss(context: &CpContext) -> Result<Bits> {
    let len = context.layout().len();
    let (hidden, local) = input(context, &[1, len, 6], 9)?;
    let weight = Var::from_tensor(&wave(&[19, 6], 10)?.to_dtype(DType::F32)?)?;
    let labels = Tensor::from_vec((0..len as i64).map(|i| i * 5 % 19).collect::<Vec<_>>(), (1, len), &Device::Cpu)?;
    let labels = context.shard_labels(&labels)?;
    let part = linear_cross_entropy(&local, &weight, &labels.labels_bs, &LossOptions::new(labels.count as f64))?;
    let gradients = part.backward()?;
    let sum = |x: &Tensor| bits(&context.comm().all_reduce_sum(x)?);
    let of = |x: &Var| gradients.get(x).ok_or_else(|| Error::Candle(candle_core::Error::Msg("no gradient".into())));
    Ok(vec![sum(&part)?, sum(of(&hidden)?)?, sum(of(&weight)?)?])
}
