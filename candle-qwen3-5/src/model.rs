//! The model: embeddings of the full sequence, the decoder on a rank's slice, head and loss.

use candle_core::{DType, Tensor};
use candle_cp::{CpContext, ShardedLabels};

use crate::config::Config;
use crate::decoder::Decoder;
use crate::names;
use crate::vision::VisionTower;
use candle_cp_layers::{Embedding, EmbeddingSettings, Error, Features, Head, Media, Recompute, Result, Tap, Weights};

/// One batch, the same on every rank.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Token ids `[batch, tokens]`, u32 or i64; each image has a run of `image_token_id`, one per feature.
    pub input_ids_bs: Tensor,
    /// Positions along time, height and width `[3, batch, tokens]`, integers, counted in every document from 0. `None`
    /// for a batch without images: the place in the document on all three axes.
    pub position_ids_abs: Option<Tensor>,
    /// `[patches of all images, colours * frames * rows * columns of a patch]`, floating point, normalized; images in the
    /// order of their placeholders, row by row.
    pub pixel_values: Option<Tensor>,
    /// `[images, 3]`, i64: frames, rows and columns of patches of every image.
    pub image_grid_thw: Option<Tensor>,
}

impl Inputs {
    /// A batch without images.
    pub fn text(input_ids_bs: Tensor) -> Self {
        Self { input_ids_bs, position_ids_abs: None, pixel_values: None, image_grid_thw: None }
    }
}

/// What a rank's decoder works on: its slice of the batch.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LocalInputs {
    /// Merged embeddings `[batch, local tokens, hidden]`.
    pub embeds_bsh: Tensor,
    /// Positions along time, height and width `[3, batch, local tokens]`, integers.
    pub positions_abs: Tensor,
}

impl LocalInputs {
    /// A slice that was cut by other means than [`Model::shard`].
    pub fn new(embeds_bsh: Tensor, positions_abs: Tensor) -> Self {
        Self { embeds_bsh, positions_abs }
    }
}

/// Qwen 3.5.
///
/// It shares storage with the [`Weights`] it was made from: values that an optimizer sets on their variables take
/// effect in the next forward pass.
#[derive(Debug, Clone)]
pub struct Model {
    embedding: Embedding,
    vision: Option<VisionTower>,
    decoder: Decoder,
    head: Head,
}

impl Model {
    /// Puts a model together.
    ///
    /// # Errors
    /// The weights lack a tensor or have one of another shape, because they were made for another configuration.
    pub fn new(config: &Config, weights: &Weights) -> Result<Self> {
        let text = &config.text;
        let shape = [text.vocab_size, text.hidden_size];
        let table_vh = weights.get(&names::embed_tokens(config), &shape)?;
        let head_vh = match config.tie_word_embeddings {
            true => table_vh.clone(),
            false => weights.get(names::LM_HEAD, &shape)?,
        };
        let settings = EmbeddingSettings {
            vocab_size: text.vocab_size,
            vocab_setting: "vocab_size",
            pad_token_id: text.pad_token_id,
            placeholders: config.placeholders(),
        };
        let vision = config.vision.as_ref().map(|vision| VisionTower::new(&vision.shape, weights));
        Ok(Self {
            vision: vision.transpose()?,
            decoder: Decoder::new(config, weights)?,
            head: Head::new(head_vh, None),
            embedding: Embedding::new(table_vh, 1.0, settings),
        })
    }

    /// Embeddings of the full sequence `[batch, tokens, hidden]`, features of images spliced in, gradients kept.
    ///
    /// # Errors
    /// A shape is wrong, an id is outside the vocabulary, images come without grids or positions or to a model without a
    /// tower, or a run of placeholders is not filled exactly by whole images.
    pub fn embed(&self, inputs: &Inputs, tap: &mut dyn Tap) -> Result<Tensor> {
        let media = Media { images: self.images(inputs, tap)?, ..Media::default() };
        let embeds_bsh = self.embedding.forward(&inputs.input_ids_bs, &media)?;
        tap.record("mid.inputs_embeds", &embeds_bsh)?;
        Ok(embeds_bsh)
    }

    fn images(&self, inputs: &Inputs, tap: &mut dyn Tap) -> Result<Option<Features>> {
        let wrong = |name, found: &str, expected: &str| {
            Err(Error::Input { name, found: found.to_string(), expected: expected.to_string() })
        };
        let has_images = inputs.pixel_values.as_ref().is_some_and(|pixels| pixels.dims().first() != Some(&0));
        match (&inputs.pixel_values, &inputs.image_grid_thw, &self.vision) {
            (None, None, _) => Ok(None),
            (Some(_), Some(_), Some(_)) if has_images && inputs.position_ids_abs.is_none() => {
                wrong("position_ids", "none", "[axes, batch, tokens]: those of images are more than their places")
            }
            (Some(pixels), Some(grids), Some(tower)) => Ok(Some(tower.forward(pixels, grids, tap)?)),
            (_, _, None) => wrong("pixel_values", "images", "none: this model has no vision_config"),
            (Some(_), None, _) => wrong("image_grid_thw", "none", "the grids of the patches in pixel_values"),
            (None, Some(_), _) => wrong("pixel_values", "none", "the patches that image_grid_thw is about"),
        }
    }

    /// This rank's slice of the full-sequence embeddings and of the positions `[3, batch, tokens]` of
    /// [`Inputs::position_ids_abs`].
    ///
    /// # Errors
    /// Another number of tokens than the context's batch; positions of another shape.
    pub fn shard(
        &self,
        embeds_bsh: &Tensor,
        position_ids_abs: Option<&Tensor>,
        context: &CpContext,
    ) -> Result<LocalInputs> {
        let embeds_bsh = context.shard(embeds_bsh, 1)?;
        let positions_abs = match position_ids_abs {
            None => {
                let positions_bs = context.positions(embeds_bsh.device())?.to_dtype(DType::I64)?;
                Tensor::stack(&[&positions_bs, &positions_bs, &positions_bs], 0)?
            }
            Some(positions_abs) => {
                let expected = [3, context.tokens().batch(), context.tokens().len()];
                if positions_abs.dims() != expected {
                    return Err(Error::Input {
                        name: "position_ids",
                        found: format!("{:?}", positions_abs.dims()),
                        expected: format!("{expected:?} = [axes, batch, tokens]"),
                    });
                }
                context.shard_fill(&positions_abs.to_dtype(DType::I64)?, 2, 0.0)?
            }
        };
        Ok(LocalInputs { embeds_bsh, positions_abs })
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

    /// Logits `[.., vocabulary]` in f32 (f64 for f64). Meant for short inputs; training uses [`Model::loss`], which never
    /// holds them all.
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
