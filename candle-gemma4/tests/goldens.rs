//! Hidden states, logits, loss and gradients against Hugging Face transformers, on one rank.

mod support;

use candle_core::{DType, Device};
use candle_gemma4::{Config, Weights};
use support::{Case, Run, assert_forward, assert_gradients, checkpoint, run};

fn run_case(name: &str) -> (Case, Run) {
    let config = Config::from_folder(&checkpoint()).unwrap();
    let weights = Weights::load(&checkpoint(), &config, DType::F32, &Device::Cpu).unwrap();
    let case = Case::load(&format!("gemma4-dense/goldens/{name}.safetensors"));
    let run = run(&config, &weights, &case);
    assert_forward(&run, &case);
    (case, run)
}

fn assert_golden_gradients(name: &str) {
    let (_, run) = run_case(name);
    let golden = Case::load(&format!("gemma4-dense/goldens/{name}.grads.safetensors"));
    assert_gradients(&run, &golden.tensors);
}

#[test]
fn text() {
    run_case("case1_text");
}

#[test]
fn images_with_gradients() {
    assert_golden_gradients("case2_images");
}

#[test]
fn padded_rows() {
    run_case("case3_padded");
}

#[test]
fn packed_documents_with_gradients() {
    assert_golden_gradients("case4_packed");
}
