//! The reference: plain loops over all pairs in f64.

use crate::case::{Case, Data};

/// What attention gives, row-major: `out`, `dq` `[B, Hq, Sq, D]`, `lse` `[B, Hq, Sq]`, `dk`, `dv` `[B, Hkv, Sk, D]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// Output; 0 where a query sees nothing.
    pub out: Vec<f64>,
    /// Natural log-sum-exp; -inf where a query sees nothing.
    pub lse: Vec<f64>,
    /// Gradient of queries.
    pub dq: Vec<f64>,
    /// Gradient of keys.
    pub dk: Vec<f64>,
    /// Gradient of values.
    pub dv: Vec<f64>,
}

impl Outcome {
    /// Of a case in which nothing is seen.
    pub fn empty(case: &Case) -> Self {
        let rows = case.batch * case.query_heads() * case.queries;
        let keys = case.batch * case.key_heads * case.keys;
        let zeros = |rows: usize| vec![0.0; rows * case.head_dim];
        Self { out: zeros(rows), lse: vec![f64::NEG_INFINITY; rows], dq: zeros(rows), dk: zeros(keys), dv: zeros(keys) }
    }
}

/// Forward and backward.
pub fn dense(case: &Case, data: &Data) -> Outcome {
    let (d, mut result) = (case.head_dim, Outcome::empty(case));
    let at = |row: usize| row * d..(row + 1) * d;
    for b in 0..case.batch {
        for h in 0..case.query_heads() {
            let key_row = |j: usize| at((b * case.key_heads + h / case.group) * case.keys + j);
            for i in 0..case.queries {
                let seen: Vec<usize> = case.seen(b, i).collect();
                if seen.is_empty() {
                    continue;
                }
                let row = (b * case.query_heads() + h) * case.queries + i;
                let (q, d_out) = (&data.q[at(row)], &data.d_out[at(row)]);
                let scores: Vec<f64> = seen.iter().map(|&j| case.scale * dot(q, &data.k[key_row(j)])).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                result.lse[row] = top + sum.ln();
                let p: Vec<f64> = scores.iter().map(|s| (s - top).exp() / sum).collect();
                let dp: Vec<f64> = seen.iter().map(|&j| dot(d_out, &data.v[key_row(j)])).collect();
                let mean = dot(&p, &dp);
                for ((&j, p), dp) in seen.iter().zip(p).zip(dp) {
                    let ds = p * (dp - mean) * case.scale;
                    add(&mut result.out[at(row)], p, &data.v[key_row(j)]);
                    add(&mut result.dq[at(row)], ds, &data.k[key_row(j)]);
                    add(&mut result.dk[key_row(j)], ds, q);
                    add(&mut result.dv[key_row(j)], p, d_out);
                }
            }
        }
    }
    result
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(into: &mut [f64], factor: f64, x: &[f64]) {
    into.iter_mut().zip(x).for_each(|(into, x)| *into += factor * x);
}
