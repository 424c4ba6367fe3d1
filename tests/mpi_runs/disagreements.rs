//! Ranks that were set up for different runs, and ranks that lack something: all end, and say what it is.

use crate::job::Ended;
use crate::order::{Harm, Moment};
use crate::site::{DP_2_CP_2, Found, Site, copy_folder, fixture, samples, text};
use std::fs;
use std::path::PathBuf;

const RUN: &str = "run";
/// The rank that is different.
const ODD: usize = 1;
/// Exit code for what a user has to change.
const USAGE: i32 = 2;

/// Whether every rank says what differs and nothing was written.
fn differs(site: &Site, ended: &Ended, texts: &[&str]) -> Found {
    if ended.code != Some(USAGE) {
        return Err(ended.wrong("the exit code of wrong usage is missing"));
    }
    ended.told_by_all_but(usize::MAX, texts)?;
    ended.told_by_all_but(ODD, &[&format!("on rank {ODD}")])?;
    nothing_written(site, ended)
}

fn nothing_written(site: &Site, ended: &Ended) -> Found {
    match site.path(RUN).exists() {
        true => Err(ended.wrong("something was written")),
        false => Ok(()),
    }
}

pub fn seq_len(site: &Site) -> Found {
    let ended = site.job(RUN, 4, DP_2_CP_2).only(ODD, "--seq-len", "96").run(|| Ok(()))?;
    differs(site, &ended, &["rank {rank}: data.seq_len is ", "64", "96"])
}

/// A copy of the checkpoint.
fn checkpoint(site: &Site) -> Result<PathBuf, String> {
    let copy = site.path("checkpoint-of-one");
    copy_folder(&fixture("gemma4-dense/checkpoint"), &copy)?;
    Ok(copy)
}

pub fn configuration(site: &Site) -> Found {
    let copy = checkpoint(site)?;
    let file = copy.join("config.json");
    let before = fs::read_to_string(&file).map_err(text)?;
    let after = before.replacen("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1e-05", 1);
    assert_ne!(before, after, "a number was changed");
    fs::write(&file, after).map_err(text)?;
    let ended = site.job(RUN, 4, DP_2_CP_2).only(ODD, "--model", &copy).run(|| Ok(()))?;
    differs(site, &ended, &["rank {rank}: the model's configuration"])
}

/// The last bit of one number is another one.
pub fn weight(site: &Site) -> Found {
    const NAME: &str = "model.language_model.layers.2.mlp.down_proj.weight";
    let copy = checkpoint(site)?;
    let file = copy.join("model.safetensors");
    let mut bytes = fs::read(&file).map_err(text)?;
    let (header, all) = safetensors::SafeTensors::read_metadata(&bytes).map_err(text)?;
    let start = 8 + header + all.info(NAME).ok_or("no such weight")?.data_offsets.0;
    bytes[start] ^= 1;
    fs::write(&file, bytes).map_err(text)?;
    let ended = site.job(RUN, 4, DP_2_CP_2).only(ODD, "--model", &copy).run(|| Ok(()))?;
    ended.told_by_all_but(usize::MAX, &["rank {rank}: ", "the weight ", "layers.2.mlp.down_proj.weight"])?;
    match site
        .path(RUN)
        .join("checkpoints")
        .read_dir()
        .is_ok_and(|entries| entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("step-")))
    {
        true => Err(ended.wrong("a checkpoint was written")),
        false => Ok(()),
    }
}

pub fn data(site: &Site) -> Found {
    let other = site.path("other.jsonl");
    fs::write(&other, samples("Tell")).map_err(text)?;
    let ended = site.job(RUN, 4, DP_2_CP_2).only(ODD, "--data", &other).run(|| Ok(()))?;
    differs(site, &ended, &["rank {rank}: the data is "])
}

/// Every rank has its data in a folder of its own; that of rank 3 loses its picture after the first step.
pub fn picture(site: &Site) -> Found {
    const LOSER: usize = 3;
    let line = "{\"prompt\": \"<|image|>?\", \"completion\": \"Square.\", \"images\": [\"square.png\"]}\n";
    let mut job = site.job(RUN, 4, &[DP_2_CP_2, &[("--seq-len", "96")]].concat());
    for rank in 0..4 {
        let folder = site.path(format!("data-{rank}"));
        fs::create_dir(&folder).map_err(text)?;
        fs::copy(fixture("imaging/square.png"), folder.join("square.png")).map_err(text)?;
        fs::write(folder.join("data.jsonl"), line.repeat(5)).map_err(text)?;
        job = job.only(rank, "--data", folder.join("data.jsonl"));
    }
    let lost = site.path(format!("data-{LOSER}")).join("square.png");
    let ended = job.strike(LOSER, 1, Moment::Observed, Harm::Loses(lost)).run(|| Ok(()))?;
    let data = site.path(format!("data-{LOSER}")).join("data.jsonl").display().to_string();
    ended.told_by_all_but(usize::MAX, &["step 2: ", &data, "square.png", &format!("rank {LOSER} failed: ")])?;
    ended.told_by_all_but(LOSER, &["rank {rank}: "])?;
    ended.with_operations(LOSER)
}

/// It ends before it meets the others, which would wait for it for minutes.
pub fn bad_flag(site: &Site) -> Found {
    let ended = site.job(RUN, 4, DP_2_CP_2).only(ODD, "--seq-len", "many").run(|| Ok(()))?;
    let told = ended.errors[ODD].as_ref().is_some_and(|error| error.contains("--seq-len \"many\""));
    if ended.code != Some(USAGE) || !told {
        return Err(ended.wrong("the flag is not told"));
    }
    nothing_written(site, &ended)
}
