//! After steps on several ranks, every rank has the same weights bit for bit, adapters or all of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_cp::LayoutKind;
use candle_cp::comm::threads;
use candle_finetune::{Config, Job, LoraSettings, Trainer};
use candle_gemma4::Part;
use tempfile::TempDir;

const CHATS: &str = r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "square.png"}, {"type": "text", "text": "What is it?"}]}, {"role": "assistant", "content": "A square."}]}
{"prompt": "Is it tall?", "completion": "No."}
{"text": "Tides rise and fall."}
"#;
const STEPS: usize = 3;

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
    std::fs::copy(fixtures().join("imaging/square.png"), dir.path().join("square.png")).unwrap();
    std::fs::write(dir.path().join("chats.jsonl"), CHATS).unwrap();
    dir
}

fn config(dir: &TempDir, cp: usize, layout: LayoutKind) -> Config {
    Config {
        cp,
        layout,
        steps: Some(STEPS),
        accumulate: 2,
        lr: Some(1e-2),
        model: Some(dir.path().join("model")),
        data: Some(dir.path().join("chats.jsonl")),
        batch_rows: 1,
        // Divides by neither 3 nor 4.
        seq_len: 151,
        ..Config::default()
    }
}

/// The bits of all trained tensors.
type Bits = BTreeMap<String, Vec<u32>>;

fn bits(trainer: &Trainer) -> Bits {
    let variables = trainer.weights().variables().iter();
    let values = variables.map(|(name, variable)| (name, variable.flatten_all().unwrap().to_vec1::<f32>().unwrap()));
    values.map(|(name, values)| (name.clone(), values.into_iter().map(f32::to_bits).collect())).collect()
}

/// Bits before and after the steps, by rank.
fn trained(config: &Config) -> Vec<[Bits; 2]> {
    let job = Job::prepare(config).unwrap();
    threads::run(config.cp, &threads::Options::default(), |comm| {
        let mut trainer = Trainer::new(&job, config, comm)?;
        let before = bits(&trainer);
        let mut batches = job.training(config);
        for _ in 0..STEPS {
            let step = [batches.next_training_batch()?, batches.next_training_batch()?];
            trainer.step(&step)?;
        }
        Ok::<_, candle_finetune::Error>([before, bits(&trainer)])
    })
    .unwrap()
}

/// Names of tensors that all steps left as they were, after a check that all ranks agree.
fn unmoved(config: &Config, context: &str) -> Vec<String> {
    let ranks = trained(config);
    assert_eq!(ranks.len(), config.cp);
    let [before, after] = &ranks[0];
    for (rank, other) in ranks.iter().enumerate() {
        for (name, bits) in after {
            assert!(before[name] == other[0][name], "{context}: rank {rank} begins with another {name}");
            assert!(bits == &other[1][name], "{context}: rank {rank} ends with another {name}");
        }
        assert_eq!(other[1].len(), after.len());
    }
    after.iter().filter(|(name, bits)| before[*name] == **bits).map(|(name, _)| name.clone()).collect()
}

#[test]
fn adapters_are_the_same_on_all_ranks_and_every_one_moves() {
    for family in ["gemma4-dense", "gemma4-effective", "qwen3_5-dense", "qwen3_5-moe"] {
        let dir = folder(family);
        for (cp, layout) in [(3, LayoutKind::HeadTail), (4, LayoutKind::Balanced), (3, LayoutKind::Contiguous)] {
            let mut config = config(&dir, cp, layout);
            let parts = vec![Part::Text, Part::Vision];
            config.lora = LoraSettings { rank: Some(3), dropout: 0.25, parts, ..config.lora };
            let context = format!("{family}, cp {cp}, {layout}");
            assert_eq!(unmoved(&config, &context), Vec::<String>::new(), "{context}");
        }
    }
}

#[test]
fn all_weights_are_the_same_on_all_ranks() {
    for (family, cp) in
        [("gemma4-dense", 3), ("gemma4-effective", 4), ("gemma4-moe", 3), ("qwen3_5-dense", 4), ("qwen3_5-moe", 3)]
    {
        let dir = folder(family);
        let context = format!("{family}, cp {cp}");
        let unmoved = unmoved(&config(&dir, cp, LayoutKind::HeadTail), &context);
        // No sample has a clip, and there are experts that no token chose.
        let expected = |name: &String| name.contains("audio") || name.contains("experts");
        assert!(unmoved.iter().all(expected), "{context}: {unmoved:?}");
    }
}
