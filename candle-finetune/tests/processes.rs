//! Runs whose ranks are processes over NCCL, as torchrun would start them: this program starts itself once per rank. With as
//! many GPUs as the machine has, up to four, or on a fake driver and a fake NCCL that have no kernels. So the model is on the
//! CPU, and only what ranks send passes through the GPUs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use candle_cp::Communicator;
use candle_cp::comm::{CommStats, Expected, Mesh, Pending, Received, Tag, Traffic};
use candle_finetune::{Config, Control, Error, Launch, METRICS_FILE, Ranks, Result, StepReport, run, run_on};

const STEPS: usize = 3;
/// Longest time that a group may take to end.
const LONG: Duration = Duration::from_secs(120);
/// Says in a process that it is a rank, and of what.
const AS_RANK: &str = "--as-rank";

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().position(|argument| argument == AS_RANK) {
        Some(place) => std::process::exit(as_rank(&arguments[place + 1..])),
        None => cases(),
    }
}

fn config(folder: &Path, cp: usize) -> Config {
    Config {
        cp,
        model: Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint")),
        data: Some(folder.join("data.jsonl")),
        out: folder.join("out"),
        steps: Some(STEPS),
        warmup: Some(1),
        batch_rows: 1,
        seq_len: 64,
        lr: Some(1e-3),
        save_every: Some(2),
        ..Config::default()
    }
}

// ---- A rank.

/// Arguments: folder, ranks, and what goes wrong on which rank.
fn as_rank(arguments: &[String]) -> i32 {
    let [folder, cp, fault, on] = arguments else { panic!("{arguments:?}") };
    // "all": as many as this process was told of.
    let cp = if cp == "all" { std::env::var("WORLD_SIZE").unwrap() } else { cp.clone() };
    let mut config = config(Path::new(folder), cp.parse().unwrap());
    config.device = "cuda".parse().unwrap();
    match rank(&config, fault, on.parse().unwrap()) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("error: {error}");
            if error.is_usage() { 2 } else { 1 }
        }
    }
}

fn rank(config: &Config, fault: &str, on: usize) -> Result<()> {
    let ranks = Launch::from_vars(|name| std::env::var(name).ok())?.ranks(config)?;
    let Ranks::Process { comm, device } = ranks else { panic!("threads were chosen") };
    assert!(device.is_cuda());
    let mine = comm.rank();
    let observer = |rank: usize, report: &StepReport| match (report.step == 2 && rank == on, fault) {
        (true, "error") => Err(Error::NotFinite { step: 2, what: "the weather".to_string(), value: f64::NAN }),
        (true, "killed") => std::process::abort(),
        _ => Ok(()),
    };
    let comm: Arc<dyn Communicator> = Arc::new(OnCpu(comm));
    if let Some(fault) = fault.strip_prefix("groups ") {
        return Ok(groups(comm, fault, on)?);
    }
    let mut config = config.clone();
    if fault == "data" && mine == on {
        config.data = Some("absent.jsonl".into());
    }
    let ranks = Ranks::Process { comm, device: Device::Cpu };
    let summary = run_on(&config, &Control { observer: &observer, stop: &AtomicBool::new(false) }, &ranks)?;
    assert_eq!(summary.steps, STEPS);
    Ok(())
}

/// Sums in the groups of a mesh, until a rank is gone: some wait for it in one group, some in another.
fn groups(world: Arc<dyn Communicator>, fault: &str, on: usize) -> candle_cp::Result<()> {
    let (rank, size) = (world.rank(), world.size());
    let context = if size.is_multiple_of(2) { 2 } else { size };
    let mesh = Mesh::new(world, context)?;
    let mine = Tensor::new(&[rank as f32, 1.0], &Device::Cpu)?;
    let sums = |ranks: Vec<usize>| vec![ranks.iter().sum::<usize>() as f32, ranks.len() as f32];
    let of_context: Vec<usize> = (0..size).filter(|r| r / context == rank / context).collect();
    let of_data: Vec<usize> = (0..size).filter(|r| r % context == rank % context).collect();
    for step in 0..3 {
        let started = mesh.data().start_reduce_scatter(&mine, Traffic::AllReduce)?;
        assert_eq!(mesh.context().all_reduce_sum(&mine)?.to_vec1::<f32>()?, sums(of_context.clone()));
        let share = started.finish()?;
        let whole = Tensor::cat(&mesh.data().start_all_gather(&share, 0, Traffic::AllReduce)?.finish()?, 0)?;
        assert_eq!(whole.to_vec1::<f32>()?, sums(of_data.clone()));
        match (step == 1 && rank == on, fault) {
            (true, "killed") => std::process::abort(),
            (true, "abort") => mesh.data().abort("no more data"),
            _ => {}
        }
    }
    Ok(())
}

/// What is received by itself would stay on the GPU.
#[derive(Debug)]
struct OnCpu(Arc<dyn Communicator>);

struct PendingOnCpu(Box<dyn Pending>);

impl Pending for PendingOnCpu {
    fn wait(self: Box<Self>) -> candle_cp::Result<Option<Received>> {
        let mut received = self.0.wait()?;
        if let Some(received) = &mut received {
            received.tensor = received.tensor.to_device(&Device::Cpu)?;
        }
        Ok(received)
    }
}

impl Communicator for OnCpu {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn world_rank(&self, rank: usize) -> usize {
        self.0.world_rank(rank)
    }

    fn split(&self, color: usize) -> candle_cp::Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self(self.0.split(color)?)))
    }

    fn next_call(&self) -> u64 {
        self.0.next_call()
    }

    fn exchange(
        &self,
        tag: Tag,
        send: Option<(usize, Tensor)>,
        receive: Option<Expected>,
    ) -> candle_cp::Result<Box<dyn Pending>> {
        Ok(Box::new(PendingOnCpu(self.0.exchange(tag, send, receive)?)))
    }

    fn stats(&self) -> CommStats {
        self.0.stats()
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }

    fn peer_failure(&self) -> Option<(usize, String)> {
        self.0.peer_failure()
    }

    fn all_gather_uneven(&self, x: &Tensor, dim: usize, traffic: Traffic) -> candle_cp::Result<Vec<Tensor>> {
        self.0.all_gather_uneven(x, dim, traffic)
    }

    fn reduce_scatter_sum(&self, x: &Tensor) -> candle_cp::Result<Tensor> {
        self.0.reduce_scatter_sum(x)
    }

    fn all_reduce_sum(&self, x: &Tensor) -> candle_cp::Result<Tensor> {
        self.0.all_reduce_sum(x)
    }

    fn broadcast(&self, x: &Tensor, root: usize) -> candle_cp::Result<Tensor> {
        self.0.broadcast(x, root)
    }

    fn barrier(&self) -> candle_cp::Result<()> {
        self.0.barrier()
    }
}

// ---- The launcher.

/// A group of processes to be started.
struct Group {
    folder: PathBuf,
    size: usize,
    cp: String,
    fault: &'static str,
    on: usize,
}

impl Group {
    fn new(folder: &Path, size: usize) -> Self {
        Self { folder: folder.to_path_buf(), size, cp: size.to_string(), fault: "none", on: 0 }
    }

    /// What became of every process, all of which have ended; `change` may change how one is started.
    fn run(&self, change: impl Fn(usize, &mut Command)) -> Vec<Output> {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let arena = tempfile::NamedTempFile::new().unwrap();
        let start = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.arg(AS_RANK).arg(&self.folder).args([&self.cp, self.fault, &self.on.to_string()]);
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
            command.env("WORLD_SIZE", self.size.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            command.env("FAKE_NCCL_ARENA", arena.path()).env_remove("TORCHELASTIC_USE_AGENT_STORE");
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            change(rank, &mut command);
            command.spawn().unwrap()
        };
        let mut processes: Vec<Child> = (0..self.size).map(start).collect();
        let began = Instant::now();
        while processes.iter_mut().any(|process| process.try_wait().unwrap().is_none()) {
            if began.elapsed() > LONG {
                processes.iter_mut().for_each(|process| drop(process.kill()));
                let said = processes.into_iter().map(|process| text(&process.wait_with_output().unwrap()));
                panic!("{} {}: still running\n{}", self.fault, self.on, said.collect::<Vec<_>>().join("----\n"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        processes.into_iter().map(|process| process.wait_with_output().unwrap()).collect()
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Every process ended by itself with an error that has the texts.
fn all_say(outputs: &[Output], code: i32, parts: &[&str]) {
    for (rank, output) in outputs.iter().enumerate() {
        let said = text(output);
        assert_eq!(output.status.code(), Some(code), "rank {rank}: {said}");
        parts.iter().for_each(|part| assert!(said.contains(part), "rank {rank}, {part:?}: {said}"));
    }
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let line = |i: usize| format!("{{\"prompt\": \"{}\", \"completion\": \"Say {i}.\"}}\n", "and on ".repeat(i % 4));
    std::fs::write(dir.path().join("data.jsonl"), (0..10).map(line).collect::<String>()).unwrap();
    dir
}

fn losses(out: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(out.join(METRICS_FILE)).unwrap();
    let line = |line: &str| serde_json::from_str::<BTreeMap<String, serde_json::Value>>(line).unwrap()["loss"].as_f64();
    text.lines().map(|text| line(text).unwrap()).collect()
}

/// Gets the number of processes.
type Case = fn(usize);

fn cases() {
    let size = (0..4).take_while(|&i| Device::new_cuda_with_stream(i).is_ok()).count();
    if size < 2 {
        println!("not tested: {size} GPUs");
        return;
    }
    let cases: [(&str, Case); 7] = [
        ("they train as rank threads do, and rank 0 writes", they_train),
        ("a rank that fails ends all", a_rank_that_fails),
        ("a rank that is killed ends all", a_rank_that_is_killed),
        ("groups in two directions, and a rank of them that is gone", groups_that_break),
        ("another number of processes than --cp", another_number),
        ("half an environment", half_an_environment),
        ("no NCCL", no_nccl),
    ];
    for (name, case) in cases {
        case(size);
        println!("{size} processes, {name}: ok");
    }
}

fn they_train(size: usize) {
    let dir = folder();
    let threads = Config { out: dir.path().join("threads"), ..config(dir.path(), size) };
    run(&threads, &|_, _| Ok(())).unwrap();
    let outputs = Group::new(dir.path(), size).run(|_, _| ());
    all_say(&outputs, 0, &[]);
    for (rank, output) in outputs.iter().enumerate() {
        assert_eq!(text(output).is_empty(), rank > 0, "rank {rank}: {}", text(output));
    }
    let (found, expected) = (losses(&dir.path().join("out")), losses(&threads.out));
    assert_eq!(found.len(), STEPS);
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-4 * expected.abs(), "{found} and {expected}");
    }
    for file in ["checkpoint/model.safetensors", "loss.svg", "settings.toml", "checkpoints/step-00000002"] {
        assert!(dir.path().join("out").join(file).exists(), "{file}");
    }
    // It was written by one process, which holds no lock any more: the next one may not begin there, and says why.
    let again = Group::new(dir.path(), size).run(|_, _| ());
    assert_eq!(again[0].status.code(), Some(2));
    for output in &again {
        assert!(text(output).contains("allowed is a folder without checkpoints of an earlier run"), "{}", text(output));
    }
}

fn a_rank_that_fails(size: usize) {
    for (fault, told) in [("data", "--data \"absent.jsonl\""), ("error", "step 2: the weather is NaN")] {
        for on in [0, size - 1] {
            let dir = folder();
            let outputs = Group { fault, on, ..Group::new(dir.path(), size) }.run(|_, _| ());
            for (rank, output) in outputs.iter().enumerate() {
                let said = text(output);
                assert!(matches!(output.status.code(), Some(1 | 2)) && said.contains(told), "rank {rank}: {said}");
                let echo = format!("stopped because rank {on} failed: ");
                assert_eq!(said.contains(&echo), rank != on, "rank {rank}: {said}");
            }
        }
    }
}

fn a_rank_that_is_killed(size: usize) {
    for on in [0, size - 1] {
        let dir = folder();
        let mut outputs = Group { fault: "killed", on, ..Group::new(dir.path(), size) }.run(|_, _| ());
        assert_eq!(outputs.remove(on).status.code(), None);
        all_say(&outputs, 1, &[&format!("stopped because rank {on} failed: its process ended without a word")]);
    }
}

fn groups_that_break(size: usize) {
    for (fault, on, code, told) in [
        ("groups none", 0, 0, ""),
        ("groups killed", 1, 1, "its process ended without a word"),
        ("groups abort", size - 1, 1, "no more data"),
    ] {
        let dir = folder();
        let mut outputs = Group { fault, on, ..Group::new(dir.path(), size) }.run(|_, _| ());
        if code == 0 {
            all_say(&outputs, 0, &[]);
            continue;
        }
        let gone = outputs.remove(on);
        assert_ne!(gone.status.code(), Some(0), "{}", text(&gone));
        all_say(&outputs, code, &[&format!("stopped because rank {on} failed: {told}")]);
    }
}

fn another_number(size: usize) {
    let dir = folder();
    let outputs = Group { cp: (size + 1).to_string(), ..Group::new(dir.path(), size) }.run(|_, _| ());
    let said = format!("it has to divide the {size} processes that WORLD_SIZE says there are");
    all_say(&outputs, 2, &[&said, &format!("use --cp {size}, or start {} processes", size + 1)]);

    // Processes that do not believe the same.
    let more = (size + 1).to_string();
    let outputs = Group { cp: "all".to_string(), ..Group::new(dir.path(), size) }.run(|rank, command| {
        if rank == 1 {
            command.env("WORLD_SIZE", &more);
        }
    });
    all_say(&outputs, 1, &["meeting the other ranks at 127.0.0.1:"]);
    // Who calls when rank 0 has given up learns only that.
    let told = format!("rank 1 was told of {more} ranks and rank 0 of {size}; set WORLD_SIZE alike");
    all_say(&outputs[..2], 1, &[&told]);
    assert!(!dir.path().join("out").exists());
}

fn half_an_environment(size: usize) {
    let dir = folder();
    let outputs = Group::new(dir.path(), size).run(|_, command| {
        command.env_remove("MASTER_PORT");
    });
    all_say(&outputs, 2, &["the launch environment is RANK=", "but MASTER_PORT is missing or empty"]);
}

fn no_nccl(size: usize) {
    const PATHS: &str = "LD_LIBRARY_PATH";
    let paths = std::env::var_os(PATHS).unwrap_or_default();
    let has = |path: &PathBuf| path.join("libnccl.so.2").exists();
    let (with, without): (Vec<_>, Vec<_>) = std::env::split_paths(&paths).partition(has);
    if with.is_empty() {
        return;
    }
    let dir = folder();
    let without = std::env::join_paths(without).unwrap();
    let outputs = Group::new(dir.path(), size).run(|_, command| {
        command.env(PATHS, &without);
    });
    all_say(&outputs, 1, &["libnccl.so.2"]);
    assert!(!dir.path().join("out").exists());
}
