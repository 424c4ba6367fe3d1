//! Fine-tunes Gemma 4 on sequences that are shared by several ranks:
//!
//! ```text
//! cargo run --release --example finetune_gemma4
//! cargo run --release --example finetune_gemma4 -- --model ORG/NAME --data chats.jsonl --cp 4
//! ```
//!
//! Without arguments a small random model learns to read handwritten digits. The last line on standard output is one
//! JSON object; progress goes to standard error, and everything that a run leaves to `--out`.

use std::process::ExitCode;

use candle_cp_examples::finetune;
use candle_finetune::family::Family;

fn main() -> ExitCode {
    finetune::main(Family::Gemma4)
}
