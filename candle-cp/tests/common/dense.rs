//! The reference: plain loops over all pairs in f64, straight from the mask rule, sharing nothing with the crate.

use super::case::{Case, Data, Rule};

/// What attention gives, row-major: `out`, `dq` `[B, Hq, S, D]`, `lse` `[B, Hq, S]`, `dk`, `dv` `[B, Hkv, S, D]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

impl Outcome {
    pub fn parts(&self) -> [(&'static str, &[f64]); 5] {
        [("out", &self.out), ("lse", &self.lse), ("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv)]
    }
}

/// Whether query `q` may see key `k`, both indices of one row.
pub fn allowed(rule: &Rule, documents: &[i64], groups: &[i64], q: usize, k: usize) -> bool {
    let same_document = documents[q] >= 0 && documents[q] == documents[k];
    let (past, ahead) = (q as i128 - k as i128, k as i128 - q as i128);
    // A window of 0 is one of 1: a token sees itself.
    let window = rule.window.map_or(i128::MAX, |w| w.max(1) as i128);
    let in_window = past < window && (!rule.both_sides || ahead < window);
    let together = rule.groups && groups[q] >= 0 && groups[q] == groups[k];
    if rule.whole_groups && together {
        return same_document;
    }
    same_document && in_window && (!rule.causal || k <= q || together)
}

/// Forward and, with the cotangent `d_out`, backward.
pub fn dense(case: &Case, data: &Data) -> Outcome {
    let all: Vec<usize> = (0..case.len()).collect();
    dense_between(case, data, &all, &all)
}

/// As [`dense`], with only some of the tokens as queries and as keys; the rest of the result is zero.
pub fn dense_between(case: &Case, data: &Data, queries: &[usize], keys: &[usize]) -> Outcome {
    let (len, d, query_heads) = (case.len(), case.head_dim, case.query_heads());
    let mut result = Outcome {
        out: vec![0.0; data.q.len()],
        lse: vec![f64::NEG_INFINITY; data.q.len() / d],
        dq: vec![0.0; data.q.len()],
        dk: vec![0.0; data.k.len()],
        dv: vec![0.0; data.v.len()],
    };
    for row in 0..case.batch() {
        let (documents, groups) = (&case.documents[row], &case.groups[row]);
        for head in 0..query_heads {
            let key_head = row * case.key_heads + head / case.group;
            for &i in queries {
                let seen = keys.iter().copied().filter(|&j| allowed(&case.rule, documents, groups, i, j));
                let query = (row * query_heads + head) * len + i;
                one_query(data, case.scale, d, query, key_head * len, &seen.collect::<Vec<_>>(), &mut result);
            }
        }
    }
    result
}

/// Row `query` of the queries against the rows `first + j` of the keys.
fn one_query(data: &Data, scale: f64, d: usize, query: usize, first: usize, keys: &[usize], result: &mut Outcome) {
    if keys.is_empty() {
        return;
    }
    let at = |row: usize| row * d..(row + 1) * d;
    let (q, d_out) = (&data.q[at(query)], &data.d_out[at(query)]);
    let scores: Vec<f64> = keys.iter().map(|j| scale * dot(q, &data.k[at(first + j)])).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
    result.lse[query] = largest + sum.ln();
    let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / sum).collect();
    let dp: Vec<f64> = keys.iter().map(|j| dot(d_out, &data.v[at(first + j)])).collect();
    let mean = dot(&p, &dp);
    for ((j, &p), &dp) in keys.iter().zip(&p).zip(&dp) {
        let key = at(first + j);
        let d_score = p * (dp - mean) * scale;
        add(&mut result.out[at(query)], p, &data.v[key.clone()]);
        add(&mut result.dq[at(query)], d_score, &data.k[key.clone()]);
        add(&mut result.dk[key.clone()], d_score, q);
        add(&mut result.dv[key], p, d_out);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(into: &mut [f64], factor: f64, x: &[f64]) {
    into.iter_mut().zip(x).for_each(|(into, x)| *into += factor * x);
}
