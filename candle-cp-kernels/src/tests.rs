//! Tests of whole passes: every way to multiply gives the same, and no tile is visited that the plan does not count.

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, Plain};
use crate::backward::{self, Gradients, Saved};
use crate::element::Element;
use crate::forward::{self, Forward};
use crate::heads::{Heads, Order, Shape};
use crate::matmul::{Broadcast, Product};
use crate::pairs::Pairs;
use crate::tile::{Bounds, KEY_BLOCK, KeyRun, QUERY_BLOCK, QueryTile, TileCount};
use half::bf16;
use std::sync::atomic::{AtomicUsize, Ordering};

const SHAPE: Shape = Shape { batch: 1, query_heads: 4, key_heads: 2, queries: 450, head_dim: 40 };
const WINDOW: usize = 200;

/// Each query sees itself and what comes before it, `WINDOW` keys at most.
fn bounds() -> Vec<Vec<Bounds>> {
    let seen = |i: usize| Bounds { first: (i + 1).saturating_sub(WINDOW) as u32, end: i as u32 + 1 };
    vec![(0..SHAPE.queries).map(seen).collect()]
}

/// The tiles of a window: those before it and after the last query of a block are left out.
fn tiles() -> Vec<QueryTile> {
    let s = SHAPE.queries;
    let blocks = (0..s).step_by(QUERY_BLOCK).map(|start| start..(start + QUERY_BLOCK).min(s));
    blocks
        .map(|queries| {
            let first = (queries.start + 1).saturating_sub(WINDOW) / KEY_BLOCK * KEY_BLOCK;
            let keys = first as u32..queries.end.next_multiple_of(KEY_BLOCK).min(s) as u32;
            let all_see = queries.end.saturating_sub(WINDOW) as u32..queries.start as u32 + 1;
            let run = KeyRun { first_position: keys.start, keys, full: all_see };
            QueryTile { row: 0, queries: queries.start as u32..queries.end as u32, runs: vec![run] }
        })
        .collect()
}

fn numbers<S: Element<Acc = f32>>(heads: usize, seed: usize) -> Vec<S> {
    let count = heads * SHAPE.queries * SHAPE.head_dim;
    (0..count).map(|i| S::narrow(((i * 7919 + seed * 104_729) % 1009) as f32 / 504.0 - 1.0)).collect()
}

/// Output, and gradients of query, key and value. `after_forward` is called between the passes.
fn attend<A: Arithmetic<Acc = f32>>(arithmetic: A, after_forward: impl FnOnce()) -> [Vec<f32>; 4] {
    let (s, scale, bounds, tiles) = (SHAPE.queries, 0.5, bounds(), tiles());
    let [q, k, v, g] = [(4, 1), (2, 2), (2, 3), (4, 4)].map(|(heads, seed)| numbers::<A::Source>(heads, seed));
    fn view<S: Copy>(data: &[S]) -> Heads<'_, S> {
        Heads::contiguous(data, [1, data.len() / (SHAPE.queries * SHAPE.head_dim), SHAPE.queries], SHAPE.head_dim)
    }
    let (query, key, value, d_out) = (view(&q), view(&k), view(&v), view(&g));
    let mut state = Forward::new(SHAPE);
    forward::chunk(arithmetic, &mut state, [&query, &key, &value], &tiles, &bounds, scale);
    after_forward();
    let (out, lse) = state.finish::<A::Source>(Order::HeadsFirst);
    let delta = backward::output_dot(&view(&out), &d_out, SHAPE);
    let saved = Saved { query: &query, d_out: &d_out, lse: &lse, delta: &delta, bounds: &bounds, scale };
    let mut gradients = Gradients::new(SHAPE);
    let (d_key, d_value) = backward::chunk(arithmetic, &mut gradients, saved, [&key, &value], s, &tiles);
    let widen = |x: Vec<A::Source>| x.into_iter().map(A::Source::widen).collect();
    [widen(out), widen(gradients.finish(Order::HeadsFirst)), d_key, d_value]
}

/// What a machine without pair products computes differs by roundings of bf16 only.
#[test]
fn pair_products_agree_with_widened_ones() {
    let plain = attend(Plain::<bf16>::new(), || ());
    for pairs in Pairs::available() {
        for (found, expected) in attend(pairs, || ()).iter().zip(&plain) {
            let largest = expected.iter().fold(0f32, |a, x| a.max(x.abs()));
            let worst = found.iter().zip(expected).fold(0f32, |a, (x, y)| a.max((x - y).abs()));
            assert!(largest > 0.5 && worst < 0.01 * largest, "{pairs:?}: {worst} of {largest}");
        }
    }
}

/// [`Plain`] over f32 that counts its products.
#[derive(Clone, Copy)]
struct Counting<'a>(&'a AtomicUsize);

impl Arithmetic for Counting<'_> {
    type Source = f32;
    type Term = f32;
    type Acc = f32;
    const NUMBERS: usize = 1;
    const TERM_PADDING: usize = 1;

    fn rows(self) -> usize {
        Plain::<f32>::new().rows()
    }

    fn multiply(self, product: Product<f32, f32>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        Plain::<f32>::new().multiply(product);
    }

    fn token_terms(token: &[f32], out: &mut [f32]) {
        Plain::<f32>::token_terms(token, out);
    }

    fn cross_terms(tokens: &[&[f32]], out: &mut [f32]) {
        Plain::<f32>::cross_terms(tokens, out);
    }

    fn left<'a>(self, tile: &'a [f32], rows: usize, into: &'a mut Aligned<f32>) -> Broadcast<'a, f32> {
        Plain::<f32>::new().left(tile, rows, into)
    }

    fn left_transposed<'a>(self, tile: &'a [f32], rows: usize, into: &'a mut Aligned<f32>) -> Broadcast<'a, f32> {
        Plain::<f32>::new().left_transposed(tile, rows, into)
    }
}

/// A live tile costs two products in forward and five in backward for each key head; nothing else is multiplied.
#[test]
fn products_are_those_of_the_live_tiles() {
    let mut count = TileCount::default();
    count.add(&tiles());
    let blocks = SHAPE.queries.div_ceil(QUERY_BLOCK) * SHAPE.queries.div_ceil(KEY_BLOCK);
    assert!(count.full > 0 && count.partial > 0 && count.live() < blocks, "{count:?} of {blocks}");
    let products = AtomicUsize::new(0);
    attend(Counting(&products), || {
        assert_eq!(products.swap(0, Ordering::Relaxed), 2 * count.live() * SHAPE.key_heads);
    });
    assert_eq!(products.into_inner(), 5 * count.live() * SHAPE.key_heads);
}
