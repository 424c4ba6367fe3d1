//! Processes over MPI train as rank threads do, bit by bit.

use crate::site::{DP_2_CP_2, Flags, Found, Site, fixture, same};

/// Ranks, and the settings that tell runs apart.
const RUNS: [(usize, &Flags); 5] = [
    (1, &[("--cp", "1"), ("--comm", "mpi")]),
    (2, &[("--cp", "2"), ("--recompute", "true")]),
    (4, &[("--cp", "4"), ("--zero", "1")]),
    (4, DP_2_CP_2),
    (4, &[("--cp", "2"), ("--dp", "2"), ("--zero", "1"), ("--recompute", "true")]),
];

pub fn gemma(site: &Site) -> Found {
    RUNS.iter().enumerate().try_for_each(|(number, (size, flags))| as_threads(site, number, *size, flags))
}

pub fn qwen(site: &Site) -> Found {
    let model = fixture("qwen3_5-dense/checkpoint").display().to_string();
    let flags = [DP_2_CP_2, &[("--model", model.as_str()), ("--zero", "1")]].concat();
    as_threads(site, 0, 4, &flags)
}

fn as_threads(site: &Site, number: usize, size: usize, flags: &Flags) -> Found {
    let name = format!("run-{number}");
    site.job(&name, size, flags).well().map_err(|text| format!("{flags:?}: {text}"))?;
    let threads: Vec<_> = flags.iter().copied().filter(|(flag, _)| *flag != "--comm").collect();
    let expected = site.threads(&format!("threads-{number}"), &threads)?;
    same(&site.path(&name), &expected).map_err(|text| format!("{flags:?}: {text}"))
}
