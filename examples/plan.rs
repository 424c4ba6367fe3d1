//! Plans a run: what every rank holds, sends and computes, what does not fit, and the cheapest change that makes it fit.
//!
//! ```text
//! cargo run --release --example plan -- --model 31b --seq 1048576 --cp 64 --dp 2 --device h200
//! ```

use std::process::ExitCode;

use candle_cp_examples::cli::explain;
use candle_cp_examples::plan::Arguments;
use clap::Parser;

fn main() -> ExitCode {
    match Arguments::parse().run(&mut std::io::stdout().lock()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {}", explain(&error));
            ExitCode::from(2)
        }
    }
}
