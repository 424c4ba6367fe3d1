//! The timeline of a step: a valid trace with every message of every rank, which changes nothing else of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use candle_cp::comm::Traffic;
use candle_finetune::{CHECKPOINT_FOLDER, Config, METRICS_FILE, run, timeline_file};
use serde_json::Value;

const RANKS: u64 = 3;
const STEP: usize = 2;

/// A span of the file; times are whole nanoseconds.
#[derive(Debug)]
struct Span {
    name: String,
    row: String,
    rank: u64,
    thread: u64,
    begin: u64,
    end: u64,
    numbers: BTreeMap<String, u64>,
}

impl Span {
    fn number(&self, name: &str) -> u64 {
        self.numbers[name]
    }
}

fn config(out: &Path, trace: Option<usize>) -> Config {
    let cp = RANKS as usize;
    Config { cp, steps: Some(3), trace, batch_rows: 1, held_out_rounds: 0, out: out.to_path_buf(), ..Config::default() }
}

/// What the lines of the metrics file say of one step.
fn metrics(out: &Path, step: usize) -> Value {
    let text = fs::read_to_string(out.join(METRICS_FILE)).unwrap();
    serde_json::from_str(text.lines().nth(step - 1).unwrap()).unwrap()
}

fn nanos(micros: &Value) -> u64 {
    let nanos = micros.as_f64().unwrap() * 1000.0;
    assert!(nanos >= 0.0 && (nanos - nanos.round()).abs() < 1e-2, "{micros}");
    nanos.round() as u64
}

/// All spans of a file in the trace event format, its rules proved: threads have names, and the spans of one follow each
/// other or lie inside of one another.
fn spans(text: &str) -> Vec<Span> {
    let file: Value = serde_json::from_str(text).unwrap();
    let mut names = BTreeSet::new();
    let mut spans = Vec::new();
    for event in file["traceEvents"].as_array().unwrap() {
        let (rank, thread) = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        assert!(rank < RANKS);
        let (name, args) = (event["name"].as_str().unwrap(), event["args"].as_object().unwrap());
        match event["ph"].as_str().unwrap() {
            "M" if name.ends_with("_name") => {
                assert!(names.insert((rank, name.to_string(), thread, args["name"].to_string())))
            }
            "M" => assert!(name.ends_with("_sort_index") && args["sort_index"].is_u64(), "{event}"),
            "X" => spans.push(Span {
                name: name.to_string(),
                row: event["cat"].as_str().unwrap().to_string(),
                rank,
                thread,
                begin: nanos(&event["ts"]),
                end: nanos(&event["ts"]) + nanos(&event["dur"]),
                numbers: args.iter().map(|(name, number)| (name.clone(), number.as_u64().unwrap())).collect(),
            }),
            other => panic!("events of kind {other}"),
        }
    }
    assert_eq!(spans.iter().map(|span| span.begin).min(), Some(0));
    for rank in 0..RANKS {
        assert!(
            names
                .iter()
                .any(|n| (n.0, n.1.as_str(), n.3.as_str()) == (rank, "process_name", &format!("\"rank {rank}\"")))
        );
    }
    let threads: BTreeSet<(u64, u64)> = spans.iter().map(|span| (span.rank, span.thread)).collect();
    for (rank, thread) in threads {
        let name = names.iter().find(|n| (n.0, n.1.as_str(), n.2) == (rank, "thread_name", thread)).expect("a name");
        let mut of: Vec<&Span> = spans.iter().filter(|span| (span.rank, span.thread) == (rank, thread)).collect();
        of.sort_by_key(|span| (span.begin, std::cmp::Reverse(span.end)));
        let mut open: Vec<u64> = Vec::new();
        for span in of {
            assert!(name.3.trim_matches('"').starts_with(&span.row), "{span:?} in {name:?}");
            open.retain(|&end| end > span.begin);
            assert!(open.last().is_none_or(|&end| span.end <= end), "{span:?} crosses another");
            assert!(span.row != "transfers" || open.is_empty(), "{span:?} lies on another");
            open.push(span.end);
        }
    }
    spans
}

#[test]
fn a_step_is_told_as_it_was_counted_and_goes_as_it_would_have() {
    let dir = tempfile::tempdir().unwrap();
    let [with, without] = ["with", "without"].map(|name| dir.path().join(name));
    run(&config(&with, Some(STEP)), &|_, _| Ok(())).unwrap();
    run(&config(&without, None), &|_, _| Ok(())).unwrap();

    let traces = |out: &Path| {
        let names = fs::read_dir(out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.contains("trace")).collect::<Vec<_>>()
    };
    assert_eq!(traces(&with), [timeline_file(STEP)]);
    assert!(traces(&without).is_empty());
    for step in 1..=3 {
        for field in ["loss", "grad_norm", "bytes_sent"] {
            assert_eq!(metrics(&with, step)[field], metrics(&without, step)[field], "{field} of step {step}");
        }
    }
    let weights = |out: &Path| fs::read(out.join(CHECKPOINT_FOLDER).join("model.safetensors")).unwrap();
    assert!(weights(&with) == weights(&without));

    let spans = spans(&fs::read_to_string(with.join(timeline_file(STEP))).unwrap());
    let of = |row: &'static str, name: &'static str| spans.iter().filter(move |s| s.row == row && s.name == name);
    for name in ["data", "forward", "backward", "sums over ranks", "optimizer"] {
        assert_eq!(of("step", name).map(|span| span.rank).collect::<Vec<_>>(), [0, 1, 2], "{name}");
    }
    let operations = metrics(&with, STEP)["operations"].as_object().unwrap().clone();
    let kinds: BTreeSet<&str> = operations.keys().map(String::as_str).collect();
    assert_eq!(kinds, BTreeSet::from(["all_reduce", "gather", "key_value", "key_value_gradient"]));
    for (kind, used) in &operations {
        let bytes = spans.iter().filter(|s| s.row == "transfers" && s.name == *kind).map(|s| s.number("bytes"));
        // The exchange that gathers the counters, two numbers of 8 bytes for each kind from 3 ranks to 2 others, is in the
        // timeline only.
        let uncounted = if kind == "gather" { 3 * 2 * 2 * 8 * Traffic::ALL.len() as u64 } else { 0 };
        assert_eq!(bytes.sum::<u64>(), used["bytes_sent"].as_u64().unwrap() + uncounted, "{kind}");
    }
    overlapping(&spans);
    for name in ["loss", "attention forward", "attention backward"] {
        let around = if name.ends_with("backward") { "backward" } else { "forward" };
        for part in of("step", around) {
            let inside = |span: &&Span| span.rank == part.rank && part.begin <= span.begin && span.end <= part.end;
            assert!(of("compute", name).filter(inside).count() > 0, "{name} in {part:?}");
        }
    }
}

/// Keys and values are on their way while the chunk before them is worked on, at the one end and the other.
fn overlapping(spans: &[Span]) {
    let mut both = 0;
    let messages = || spans.iter().filter(|span| span.row == "transfers" && span.name == "key_value");
    for message in messages() {
        let (call, step, to) = (message.number("call"), message.number("step"), message.number("to"));
        let of_call = messages().filter(|other| other.number("call") == call);
        let before = of_call.map(|other| other.number("step")).filter(|&other| other < step).max().unwrap_or(0);
        let work = |rank: u64| {
            let mut of_rank = spans.iter().filter(|span| span.row == "compute" && span.rank == rank);
            of_rank.find(|s| (s.numbers.get("call"), s.numbers.get("step")) == (Some(&call), Some(&before)))
        };
        let (sender, receiver) = (work(message.rank), work(to));
        assert!(sender.is_none_or(|work| message.begin <= work.begin), "{message:?} is posted after {sender:?}");
        assert!(receiver.is_none_or(|work| work.end <= message.end), "{message:?} is taken before {receiver:?}");
        both += usize::from(sender.is_some() && receiver.is_some());
    }
    assert!(both > 0);
}

#[test]
fn a_step_that_is_not_one_of_the_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let told = run(&config(dir.path(), Some(4)), &|_, _| Ok(())).unwrap_err();
    assert!(told.is_usage() && told.to_string().starts_with("--trace \"4\": allowed is at most"), "{told}");
}
