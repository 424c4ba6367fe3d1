//! Low-rank adapters against PEFT, on one rank and several.

mod support;

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};
use candle_cp::{CpContext, Tokens};
use candle_gemma4::{LocalInputs, LoraOptions, Model, Part, Recompute, Weights};
use support::adapters::{Golden, Pass, pass};
use support::{Case, assert_close, largest, values};

#[test]
fn logits_loss_and_gradients_are_those_of_peft() {
    for golden in Golden::all() {
        let (config, weights) = (golden.config(), golden.weights(DType::F32));
        let expected = Case::load(&golden.adapter().join("golden.safetensors"));
        let mut trained = BTreeSet::new();
        for (case, path) in &golden.cases {
            for ranks in [1, 3, 4] {
                let place = format!("{}, {case}, {ranks} ranks", golden.name);
                let found = pass(&config, &weights, path, ranks, Recompute::off);
                let loss = expected.get(&format!("{case}.loss")).to_vec1::<f32>().unwrap()[0];
                assert!((found.loss - f64::from(loss)).abs() < 1e-4, "{place}: loss {} instead of {loss}", found.loss);
                assert_logits(&place, &found.logits, &Case::load(path), expected.get(&format!("{case}.logits")));
                assert_vector(&place, &weights, &found, expected.get(&format!("{case}.gradients")));
                trained.extend(found.gradients.into_keys());
            }
        }
        let names: BTreeSet<String> = weights.variables().keys().cloned().collect();
        assert_eq!(trained, names, "{}: every adapter has a gradient in one of the cases", golden.name);
    }
}

/// Every third token's logits for every eighth id; padding does not count.
fn assert_logits(place: &str, logits: &Tensor, case: &Case, expected: &Tensor) {
    let every = |x: &Tensor, dim: usize, step: usize| {
        let places: Vec<u32> = (0..x.dim(dim).unwrap() as u32).step_by(step).collect();
        x.index_select(&Tensor::new(places, &Device::Cpu).unwrap(), dim).unwrap()
    };
    let tokens = case.get("input.input_ids").dim(1).unwrap();
    let found = every(&every(&logits.narrow(1, 0, tokens).unwrap(), 1, 3), 2, 8);
    let counts = match case.counts() {
        Some(counts) => every(&counts, 1, 3).unsqueeze(2).unwrap(),
        None => Tensor::ones((1, 1, 1), DType::F32, &Device::Cpu).unwrap(),
    };
    let masked = |x: &Tensor| x.broadcast_mul(&counts).unwrap();
    assert_close(&format!("{place}: logits"), &masked(&found), &masked(expected), 5e-4);
}

/// All gradients one after the other, in the order of their names; each within 1e-3 of its largest entry.
fn assert_vector(place: &str, weights: &Weights, found: &Pass, expected: &Tensor) {
    let mut start = 0;
    for (name, variable) in weights.variables() {
        let count = variable.elem_count();
        let expected = expected.narrow(0, start, count).unwrap().reshape(variable.shape()).unwrap();
        start += count;
        match found.gradients.get(name) {
            Some(found) => {
                let tolerance = (1e-3 * largest(&expected)).max(1e-7);
                assert_close(&format!("{place}: {name}"), found, &expected, tolerance);
            }
            None => assert_eq!(largest(&expected), 0.0, "{place}: {name} has no gradient"),
        }
    }
    assert_eq!(start, expected.elem_count(), "{place}");
}

#[test]
fn recomputation_gives_the_same_bits() {
    for golden in [Golden::of_fixture("dense", &["case2_images"]), Golden::of_fixture("effective", &["case2_images"])] {
        let (config, weights) = (golden.config(), golden.weights(DType::F32));
        for ranks in [1, 3] {
            let run = |recompute| pass(&config, &weights, &golden.cases[0].1, ranks, recompute);
            let (kept, again) = (run(Recompute::off), run(Recompute::on));
            assert_eq!(kept.gradients.keys().collect::<Vec<_>>(), again.gradients.keys().collect::<Vec<_>>());
            for (name, gradient) in &kept.gradients {
                assert_eq!(values(gradient), values(&again.gradients[name]), "{}, {ranks} ranks: {name}", golden.name);
            }
        }
    }
}

/// Adapters of one projection alone, with and without anything trained before it.
#[test]
fn gradients_reach_adapters_wherever_they_are() {
    let golden = Golden::of_fixture("effective", &["case2_images"]);
    let config = golden.config();
    for target in ["down_proj", "q_proj", "per_layer_model_projection", "7.self_attn.o_proj"] {
        let mut weights = golden.bare(DType::F32);
        let options = LoraOptions::new(2, 4.0).targets(target.parse().unwrap());
        weights.add_lora(&config, &options, 5).unwrap();
        for (name, variable) in weights.variables() {
            variable.set(&support::numbers(variable.dims(), name.len() as f64)).unwrap();
        }
        let one = pass(&config, &weights, &golden.cases[0].1, 1, Recompute::off);
        let three = pass(&config, &weights, &golden.cases[0].1, 3, Recompute::on);
        assert_eq!(one.gradients.len(), weights.variables().len(), "{target}");
        for (name, gradient) in &one.gradients {
            assert!(largest(gradient) > 0.0, "{target}: {name}");
            assert_close(name, &three.gradients[name], gradient, 1e-4 * largest(gradient));
        }
    }
}

#[test]
fn fresh_adapters_change_nothing_and_come_from_the_seed() {
    let golden = Golden::of_fixture("dense", &["case2_images"]);
    let config = golden.config();
    let fresh = |seed| {
        let mut weights = golden.bare(DType::F32);
        weights.add_lora(&config, &LoraOptions::new(3, 6.0).parts([Part::Text, Part::Vision]), seed).unwrap();
        weights
    };
    let (weights, again, other) = (fresh(1), fresh(1), fresh(2));
    for (name, variable) in weights.variables() {
        let numbers = values(variable);
        assert_eq!(numbers, values(&again.variables()[name]), "{name}");
        match name.ends_with("lora_B.weight") {
            true => assert!(numbers.iter().all(|value| *value == 0.0), "{name}"),
            false => {
                // As PEFT: even between plus and minus one over the root of the inputs.
                let bound = (variable.dim(1).unwrap() as f64).powf(-0.5);
                assert!(largest(variable) <= bound && largest(variable) > 0.8 * bound, "{name}");
                assert_ne!(numbers, values(&other.variables()[name]), "{name}");
            }
        }
    }
    let case = &golden.cases[0].1;
    let with = pass(&config, &weights, case, 1, Recompute::off);
    let without = pass(&config, &golden.bare(DType::F32), case, 1, Recompute::off);
    assert_eq!(values(&with.logits), values(&without.logits));
    for (name, gradient) in &with.gradients {
        assert_eq!(largest(gradient) == 0.0, name.ends_with("lora_A.weight"), "{name}: B is zero, so A has no slope");
    }
}

/// Adapters and their gradients stay in f32 over a model in bf16.
#[test]
fn adapters_are_wide_over_a_short_type() {
    let golden = Golden::of_fixture("dense", &["case2_images"]);
    let config = golden.config();
    let run = |dtype| pass(&config, &golden.weights(dtype), &golden.cases[0].1, 2, Recompute::off);
    let (wide, short) = (run(DType::F32), run(DType::BF16));
    assert!((wide.loss - short.loss).abs() < 0.02 * wide.loss, "{} {}", wide.loss, short.loss);
    assert_eq!(golden.weights(DType::F64).variables().values().next().unwrap().dtype(), DType::F64);
    for (name, variable) in golden.weights(DType::BF16).variables() {
        assert_eq!((variable.dtype(), short.gradients[name].dtype()), (DType::F32, DType::F32), "{name}");
        let (a, b) = (&wide.gradients[name], &short.gradients[name]);
        let dot = |a: &Tensor, b: &Tensor| values(&(a * b).unwrap()).iter().sum::<f64>();
        let cosine = dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
        assert!(cosine > 0.98, "{name}: gradients point elsewhere, {cosine}");
    }
}

#[test]
fn dropout_is_the_same_for_every_cut_and_in_recomputation() {
    for golden in Golden::all() {
        let (config, weights) = (golden.config(), golden.dropping(0.3));
        for (case, path) in &golden.cases {
            let place = format!("{}, {case}", golden.name);
            let plain = pass(&config, &golden.weights(DType::F32), path, 1, Recompute::off);
            let one = pass(&config, &weights, path, 1, Recompute::off);
            assert!((one.loss - plain.loss).abs() > 1e-4, "{place}: nothing is dropped");
            for ranks in [2, 3] {
                let several = pass(&config, &weights, path, ranks, Recompute::off);
                assert!((one.loss - several.loss).abs() < 1e-5, "{place}: {} {}", one.loss, several.loss);
                for (name, gradient) in &one.gradients {
                    let tolerance = (1e-3 * largest(gradient)).max(1e-7);
                    assert_close(&format!("{place}: {name}"), &several.gradients[name], gradient, tolerance);
                }
                let again = pass(&config, &weights, path, ranks, Recompute::on);
                for (name, gradient) in &several.gradients {
                    assert_eq!(values(gradient), values(&again.gradients[name]), "{place}: {name}");
                }
            }
        }
    }
}

#[test]
fn nothing_is_dropped_without_a_share_or_without_a_step() {
    let golden = Golden::of_fixture("dense", &["case2_images"]);
    let (config, case) = (golden.config(), Case::load(&golden.cases[0].1));
    let context = case.context();
    assert!(golden.weights(DType::F32).with_dropout(1, 1, &context).is_none());
    assert!(golden.bare(DType::F32).with_dropout(1, 1, &context).is_none());
    let weights = golden.dropping(0.5);
    let embeds = |weights: &Weights| {
        let model = Model::new(&config, weights).unwrap();
        let embeds = model.embed(&case.inputs(), &mut ()).unwrap();
        let local = model.shard(&embeds, case.get("input.input_ids"), &context).unwrap();
        values(&model.decode(&local, &context, &mut ()).unwrap())
    };
    let step = |step| embeds(&weights.with_dropout(1, step, &context).unwrap());
    assert_eq!(embeds(&weights), embeds(&golden.weights(DType::F32)), "evaluation");
    assert_eq!(step(1), step(1));
    assert_ne!(step(1), step(2));
    let short = CpContext::single(Tokens::single_document(1, 5)).unwrap();
    let model = Model::new(&config, &weights.with_dropout(1, 1, &short).unwrap()).unwrap();
    let local = LocalInputs::new(Tensor::zeros((1, 96, 32), DType::F32, &Device::Cpu).unwrap());
    let error = model.decode(&local, &context, &mut ()).unwrap_err().to_string();
    assert!(error.contains("dropout for 5 rows of another batch got 96"), "{error}");
}
