//! A long row with labels on its last tokens only: the loss's gradients are those of plain logits, and reach everything.

mod support;

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Tensor};
use candle_cp::{CpContext, LossOptions, Tokens, linear_cross_entropy};
use candle_gemma4::{Config, Inputs, LoraOptions, Model, Part, Weights};
use support::{Case, difference, edited_config, fixture, largest, numbers};

const TOKENS: usize = 4096;
const LABELS: usize = 8;

type Gradients = BTreeMap<String, Tensor>;

/// A row of images and text that goes on for long.
struct Row {
    inputs: Inputs,
    tokens: Tokens,
    labels_bs: Tensor,
}

fn row() -> Row {
    let case = Case::load(&fixture("gemma4-dense/goldens/case2_images.safetensors"));
    let mut ids = case.get("input.input_ids").to_vec2::<i64>().unwrap().remove(0);
    let mut groups = case.get("input.vision_group_ids").to_vec2::<i64>().unwrap().remove(0);
    ids.extend((ids.len()..TOKENS).map(|place| 300 + (place as i64 * 37) % 200));
    groups.resize(TOKENS, -1);
    let labels: Vec<i64> = (0..TOKENS).map(|place| if place < TOKENS - LABELS { -100 } else { ids[place] }).collect();
    let tensor = |values: Vec<i64>| Tensor::from_vec(values, (1, TOKENS), &Device::Cpu).unwrap();
    let inputs = Inputs { input_ids_bs: tensor(ids), ..case.inputs() };
    Row { inputs, tokens: Tokens::new(vec![vec![0; TOKENS]], vec![groups]).unwrap(), labels_bs: tensor(labels) }
}

/// Mean cross entropy from all logits at once.
fn dense_loss(model: &Model, hidden_bsh: &Tensor, labels_bs: &Tensor) -> Tensor {
    let labels = labels_bs.flatten_all().unwrap().to_vec1::<i64>().unwrap();
    let labelled = labels.iter().zip(0u32..).filter(|(label, _)| **label != -100);
    let (ids, places): (Vec<u32>, Vec<u32>) = labelled.map(|(&label, place)| (label as u32, place)).unzip();
    let tensor = |values: Vec<u32>| Tensor::new(values, &Device::Cpu).unwrap();
    let logits = model.logits(hidden_bsh).unwrap().squeeze(0).unwrap();
    let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(D::Minus1).unwrap()).unwrap();
    let sums = shifted.exp().unwrap().sum_keepdim(D::Minus1).unwrap().log().unwrap();
    let scores = shifted.broadcast_sub(&sums).unwrap().index_select(&tensor(places), 0).unwrap();
    let scores = scores.gather(&tensor(ids).unsqueeze(1).unwrap(), 1).unwrap();
    scores.mean_all().unwrap().neg().unwrap()
}

fn gradients(weights: &Weights, loss: &Tensor) -> Gradients {
    let store = loss.backward().unwrap();
    let variables = weights.variables().iter();
    variables.filter_map(|(name, variable)| Some((name.clone(), store.get(variable)?.clone()))).collect()
}

fn assert_same_as_dense(config: &Config, weights: &Weights) {
    let row = row();
    let model = Model::new(config, weights).unwrap();
    let context = CpContext::single(row.tokens).unwrap();
    let embeds = model.embed(&row.inputs, &mut ()).unwrap();
    let local = model.shard(&embeds, &row.inputs.input_ids_bs, &context).unwrap();
    let hidden = model.decode(&local, &context, &mut ()).unwrap();
    let labels = context.shard_labels(&row.labels_bs).unwrap();
    assert_eq!(labels.count, LABELS);

    let dense = dense_loss(&model, &hidden, &labels.labels_bs);
    let expected = gradients(weights, &dense);
    assert_eq!(expected.keys().collect::<Vec<_>>(), weights.variables().keys().collect::<Vec<_>>());
    let mut options = LossOptions::new(labels.count as f64);
    (options.softcap, options.chunk_tokens) = (model.softcap(), Some(1024));
    let loss = linear_cross_entropy(&hidden, model.head_vh(), &labels.labels_bs, &options).unwrap();
    assert!(difference(&loss, &dense) < 1e-12, "{loss} {dense}");
    let found = gradients(weights, &loss);
    for (name, expected) in &expected {
        let (off, scale) = (difference(&found[name], expected), largest(expected));
        assert!(scale > 0.0, "{name} does not move");
        assert!(off <= 1e-6 * scale, "{name} is off by {off:e} of {scale:e}");
    }
}

/// Two layers of the tiny checkpoint's kind.
fn weights() -> (Config, Weights) {
    let layers = ("text_config.layer_types", "[\"sliding_attention\", \"full_attention\"]");
    let small = [("text_config.num_hidden_layers", "2"), ("text_config.global_head_dim", "16")];
    let config = edited_config(&[&[layers][..], &small].concat());
    let weights = Weights::random(&config, DType::F64, &Device::Cpu, 6).unwrap();
    (config, weights)
}

#[test]
fn every_weight_moves() {
    let (config, weights) = weights();
    assert_same_as_dense(&config, &weights);
}

#[test]
fn every_adapter_moves() {
    let (config, mut weights) = weights();
    weights.add_lora(&config, &LoraOptions::new(2, 4.0).parts([Part::Text, Part::Vision]), 3).unwrap();
    for (name, variable) in weights.variables() {
        // With B at 0, where it starts, A has no slope.
        let filled = numbers(variable.dims(), name.len() as f64).to_dtype(DType::F64).unwrap();
        variable.set(&filled).unwrap();
    }
    assert_same_as_dense(&config, &weights);
}
