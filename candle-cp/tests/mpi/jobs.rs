//! Jobs of other processes: each has a time limit, and what is left of it can be found and ended.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Found in the environment of all processes of this program's jobs, with this process's number.
const MARKER: &str = "CANDLE_CP_TEST_JOB";

fn marker() -> String {
    format!("{}", std::process::id())
}

/// Runs a program to its end, or kills it with all of its processes.
pub fn output_within(mut program: Command, limit: Duration) -> Result<(ExitStatus, String), String> {
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

/// Ends a process of this program's jobs.
pub fn kill(process: u32) {
    // SAFETY: a process of this program's own job.
    unsafe { libc::kill(process as libc::pid_t, libc::SIGKILL) };
}

/// Processes of this program's jobs, and their command lines.
pub fn marked() -> Vec<(u32, String)> {
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

/// Whether all processes of this program's jobs are gone, or go soon; those that stay are killed.
pub fn no_orphans() -> Result<(), String> {
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
