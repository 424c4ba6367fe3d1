//! Fine-tunes Gemma 4 on sequences that are shared by several ranks.
//!
//! Without arguments a small random model learns to read handwritten digits. The last line on standard output is one
//! JSON object; progress goes to standard error, and metrics, loss curve and checkpoint to `--out`. With `--inspect`
//! nothing is trained: standard output tells what the data file holds.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use candle_cp::prepare_process;
use candle_finetune::hub::{HubOptions, PullBar};
use candle_finetune::{Config, Error, Inspection, inspect, run};
use clap::Parser;

/// Fine-tunes Gemma 4 on sequences that are shared by several ranks (threads).
///
/// Without --model a small random model is trained from nothing to read handwritten digits.
#[derive(Parser)]
struct Flags {
    /// Ranks that share every sequence [default: 2]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    cp: Option<String>,
    /// Tokens each rank owns: contiguous, head-tail or balanced [default: head-tail]
    #[arg(long, value_name = "LAYOUT")]
    layout: Option<String>,
    /// Optimizer steps [default: 1500]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    steps: Option<String>,
    /// Seed of fresh weights and of the order of the data [default: 0]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    seed: Option<String>,
    /// Any Gemma 4: a folder in Hugging Face layout (config.json, tokenizer.json, chat template, weights), or org/name or
    /// org/name@revision on the Hugging Face Hub, pulled once into the cache that Python shares (HF_TOKEN, HF_HOME,
    /// HF_ENDPOINT, HF_HUB_OFFLINE)
    #[arg(long, value_name = "DIR|ORG/NAME")]
    model: Option<String>,
    /// Lines {"messages"}, {"prompt", "completion", "images"} or {"text"}; needs --model
    #[arg(long, value_name = "FILE.jsonl")]
    data: Option<String>,
    /// Folder for metrics.jsonl, loss.svg and the trained checkpoint [default: runs/finetune_gemma4]
    #[arg(long, value_name = "DIR")]
    out: Option<String>,
    /// Highest learning rate [default: 2e-3 for fresh weights, 1e-4 for a checkpoint]
    #[arg(long, value_name = "RATE", allow_hyphen_values = true)]
    lr: Option<String>,
    /// Rows of a batch [default: 2]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    batch_rows: Option<String>,
    /// Tokens of a row [default: 256]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    seq_len: Option<String>,
    /// Run decoder layers again in backward instead of keeping what happened inside: less memory, more time
    #[arg(long)]
    recompute: bool,
    /// Parts of the checkpoint to leave as they are: text, vision, audio
    #[arg(long, value_name = "PART,PART")]
    freeze: Option<String>,
    /// Cut samples that are longer than a row; without it they are left out
    #[arg(long)]
    truncate: bool,
    /// Train nothing: tell what --data holds, how its rows are filled, and what is learned of one sample
    #[arg(long)]
    inspect: bool,
    /// Line of the sample that --inspect shows [default: the first sample]
    #[arg(long, value_name = "N", requires = "inspect", allow_hyphen_values = true)]
    inspect_line: Option<String>,
    /// Whether --inspect colours what is learned: auto, always or never [default: auto]
    #[arg(long, value_name = "WHEN", requires = "inspect")]
    color: Option<String>,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let ranks = flags.cp.as_ref().and_then(|cp| cp.parse().ok()).unwrap_or(Config::default().cp);
    // SAFETY: nothing has started a thread yet.
    unsafe { prepare_process(ranks) };
    let mut stdout = std::io::stdout();
    let told = finetune(flags, stdout.is_terminal()).and_then(|text| {
        let unwritten = |cause| Error::Io { action: "write", path: "standard output".into(), cause };
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(unwritten)
    });
    match told {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(if error.is_usage() { 2 } else { 1 })
        }
    }
}

/// What standard output is told.
fn finetune(flags: Flags, terminal: bool) -> Result<String, Error> {
    let mut config = Config::default();
    for (flag, value) in [
        ("--cp", flags.cp),
        ("--layout", flags.layout),
        ("--steps", flags.steps),
        ("--seed", flags.seed),
        ("--model", flags.model),
        ("--data", flags.data),
        ("--out", flags.out),
        ("--lr", flags.lr),
        ("--batch-rows", flags.batch_rows),
        ("--seq-len", flags.seq_len),
        ("--recompute", flags.recompute.then(|| "true".to_string())),
        ("--freeze", flags.freeze),
        ("--truncate", flags.truncate.then(|| "true".to_string())),
    ] {
        if let Some(value) = value {
            config.set(flag, &value)?;
        }
    }
    let hub = HubOptions::from_vars(|name| std::env::var(name).ok());
    let mut bar = PullBar::default();
    config.resolve_model(&hub, &mut |event| bar.show(event))?;
    if flags.inspect {
        let inspection = Inspection::from_flags(flags.inspect_line.as_deref(), flags.color.as_deref(), terminal)?;
        return inspect(&config, &inspection);
    }
    let summary = run(&config, &|_rank, _report| Ok(()))?;
    if let Some(accuracy) = summary.accuracy {
        eprintln!("{:.1} % of the digits of held-out conversations read and repeated right", 100.0 * accuracy);
    }
    eprintln!("metrics, loss curve and checkpoint: {}", summary.out);
    Ok(format!("{}\n", summary.to_json()))
}
