//! Compares a checkpoint, or attention alone, with tensors that another implementation computed:
//!
//! ```text
//! cargo run --release --example parity -- CHECKPOINT CASE.safetensors --cp 4 --layout head-tail
//! cargo run --release --example parity -- --attention CASE.safetensors --cp 4
//! ```

use std::process::ExitCode;

use candle_cp_examples::cli::{Arguments, explain};
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
