//! A rank is killed: the others end at once, by themselves, and the run goes on as if nothing had happened.

use crate::job::Ended;
use crate::order::{Harm, Moment};
use crate::site::{DP_2_CP_2, Flags, Found, Site, close, fixture, same};
use candle_cp::comm::Traffic;
use std::fs;

/// Two replicas of two ranks; the optimizer's state is spread over all of them.
const SPREAD: &Flags = &[("--cp", "2"), ("--dp", "2"), ("--zero", "1")];
/// As many batches in a step for half as many ranks.
const HALF: &Flags = &[("--cp", "2"), ("--dp", "1"), ("--accumulate", "2")];
const RUN: &str = "run";
const NO_WORD: &str = "its process ended without a word";

/// A rank dies at an exchange; `steps` are those of the checkpoints that are left, and `told` is what the others say.
fn killed(
    site: &Site,
    flags: &Flags,
    (rank, after): (usize, usize),
    (traffic, number): (&str, usize),
    (steps, told): (&[usize], &str),
) -> Result<Ended, String> {
    let moment = Moment::Exchange(traffic.to_string(), number);
    let ended = site.job(RUN, 4, flags).strike(rank, after, moment, Harm::Killed).run(|| Ok(()))?;
    let dead = format!("rank {rank} failed: {NO_WORD}");
    ended.told_by_all_but(rank, &[told, "rank {rank}: ", &dead])?;
    ended.with_operations(rank)?;
    site.has_checkpoints(RUN, steps).map_err(|text| ended.wrong(&text))?;
    Ok(ended)
}

/// Whether a rank was waiting for the dead one in such an operation.
fn waited(ended: &Ended, traffic: Traffic) -> Found {
    let operation = format!("{traffic:?} (call ");
    match ended.errors.iter().flatten().any(|error| error.contains(&operation)) {
        true => Ok(()),
        false => Err(ended.wrong(&format!("no rank says {operation:?}"))),
    }
}

/// The run goes on with as many ranks, and is the one that was never broken.
fn goes_on(site: &Site) -> Found {
    site.resuming(RUN, 4, &[]).well()?;
    same(&site.path(RUN), &site.threads("unbroken", DP_2_CP_2)?)
}

/// The run goes on with half as many ranks, as rank threads would.
fn goes_on_with_half(site: &Site) -> Found {
    let expected = site.threads_go_on(RUN, HALF)?;
    site.resuming(RUN, 2, &[("--cp", "2"), ("--accumulate", "2")]).well()?;
    same(&site.path(RUN), &expected)?;
    close(&site.path(RUN), &site.threads("unbroken", HALF)?)
}

pub fn forward_ring(site: &Site) -> Found {
    waited(&killed(site, DP_2_CP_2, (2, 2), ("key_value", 2), (&[2], "step 3: "))?, Traffic::KeyValue)?;
    goes_on(site)
}

pub fn backward_ring(site: &Site) -> Found {
    waited(
        &killed(site, DP_2_CP_2, (2, 2), ("key_value_gradient", 2), (&[2], "step 3: "))?,
        Traffic::KeyValueGradient,
    )?;
    goes_on_with_half(site)
}

/// The other family: what pieces of a sequence do to the state of a recurrence.
pub fn state_ring(site: &Site) -> Found {
    let model = fixture("qwen3_5-dense/checkpoint").display().to_string();
    let flags = [SPREAD, &[("--model", model.as_str())]].concat();
    waited(&killed(site, &flags, (2, 2), ("state", 1), (&[2], "step 3: "))?, Traffic::State)?;
    site.resuming(RUN, 4, &[]).well()?;
    same(&site.path(RUN), &site.threads("unbroken", &flags)?)
}

pub fn all_reduce(site: &Site) -> Found {
    waited(&killed(site, DP_2_CP_2, (2, 2), ("all_reduce", 4), (&[2], "step 3: "))?, Traffic::AllReduce)?;
    goes_on(site)
}

/// Sums of later layers travel while earlier ones are computed.
pub fn overlapped_sums(site: &Site) -> Found {
    let flags = [DP_2_CP_2, &[("--recompute", "true")]].concat();
    killed(site, &flags, (2, 2), ("all_reduce", 4), (&[2], "step 3: "))?;
    goes_on(site)
}

pub fn reduce_scatter(site: &Site) -> Found {
    waited(&killed(site, SPREAD, (2, 2), ("reduce_scatter", 2), (&[2], "step 3: "))?, Traffic::ReduceScatter)?;
    goes_on(site)
}

/// The weights that the others have moved are on their way; step 3 is not saved.
pub fn gathering(site: &Site) -> Found {
    waited(&killed(site, SPREAD, (2, 3), ("gather", 5), (&[2], "step 4: "))?, Traffic::Gather)?;
    goes_on(site)
}

/// After step 4 rank 0 collects what the others have of the optimizer's state.
pub fn collecting(site: &Site) -> Found {
    killed(site, SPREAD, (0, 4), ("gather", 5), (&[2], "step 4: "))?;
    goes_on(site)
}

pub fn serving(site: &Site) -> Found {
    waited(&killed(site, SPREAD, (2, 4), ("gather", 2), (&[2], "step 4: "))?, Traffic::Gather)?;
    goes_on_with_half(site)
}

/// Rank 0 dies with a checkpoint that is half written, or just after it: either way what is there under its name is whole.
pub fn writing(site: &Site) -> Found {
    let moment = Moment::Writing(site.path(RUN).join("checkpoints"));
    let ended = site.job(RUN, 4, DP_2_CP_2).strike(0, 4, moment, Harm::Killed).run(|| Ok(()))?;
    ended.told_by_all_but(0, &["step ", "rank {rank}: ", &format!("rank 0 failed: {NO_WORD}")])?;
    ended.with_operations(0)?;
    let checkpoint = site.path(RUN).join("checkpoints/step-00000004");
    println!("rank 0 died {} the checkpoint was whole", if checkpoint.exists() { "after" } else { "before" });
    site.has_checkpoints(RUN, if checkpoint.exists() { &[2, 4] } else { &[2] }).map_err(|text| ended.wrong(&text))?;
    goes_on(site)?;
    let entries = fs::read_dir(site.path(RUN).join("checkpoints")).map_err(|e| e.to_string())?.flatten();
    let names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    match names.iter().any(|name| name.ends_with(".tmp")) {
        true => Err(format!("left behind: {names:?}")),
        false => Ok(()),
    }
}
