//! From a model's name on a Hub to a folder that gives what training ended with. The parity tool judges the folder; its
//! case file is made from the weights that training left in memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::Local;
use candle_cp::{CpContext, LayoutKind};
use candle_cp_examples::case::{Tensors, read_tensors, write_tensors};
use candle_cp_examples::cli::{Arguments, explain};
use candle_finetune::family::{Family, VlmConfig};
use candle_finetune::hub::{HubOptions, PullEvent};
use candle_finetune::{Batch, CHECKPOINT_FOLDER, Config, Job, LoraSettings, METRICS_FILE, Trained, run, train};
use candle_gemma4::{Recompute, Weights};
use clap::Parser;
use tempfile::TempDir;

// One Hub for several tests; this one does not use every behaviour of it.
#[allow(dead_code)]
#[path = "../candle-finetune/tests/fake_hub/mod.rs"]
mod fake_hub;

use fake_hub::{Body, FakeHub};

const CHATS: &str = r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "square.png"}, {"type": "text", "text": "What is it?"}]}, {"role": "assistant", "content": "A square."}]}
{"prompt": "Is it tall?", "completion": "No."}
{"text": "Tides rise and fall."}
"#;
/// Bytes of the weights that come before the connection breaks.
const CUT: usize = 100_000;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// A Hub that has the dense model of a family.
fn hub(family: Family) -> FakeHub {
    let entries = fixture(&format!("{family}-dense/checkpoint")).read_dir().unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<(String, Vec<u8>)> = entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_string(), std::fs::read(path).unwrap()))
        .collect();
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect();
    FakeHub::start(&files)
}

fn options(hub: &FakeHub, dir: &TempDir) -> HubOptions {
    let pause = Duration::from_millis(1);
    HubOptions { endpoint: hub.endpoint(), retry_pause: pause, ..HubOptions::new(dir.path().join("cache")) }
}

/// A folder with chats and a picture, and settings of a run on them that names the model only.
fn named() -> (TempDir, Config) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("imaging/square.png"), dir.path().join("square.png")).unwrap();
    std::fs::write(dir.path().join("chats.jsonl"), CHATS).unwrap();
    let config = Config {
        cp: 2,
        steps: Some(3),
        // So high that the model of the beginning is told from that of the end by far.
        lr: Some(2e-2),
        model: Some(PathBuf::from("org/tiny@v1.0")),
        data: Some(dir.path().join("chats.jsonl")),
        out: dir.path().join("out"),
        batch_rows: 1,
        seq_len: 192,
        ..Config::default()
    };
    (dir, config)
}

/// What a model in memory computes from a batch in plain forward passes on one rank, as a case file.
fn golden(family: Family, model: &dyn VlmConfig, weights: &Weights, batch: &Batch) -> candle_finetune::Result<Tensors> {
    let (cpu, tokens) = (Device::Cpu, batch.tokens()?);
    let layout = LayoutKind::Contiguous.layout(&tokens, 1, &model.layer_work())?;
    let context = CpContext::new(Arc::new(Local::new()), layout, tokens)?;
    let network = model.model(weights)?;
    let hidden_bsh = network.hidden(batch, &context, &Recompute::off(), DType::F32, &cpu)?;
    let ids: Vec<Vec<i64>> = batch.ids.iter().map(|row| row.iter().map(|&id| i64::from(id)).collect()).collect();
    let labels = context.shard_labels(&batch.labels_bs(&cpu)?)?;
    let real: Vec<Vec<i64>> =
        batch.documents.iter().map(|row| row.iter().map(|&id| i64::from(id >= 0)).collect()).collect();
    let tensors = [
        ("input.input_ids", Tensor::new(ids, &cpu)?),
        ("input.labels", batch.labels_bs(&cpu)?),
        ("input.attention_mask", Tensor::new(real, &cpu)?),
        ("input.doc_ids", Tensor::new(batch.documents.clone(), &cpu)?),
        ("out.logits", network.logits(&hidden_bsh)?),
        ("out.loss_mean", network.loss(&hidden_bsh, &labels)?.reshape(1)?),
        ("out.num_valid", Tensor::new(&[labels.count as i64], &cpu)?),
    ];
    let named = tensors.into_iter().chain(picture(family, batch)?);
    Ok(named.map(|(name, tensor)| (name.to_string(), tensor.detach())).collect())
}

/// The only picture of a batch, as the family's case files have it.
fn picture(family: Family, batch: &Batch) -> candle_finetune::Result<[(&'static str, Tensor); 2]> {
    let [picture] = batch.pictures.as_slice() else { panic!("{} pictures", batch.pictures.len()) };
    let (patches, cpu) = (picture.patches, &Device::Cpu);
    let pixels = Tensor::new(picture.pixels.as_slice(), cpu)?.reshape((patches, picture.patch_dim))?;
    Ok(match family {
        Family::Gemma4 => [
            ("input.pixel_values", pixels.unsqueeze(0)?),
            ("input.image_position_ids", Tensor::from_vec(picture.positions.concat(), (1, patches, 2), cpu)?),
        ],
        Family::Qwen3_5 => [
            ("input.pixel_values", pixels),
            ("input.image_grid_thw", Tensor::new(&[picture.grid_thw.map(|side| side as i64)], cpu)?),
        ],
    })
}

/// Runs the tool's command line on a folder; whether all is within tolerance, and what it printed.
fn parity(folder: &Path, case: &Path, cp: usize) -> (bool, String) {
    let words = ["parity", folder.to_str().unwrap(), case.to_str().unwrap(), "--cp", &cp.to_string()].map(String::from);
    let mut printed = Vec::new();
    let passed = Arguments::try_parse_from(words).unwrap().run(&mut printed);
    (passed.unwrap_or_else(|error| panic!("{}", explain(&error))), String::from_utf8(printed).unwrap())
}

/// Pulls, trains and saves by one call; then trains again and keeps the weights, which the first call does not give.
fn pulled_and_trained(family: Family, dir: &TempDir, config: &mut Config) -> (Trained, PathBuf) {
    let hub = hub(family);
    hub.repository().bodies = [Body::Cut(CUT)].into();
    let mut resumed = Vec::new();
    let mut watch = |event: &PullEvent| {
        if let PullEvent::Resumed { file, from } = event {
            resumed.push((file.to_string(), *from));
        }
    };
    config.resolve(&options(&hub, dir), &mut watch).unwrap();
    assert_eq!(resumed, [("model.safetensors".to_string(), CUT as u64)]);
    let log = hub.take_log();
    let at_storage = log.iter().filter(|seen| seen.at_storage);
    let ranges: Vec<String> = at_storage.filter_map(|seen| seen.headers.get("range").cloned()).collect();
    assert_eq!(ranges, [format!("bytes={CUT}-")]);
    let pulled = config.model_folder().unwrap().to_path_buf();
    assert!(pulled.starts_with(dir.path().join("cache/models--org--tiny/snapshots")));
    drop(hub);

    let summary = run(config, &|_, _| Ok(())).unwrap();
    let trained = train(&Job::prepare(config).unwrap(), config, &|_, _| Ok(())).unwrap();
    assert_eq!((trained.reports.len(), summary.loss), (3, trained.reports[2].loss));
    assert!(config.out.join(METRICS_FILE).is_file());
    (trained, pulled)
}

/// The saved folder gives what the weights in memory give, and the folder that training began from does not.
fn check_saved(family: Family, dir: &TempDir, config: &Config, trained: &Trained, pulled: &Path) -> PathBuf {
    let job = Job::prepare(config).unwrap();
    let batch = job.training(config).next_training_batch().unwrap();
    assert_eq!((batch.pictures.len(), batch.documents[0].iter().max()), (1, Some(&2)));
    let case = dir.path().join("case.safetensors");
    write_tensors(&case, &golden(family, job.model.as_ref(), &trained.weights, &batch).unwrap()).unwrap();
    let saved = config.out.join(CHECKPOINT_FOLDER);
    for cp in [1, 2] {
        let (passed, table) = parity(&saved, &case, cp);
        assert!(passed, "cp {cp}\n{table}");
        for name in ["out.logits", "out.loss_mean", "out.num_valid"] {
            assert!(table.contains(name), "{name} is not compared:\n{table}");
        }
        let (passed, table) = parity(pulled, &case, cp);
        assert!(!passed && table.contains("2 past tolerance"), "{table}");
    }
    case
}

#[test]
fn a_name_on_the_hub_becomes_a_folder_that_gives_what_training_ended_with() {
    let (dir, mut config) = named();
    let (trained, pulled) = pulled_and_trained(Family::Gemma4, &dir, &mut config);
    let case = check_saved(Family::Gemma4, &dir, &config, &trained, &pulled);

    // Every tensor of the folder counts.
    let changed = dir.path().join("changed");
    std::fs::create_dir(&changed).unwrap();
    let saved = config.out.join(CHECKPOINT_FOLDER);
    std::fs::copy(saved.join("config.json"), changed.join("config.json")).unwrap();
    let tensors = read_tensors(&saved.join("model.safetensors")).unwrap();
    assert_eq!(tensors.len(), 115);
    for name in tensors.keys().filter(|name| every_kind(name)) {
        let mut wrong = tensors.clone();
        wrong.insert(name.clone(), disturbed(&tensors[name]));
        write_tensors(&changed.join("model.safetensors"), &wrong).unwrap();
        let (passed, table) = parity(&changed, &case, 2);
        assert!(!passed, "{name} was changed and nothing was noticed\n{table}");
    }
}

#[test]
fn a_qwen_from_the_hub_is_trained_and_saved_with_or_without_adapters() {
    for rank in [None, Some(4)] {
        let (dir, mut config) = named();
        config.lora = LoraSettings { rank, merge: rank.is_some(), ..config.lora };
        let (trained, pulled) = pulled_and_trained(Family::Qwen3_5, &dir, &mut config);
        check_saved(Family::Qwen3_5, &dir, &config, &trained, &pulled);
    }
}

/// Tensors of two kinds of layers and of a vision layer, and what belongs to no layer.
fn every_kind(name: &str) -> bool {
    let layers = ["language_model.layers.4.", "language_model.layers.5.", "vision_tower.encoder.layers.0."];
    // The norm after the last layer takes its scalar back.
    let scaled_back = name == "model.language_model.layers.5.layer_scalar";
    !scaled_back && (!name.contains(".layers.") || layers.iter().any(|layer| name.contains(layer)))
}

/// Other numbers, of no pattern that a norm would take back.
fn disturbed(tensor: &Tensor) -> Tensor {
    let mut entries = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    entries.iter_mut().enumerate().for_each(|(place, entry)| *entry += 0.5 * (place as f32 * 0.7).cos());
    Tensor::from_vec(entries, tensor.dims(), &Device::Cpu).unwrap()
}

#[test]
fn merged_adapters_give_what_the_model_with_adapters_gives() {
    for dropout in [0.0, 0.1] {
        let (dir, mut config) = named();
        config.lora = LoraSettings { rank: Some(4), alpha: Some(8.0), dropout, merge: true, ..config.lora };
        let (trained, pulled) = pulled_and_trained(Family::Gemma4, &dir, &mut config);
        assert!(trained.weights.lora().is_some());
        check_saved(Family::Gemma4, &dir, &config, &trained, &pulled);
    }
}

#[test]
fn what_is_wrong_is_told_before_anything_is_pulled() {
    let (hub, (dir, named)) = (hub(Family::Gemma4), named());
    let options = options(&hub, &dir);
    let error = Config { steps: Some(0), ..named.clone() }.resolve(&options, &mut |_| ()).unwrap_err();
    assert!(error.to_string().starts_with("--steps \"0\"") && hub.take_log().is_empty(), "{error}");
    let mut missing = Config { model: Some(PathBuf::from("org/missing")), ..named };
    let error = missing.resolve(&options, &mut |_| ()).unwrap_err();
    assert!(error.is_usage() && error.to_string().starts_with("--model: there is no folder org/missing"), "{error}");
}
