//! What `mpirun` starts: one rank, which does as the examples do.

use crate::order::Order;
use crate::striking::{Striking, Trigger};
use candle_cp_examples::finetune::{INTERRUPTED, failed, stop_on_interrupt};
use candle_finetune::{Config, Control, Error, Launch, Ranks, StepReport, layered_settings, resume_on, run_on};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Where a rank writes its error: what it says to the launcher may be lost when that ends.
pub fn report(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("error-{rank}"))
}

/// Where a rank writes its process number when it starts.
pub fn process(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("process-{rank}"))
}

/// Where a rank that is struck writes its process number before.
pub fn note(folder: &Path) -> PathBuf {
    folder.join("struck")
}

pub fn main(folder: &Path) -> ExitCode {
    let variable = |name: &str| std::env::var(name).ok();
    let launch = Launch::from_vars(variable).expect("started by a launcher");
    let rank = launch.place().map_or(0, |place| place.rank);
    std::fs::write(process(folder, rank), std::process::id().to_string()).expect("a note");
    match train(folder, rank) {
        Ok(code) => code,
        Err(error) => {
            std::fs::write(report(folder, rank), error.to_string()).expect("a report");
            failed(&error, launch.is_one_of_several())
        }
    }
}

fn train(folder: &Path, rank: usize) -> Result<ExitCode, Error> {
    let order = Order::read(folder);
    let own = order.only.iter().filter(|(of, ..)| *of == rank).map(|(_, flag, value)| (flag, value));
    let flags: Vec<(&str, &str)> = order
        .flags
        .iter()
        .map(|(flag, value)| (flag, value))
        .chain(own)
        .map(|(flag, value)| (flag.as_str(), value.as_str()))
        .collect();
    let config = layered_settings(Config::default(), None, &flags, order.resume, |name| std::env::var(name).ok())?;
    // SAFETY: nothing has started a thread yet.
    unsafe { config.launch.prepare_process(&config) };
    let strike = order.strike.filter(|strike| strike.rank == rank);
    let trigger = Arc::new(Trigger::new(strike, note(folder)));
    let ranks = match config.launch.ranks(&config)? {
        Ranks::Process { comm, device } => {
            Ranks::Process { comm: Arc::new(Striking { inner: comm, trigger: trigger.clone() }), device }
        }
        threads => threads,
    };
    let observer = |_: usize, report: &StepReport| {
        if rank == 0 {
            std::thread::sleep(Duration::from_millis(order.rest));
        }
        trigger.step(report.step);
        Ok(())
    };
    let control = Control { observer: &observer, stop: &stop_on_interrupt(rank == 0) };
    let summary = match order.resume {
        true => resume_on(&config, &control, &ranks)?,
        false => run_on(&config, &control, &ranks)?,
    };
    Ok(if summary.stopped { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}
