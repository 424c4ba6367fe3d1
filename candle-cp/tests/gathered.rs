//! Keys that are gathered once and attended to by several layers, against the dense reference.

mod common;
#[path = "common/emulated.rs"]
mod emulated;

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::{Traffic, threads};
use candle_cp::gpu::GpuElement;
use candle_cp::{AttentionPlan, CpContext, Error, GatheredKeys, MaskRule, Result, SequenceLayout, Tokens, Trim};
use common::devices::{DEVICES, dtype};
use common::ratio::{beyond, rounded_data};
use common::ring::{mask_rule, numbers, options, tokens};
use common::{Case, Data, Rule, assert_exact, block, dense, documents, layouts};
use emulated::Gpu;

/// Layers that attend to the same keys, with queries of their own.
const LAYERS: usize = 3;

/// One set of keys and values, and per layer queries and the gradient of the output.
struct Shared {
    case: Case,
    layers: Vec<Data>,
}

impl Shared {
    fn new(case: Case) -> Self {
        let first = case.data();
        let layers = (0..LAYERS as u64).map(|layer| {
            let own = Case { seed: case.seed + 100 * layer, ..case.clone() }.data();
            Data { k: first.k.clone(), v: first.v.clone(), ..own }
        });
        Self { layers: layers.collect(), case }
    }

    /// Outputs and query gradients of every layer, then the gradients of keys and values, from the rule.
    fn expected(&self) -> Vec<Vec<f64>> {
        let outcomes: Vec<_> = self.layers.iter().map(|data| dense(&self.case, data)).collect();
        let sum = |all: Vec<&Vec<f64>>| (0..all[0].len()).map(|i| all.iter().map(|x| x[i]).sum()).collect();
        let mut expected: Vec<Vec<f64>> = outcomes.iter().flat_map(|o| [o.out.clone(), o.dq.clone()]).collect();
        expected.push(sum(outcomes.iter().map(|o| &o.dk).collect()));
        expected.push(sum(outcomes.iter().map(|o| &o.dv).collect()));
        expected
    }

    /// The same from rank threads, and the bytes that each rank sent.
    fn found(&self, layout: &SequenceLayout) -> Vec<(Vec<Vec<f64>>, [usize; 2])> {
        self.found_by(layout, DType::F64, |context, k, v, rule| context.gather_keys(k, v, rule))
    }

    fn found_by(
        &self,
        layout: &SequenceLayout,
        dtype: DType,
        gather: impl Fn(&CpContext, &Tensor, &Tensor, &MaskRule) -> Result<GatheredKeys> + Sync,
    ) -> Vec<(Vec<Vec<f64>>, [usize; 2])> {
        let all = threads::run(layout.ranks(), &options(), |comm| {
            let context = CpContext::new(comm, layout.clone(), tokens(&self.case))?;
            self.one_rank(&context, dtype, |k, v, rule| gather(&context, k, v, rule))
        });
        all.unwrap()
    }

    fn one_rank(
        &self,
        context: &CpContext,
        dtype: DType,
        gather: impl Fn(&Tensor, &Tensor, &MaskRule) -> Result<GatheredKeys>,
    ) -> Result<(Vec<Vec<f64>>, [usize; 2])> {
        let case = &self.case;
        let tensor = |x: &[f64], shape| Tensor::from_slice(x, shape, &Device::Cpu)?.to_dtype(dtype);
        let var = |x: &[f64], shape| Var::from_tensor(&tensor(x, shape)?);
        let local = |x: &Tensor| Ok::<_, Error>(context.shard(x, 2)?.transpose(1, 2)?);
        let key = var(&self.layers[0].k, case.key_shape())?;
        let value = var(&self.layers[0].v, case.key_shape())?;
        let gathered = gather(&local(&key)?, &local(&value)?, &mask_rule(&case.rule))?;
        let mut loss = Tensor::zeros((), dtype, &Device::Cpu)?;
        let (mut queries, mut found) = (Vec::new(), Vec::new());
        for data in &self.layers {
            let query = var(&data.q, case.query_shape())?;
            let out = context.attend_gathered(&local(&query)?, &gathered, case.scale)?.transpose(1, 2)?;
            let d_out = tensor(&data.d_out, case.query_shape())?;
            loss = (loss + (&out * context.shard(&d_out, 2)?)?.sum_all()?)?;
            queries.push((query, numbers(&context.gather(&out.detach(), 2)?)?));
        }
        let gradients = loss.backward()?;
        let sum = |x: &Var| {
            let gradient = gradients.get(x).expect("backward reaches every input on every rank");
            numbers(&context.comm().all_reduce_sum(gradient)?)
        };
        for (query, out) in queries {
            found.extend([out, sum(&query)?]);
        }
        found.extend([sum(&key)?, sum(&value)?]);
        context.comm().barrier()?;
        let stats = context.comm().stats();
        Ok((found, [Traffic::KeyValue, Traffic::KeyValueGradient].map(|kind| stats.of(kind).bytes_sent)))
    }
}

/// Documents, groups that straddle ranks, padding inside of a batch, grouped queries, and a length that nothing divides.
fn cases() -> Vec<Case> {
    let long = documents(&[151, 60, 90]);
    let padded = [vec![0; 40], vec![-1; 21]].concat();
    let batch = vec![documents(&[30, 31]), padded];
    let groups = vec![block(61, &[12..40]), block(61, &[3..9])];
    let rule = Rule::sliding(9).with_groups();
    vec![
        Case::row(long.clone(), block(301, &[100..140]), Rule::sliding(40).with_groups()),
        Case::row(long.clone(), block(301, &[100..140]), Rule::sliding(20).with_whole_groups()),
        Case::row(long, vec![-1; 301], Rule::CAUSAL),
        Case { documents: batch, groups, ..Case::plain(61, rule) },
        Case { key_heads: 1, group: 3, ..Case::plain(5, Rule::CAUSAL) },
    ]
}

#[test]
fn equals_the_sum_over_the_layers() {
    for case in cases() {
        let shared = Shared::new(case);
        let expected = shared.expected();
        for ranks in [1, 3, 4] {
            for (name, layout) in layouts(shared.case.len(), ranks) {
                for (found, _) in shared.found(&layout) {
                    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        assert_exact(&format!("{name} over {ranks}, result {i}"), found, expected);
                    }
                }
            }
        }
    }
}

/// The kernels of a GPU, in the emulator, are as close as the CPU's operator in the same type.
#[test]
fn on_an_emulated_gpu() {
    let row = Case::row(documents(&[30, 13]), block(43, &[12..24]), Rule::sliding(9).with_groups());
    let padded = [vec![0; 20], vec![-1; 23]].concat();
    let batch =
        Case { documents: vec![row.documents[0].clone(), padded], groups: vec![row.groups[0].clone(); 2], ..row };
    let wide = Case { key_heads: 1, group: 3, head_dim: 72, scale: 0.1, ..Case::plain(37, Rule::CAUSAL) };
    for (case, element, ranks, layout) in [
        (&batch, GpuElement::F32, 3, 1),
        (&batch, GpuElement::F16, 3, 3),
        (&wide, GpuElement::F32, 4, 4),
        (&wide, GpuElement::Bf16, 4, 2),
    ] {
        let (gpu, dtype) = (Gpu::new(element, case.head_dim, DEVICES[0]), dtype(element));
        let mut shared = Shared::new(case.clone());
        shared.layers.iter_mut().for_each(|data| *data = rounded_data(data, dtype));
        let expected = shared.expected();
        let (name, layout) = layouts(case.len(), ranks).swap_remove(layout);
        let cpu = shared.found_by(&layout, dtype, |context, k, v, rule| context.gather_keys(k, v, rule));
        let emulated =
            shared.found_by(&layout, dtype, |context, k, v, rule| context.gather_keys_on(&gpu.device(), (k, v), rule));
        for ((found, sent), (cpu, sent_by_cpu)) in emulated.into_iter().zip(cpu) {
            for (i, ((found, cpu), expected)) in found.iter().zip(&cpu).zip(&expected).enumerate() {
                let name = format!("{name} over {ranks}, result {i}");
                let floor = 16.0 * f64::from(f32::EPSILON);
                assert_eq!(beyond(&name, dtype, (found, cpu, expected), floor, 2.0), None);
            }
            assert_eq!(sent, sent_by_cpu);
        }
        assert!(!gpu.ran.lock().unwrap().is_empty());
    }
}

#[test]
fn keys_travel_once_in_each_direction() {
    let case = Case::row(documents(&[250, 150]), block(400, &[90..130]), Rule::sliding(40).with_groups());
    let bytes_per_key = 2 * case.key_heads * case.head_dim * size_of::<f64>();
    let shared = Shared::new(case);
    for (name, layout) in layouts(400, 4) {
        for (rank, (_, sent)) in shared.found(&layout).into_iter().enumerate() {
            let rule = mask_rule(&shared.case.rule);
            let plan = AttentionPlan::new(&layout, &tokens(&shared.case), &rule, rank, Trim::Live).unwrap();
            let leaving = plan.hops().iter().filter_map(|hop| hop.send.as_ref()).flat_map(|(_, ranges)| ranges);
            let keys = leaving.map(|range| range.len()).sum::<usize>() * bytes_per_key;
            assert_eq!(sent, [keys, plan.keys_received() * bytes_per_key], "{name}, rank {rank}");
        }
    }
}

#[test]
fn short_types_stay_close() {
    let case = Case::row(documents(&[30, 31]), vec![-1; 61], Rule::CAUSAL);
    let context = CpContext::single(tokens(&case)).unwrap();
    let data = case.data();
    let tensor = |x: &[f64], shape, dtype| {
        let x = Tensor::from_slice(x, shape, &Device::Cpu).unwrap().transpose(1, 2).unwrap();
        x.to_dtype(DType::BF16).unwrap().to_dtype(dtype).unwrap()
    };
    let out = |dtype| {
        let [k, v] = [&data.k, &data.v].map(|x| tensor(x, case.key_shape(), dtype));
        let keys = context.gather_keys(&k, &v, &MaskRule::causal()).unwrap();
        numbers(&context.attend_gathered(&tensor(&data.q, case.query_shape(), dtype), &keys, 0.4).unwrap()).unwrap()
    };
    let (exact, short) = (out(DType::F64), out(DType::BF16));
    let worst = common::max_difference(&short, &exact);
    assert!(worst > 0.0 && worst < 0.02, "off by {worst}");
}

#[test]
fn wrong_tensors_are_refused() {
    let context = CpContext::single(Tokens::single_document(1, 5)).unwrap();
    let zeros = |dims: (usize, usize, usize, usize), dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    let key = zeros((1, 5, 2, 4), DType::F32);
    let rule = MaskRule::causal();
    let text = |result: Result<Tensor>| result.unwrap_err().to_string();
    assert!(context.gather_keys(&key, &zeros((1, 5, 1, 4), DType::F32), &rule).is_err());
    assert!(context.gather_keys(&zeros((1, 4, 2, 4), DType::F32), &key, &rule).is_err());
    let keys = context.gather_keys(&key, &key, &rule).unwrap();
    for (dims, dtype) in [
        ((1, 5, 3, 4), DType::F32),
        ((1, 5, 0, 4), DType::F32),
        ((1, 5, 4, 3), DType::F32),
        ((1, 4, 4, 4), DType::F32),
        ((2, 5, 4, 4), DType::F32),
        ((1, 5, 4, 4), DType::F64),
    ] {
        let message = text(context.attend_gathered(&zeros(dims, dtype), &keys, 1.0));
        assert!(message.contains("F32 [1, 5, a multiple of 2, 4]"), "{message}");
    }
    assert!(context.attend_gathered(&key.flatten_all().unwrap(), &keys, 1.0).is_err());
    let other = CpContext::single(Tokens::single_document(1, 5)).unwrap();
    let message = text(other.attend_gathered(&key, &keys, 1.0));
    assert!(message.contains("those of another context"), "{message}");
    assert!(keys.with_tensor(key.clone()).is_err());
    assert!(keys.with_tensor(keys.tensor().detach()).is_ok());
}
