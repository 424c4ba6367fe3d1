//! Recomputation of decoder layers: the same bits, fewer tensors kept, errors that surface.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{Communicator, CpContext, LayoutKind};
use candle_gemma4::{Config, Error, LocalInputs, Model, Recompute, Weights};
use support::{Case, fixture};

/// A family's checkpoint and one of its golden inputs.
#[derive(Debug, Clone, Copy)]
struct Input {
    family: &'static str,
    case: &'static str,
}

const IMAGES: Input = Input { family: "gemma4-dense", case: "case2_images" };

impl Input {
    fn case(self) -> Case {
        Case::load(&fixture(&format!("{}/goldens/{}.safetensors", self.family, self.case)))
    }

    fn load(self, dtype: DType) -> (Weights, Model) {
        let folder = fixture(&format!("{}/checkpoint", self.family));
        let config = Config::from_folder(&folder).unwrap();
        let weights = Weights::load(&folder, &config, dtype, &Device::Cpu).unwrap();
        let model = Model::new(&config, &weights).unwrap();
        (weights, model)
    }
}

fn context(case: &Case, comm: Arc<dyn Communicator>) -> CpContext {
    let tokens = case.tokens();
    let layout = LayoutKind::HeadTail.layout(&tokens, comm.size(), &[]).unwrap();
    CpContext::new(comm, layout, tokens).unwrap()
}

/// This rank's loss; with `frozen`, the embeddings are a constant.
fn loss(model: &Model, case: &Case, context: &CpContext, recompute: &Recompute, frozen: bool) -> Tensor {
    let embeds = model.embed(&case.inputs(), &mut ()).unwrap();
    let embeds = if frozen { embeds.detach() } else { embeds };
    let local = model.shard(&embeds, case.get("input.input_ids"), context).unwrap();
    let hidden = model.decode_with(&local, context, recompute, &mut ()).unwrap();
    model.loss(&hidden, &context.shard_labels(case.get("input.labels")).unwrap()).unwrap()
}

type Bits = BTreeMap<String, Vec<u64>>;

fn bits(x: &Tensor) -> Vec<u64> {
    let x = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    x.into_iter().map(f64::to_bits).collect()
}

/// Loss and every gradient, by rank.
fn run(input: Input, ranks: usize, dtype: DType, recompute: fn() -> Recompute, frozen: bool) -> Vec<Bits> {
    threads::run(ranks, &threads::Options::default(), |comm| {
        let (case, (weights, model)) = (input.case(), input.load(dtype));
        let recompute = recompute();
        let loss = loss(&model, &case, &context(&case, comm), &recompute, frozen);
        let store = recompute.backward(&loss)?;
        let gradients = weights.variables().iter();
        let gradients = gradients.filter_map(|(name, var)| Some((name.clone(), bits(store.get(var)?))));
        let mut all: Bits = gradients.collect();
        all.insert("loss".into(), bits(&loss));
        Ok::<_, Error>(all)
    })
    .unwrap()
}

/// `parts`: beginnings of the names of all tensors that have to get a gradient.
fn assert_same(input: Input, ranks: usize, dtype: DType, frozen: bool, parts: &[&str]) {
    let [kept, again] = [Recompute::off, Recompute::on].map(|recompute| run(input, ranks, dtype, recompute, frozen));
    let names = input.load(dtype).0.variables().keys().cloned().collect::<Vec<_>>();
    let trained = names.iter().filter(|name| parts.iter().any(|part| name.starts_with(part)));
    let mut expected: Vec<&str> = trained.map(String::as_str).chain(["loss"]).collect();
    expected.sort();
    for (rank, (kept, again)) in kept.iter().zip(&again).enumerate() {
        assert_eq!(kept.keys().collect::<Vec<_>>(), expected, "{input:?}, rank {rank}");
        assert_eq!(again.keys().collect::<Vec<_>>(), expected, "{input:?}, rank {rank}");
        let differs = |(name, bits): (&String, &Vec<u64>)| (*bits != again[name]).then(|| name.clone());
        let different: Vec<String> = kept.iter().filter_map(differs).collect();
        assert!(different.is_empty(), "{input:?}, rank {rank} of {ranks}: {different:?} differ");
    }
}

const TEXT: &str = "model.language_model.";
const VISION: [&str; 4] = [TEXT, "model.vision_tower.", "model.vision_embedder.", "model.embed_vision."];
const AUDIO: [&str; 3] = [TEXT, "model.audio_tower.", "model.embed_audio."];

#[test]
fn gradients_have_the_same_bits_in_every_family() {
    for family in ["gemma4-dense", "gemma4-moe", "gemma4-effective", "gemma4-unified"] {
        for ranks in [1, 3] {
            assert_same(Input { family, ..IMAGES }, ranks, DType::F32, false, &VISION);
        }
    }
}

#[test]
fn gradients_have_the_same_bits_with_audio() {
    for ranks in [1, 3] {
        assert_same(Input { family: "gemma4-effective", case: "case5_audio" }, ranks, DType::F32, false, &AUDIO);
    }
}

/// Operators that are put together from Candle's own, in a type that rounds much.
#[test]
fn gradients_have_the_same_bits_in_bf16() {
    for family in ["gemma4-dense", "gemma4-moe", "gemma4-effective"] {
        assert_same(Input { family, ..IMAGES }, 2, DType::BF16, false, &VISION);
    }
}

/// Nothing below the first layer is trained, but its weights are.
#[test]
fn gradients_have_the_same_bits_over_frozen_embeddings() {
    assert_same(IMAGES, 3, DType::F32, true, &[TEXT]);
    assert_same(Input { family: "gemma4-effective", ..IMAGES }, 3, DType::F32, true, &[TEXT]);
}

/// Numbers that the graph holds on to between forward and backward.
#[test]
fn only_inputs_of_layers_are_kept() {
    let (case, (_, model)) = (IMAGES.case(), IMAGES.load(DType::F32));
    let held = |recompute: Recompute| {
        let context = case.context();
        let embeds = model.embed(&case.inputs(), &mut ()).unwrap().detach();
        let hidden = model.decode_with(&LocalInputs::new(embeds.clone()), &context, &recompute, &mut ()).unwrap();
        let nodes = hidden.sorted_nodes();
        (nodes.iter().filter(|node| !node.is_variable()).map(|node| node.elem_count()).sum::<usize>(), embeds)
    };
    let (kept, _) = held(Recompute::off());
    let (again, embeds) = held(Recompute::on());
    assert_eq!(again, 13 * embeds.elem_count(), "two halves of six layers, and the final norm");
    assert!(kept > 10 * again, "{kept} {again}");
}

#[test]
fn a_rank_that_fails_before_backward_ends_the_others_inside_of_it() {
    let error = threads::run(3, &threads::Options::default(), |comm| {
        let (case, (_, model)) = (IMAGES.case(), IMAGES.load(DType::F32));
        let (rank, recompute) = (comm.rank(), Recompute::on());
        let loss = loss(&model, &case, &context(&case, comm), &recompute, false);
        if rank == 1 {
            return Err(Error::TrainingType { dtype: DType::U8 });
        }
        let error = recompute.backward(&loss).unwrap_err();
        assert!(error.to_string().contains("stopped because rank 1 failed"), "{error}");
        Err::<(), _>(error)
    });
    let message = error.unwrap_err().to_string();
    assert!(message.starts_with("rank 1 failed: weights cannot be kept as U8"), "{message}");
}
