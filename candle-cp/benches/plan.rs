//! Planning: one rank of a short row, one of 64 ranks of a row of a million tokens, and the balanced layout itself.

use candle_cp::{AttentionPlan, LayerWork, LayoutKind, MaskRule, SequenceLayout, Tokens, Trim};
use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;

const LONG: usize = 1_000_000;
const RANKS: usize = 64;

fn layers() -> [LayerWork; 2] {
    let sliding = LayerWork { rule: MaskRule::sliding(1024).with_groups(), weight: 5.0 * 8.0 * 256.0 };
    [sliding, LayerWork { rule: MaskRule::causal(), weight: 8.0 * 512.0 }]
}

/// Documents of 5,000 tokens, each with an image block of 256.
fn packed() -> Tokens {
    let document = |i: usize| (i / 5000) as i64;
    let group = |i: usize| if (64..320).contains(&(i % 5000)) { document(i) } else { -1 };
    Tokens::new(vec![(0..LONG).map(document).collect()], vec![(0..LONG).map(group).collect()]).expect("documents")
}

fn plan(criterion: &mut Criterion, name: &str, layout: &SequenceLayout, tokens: &Tokens) {
    for (kind, LayerWork { rule, .. }) in ["sliding", "full"].iter().zip(layers()) {
        criterion.bench_function(&format!("plan/{name}/{kind}"), |bencher| {
            let rank = layout.ranks() / 2;
            bencher.iter(|| AttentionPlan::new(layout, black_box(tokens), &rule, rank, Trim::Live));
        });
    }
}

fn benches(criterion: &mut Criterion) {
    let short = Tokens::single_document(1, 4096);
    plan(criterion, "4096 over 1", &SequenceLayout::contiguous(4096, 1).expect("a layout"), &short);
    let tokens = packed();
    for kind in LayoutKind::ALL {
        let layout = kind.layout(&tokens, RANKS, &layers()).expect("a layout");
        plan(criterion, &format!("1000000 over 64, {kind}"), &layout, &tokens);
    }
    criterion.bench_function("layout/1000000 over 64, balanced", |bencher| {
        bencher.iter(|| SequenceLayout::balanced(black_box(&tokens), RANKS, &layers()));
    });
}

criterion_group! {
    name = all;
    config = Criterion::default().sample_size(20);
    targets = benches
}
criterion_main!(all);
