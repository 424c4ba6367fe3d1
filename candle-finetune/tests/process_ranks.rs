//! Ranks as processes: here each is a thread with a run of its own, which shares nothing with the others but the
//! communicator and the disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Device;
use candle_cp::comm::threads;
use candle_finetune::{
    Config, Control, Error, LOSS_CURVE_FILE, METRICS_FILE, Ranks, Result, StepReport, Summary, layered_settings,
    resume_on, run, run_on,
};
use tempfile::TempDir;

const RANKS: usize = 3;
const STEPS: usize = 6;
const STOP_AFTER: usize = 3;

/// A folder with a data file.
fn folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let line = |i: usize| format!("{{\"prompt\": \"{}\", \"completion\": \"Say {i}.\"}}\n", "and on ".repeat(i % 4));
    std::fs::write(dir.path().join("data.jsonl"), (0..10).map(line).collect::<String>()).unwrap();
    dir
}

fn config(dir: &TempDir, out: &str, changes: &[(&str, &str)]) -> Config {
    let mut config = Config {
        cp: RANKS,
        model: Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint")),
        data: Some(dir.path().join("data.jsonl")),
        out: dir.path().join(out),
        steps: Some(STEPS),
        warmup: Some(1),
        batch_rows: 1,
        seq_len: 64,
        lr: Some(1e-3),
        ..Config::default()
    };
    changes.iter().for_each(|(name, value)| config.set(name, value).unwrap());
    config
}

/// What `process` gives on every rank.
fn processes<T: Send>(process: impl Fn(usize, &Ranks) -> T + Sync) -> Vec<T> {
    let ranks = |comm: std::sync::Arc<dyn candle_cp::Communicator>| {
        let rank = comm.rank();
        Ok::<_, candle_cp::Error>(process(rank, &Ranks::Process { comm, device: Device::Cpu }))
    };
    threads::run(RANKS, &threads::Options::default(), ranks).unwrap()
}

/// A run without anybody who watches.
fn plain(config: &Config, ranks: &Ranks) -> Result<Summary> {
    run_on(config, &Control { observer: &|_, _| Ok(()), stop: &AtomicBool::new(false) }, ranks)
}

/// What the metrics file says that does not depend on the clock, the memory or how long messages took.
fn metrics(out: &Path) -> Vec<BTreeMap<String, serde_json::Value>> {
    let text = std::fs::read_to_string(out.join(METRICS_FILE)).unwrap();
    let kept = ["step", "epoch", "loss", "grad_norm", "lr", "tokens", "label_tokens", "val_loss", "val_tokens"];
    let line = |line: &str| {
        let mut all: BTreeMap<String, serde_json::Value> = serde_json::from_str(line).unwrap();
        all.retain(|name, _| kept.contains(&name.as_str()));
        all
    };
    text.lines().map(line).collect()
}

fn weights(out: &Path) -> Vec<u8> {
    std::fs::read(out.join("checkpoint/model.safetensors")).unwrap()
}

fn names(folder: &Path) -> Vec<PathBuf> {
    let mut names: Vec<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into()).collect();
    names.sort();
    names
}

#[test]
fn processes_train_as_threads_do_and_rank_0_alone_writes() {
    let dir = folder();
    let changes =
        [("--validation-share", "0.2"), ("--validate-every", "3"), ("--save-every", "3"), ("--tensorboard", "true")];
    let whole = config(&dir, "threads", &changes);
    let expected = run(&whole, &|_, _| Ok(())).unwrap();
    let summaries = processes(|rank, ranks| {
        // Only that of rank 0 is used.
        let config = config(&dir, &format!("processes-{rank}"), &changes);
        plain(&config, ranks).unwrap()
    });
    let out = dir.path().join("processes-0");
    assert_eq!(metrics(&out), metrics(&whole.out));
    assert_eq!(weights(&out), weights(&whole.out));
    assert_eq!(names(&out), names(&whole.out));
    assert_eq!(names(&out.join("checkpoints")), names(&whole.out.join("checkpoints")));
    for (rank, summary) in summaries.iter().enumerate() {
        assert_eq!((summary.loss, summary.steps, summary.stopped), (expected.loss, STEPS, false));
        assert_eq!(dir.path().join(format!("processes-{rank}")).exists(), rank == 0);
    }
    assert_eq!(summaries[0].best_val_loss, expected.best_val_loss);
}

#[test]
fn a_stopped_run_goes_on_with_all_processes() {
    let dir = folder();
    let whole = config(&dir, "whole", &[]);
    run(&whole, &|_, _| Ok(())).unwrap();
    let broken = config(&dir, "broken", &[]);
    let summaries = processes(|_, ranks| {
        let stop = AtomicBool::new(false);
        // Rank 0 alone is asked to stop.
        let observer = |rank: usize, report: &StepReport| {
            stop.fetch_or(rank == 0 && report.step == STOP_AFTER, Ordering::Relaxed);
            Ok(())
        };
        run_on(&broken, &Control { observer: &observer, stop: &stop }, ranks).unwrap()
    });
    assert!(summaries.iter().all(|summary| summary.stopped && summary.steps == STOP_AFTER));
    assert!(!broken.out.join("checkpoint").exists());
    let out = broken.out.display().to_string();
    let summaries = processes(|rank, ranks| {
        let (rank, size) = (rank.to_string(), RANKS.to_string());
        let place = |name: &str| match name {
            "RANK" | "LOCAL_RANK" => Some(rank.clone()),
            "WORLD_SIZE" => Some(size.clone()),
            "MASTER_ADDR" => Some("localhost".to_string()),
            "MASTER_PORT" => Some("29500".to_string()),
            _ => None,
        };
        let config = layered_settings(Config::default(), None, &[("--out", &out)], true, place).unwrap();
        assert_eq!(config.launch.is_first(), rank == "0");
        assert_eq!((config.steps, config.seq_len), (Some(STEPS), 64));
        resume_on(&config, &Control { observer: &|_, _| Ok(()), stop: &AtomicBool::new(false) }, ranks).unwrap()
    });
    assert!(summaries.iter().all(|summary| !summary.stopped && summary.steps == STEPS));
    assert_eq!(metrics(&broken.out), metrics(&whole.out));
    assert_eq!(weights(&broken.out), weights(&whole.out));
}

/// Ends with the rank's own error where it failed, and with an echo of it elsewhere.
fn fails_on<T: std::fmt::Debug>(failing: usize, results: Vec<Result<T>>, told: &str) {
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.unwrap_err();
        let text = error.to_string();
        assert!(text.contains(told), "rank {rank}: {text}");
        let cause = if let Error::AtStep { cause, .. } = &error { cause } else { &error };
        let echo = matches!(cause, Error::Cp(error) if error.is_peer_failure());
        assert_eq!(echo, rank != failing, "rank {rank}: {text}");
        assert!(rank == failing || text.contains(&format!("rank {failing} failed")), "rank {rank}: {text}");
    }
}

#[test]
fn what_one_process_lacks_ends_all_before_anything_is_written() {
    let dir = folder();
    let results = processes(|rank, ranks| {
        let mut config = config(&dir, "data", &[]);
        if rank == 2 {
            config.data = Some("absent.jsonl".into());
        }
        plain(&config, ranks)
    });
    fails_on(2, results, "--data \"absent.jsonl\"");
    assert!(!dir.path().join("data").exists());

    let taken = dir.path().join("taken");
    std::fs::create_dir_all(taken.join("checkpoints/step-00000004")).unwrap();
    let results = processes(|_, ranks| plain(&config(&dir, "taken", &[]), ranks));
    fails_on(0, results, "allowed is a folder without checkpoints of an earlier run");

    let control = |ranks: &Ranks| {
        let config = config(&dir, "nothing", &[]);
        resume_on(&config, &Control { observer: &|_, _| Ok(()), stop: &AtomicBool::new(false) }, ranks)
    };
    fails_on(0, processes(|_, ranks| control(ranks)), "allowed is a folder with checkpoints of an earlier run");
}

#[test]
fn processes_that_are_set_up_for_something_else_are_named() {
    let dir = folder();
    let other = dir.path().join("other.jsonl");
    std::fs::write(&other, "{\"prompt\": \"Another?\", \"completion\": \"Yes.\"}\n".repeat(10)).unwrap();
    for (flag, value, what) in [
        ("--lr", "0.5", "train.learning_rate is 0.001 here and 0.5 on rank 1"),
        ("--data", other.to_str().unwrap(), "the data is"),
    ] {
        let results = processes(|rank, ranks| {
            let (out, changed) = (format!("out-{rank}"), [(flag, value)]);
            let changes: &[_] = if rank == 1 { &changed } else { &[] };
            plain(&config(&dir, &out, changes), ranks)
        });
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.unwrap_err();
            let blamed = usize::from(rank != 1);
            assert!(matches!(error, Error::RanksDiffer { peer, .. } if peer == blamed) && error.is_usage(), "{error}");
            assert!(rank == 1 || error.to_string().contains(what), "{error}");
            assert!(!dir.path().join(format!("out-{rank}")).exists());
        }
    }
    let results = processes(|_, ranks| plain(&config(&dir, "out", &[("--cp", "2")]), ranks));
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("--cp \"2\": allowed is a divisor of 3, the number of ranks"), "{text}");
    }
}

#[test]
fn a_process_that_fails_on_the_way_ends_all() {
    let dir = folder();
    for (failing, panics) in [(0, false), (2, false), (1, true)] {
        let out = format!("out-{failing}");
        let results = processes(|_, ranks| {
            let observer = |rank: usize, report: &StepReport| match report.step == 2 && rank == failing {
                true if panics => panic!("an observer that panics"),
                true => Err(Error::NotFinite { step: 2, what: "the weather".to_string(), value: f64::NAN }),
                false => Ok(()),
            };
            let control = Control { observer: &observer, stop: &AtomicBool::new(false) };
            run_on(&config(&dir, &out, &[]), &control, ranks)
        });
        assert!(results[failing].as_ref().unwrap_err().to_string().starts_with(&format!("rank {failing} failed: ")));
        fails_on(failing, results, if panics { "panicked" } else { "step 2: the weather is NaN" });
        let curve = std::fs::read_to_string(dir.path().join(&out).join(LOSS_CURVE_FILE)).unwrap();
        assert!(curve.contains("cross entropy"));
        assert!(!dir.path().join(&out).join("checkpoint").exists());
    }
}
