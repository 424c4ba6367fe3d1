//! The model: embeddings of the full sequence, the decoder on a rank's slice, head and loss.

use candle_core::{DType, Tensor};
use candle_cp::{CpContext, ShardedLabels};

use crate::config::Config;
use crate::decoder::Decoder;
use crate::encoders::Encoders;
use crate::{embed, names};
use candle_cp_layers::{Embedding, Head, Recompute, Result, Tap, Weights};

/// One batch, the same on every rank.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Token ids `[batch, tokens]`, u32 or i64; each image has a run of `image_token_id`, one per feature,
    /// and each audio clip a run of `audio_token_id`.
    pub input_ids_bs: Tensor,
    /// `[images, patches, 3 * patch_size^2]`, floating point, 0 to 1; images in the order of their placeholders, row
    /// by row.
    pub pixel_values: Option<Tensor>,
    /// `[images, patches, 2]`, i64: (x, y) of every patch; (-1, -1) for padding.
    pub image_position_ids: Option<Tensor>,
    /// `[clips, frames, mels]`, floating point; audio clips in the order of their placeholders, row by row.
    pub input_features: Option<Tensor>,
    /// `[clips, frames]`, 1 for real frames and 0 for padding.
    pub input_features_mask: Option<Tensor>,
}

impl Inputs {
    /// A batch without images and audio.
    pub fn text(input_ids_bs: Tensor) -> Self {
        Self {
            input_ids_bs,
            pixel_values: None,
            image_position_ids: None,
            input_features: None,
            input_features_mask: None,
        }
    }
}

/// What a rank's decoder works on: its slice of the batch.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LocalInputs {
    /// Merged embeddings `[batch, local tokens, hidden]`.
    pub embeds_bsh: Tensor,
    /// Token ids `[batch, local tokens]`, i64, -1 beyond the end of the batch. Only models with per-layer embeddings
    /// have them.
    pub ids_bs: Option<Tensor>,
}

impl LocalInputs {
    /// For a model whose decoder reads no ids.
    pub fn new(embeds_bsh: Tensor) -> Self {
        Self { embeds_bsh, ids_bs: None }
    }
}

/// Gemma 4.
///
/// It shares storage with the [`Weights`] it was made from: values that an optimizer sets on their variables take
/// effect in the next forward pass.
#[derive(Debug, Clone)]
pub struct Model {
    embedding: Embedding,
    encoders: Encoders,
    decoder: Decoder,
    head: Head,
}

impl Model {
    /// Puts a model together.
    ///
    /// # Errors
    /// The weights lack a tensor or have one of another shape, because they were made for another configuration.
    pub fn new(config: &Config, weights: &Weights) -> Result<Self> {
        let embedding = embed::embedding(config, weights)?;
        let head_vh = match config.tie_word_embeddings {
            true => embedding.table_vh().clone(),
            false => weights.get(names::LM_HEAD, &[config.text.vocab_size, config.text.hidden_size])?,
        };
        Ok(Self {
            encoders: Encoders::new(config, weights)?,
            decoder: Decoder::new(config, weights)?,
            embedding,
            head: Head::new(head_vh, config.text.final_logit_softcapping),
        })
    }

    /// Embeddings of the full sequence `[batch, tokens, hidden]`, features of images and audio spliced in, gradients
    /// kept.
    ///
    /// # Errors
    /// A shape is wrong, an id is outside the vocabulary, images come without positions, audio without its mask, either
    /// to a model without the tower, or a run of placeholders is not filled exactly by whole images or clips.
    pub fn embed(&self, inputs: &Inputs, tap: &mut dyn Tap) -> Result<Tensor> {
        let media = self.encoders.forward(inputs, tap)?;
        let embeds_bsh = self.embedding.forward(&inputs.input_ids_bs, &media)?;
        tap.record("mid.inputs_embeds", &embeds_bsh)?;
        Ok(embeds_bsh)
    }

    /// This rank's slice of the full-sequence embeddings, and of the token ids `[batch, tokens]` where the decoder looks
    /// them up once more (per-layer embeddings): no rank ever holds the full row of that table's output.
    ///
    /// # Errors
    /// Another number of tokens than the context's batch.
    pub fn shard(&self, embeds_bsh: &Tensor, input_ids_bs: &Tensor, context: &CpContext) -> Result<LocalInputs> {
        let ids_bs = match self.decoder.reads_ids() {
            true => Some(context.shard_fill(&input_ids_bs.to_dtype(DType::I64)?, 1, -1.0)?),
            false => None,
        };
        Ok(LocalInputs { embeds_bsh: context.shard(embeds_bsh, 1)?, ids_bs })
    }

    /// Hidden states of a rank's slice, `[batch, local tokens, hidden]`, after the final norm.
    ///
    /// # Errors
    /// The slice does not fit the context, or an exchange with another rank failed.
    pub fn decode(&self, local: &LocalInputs, context: &CpContext, tap: &mut dyn Tap) -> Result<Tensor> {
        self.decode_with(local, context, &Recompute::off(), tap)
    }

    /// As [`Model::decode`]; with `recompute` on, each layer keeps its input only and runs again in backward, which is
    /// then [`Recompute::backward`]. Gradients have the same bits, memory does not grow with layers times their width,
    /// and backward takes the time of one more forward pass.
    ///
    /// # Errors
    /// As [`Model::decode`].
    pub fn decode_with(
        &self,
        local: &LocalInputs,
        context: &CpContext,
        recompute: &Recompute,
        tap: &mut dyn Tap,
    ) -> Result<Tensor> {
        self.decoder.forward(local, context, recompute, tap)
    }

    /// The head's matrix `[vocabulary, hidden]`; the embedding table itself if they are tied.
    pub fn head_vh(&self) -> &Tensor {
        self.head.head_vh()
    }

    /// Soft cap `c` of the logits, `c * tanh(logit / c)`; `None` for no cap.
    pub fn softcap(&self) -> Option<f64> {
        self.head.softcap()
    }

    /// Logits `[.., vocabulary]` in f32 (f64 for f64), soft cap applied. Meant for short inputs; training uses
    /// [`Model::loss`], which never holds them all.
    ///
    /// # Errors
    /// The last dimension is not the model's hidden size.
    pub fn logits(&self, hidden_bsh: &Tensor) -> Result<Tensor> {
        self.head.logits(hidden_bsh)
    }

    /// This rank's share of the mean loss: the sum of its tokens' cross entropies over the number of labels in the
    /// whole batch. The ranks' shares add up to the loss.
    ///
    /// # Errors
    /// Hidden states and labels do not have the same number of tokens.
    pub fn loss(&self, hidden: &Tensor, labels: &ShardedLabels) -> Result<Tensor> {
        self.head.loss(hidden, labels)
    }
}
