//! A run that is stopped and goes on is the run that was never stopped, bit for bit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::safetensors;
use candle_finetune::family::Family;
use candle_finetune::{
    Config, Control, METRICS_FILE, StepReport, Summary, resume, resumed_settings, run, run_controlled,
};
use tempfile::TempDir;

const STEPS: usize = 15;
const STOP_AFTER: usize = 7;

fn checkpoint(family: Family) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../fixtures/{family}-dense/checkpoint"))
}

/// Ten samples of different lengths, two of them with a picture.
fn data(family: Family, dir: &Path) -> PathBuf {
    let image = match family {
        Family::Gemma4 => "<|image|>",
        Family::Qwen3_5 => "<|vision_start|><|image_pad|><|vision_end|>",
    };
    let square = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/imaging/square.png");
    std::fs::copy(square, dir.join("square.png")).unwrap();
    let line = |i: usize| match i {
        3 | 8 => format!(
            "{{\"prompt\": \"{image} What is number {i}?\", \"completion\": \"A square.\", \"images\": [\"square.png\"]}}\n"
        ),
        i => format!("{{\"prompt\": \"{}\", \"completion\": \"Say {i}.\"}}\n", "and so on ".repeat(i % 4)),
    };
    let path = dir.join("ten.jsonl");
    std::fs::write(&path, (0..10).map(line).collect::<String>()).unwrap();
    path
}

fn config(family: Family, dir: &TempDir, name: &str, changes: &[(&str, &str)]) -> Config {
    let mut config = Config {
        cp: 1,
        steps: Some(STEPS),
        model: Some(checkpoint(family)),
        data: Some(data(family, dir.path())),
        out: dir.path().join(name),
        batch_rows: 1,
        accumulate: 2,
        seq_len: 128,
        lr: Some(1e-3),
        ..Config::default()
    };
    changes.iter().for_each(|(name, value)| config.set(name, value).unwrap());
    config
}

/// A run that is stopped after step 7.
fn stopped(config: &Config) -> Summary {
    let stop = AtomicBool::new(false);
    let observer = |_: usize, report: &StepReport| {
        stop.fetch_or(report.step == STOP_AFTER, Ordering::Relaxed);
        Ok(())
    };
    run_controlled(config, &Control { observer: &observer, stop: &stop }).unwrap()
}

fn go_on(config: &Config) -> (Summary, Vec<StepReport>) {
    let reports = Mutex::new(Vec::new());
    let observer = |rank: usize, report: &StepReport| {
        if rank == 0 {
            reports.lock().unwrap().push(*report);
        }
        Ok(())
    };
    let summary = resume(config, &Control { observer: &observer, stop: &AtomicBool::new(false) }).unwrap();
    (summary, reports.into_inner().unwrap())
}

/// What the metrics file says of every line, without what depends on the clock, the memory or the ranks.
fn metrics(config: &Config) -> Vec<BTreeMap<String, serde_json::Value>> {
    let text = std::fs::read_to_string(config.out.join(METRICS_FILE)).unwrap();
    let kept = |line: &str| {
        let mut all: BTreeMap<String, serde_json::Value> = serde_json::from_str(line).unwrap();
        all.retain(|name, _| {
            ["step", "epoch", "loss", "grad_norm", "lr", "tokens", "label_tokens", "val_loss", "val_tokens"]
                .contains(&name.as_str())
        });
        all
    };
    text.lines().map(kept).collect()
}

/// All tensors of a safetensors file of a run, as bits.
fn bits(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let tensors = safetensors::load(path, &candle_core::Device::Cpu).unwrap();
    let bytes = |tensor: &candle_core::Tensor| {
        let flat = tensor.flatten_all().unwrap();
        match flat.dtype() {
            candle_core::DType::BF16 => {
                flat.to_vec1::<half::bf16>().unwrap().iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
            }
            _ => flat.to_vec1::<f32>().unwrap().iter().flat_map(|x| x.to_bits().to_le_bytes()).collect(),
        }
    };
    tensors.iter().map(|(name, tensor)| (name.clone(), bytes(tensor))).collect()
}

fn same_run_of(family: Family, changes: &[(&str, &str)], weights: &str) {
    let dir = tempfile::tempdir().unwrap();
    let whole = config(family, &dir, "whole", changes);
    let expected = run(&whole, &|_, _| Ok(())).unwrap();
    assert_eq!((expected.steps, expected.stopped), (STEPS, false));

    let broken = config(family, &dir, "broken", changes);
    let first = stopped(&broken);
    assert_eq!((first.steps, first.stopped), (STOP_AFTER, true), "{changes:?}");
    assert!(!broken.out.join(weights).exists(), "a run that was stopped has no result");
    let settings = resumed_settings(&broken.out).unwrap();
    let (summary, reports) = go_on(&settings);
    assert_eq!(
        reports.iter().map(|report| report.step).collect::<Vec<_>>(),
        (STOP_AFTER + 1..=STEPS).collect::<Vec<_>>()
    );
    assert_eq!(metrics(&broken), metrics(&whole), "{changes:?}");
    assert_eq!(bits(&broken.out.join(weights)), bits(&whole.out.join(weights)), "{changes:?}");
    assert_eq!((summary.loss, summary.steps, summary.best_val_loss), (expected.loss, STEPS, expected.best_val_loss));
}

fn same_run(changes: &[(&str, &str)], weights: &str) {
    same_run_of(Family::Gemma4, changes, weights);
}

#[test]
fn qwen_on_two_ranks_and_its_adapters() {
    let cp = ("--cp", "2");
    same_run_of(Family::Qwen3_5, &[cp], "checkpoint/model.safetensors");
    let lora = [("--lora-rank", "4"), ("--lora-parts", "text,vision"), ("--lora-dropout", "0.1"), cp];
    same_run_of(Family::Qwen3_5, &lora, "adapter/adapter_model.safetensors");
}

#[test]
fn all_weights_on_one_and_two_ranks() {
    same_run(&[], "checkpoint/model.safetensors");
    same_run(
        &[("--cp", "2"), ("--validation-share", "0.2"), ("--validate-every", "3")],
        "checkpoint/model.safetensors",
    );
}

#[test]
fn bf16_weights_with_f32_masters() {
    same_run(&[("--dtype", "bf16"), ("--cp", "2"), ("--freeze", "vision")], "checkpoint/model.safetensors");
}

#[test]
fn adapters_on_one_and_two_ranks() {
    let lora = [("--lora-rank", "4"), ("--lora-parts", "text,vision")];
    same_run(&lora, "adapter/adapter_model.safetensors");
    same_run(&[lora[0], ("--cp", "2"), ("--lora-dropout", "0.1")], "adapter/adapter_model.safetensors");
}

#[test]
fn another_number_of_ranks_goes_on_with_the_same_data_and_losses() {
    let dir = tempfile::tempdir().unwrap();
    let whole = config(Family::Gemma4, &dir, "whole", &[]);
    run(&whole, &|_, _| Ok(())).unwrap();
    let expected = metrics(&whole);
    for cp in [2, 4] {
        let broken = config(Family::Gemma4, &dir, &format!("broken-{cp}"), &[]);
        stopped(&broken);
        let settings = Config { cp, ..resumed_settings(&broken.out).unwrap() };
        go_on(&settings);
        for (found, expected) in metrics(&broken).iter().zip(&expected) {
            for (name, value) in expected {
                let (found, expected) = (found[name].as_f64().unwrap(), value.as_f64().unwrap());
                let tolerance = if ["loss", "grad_norm"].contains(&name.as_str()) { 1e-5 } else { 0.0 };
                let off = (found - expected).abs() / expected.abs().max(1e-9);
                assert!(off <= tolerance, "{cp} ranks, {name}: {found} and {expected}");
            }
        }
    }
}

#[test]
fn a_resumed_run_says_what_it_cannot_do() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(Family::Gemma4, &dir, "out", &[]);
    let error = resumed_settings(&config.out).unwrap_err();
    let text = error.to_string();
    assert!(
        error.is_usage() && text.starts_with("--out ") && text.contains("with checkpoints of an earlier run"),
        "{text}"
    );
    assert!(text.contains("--save-every"), "{text}");

    stopped(&config);
    let error = run(&config, &|_, _| Ok(())).unwrap_err();
    let text = error.to_string();
    assert!(error.is_usage() && text.contains("a folder without checkpoints of an earlier run"), "{text}");
    assert!(text.contains("go on from ") && text.contains("--resume"), "{text}");

    let settings = resumed_settings(&config.out).unwrap();
    let control = Control { observer: &|_, _| Ok(()), stop: &AtomicBool::new(false) };
    let error = resume(&Config { seed: 9, ..settings.clone() }, &control).unwrap_err();
    assert!(error.to_string().starts_with("--seed \"9\": allowed is 0, which the checkpoint"), "{error}");

    let text = std::fs::read_to_string(config.data.as_ref().unwrap()).unwrap();
    std::fs::write(config.data.as_ref().unwrap(), text.replace("Say 5.", "Say six.")).unwrap();
    let error = resume(&settings, &control).unwrap_err();
    let text = error.to_string();
    assert!(error.is_usage() && text.contains("ten.jsonl") && text.contains("other samples"), "{text}");
}
