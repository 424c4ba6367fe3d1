//! Ranks that stop for a while or for good, and runs that are interrupted.

use crate::job::{Ended, Job};
use crate::jobs::marked;
use crate::order::{Harm, Moment};
use crate::site::{DP_2_CP_2, Found, Site, same};
use candle_cp_examples::finetune::INTERRUPTED;
use candle_finetune::METRICS_FILE;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const RUN: &str = "run";
/// The rank that stops.
const STOPPED: usize = 2;
/// Until something happens that has to.
const PATIENCE: Duration = Duration::from_secs(60);

fn until<T>(what: &str, there: impl Fn() -> Option<T>) -> Result<T, String> {
    let start = Instant::now();
    loop {
        if let Some(found) = there() {
            return Ok(found);
        }
        if start.elapsed() > PATIENCE {
            return Err(format!("{what} did not come"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn signal(process: u32, signal: libc::c_int) -> Found {
    // SAFETY: a process of this program's own job.
    match unsafe { libc::kill(process as libc::pid_t, signal) } {
        0 => Ok(()),
        _ => Err(format!("process {process} is not there to get signal {signal}")),
    }
}

/// A run whose rank stops in the backward pass of step 3.
fn stopping(site: &Site, deadline: &str) -> Job {
    let moment = Moment::Exchange("key_value_gradient".to_string(), 1);
    let flags = [DP_2_CP_2, &[("--deadline", deadline)]].concat();
    site.job(RUN, 4, &flags).strike(STOPPED, 2, moment, Harm::Stopped)
}

/// The process number that a rank has left.
fn noted(note: &Path) -> Option<u32> {
    fs::read_to_string(note).ok()?.parse().ok()
}

pub fn continued(site: &Site) -> Found {
    let job = stopping(site, "60");
    let note = job.note();
    let ended = job.run(move || {
        let process = until("the stop", || noted(&note))?;
        std::thread::sleep(Duration::from_secs(2));
        signal(process, libc::SIGCONT)
    })?;
    ended.with_code(0)?;
    match ended.struck {
        true => same(&site.path(RUN), &site.threads("unbroken", DP_2_CP_2)?),
        false => Err("no rank was stopped".to_string()),
    }
}

pub fn never_continued(site: &Site) -> Found {
    let ended = stopping(site, "4").run(|| Ok(()))?;
    ended.told_by_all_but(STOPPED, &["step 3: ", "rank {rank}: ", "got no answer from rank ", "within 4s"])?;
    ended.with_operations(STOPPED)?;
    site.has_checkpoints(RUN, &[2])?;
    site.resuming(RUN, 4, &[("--deadline", "300")]).well()?;
    same(&site.path(RUN), &site.threads("unbroken", DP_2_CP_2)?)
}

/// Interrupts a job after its second step: a process whose number `whom` gives.
fn interrupted(site: &Site, whom: impl Fn(&Path) -> Option<u32> + Send) -> Result<Ended, String> {
    let metrics = site.path(RUN).join(METRICS_FILE);
    let job = site.job(RUN, 4, DP_2_CP_2).rest(Duration::from_millis(300));
    let first = job.process(0);
    job.run(move || {
        until("the second step", || (fs::read_to_string(&metrics).ok()?.lines().count() >= 2).then_some(()))?;
        signal(whom(&first).ok_or("no process to interrupt")?, libc::SIGINT)
    })
}

/// `mpirun` passes the interrupt on as SIGTERM, and kills what is left a second later: what was saved by then counts.
pub fn interrupted_launcher(site: &Site) -> Found {
    let launcher = |_: &Path| marked().into_iter().find(|(_, command)| command.starts_with("mpirun"));
    let ended = interrupted(site, |first| launcher(first).map(|(process, _)| process))?;
    if ended.code.is_none_or(|code| code == 0) {
        return Err(ended.wrong("an interrupted job ended as if it was done"));
    }
    site.resuming(RUN, 4, &[]).well()?;
    same(&site.path(RUN), &site.threads("unbroken", DP_2_CP_2)?)
}

pub fn interrupted_rank(site: &Site) -> Found {
    let ended = interrupted(site, noted)?;
    ended.with_code(i32::from(INTERRUPTED))?;
    site.resuming(RUN, 4, &[]).well()?;
    same(&site.path(RUN), &site.threads("unbroken", DP_2_CP_2)?)
}
