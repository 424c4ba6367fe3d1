//! Peak memory of the loss, by an allocator that counts. One test, as the counts are those of the whole process.

use candle_core::{Device, Tensor, Var};
use candle_cp::{LossOptions, Result, linear_cross_entropy};

#[path = "common/counting.rs"]
mod counting;

/// Runs `f` and returns its result with the peak beyond what was held before.
fn peak<R>(f: impl FnOnce() -> Result<R>) -> Result<(R, usize)> {
    let before = counting::reset_peak();
    let result = f()?;
    Ok((result, counting::peak() - before))
}

const TOKENS: usize = 512;
const VOCABULARY: usize = 8192;
const WIDTH: usize = 256;
const CHUNK: usize = 32;
const D_WEIGHT: usize = 4 * VOCABULARY * WIDTH;
const D_HIDDEN: usize = 4 * TOKENS * WIDTH;
/// Of one chunk.
const LOGITS: usize = 4 * CHUNK * VOCABULARY;
/// Partial sums of the hidden gradient, packed blocks, small lists: all small beside a weight's gradient.
const SLACK: usize = 3 << 19;

/// Peaks of forward and backward.
fn peaks(hidden: &Tensor, weight: &Tensor, labelled: bool, factor: f64) -> Result<(usize, usize)> {
    let label = |i: usize| if labelled { (i * 31 % VOCABULARY) as i64 } else { -100 };
    let labels = Tensor::from_vec((0..TOKENS).map(label).collect(), TOKENS, &Device::Cpu)?;
    let options = LossOptions { softcap: Some(30.0), chunk_tokens: Some(CHUNK), ..LossOptions::new(TOKENS as f64) };
    let (loss, forward) = peak(|| linear_cross_entropy(hidden, weight, &labels, &options))?;
    let before_backward = counting::reset_peak();
    let (gradients, backward) = peak(|| Ok((&loss * factor)?.backward()?))?;
    // Both gradients are there, and the operator has kept no copy of them.
    let kept = counting::reset_peak().saturating_sub(before_backward);
    assert!(kept < SLACK, "{kept} bytes more after backward");
    drop(gradients);
    Ok((forward, backward))
}

#[test]
fn logits_of_one_chunk_and_no_copy_of_a_gradient() -> Result<()> {
    const { assert!(SLACK + LOGITS < D_WEIGHT && 16 * LOGITS == 4 * TOKENS * VOCABULARY) };
    let hidden = Var::randn(0f32, 1.0, (TOKENS, WIDTH), &Device::Cpu)?;
    let weight = Var::randn(0f32, 0.1, (VOCABULARY, WIDTH), &Device::Cpu)?;
    // On one thread, so that the memory which products keep per thread exists after a first call.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    pool.install(|| {
        peaks(&hidden, &weight, true, 1.0)?;
        for factor in [1.0, 2.5] {
            let (forward, backward) = peaks(&hidden, &weight, true, factor)?;
            let allowed = D_WEIGHT + D_HIDDEN + LOGITS + SLACK;
            assert!(forward < allowed, "forward takes {forward} bytes, {allowed} are allowed");
            // Candle adds the gradient that it is handed (held since forward) to zeros of the same size.
            let allowed = 2 * D_WEIGHT + SLACK;
            assert!(backward < allowed, "backward takes {backward} bytes, {allowed} are allowed");
        }
        let (forward, _) = peaks(&hidden, &weight.detach(), true, 1.0)?;
        let allowed = D_HIDDEN + LOGITS + SLACK;
        assert!(forward < allowed, "with a frozen weight forward takes {forward} bytes, {allowed} are allowed");
        let (forward, _) = peaks(&hidden, &weight, false, 1.0)?;
        let allowed = D_WEIGHT + D_HIDDEN + SLACK / 8;
        assert!(forward < allowed, "without labels forward takes {forward} bytes, {allowed} are allowed");
        Ok(())
    })
}
