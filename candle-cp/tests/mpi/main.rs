//! Ranks over MPI. This program starts itself under `mpirun` once per case and looks at how the ranks end.
//!
//! `scripts/check-mpi` runs it: it needs OpenMPI's `mpirun`. Arguments: `--large` adds a message of more than 2^31 bytes
//! (5 GiB of memory), anything else picks the cases with that text in their name. `--rank CASE [FOLDER]` is what
//! `mpirun` is told to start.

mod cases;
#[path = "../common/mod.rs"]
mod common;
mod exchanges;
mod failures;
mod jobs;
mod launcher;
mod same;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().position(|argument| argument == "--rank") {
        Some(at) => {
            let report = arguments.get(at + 2).map(Path::new);
            cases::run_rank(arguments.get(at + 1).map_or("", String::as_str), report)
        }
        None => launcher::run_all(&arguments),
    }
}
