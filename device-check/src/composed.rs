//! The measure of the error-ratio rule: attention composed of plain operations in the type of the operands.
//!
//! Matrix product, scale, softmax, matrix product, and their gradients. Every operation sums in f32 and rounds its result
//! to the type, as tensor libraries do. The masked softmax is one operation.

use crate::case::{Case, Data};
use crate::dense::Outcome;
use candle_cp_kernels::gpu::GpuElement;
use half::{bf16, f16};

/// `x` rounded to a type.
pub fn rounded(element: GpuElement, x: f64) -> f64 {
    match element {
        GpuElement::Bf16 => bf16::from_f64(x).to_f64(),
        GpuElement::F16 => f16::from_f64(x).to_f64(),
        GpuElement::F32 => f64::from(x as f32),
    }
}

/// Forward and backward in `element`, which holds `data` exactly. The log-sum-exp is left out.
pub fn composed(case: &Case, data: &Data, element: GpuElement) -> Outcome {
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let operands = [&data.q, &data.k, &data.v, &data.d_out].map(|x| narrow(x));
    let mut result = Outcome::empty(case);
    for b in 0..case.batch {
        for h in 0..case.key_heads {
            let row = (b * case.key_heads + h) * case.keys * case.head_dim;
            let keys = row..row + case.keys * case.head_dim;
            // Gradients of each query head are rounded before they are added up.
            let (mut dk, mut dv) = (vec![0f32; keys.len()], vec![0f32; keys.len()]);
            for g in 0..case.group {
                let head = Head { case, element, batch: b, query_head: h * case.group + g, key_start: row };
                let [head_dk, head_dv] = head.run(&operands, &mut result);
                dk.iter_mut().zip(head_dk).for_each(|(sum, x)| *sum += x);
                dv.iter_mut().zip(head_dv).for_each(|(sum, x)| *sum += x);
            }
            let round = |x: f32| rounded(element, f64::from(x));
            result.dk[keys.clone()].iter_mut().zip(dk).for_each(|(to, x)| *to = round(x));
            result.dv[keys].iter_mut().zip(dv).for_each(|(to, x)| *to = round(x));
        }
    }
    result
}

struct Head<'a> {
    case: &'a Case,
    element: GpuElement,
    batch: usize,
    query_head: usize,
    /// First number of this head in keys and values.
    key_start: usize,
}

impl Head<'_> {
    fn round(&self, x: f32) -> f32 {
        rounded(self.element, f64::from(x)) as f32
    }

    /// Writes `out` and `dq`; returns the gradients of keys and values, `[Sk, D]`.
    fn run(&self, [q, k, v, d_out]: &[Vec<f32>; 4], result: &mut Outcome) -> [Vec<f32>; 2] {
        let (case, d) = (self.case, self.case.head_dim);
        let key = |j: usize| self.key_start + j * d..self.key_start + (j + 1) * d;
        let [mut dk, mut dv] = [vec![0f32; case.keys * d], vec![0f32; case.keys * d]];
        for i in 0..case.queries {
            let row = (self.batch * case.query_heads() + self.query_head) * case.queries + i;
            let own = row * d..(row + 1) * d;
            let seen: Vec<usize> = case.seen(self.batch, i).collect();
            let product = |x: &[f32], y: &[f32]| -> Vec<f32> {
                seen.iter().map(|&j| self.round(dot(&x[own.clone()], &y[key(j)]))).collect()
            };
            let scores: Vec<f32> = product(q, k).iter().map(|s| self.round(s * case.scale as f32)).collect();
            let p = self.softmax(&scores);
            let dp = product(d_out, v);
            let mean = dot(&p, &dp);
            let ds = p.iter().zip(&dp).map(|(p, dp)| self.round(self.round(p * (dp - mean)) * case.scale as f32));
            let (mut out, mut dq) = (vec![0f32; d], vec![0f32; d]);
            for ((&j, &p), ds) in seen.iter().zip(&p).zip(ds) {
                add(&mut out, p, &v[key(j)]);
                add(&mut dq, ds, &k[key(j)]);
                add(&mut dk[j * d..(j + 1) * d], ds, &q[own.clone()]);
                add(&mut dv[j * d..(j + 1) * d], p, &d_out[own.clone()]);
            }
            let into = |to: &mut [f64], x: Vec<f32>| {
                to.iter_mut().zip(x).for_each(|(to, x)| *to = f64::from(self.round(x)));
            };
            into(&mut result.out[own.clone()], out);
            into(&mut result.dq[own], dq);
        }
        [dk, dv].map(|x| x.into_iter().map(|x| self.round(x)).collect())
    }

    fn softmax(&self, scores: &[f32]) -> Vec<f32> {
        let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
        let sum: f32 = weights.iter().sum();
        weights.iter().map(|w| self.round(w / sum)).collect()
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(into: &mut [f32], factor: f32, x: &[f32]) {
    into.iter_mut().zip(x).for_each(|(into, x)| *into += factor * x);
}
