//! Parity with Hugging Face transformers for every family of Gemma 4 and Qwen 3.5, sharded and not.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_cp::LayoutKind;
use candle_cp_examples::case::{Case, GIVEN, Tensors, read_tensors};
use candle_cp_examples::compare::{compare_case, compare_gradients};
use candle_cp_examples::model::{Checkpoint, Settings};
use candle_cp_examples::report::Report;

/// What goldens hold that is not compared with a run: the rows of `out.logits_at_positions`.
const NOT_RESULTS: [&str; 1] = ["out.positions"];

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn splits() -> impl Iterator<Item = (usize, LayoutKind)> {
    [1, 2, 3, 4, 8].into_iter().flat_map(|ranks| LayoutKind::ALL.map(|layout| (ranks, layout)))
}

fn names(tensors: &Tensors) -> BTreeSet<&str> {
    tensors.keys().map(String::as_str).collect()
}

fn compared(report: &Report) -> BTreeSet<&str> {
    report.comparisons.iter().map(|c| c.name.as_str()).collect()
}

/// Every tensor of the file is compared, and passes, at every split; so is every gradient, if there is a file of them.
fn check(checkpoint: &Checkpoint, case: &Path, gradients: Option<&Path>) {
    let name = case.display();
    let gradients = gradients.map(|path| read_tensors(path).unwrap());
    let case = Case::load(case).unwrap();
    let is_result = |name: &&str| !GIVEN.contains(name) && !NOT_RESULTS.contains(name);
    let results: BTreeSet<&str> = names(case.tensors()).into_iter().filter(is_result).collect();
    for (ranks, layout) in splits() {
        let settings = Settings { ranks, layout, gradients: gradients.is_some() };
        let computed = checkpoint.run(&case, &settings).unwrap();
        let report = compare_case(&case, &computed.tensors).unwrap();
        assert!(report.passed(), "{name}, cp {ranks}, {layout}\n{report}");
        assert_eq!(compared(&report), results, "{name}: {:?}", report.not_compared);
        if let Some(gradients) = &gradients {
            let report = compare_gradients(gradients, &computed.gradients).unwrap();
            assert!(report.passed(), "gradients of {name}, cp {ranks}, {layout}\n{report}");
            assert_eq!(compared(&report), names(gradients), "{name}");
            assert_eq!(report.not_compared, [], "{name}");
        }
    }
}

/// The goldens of a family, by the name of its folder in fixtures.
fn check_family(family: &str, cases: &[&str]) {
    let checkpoint = Checkpoint::load(&root(&format!("fixtures/{family}/checkpoint"))).unwrap();
    for case in cases {
        let golden = |suffix: &str| root(&format!("fixtures/{family}/goldens/{case}{suffix}.safetensors"));
        let gradients = Some(golden(".grads")).filter(|path| path.exists());
        check(&checkpoint, &golden(""), gradients.as_deref());
    }
}

/// A tiny model with settings unlike the released ones.
fn check_variant(name: &str) {
    let folder = root(&format!("candle-gemma4/tests/variants/{name}"));
    let checkpoint = Checkpoint::load(&folder).unwrap();
    check(&checkpoint, &folder.join("case.safetensors"), Some(&folder.join("grads.safetensors")));
    let packed = folder.join("packed.safetensors");
    if packed.exists() {
        check(&checkpoint, &packed, None);
    }
}

#[test]
fn dense() {
    check_family("gemma4-dense", &["case1_text", "case2_images", "case3_padded", "case4_packed", "case6_chat"]);
}

#[test]
fn experts() {
    check_family("gemma4-moe", &["case1_text", "case2_images", "case3_padded", "case4_packed"]);
}

#[test]
fn per_layer_embeddings_and_shared_keys() {
    check_family("gemma4-effective", &["case1_text", "case2_images", "case3_padded", "case4_packed"]);
}

#[test]
fn audio() {
    check_family("gemma4-effective", &["case5_audio"]);
}

#[test]
fn unified() {
    check_family("gemma4-unified", &["case2_images", "case4_packed"]);
}

#[test]
fn qwen_dense() {
    check_family("qwen3_5-dense", &["case1_text", "case2_images", "case3_padded", "case4_packed", "case6_chat"]);
}

#[test]
fn qwen_experts() {
    check_family("qwen3_5-moe", &["case1_text", "case2_images", "case3_padded", "case4_packed"]);
}

#[test]
fn unusual_settings() {
    for name in ["untied", "separate_values", "text_only", "clipped", "audio", "moe"] {
        check_variant(name);
    }
}

#[test]
fn unusual_shared_keys() {
    for name in ["effective", "effective_plain_mlp"] {
        check_variant(name);
    }
}

#[test]
fn unusual_unified() {
    check_variant("unified");
}
