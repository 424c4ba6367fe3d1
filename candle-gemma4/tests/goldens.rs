//! Hidden states, logits, loss and gradients against Hugging Face transformers, on one rank.

mod support;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use candle_gemma4::{Config, Weights};
use support::{Case, assert_forward, assert_gradients, checkpoint, fixture, run, variant};

/// Runs a case and compares the forward pass, and every gradient if a file with gradients is given.
fn assert_golden(model: &Path, case: &Path, gradients: Option<&Path>) {
    let config = Config::from_folder(model).unwrap();
    let weights = Weights::load(model, &config, DType::F32, &Device::Cpu).unwrap();
    let case = Case::load(case);
    let run = run(&config, &weights, &case);
    assert_forward(&run, &case);
    if let Some(gradients) = gradients {
        assert_gradients(&run, &Case::load(gradients).tensors);
    }
}

fn golden(name: &str) -> PathBuf {
    fixture("gemma4-dense/goldens").join(format!("{name}.safetensors"))
}

fn assert_variant(name: &str) {
    let folder = variant(name);
    assert_golden(&folder, &folder.join("case.safetensors"), Some(&folder.join("grads.safetensors")));
    let packed = folder.join("packed.safetensors");
    if packed.exists() {
        assert_golden(&folder, &packed, None);
    }
}

#[test]
fn text() {
    assert_golden(&checkpoint(), &golden("case1_text"), None);
}

#[test]
fn images() {
    assert_golden(&checkpoint(), &golden("case2_images"), Some(&golden("case2_images.grads")));
}

#[test]
fn padded_rows() {
    assert_golden(&checkpoint(), &golden("case3_padded"), None);
}

#[test]
fn packed_documents() {
    assert_golden(&checkpoint(), &golden("case4_packed"), Some(&golden("case4_packed.grads")));
}

/// Experts beside the MLP of every layer.
#[test]
fn experts() {
    let golden = |name: &str| fixture("gemma4-moe/goldens").join(format!("{name}.safetensors"));
    let model = fixture("gemma4-moe/checkpoint");
    assert_golden(&model, &golden("case1_text"), None);
    assert_golden(&model, &golden("case2_images"), Some(&golden("case2_images.grads")));
    assert_golden(&model, &golden("case3_padded"), None);
    assert_golden(&model, &golden("case4_packed"), Some(&golden("case4_packed.grads")));
}

/// Per-layer embeddings, shared keys and values, wider MLPs where they are shared, clipped towers, audio.
#[test]
fn effective() {
    let golden = |name: &str| fixture("gemma4-effective/goldens").join(format!("{name}.safetensors"));
    let model = fixture("gemma4-effective/checkpoint");
    assert_golden(&model, &golden("case1_text"), None);
    assert_golden(&model, &golden("case2_images"), Some(&golden("case2_images.grads")));
    assert_golden(&model, &golden("case3_padded"), None);
    assert_golden(&model, &golden("case4_packed"), Some(&golden("case4_packed.grads")));
    assert_golden(&model, &golden("case5_audio"), None);
}

/// Experts with other settings.
#[test]
fn unusual_experts() {
    assert_variant("moe");
}

/// Per-layer embeddings, shared keys and values.
#[test]
fn unusual_effective() {
    assert_variant("effective");
    assert_variant("effective_plain_mlp");
}

/// No tower, with other settings.
#[test]
fn unusual_unified() {
    assert_variant("unified");
}

/// No tower: patches go through norms and projections.
#[test]
fn unified_images() {
    let golden = |name: &str| fixture("gemma4-unified/goldens").join(format!("{name}.safetensors"));
    let model = fixture("gemma4-unified/checkpoint");
    assert_golden(&model, &golden("case2_images"), Some(&golden("case2_images.grads")));
    assert_golden(&model, &golden("case4_packed"), None);
}

/// Biases, an untied head, no soft cap, causal images, other constants everywhere.
#[test]
fn unusual_settings() {
    assert_variant("untied");
}

/// `Gemma4ForCausalLM`: other names, another layout of config.json, and no placeholders among the ids.
#[test]
fn text_only() {
    assert_variant("text_only");
}

/// An audio tower with three heads, keys of the future, and values that are cut; no vision tower.
#[test]
fn audio() {
    assert_variant("audio");
}

/// Both towers, with bounds that cut in every projection.
#[test]
fn clipped_towers() {
    assert_variant("clipped");
}

/// Values of their own on full layers, whose key heads are then those of the sliding layers.
#[test]
fn separate_values() {
    assert_variant("separate_values");
}
