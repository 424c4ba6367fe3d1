//! What is wrong with a run is told before it begins; what it is told, and who listens, does not harm it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use candle_finetune::hub::HubOptions;
use candle_finetune::{
    ADAPTER_FOLDER, Config, Control, Error, LOSS_CURVE_FILE, layered_settings, resume, resumed_settings, run,
};
use tempfile::TempDir;

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(family).join("checkpoint")
}

fn config(dir: &TempDir, changes: &[(&str, &str)]) -> Config {
    let data = dir.path().join("data.jsonl");
    let line = |i: usize| format!("{{\"prompt\": \"Number {i}?\", \"completion\": \"Say {i}.\"}}\n");
    std::fs::write(&data, (0..6).map(line).collect::<String>()).unwrap();
    let mut config = Config {
        cp: 2,
        model: Some(fixture("gemma4-dense")),
        data: Some(data),
        out: dir.path().join("out"),
        batch_rows: 1,
        seq_len: 64,
        ..Config::default()
    };
    changes.iter().for_each(|(name, value)| config.set(name, value).unwrap());
    config
}

fn refused(config: &Config) -> String {
    let error = run(config, &|_, _| Ok(())).unwrap_err();
    assert!(error.is_usage() && !matches!(error, Error::Cp(_)), "{error}");
    error.to_string()
}

/// All files of a folder but locks.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => drop(found.insert(path.clone(), std::fs::read(path).unwrap())),
        }
    }
    found
}

#[test]
fn nothing_is_left_of_a_run_that_cannot_begin() {
    let dir = tempfile::tempdir().unwrap();
    let rank = ("--lora-rank", "4");
    for (changes, told) in [
        (vec![rank, ("--lora-targets", "q_proj,foo")], "LoRA target \"foo\" matches no projection"),
        (vec![rank, ("--lora-parts", "audio")], "audio part, which this model does not have"),
        (vec![("--freeze", "visoin")], "--freeze \"visoin\": allowed is text, vision, audio, embeddings, or patterns"),
        (vec![("--freeze", "vision,[")], "--freeze \"[\": allowed is"),
        (vec![("--freeze", "*")], "--freeze \"*\": allowed is what leaves a part"),
        (vec![("--epochs", "1"), ("--warmup", "50")], "--warmup \"50\": allowed is at most the number of steps, "),
    ] {
        let config = config(&dir, &changes);
        let text = refused(&config);
        assert!(text.contains(told), "{text}");
        assert!(!config.out.exists(), "{changes:?}");
    }
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("gemma4-dense").join(name), model.join(name)).unwrap();
    }
    let config = Config { model: Some(model.clone()), ..config(&dir, &[]) };
    assert!(refused(&config).contains("neither model.safetensors nor model.safetensors.index.json"));
    std::fs::copy(fixture("gemma4-moe").join("model.safetensors"), model.join("model.safetensors")).unwrap();
    assert!(refused(&config).contains("the tensors do not fit config.json"));
    assert!(!config.out.exists());
}

#[test]
fn what_is_in_the_way_of_the_result_is_told_before_training() {
    let dir = tempfile::tempdir().unwrap();
    for changes in [vec![], vec![("--lora-rank", "2"), ("--lora-merge", "true")]] {
        let config = config(&dir, &changes);
        let other = config.out.join("checkpoint");
        std::fs::create_dir_all(&other).unwrap();
        std::fs::write(other.join("thesis.txt"), "not a model").unwrap();
        let text = refused(&config);
        assert!(text.contains("checkpoint is there and is no checkpoint folder, so it is not replaced"), "{text}");
        assert_eq!(files(&config.out).len(), 1);
    }
}

#[test]
fn a_run_that_cannot_go_on_is_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir, &[("--steps", "4"), ("--save-every", "2"), ("--warmup", "1")]);
    run(&config, &|_, _| Ok(())).unwrap();
    let before = files(&config.out);
    let settings = resumed_settings(&config.out).unwrap();
    let other = dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    for (family, name) in [
        ("dense", "tokenizer.json"),
        ("dense", "tokenizer_config.json"),
        ("moe", "config.json"),
        ("moe", "model.safetensors"),
    ] {
        std::fs::copy(fixture(&format!("gemma4-{family}")).join(name), other.join(name)).unwrap();
    }
    for (changed, told) in [
        (
            Config { steps: Some(3), ..settings.clone() },
            "--steps \"3\": allowed is at least 4, the steps that are done",
        ),
        (Config { model: Some(other), ..settings.clone() }, "the tensors do not fit config.json"),
    ] {
        let control = Control { observer: &|_, _| Ok(()), stop: &AtomicBool::new(false) };
        let error = resume(&changed, &control).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(told), "{error}");
        assert_eq!(files(&config.out), before, "{told}");
    }
}

#[test]
fn a_run_that_fails_still_draws_its_curve() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir, &[("--steps", "4")]);
    let broken = |step: usize| Error::NotFinite { step, what: "the loss".to_string(), value: f64::NAN };
    run(&config, &|_, report| if report.step == 3 { Err(broken(3)) } else { Ok(()) }).unwrap_err();
    let curve = std::fs::read_to_string(config.out.join(LOSS_CURVE_FILE)).unwrap();
    assert!(curve.contains("cross entropy"), "{curve}");
}

#[test]
fn the_flag_of_absent_data_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let options = HubOptions::new(dir.path().join("cache"));
    for flag in ["--data", "--validation"] {
        let mut config = config(&dir, &[(flag, "absent.jsonl")]);
        let error = config.resolve(&options, &mut |_| ()).unwrap_err();
        assert!(error.is_usage() && error.to_string().starts_with(&format!("{flag}: \"absent.jsonl\"")), "{error}");
    }
}

#[test]
fn the_run_that_goes_on_may_be_named_in_the_settings_file() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir, &[("--steps", "2"), ("--save-every", "2"), ("--warmup", "1")]);
    run(&config, &|_, _| Ok(())).unwrap();
    let file = dir.path().join("run.toml");
    std::fs::write(&file, format!("[train]\nsteps = 7\n[out]\ndir = {:?}\n", config.out)).unwrap();
    let on = layered_settings(Config::default(), Some(&file), &[("--lr", "0.5")], true, |_| None).unwrap();
    assert_eq!((on.out, on.seq_len, on.steps, on.lr), (config.out.clone(), config.seq_len, Some(7), Some(0.5)));
    let fresh = layered_settings(Config::default(), Some(&file), &[("--steps", "9")], false, |_| None).unwrap();
    assert_eq!((fresh.seq_len, fresh.steps), (Config::default().seq_len, Some(9)));

    // A flag overrules the file also where it names the run.
    let elsewhere = dir.path().join("elsewhere").display().to_string();
    let error = layered_settings(Config::default(), Some(&file), &[("--out", &elsewhere)], true, |_| None)
        .unwrap_err()
        .to_string();
    assert!(error.starts_with(&format!("--out {elsewhere:?}: ")), "{error}");
    assert!(!Path::new(&elsewhere).exists());
}

#[test]
fn an_adapter_names_model_and_revision_as_peft_does() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir, &[("--steps", "1"), ("--lora-rank", "2")]);
    config.sources.model = config.model.replace("org/tiny@v1.0".into());
    run(&config, &|_, _| Ok(())).unwrap();
    let text = std::fs::read_to_string(config.out.join(ADAPTER_FOLDER).join("adapter_config.json")).unwrap();
    assert!(text.contains("\"base_model_name_or_path\": \"org/tiny\""), "{text}");
    assert!(text.contains("\"revision\": \"v1.0\""), "{text}");
}

#[test]
#[ignore = "the child of the test that takes its standard error away"]
fn runs_where_nobody_listens() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir, &[("--steps", "2"), ("--validation-share", "0.4"), ("--warmup", "1")]);
    run(&config, &|_, _| Ok(())).unwrap();
    println!("\nran to its end");
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_needs_nobody_who_listens() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "runs_where_nobody_listens", "--ignored", "--nocapture"]).stderr(full);
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("\nran to its end\n"), "{text}");
}
