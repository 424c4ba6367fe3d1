//! Starts the cases and looks at how they end.

use crate::cases::{CASES, Case, Ending, LARGE};
use crate::jobs::{no_orphans, output_within};
use std::fs;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

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

fn this_program() -> std::path::PathBuf {
    std::env::current_exe().expect("this program is a file")
}

fn run(case: &Case, size: usize) -> Result<(), String> {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--oversubscribe", "--bind-to", "none", "-n", &size.to_string()]);
    let report = std::env::temp_dir().join(format!("candle-cp-mpi-{}", std::process::id()));
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
