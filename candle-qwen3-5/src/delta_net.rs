//! The gated delta net: a recurrence with a state in place of attention.

use candle_core::{DType, Tensor};
use candle_cp::{ConvActivation, CpContext, DeltaHeads, with_backward};
use candle_cp_layers::{Activation, Linear, Result, RmsNorm, Weights, activate, gated, wide};

use crate::config::TextConfig;

/// The gated delta net of a layer.
///
/// DIFFERENCE: Hugging Face sets its input to 0 at padding tokens. Here padding belongs to no document, so neither the
/// convolution nor the rule carries anything across it.
#[derive(Debug, Clone)]
pub(crate) struct DeltaNet {
    /// To queries, keys and values of all heads, one after the other.
    qkv: Linear,
    /// To the gate of the output.
    gate: Linear,
    /// To what the strength of writing is made of.
    strength: Linear,
    /// To what the decay is made of.
    decay: Linear,
    filter_c1k: Tensor,
    rate_log_h: Tensor,
    decay_bias_h: Tensor,
    norm: RmsNorm,
    output: Linear,
    heads: DeltaHeads,
}

impl DeltaNet {
    /// `prefix` is that of the module, such as `model.layers.0.linear_attn`.
    pub(crate) fn new(prefix: &str, text: &TextConfig, weights: &Weights) -> Result<Self> {
        let (hidden, delta) = (text.hidden_size, text.delta_net);
        let (channels, values, heads) = (delta.channels(), delta.value_width(), delta.value_heads);
        let linear = |name: &str, shape| Linear::load(weights, &format!("{prefix}.{name}.weight"), shape);
        let get = |name: &str, shape: &[usize]| weights.get(&format!("{prefix}.{name}"), shape);
        Ok(Self {
            qkv: linear("in_proj_qkv", [channels, hidden])?,
            gate: linear("in_proj_z", [values, hidden])?,
            strength: linear("in_proj_b", [heads, hidden])?,
            decay: linear("in_proj_a", [heads, hidden])?,
            filter_c1k: get("conv1d.weight", &[channels, 1, delta.kernel])?,
            rate_log_h: get("A_log", &[heads])?,
            decay_bias_h: get("dt_bias", &[heads])?,
            norm: RmsNorm::new(Some(get("norm.weight", &[delta.value_dim])?), text.rms_norm_eps),
            output: linear("out_proj", [hidden, values])?,
            heads: DeltaHeads {
                key_heads: delta.key_heads,
                value_heads: delta.value_heads,
                key_dim: delta.key_dim,
                value_dim: delta.value_dim,
            },
        })
    }

    /// Of this rank's tokens: the gate of the output `[batch, local tokens, value heads, value size]`; convolved queries,
    /// keys and values `[batch, local tokens, channels]`; log of the decay and strength of writing
    /// `[batch, local tokens, value heads]`, in f32 (f64 for f64). The order is that in which [`DeltaNet::mix`] takes them
    /// up: so sums of gradients have the same order with and without recomputation.
    ///
    /// DIFFERENCE: Hugging Face rounds the strength of writing to the model's type.
    pub(crate) fn project(&self, x_bsh: &Tensor, context: &CpContext) -> Result<Vec<Tensor>> {
        let qkv_bsc = context.causal_conv(&self.qkv.forward(x_bsh)?, &self.filter_c1k, ConvActivation::Silu)?;
        let decay_bsh = log_decay(&self.decay.forward(x_bsh)?, &self.rate_log_h, &self.decay_bias_h)?;
        let strength_bsh = self.strength.forward(x_bsh)?.to_dtype(wide(x_bsh.dtype()))?;
        let strength_bsh = activate(&strength_bsh, Activation::Sigmoid)?;
        Ok(vec![self.gate.heads(x_bsh, self.heads.value_dim)?, qkv_bsc, decay_bsh, strength_bsh])
    }

    /// What [`DeltaNet::project`] made to `[batch, local tokens, hidden]`; states of the other ranks come through the
    /// context.
    pub(crate) fn mix(&self, projected: &[Tensor], context: &CpContext) -> Result<Tensor> {
        let [gate_bshv, qkv_bsc, decay_bsh, strength_bsh] = projected else {
            unreachable!("the delta net projects four tensors");
        };
        let out_bshv = context.delta_rule(qkv_bsc, decay_bsh, strength_bsh, &self.heads)?;
        let gated_bshv = gated(gate_bshv, &self.norm.forward(&out_bshv)?, Activation::Silu)?;
        Ok(self.output.over_heads(&gated_bshv)?)
    }
}

/// `-exp(rate_log) * ln(1 + exp(x + bias))`, from `x [batch, tokens, heads]` in f32 (f64 for f64).
///
/// Computed in f64: a decay near 1 is a logarithm near 0, and its relative error adds up over a long document.
fn log_decay(x_bsh: &Tensor, rate_log_h: &Tensor, bias_h: &Tensor) -> Result<Tensor> {
    let parts = |x: &Tensor, rate_log: &Tensor, bias: &Tensor| {
        let x = x.detach().to_dtype(DType::F64)?.broadcast_add(&bias.detach().to_dtype(DType::F64)?)?;
        Ok::<_, candle_core::Error>((x, rate_log.detach().to_dtype(DType::F64)?.exp()?.neg()?))
    };
    let (x, rate) = parts(x_bsh, rate_log_h, bias_h)?;
    let value = softplus(&x)?.broadcast_mul(&rate)?.to_dtype(wide(x_bsh.dtype()))?;
    Ok(with_backward("log-decay", [x_bsh, rate_log_h, bias_h], value, move |[x_bsh, rate_log_h, bias_h], grad| {
        let (x, rate) = parts(x_bsh, rate_log_h, bias_h)?;
        let grad = grad.to_dtype(DType::F64)?.broadcast_mul(&rate)?;
        let rate_grad = (&grad * softplus(&x)?)?.sum((0, 1))?.to_dtype(rate_log_h.dtype())?;
        let sigmoid = x.affine(0.5, 0.0)?.tanh()?.affine(0.5, 0.5)?;
        let x_grad = (grad * sigmoid)?;
        let bias_grad = x_grad.sum((0, 1))?.to_dtype(bias_h.dtype())?;
        Ok([Some(x_grad.to_dtype(x_bsh.dtype())?), Some(rate_grad), Some(bias_grad)])
    })?)
}

/// `ln(1 + exp(x))`, without overflow.
fn softplus(x: &Tensor) -> candle_core::Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};
    use candle_cp_layers::testing::{assert_close, random};

    use super::*;

    #[test]
    fn the_log_of_the_decay_has_the_gradients_of_its_formula() -> Result<()> {
        let x = Var::from_tensor(&(random(&[2, 5, 3], DType::F64, 1)? * 3.0)?)?;
        let rate_log = Var::from_tensor(&random(&[3], DType::F64, 2)?)?;
        let bias = Var::from_tensor(&random(&[3], DType::F64, 3)?)?;
        let grad = random(&[2, 5, 3], DType::F64, 4)?;
        let found = log_decay(&x, &rate_log, &bias)?;
        let soft = (x.broadcast_add(&bias)?.exp()? + 1.0)?.log()?;
        let expected = soft.broadcast_mul(&rate_log.exp()?.neg()?)?;
        assert_close("value", &found, &expected, 1e-12)?;
        let gradients = |y: &Tensor| (y * &grad)?.sum_all()?.backward();
        let (found, expected) = (gradients(&found)?, gradients(&expected)?);
        for var in [&x, &rate_log, &bias] {
            assert_close("gradient", found.get(var).unwrap(), expected.get(var).unwrap(), 1e-12)?;
        }
        Ok(())
    }

    #[test]
    fn large_numbers_neither_overflow_nor_lose_their_gradients() -> Result<()> {
        let x = Var::new(&[[[-800f32, -20.0, 0.0, 20.0, 800.0]]], &Device::Cpu)?;
        let zeros = Tensor::zeros(5, DType::F32, &Device::Cpu)?;
        let found = log_decay(&x, &zeros, &zeros)?;
        let values = found.flatten_all()?.to_vec1::<f32>()?;
        let tiny = -(-20f64).exp() as f32;
        assert!((values[1] / tiny - 1.0).abs() < 1e-6, "{values:?}");
        assert_eq!([values[0], values[3], values[4]], [0.0, -20.0, -800.0]);
        let gradient = found.sum_all()?.backward()?.get(&x).unwrap().flatten_all()?.to_vec1::<f32>()?;
        assert_eq!([gradient[0], gradient[2], gradient[4]], [0.0, -0.5, -1.0]);
        Ok(())
    }
}
