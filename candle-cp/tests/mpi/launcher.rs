//! Starts the cases and looks at how they end.

use crate::cases::{CASES, Case, Ending, LARGE};
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Found in the environment of all processes of this program's jobs, with this process's number.
const MARKER: &str = "CANDLE_CP_TEST_JOB";
/// A job that has to end well; building machines are slow.
const LONG: Duration = Duration::from_secs(240);
/// One that fails: the failure is told at once, whatever the deadline of a message is.
const SOON: Duration = Duration::from_secs(40);

pub fn run_all(arguments: &[String]) -> ExitCode {
    if Command::new("mpirun").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("mpirun is not in PATH: install OpenMPI (openmpi-bin); scripts/check-mpi does so");
        return ExitCode::FAILURE;
    }
    let large = arguments.iter().any(|argument| argument == "--large");
    let picked: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with("--")).collect();
    let mut failures = Vec::new();
    for case in CASES {
        let chosen = picked.is_empty() || picked.iter().any(|text| case.name.contains(text.as_str()));
        if !chosen || case.name == LARGE && !large {
            continue;
        }
        for &size in case.sizes {
            let start = Instant::now();
            let found = run(case, size).and_then(|()| no_orphans());
            let seconds = start.elapsed().as_secs_f32();
            match found {
                Ok(()) => println!("{}, {size} ranks: as it should, {seconds:.1} s", case.name),
                Err(text) => {
                    println!("{}, {size} ranks: WRONG after {seconds:.1} s: {text}", case.name);
                    failures.push(format!("{} ({size} ranks)", case.name));
                }
            }
        }
    }
    if picked.is_empty()
        && let Err(text) = alone()
    {
        println!("without a launcher: WRONG: {text}");
        failures.push("without a launcher".into());
    }
    if failures.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("failed: {}", failures.join(", "));
    ExitCode::FAILURE
}

fn marker() -> String {
    format!("{}", std::process::id())
}

fn this_program() -> std::path::PathBuf {
    std::env::current_exe().expect("this program is a file")
}

fn run(case: &Case, size: usize) -> Result<(), String> {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--oversubscribe", "--bind-to", "none", "-n", &size.to_string()]);
    let report = std::env::temp_dir().join(format!("candle-cp-mpi-{}", marker()));
    let _ = fs::remove_dir_all(&report);
    fs::create_dir_all(&report).map_err(|e| e.to_string())?;
    mpirun.arg(this_program()).args(["--rank", case.name]).arg(&report);
    let limit = if matches!(case.ending, Ending::Well) { LONG } else { SOON };
    let (status, said) = output_within(mpirun, limit)?;
    let reports: Vec<_> = (0..size).map(|rank| fs::read_to_string(report.join(rank.to_string())).ok()).collect();
    let _ = fs::remove_dir_all(&report);
    let failed = |what: String| Err(format!("{what} (ended with {status}); it said:\n{said}"));
    match case.ending {
        Ending::Well => {
            if !status.success() || said.matches("is content").count() != size {
                return failed("not all ranks are content".into());
            }
        }
        Ending::BadlyBut(but, texts) => {
            if status.success() {
                return failed("it should have failed".into());
            }
            for rank in (0..size).filter(|&rank| rank != but) {
                let Some(line) = &reports[rank] else {
                    return failed(format!("rank {rank} reports nothing"));
                };
                let fits = |text: &str| line.contains(&text.replace("{rank}", &rank.to_string()));
                // Who noticed first tells the others, whose errors quote it.
                if let Some(missing) = texts.iter().find(|text| !fits(text)) {
                    return failed(format!("rank {rank} does not say {missing:?}"));
                }
            }
        }
    }
    Ok(())
}

/// One process that no launcher has started is a group of one.
fn alone() -> Result<(), String> {
    let mut program = Command::new(this_program());
    program.args(["--rank", "collectives"]);
    let (status, said) = output_within(program, LONG)?;
    match status.success() && said.contains("rank 0 is content") {
        true => {
            println!("without a launcher: as it should");
            Ok(())
        }
        false => Err(format!("ended with {status}; it said:\n{said}")),
    }
}

/// Runs a program to its end, or kills it with all of its processes.
fn output_within(mut program: Command, limit: Duration) -> Result<(ExitStatus, String), String> {
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
        program.env(name, "1");
    }
    program.env(MARKER, marker()).process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = program.spawn().map_err(|e| format!("not started: {e}"))?;
    let mut pipes: [Box<dyn Read + Send>; 2] =
        [Box::new(child.stdout.take().expect("piped")), Box::new(child.stderr.take().expect("piped"))];
    let start = Instant::now();
    std::thread::scope(|scope| {
        let said = pipes.each_mut().map(|pipe| {
            scope.spawn(move || {
                let mut text = Vec::new();
                let _ = pipe.read_to_end(&mut text);
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        let (mut late, mut killed) = (false, false);
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if !killed && start.elapsed() > limit => {
                    // Also mpirun was seen to hang, rarely, when it ends a job that failed: it is told from a rank that does.
                    let left = marked();
                    late = left.iter().any(|(_, command)| command.contains("--rank") && !command.starts_with("mpirun"));
                    println!("not over within {limit:?}; killed: {left:?}");
                    killed = true;
                    left.iter().for_each(|&(process, _)| kill(process));
                    kill(child.id());
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(20)),
                Err(e) => return Err(e.to_string()),
            }
        };
        let said: String = said.map(|pipe| pipe.join().expect("reading does not panic")).concat();
        match late {
            true => Err(format!("not over within {limit:?}; it said:\n{said}")),
            false => Ok((status, said)),
        }
    })
}

fn kill(process: u32) {
    // SAFETY: a process of this program's own job.
    unsafe { libc::kill(process as libc::pid_t, libc::SIGKILL) };
}

/// Processes of this program's jobs, and their command lines.
fn marked() -> Vec<(u32, String)> {
    let wanted = format!("{MARKER}={}", marker());
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let of_job = numbers.filter(|process| {
        let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == wanted.as_bytes())
    });
    let command = |process: &u32| fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
    of_job.map(|process| (process, command(&process).replace('\0', " "))).collect()
}

fn no_orphans() -> Result<(), String> {
    let start = Instant::now();
    loop {
        let left = marked();
        if left.is_empty() {
            return Ok(());
        }
        if start.elapsed() > Duration::from_secs(10) {
            left.iter().for_each(|&(process, _)| kill(process));
            return Err(format!("processes were left: {left:?}"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
