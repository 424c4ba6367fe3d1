//! Ring attention alone, in a plain Candle program: 4 ranks as threads, causal with a sliding window, forward and
//! backward, checked against attention over the full sequence.
//!
//! `cargo run --release --example ring_attention`

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{CpContext, MaskRule, SequenceLayout, Tokens};

const SEQ: usize = 1000;
const HEADS: usize = 4;
const DIM: usize = 64;
const WINDOW: usize = 300;

/// The reference: softmax over a dense mask. The loss is the sum of squares of the output.
fn full_attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let seen = |q: usize, k: usize| k <= q && q - k < WINDOW;
    let mask = (0..SEQ * SEQ).map(|i| if seen(i / SEQ, i % SEQ) { 0f32 } else { f32::NEG_INFINITY });
    let mask = Tensor::from_iter(mask, q.device())?.reshape((1, 1, SEQ, SEQ))?;
    let scores = (q.matmul(&k.t()?)? / (DIM as f64).sqrt())?.broadcast_add(&mask)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(3)?)?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(3)?)?.matmul(v)?.sqr()?.sum_all()
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let random = || Tensor::randn(0f32, 1.0, (1, HEADS, SEQ, DIM), &Device::Cpu);
    let qkv = [random()?, random()?, random()?];
    let [q, k, v] = qkv.clone().map(|x| Var::from_tensor(&x).expect("a float tensor"));
    let expected = full_attention(&q, &k, &v)?;
    let expected_grads = expected.backward()?;

    // Every rank holds the full tensors here only to keep the example short; a model shards its embeddings instead.
    let ranks = threads::run(4, &threads::Options::default(), |comm| {
        let layout = SequenceLayout::head_tail(SEQ, comm.size())?;
        let context = CpContext::new(comm.clone(), layout, Tokens::single_document(1, SEQ))?;
        let vars = qkv.clone().map(|x| Var::from_tensor(&x).expect("a float tensor"));
        let [q, k, v] = [0, 1, 2].map(|i| context.shard(&vars[i], 2));
        let out = context.attend(&q?, &k?, &v?, &MaskRule::sliding(WINDOW), 1.0 / (DIM as f64).sqrt())?;
        let loss = context.gather(&out, 2)?.sqr()?.sum_all()?; // padding is dropped
        let grads = (&loss / comm.size() as f64)?.backward()?; // the ranks' losses add up
        let grads = vars.iter().map(|var| comm.all_reduce_sum(grads.get(var).expect("reached")));
        Ok::<_, candle_cp::Error>((loss, grads.collect::<candle_cp::Result<Vec<_>>>()?, comm.stats().bytes_sent()))
    })?;

    let difference = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max_all()?.to_dtype(DType::F64)?.to_scalar::<f64>();
    let (loss, grads, bytes) = &ranks[3];
    let (loss, expected) = (loss.to_scalar::<f32>()?, expected.to_scalar::<f32>()?);
    println!("loss {loss}, with full attention {expected}; rank 3 sent {bytes} bytes");
    assert!((loss - expected).abs() < 1e-4 * expected);
    for ((name, var), grad) in [("q", &q), ("k", &k), ("v", &v)].into_iter().zip(grads) {
        let error = difference(grad, expected_grads.get(var).expect("reached"))?;
        println!("largest difference in the gradient of {name}: {error:.1e}");
        assert!(error < 1e-3);
    }
    Ok(())
}
