//! What a run tells and leaves: where adapters go, data that is smaller than a step, headers of weight files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use candle_core::Tensor;
use candle_cp::comm::Local;
use candle_finetune::{
    ADAPTER_FOLDER, CHECKPOINT_FOLDER, Config, Job, Trainer, Watcher, run, saves::CHECKPOINTS_FOLDER, train,
    train_watched,
};
use candle_gemma4::SaveOptions;
use safetensors::SafeTensors;
use tempfile::TempDir;

const CHATS: &str = r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "ok.png"}, {"type": "text", "text": "Wide?"}]}, {"role": "assistant", "content": "Yes."}]}
{"prompt": "Is it tall?", "completion": "No."}
"#;

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A folder with a checkpoint and chats with a picture. The tokenizer is the same for all families.
fn folder(family: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    for family in ["gemma4-dense", family] {
        for entry in here("../fixtures").join(family).join("checkpoint").read_dir().unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::copy(here("../fixtures/imaging/wide.png"), dir.path().join("ok.png")).unwrap();
    fs::write(dir.path().join("chats.jsonl"), CHATS).unwrap();
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
        seq_len: 128,
        ..Config::default()
    }
}

/// What is said before the first step.
#[derive(Default)]
struct Notices(Mutex<Vec<String>>);

impl Watcher for Notices {
    fn notice(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_string());
    }
}

fn set(config: &mut Config, settings: &[(&str, &str)]) {
    settings.iter().for_each(|(flag, value)| config.set(flag, value).unwrap());
}

#[test]
fn what_targets_matched_is_told_for_every_part_that_was_searched() {
    let dir = folder("gemma4-effective");
    let modules = |names: &BTreeSet<String>, part: &str| names.iter().filter(|name| name.contains(part)).count() / 2;
    for (parts, told, text, vision, audio) in [
        (None, "8 text", 8, 0, 0),
        (Some("vision"), "2 vision", 0, 2, 0),
        (Some("text,vision"), "8 text, 2 vision", 8, 2, 0),
        (Some("text,vision,audio"), "8 text, 2 vision, 1 audio", 8, 2, 1),
    ] {
        let mut config = Config { steps: Some(1), ..config(&dir) };
        set(&mut config, &[("--lora-rank", "2"), ("--lora-targets", "q_proj")]);
        parts.iter().for_each(|parts| set(&mut config, &[("--lora-parts", parts)]));
        let notices = Notices::default();
        let trained = train_watched(&Job::prepare(&config).unwrap(), &config, None, &notices).unwrap();
        let names: BTreeSet<String> = trained.weights.variables().keys().cloned().collect();
        let parameters: usize = trained.weights.variables().values().map(|variable| variable.elem_count()).sum();
        let all = format!("LoRA: {} modules, {parameters} parameters", text + vision + audio);
        assert_eq!(notices.0.into_inner().unwrap(), [format!("LoRA target q_proj: {told}"), all]);
        let found = ["language_model", "vision_tower", "audio_tower"].map(|part| modules(&names, part));
        assert_eq!(found, [text, vision, audio], "{names:?}");
        assert!(names.iter().all(|name| name.contains(".q_proj.")), "{names:?}");
        assert!(names.iter().all(|name| name.contains(".linear.") == name.contains("tower")), "{names:?}");
    }
}

#[test]
fn every_adapter_gets_a_gradient() {
    let dir = folder("gemma4-effective");
    for (parts, modules) in [("text", 8), ("vision", 2), ("text,vision", 10)] {
        let mut config = config(&dir);
        set(&mut config, &[("--lora-rank", "2"), ("--lora-targets", "q_proj"), ("--lora-parts", parts), ("--cp", "1")]);
        let job = Job::prepare(&config).unwrap();
        let batch = [job.training(&config).next_training_batch().unwrap()];
        let mut trainer = Trainer::new(&job, &config, Arc::new(Local::new())).unwrap();
        // At the start every B is zero, and so is the gradient of every A.
        trainer.step(&batch).unwrap();
        let gradients = trainer.gradients(&batch).unwrap().gradients;
        assert_eq!(gradients.named().len(), 2 * modules);
        for (name, gradient) in gradients.named() {
            let largest = values(&gradient.abs().unwrap()).into_iter().fold(0.0, f32::max);
            assert!(largest > 0.0 && largest.is_finite(), "{parts}: {name} has {largest}");
        }
    }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn fewer_samples_than_a_step_has_rows_are_one_step() {
    let dir = folder("gemma4-dense");
    let line = |rows: &str, batches: &str, each: &str| {
        format!("3 samples; an epoch packs them into {rows}: {batches}, 1 step of {each}")
    };
    for (batch_rows, accumulate, seq_len, data, run) in [
        (
            16,
            1,
            32,
            line("3 rows of 32 tokens (53 % full)", "1 batch of 16 rows", "1 batch"),
            "2 steps of 1 batch x 16 rows x 32 tokens, 2 ranks (head-tail)",
        ),
        (
            1,
            16,
            32,
            line("3 rows of 32 tokens (53 % full)", "3 batches of 1 row", "16 batches"),
            "2 steps of 16 batches x 1 row x 32 tokens, 2 ranks (head-tail)",
        ),
        (
            4,
            4,
            128,
            line("1 row of 128 tokens (40 % full)", "1 batch of 4 rows", "4 batches"),
            "2 steps of 4 batches x 4 rows x 128 tokens, 2 ranks (head-tail)",
        ),
    ] {
        let data_file = here("tests/data/tiny-set/three.jsonl");
        let config = Config {
            steps: None,
            epochs: Some(2),
            data: Some(data_file),
            batch_rows,
            accumulate,
            seq_len,
            ..config(&dir)
        };
        let job = Job::prepare(&config).unwrap();
        assert_eq!(job.data_summary(&config), data);
        let header: BTreeMap<_, _> = job.header(&config).into_iter().collect();
        assert_eq!((header["data"].as_str(), header["run"].as_str()), (data.as_str(), run));

        // All that an epoch has: the answers 0, 1 and 2, each with the tokens that end it.
        let (mut packer, mut learned) = (job.training(&config), Vec::new());
        while let Some(batch) = packer.next_batch().unwrap() {
            learned.extend(batch.labels.into_iter().flatten().filter(|&label| label >= 0));
        }
        let tokenizer = candle_vlm_processor::TextTokenizer::from_folder(config.model_folder().unwrap()).unwrap();
        for digit in ["0", "1", "2"] {
            let ids = tokenizer.encode(digit, false).unwrap().ids;
            let count = learned.iter().filter(|&&label| i64::from(ids[ids.len() - 1]) == label).count();
            assert_eq!(count, 1, "{digit} in {learned:?}");
        }

        let reports = train(&job, &config, &|_, _| Ok(())).unwrap().reports;
        assert_eq!((job.steps(), reports.len()), (2, 2));
        for (report, epoch) in reports.iter().zip([1.0, 2.0]) {
            assert_eq!((report.label_tokens, report.epoch), (learned.len(), Some(epoch)));
            assert!(report.loss.is_finite() && report.loss > 0.0, "{report:?}");
        }
        assert!(reports[1].loss < reports[0].loss, "{reports:?}");
    }
}

/// All weight files below a folder.
fn weight_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(weight_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn assert_names_its_format(file: &Path) {
    let bytes = fs::read(file).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let format = header.metadata().as_ref().and_then(|metadata| metadata.get("format"));
    assert_eq!(format.map(String::as_str), Some("pt"), "{}", file.display());
}

#[test]
fn every_weight_file_names_its_format() {
    for lora in [false, true] {
        let dir = folder("gemma4-dense");
        let mut config = Config { save_every: Some(1), ..config(&dir) };
        if lora {
            set(&mut config, &[("--lora-rank", "2"), ("--lora-merge", "true")]);
        }
        run(&config, &|_, _| Ok(())).unwrap();
        let files = weight_files(&config.out);
        let state = if lora { "adapter_model.safetensors" } else { "model.safetensors" };
        let step = |step: usize, file: &str| format!("{CHECKPOINTS_FOLDER}/step-{step:08}/{file}");
        let optimizer = "training/optimizer.safetensors";
        let mut expected = vec![step(1, state), step(1, optimizer), step(2, state), step(2, optimizer)];
        expected.push(format!("{CHECKPOINT_FOLDER}/model.safetensors"));
        expected.extend(lora.then(|| format!("{ADAPTER_FOLDER}/adapter_model.safetensors")));
        let expected: BTreeSet<PathBuf> = expected.iter().map(|file| config.out.join(file)).collect();
        assert_eq!(files.iter().cloned().collect::<BTreeSet<_>>(), expected);
        files.iter().for_each(|file| assert_names_its_format(file));
    }
}

#[test]
fn every_shard_names_its_format() {
    let dir = folder("gemma4-dense");
    let mut config = config(&dir);
    let shards = |name: &str| {
        let folder = dir.path().join(name);
        let files = weight_files(&folder);
        assert!(files.len() > 3, "{files:?}");
        files.iter().for_each(|file| assert_names_its_format(file));
    };
    let options = SaveOptions::new().max_shard_bytes(50_000);
    let job = Job::prepare(&config).unwrap();
    job.weights(&config).unwrap().save_with(&dir.path().join("full"), job.model.as_ref(), &options).unwrap();
    shards("full");
    set(&mut config, &[("--lora-rank", "2")]);
    job.weights(&config).unwrap().save_merged(&dir.path().join("merged"), job.model.as_ref(), &options).unwrap();
    shards("merged");
}
