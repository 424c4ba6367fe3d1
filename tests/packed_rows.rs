//! A document gives the same alone and packed with others, by the recipe's own packing: `CP(A) == CP([A, B])[A]`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_cp::{Communicator, CpContext, LayoutKind};
use candle_finetune::family::VlmModel;
use candle_finetune::{Batch, Config, Error, Job};
use candle_qwen3_5::Recompute;
use tempfile::TempDir;

/// Documents with two pictures, none, one, and a text.
const LINES: [&str; 4] = [
    r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "square.png"}, {"type": "text", "text": "What is it?"}]}, {"role": "assistant", "content": "A square."}, {"role": "user", "content": [{"type": "text", "text": "And here?"}, {"type": "image", "image": "tall.png"}]}, {"role": "assistant", "content": "A tower."}]}"#,
    r#"{"prompt": "Is it tall?", "completion": "No."}"#,
    r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "tall.png"}, {"type": "text", "text": "Is it tall?"}]}, {"role": "assistant", "content": "Yes, it is."}]}"#,
    r#"{"text": "Tides rise and fall."}"#,
];
/// All of them, and a tail of padding.
const ROW: usize = 401;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// A checkpoint folder with all files, and pictures beside it.
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
    for name in ["square.png", "tall.png"] {
        std::fs::copy(fixtures().join("imaging").join(name), dir.path().join(name)).unwrap();
    }
    dir
}

/// A run on these lines, and its first batch: one row.
fn packed(dir: &TempDir, lines: &[&str]) -> (Job, Config, Batch) {
    let data = dir.path().join("chats.jsonl");
    std::fs::write(&data, lines.join("\n")).unwrap();
    let config = Config {
        steps: Some(1),
        model: Some(dir.path().join("model")),
        data: Some(data),
        batch_rows: 1,
        seq_len: ROW,
        ..Config::default()
    };
    let job = Job::prepare(&config).unwrap();
    let batch = job.training(&config).next_training_batch().unwrap();
    (job, config, batch)
}

/// Places of a document in the only row.
fn places(batch: &Batch, document: i64) -> std::ops::Range<usize> {
    let row = &batch.documents[0];
    let start = row.iter().position(|&found| found == document).unwrap();
    start..start + row.iter().filter(|&&found| found == document).count()
}

/// Final hidden states of the row `[tokens][hidden]`, and the sum of its cross entropies.
fn computed(network: &dyn VlmModel, job: &Job, batch: &Batch, cp: usize, kind: LayoutKind) -> (Vec<Vec<f64>>, f64) {
    let run = |comm: Arc<dyn Communicator>| {
        let tokens = batch.tokens()?;
        let layout = kind.layout(&tokens, comm.size(), &job.model.layer_work())?;
        let context = CpContext::new(comm, layout, tokens)?;
        let hidden = network.hidden(batch, &context, &Recompute::off(), DType::F64, &Device::Cpu)?.detach();
        let labels = context.shard_labels(&batch.labels_bs(&Device::Cpu)?)?;
        let loss = context.comm().all_reduce_sum(&network.loss(&hidden, &labels)?.to_dtype(DType::F64)?)?;
        let hidden: Tensor = context.gather(&hidden, 1)?.squeeze(0)?;
        Ok::<_, Error>((hidden.to_vec2::<f64>()?, loss.to_scalar::<f64>()? * labels.count as f64))
    };
    threads::run(cp, &threads::Options::default(), run).unwrap().swap_remove(0)
}

fn check(family: &str) {
    let dir = folder(family);
    let alone: Vec<Batch> = LINES.iter().map(|line| packed(&dir, &[*line]).2).collect();
    let (job, config, all) = packed(&dir, &LINES);
    assert_eq!(all.documents[0].iter().max(), Some(&3), "{family}: {:?}", all.documents);
    assert_eq!((all.pictures.len(), all.documents[0].last()), (3, Some(&-1)), "{family}");
    let weights = job.weights(&Config { dtype: DType::F64, ..config }).unwrap();
    let network = job.model.model(&weights).unwrap();
    let (contiguous, head_tail) = (LayoutKind::Contiguous, LayoutKind::HeadTail);
    for (cp, layout) in [(1, contiguous), (3, contiguous), (3, head_tail)] {
        let (hidden, loss) = computed(network.as_ref(), &job, &all, cp, layout);
        let mut losses = 0.0;
        for document in 0..4 {
            let place = places(&all, document);
            let one = alone.iter().find(|one| {
                let own = places(one, 0);
                own.len() == place.len() && one.ids[0][own] == all.ids[0][place.clone()]
            });
            let one = one.expect("every document is a line");
            let (expected, loss) = computed(network.as_ref(), &job, one, cp, layout);
            losses += loss;
            let context = format!("{family}, cp {cp}, {layout}, document {document}");
            let pairs = hidden[place].iter().flatten().zip(expected[places(one, 0)].iter().flatten());
            let off = pairs.map(|(a, b)| (a - b).abs()).fold(0f64, |most, off| if off > most { off } else { most });
            assert!(off <= 1e-10, "{context}: off by {off:e}");
        }
        assert!((loss - losses).abs() <= 1e-10 * losses, "{family}, cp {cp}, {layout}: {loss} and {losses}");
    }
}

#[test]
fn documents_of_dense_models_do_not_see_each_other() {
    ["gemma4-dense", "qwen3_5-dense"].into_iter().for_each(check);
}

#[test]
fn documents_of_models_with_experts_do_not_see_each_other() {
    ["gemma4-moe", "qwen3_5-moe"].into_iter().for_each(check);
}
