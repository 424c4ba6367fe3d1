//! The recipe on a checkpoint of every family: from a chat file with a picture to a folder that loads again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_core::Tensor;
use candle_finetune::{CHECKPOINT_FOLDER, Config, Job, METRICS_FILE, Watcher, run, train, train_watched};
use candle_gemma4::Weights;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

const FAMILIES: [&str; 6] =
    ["gemma4-dense", "gemma4-moe", "gemma4-effective", "gemma4-unified", "qwen3_5-dense", "qwen3_5-moe"];

const CHATS: &str = r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Teal."}, {"role": "user", "content": [{"type": "image", "image": "square.png"}, {"type": "text", "text": "And here?"}]}, {"role": "assistant", "content": "Ochre."}]}
{"prompt": "Is it tall?", "completion": "No."}
{"text": "Tides rise and fall."}
"#;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// A checkpoint folder with all files, and chats beside it. Tokenizer and chat template are those of the dense checkpoint.
fn folder(family: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let dense = if family.starts_with("gemma4") { "gemma4-dense" } else { "qwen3_5-dense" };
    for family in [dense, family] {
        for entry in fixtures().join(family).join("checkpoint").read_dir().unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
        }
    }
    // A unified model has no processor configuration: its own configuration tells how pictures are cut.
    if family == "gemma4-unified" {
        std::fs::remove_file(model.join("processor_config.json")).unwrap();
    }
    std::fs::copy(fixtures().join("imaging/square.png"), dir.path().join("square.png")).unwrap();
    std::fs::write(dir.path().join("chats.jsonl"), CHATS).unwrap();
    dir
}

fn config(dir: &TempDir) -> Config {
    Config {
        cp: 2,
        steps: Some(2),
        model: Some(dir.path().join("model")),
        data: Some(dir.path().join("chats.jsonl")),
        out: dir.path().join("out"),
        batch_rows: 1,
        seq_len: 192,
        ..Config::default()
    }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Names of the trained tensors that differ.
fn moved(before: &Weights, after: &Weights) -> Vec<String> {
    assert_eq!(before.variables().keys().collect::<Vec<_>>(), after.variables().keys().collect::<Vec<_>>());
    let pairs = before.variables().iter().zip(after.variables().values());
    pairs.filter(|((_, a), b)| values(a) != values(b)).map(|((name, _), _)| name.clone()).collect()
}

#[test]
fn every_family_trains_on_chats_and_pictures_and_loads_again() {
    for family in FAMILIES {
        let dir = folder(family);
        let config = config(&dir);
        let job = Job::prepare(&config).unwrap();
        let batch = job.training(&config).next_training_batch().unwrap();
        assert_eq!((batch.pictures.len(), batch.documents[0].iter().max()), (1, Some(&2)), "{family}");
        let learned = batch.labels[0].iter().filter(|&&label| label >= 0).count();

        let one = train(&job, &Config { cp: 1, ..config.clone() }, &|_, _| Ok(())).unwrap();
        let two = train(&job, &config, &|_, _| Ok(())).unwrap();
        for (one, two) in one.reports.iter().zip(&two.reports) {
            let off = (one.loss - two.loss).abs() / one.loss;
            assert!(off < 1e-5, "{family}: {} and {}", one.loss, two.loss);
            assert_eq!((two.label_tokens, two.tokens), (learned, batch.token_count()), "{family}");
        }
        assert!(two.reports[1].loss < two.reports[0].loss, "{family}: {:?}", two.reports);

        let summary = run(&config, &|_, _| Ok(())).unwrap();
        assert_eq!(summary.loss, two.reports[1].loss, "{family}");
        let saved = config.out.join(CHECKPOINT_FOLDER);
        assert!(config.out.join(METRICS_FILE).is_file() && saved.join("chat_template.jinja").is_file());
        let again = Config { model: Some(saved), ..config.clone() };
        let again_job = Job::prepare(&again).unwrap();
        let weights = again_job.weights(&again).unwrap();
        assert_eq!(moved(&two.weights, &weights), Vec::<String>::new(), "{family}");
        let start = job.weights(&config).unwrap();
        assert!(
            moved(&start, &weights).iter().any(|name| name.contains("vision") || name.contains("visual")),
            "{family}"
        );
        assert_eq!(again_job.training(&again).next_training_batch().unwrap(), batch, "{family}");
        let third = train(&again_job, &again, &|_, _| Ok(())).unwrap().reports[0].loss;
        assert!(third < two.reports[1].loss, "{family}: {third} after {:?}", two.reports);
    }
}

/// Type, shape and bytes of the tensors that the model does not read.
fn unread(folder: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let unread = tensors.iter().filter(|(name, _)| name.starts_with("mtp."));
    unread.map(|(name, x)| (name.to_string(), (x.dtype(), x.shape().to_vec(), x.data().to_vec()))).collect()
}

#[test]
fn tensors_that_are_not_read_are_saved_byte_for_byte() {
    for family in ["qwen3_5-dense", "qwen3_5-moe"] {
        let dir = folder(family);
        let original = unread(&dir.path().join("model"));
        assert_eq!(original.len(), 4);
        for (name, changes) in [
            ("f32", &[][..]),
            ("bf16", &[("--dtype", "bf16")]),
            ("merged", &[("--lora-rank", "2"), ("--lora-merge", "true")]),
        ] {
            let mut config = Config { steps: Some(1), out: dir.path().join(name), ..config(&dir) };
            changes.iter().for_each(|(flag, value)| config.set(flag, value).unwrap());
            run(&config, &|_, _| Ok(())).unwrap();
            assert!(unread(&config.out.join(CHECKPOINT_FOLDER)) == original, "{family}, {name}");
        }
    }
}

#[derive(Default)]
struct Notices(Mutex<Vec<String>>);

impl Watcher for Notices {
    fn notice(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_string());
    }
}

#[test]
fn frozen_parts_stay_and_notices_are_said_once() {
    let dir = folder("gemma4-dense");
    let mut config = config(&dir);
    config.set("--freeze", "vision,audio").unwrap();
    let job = Job::prepare(&config).unwrap();
    let notices = Notices::default();
    let trained = train_watched(&job, &config, None, &notices).unwrap();
    assert_eq!(notices.0.into_inner().unwrap(), ["this model has no audio part that could be frozen"]);
    assert!(trained.weights.variables().keys().all(|name| !name.contains("vision")));
    candle_finetune::checkpoint::save(&config.out, &job, &trained.weights).unwrap();
    let all = Config { freeze: Vec::new(), ..config.clone() };
    let before = job.weights(&all).unwrap();
    let saved = Config { model: Some(config.out.clone()), ..all };
    let after = Job::prepare(&saved).unwrap().weights(&saved).unwrap();
    let moved = moved(&before, &after);
    assert!(!moved.is_empty() && moved.iter().all(|name| !name.contains("vision")), "{moved:?}");

    config.set("--freeze", "text,vision").unwrap();
    let error = train(&job, &config, &|_, _| Ok(())).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("--freeze \"text,vision\""), "{error}");
}

#[test]
fn bad_lines_end_the_run_before_the_first_step() {
    let dir = folder("gemma4-unified");
    let config = config(&dir);
    // 1200 x 20 pixels become 64 patches in a row; the unified model has positions for 16.
    let thin = r#"{"prompt": "<|image|>", "completion": "x", "images": ["thin.png"]}"#;
    let thin_picture = fixtures().join("../candle-vlm-processor/tests/data/thin/h20-w1200.png");
    std::fs::copy(thin_picture, dir.path().join("thin.png")).unwrap();
    std::fs::write(config.data.as_ref().unwrap(), format!("{CHATS}{thin}\n{{\"prompt\": 1}}\n")).unwrap();
    let error = run(&config, &|_, _| Ok(())).unwrap_err();
    let text = error.to_string();
    assert!(error.is_usage() && text.contains("2 of 5 lines cannot be used; nothing was trained"), "{text}");
    assert!(text.contains("\n  line 5: \"prompt\" is a number"), "{text}");
    assert!(text.contains("line 4: picture 1 (thin.png): ") && text.contains("mm_posemb_size"), "{text}");
    assert!(!config.out.exists());
}
