//! Padding and experts in the model as a whole: no padding token reaches an expert, be it of a row or of the layout.

mod support;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{CpContext, LayoutKind, Tokens};
use candle_gemma4::{Config, Error, LocalInputs, Model, Weights};
use support::{fixture, values};

const RANKS: usize = 3;
/// Three does not divide it.
const TOKENS: usize = 47;
/// Tokens of the two rows that are not padding.
const REAL: [usize; 2] = [TOKENS, 31];
const HIDDEN: usize = 32;
/// The expert that padding would choose in the first layer, and no token.
const LURED: usize = 5;

/// What is trained on.
#[derive(Clone, Copy, PartialEq)]
enum Loss {
    /// Cross entropies of the labels: what padding computes is not read.
    Labels,
    /// All hidden states, those of padding too.
    Everything,
}

fn tokens() -> Tokens {
    let row = |real: usize| (0..TOKENS).map(|index| if index < real { 0 } else { -1 }).collect();
    Tokens::new(REAL.map(row).to_vec(), vec![vec![-1; TOKENS]; 2]).unwrap()
}

fn noise(place: usize) -> f64 {
    ((place * 7919 % 1009) as f64 / 1009.0 + (place * 104729 % 997) as f64 / 997.0) - 1.0
}

/// The direction that tells padding from tokens.
fn direction(dim: usize) -> f64 {
    if dim.is_multiple_of(3) { -1.0 } else { 1.0 }
}

/// `[2, local tokens, hidden]` of a rank; padding of both kinds lies the other way, and depends on `padding`.
fn embeds(context: &CpContext, padding: f64) -> Tensor {
    let places = context.layout().global_indices(context.rank());
    let mut numbers = Vec::new();
    for (row, real) in REAL.into_iter().enumerate() {
        for &place in &places {
            let is_real = place < real;
            let number = |dim: usize| {
                let noise = noise((row * 64 + place) * HIDDEN + dim);
                if is_real { direction(dim) + 3.0 * noise } else { padding * (-2.0 * direction(dim) + padding * noise) }
            };
            numbers.extend((0..HIDDEN).map(number));
        }
    }
    let dims = (REAL.len(), places.len(), HIDDEN);
    Tensor::from_vec(numbers, dims, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap()
}

/// The checkpoint, with a router in the first layer that sends what lies against the direction to [`LURED`].
fn weights(config: &Config) -> Weights {
    let folder = fixture("gemma4-moe/checkpoint");
    let weights = Weights::load(&folder, config, DType::F32, &Device::Cpu).unwrap();
    let name = |name: &str| format!("model.language_model.layers.0.router.{name}");
    let scale = values(&weights.variables()[&name("scale")]);
    let router: &Var = &weights.variables()[&name("proj.weight")];
    let mut rows = router.to_vec2::<f32>().unwrap();
    rows[LURED] = (0..HIDDEN).map(|dim| (-20.0 * direction(dim) / scale[dim]) as f32).collect();
    router.set(&Tensor::new(rows, &Device::Cpu).unwrap()).unwrap();
    weights
}

type Numbers = BTreeMap<String, Vec<f64>>;

/// Loss and gradients, summed over ranks, and the router's choices in the first layer.
struct Results {
    sums: Numbers,
    /// `[row][token]`, those of the layout's padding last; one of the two chosen experts each.
    choices: Vec<Vec<Vec<i64>>>,
}

fn run(padding: f64, loss: Loss, layout: LayoutKind) -> Results {
    let all = threads::run(RANKS, &threads::Options::default(), |comm| {
        let config = Config::from_folder(&fixture("gemma4-moe/checkpoint"))?;
        let weights = weights(&config);
        let model = Model::new(&config, &weights)?;
        let layout = layout.layout(&tokens(), RANKS, &config.text.layer_work())?;
        assert!(layout.padded_len() > TOKENS);
        let context = CpContext::new(comm, layout, tokens())?;
        let mut taps = BTreeMap::new();
        let hidden = model.decode(&LocalInputs::new(embeds(&context, padding)), &context, &mut taps)?;
        let loss = match loss {
            Loss::Labels => {
                let labels = Tensor::from_iter((0..2 * TOKENS as i64).map(|i| 12 + i * 31 % 400), &Device::Cpu)?;
                model.loss(&hidden, &context.shard_labels(&labels.reshape((2, TOKENS))?)?)?
            }
            Loss::Everything => {
                let cotangent = (0..hidden.elem_count()).map(|place| noise(place * 3 + context.rank()) as f32);
                (&hidden * Tensor::from_iter(cotangent, &Device::Cpu)?.reshape(hidden.shape())?)?.sum_all()?
            }
        };
        let store = loss.backward()?;
        let gradients = weights.variables().iter();
        let gradients = gradients.filter_map(|(name, var)| Some((name.clone(), values(store.get(var)?))));
        let sums = gradients.chain([("loss".to_string(), values(&loss))]).collect::<Numbers>();
        let chosen = taps["router.top_k_index.0"].to_vec3::<i64>()?;
        let places = context.layout().global_indices(context.rank());
        Ok::<_, Error>((sums, places, chosen))
    });
    let mut sums = Numbers::new();
    let mut choices: Vec<BTreeMap<usize, Vec<i64>>> = vec![BTreeMap::new(); REAL.len()];
    for (of_rank, places, chosen) in all.unwrap() {
        for (name, numbers) in of_rank {
            let sum = sums.entry(name).or_insert_with(|| vec![0.0; numbers.len()]);
            sum.iter_mut().zip(numbers).for_each(|(sum, x)| *sum += x);
        }
        for (row, chosen) in choices.iter_mut().zip(chosen) {
            row.extend(places.iter().copied().zip(chosen));
        }
    }
    Results { sums, choices: choices.into_iter().map(|row| row.into_values().collect()).collect() }
}

/// The experts that the router's formula gives for padding, whose residual stream is its embedding in the first layer.
fn experts_of_padding(padding: f64) -> Vec<usize> {
    let config = Config::from_folder(&fixture("gemma4-moe/checkpoint")).unwrap();
    let weights = weights(&config);
    let get = |name: &str| values(&weights.variables()[&format!("model.language_model.layers.0.router.{name}")]);
    let (scale, router) = (get("scale"), get("proj.weight"));
    let context = CpContext::single(tokens()).unwrap();
    let all = values(&embeds(&context, padding));
    let padding_rows = all.chunks(HIDDEN).skip(TOKENS + REAL[1]);
    let best = padding_rows.map(|x| {
        let score =
            |expert: usize| (0..HIDDEN).map(|dim| router[expert * HIDDEN + dim] * scale[dim] * x[dim]).sum::<f64>();
        (0..8).max_by(|&a, &b| score(a).total_cmp(&score(b))).unwrap()
    });
    best.collect()
}

const LAYOUTS: [LayoutKind; 2] = [LayoutKind::Contiguous, LayoutKind::HeadTail];

#[test]
fn what_padding_holds_changes_nothing() {
    for layout in LAYOUTS {
        let (one, other) = (run(1.0, Loss::Labels, layout), run(-1.5, Loss::Labels, layout));
        assert!(one.sums == other.sums, "{layout}: the loss or a gradient depends on padding");
        assert!(one.choices == other.choices, "{layout}: the router");
    }
}

/// Even if the hidden states of padding are trained.
#[test]
fn experts_learn_nothing_from_padding() {
    for layout in LAYOUTS {
        let (one, other) = (run(1.0, Loss::Everything, layout), run(-1.5, Loss::Everything, layout));
        let (mut routed, mut changed) = (0, 0);
        for (name, gradient) in &one.sums {
            if name.contains(".experts.") || name.contains(".router.") {
                assert!(*gradient == other.sums[name], "{layout}: {name} learns from padding");
                routed += 1;
            } else {
                changed += usize::from(*gradient != other.sums[name]);
            }
        }
        assert_eq!(routed, 5 * 5, "two tensors of experts and three of the router in five layers");
        // Padding sees no key, so that attention learns nothing from it either.
        assert_eq!(changed, 5 * 6 + 2, "{layout}: the MLPs with three norms each do, the final norm, and the loss");
    }
}

#[test]
fn an_expert_that_only_padding_would_choose_is_not_trained() {
    assert_eq!(experts_of_padding(1.0), vec![LURED; TOKENS - REAL[1]]);
    for layout in LAYOUTS {
        let Results { sums, choices } = run(1.0, Loss::Everything, layout);
        for (row, real) in choices.iter().zip(REAL) {
            assert!(row[..real].iter().flatten().all(|&expert| expert >= 0 && expert != LURED as i64), "{layout}");
            assert!(row.len() > TOKENS && row[real..].iter().flatten().all(|&expert| expert == -1), "{layout}");
        }
        let all = |tensor: &str| &sums[&format!("model.language_model.layers.0.{tensor}")];
        for tensor in ["experts.gate_up_proj", "experts.down_proj", "router.proj.weight", "router.per_expert_scale"] {
            for (expert, gradient) in all(tensor).chunks(all(tensor).len() / 8).enumerate() {
                let is_zero = gradient.iter().all(|&x| x == 0.0);
                assert_eq!(is_zero, expert == LURED, "{layout}: {tensor} of expert {expert}");
            }
        }
    }
}
