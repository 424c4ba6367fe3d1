use super::*;
use crate::delta_rule::matrix::{Left, Matrix, Multiplier, PANEL, Part};

fn value(i: usize) -> f64 {
    ((i * 7919 + 13) % 101) as f64 / 50.0 - 1.0
}

fn matrix(rows: usize, columns: usize, seed: usize) -> (Matrix<f64>, Vec<f64>) {
    let plain: Vec<f64> = (0..rows * columns).map(|i| value(i + seed)).collect();
    let mut matrix = Matrix::zeros(rows, columns);
    matrix.load(rows, columns, &plain);
    (matrix, plain)
}

fn plain(x: &Matrix<f64>, rows: usize, columns: usize) -> Vec<f64> {
    let mut plain = Vec::new();
    x.store(rows, columns, &mut plain);
    plain
}

/// Sides below, at and above one panel; whole products, and triangles of small ones.
#[test]
fn products_equal_plain_loops() {
    for (m, k, n) in [(1, 1, 1), (5, 16, 70), (64, 128, 130), (70, 20, 64), (130, 64, 33), (40, 40, 40), (64, 64, 17)] {
        let parts: &[Part] = match m == k && m <= PANEL {
            true => &[Part::All, Part::LowerLeft, Part::UpperLeft],
            false => &[Part::All],
        };
        let (a, plain_a) = matrix(m, k, 5);
        let mut a_t = Matrix::zeros(k, m);
        a.transpose_into(&mut a_t);
        assert_eq!(plain(&a_t, k, m), (0..m * k).map(|i| plain_a[i % m * k + i / m]).collect::<Vec<_>>());
        let (b, plain_b) = matrix(k, n, 77);
        for &part in parts {
            let inside = |i: usize, p: usize| match part {
                Part::LowerLeft => p <= i,
                Part::UpperLeft => p >= i,
                _ => true,
            };
            let masked: Vec<_> = (0..m * k).map(|i| if inside(i / k, i % k) { plain_a[i] } else { 0.0 }).collect();
            let (mut a, mut a_t) = (Matrix::zeros(m, k), Matrix::zeros(k, m));
            a.load(m, k, &masked);
            a.transpose_into(&mut a_t);
            for (left, add) in [(Left::Plain(&a), false), (Left::Transposed(&a_t), true)] {
                let (mut out, before) = matrix(m, n, 300);
                Multiplier::default().multiply((&mut out, add), left, &b, (m, k), part);
                for (i, x) in plain(&out, m, n).into_iter().enumerate() {
                    let sum: f64 = (0..k).map(|p| masked[i / n * k + p] * plain_b[p * n + i % n]).sum();
                    let expected = sum + if add { before[i] } else { 0.0 };
                    assert!((x - expected).abs() < 1e-12, "{m} {k} {n} at {i}: {x} for {expected}");
                }
            }
        }
    }
}

const HEADS: DeltaHeads = DeltaHeads { key_heads: 1, value_heads: 2, key_dim: 6, value_dim: 9 };
const LEN: usize = 150;

struct Data {
    qkv: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    d_out: Vec<f64>,
}

fn data() -> Data {
    let gates = LEN * HEADS.value_heads;
    Data {
        qkv: (0..LEN * HEADS.width()).map(value).collect(),
        g: (0..gates).map(|i| -value(i).abs() * 0.3).collect(),
        beta: (0..gates).map(|i| value(i + 9).abs()).collect(),
        d_out: (0..gates * HEADS.value_dim).map(|i| value(i + 40)).collect(),
    }
}

fn close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).for_each(|(a, b)| assert!((a - b).abs() < 1e-12, "{a} for {b}"));
}

/// `transition . state` per head, or its transpose.
fn apply(transition: &[f64], state: &[f64], transposed: bool) -> Vec<f64> {
    let (dk, dv) = (HEADS.key_dim, HEADS.value_dim);
    let element = |h: usize, i: usize, j: usize| match transposed {
        true => transition[(h * dk + j) * dk + i],
        false => transition[(h * dk + i) * dk + j],
    };
    let places = (0..HEADS.value_heads * dk * dv).map(|at| (at / (dk * dv), at / dv % dk, at % dv));
    places.map(|(h, i, j)| (0..dk).map(|p| element(h, i, p) * state[(h * dk + p) * dv + j]).sum()).collect()
}

/// A run cut anywhere is two runs, and either is an affine map of the state before it; so are the gradients.
#[test]
fn runs_compose() {
    let data = data();
    let inputs = DeltaInputs::new(HEADS, (1, LEN), &data.qkv, &data.g, &data.beta);
    let run = |tokens| DeltaRun { row: 0, tokens };
    let first: Vec<f64> = (0..HEADS.states()).map(|i| value(i + 3)).collect();
    let d_last: Vec<f64> = (0..HEADS.states()).map(|i| value(i + 8)).collect();
    let forward = |out: &mut DeltaForward<f64>, tokens, initial: &[f64]| {
        let work = DeltaForwardRun { run: run(tokens), initial: Some(initial), keep_final: true };
        out.run(&inputs, &[work]).remove(0)
    };
    let backward =
        |into: &mut DeltaBackward<f64>, tokens, initial: &[f64], blocks: &DeltaBlocks<f64>, d_final: &[f64]| {
            let (initial, d_final) = (Some(initial), Some(d_final));
            let work = DeltaBackwardRun { run: run(tokens), initial, blocks, d_final, keep_initial: true };
            into.run(&inputs, &[work], &data.d_out).remove(0)
        };
    let mut whole = DeltaForward::new(HEADS, LEN);
    let passed = forward(&mut whole, 0..LEN, &first);
    let whole = whole.finish::<f64>();
    let mut gradients = DeltaBackward::new(HEADS, LEN);
    let d_first = backward(&mut gradients, 0..LEN, &first, &passed.blocks, &d_last);
    let gradients = gradients.finish::<f64>();
    for cut in [1, 64, 70, LEN - 1] {
        let runs = [run(0..cut), run(cut..LEN)];
        let (states, transitions) = (delta_states(&inputs, &runs), delta_transitions(&inputs, &runs));
        let after = |i: usize, before: &[f64]| -> Vec<f64> {
            apply(&transitions[i], before, false).iter().zip(&states[i]).map(|(a, b)| a + b).collect()
        };
        let middle = after(0, &first);
        close(&after(1, &middle), &passed.final_state);
        let mut out = DeltaForward::new(HEADS, LEN);
        let (before, behind) = (forward(&mut out, 0..cut, &first), forward(&mut out, cut..LEN, &middle));
        close(&before.final_state, &middle);
        close(&out.finish::<f64>(), &whole);
        let own = delta_initial_gradients(&inputs, &runs, &data.d_out);
        let earlier = |i: usize, after: &[f64]| -> Vec<f64> {
            apply(&transitions[i], after, true).iter().zip(&own[i]).map(|(a, b)| a + b).collect()
        };
        let d_middle = earlier(1, &d_last);
        close(&earlier(0, &d_middle), &d_first);
        let mut parts = DeltaBackward::new(HEADS, LEN);
        close(&backward(&mut parts, cut..LEN, &middle, &behind.blocks, &d_last), &d_middle);
        close(&backward(&mut parts, 0..cut, &first, &before.blocks, &d_middle), &d_first);
        let parts = parts.finish::<f64>();
        close(&parts.qkv, &gradients.qkv);
        close(&parts.g, &gradients.g);
        close(&parts.beta, &gradients.beta);
    }
}

/// A NaN stays in its document and head, also when the same buffers go on to others.
#[test]
fn a_nan_stays_in_its_run() {
    let clean = data();
    let mut dirty = data();
    dirty.qkv[70 * HEADS.width()..][..HEADS.width()].fill(f64::NAN);
    let pass = |data: &Data| {
        let inputs = DeltaInputs::new(HEADS, (1, LEN), &data.qkv, &data.g, &data.beta);
        let runs = [0..20, 20..140, 140..143, 143..LEN].map(|tokens| DeltaRun { row: 0, tokens });
        let mut out = DeltaForward::new(HEADS, LEN);
        let work = runs.clone().map(|run| DeltaForwardRun { run, initial: None, keep_final: false });
        let passed = out.run(&inputs, &work);
        let mut gradients = DeltaBackward::new(HEADS, LEN);
        let work = runs.into_iter().zip(&passed).map(|(run, DeltaPassed { blocks, .. })| DeltaBackwardRun {
            run,
            initial: None,
            blocks,
            d_final: None,
            keep_initial: false,
        });
        gradients.run(&inputs, &work.collect::<Vec<_>>(), &data.d_out);
        (out.finish::<f64>(), gradients.finish::<f64>())
    };
    let ((out, gradients), (dirty_out, dirty_gradients)) = (pass(&clean), pass(&dirty));
    for (clean, dirty) in
        [(&out, &dirty_out), (&gradients.qkv, &dirty_gradients.qkv), (&gradients.g, &dirty_gradients.g)]
    {
        let width = clean.len() / LEN;
        for tokens in [0..20, 140..LEN] {
            let tokens = tokens.start * width..tokens.end * width;
            close(&dirty[tokens.clone()], &clean[tokens]);
        }
        assert!(dirty[70 * width..71 * width].iter().all(|x| x.is_nan()));
    }
}
