//! The text decoder: from embeddings of a rank's tokens to hidden states.

use std::collections::BTreeMap;

use candle_core::Tensor;
use candle_cp::{CpContext, GatheredKeys};

use crate::config::{Config, LayerKind, TextConfig};
use crate::layer::{Layer, LayerShape};
use crate::model::LocalInputs;
use crate::moe::MoeBlock;
use crate::names;
use crate::per_layer::{PerLayerBlock, PerLayerEmbedding};
use candle_cp_layers::moe::RealRows;
use candle_cp_layers::{Error, Recompute, Result, RmsNorm, Rope, Tap, Weights, record_numbered};

#[derive(Debug, Clone)]
struct DecoderLayer {
    layer: Layer,
    kind: LayerKind,
    keys: KeyRole,
    moe: Option<MoeBlock>,
    per_layer: Option<PerLayerBlock>,
    /// A constant that multiplies the whole residual stream after the layer.
    scalar: f64,
}

/// What a layer does with keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyRole {
    /// Makes its own and is the only one to read them.
    Own,
    /// Makes its own, and later layers of its type read them as well.
    Lends,
    /// Reads those of the layer of its type that lends.
    Reads,
}

/// Gathered keys and values by layer type.
type Lent = BTreeMap<LayerKind, GatheredKeys>;

/// What a layer works with beside its input.
struct Surroundings<'a> {
    rope: &'a Rope,
    context: &'a CpContext,
    recompute: &'a Recompute,
}

impl DecoderLayer {
    /// Attention and MLP are recomputed one at a time: what happens inside of one is all that backward has to hold.
    fn attend(&self, x_bsh: &Tensor, lent: &mut Lent, around: &Surroundings) -> Result<Tensor> {
        let Surroundings { rope, context, recompute } = *around;
        if self.keys == KeyRole::Own {
            let (layer, rope) = (self.layer.clone(), rope.clone());
            let project = move |[x_bsh]: [&Tensor; 1]| Ok(layer.project(x_bsh, &rope)?.to_vec());
            let (layer, context) = (self.layer.clone(), context.clone());
            return recompute.run_in_two([x_bsh], project, move |[x_bsh], qkv_bshd| {
                layer.attend(x_bsh, std::array::from_fn(|i| &qkv_bshd[i]), &context)
            });
        }
        let mut x_bsh = x_bsh.clone();
        if self.keys == KeyRole::Lends {
            let (layer, rope) = (self.layer.clone(), rope.clone());
            let stacked = recompute.run([&x_bsh], move |[x_bsh]| layer.stacked_keys_values(x_bsh, &rope))?;
            lent.insert(self.kind, context.gather_keys(&stacked.get(0)?, &stacked.get(1)?, self.layer.rule())?);
            x_bsh = apart(&x_bsh)?;
        }
        let keys = lent.get(&self.kind).expect("the configuration has a layer that lends for each that reads").clone();
        let (layer, rope) = (self.layer.clone(), rope.clone());
        let project = move |[x_bsh, _]: [&Tensor; 2]| Ok(vec![layer.queries(x_bsh, &rope)?]);
        let (layer, context) = (self.layer.clone(), context.clone());
        let numbers = keys.tensor().clone();
        recompute.run_in_two([&x_bsh, &numbers], project, move |[x_bsh, numbers], q_bshd| {
            layer.attend_gathered(x_bsh, &q_bshd[0], &keys.with_tensor(numbers.clone())?, &context)
        })
    }

    /// `per_layer_bsp` is the layer's part of the per-layer embeddings, for models that have them; `real` tells which
    /// tokens may go to experts.
    fn transform(
        &self,
        x_bsh: &Tensor,
        per_layer_bsp: Option<&Tensor>,
        real: &RealRows,
        recompute: &Recompute,
    ) -> Result<Tensor> {
        let (layer, moe, real, scalar) = (self.layer.clone(), self.moe.clone(), real.clone(), self.scalar);
        let transform = move |x_bsh: &Tensor| match &moe {
            Some(moe) => layer.transform_with(x_bsh, |mlp_bsh| moe.join(x_bsh, &mlp_bsh, &real)),
            None => layer.transform(x_bsh),
        };
        let scaled = move |x_bsh: Tensor| match scalar {
            1.0 => Ok(x_bsh),
            scalar => Ok((x_bsh * scalar)?),
        };
        match (self.per_layer.clone(), per_layer_bsp) {
            (Some(block), Some(input_bsp)) => recompute.run([x_bsh, input_bsp], move |[x_bsh, input_bsp]| {
                scaled(block.forward(&transform(x_bsh)?, input_bsp)?)
            }),
            _ => recompute.run([x_bsh], move |[x_bsh]| scaled(transform(x_bsh)?)),
        }
    }
}

/// The same numbers, not copied, as a node of their own: gradients from what reads it are summed before they join those
/// from what else reads `x`. The input of a recomputed part gets them in one piece; so gradients have the same bits.
fn apart(x: &Tensor) -> candle_core::Result<Tensor> {
    x.reshape(x.shape())
}

/// All decoder layers and the final norm.
#[derive(Debug, Clone)]
pub(crate) struct Decoder {
    per_layer: Option<PerLayerEmbedding>,
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
            let per_layer = text.per_layer.map(|per_layer| {
                PerLayerBlock::new(&prefix, text.hidden_size, per_layer.width, text.rms_norm_eps, weights)
            });
            layers.push(DecoderLayer {
                layer: Layer::new(&shape, weights)?,
                kind: layer.kind,
                keys: match layer.keys_of {
                    Some(_) => KeyRole::Reads,
                    None if text.layers.iter().any(|other| other.keys_of == Some(index)) => KeyRole::Lends,
                    None => KeyRole::Own,
                },
                moe: text.moe.map(|moe| MoeBlock::new(&prefix, text, &moe, weights)).transpose()?,
                per_layer: per_layer.transpose()?,
                scalar: scalar.to_dtype(candle_core::DType::F64)?.to_vec1::<f64>()?[0],
            });
        }
        let weight = weights.get(&names::final_norm(config), &[text.hidden_size])?;
        let final_norm = RmsNorm::new(Some(weight), text.rms_norm_eps);
        let per_layer =
            text.per_layer.map(|per_layer| PerLayerEmbedding::new(config, per_layer, weights)).transpose()?;
        Ok(Self { per_layer, layers, final_norm, text: text.clone() })
    }

    /// `[batch, local tokens, hidden]` to the same shape, after the final norm.
    pub(crate) fn forward(
        &self,
        local: &LocalInputs,
        context: &CpContext,
        recompute: &Recompute,
        tap: &mut dyn Tap,
    ) -> Result<Tensor> {
        let local_bsh = &local.embeds_bsh;
        self.check_input(local_bsh, context)?;
        let per_layer_bslp = self.per_layer_inputs(local, tap)?;
        let positions_bs = context.positions(local_bsh.device())?;
        let sliding = self.rope(LayerKind::Sliding, &positions_bs, local_bsh, tap)?;
        let full = self.rope(LayerKind::Full, &positions_bs, local_bsh, tap)?;
        let mut x_bsh = match per_layer_bslp {
            Some(_) => apart(local_bsh)?,
            None => local_bsh.clone(),
        };
        let (mut lent, real) = (Lent::new(), RealRows::of_rank(context));
        for (index, layer) in self.layers.iter().enumerate() {
            let rope = match layer.kind {
                LayerKind::Sliding => sliding.as_ref(),
                LayerKind::Full => full.as_ref(),
            };
            let rope = rope.expect("every layer type in use has rotary settings");
            let recompute = &recompute.of_layer(index);
            x_bsh = layer.attend(&x_bsh, &mut lent, &Surroundings { rope, context, recompute })?;
            let per_layer_bsp = per_layer_bslp.as_ref().map(|all| all.narrow(2, index, 1)?.squeeze(2)?.contiguous());
            if let Some(moe) = &layer.moe {
                moe.record(&x_bsh, &real, index, tap)?;
            }
            x_bsh = layer.transform(&x_bsh, per_layer_bsp.transpose()?.as_ref(), &real, recompute)?;
            record_numbered(tap, "mid.hidden_states", index, &x_bsh)?;
        }
        let hidden_bsh = self.final_norm.forward(&x_bsh)?;
        tap.record("mid.final_norm", &hidden_bsh)?;
        Ok(hidden_bsh)
    }

    /// `[batch, local tokens, layers, width]` for models with per-layer embeddings.
    fn per_layer_inputs(&self, local: &LocalInputs, tap: &mut dyn Tap) -> Result<Option<Tensor>> {
        let Some(embedding) = &self.per_layer else { return Ok(None) };
        let (batch, tokens, _) = local.embeds_bsh.dims3()?;
        match &local.ids_bs {
            Some(ids_bs) if ids_bs.dims() == [batch, tokens] => {
                Ok(Some(embedding.forward(ids_bs, &local.embeds_bsh, tap)?))
            }
            other => Err(Error::Input {
                name: "token ids of this rank",
                found: other.as_ref().map_or("none".to_string(), |ids_bs| format!("{:?}", ids_bs.dims())),
                expected: format!("[{batch}, {tokens}], which this model's per-layer embeddings need (`Model::shard`)"),
            }),
        }
    }

    /// Whether it looks token ids up.
    pub(crate) fn reads_ids(&self) -> bool {
        self.per_layer.is_some()
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
