//! The text decoder: from embeddings of a rank's tokens to hidden states.

use candle_core::{D, Tensor};
use candle_cp::CpContext;

use crate::config::{Config, TextConfig};
use crate::layer::{Layer, Surroundings};
use crate::model::LocalInputs;
use crate::names;
use candle_cp_layers::moe::RealRows;
use candle_cp_layers::{Error, Recompute, Result, RmsNorm, Rope, Tap, Weights, record_numbered, wide};

/// All decoder layers and the final norm.
#[derive(Debug, Clone)]
pub(crate) struct Decoder {
    layers: Vec<Layer>,
    final_norm: RmsNorm,
    text: TextConfig,
}

impl Decoder {
    pub(crate) fn new(config: &Config, weights: &Weights) -> Result<Self> {
        let text = &config.text;
        let layers = text.layers.iter().enumerate();
        let layer = |(index, kind): (usize, &_)| Layer::new(&names::text_layer(config, index), text, *kind, weights);
        let weight = weights.get(&names::final_norm(config), &[text.hidden_size])?;
        Ok(Self {
            layers: layers.map(layer).collect::<Result<_>>()?,
            final_norm: RmsNorm::zero_centred(weight, text.rms_norm_eps),
            text: text.clone(),
        })
    }

    /// `[batch, local tokens, hidden]` to the same shape, after the final norm.
    pub(crate) fn forward(
        &self,
        local: &LocalInputs,
        context: &CpContext,
        recompute: &Recompute,
        tap: &mut dyn Tap,
    ) -> Result<Tensor> {
        self.check_input(local, context)?;
        let rope = self.rope(&local.positions_abs, &local.embeds_bsh)?;
        tap.record("rope.cos", rope.cos())?;
        if tap.is_on() {
            tap.record("rope.sin", &rope.sin()?)?;
        }
        let real = RealRows::of_rank(context);
        let mut x_bsh = local.embeds_bsh.clone();
        for (index, layer) in self.layers.iter().enumerate() {
            let recompute = &recompute.of_layer(index);
            let around = Surroundings { rope: &rope, context, recompute, real: &real };
            x_bsh = layer.forward(&x_bsh, &around, index, tap)?;
            record_numbered(tap, "mid.hidden_states", index, &x_bsh)?;
        }
        let hidden_bsh = self.final_norm.forward(&x_bsh)?;
        tap.record("mid.final_norm", &hidden_bsh)?;
        Ok(hidden_bsh)
    }

    fn check_input(&self, local: &LocalInputs, context: &CpContext) -> Result<()> {
        let (batch, tokens) = (context.tokens().batch(), context.layout().local_len(context.rank()));
        let wrong =
            |name, found: &Tensor, expected| Error::Input { name, found: format!("{:?}", found.dims()), expected };
        let expected = [batch, tokens, self.text.hidden_size];
        if local.embeds_bsh.dims() != expected {
            let expected = format!("{expected:?} = [batch, tokens of this rank, hidden_size]");
            return Err(wrong("decoder embeddings", &local.embeds_bsh, expected));
        }
        let expected = [3, batch, tokens];
        if local.positions_abs.dims() != expected {
            let expected = format!("{expected:?} = [axes, batch, tokens of this rank]");
            return Err(wrong("positions of this rank", &local.positions_abs, expected));
        }
        Ok(())
    }

    /// The rotary tables of all full attention layers, from the positions `[3, batch, tokens]`.
    fn rope(&self, positions_abs: &Tensor, x: &Tensor) -> Result<Rope> {
        let dtype = wide(x.dtype());
        let positions_abs = positions_abs.to_device(x.device())?.to_dtype(dtype)?;
        let axes = (0..3).map(|axis| positions_abs.get(axis)).collect::<candle_core::Result<Vec<_>>>()?;
        let (frequencies, of_pair): (Vec<f64>, Vec<usize>) = self.text.rope.pairs().into_iter().unzip();
        let frequencies_p = Tensor::new(frequencies, x.device())?.to_dtype(dtype)?;
        let of_pair: Vec<&Tensor> = of_pair.into_iter().map(|axis| &axes[axis]).collect();
        let angles_bsp = Tensor::stack(&of_pair, D::Minus1)?.broadcast_mul(&frequencies_p)?;
        Ok(Rope::from_angles(&angles_bsp, x.dtype())?)
    }
}
