//! Planning times and live work per rank, as Markdown tables.
//!
//! `cargo run --release -p candle-cp --example bench_plan -- [times] [work]` (both without arguments)

use candle_cp::{AttentionPlan, LayerWork, LayoutKind, MaskRule, Result, SequenceLayout, Tokens, Trim, live_work};
use std::time::Instant;

/// Gemma 4's mix: five sliding layers of 8 heads of 256 to one full layer of 8 heads of 512.
fn gemma() -> [LayerWork; 2] {
    let sliding = LayerWork { rule: MaskRule::sliding(1024).with_groups(), weight: 5.0 * 8.0 * 256.0 };
    [sliding, LayerWork { rule: MaskRule::causal(), weight: 8.0 * 512.0 }]
}

/// A row of documents that end at `ends`, and image blocks of 256 tokens that start at `images`.
fn row(len: usize, ends: &[usize], images: &[usize]) -> Result<Tokens> {
    let document = |i: usize| ends.iter().filter(|&&end| end <= i).count() as i64;
    let group = |i: usize| images.iter().position(|&start| (start..start + 256).contains(&i)).map_or(-1, |g| g as i64);
    Tokens::new(vec![(0..len).map(document).collect()], vec![(0..len).map(group).collect()])
}

/// Documents of `shortest..=longest` tokens, most of them short; every second one begins with an image block of 256.
fn ragged(len: usize, longest: usize, seed: u64) -> Result<Tokens> {
    const SHORTEST: usize = 100;
    let (mut documents, mut groups) = (vec![0; len], vec![-1; len]);
    let (mut start, mut state) = (0, seed);
    for document in 0.. {
        if start == len {
            break;
        }
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let uniform = (state >> 11) as f64 / (1u64 << 53) as f64;
        let length = SHORTEST as f64 * (longest as f64 / SHORTEST as f64).powf(uniform);
        let end = (start + length as usize).min(len);
        documents[start..end].fill(document);
        if document % 2 == 0 && end - start > 320 {
            groups[start + 64..start + 320].fill(document);
        }
        start = end;
    }
    Tokens::new(vec![documents], vec![groups])
}

/// Keys that a rank receives on average in a sliding and in a full layer, as shares of the row.
fn received(layout: &SequenceLayout, tokens: &Tokens) -> Result<String> {
    let share = |rule: &MaskRule| -> Result<f64> {
        let mut keys = 0;
        for rank in 0..layout.ranks() {
            keys += AttentionPlan::new(layout, tokens, rule, rank, Trim::Live)?.keys_received();
        }
        Ok(keys as f64 / (layout.ranks() * layout.len()) as f64)
    };
    let [sliding, full] = gemma();
    Ok(format!("{:.2}, {:.2}", share(&sliding.rule)?, share(&full.rule)?))
}

/// Largest over mean of the ranks' live work: over the mix, and in parentheses in sliding and in full layers alone.
fn uneven(layout: &SequenceLayout, tokens: &Tokens) -> Result<String> {
    let of = |layers: &[LayerWork]| -> Result<f64> {
        let work = live_work(layout, tokens, layers)?;
        Ok(work.iter().copied().fold(0.0, f64::max) * work.len() as f64 / work.iter().sum::<f64>())
    };
    let [sliding, full] = gemma();
    Ok(format!("{:.3} ({:.2}, {:.2})", of(&[sliding, full])?, of(&[sliding])?, of(&[full])?))
}

fn work(name: &str, tokens: &Tokens) -> Result<()> {
    for ranks in [2, 4, 8] {
        let [contiguous, head_tail, balanced] = LayoutKind::ALL.map(|kind| kind.layout(tokens, ranks, &gemma()));
        let (contiguous, head_tail, balanced) = (contiguous?, head_tail?, balanced?);
        let pieces = (0..ranks).map(|rank| balanced.ranges(rank).len()).max().unwrap_or(0);
        println!(
            "| {name} | {} | {ranks} | {} | {} | {} | {pieces} | {} | {} | {} |",
            tokens.len(),
            uneven(&contiguous, tokens)?,
            uneven(&head_tail, tokens)?,
            uneven(&balanced, tokens)?,
            received(&contiguous, tokens)?,
            received(&head_tail, tokens)?,
            received(&balanced, tokens)?,
        );
    }
    Ok(())
}

fn all_work() -> Result<()> {
    println!(
        "| row | S | ranks | contiguous | head-tail | balanced | pieces | received: contiguous | head-tail | balanced |"
    );
    println!("{}|", "| --- ".repeat(10));
    for s in [4096, 8192, 16384, 32768] {
        work("one document", &Tokens::single_document(1, s))?;
        work("two documents, two images", &row(s, &[s / 3], &[64, s / 2])?)?;
        for seed in 1..=3 {
            work(&format!("ragged {seed}"), &ragged(s, s / 2, seed)?)?;
        }
    }
    Ok(())
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

fn all_times() -> Result<()> {
    println!("| row | rule | ms |\n| --- | --- | --- |");
    let s = 1_000_000;
    let start = Instant::now();
    let packed = ragged(s, 20_000, 1)?;
    println!("| Tokens::new, packed | | {:.3} |", start.elapsed().as_secs_f64() * 1e3);
    let one = Tokens::single_document(1, s);
    for (row, tokens) in [("one document", &one), ("packed", &packed)] {
        for kind in LayoutKind::ALL {
            let start = Instant::now();
            let layout = kind.layout(tokens, 64, &gemma())?;
            println!("| {row}, 64 ranks, {kind} | the layout itself | {:.3} |", start.elapsed().as_secs_f64() * 1e3);
            times(&format!("{row}, 64 ranks, {kind}"), &layout, tokens, 40)?;
        }
    }
    // No cut is even enough: the search goes on to the smallest pieces.
    let padding = Tokens::new(vec![(0..s).map(|i| if i < 3000 { 0 } else { -1 }).collect()], vec![vec![-1; s]])?;
    let start = Instant::now();
    SequenceLayout::balanced(&padding, 64, &gemma())?;
    println!("| mostly padding, 64 ranks, balanced | the layout itself | {:.3} |", start.elapsed().as_secs_f64() * 1e3);
    // Piece i of 32 * 64 goes to rank i mod 64.
    let pieces = |rank: usize| (0..32).map(|i| (i * 64 + rank) * s / 2048..(i * 64 + rank + 1) * s / 2048).collect();
    let striped = SequenceLayout::from_ranges(s, (0..64).map(pieces).collect())?;
    times("packed, 64 ranks, 32 pieces each", &striped, &packed, 40)?;
    times("4096, 1 rank", &SequenceLayout::contiguous(4096, 1)?, &Tokens::single_document(1, 4096), 0)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |name: &str| arguments.is_empty() || arguments.iter().any(|argument| argument == name);
    if wanted("times") {
        all_times()?;
    }
    if wanted("work") {
        all_work()?;
    }
    Ok(())
}
