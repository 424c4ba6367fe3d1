//! How the products of a chunk are computed: the type of their operands, and how these are brought into order.
//!
//! Products run over *terms*. With [`Plain`] a term is one number in the accumulation type; with
//! [`crate::pairs::Pairs`] it is two neighbouring bf16 numbers, which one instruction multiplies and adds.

use crate::aligned::Aligned;
use crate::compiled::Compiled as _;
use crate::element::Element;
use crate::matmul::{Broadcast, Product, Term, panel_index};
use crate::real::Real;
use crate::tile::KEY_BLOCK;
use std::marker::PhantomData;

/// Buffers of left operands have a multiple of this many rows, so that a kernel may read whole blocks of them.
pub(crate) const ROW_PADDING: usize = 32;

/// One way to compute products of [`Element`]s. Sums run in `Acc`.
pub(crate) trait Arithmetic: Copy + Send + Sync {
    /// What queries, keys and values are given in.
    type Source: Element<Acc = Self::Acc>;
    /// A term of an operand.
    type Term: Term;
    /// What sums run in.
    type Acc: Real;
    /// Numbers in a term.
    const NUMBERS: usize;
    /// A number of terms is padded with zeros to a multiple of this.
    const TERM_PADDING: usize;

    /// Rows of a result that share limits.
    fn rows(self) -> usize;
    /// The product.
    fn multiply(self, product: Product<Self::Term, Self::Acc>);
    /// The terms of one token's vector; `out` has [`terms`] of them.
    fn token_terms(token: &[Self::Source], out: &mut [Self::Term]);
    /// Terms across tokens, one per column: the numbers of a term come from [`Arithmetic::NUMBERS`] tokens, or fewer,
    /// which count as zeros.
    fn cross_terms(tokens: &[&[Self::Source]], out: &mut [Self::Term]);
    /// `tile`, `[rows, KEY_BLOCK]`, as a left operand; `into` is a buffer for it.
    fn left<'a>(
        self,
        tile: &'a [Self::Acc],
        rows: usize,
        into: &'a mut Aligned<Self::Term>,
    ) -> Broadcast<'a, Self::Term>;
    /// The transpose of `tile`, `[KEY_BLOCK, rows]`, as a left operand.
    fn left_transposed<'a>(
        self,
        tile: &'a [Self::Acc],
        rows: usize,
        into: &'a mut Aligned<Self::Term>,
    ) -> Broadcast<'a, Self::Term>;
}

/// Terms of a vector of `numbers`.
pub(crate) fn terms<A: Arithmetic>(numbers: usize) -> usize {
    numbers.div_ceil(A::NUMBERS).next_multiple_of(A::TERM_PADDING)
}

/// Writes tokens' vectors as the right operand of a sum over tokens: panels of `[terms, width]`, zeros after the last
/// token.
pub(crate) fn pack_rows<'a, A: Arithmetic>(
    mut tokens: impl Iterator<Item = &'a [A::Source]>,
    terms: usize,
    width: usize,
    out: &mut [A::Term],
) where
    A::Source: 'a,
{
    const MOST: usize = 2;
    assert!(A::NUMBERS <= MOST);
    for term in 0..terms {
        let mut lines = [&[][..]; MOST];
        let mut count = 0;
        while let Some(line) = if count < A::NUMBERS { tokens.next() } else { None } {
            lines[count] = line;
            count += 1;
        }
        for column in (0..width).step_by(A::Term::PANEL) {
            let columns = A::Term::PANEL.min(width - column);
            let start = panel_index::<A::Term>(terms, width, term, column);
            let out = &mut out[start..start + columns];
            let inside = columns.min(lines[0].len().saturating_sub(column));
            let parts = lines.map(|line| line.get(column..column + inside).unwrap_or(&[]));
            if count > 0 {
                A::cross_terms(&parts[..count], &mut out[..inside]);
            }
            out[if count > 0 { inside } else { 0 }..].fill(A::Term::default());
        }
    }
}

/// Products in the accumulation type: terms are numbers, widened where they are read.
pub(crate) struct Plain<S>(PhantomData<S>);

impl<S> Plain<S> {
    pub fn new() -> Self {
        Self(PhantomData)
    }
}

impl<S> Clone for Plain<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Plain<S> {}

impl<S: Element> Arithmetic for Plain<S> {
    type Source = S;
    type Term = S::Acc;
    type Acc = S::Acc;
    const NUMBERS: usize = 1;
    const TERM_PADDING: usize = 1;

    fn rows(self) -> usize {
        crate::matmul::ROWS
    }

    fn multiply(self, product: Product<S::Acc, S::Acc>) {
        S::Acc::multiply(product);
    }

    fn token_terms(token: &[S], out: &mut [S::Acc]) {
        out.iter_mut().zip(token).for_each(|(out, x)| *out = x.widen());
    }

    fn cross_terms(tokens: &[&[S]], out: &mut [S::Acc]) {
        out.iter_mut().zip(tokens[0]).for_each(|(out, x)| *out = x.widen());
    }

    fn left<'a>(self, tile: &'a [S::Acc], _: usize, _: &'a mut Aligned<S::Acc>) -> Broadcast<'a, S::Acc> {
        Broadcast::rows(tile, KEY_BLOCK)
    }

    fn left_transposed<'a>(self, tile: &'a [S::Acc], _: usize, _: &'a mut Aligned<S::Acc>) -> Broadcast<'a, S::Acc> {
        Broadcast::transposed(tile, KEY_BLOCK)
    }
}
