//! The vision tower against Hugging Face's numbers and against plain loops.

#[path = "vision/reference.rs"]
mod reference;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_cp_layers::testing::{assert_close, random};
use candle_cp_layers::{
    Activation, Error, LoadOptions, LoraOptions, ModelConfig, Part, Result, Role, Table, TensorSpec, Weights,
};
use candle_qwen3_5::vision::{VisionShape, VisionTower, push_tensors};

const FAMILIES: [&str; 2] = ["qwen3_5-dense", "qwen3_5-moe"];
const TOWER: &str = "model.visual.";

/// A model that reads nothing but the tower; what else its checkpoint has is named in `others`.
struct TowerOnly {
    shape: VisionShape,
    others: Vec<String>,
}

impl ModelConfig for TowerOnly {
    fn tensors(&self) -> Vec<TensorSpec> {
        let mut table = Table::new(0.02);
        push_tensors(&mut table, &self.shape);
        self.others.iter().for_each(|name| table.push(name, &[], Role::Unused));
        table.specs
    }

    fn to_json(&self) -> String {
        "{}".to_string()
    }
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(path)
}

fn tensors(path: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixture(path), &Device::Cpu).unwrap()
}

/// What `vision/make.py` wrote.
fn odd_case() -> HashMap<String, Tensor> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vision/odd.safetensors");
    candle_core::safetensors::load(file, &Device::Cpu).unwrap()
}

/// That of the fixtures.
fn golden_shape() -> VisionShape {
    VisionShape {
        depth: 2,
        hidden_size: 24,
        num_heads: 2,
        intermediate_size: 40,
        activation: Activation::GeluTanh,
        patch_size: 4,
        temporal_patch_size: 2,
        spatial_merge_size: 2,
        num_position_embeddings: 36,
        out_hidden_size: 32,
        in_channels: 3,
        rope_theta: 1e4,
    }
}

fn load(family: &str, dtype: DType, options: &LoadOptions) -> Weights {
    let names = tensors(&format!("{family}/checkpoint/model.safetensors")).into_keys();
    let others = names.filter(|name| !name.starts_with(TOWER)).collect();
    let config = TowerOnly { shape: golden_shape(), others };
    Weights::load_with(&fixture(&format!("{family}/checkpoint")), &config, dtype, &Device::Cpu, options).unwrap()
}

fn largest(x: &Tensor) -> Result<f64> {
    Ok(x.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F64)?.to_scalar()?)
}

/// With settings that no released model has, those of `vision/make.py`; the learned grid is read up to 5 x 5.
fn odd_shape(activation: Activation) -> VisionShape {
    VisionShape {
        depth: 2,
        hidden_size: 16,
        num_heads: 2,
        intermediate_size: 10,
        activation,
        patch_size: 2,
        temporal_patch_size: 3,
        spatial_merge_size: 3,
        num_position_embeddings: 27,
        out_hidden_size: 7,
        in_channels: 2,
        rope_theta: 50.0,
    }
}

/// Weights in f64 of which none is 0 or 1.
fn odd_weights(shape: &VisionShape) -> Result<Weights> {
    let config = TowerOnly { shape: shape.clone(), others: Vec::new() };
    let weights = Weights::random(&config, DType::F64, &Device::Cpu, 1)?;
    for (seed, var) in (10..).zip(weights.variables().values()) {
        var.set(&(var.as_tensor() + (random(var.dims(), DType::F64, seed)? * 0.3)?)?)?;
    }
    Ok(weights)
}

fn grid_tensor(grids: &[[usize; 3]]) -> Result<Tensor> {
    let flat: Vec<i64> = grids.iter().flatten().map(|&size| size as i64).collect();
    Ok(Tensor::from_vec(flat, (grids.len(), 3), &Device::Cpu)?)
}

/// A picture, a clip of two frames and a picture of one soft token, as in `vision/make.py`.
const GRIDS: [[usize; 3]; 3] = [[1, 3, 9], [2, 6, 3], [1, 3, 3]];
const PATCHES: usize = 27 + 36 + 9;

#[test]
fn values_and_gradients_are_those_of_hugging_face() -> Result<()> {
    for family in FAMILIES {
        let weights = load(family, DType::F32, &LoadOptions::new());
        let tower = VisionTower::new(&golden_shape(), &weights)?;
        let case = tensors(&format!("{family}/goldens/case2_images.safetensors"));
        let mut taps = BTreeMap::new();
        let found = tower.forward(&case["input.pixel_values"], &case["input.image_grid_thw"], &mut taps)?;
        assert_eq!(found.per_item, [12, 20]);
        let compared = case.iter().filter(|(name, _)| name.starts_with("vision."));
        for (name, expected) in compared {
            assert_close(name, &taps[name], expected, 2e-4)?;
        }
        assert_eq!(taps.len(), 5);
        assert_close("features", &found.features_th, &case["vision.features"], 2e-4)?;

        // The features take the places of image tokens, so the gradients that came to those are the features'.
        let gradients = tensors(&format!("{family}/goldens/case2_images.grads.safetensors"));
        let ids = case["input.input_ids"].flatten_all()?.to_vec1::<i64>()?;
        let images = ids.iter().enumerate().filter(|&(_, &id)| id == 504).map(|(at, _)| at as u32);
        let images = Tensor::from_iter(images, &Device::Cpu)?;
        let name = gradients.keys().find(|name| name.ends_with("inputs_embeds")).unwrap();
        let grad_th = gradients[name].squeeze(0)?.index_select(&images, 0)?;
        let store = (found.features_th * grad_th)?.sum_all()?.backward()?;
        assert_eq!(weights.variables().len(), 2 + 1 + 2 * 12 + 6);
        for (name, var) in weights.variables() {
            let expected = &gradients[name];
            let tolerance = (1e-3 * largest(expected)?).max(1e-7);
            assert_close(name, store.get(var).expect("every weight has a gradient"), expected, tolerance)?;
        }
    }
    Ok(())
}

#[test]
fn other_settings_and_clips_are_those_of_hugging_face() -> Result<()> {
    let shape = odd_shape(Activation::Silu);
    let case = odd_case();
    let weights = odd_weights(&shape)?;
    for (name, var) in weights.variables() {
        var.set(&case[name].to_dtype(DType::F64)?)?;
    }
    let tower = VisionTower::new(&shape, &weights)?;
    let found = tower.forward(&case["pixel_values"], &case["image_grid_thw"], &mut ())?;
    assert_eq!(found.per_item, [3, 4, 1]);
    let close = |name: &str, found: &Tensor, expected: &Tensor| -> Result<()> {
        // What transformers computes in f32 shows.
        Ok(assert_close(name, &found.to_dtype(DType::F32)?, expected, 1e-5 * largest(expected)?)?)
    };
    close("features", &found.features_th, &case["features"])?;
    let cotangent = case["cotangent"].to_dtype(DType::F64)?;
    let store = (found.features_th * cotangent)?.sum_all()?.backward()?;
    for (name, var) in weights.variables() {
        close(name, store.get(var).expect("every weight has a gradient"), &case[&format!("grad.{name}")])?;
    }
    Ok(())
}

#[test]
fn values_and_gradients_are_those_of_plain_loops() -> Result<()> {
    for activation in [Activation::Silu, Activation::Gelu] {
        let shape = odd_shape(activation);
        let weights = odd_weights(&shape)?;
        let pixels = random(&[PATCHES, shape.patch_len()], DType::F64, 2)?;
        let tower = VisionTower::new(&shape, &weights)?;
        let found = tower.forward(&pixels, &grid_tensor(&GRIDS)?, &mut ())?;
        assert_eq!(found.per_item, [3, 4, 1]);

        let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f64>();
        let rows = pixels.to_vec2::<f64>()?;
        let mut plain = reference::Tensors::new();
        for (name, var) in weights.variables() {
            plain.insert(name.clone(), flat(var)?);
        }
        let expected = reference::features(&shape, &plain, &rows, &GRIDS);
        let expected = Tensor::new(expected, &Device::Cpu)?;
        assert!(largest(&expected)? > 0.5, "values near 0 would compare with anything");
        assert_close("features", &found.features_th, &expected, 1e-11)?;

        let grad = random(found.features_th.dims(), DType::F64, 3)?;
        let cotangent = flat(&grad)?;
        let store = (found.features_th * grad)?.sum_all()?.backward()?;
        let loss = |tensors: &reference::Tensors| -> f64 {
            let features = reference::features(&shape, tensors, &rows, &GRIDS).concat();
            features.iter().zip(&cotangent).map(|(x, grad)| x * grad).sum()
        };
        for (name, var) in weights.variables() {
            let found = flat(store.get(var).expect("every weight has a gradient"))?;
            // Three entries of every tensor, spread over it.
            for place in [0, found.len() / 2 + 1, found.len() - 1] {
                let step = 1e-5;
                let mut at = |by: f64| {
                    let entry = &mut plain.get_mut(name).unwrap()[place];
                    let before = std::mem::replace(entry, *entry + by);
                    let loss = loss(&plain);
                    plain.get_mut(name).unwrap()[place] = before;
                    loss
                };
                let slope = (at(step) - at(-step)) / (2.0 * step);
                let error = (found[place] - slope).abs();
                assert!(error < 1e-7 * slope.abs().max(1.0), "{name}[{place}]: {} instead of {slope}", found[place]);
            }
        }
    }
    Ok(())
}

#[test]
fn images_and_frames_do_not_see_each_other() -> Result<()> {
    let shape = odd_shape(Activation::GeluTanh);
    let weights = odd_weights(&shape)?;
    let tower = VisionTower::new(&shape, &weights)?;
    let pixels = random(&[PATCHES, shape.patch_len()], DType::F64, 2)?;
    let run = |pixels: &Tensor, grids: &[[usize; 3]]| -> Result<Tensor> {
        Ok(tower.forward(pixels, &grid_tensor(grids)?, &mut ())?.features_th)
    };
    let together = run(&pixels, &GRIDS)?;
    let (mut patch, mut token) = (0, 0);
    for [frames, height, width] in GRIDS {
        for _ in 0..frames {
            let (patches, tokens) = (height * width, height * width / 9);
            let alone = run(&pixels.narrow(0, patch, patches)?, &[[1, height, width]])?;
            assert_close("alone", &together.narrow(0, token, tokens)?, &alone, 1e-13)?;
            (patch, token) = (patch + patches, token + tokens);
        }
    }
    // Nor does the clip's second frame know that it is one; but where a patch lies in its picture matters.
    let frame = pixels.narrow(0, 0, 18)?;
    let clip = run(&Tensor::cat(&[&frame, &frame], 0)?, &[[2, 6, 3]])?;
    assert_close("frames", &clip.narrow(0, 0, 2)?, &clip.narrow(0, 2, 2)?, 1e-13)?;
    let across = run(&frame, &[[1, 3, 6]])?;
    assert!(largest(&(across - clip.narrow(0, 0, 2)?)?)? > 1e-2);
    Ok(())
}

#[test]
fn a_tower_follows_its_weights() -> Result<()> {
    let shape = odd_shape(Activation::GeluTanh);
    let weights = odd_weights(&shape)?;
    let tower = VisionTower::new(&shape, &weights)?;
    let pixels = random(&[9, shape.patch_len()], DType::F64, 2)?;
    let run = |tower: &VisionTower| tower.forward(&pixels, &grid_tensor(&[[1, 3, 3]])?, &mut ());
    for (name, var) in weights.variables() {
        let before = run(&tower)?.features_th;
        var.set(&(random(var.dims(), DType::F64, 4)? + var.as_tensor())?)?;
        let after = run(&tower)?.features_th;
        // The bias of keys moves all scores of a query alike, but it is in one tensor with those of queries and values.
        assert!(largest(&(&after - before)?)? > 1e-6, "{name} was changed and nothing shows it");
        assert_close(name, &after, &run(&VisionTower::new(&shape, &weights)?)?.features_th, 0.0)?;
    }
    Ok(())
}

#[test]
fn no_images_give_no_features() -> Result<()> {
    let shape = odd_shape(Activation::GeluTanh);
    let tower = VisionTower::new(&shape, &odd_weights(&shape)?)?;
    let pixels = Tensor::zeros((0, shape.patch_len()), DType::F32, &Device::Cpu)?;
    let found = tower.forward(&pixels, &Tensor::zeros((0, 3), DType::I64, &Device::Cpu)?, &mut ())?;
    assert_eq!((found.features_th.dims(), found.per_item.len()), (&[0, 7][..], 0));
    assert_eq!(found.features_th.dtype(), DType::F64);
    Ok(())
}

#[test]
fn a_frozen_tower_leaves_nothing_for_backward() -> Result<()> {
    let weights = load(FAMILIES[0], DType::F32, &LoadOptions::new().freeze([Part::Vision]));
    assert_eq!((weights.variables().len(), weights.frozen().len()), (0, 33));
    let case = tensors("qwen3_5-dense/goldens/case2_images.safetensors");
    let mut taps = BTreeMap::new();
    let tower = VisionTower::new(&golden_shape(), &weights)?;
    let found = tower.forward(&case["input.pixel_values"], &case["input.image_grid_thw"], &mut taps)?;
    assert_close("features", &found.features_th, &case["vision.features"], 2e-4)?;
    for (name, x) in taps {
        assert!(!x.track_op(), "{name} is part of a graph");
    }
    Ok(())
}

#[test]
fn all_projections_of_the_tower_but_the_convolution_take_adapters() -> Result<()> {
    let shape = odd_shape(Activation::GeluTanh);
    let config = TowerOnly { shape: shape.clone(), others: Vec::new() };
    let grids = grid_tensor(&GRIDS)?;
    let pixels = random(&[PATCHES, shape.patch_len()], DType::F64, 2)?;
    let plain = odd_weights(&shape)?;
    let mut weights = plain.clone();
    let expected = VisionTower::new(&shape, &plain)?.forward(&pixels, &grids, &mut ())?.features_th;
    weights.add_lora(&config, &LoraOptions::new(2, 4.0).parts([Part::Vision]), 5)?;
    let adapted = weights.variables();
    // Four in each of two blocks, two in the merger; A and B of each.
    assert_eq!(adapted.len(), 2 * (2 * 4 + 2));
    let found = VisionTower::new(&shape, &weights)?.forward(&pixels, &grids, &mut ())?.features_th;
    assert_close("fresh adapters", &found, &expected, 1e-12)?;
    let store = found.sqr()?.sum_all()?.backward()?;
    for (name, var) in adapted {
        let gradient = store.get(var).expect("every adapter has a gradient");
        assert_eq!(largest(gradient)? > 0.0, name.contains("lora_B"), "{name}: A begins behind a B of zeros");
    }
    Ok(())
}

#[test]
fn short_types_stay_near() -> Result<()> {
    let case = tensors("qwen3_5-dense/goldens/case2_images.safetensors");
    let weights = load(FAMILIES[0], DType::BF16, &LoadOptions::new());
    let tower = VisionTower::new(&golden_shape(), &weights)?;
    let found = tower.forward(&case["input.pixel_values"], &case["input.image_grid_thw"], &mut ())?;
    assert_eq!(found.features_th.dtype(), DType::BF16);
    let expected = &case["vision.features"];
    assert_close("features", &found.features_th.to_dtype(DType::F32)?, expected, 3e-2 * largest(expected)?)?;
    let store = found.features_th.to_dtype(DType::F32)?.sqr()?.sum_all()?.backward()?;
    for (name, var) in weights.variables() {
        let gradient = store.get(var).expect("every weight has a gradient");
        assert!(largest(gradient)? > 0.0 && gradient.dtype() == DType::BF16, "{name}");
    }
    Ok(())
}

#[test]
fn wrong_inputs_and_shapes_are_named() -> Result<()> {
    let shape = odd_shape(Activation::GeluTanh);
    let weights = odd_weights(&shape)?;
    let tower = VisionTower::new(&shape, &weights)?;
    let error = |dims: &[usize], grids: &[[usize; 3]]| {
        let pixels = Tensor::zeros(dims, DType::F64, &Device::Cpu).unwrap();
        tower.forward(&pixels, &grid_tensor(grids).unwrap(), &mut ()).unwrap_err()
    };
    let message = error(&[9, 9], &[[1, 3, 3]]).to_string();
    assert_eq!(
        message,
        "input pixel_values: found [9, 9]; expected [patches, 24] (2 colours, temporal_patch_size 3, patch_size 2)"
    );
    assert!(matches!(error(&[1, 9, 24], &[[1, 3, 3]]), Error::Input { name: "pixel_values", .. }));
    assert!(matches!(error(&[18, 24], &[[1, 3, 3]]), Error::Input { name: "image_grid_thw", .. }));
    assert!(matches!(error(&[12, 24], &[[1, 3, 4]]), Error::PatchGrid { image: 0, .. }));

    let refused = |change: fn(&mut VisionShape)| {
        let mut changed = shape.clone();
        change(&mut changed);
        VisionTower::new(&changed, &weights).unwrap_err().to_string()
    };
    let message = refused(|shape| shape.num_heads = 3);
    assert!(
        message.starts_with("config.json: vision_config.hidden_size is 16: must be num_heads (3) times"),
        "{message}"
    );
    let message = refused(|shape| shape.spatial_merge_size = 0);
    assert_eq!(message, "config.json: vision_config.spatial_merge_size is 0: must be at least 1");
    assert!(refused(|shape| shape.rope_theta = 0.0).contains("rope_theta is 0: must be a positive number"));
    assert!(refused(|shape| shape.patch_size = 3).contains("model.visual.patch_embed.proj.weight"));
    Ok(())
}
