//! Random cases: documents, padding, image blocks, windows, grouped queries, ragged lengths, ranks and their pieces.

use crate::case::{Case, Data, Placing};
use crate::composed::rounded;
use candle_cp_kernels::gpu::GpuElement;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::ops::Range;

/// Head sizes that are drawn for each size that kernels are compiled for; all but the first are padded.
pub const HEADS: [[usize; 3]; 4] = [[64, 40, 3], [128, 72, 97], [256, 160, 256], [512, 300, 512]];

/// The most tokens of a case, for each row of [`HEADS`].
#[derive(Debug, Clone, Copy)]
pub struct Sizes(pub [usize; 4]);

/// A case that follows from its number alone, with numbers that `element` holds exactly. `class` is a row of [`HEADS`].
pub fn draw(number: u64, element: GpuElement, class: usize, sizes: Sizes) -> (Case, Data) {
    let mut rng = StdRng::seed_from_u64(number);
    let len = rng.random_range(1..=sizes.0[class]);
    let batch = rng.random_range(1..=2);
    let head_dim = HEADS[class][rng.random_range(0..3)];
    let rule = Rule::draw(&mut rng);
    let mut mask = Vec::with_capacity(batch * len * len);
    for _ in 0..batch {
        let (documents, blocks) = (documents(&mut rng, len), blocks(&mut rng, len));
        let pairs = (0..len).flat_map(|q| (0..len).map(move |k| (q, k)));
        mask.extend(pairs.map(|(q, k)| rule.allows(&documents, &blocks, q, k)));
    }
    let ranks = ranks(&mut rng, len);
    let case = Case {
        name: format!("random {number}, {element:?}, {rule:?}, {} ranks", ranks.len()),
        batch,
        key_heads: rng.random_range(1..=2),
        group: [1, 2, 3, 7][rng.random_range(0..4)],
        head_dim,
        queries: len,
        keys: len,
        // Scores of a few units, whatever the head size.
        scale: 2.0 / (head_dim as f64).sqrt(),
        mask,
        positions: (0..batch).flat_map(|_| 0..len as u32).collect(),
        query_ranks: ranks.clone(),
        key_ranks: ranks,
        placing: Placing { tokens_first: rng.random_bool(0.5), odd: rng.random_bool(0.2) },
    };
    let mut fill = |heads: usize| -> Vec<f64> {
        let count = batch * heads * len * head_dim;
        (0..count).map(|_| rounded(element, rng.random_range(-1.0..1.0))).collect()
    };
    let heads = case.query_heads();
    let data = Data { q: fill(heads), k: fill(case.key_heads), v: fill(case.key_heads), d_out: fill(heads) };
    (case, data)
}

/// Who sees whom within a document.
#[derive(Debug, Clone, Copy)]
struct Rule {
    causal: bool,
    window: Option<usize>,
    /// Tokens of an image block see each other.
    blocks: bool,
    /// The window does not cut image blocks.
    whole_blocks: bool,
}

impl Rule {
    fn draw(rng: &mut StdRng) -> Self {
        if rng.random_bool(0.15) {
            return Self { causal: false, window: None, blocks: false, whole_blocks: false };
        }
        let window = rng.random_bool(0.7).then(|| [1, 5, 17, 64, 100][rng.random_range(0..5)]);
        let kind = rng.random_range(0..4);
        Self { causal: true, window, blocks: kind > 1, whole_blocks: kind == 3 }
    }

    fn allows(&self, documents: &[i64], blocks: &[i64], q: usize, k: usize) -> bool {
        if documents[q] < 0 || documents[q] != documents[k] {
            return false;
        }
        let together = self.blocks && blocks[q] >= 0 && blocks[q] == blocks[k];
        let in_window = self.window.is_none_or(|window| k + window > q);
        (in_window || together && self.whole_blocks) && (!self.causal || k <= q || together)
    }
}

/// Ids of documents one after the other; negative for padding, which sees nothing and is not seen.
fn documents(rng: &mut StdRng, len: usize) -> Vec<i64> {
    let mut ids = Vec::new();
    while ids.len() < len {
        let id = if rng.random_bool(0.15) { -1 } else { ids.len() as i64 };
        ids.extend(std::iter::repeat_n(id, rng.random_range(1..=len)));
    }
    ids.truncate(len);
    ids
}

/// Ids of image blocks; negative between them.
fn blocks(rng: &mut StdRng, len: usize) -> Vec<i64> {
    let mut ids = Vec::new();
    while ids.len() < len {
        ids.extend(std::iter::repeat_n(-1, rng.random_range(0..=len / 3 + 1)));
        ids.extend(std::iter::repeat_n(ids.len() as i64, rng.random_range(1..=len / 3 + 1)));
    }
    ids.truncate(len);
    ids
}

/// The tokens of 1 to 8 ranks: in one piece each, from both ends, or in pieces that lie anywhere.
fn ranks(rng: &mut StdRng, len: usize) -> Vec<Vec<usize>> {
    let count = [1, 1, 2, 3, 4, 8][rng.random_range(0..6)];
    let part = |i: usize, parts: usize| -> Range<usize> { i * len / parts..(i + 1) * len / parts };
    match rng.random_range(0..3) {
        0 => (0..count).map(|r| part(r, count).collect()).collect(),
        1 => (0..count).map(|r| part(r, 2 * count).chain(part(2 * count - 1 - r, 2 * count)).collect()).collect(),
        _ => {
            let mut ranks = vec![Vec::new(); count];
            let mut next = 0;
            while next < len {
                let end = (next + rng.random_range(1..=len / 2 + 1)).min(len);
                let rank: &mut Vec<usize> = &mut ranks[rng.random_range(0..count)];
                if rng.random_bool(0.3) {
                    rank.splice(0..0, next..end).for_each(drop)
                } else {
                    rank.extend(next..end)
                }
                next = end;
            }
            ranks
        }
    }
}
