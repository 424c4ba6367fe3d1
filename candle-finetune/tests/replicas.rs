//! Replicas of the model, and optimizer state that is spread over ranks: the same training, whoever does what of it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::threads;
use candle_finetune::{
    AdamWConfig, Batch, Config, Control, Job, StepReport, Trainer, resume, resumed_settings, run_controlled,
};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name)
}

/// Seven samples of different lengths, two of them with a picture.
fn data(dir: &Path) -> PathBuf {
    std::fs::copy(fixture("imaging/square.png"), dir.join("square.png")).unwrap();
    let line = |i: usize| match i {
        2 | 5 => {
            format!("{{\"prompt\": \"<|image|> {i}?\", \"completion\": \"Square.\", \"images\": [\"square.png\"]}}\n")
        }
        i => format!("{{\"prompt\": \"{}\", \"completion\": \"Say {i}.\"}}\n", "and so on ".repeat(i % 4)),
    };
    let path = dir.join("seven.jsonl");
    std::fs::write(&path, (0..7).map(line).collect::<String>()).unwrap();
    path
}

fn config(dir: &TempDir, name: &str, changes: &[(&str, &str)]) -> Config {
    let mut config = Config {
        cp: 1,
        model: Some(fixture("gemma4-dense/checkpoint")),
        data: Some(data(dir.path())),
        out: dir.path().join(name),
        batch_rows: 1,
        seq_len: 64,
        lr: Some(1e-3),
        epochs: Some(2),
        // Where gradients are next to nothing a smaller one makes large differences of their rounding.
        optimizer: AdamWConfig { eps: 1e-5, ..AdamWConfig::default() },
        ..Config::default()
    };
    changes.iter().for_each(|(name, value)| config.set(name, value).unwrap());
    config
}

/// What training gave.
struct Outcome {
    /// Of every step of this part of the run, by rank.
    reports: Vec<Vec<StepReport>>,
    weights: BTreeMap<String, Tensor>,
}

/// Trains, or goes on, perhaps until a step.
fn go(config: &Config, goes_on: bool, until: Option<usize>) -> Outcome {
    let reports = Mutex::new(vec![Vec::new(); config.ranks()]);
    let stop = AtomicBool::new(false);
    let observer = |rank: usize, report: &StepReport| {
        reports.lock().unwrap()[rank].push(*report);
        stop.fetch_or(until == Some(report.step), Ordering::Relaxed);
        Ok(())
    };
    let control = Control { observer: &observer, stop: &stop };
    match goes_on {
        true => resume(config, &control).unwrap(),
        false => run_controlled(config, &control).unwrap(),
    };
    let folder = config.out.join("checkpoint");
    let weights = match until {
        Some(_) => BTreeMap::new(),
        None => candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)
            .unwrap()
            .into_iter()
            .collect(),
    };
    Outcome { reports: reports.into_inner().unwrap(), weights }
}

fn train(dir: &TempDir, name: &str, changes: &[(&str, &str)]) -> Outcome {
    go(&config(dir, name, changes), false, None)
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

/// Losses, norms and counts of every step, the same on all ranks; weights. Within `tolerance` of each other, 0 for bits.
fn same(found: &Outcome, expected: &Outcome, tolerance: f64, what: &str) {
    let close = |a: f64, b: f64| (a - b).abs() <= tolerance * a.abs().max(b.abs());
    let wanted = &expected.reports[0];
    for (rank, reports) in found.reports.iter().enumerate() {
        assert_eq!(reports.len(), wanted.len(), "{what}: steps of rank {rank}");
        for (found, wanted) in reports.iter().zip(wanted) {
            assert!(close(found.loss, wanted.loss), "{what}, rank {rank}: {found:?} {wanted:?}");
            assert!(close(found.grad_norm, wanted.grad_norm), "{what}, rank {rank}: {found:?} {wanted:?}");
            let counts = |report: &StepReport| (report.step, report.epoch, report.tokens, report.label_tokens);
            assert_eq!(counts(found), counts(wanted), "{what}, rank {rank}");
        }
    }
    assert!(found.weights.keys().eq(expected.weights.keys()), "{what}");
    for (name, tensor) in &found.weights {
        for (a, b) in numbers(tensor).into_iter().zip(numbers(&expected.weights[name])) {
            assert!(
                f64::from((a - b).abs()) <= tolerance * f64::from(a.abs().max(1.0)),
                "{what}: {name} has {a} and {b}"
            );
        }
    }
}

/// A tight bound on the norm, so that clipping with another norm would show. The last step of an
/// epoch has fewer batches than the others.
#[test]
fn replicas_and_spread_state_train_as_one_rank_does() {
    let dir = tempfile::tempdir().unwrap();
    for (packed, seq_len) in [("short rows", "96"), ("packed", "160")] {
        let run = |name: &str, changes: &[(&str, &str)]| {
            let common = [("--seq-len", seq_len), ("--train.max_grad_norm", "0.05")];
            train(&dir, &format!("{name}-{seq_len}"), &[&common[..], changes].concat())
        };
        let one = run("one", &[("--accumulate", "4")]);
        assert!(one.reports[0].iter().all(|report| report.grad_norm > 0.1), "nothing would be clipped");
        for (cp, dp, accumulate) in
            [("2", "1", "4"), ("4", "1", "4"), ("1", "2", "2"), ("2", "2", "2"), ("1", "4", "1"), ("3", "2", "2")]
        {
            for (zero, recompute) in [("0", "false"), ("1", "true")] {
                let parallel = [
                    ("--cp", cp),
                    ("--dp", dp),
                    ("--accumulate", accumulate),
                    ("--zero", zero),
                    ("--recompute", recompute),
                ];
                let found = run(&format!("{cp}-{dp}-{zero}"), &parallel);
                assert_eq!(found.reports.len(), cp.parse::<usize>().unwrap() * dp.parse::<usize>().unwrap());
                same(&found, &one, 1e-5, &format!("{packed}, cp {cp}, dp {dp}, zero {zero}"));
            }
        }
    }
}

/// More replicas than an epoch has batches: some never get any.
#[test]
fn replicas_without_a_batch_take_part() {
    let dir = tempfile::tempdir().unwrap();
    let one = train(&dir, "one", &[("--accumulate", "4"), ("--seq-len", "256")]);
    assert!(one.reports[0].iter().all(|report| report.step <= 2), "two epochs of one step");
    let many = [("--dp", "4"), ("--cp", "2"), ("--seq-len", "256"), ("--zero", "1"), ("--recompute", "true")];
    same(&train(&dir, "many", &many), &one, 1e-5, "four replicas for one batch");
}

#[test]
fn five_samples_in_two_epochs_end_all_ranks_at_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    for seq_len in ["24", "64"] {
        let set = |accumulate: &str, more: &[(&str, &str)]| {
            let data = fixture("cases/five.jsonl").display().to_string();
            let common = [("--data", data.as_str()), ("--seq-len", seq_len), ("--accumulate", accumulate)];
            train(&dir, &format!("{seq_len}-{accumulate}"), &[&common[..], more].concat())
        };
        let one = set("4", &[]);
        assert_eq!(one.reports[0].len(), if seq_len == "24" { 4 } else { 2 });
        same(&set("2", &[("--dp", "2"), ("--cp", "2")]), &one, 1e-5, seq_len);
    }
}

#[test]
fn spread_state_gives_the_same_bits_and_a_share_of_the_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for (dtype, lora) in [("f32", None), ("bf16", None), ("f32", Some("4"))] {
        let lora = lora.map_or(Vec::new(), |rank| vec![("--lora-rank", rank), ("--lora-merge", "true")]);
        let parallel =
            [&[("--cp", "2"), ("--dp", "2"), ("--dtype", dtype), ("--optimizer.weight_decay", "0.3")], &lora[..]]
                .concat();
        let run = |zero: &'static str| {
            train(&dir, &format!("{dtype}-{zero}-{}", lora.len()), &[&parallel[..], &[("--zero", zero)]].concat())
        };
        same(&run("1"), &run("0"), 0.0, dtype);

        let bytes = |zero: &'static str| {
            let config = config(&dir, "none", &[&parallel[..], &[("--zero", zero)]].concat());
            let job = Job::prepare(&config).unwrap();
            threads::run(4, &threads::Options::default(), |comm| {
                Ok::<_, candle_finetune::Error>(Trainer::new(&job, &config, comm)?.optimizer().own().state_bytes())
            })
            .unwrap()
        };
        let (spread, whole) = (bytes("1"), bytes("0"));
        assert_eq!(spread.iter().sum::<usize>(), whole[0]);
        let most = spread.iter().max().unwrap();
        assert!(*most <= whole[0] / 4 + 1024, "{spread:?} of {whole:?}");
    }
}

/// A checkpoint is the same whoever wrote it, and any number of ranks goes on with it.
#[test]
fn other_ranks_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let common = [("--accumulate", "4"), ("--seq-len", "48"), ("--epochs", "6")];
    let whole = train(&dir, "whole", &common);
    let parallel = [("--cp", "2"), ("--dp", "2"), ("--accumulate", "2"), ("--zero", "1")];
    for (name, more) in [("spread", &parallel[..]), ("alone", &[])] {
        for (after, then) in [
            ("alone", &[("--cp", "1"), ("--dp", "1"), ("--accumulate", "4"), ("--zero", "0")]),
            ("two", &[("--cp", "1"), ("--dp", "2"), ("--accumulate", "2"), ("--zero", "1")]),
        ] {
            let first = config(&dir, &format!("{name}-{after}"), &[&common[..], more].concat());
            let before = go(&first, false, Some(3));
            let mut next = resumed_settings(&first.out).unwrap();
            then.iter().for_each(|(name, value)| next.set(name, value).unwrap());
            let rest = go(&next, true, None);
            assert_eq!((before.reports[0].len(), rest.reports[0].len()), (3, 3));
            let mut found = Outcome { weights: rest.weights, reports: vec![before.reports[0].clone()] };
            found.reports[0].extend(&rest.reports[0]);
            same(&found, &whole, 1e-5, &format!("{name}, then {after}"));
        }
    }
    let first = config(&dir, "other", &[("--accumulate", "4")]);
    go(&first, false, Some(1));
    let mut next = resumed_settings(&first.out).unwrap();
    next.set("--accumulate", "3").unwrap();
    let control = Control { observer: &|_, _| Ok(()), stop: &AtomicBool::new(false) };
    let error = resume(&next, &control).unwrap_err().to_string();
    assert!(error.starts_with("--accumulate \"3\": allowed is what makes 4 batches in a step"), "{error}");
    assert!(error.ends_with("use --accumulate 4 beside 1 replicas of the model"), "{error}");
    next.set("--accumulate", "4").unwrap();
    for (dp, fix) in [("2", "use --accumulate 2 beside 2"), ("3", "than 3: a divisor of 4")] {
        next.set("--dp", dp).unwrap();
        let error = resume(&next, &control).unwrap_err().to_string();
        assert!(error.starts_with("--accumulate \"4\"") && error.contains(fix), "{error}");
    }
}

/// What rank 0 collects from all ranks is what one with all of the state writes.
#[test]
fn a_checkpoint_has_the_same_bytes_whoever_has_the_state() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in ["f32", "bf16"] {
        let files = |zero: &str| {
            let changes = [("--cp", "2"), ("--dp", "2"), ("--dtype", dtype), ("--zero", zero), ("--save-every", "2")];
            let config = config(&dir, &format!("{dtype}-{zero}"), &changes);
            go(&config, false, None);
            let folder = config.out.join("checkpoints/step-00000002");
            ["model.safetensors", "training/optimizer.safetensors"]
                .map(|name| std::fs::read(folder.join(name)).unwrap())
        };
        assert!(files("0") == files("1"), "{dtype}");
    }
}

/// Layers that lend keys, layers with experts, layers with states: gradients leave them layer by layer.
#[test]
fn every_family_gives_gradients_away() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["gemma4-effective", "gemma4-moe", "gemma4-unified", "qwen3_5-dense", "qwen3_5-moe"] {
        // Some come without a tokenizer.
        let model = dir.path().join(name);
        std::fs::create_dir(&model).unwrap();
        let dense = format!("{}-dense", name.split('-').next().unwrap());
        for from in [dense.as_str(), name] {
            for file in fixture(from).join("checkpoint").read_dir().unwrap() {
                let path = file.unwrap().path();
                let file = path.file_name().unwrap();
                // How pictures are cut is each model's own.
                if from == name || !file.to_string_lossy().contains("processor") {
                    std::fs::copy(&path, model.join(file)).unwrap();
                }
            }
        }
        let model = model.display().to_string();
        let line =
            |i: usize| format!("{{\"prompt\": \"{}\", \"completion\": \"Say {i}.\"}}\n", "and so on ".repeat(i % 4));
        let text = dir.path().join("text.jsonl");
        std::fs::write(&text, (0..6).map(line).collect::<String>()).unwrap();
        let set = |recompute: &str, zero: &str| {
            let changes = [
                ("--model", model.as_str()),
                ("--data", text.to_str().unwrap()),
                ("--cp", "2"),
                ("--dp", "2"),
                ("--accumulate", "2"),
                ("--recompute", recompute),
                ("--zero", zero),
            ];
            train(&dir, &format!("run-{name}-{recompute}"), &changes)
        };
        same(&set("true", "1"), &set("false", "0"), 1e-5, name);
    }
}

#[test]
fn ranks_with_other_batches_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir, "differ", &[("--cp", "2"), ("--dp", "2")]);
    let job = Job::prepare(&config).unwrap();
    let batches: Vec<_> = {
        let mut packer = job.training(&config);
        (0..2).map(|_| packer.next_training_batch().unwrap()).collect()
    };
    let run = |odd: &(dyn Fn(&mut Vec<Batch>) + Sync)| {
        let result = threads::run(4, &threads::Options::default(), |comm| {
            let rank = comm.rank();
            let mut mine = vec![batches[rank / 2].clone()];
            if rank == 3 {
                odd(&mut mine);
            }
            Trainer::new(&job, &config, comm)?.step(&mine)
        });
        result.map(|reports| reports[0]).map_err(|error| error.to_string())
    };
    assert!(run(&|_| {}).unwrap().loss > 0.0);
    type Odd = dyn Fn(&mut Vec<Batch>) + Sync;
    let cases: [(&str, &Odd); 3] = [
        ("the tokens", &|b: &mut Vec<Batch>| b[0].ids[0][3] += 1),
        ("the labels", &|b: &mut Vec<Batch>| b[0].labels[0][3] += 1),
        ("the documents", &|b: &mut Vec<Batch>| {
            let last = b[0].documents[0].iter().rposition(|&document| document >= 0).unwrap();
            b[0].documents[0][last] = -1;
        }),
    ];
    for (part, odd) in cases {
        let text = run(odd).unwrap_err();
        assert!(text.contains(&format!("{part} of the batches of step 1")), "{part}: {text}");
        assert!(text.contains("on rank 2") || text.contains("on rank 3"), "{text}");
    }
}
