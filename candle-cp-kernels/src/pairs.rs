//! Products of bf16 with sums in f32: two numbers per term, by matrix tiles (AMX) or by AVX-512's pair products.
//!
//! Both instructions take the same operands: 32-bit words that hold two numbers which are neighbours in the sum. They
//! treat numbers below the normal range as 0.

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, ROW_PADDING, terms};
use crate::matmul::{Broadcast, Product, Term};
use half::bf16;

/// Two bf16 numbers, the first one in the low half.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Pair(pub u32);

impl Term for Pair {
    /// Two matrix tiles, so that what a block reads is contiguous.
    const PANEL: usize = 32;
}

impl Pair {
    #[inline(always)]
    fn new(low: bf16, high: bf16) -> Self {
        Self(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16)
    }
}

/// Which instructions there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pairs {
    /// Matrix tiles, and AVX-512 with bf16.
    Tiles,
    /// AVX-512 with bf16.
    Vectors,
}

impl Pairs {
    /// What this machine and process can use; `None`: neither.
    pub fn detect() -> Option<Self> {
        imp::detect()
    }

    /// All that this machine can run: possibly nothing.
    #[cfg(test)]
    pub fn available() -> Vec<Self> {
        match Self::detect() {
            Some(Pairs::Tiles) => vec![Pairs::Tiles, Pairs::Vectors],
            Some(Pairs::Vectors) => vec![Pairs::Vectors],
            None => vec![],
        }
    }
}

impl Arithmetic for Pairs {
    type Source = bf16;
    type Term = Pair;
    type Acc = f32;
    const NUMBERS: usize = 2;
    const TERM_PADDING: usize = 16;

    fn rows(self) -> usize {
        match self {
            Pairs::Tiles => ROW_PADDING,
            Pairs::Vectors => crate::matmul::ROWS,
        }
    }

    fn multiply(self, product: Product<Pair, f32>) {
        imp::multiply(self, product);
    }

    fn token_terms(token: &[bf16], out: &mut [Pair]) {
        let (pairs, rest) = token.as_chunks::<2>();
        out.iter_mut().zip(pairs).for_each(|(out, &[low, high])| *out = Pair::new(low, high));
        let used = pairs.len() + rest.len();
        if let [last] = rest {
            out[pairs.len()] = Pair::new(*last, bf16::ZERO);
        }
        out[used..].fill(Pair::default());
    }

    fn cross_terms(tokens: &[&[bf16]], out: &mut [Pair]) {
        match tokens {
            [low, high] => {
                let pairs = low.iter().zip(*high);
                out.iter_mut().zip(pairs).for_each(|(out, (&low, &high))| *out = Pair::new(low, high));
            }
            [low] => out.iter_mut().zip(*low).for_each(|(out, &low)| *out = Pair::new(low, bf16::ZERO)),
            _ => unreachable!("a term has one or two tokens"),
        }
    }

    fn left<'a>(self, tile: &'a [f32], rows: usize, into: &'a mut Aligned<Pair>) -> Broadcast<'a, Pair> {
        let row = crate::tile::KEY_BLOCK / 2;
        into.reserve(rows.next_multiple_of(ROW_PADDING) * row);
        imp::round(&tile[..2 * rows * row], &mut into[..rows * row]);
        Broadcast::rows(into, row)
    }

    fn left_transposed<'a>(self, tile: &'a [f32], rows: usize, into: &'a mut Aligned<Pair>) -> Broadcast<'a, Pair> {
        let row = terms::<Self>(rows);
        into.reserve(crate::tile::KEY_BLOCK * row);
        imp::round_transposed(tile, rows, &mut into[..crate::tile::KEY_BLOCK * row]);
        Broadcast::rows(into, row)
    }
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use super::{Pair, Pairs};
    use crate::amx;
    use crate::matmul::{Product, Vectors};
    use crate::tile::KEY_BLOCK;
    use std::arch::x86_64::*;

    pub fn detect() -> Option<Pairs> {
        let vectors = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16");
        match vectors {
            true if amx::is_available() => Some(Pairs::Tiles),
            true => Some(Pairs::Vectors),
            false => None,
        }
    }

    pub fn multiply(pairs: Pairs, product: Product<Pair, f32>) {
        match pairs {
            // SAFETY: a `Pairs` is made by `detect` only, which found the instructions.
            Pairs::Tiles => unsafe { amx::multiply(product) },
            // SAFETY: as above.
            Pairs::Vectors => unsafe { multiply_vectors(product) },
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn multiply_vectors(product: Product<Pair, f32>) {
        product.run(PairVectors);
    }

    /// Proof of AVX-512 with bf16; made in a function that has it switched on.
    #[derive(Clone, Copy)]
    struct PairVectors;

    impl Vectors<Pair, f32> for PairVectors {
        type Term = __m512i;
        type Sum = __m512;
        const LANES: usize = 16;

        #[inline(always)]
        fn splat(self, x: Pair) -> __m512i {
            // SAFETY: the type proves the feature.
            unsafe { _mm512_set1_epi32(x.0.cast_signed()) }
        }

        #[inline(always)]
        fn zero(self) -> __m512 {
            // SAFETY: the type proves the feature.
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        fn mul_add(self, a: __m512i, b: __m512i, c: __m512) -> __m512 {
            // SAFETY: the type proves the feature; the vector types have the same 64 bytes.
            unsafe { _mm512_dpbf16_ps(c, numbers(a), numbers(b)) }
        }

        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the type proves the feature.
            unsafe { _mm512_add_ps(a, b) }
        }
    }

    /// The same 64 bytes under the name that the product takes.
    #[inline(always)]
    fn numbers(words: __m512i) -> __m512bh {
        // SAFETY: two vector types of 64 bytes, without invalid values.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
    }

    /// `tile` rounded to bf16. Its length is a multiple of 32.
    pub fn round(tile: &[f32], out: &mut [Pair]) {
        // SAFETY: called for a `Pairs` only, see `multiply`.
        unsafe { round_vectors(tile, out) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn round_vectors(tile: &[f32], out: &mut [Pair]) {
        let (lines, _) = tile.as_chunks::<32>();
        let (words, _) = out.as_chunks_mut::<16>();
        for (line, words) in lines.iter().zip(words) {
            // SAFETY: both are 64 bytes per vector.
            unsafe {
                let (low, high) = (_mm512_loadu_ps(line.as_ptr()), _mm512_loadu_ps(line.as_ptr().add(16)));
                let rounded = _mm512_cvtne2ps_pbh(high, low);
                _mm512_storeu_si512(words.as_mut_ptr().cast(), std::mem::transmute::<__m512bh, __m512i>(rounded));
            }
        }
    }

    /// The transpose of `tile` `[rows, KEY_BLOCK]`, rounded: `[KEY_BLOCK, pairs of rows]`, zeros after the last row.
    pub fn round_transposed(tile: &[f32], rows: usize, out: &mut [Pair]) {
        // SAFETY: called for a `Pairs` only, see `multiply`.
        unsafe { round_transposed_vectors(tile, rows, out) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn round_transposed_vectors(tile: &[f32], rows: usize, out: &mut [Pair]) {
        let width = out.len() / KEY_BLOCK;
        let line = |row: usize, key: usize| match tile[..rows * KEY_BLOCK].get(row * KEY_BLOCK + key..) {
            // SAFETY: a row has `KEY_BLOCK` numbers, and `key` is at least 16 below that.
            Some(numbers) if row < rows => unsafe { words(_mm512_loadu_ps(numbers.as_ptr())) },
            _ => _mm512_setzero_si512(),
        };
        for key in (0..KEY_BLOCK).step_by(16) {
            for word in (0..width).step_by(16) {
                let mut block = [_mm512_setzero_si512(); 16];
                for (i, words) in block.iter_mut().enumerate() {
                    let row = 2 * (word + i);
                    if row < rows {
                        *words = _mm512_or_si512(line(row, key), _mm512_slli_epi32::<16>(line(row + 1, key)));
                    }
                }
                for (i, words) in transpose(block).into_iter().enumerate() {
                    let out = &mut out[(key + i) * width + word..][..16];
                    // SAFETY: 16 words inside of the slice.
                    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), words) };
                }
            }
        }
    }

    /// Rounded to bf16, each in the low half of a word.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn words(x: __m512) -> __m512i {
        // SAFETY: two vector types of 32 bytes, without invalid values.
        _mm512_cvtepu16_epi32(unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x)) })
    }

    /// The transpose of 16 x 16 words.
    #[target_feature(enable = "avx512f")]
    fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
        let mut pairs = r;
        for i in 0..8 {
            pairs[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            pairs[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        // fours[4 * i + c] has column 4 * lane + c of rows 4 * i..4 * i + 4 in each 128-bit lane.
        let mut fours = pairs;
        for i in 0..4 {
            let [a, b, c, d] = [0, 1, 2, 3].map(|k| pairs[4 * i + k]);
            fours[4 * i] = _mm512_unpacklo_epi64(a, c);
            fours[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
            fours[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
            fours[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        let mut out = fours;
        for c in 0..4 {
            let [a, b, d, e] = [0, 4, 8, 12].map(|i| fours[i + c]);
            let (even_low, even_high) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(d, e));
            let (odd_low, odd_high) = (_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(d, e));
            out[c] = _mm512_shuffle_i32x4::<0x88>(even_low, even_high);
            out[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even_low, even_high);
            out[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd_low, odd_high);
            out[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd_low, odd_high);
        }
        out
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use super::{Pair, Pairs};
    use crate::matmul::Product;

    pub fn detect() -> Option<Pairs> {
        None
    }

    pub fn multiply(_: Pairs, _: Product<Pair, f32>) {
        unreachable!("`detect` finds no pair products on this machine")
    }

    pub fn round(_: &[f32], _: &mut [Pair]) {
        unreachable!("`detect` finds no pair products on this machine")
    }

    pub fn round_transposed(_: &[f32], _: usize, _: &mut [Pair]) {
        unreachable!("`detect` finds no pair products on this machine")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matmul::{Limits, Panels, panel_index};
    use crate::tile::KEY_BLOCK;

    /// Small whole numbers, whose products and sums are exact.
    fn value(i: usize) -> f32 {
        ((i * 7919) % 23) as f32 - 11.0
    }

    fn pair(low: f32, high: f32) -> Pair {
        Pair::new(bf16::from_f32(low), bf16::from_f32(high))
    }

    /// Against plain loops, over shapes with every kind of edge, and limits.
    #[test]
    fn products_equal_plain_loops() {
        for pairs in Pairs::available() {
            for (m, k, n) in [(1usize, 16, 16), (5, 32, 48), (32, 16, 32), (33, 48, 80), (70, 160, 128), (96, 128, 272)]
            {
                for accumulate in [false, true] {
                    let (row, group) = (k + 16, pairs.rows());
                    let mut a = Aligned::zeros(m.next_multiple_of(ROW_PADDING) * row);
                    let mut b = Aligned::zeros(k * n);
                    let left = |i: usize, p: usize| value(i * 31 + p);
                    let right = |p: usize, j: usize| value(p * 17 + j + 5);
                    for (i, p) in (0..m).flat_map(|i| (0..k).map(move |p| (i, p))) {
                        a[i * row + p] = pair(left(i, 2 * p), left(i, 2 * p + 1));
                    }
                    for (p, j) in (0..k).flat_map(|p| (0..n).map(move |j| (p, j))) {
                        b[panel_index::<Pair>(k, n, p, j)] = pair(right(2 * p, j), right(2 * p + 1, j));
                    }
                    let limits: Vec<_> = (0..m.div_ceil(group))
                        .map(|g| Limits { terms: 16 * (g % (k / 16))..k, columns: (g * 16) % n..n })
                        .collect();
                    let mut out = Aligned::zeros(m * (n + 16));
                    out.fill(1.0);
                    pairs.multiply(Product {
                        out: &mut out,
                        out_row: n + 16,
                        accumulate,
                        a: Broadcast::rows(&a, row),
                        b: Panels { data: &b, rows: k, columns: n },
                        rows: m,
                        limits: &limits,
                    });
                    for i in 0..m {
                        let Limits { terms, columns } = &limits[i / group];
                        for j in columns.clone() {
                            let sum: f32 = (2 * terms.start..2 * k).map(|p| left(i, p) * right(p, j)).sum();
                            let expected = sum + f32::from(u8::from(accumulate));
                            assert_eq!(out[i * (n + 16) + j], expected, "{pairs:?} {m} {k} {n}: {i} {j}");
                        }
                        assert_eq!(out[i * (n + 16) + n..][..16], [1.0; 16], "between rows");
                    }
                }
            }
        }
    }

    #[test]
    fn left_operands_are_the_rounded_tile_and_its_transpose() {
        for pairs in Pairs::available() {
            for rows in [1, 2, 31, 96] {
                let tile: Vec<f32> = (0..rows * KEY_BLOCK).map(|i| value(i) * 1.2345 + i as f32 * 1e-3).collect();
                let at = |row: usize, key: usize| if row < rows { tile[row * KEY_BLOCK + key] } else { 0.0 };
                let mut buffer = Aligned::zeros(7);
                buffer.fill(Pair(u32::MAX));
                let left = pairs.left(&tile, rows, &mut buffer);
                for (row, word) in (0..rows).flat_map(|row| (0..KEY_BLOCK / 2).map(move |word| (row, word))) {
                    let expected = pair(at(row, 2 * word), at(row, 2 * word + 1));
                    assert_eq!(left.data[row * left.row + word], expected, "{row} {word}");
                }
                let left = pairs.left_transposed(&tile, rows, &mut buffer);
                for (key, word) in (0..KEY_BLOCK).flat_map(|key| (0..terms::<Pairs>(rows)).map(move |word| (key, word)))
                {
                    let expected = pair(at(2 * word, key), at(2 * word + 1, key));
                    assert_eq!(left.data[key * left.row + word], expected, "{key} {word}");
                }
            }
        }
    }

    #[test]
    fn terms_of_tokens() {
        let token: Vec<bf16> = (1..=5).map(|i| bf16::from_f32(i as f32)).collect();
        let mut out = [Pair(u32::MAX); 16];
        Pairs::token_terms(&token, &mut out);
        assert_eq!(out[..4], [pair(1.0, 2.0), pair(3.0, 4.0), pair(5.0, 0.0), pair(0.0, 0.0)]);
        assert!(out[3..].iter().all(|&p| p == Pair(0)));
        Pairs::cross_terms(&[&token[..2], &token[3..]], &mut out[..2]);
        assert_eq!(out[..2], [pair(1.0, 4.0), pair(2.0, 5.0)]);
        Pairs::cross_terms(&[&token[..2]], &mut out[..2]);
        assert_eq!(out[..2], [pair(1.0, 0.0), pair(2.0, 0.0)]);
    }
}
