//! A decoder layer: a mixer of tokens, then an MLP or experts, each after a norm and added to its input.

use candle_core::Tensor;
use candle_cp::CpContext;
use candle_cp_layers::moe::RealRows;
use candle_cp_layers::{Activation, Linear, Mlp, Recompute, Result, RmsNorm, Rope, Tap, Weights};

use crate::attention::Attention;
use crate::config::{LayerKind, MlpConfig, TextConfig};
use crate::delta_net::DeltaNet;
use crate::moe::MoeBlock;

/// One layer.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    input_norm: RmsNorm,
    mixer: Mixer,
    post_mixer_norm: RmsNorm,
    second: Second,
}

/// What mixes tokens.
#[derive(Debug, Clone)]
enum Mixer {
    Delta(DeltaNet),
    Attention(Attention),
}

/// What follows.
#[derive(Debug, Clone)]
enum Second {
    Mlp(Box<Mlp>),
    Moe(Box<MoeBlock>),
}

/// What a layer works with beside its input.
pub(crate) struct Surroundings<'a> {
    pub(crate) rope: &'a Rope,
    pub(crate) context: &'a CpContext,
    pub(crate) recompute: &'a Recompute,
    /// Which tokens may go to experts.
    pub(crate) real: &'a RealRows,
}

/// The MLP whose projections are under `prefix`.
pub(crate) fn mlp(prefix: &str, hidden: usize, width: usize, weights: &Weights) -> Result<Mlp> {
    let linear = |name: &str, shape| Linear::load(weights, &format!("{prefix}.{name}.weight"), shape);
    Ok(Mlp {
        gate: linear("gate_proj", [width, hidden])?,
        up: linear("up_proj", [width, hidden])?,
        down: linear("down_proj", [hidden, width])?,
        activation: Activation::Silu,
    })
}

impl Layer {
    /// `prefix` is that of the layer, such as `model.layers.0`.
    pub(crate) fn new(prefix: &str, text: &TextConfig, kind: LayerKind, weights: &Weights) -> Result<Self> {
        let hidden = text.hidden_size;
        let norm = |name: &str| -> Result<RmsNorm> {
            let weight = weights.get(&format!("{prefix}.{name}.weight"), &[hidden])?;
            Ok(RmsNorm::zero_centred(weight, text.rms_norm_eps))
        };
        let second = format!("{prefix}.mlp");
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            mixer: match kind {
                LayerKind::Linear => Mixer::Delta(DeltaNet::new(&format!("{prefix}.linear_attn"), text, weights)?),
                LayerKind::Full => Mixer::Attention(Attention::new(&format!("{prefix}.self_attn"), text, weights)?),
            },
            post_mixer_norm: norm("post_attention_layernorm")?,
            second: match &text.mlp {
                MlpConfig::Dense(width) => Second::Mlp(Box::new(mlp(&second, hidden, *width, weights)?)),
                MlpConfig::Moe(moe) => Second::Moe(Box::new(MoeBlock::new(&second, hidden, moe, weights)?)),
            },
        })
    }

    /// `[batch, local tokens, hidden]` to the same shape. Its halves are recomputed one at a time: what happens inside of
    /// one is all that backward has to hold.
    ///
    /// A router tells the tap about layer `index`.
    pub(crate) fn forward(
        &self,
        x_bsh: &Tensor,
        around: &Surroundings,
        index: usize,
        tap: &mut dyn Tap,
    ) -> Result<Tensor> {
        let x_bsh = self.mix(x_bsh, around)?;
        let real = around.real.clone();
        if let (Second::Moe(moe), true) = (&self.second, tap.is_on()) {
            moe.record(&self.post_mixer_norm.forward(&x_bsh.detach())?, &real, index, tap)?;
        }
        let (norm, second) = (self.post_mixer_norm.clone(), self.second.clone());
        around.recompute.run([&x_bsh], move |[x_bsh]| {
            let normed = norm.forward(x_bsh)?;
            let changed = match &second {
                Second::Mlp(mlp) => mlp.forward(&normed)?,
                Second::Moe(moe) => moe.forward(&normed, &real)?,
            };
            Ok((x_bsh + changed)?)
        })
    }

    /// The first half.
    fn mix(&self, x_bsh: &Tensor, around: &Surroundings) -> Result<Tensor> {
        let (norm, mixer) = (self.input_norm.clone(), self.mixer.clone());
        let (rope, context) = (around.rope.clone(), around.context.clone());
        let project = move |[x_bsh]: [&Tensor; 1]| {
            let normed = norm.forward(x_bsh)?;
            match &mixer {
                Mixer::Delta(delta) => delta.project(&normed, &context),
                Mixer::Attention(attention) => attention.project(&normed, &rope),
            }
        };
        let (mixer, context) = (self.mixer.clone(), around.context.clone());
        around.recompute.run_in_two([x_bsh], project, move |[x_bsh], projected| {
            let mixed = match &mixer {
                Mixer::Delta(delta) => delta.mix(projected, &context)?,
                Mixer::Attention(attention) => attention.mix(projected, &context)?,
            };
            Ok((x_bsh + mixed)?)
        })
    }
}
