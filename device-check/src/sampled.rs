//! Long sequences are checked where they are measured: some queries and some keys against loops in f64.

use crate::case::{Case, Data, Placing};
use crate::check::{Checked, check_case, jitter, max_difference};
use crate::composed::{composed, rounded};
use crate::dense::dense;
use candle_cp_kernels::gpu::{GpuElement, Kernels};

/// One head in bf16 after forward and backward, over `tokens` queries and keys, head size last.
pub(crate) struct Head<'a> {
    /// What a report calls it.
    pub name: String,
    pub kernels: &'a Kernels,
    pub tokens: usize,
    pub window: Option<usize>,
    pub scale: f64,
    /// Queries, keys, values, gradient of the output.
    pub operands: [Vec<f64>; 4],
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    /// Sums of output and its gradient.
    pub delta: Vec<f64>,
    /// Gradients of queries, keys and values.
    pub gradients: [Vec<f64>; 3],
}

impl Head<'_> {
    /// The first token, the last one, and one between.
    pub fn check(&self) -> Checked {
        let tokens = [0, self.tokens / 2 + 1, self.tokens - 1].map(|token| token.min(self.tokens - 1));
        let mut checked = self.queries(&tokens);
        let [dk, dv] = self.keys(&tokens);
        checked.used[3..].copy_from_slice(&[dk, dv]);
        Checked::new(checked.name, checked.element, self.kernels.head_dim(), checked.used)
    }

    fn sees(&self, query: usize, key: usize) -> bool {
        key <= query && self.window.is_none_or(|window| key + window > query)
    }

    fn queries(&self, queries: &[usize]) -> Checked {
        let (d, tokens) = (self.kernels.head_dim(), self.tokens);
        let rows = |x: &[f64]| queries.iter().flat_map(|&i| x[i * d..(i + 1) * d].iter().copied()).collect::<Vec<_>>();
        let [q, k, v, d_out] = &self.operands;
        let case = Case {
            name: self.name.clone(),
            batch: 1,
            key_heads: 1,
            group: 1,
            head_dim: d,
            queries: queries.len(),
            keys: tokens,
            scale: self.scale,
            mask: queries.iter().flat_map(|&i| (0..tokens).map(move |j| self.sees(i, j))).collect(),
            positions: (0..tokens as u32).collect(),
            query_ranks: Vec::new(),
            key_ranks: Vec::new(),
            placing: Placing::default(),
        };
        let data = Data { q: rows(q), k: k.clone(), v: v.clone(), d_out: rows(d_out) };
        let reference = dense(&case, &data);
        // Gradients of keys have parts from other queries; they are looked at on their own.
        let mut found = reference.clone();
        found.out = rows(&self.out);
        found.lse = queries.iter().map(|&i| self.lse[i]).collect();
        found.dq = rows(&self.gradients[0]);
        check_case(self.kernels, &case, &found, &reference, &composed(&case, &data, GpuElement::Bf16))
    }

    /// Errors of the gradients of keys and values as shares of what is allowed.
    fn keys(&self, keys: &[usize]) -> [f64; 2] {
        let d = self.kernels.head_dim();
        let exact = |x: f64| x;
        let short = |x: f64| rounded(GpuElement::Bf16, x);
        let mut worst = [0.0f64; 2];
        for &key in keys {
            let (reference, measure) = (self.key(key, exact), self.key(key, short));
            for part in 0..2 {
                let found = &self.gradients[part + 1][key * d..(key + 1) * d];
                let theirs = max_difference(&measure[part], &reference[part]);
                let floor = 16.0 * f64::from(f32::EPSILON);
                let allowed = 3.0 * theirs + jitter(&reference[part], GpuElement::Bf16) + floor;
                let used = max_difference(found, &reference[part]) / allowed;
                if used.is_nan() || used > worst[part] {
                    worst[part] = used;
                }
            }
        }
        worst
    }

    /// Gradients of a key and its value, every result rounded by `round`. The statistics of rows are the device's: they
    /// are checked with the queries.
    fn key(&self, key: usize, round: impl Fn(f64) -> f64) -> [Vec<f64>; 2] {
        let d = self.kernels.head_dim();
        let at = |i: usize| i * d..(i + 1) * d;
        let [q, k, v, d_out] = &self.operands;
        let dot = |a: &[f64], b: &[f64]| round(a.iter().zip(b).map(|(a, b)| a * b).sum());
        let (mut dk, mut dv) = (vec![0.0; d], vec![0.0; d]);
        for i in (key..self.tokens).take_while(|&i| self.sees(i, key)) {
            let score = round(dot(&q[at(i)], &k[at(key)]) * self.scale);
            let p = round((score - self.lse[i]).exp());
            let dp = dot(&d_out[at(i)], &v[at(key)]);
            let ds = round(round(p * (dp - self.delta[i])) * self.scale);
            dk.iter_mut().zip(&q[at(i)]).for_each(|(sum, x)| *sum += ds * x);
            dv.iter_mut().zip(&d_out[at(i)]).for_each(|(sum, x)| *sum += p * x);
        }
        [dk, dv].map(|sums| sums.into_iter().map(&round).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_cp_kernels::gpu::GpuLimits;

    const TOKENS: usize = 40;
    const D: usize = 64;

    /// A head whose results are those of the reference; the gradients after all of its queries.
    fn head(kernels: &Kernels, window: Option<usize>) -> Head<'_> {
        let number = |n: usize| rounded(GpuElement::Bf16, ((n * 7919 % 1009) as f64 / 1009.0) * 2.0 - 1.0);
        let operands: [Vec<f64>; 4] = std::array::from_fn(|i| (0..TOKENS * D).map(|n| number(n + 977 * i)).collect());
        let nothing = || vec![0.0; TOKENS];
        let mut head = Head {
            name: "a head".into(),
            kernels,
            tokens: TOKENS,
            window,
            scale: 0.25,
            operands,
            out: Vec::new(),
            lse: nothing(),
            delta: nothing(),
            gradients: Default::default(),
        };
        let all: Vec<bool> = (0..TOKENS * TOKENS).map(|n| head.sees(n / TOKENS, n % TOKENS)).collect();
        let case = Case {
            name: String::new(),
            batch: 1,
            key_heads: 1,
            group: 1,
            head_dim: D,
            queries: TOKENS,
            keys: TOKENS,
            scale: head.scale,
            mask: all,
            positions: (0..TOKENS as u32).collect(),
            query_ranks: Vec::new(),
            key_ranks: Vec::new(),
            placing: Placing::default(),
        };
        let [q, k, v, d_out] = head.operands.clone();
        let data = Data { q, k, v, d_out };
        let result = dense(&case, &data);
        let rows = result.out.chunks(D).zip(data.d_out.chunks(D));
        head.delta = rows.map(|(out, d_out)| out.iter().zip(d_out).map(|(a, b)| a * b).sum()).collect();
        (head.out, head.lse) = (result.out, result.lse);
        head.gradients = [result.dq, result.dk, result.dv];
        head
    }

    #[test]
    fn right_rows_pass_and_wrong_ones_do_not() {
        let limits = GpuLimits { capability: (9, 0), shared_bytes: 227 << 10 };
        let kernels = Kernels::new(GpuElement::Bf16, D, limits).unwrap();
        for window in [None, Some(9)] {
            let right = head(&kernels, window);
            let checked = right.check();
            assert!(checked.used.iter().all(|&used| used < 1e-3), "{checked:?}");
            // Row 21 of 40 is one of those that are looked at.
            let at = (TOKENS / 2 + 1) * D + 5;
            for part in 0..3 {
                let mut wrong = head(&kernels, window);
                wrong.gradients[part][at] += 0.2;
                let failure = wrong.check().failure.unwrap();
                assert!(failure.starts_with(["dq", "dk", "dv"][part]), "{failure}");
            }
            let mut wrong = head(&kernels, window);
            wrong.out[at] = f64::NAN;
            assert!(wrong.check().failure.unwrap().starts_with("out has NaN"));
        }
    }
}
