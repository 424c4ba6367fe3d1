//! The training recipe over MPI: this program starts itself under `mpirun`, lets ranks fail, and looks at what all of them
//! say, how the jobs end and how runs go on.
//!
//! `scripts/check-mpi` runs it: it needs OpenMPI's `mpirun`. An argument picks the cases with that text in their name.
//! `--rank FOLDER` is what `mpirun` is told to start.

mod disagreements;
mod faults;
mod job;
#[path = "../../candle-cp/tests/mpi/jobs.rs"]
mod jobs;
mod order;
mod pauses;
mod rank;
mod same;
mod site;
mod striking;

use site::{Found, Site};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

/// A case: its name, and what finds out whether all is as it should be.
type Case = (&'static str, fn(&Site) -> Found);

const CASES: &[Case] = &[
    ("same numbers as threads, gemma", same::gemma),
    ("same numbers as threads, qwen", same::qwen),
    ("killed in the forward ring", faults::forward_ring),
    ("killed in the backward ring", faults::backward_ring),
    ("killed in the ring of states", faults::state_ring),
    ("killed in a sum of gradients", faults::all_reduce),
    ("killed in a sum during backward", faults::overlapped_sums),
    ("killed in a spread sum of gradients", faults::reduce_scatter),
    ("killed while moved weights are gathered", faults::gathering),
    ("rank 0 killed while it collects a checkpoint", faults::collecting),
    ("another rank killed while rank 0 collects a checkpoint", faults::serving),
    ("rank 0 killed while it writes a checkpoint", faults::writing),
    ("stopped and continued", pauses::continued),
    ("stopped for good", pauses::never_continued),
    ("interrupt of mpirun", pauses::interrupted_launcher),
    ("interrupt of rank 0", pauses::interrupted_rank),
    ("another length of rows", disagreements::seq_len),
    ("another configuration", disagreements::configuration),
    ("another weight", disagreements::weight),
    ("other data", disagreements::data),
    ("a picture that is gone", disagreements::picture),
    ("a flag that cannot be used", disagreements::bad_flag),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, folder] = arguments.as_slice()
        && flag == "--rank"
    {
        return rank::main(Path::new(folder));
    }
    if Command::new("mpirun").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("mpirun is not in PATH: install OpenMPI (openmpi-bin); scripts/check-mpi does so");
        return ExitCode::FAILURE;
    }
    let picked: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with("--")).collect();
    let mut failed = Vec::new();
    for (name, case) in CASES {
        if !picked.is_empty() && !picked.iter().any(|text| name.contains(text.as_str())) {
            continue;
        }
        let start = Instant::now();
        let found = Site::new().and_then(|site| case(&site)).and_then(|()| jobs::no_orphans());
        let seconds = start.elapsed().as_secs_f32();
        match found {
            Ok(()) => println!("{name}: as it should, {seconds:.1} s"),
            Err(text) => {
                println!("{name}: WRONG after {seconds:.1} s: {text}");
                failed.push(*name);
            }
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("failed: {}", failed.join(", "));
    ExitCode::FAILURE
}
