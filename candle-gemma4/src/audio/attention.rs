//! Attention over a window of frames, worked on chunk by chunk, with scores for relative positions.
//!
//! The frames are cut into chunks. The queries of a chunk meet one stretch of keys, its context: the chunk itself,
//! `past` frames before it and `future` frames after it. Which of these a query really sees is up to the mask.

use std::f64::consts::{E, LN_2};

use candle_core::{D, DType, Device, Result, Tensor};

use crate::config::AudioConfig;
use candle_cp_layers::{Linear, Weights, wide};

/// Longest wavelength of the position table, in frames over 2 pi.
const MAX_TIMESCALE: f64 = 10_000.0;

/// Chunks of queries and their contexts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    chunk: usize,
    past: usize,
    future: usize,
}

impl Window {
    pub(super) fn new(audio: &AudioConfig) -> Self {
        Self {
            chunk: audio.attention_chunk_size,
            past: audio.attention_context_left - 1,
            future: audio.attention_context_right,
        }
    }

    fn context(self) -> usize {
        self.past + self.chunk + self.future
    }

    fn chunks(self, frames: usize) -> usize {
        frames.div_ceil(self.chunk)
    }

    /// Whether the query sees the key. The library counts the window's own limits out on both sides: the context
    /// holds one frame more, before and after, than any query sees.
    fn sees(self, query: usize, key: usize) -> bool {
        match query.checked_sub(key) {
            Some(distance) => distance < self.past,
            None => key - query < self.future,
        }
    }

    /// `[clips, 1, chunks, chunk, context]`, 1 where a query sees a key of its chunk's context.
    pub(super) fn mask(self, is_real: &[Vec<bool>], device: &Device) -> Result<Tensor> {
        let frames = is_real.first().map_or(0, Vec::len);
        let (chunks, context) = (self.chunks(frames), self.context());
        let mut mask = Vec::with_capacity(is_real.len() * chunks * self.chunk * context);
        for clip in is_real {
            for query in 0..chunks * self.chunk {
                let start = query - query % self.chunk;
                let visible = |place: usize| {
                    let key = (start + place).checked_sub(self.past).filter(|&key| key < frames);
                    key.is_some_and(|key| clip[key] && self.sees(query, key))
                };
                mask.extend((0..context).map(|place| u8::from(visible(place))));
            }
        }
        Tensor::from_vec(mask, (is_real.len(), 1, chunks, self.chunk, context), device)
    }

    /// `[batch, frames, heads, size]` to `[batch, heads, chunks, chunk, size]`, zeros after the last frame.
    fn split(self, x_bthd: &Tensor) -> Result<Tensor> {
        let (batch, frames, heads, size) = x_bthd.dims4()?;
        let chunks = self.chunks(frames);
        let padded = x_bthd.pad_with_zeros(1, 0, chunks * self.chunk - frames)?;
        let split = padded.reshape((batch, chunks, self.chunk, heads, size))?;
        split.permute((0, 3, 1, 2, 4))?.contiguous()
    }

    /// `[batch, frames, heads, size]` to `[batch, heads, chunks, context, size]`, zeros outside the frames.
    fn contexts(self, x_bthd: &Tensor) -> Result<Tensor> {
        let (batch, frames, heads, size) = x_bthd.dims4()?;
        let (chunks, context) = (self.chunks(frames), self.context());
        let after = chunks * self.chunk + self.future - frames;
        let padded = x_bthd.pad_with_zeros(1, self.past, after)?;
        let places = (0..chunks).flat_map(|chunk| (0..context).map(move |place| (chunk * self.chunk + place) as u32));
        let places = Tensor::from_iter(places, x_bthd.device())?;
        let stretches = padded.index_select(&places, 1)?.reshape((batch, chunks, context, heads, size))?;
        stretches.permute((0, 3, 1, 2, 4))?.contiguous()
    }

    /// `[positions, width]`: sines and cosines of the positions from half the context down to 0.
    ///
    /// DIFFERENCE: the library rounds frequencies and angles to the type of the weights when it loads a model in half
    /// precision; here the table itself is rounded, once.
    pub(super) fn position_table(self, width: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let pairs = width / 2;
        let step = MAX_TIMESCALE.ln() / pairs.saturating_sub(1).max(1) as f64;
        let angle = |position: usize, pair: usize| position as f64 * (-step * pair as f64).exp();
        let row = |position: usize| {
            let sines = (0..pairs).map(move |pair| angle(position, pair).sin());
            sines.chain((0..pairs).map(move |pair| angle(position, pair).cos()))
        };
        let positions = self.context() / 2 + 1;
        let values: Vec<f64> = (0..positions).rev().flat_map(row).collect();
        Tensor::from_vec(values, (positions, width), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
    }

    /// `[batch, heads, chunks, chunk, positions]`, a query's score for every row of the position table, to
    /// `[.., context]`: query `i` of a chunk takes row `c - i` for place `c` of the context, and 0 beyond the table.
    ///
    /// Rows one longer than the context, read as rows of the context's length, move one place further with each
    /// query. What this brings to places `c < i` belongs to another query; none of them is seen.
    fn align(self, scores: &Tensor) -> Result<Tensor> {
        let (batch, heads, chunks, chunk, positions) = scores.dims5()?;
        let context = self.context();
        let padded = scores.pad_with_zeros(4, 0, context + 1 - positions)?;
        let flat = padded.reshape((batch, heads, chunks, chunk * (context + 1)))?;
        flat.narrow(3, 0, chunk * context)?.reshape((batch, heads, chunks, chunk, context))
    }
}

/// The attention of one layer.
#[derive(Debug, Clone)]
pub(super) struct LocalAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    relative_key: Linear,
    /// `[head size]`: the scale of a query's dimension before softplus.
    per_dim_scale: Tensor,
    head_dim: usize,
    window: Window,
    cap: f64,
    /// Score of a key that is not seen.
    unseen: f64,
}

impl LocalAttention {
    pub(super) fn new(prefix: &str, audio: &AudioConfig, weights: &Weights) -> candle_cp_layers::Result<Self> {
        let hidden = audio.hidden_size;
        let linear = |name: &str| {
            Linear::clippable(weights, &format!("{prefix}.{name}"), [hidden, hidden], audio.use_clipped_linears)
        };
        let relative_key = Linear::load(weights, &format!("{prefix}.relative_k_proj.weight"), [hidden, hidden])?;
        Ok(Self {
            query: linear("q_proj")?,
            key: linear("k_proj")?,
            value: linear("v_proj")?,
            output: linear("post")?,
            relative_key,
            per_dim_scale: weights.get(&format!("{prefix}.per_dim_scale"), &[audio.head_dim()])?,
            head_dim: audio.head_dim(),
            window: Window::new(audio),
            cap: audio.attention_logit_cap,
            unseen: audio.attention_invalid_logits_value,
        })
    }

    /// `[clips, frames, width]` to the same shape; `positions_pw` and `mask` are those of the [`Window`].
    pub(super) fn forward(&self, x_btw: &Tensor, positions_pw: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, frames, width) = x_btw.dims3()?;
        let dtype = wide(x_btw.dtype());
        let heads = |linear: &Linear| linear.heads(x_btw, self.head_dim)?.to_dtype(dtype);
        let query_scale = (self.head_dim as f64).powf(-0.5) / LN_2;
        let key_scale = (1.0 + E).ln() / LN_2;
        let scale = softplus(&self.per_dim_scale.to_dtype(dtype)?)?.to_dtype(self.per_dim_scale.dtype())?;
        let q_bthd = (heads(&self.query)? * query_scale)?.broadcast_mul(&scale.to_dtype(dtype)?)?;
        let k_bthd = (heads(&self.key)? * key_scale)?;

        let q = self.window.split(&q_bthd)?;
        let k = self.window.contexts(&k_bthd)?;
        let v = self.window.contexts(&heads(&self.value)?)?;
        let scores = (matmul(&q, &k.flatten_to(2)?.t()?)? + self.position_scores(&q, positions_pw)?)?;
        let scores = ((scores / self.cap)?.tanh()? * self.cap)?;
        let unseen = Tensor::new(self.unseen, x_btw.device())?.to_dtype(dtype)?.broadcast_as(scores.shape())?;
        let scores = mask.broadcast_as(scores.shape())?.where_cond(&scores, &unseen)?;
        let out = matmul(&softmax(&scores)?, &v.flatten_to(2)?)?;

        let (_, _, chunks, chunk, _) = out.dims5()?;
        let out_btw = out.permute((0, 2, 3, 1, 4))?.reshape((batch, chunks * chunk, width))?.narrow(1, 0, frames)?;
        self.output.forward(&out_btw.to_dtype(x_btw.dtype())?)
    }

    fn position_scores(&self, q: &Tensor, positions_pw: &Tensor) -> Result<Tensor> {
        let (batch, heads, chunks, chunk, size) = q.dims5()?;
        let k_phd = self.relative_key.heads(positions_pw, size)?.to_dtype(q.dtype())?;
        let k_hdp = k_phd.permute((1, 2, 0))?.contiguous()?;
        let scores = q.reshape((batch, heads, chunks * chunk, size))?.broadcast_matmul(&k_hdp.unsqueeze(0)?)?;
        self.window.align(&scores.reshape((batch, heads, chunks, chunk, ()))?)
    }
}

/// `[batch, heads, chunks, rows, n]` times `[batch * heads * chunks, n, columns]`: Candle takes a transposed operand in
/// up to four dimensions only.
fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (batch, heads, chunks, rows, _) = a.dims5()?;
    a.flatten_to(2)?.matmul(b)?.reshape((batch, heads, chunks, rows, b.dim(2)?))
}

/// `ln(1 + e^x)` in a form that cannot overflow.
fn softplus(x: &Tensor) -> Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}

/// Over the last dimension, from operations that have a backward pass.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;

    #[test]
    fn softplus_has_its_slope_everywhere() -> Result<()> {
        let x = Var::new(&[-900f64, -1.0, 0.0, 1.0, 900.0], &Device::Cpu)?;
        let y = softplus(&x)?;
        let slope = y.sum_all()?.backward()?.get(&x).unwrap().to_vec1::<f64>()?;
        let expected = [(0.0, 0.0), ((1.0 + (-1f64).exp()).ln(), 1.0 / (1.0 + E)), (LN_2, 0.5)];
        for ((value, slope), (expected, expected_slope)) in y.to_vec1::<f64>()?.iter().zip(&slope).zip(expected) {
            assert!((value - expected).abs() < 1e-12 && (slope - expected_slope).abs() < 1e-12, "{value} {slope}");
        }
        assert_eq!((y.to_vec1::<f64>()?[4], slope[4]), (900.0, 1.0));
        Ok(())
    }

    #[test]
    fn queries_see_real_frames_inside_the_window() -> Result<()> {
        let window = Window { chunk: 2, past: 2, future: 2 };
        let mask = window.mask(&[vec![true, true, true, false, true]], &Device::Cpu)?;
        assert_eq!(mask.dims(), [1, 1, 3, 2, 6]);
        // Places of a chunk's context are frames -2..4, 0..6 and 2..8.
        let rows = mask.reshape((6, 6))?.to_vec2::<u8>()?;
        assert_eq!(rows[0], [0, 0, 1, 1, 0, 0]);
        assert_eq!(rows[1], [0, 0, 1, 1, 1, 0]);
        assert_eq!(rows[2], [0, 1, 1, 0, 0, 0]);
        assert_eq!(rows[3], [0, 0, 1, 0, 1, 0]);
        assert_eq!(rows[4], [0, 0, 1, 0, 0, 0]);
        Ok(())
    }
}
