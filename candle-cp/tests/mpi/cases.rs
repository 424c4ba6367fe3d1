//! The cases, by name: what a rank does, and how the job has to end.

use crate::{exchanges, failures, same};
use candle_cp::comm::mpi::{self, Options};
use candle_cp::{Communicator, Result};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

pub type Comm = Arc<dyn Communicator>;

/// Exit code of a rank that ended with an error.
pub const FAILED: u8 = 3;

/// How a job has to end.
#[derive(Clone, Copy)]
pub enum Ending {
    /// All ranks are content.
    Well,
    /// Every rank but one ends with an error that has all of these texts. `{rank}` stands for its number.
    BadlyBut(usize, &'static [&'static str]),
}

pub struct Case {
    pub name: &'static str,
    pub sizes: &'static [usize],
    pub options: fn() -> Options,
    pub rank: fn(Comm) -> Result<()>,
    pub ending: Ending,
}

fn usual() -> Options {
    Options { deadline: Duration::from_secs(120), ..Options::default() }
}

fn pieces_of_7() -> Options {
    Options { piece_bytes: 7, ..usual() }
}

fn impatient() -> Options {
    Options { deadline: Duration::from_secs(2), ..usual() }
}

const NO_WORD: &str = "stopped because rank 1 failed: its process ended without a word";

pub const CASES: &[Case] = &[
    well("collectives", &[1, 2, 3, 4], same::collectives),
    well("groups", &[1, 2, 3, 4], same::groups),
    well("operators", &[2, 3, 4], same::operators),
    well("connected once", &[1, 2], exchanges::connected_once),
    well("many exchanges", &[2, 4], exchanges::many),
    Case { options: pieces_of_7, ..well("tiny pieces", &[2, 3], exchanges::many) },
    well("all types", &[2], exchanges::all_types),
    well("transfers while computing", &[2], exchanges::overlap),
    well("dropped without a wait", &[2], exchanges::dropped),
    Case { options: || Options { piece_bytes: (1 << 30) + 1, ..usual() }, ..well(LARGE, &[2], exchanges::large) },
    badly("another shape", &[2], failures::shape, usize::MAX, &["rank {rank}: KeyValue (call 0, step 1)", "[2, 3]"]),
    badly("another type", &[2], failures::dtype, usize::MAX, &["rank {rank}: KeyValue (call 0, step 1)", "BF16"]),
    badly("another tag", &[2], failures::tag, usize::MAX, &["rank {rank}: ", "call 9, step 1"]),
    badly("killed in an exchange", &[3], failures::killed_in_exchange, 1, &["rank {rank}: KeyValue (call", NO_WORD]),
    badly(
        "killed in a collective",
        &[4],
        failures::killed_in_collective,
        1,
        &["rank {rank}: AllReduce (call", NO_WORD],
    ),
    badly("killed in a split", &[3], failures::killed_in_split, 1, &["rank {rank}: Gather (call", NO_WORD]),
    badly(
        "killed while computing",
        &[3],
        failures::killed_while_computing,
        1,
        &["rank {rank}: Barrier (call", NO_WORD],
    ),
    Case {
        options: impatient,
        ..badly(
            "stopped",
            &[3],
            failures::stopped,
            1,
            &["rank {rank}: AllReduce (call", "got no answer from rank 1 within 2s"],
        )
    },
    badly("an error", &[3], failures::error, 1, &["rank {rank}: ", "(call", "rank 1 failed: no more memory"]),
    badly(
        "one that leaves",
        &[3],
        failures::leaves,
        1,
        &["rank {rank}: Barrier (call", "waits for rank 1, which has already returned"],
    ),
    badly("a panic", &[3], failures::panic, 1, &["rank {rank}: ", "(call", "rank 1 failed: panicked"]),
];

/// Only when asked for.
pub const LARGE: &str = "more than 2^31 bytes";

const fn well(name: &'static str, sizes: &'static [usize], rank: fn(Comm) -> Result<()>) -> Case {
    Case { name, sizes, options: usual, rank, ending: Ending::Well }
}

const fn badly(
    name: &'static str,
    sizes: &'static [usize],
    rank: fn(Comm) -> Result<()>,
    but: usize,
    texts: &'static [&'static str],
) -> Case {
    Case { name, sizes, options: usual, rank, ending: Ending::BadlyBut(but, texts) }
}

/// A process that `mpirun` has started.
///
/// What it says goes to `report` as well, in a file of its own: launchers mix lines, and drop what comes late.
pub fn run_rank(name: &str, report: Option<&Path>) -> ExitCode {
    // The launcher sends it to the others when one dies; they have something to say first.
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
    let Some(case) = CASES.iter().find(|case| case.name == name) else {
        eprintln!("there is no case {name:?}");
        return ExitCode::FAILURE;
    };
    let comm = match mpi::connect(&(case.options)()) {
        Ok(comm) => comm,
        Err(error) => {
            eprintln!("not connected: {error}");
            return ExitCode::FAILURE;
        }
    };
    let rank = comm.rank();
    match (case.rank)(comm.clone()) {
        Ok(()) => {
            drop(comm);
            println!("rank {rank} is content");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("rank {rank} says: {error}");
            if let Some(report) = report {
                std::fs::write(report.join(rank.to_string()), error.to_string()).expect("a report");
            }
            comm.abort(&error.to_string());
            ExitCode::from(FAILED)
        }
    }
}
