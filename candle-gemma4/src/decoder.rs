//! The text decoder: from embeddings of a rank's tokens to hidden states.

use candle_core::Tensor;
use candle_cp::CpContext;

use crate::config::{Config, LayerKind, TextConfig};
use crate::error::{Error, Result};
use crate::layer::{Layer, LayerShape};
use crate::names;
use crate::norm::RmsNorm;
use crate::recompute::Recompute;
use crate::rope::Rope;
use crate::tap::{Tap, record_numbered};
use crate::weights::Weights;

#[derive(Debug, Clone)]
struct DecoderLayer {
    layer: Layer,
    kind: LayerKind,
    /// A constant that multiplies the whole residual stream after the layer.
    scalar: f64,
}

impl DecoderLayer {
    /// Attention and MLP are recomputed one at a time: what happens inside of one is all that backward has to hold.
    fn forward(&self, x_bsh: &Tensor, rope: &Rope, context: &CpContext, recompute: &Recompute) -> Result<Tensor> {
        let (layer, rope) = (self.layer.clone(), rope.clone());
        let project = move |[x_bsh]: [&Tensor; 1]| Ok(layer.project(x_bsh, &rope)?.to_vec());
        let (layer, context) = (self.layer.clone(), context.clone());
        let x_bsh = recompute.run_in_two([x_bsh], project, move |[x_bsh], qkv_bhsd| {
            layer.attend(x_bsh, std::array::from_fn(|i| &qkv_bhsd[i]), &context)
        })?;
        let (layer, scalar) = (self.layer.clone(), self.scalar);
        recompute.run([&x_bsh], move |[x_bsh]| match scalar {
            1.0 => layer.transform(x_bsh),
            scalar => Ok((layer.transform(x_bsh)? * scalar)?),
        })
    }
}

/// All decoder layers and the final norm.
#[derive(Debug, Clone)]
pub(crate) struct Decoder {
    layers: Vec<DecoderLayer>,
    final_norm: RmsNorm,
    text: TextConfig,
}

impl Decoder {
    pub(crate) fn new(config: &Config, weights: &Weights) -> Result<Self> {
        let text = &config.text;
        let mut layers = Vec::with_capacity(text.layers.len());
        for (index, layer) in text.layers.iter().enumerate() {
            let prefix = names::text_layer(config, index);
            let shape = LayerShape::text(prefix.clone(), text, layer, text.mask_rule(layer.kind));
            let scalar = weights.get(&format!("{prefix}.layer_scalar"), &[1])?;
            layers.push(DecoderLayer {
                layer: Layer::new(&shape, weights)?,
                kind: layer.kind,
                scalar: scalar.to_dtype(candle_core::DType::F64)?.to_vec1::<f64>()?[0],
            });
        }
        let weight = weights.get(&names::final_norm(config), &[text.hidden_size])?;
        let final_norm = RmsNorm { weight: Some(weight), eps: text.rms_norm_eps };
        Ok(Self { layers, final_norm, text: text.clone() })
    }

    /// `[batch, local tokens, hidden]` to the same shape, after the final norm.
    pub(crate) fn forward(
        &self,
        local_bsh: &Tensor,
        context: &CpContext,
        recompute: &Recompute,
        tap: &mut dyn Tap,
    ) -> Result<Tensor> {
        self.check_input(local_bsh, context)?;
        let positions_bs = context.positions(local_bsh.device())?;
        let sliding = self.rope(LayerKind::Sliding, &positions_bs, local_bsh, tap)?;
        let full = self.rope(LayerKind::Full, &positions_bs, local_bsh, tap)?;
        let mut x_bsh = local_bsh.clone();
        for (index, layer) in self.layers.iter().enumerate() {
            let rope = match layer.kind {
                LayerKind::Sliding => sliding.as_ref(),
                LayerKind::Full => full.as_ref(),
            };
            let rope = rope.expect("every layer type in use has rotary settings");
            x_bsh = layer.forward(&x_bsh, rope, context, recompute)?;
            record_numbered(tap, "mid.hidden_states", index, &x_bsh)?;
        }
        let hidden_bsh = self.final_norm.forward(&x_bsh)?;
        tap.record("mid.final_norm", &hidden_bsh)?;
        Ok(hidden_bsh)
    }

    fn check_input(&self, local_bsh: &Tensor, context: &CpContext) -> Result<()> {
        let tokens = context.layout().local_len(context.rank());
        let expected = [context.tokens().batch(), tokens, self.text.hidden_size];
        if local_bsh.dims() == expected {
            return Ok(());
        }
        Err(Error::Input {
            name: "decoder embeddings",
            found: format!("{:?}", local_bsh.dims()),
            expected: format!("{expected:?} = [batch, tokens of this rank, hidden_size]"),
        })
    }

    /// The rotary tables of a layer type; `None` if the model has no such layer.
    fn rope(&self, kind: LayerKind, positions_bs: &Tensor, x: &Tensor, tap: &mut dyn Tap) -> Result<Option<Rope>> {
        let (Some(config), Some(head_dim)) = (self.text.rope(kind), self.text.head_dim(kind)) else {
            return Ok(None);
        };
        let frequencies = config.inverse_frequencies(head_dim);
        let rope = Rope::new(std::slice::from_ref(positions_bs), &frequencies, x.dtype(), x.device())?;
        if tap.is_on() {
            tap.record(&format!("rope.{}.cos", kind.name()), rope.cos())?;
            tap.record(&format!("rope.{}.sin", kind.name()), &rope.sin()?)?;
        }
        Ok(Some(rope))
    }
}
