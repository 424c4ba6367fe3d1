//! The command line of the examples that fine-tune, one for each family.
//!
//! Ranks are threads, or processes that a launcher starts; rank 0 writes files and talks. Every `--cp` ranks share their
//! sequences:
//!
//! - `finetune_gemma4 --cp 2`: threads of one process;
//! - `mpirun -n 4 --bind-to none finetune_gemma4 --cp 2`: processes over MPI (feature `mpi`), two replicas of two ranks;
//! - `srun --mpi=pmix -n 4 --cpu-bind=none finetune_gemma4 --cp 2`: the same in a job of Slurm (MPICH: `--mpi=pmi2`);
//! - `torchrun --no-python --nproc-per-node 4 finetune_gemma4 --device cuda --cp 4`: processes over NCCL (feature `nccl`),
//!   with a GPU each; `mpirun` and `srun` can start these as well.
//!
//! Without arguments a small random model learns to read handwritten digits. The last line on standard output is one
//! JSON object; progress goes to standard error, and everything that a run leaves to `--out`. With `--inspect` nothing is
//! trained: standard output tells what the data file holds.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_finetune::family::Family;
use candle_finetune::hub::{HubOptions, PullBar};
use candle_finetune::{
    Config, Control, Error, Inspection, Setting, inspect, layered_settings, resume_on, run_on, tell,
};
use clap::{Arg, ArgAction, ArgMatches, Command};

/// How a shell tells that a process was interrupted.
pub const INTERRUPTED: u8 = 130;
/// How long a rank that has failed stays after it has said why. Launchers kill the other ranks when the first one ends, and
/// OpenMPI's `mpirun` at once when several end together: those that fail for the same reason would say nothing.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Runs the program `finetune_<family>` with the arguments and variables of this process. Either program takes
/// checkpoints of both families; they differ in the small model that is trained without one.
pub fn main(family: Family) -> ExitCode {
    let flags = command(family).get_matches();
    let mut stdout = std::io::stdout();
    let mut launched = false;
    let told = settings(family, &flags).and_then(|config| {
        launched = config.launch.is_one_of_several();
        // SAFETY: nothing has started a thread yet.
        unsafe { config.launch.prepare_process(&config) };
        let (text, code) = finetune(config, &flags, stdout.is_terminal())?;
        let unwritten = |cause| Error::Io { action: "write", path: "standard output".into(), cause };
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(unwritten)?;
        Ok(code)
    });
    match told {
        Ok(code) => code,
        Err(error) => failed(&error, launched),
    }
}

/// Says why a run failed; the exit code tells whether something was wrong with what was given. `launched` is for one of
/// several processes of a launcher.
pub fn failed(error: &Error, launched: bool) -> ExitCode {
    tell(&format!("error: {error}\n"));
    if launched {
        std::thread::sleep(LAST_WORDS);
    }
    ExitCode::from(if error.is_usage() { 2 } else { 1 })
}

/// Every setting is a flag by its key and, where it has one, by a shorter name.
fn command(family: Family) -> Command {
    let setting = |setting: &'static Setting| {
        let short = setting.flag.map(|flag| flag.trim_start_matches('-'));
        let arg =
            Arg::new(setting.key).long(short.unwrap_or(setting.key)).help(setting.help).allow_negative_numbers(true);
        let arg = if short.is_some() { arg.alias(setting.key) } else { arg };
        let arg = arg.help_heading(setting.key.split_once('.').map(|(section, _)| section));
        match setting.value {
            "" => arg.num_args(0..=1).default_missing_value("true").require_equals(true).value_name("true|false"),
            value => arg.value_name(value),
        }
    };
    let switch =
        |name: &'static str, help: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue).help(help);
    let valued = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help).allow_negative_numbers(true)
    };
    let title = family.title();
    let program = match family {
        Family::Gemma4 => "finetune_gemma4",
        Family::Qwen3_5 => "finetune_qwen3_5",
    };
    Command::new(program)
        .about(format!("Fine-tunes {title} on sequences that are shared by several ranks"))
        .long_about(format!(
            "Fine-tunes {title} on sequences that are shared by several ranks.\n\nWithout --model a small random model is \
             trained from nothing to read handwritten digits. Settings may also stand in a TOML file, under the sections \
             that head the flags here; flags overrule the file. A flag is also known by section and name, such as \
             --train.steps.\n\nRanks are threads, or processes that a launcher starts: every --cp of them share their \
             sequences, and each such group is a replica of the model.\n\n\
             threads:             {program} --cp 2\n\
             MPI (feature mpi):   mpirun -n 4 --bind-to none {program} --cp 2\n\
             Slurm, with MPI:     srun --mpi=pmix -n 4 --cpu-bind=none {program} --cp 2\n\
             GPUs (feature nccl): torchrun --no-python --nproc-per-node 4 {program} --device cuda --cp 4\n\
             Slurm, with GPUs:    srun -n 4 --gpus-per-node 4 {program} --device cuda --cp 4",
        ))
        .arg(valued("config", "FILE.toml", "Settings file"))
        .arg(switch("resume", "Go on from the newest checkpoint in --out, with the settings of that run"))
        .arg(switch("inspect", "Train nothing: tell what --data holds, how its rows are filled, and what is learned of one sample"))
        .arg(
            valued("inspect-line", "N", "Line of the sample that --inspect shows [default: the first sample]")
                .requires("inspect"),
        )
        .arg(
            valued("color", "WHEN", "Whether --inspect colours what is learned: auto, always or never [default: auto]")
                .requires("inspect"),
        )
        .args(Config::SETTINGS.iter().map(setting))
}

/// Defaults, then the run that goes on, then the settings file, then flags.
fn settings(family: Family, flags: &ArgMatches) -> Result<Config, Error> {
    let text = |name: &str| flags.get_one::<String>(name).map(String::as_str);
    let given: Vec<(&str, &str)> =
        Config::SETTINGS.iter().filter_map(|setting| Some((setting.key, text(setting.key)?))).collect();
    let (file, variables) = (text("config").map(Path::new), |name: &str| std::env::var(name).ok());
    layered_settings(Config::of_family(family), file, &given, flags.get_flag("resume"), variables)
}

/// Set by the first interrupt (Ctrl-C); the second one ends the process. Of several processes rank 0 decides; the others
/// get its interrupt too, and only see to it that they are still there when it saves.
pub fn stop_on_interrupt(tells: bool) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = stop.clone();
    let handler = move || match seen.swap(true, Ordering::Relaxed) {
        true => std::process::exit(i32::from(INTERRUPTED)),
        false if !tells => {}
        false => tell("\nsaving after this step; once more ends at once, with what was saved before\n"),
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        tell(&format!("note: an interrupt will end the run without saving: {error}\n"));
    }
    stop
}

/// What standard output is told, and how the process ends.
fn finetune(mut config: Config, flags: &ArgMatches, terminal: bool) -> Result<(String, ExitCode), Error> {
    let first = config.launch.is_first();
    let hub = HubOptions::from_vars(|name| std::env::var(name).ok());
    let mut bar = first.then(PullBar::default);
    let mut pull =
        |config: &mut Config| config.resolve(&hub, &mut |event| bar.iter_mut().for_each(|bar| bar.show(event)));
    if flags.get_flag("inspect") {
        if !first {
            return Ok((String::new(), ExitCode::SUCCESS));
        }
        pull(&mut config)?;
        let text = |name: &str| flags.get_one::<String>(name).map(String::as_str);
        let inspection = Inspection::from_flags(text("inspect-line"), text("color"), terminal)?;
        return Ok((inspect(&config, &inspection)?, ExitCode::SUCCESS));
    }
    // Before a pull, which may take longer on one machine than the others would wait for it to come.
    let ranks = config.launch.ranks(&config)?;
    ranks.together(pull(&mut config))?;
    let control = Control { observer: &|_rank, _report| Ok(()), stop: &stop_on_interrupt(first) };
    let summary = match flags.get_flag("resume") {
        true => resume_on(&config, &control, &ranks)?,
        false => run_on(&config, &control, &ranks)?,
    };
    let code = if summary.stopped { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS };
    if !first {
        return Ok((String::new(), code));
    }
    if let Some(accuracy) = summary.accuracy {
        let percent = 100.0 * accuracy;
        tell(&format!("{percent:.1} % of the digits of held-out conversations read and repeated right\n"));
    }
    if summary.stopped {
        tell(&format!("stopped after step {}: --resume --out {} goes on\n", summary.steps, summary.out));
    }
    Ok((format!("{}\n", summary.to_json()), code))
}
