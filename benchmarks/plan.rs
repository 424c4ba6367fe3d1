//! Planning times and live work per rank, as Markdown tables.
//!
//! `cargo run --release -p candle-cp --example bench_plan -- [times] [work]` (both without arguments)

use candle_cp::{AttentionPlan, LayoutKind, MaskRule, Result, SequenceLayout, Tokens, Trim};
use std::time::Instant;

/// Documents of `[700, 9000)` tokens, an image block of 256 in every second one.
fn ragged(len: usize) -> Result<Tokens> {
    let (mut documents, mut groups) = (vec![0; len], vec![-1; len]);
    let (mut start, mut state) = (0, 1u64);
    for document in 0.. {
        if start == len {
            break;
        }
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let end = (start + 700 + (state >> 33) as usize % 8300).min(len);
        documents[start..end].fill(document);
        if document % 2 == 0 && end - start > 400 {
            groups[start + 64..start + 320].fill(document);
        }
        start = end;
    }
    Tokens::new(vec![documents], vec![groups])
}

fn times(name: &str, layout: &SequenceLayout, tokens: &Tokens, rank: usize) -> Result<()> {
    for (rule_name, rule) in [("causal", MaskRule::causal()), ("sliding 1024", MaskRule::sliding(1024).with_groups())] {
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let start = Instant::now();
            let plan = AttentionPlan::new(layout, tokens, &rule, rank, Trim::Live)?;
            best = best.min(start.elapsed().as_secs_f64());
            drop(plan);
        }
        println!("| {name} | {rule_name} | {:.3} |", best * 1e3);
    }
    Ok(())
}

fn main() -> Result<()> {
    println!("| row | rule | ms |\n| --- | --- | --- |");
    let s = 1_000_000;
    let start = Instant::now();
    let packed = ragged(s)?;
    println!("| Tokens::new, packed | | {:.3} |", start.elapsed().as_secs_f64() * 1e3);
    for (row, tokens) in [("one document", Tokens::single_document(1, s)), ("packed", packed)] {
        for kind in LayoutKind::ALL {
            times(&format!("{row}, 64 ranks, {kind}"), &kind.layout(s, 64)?, &tokens, 40)?;
        }
    }
    // Piece i of 32 * 64 goes to rank i mod 64.
    let pieces = |rank: usize| (0..32).map(|i| (i * 64 + rank) * s / 2048..(i * 64 + rank + 1) * s / 2048).collect();
    let striped = SequenceLayout::from_ranges(s, (0..64).map(pieces).collect())?;
    times("packed, 64 ranks, 32 pieces each", &striped, &ragged(s)?, 40)?;
    times("4096, 1 rank", &SequenceLayout::contiguous(4096, 1)?, &Tokens::single_document(1, 4096), 0)
}
