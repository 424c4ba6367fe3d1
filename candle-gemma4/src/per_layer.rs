//! Per-layer embeddings: every decoder layer gets a vector of its own for each token, from a second table of token ids
//! and from the token's merged embedding.
//!
//! The vectors of all layers are wide (layers times width per token), so only those of a rank's own tokens are made:
//! ids are sharded before the look-up.

use candle_core::{DType, Device, Tensor};

use crate::config::{Config, PerLayerConfig};
use crate::names;
use candle_cp_layers::{Activation, Error, Linear, Result, RmsNorm, Tap, Weights, gated, table_scale};

/// What all layers share: the table, and the projection of the merged embeddings.
#[derive(Debug, Clone)]
pub(crate) struct PerLayerEmbedding {
    /// `[token ids, layers * width]`.
    table: Tensor,
    projection: Linear,
    norm: RmsNorm,
    /// sqrt(width), rounded to the table's type.
    scale: f64,
    shape: PerLayerConfig,
    config: Config,
}

/// Where one token's row comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// The n-th looked-up row.
    Table(u32),
    /// The padding token's row, which the look-up does not train: for placeholders and padding.
    Padding,
    /// Zeros: beyond the end of the batch.
    Zero,
}

impl PerLayerEmbedding {
    pub(crate) fn new(config: &Config, shape: PerLayerConfig, weights: &Weights) -> Result<Self> {
        let (hidden, total) = (config.text.hidden_size, config.text.layers.len() * shape.width);
        let table = weights.get(&names::embed_tokens_per_layer(config), &[shape.vocab_size, total])?;
        let projection = Linear::load(weights, &names::per_layer_projection(config), [total, hidden])?;
        let norm = weights.get(&names::per_layer_norm(config), &[shape.width])?;
        Ok(Self {
            scale: table_scale(shape.width, table.dtype())?,
            table,
            projection,
            norm: RmsNorm::new(Some(norm), config.text.rms_norm_eps),
            shape,
            config: config.clone(),
        })
    }

    /// From this rank's ids `[batch, local tokens]`, -1 beyond the end of the batch, and its merged embeddings
    /// `[batch, local tokens, hidden]` to `[batch, local tokens, layers, width]`.
    pub(crate) fn forward(&self, ids_bs: &Tensor, embeds_bsh: &Tensor, tap: &mut dyn Tap) -> Result<Tensor> {
        let (batch, tokens, hidden) = embeds_bsh.dims3()?;
        let shape = (batch, tokens, self.config.text.layers.len(), self.shape.width);
        let of_ids = self.look_up(ids_bs)?.reshape(shape)?;
        tap.record("mid.per_layer_token_inputs", &of_ids)?;
        let projected = (self.projection.forward(embeds_bsh)? * (hidden as f64).powf(-0.5))?;
        let of_embeds = self.norm.forward(&projected.reshape(shape)?)?;
        let inputs = ((of_embeds + of_ids)? * 0.5f64.sqrt())?;
        tap.record("mid.per_layer_inputs", &inputs)?;
        Ok(inputs)
    }

    /// `[tokens, layers * width]`.
    fn look_up(&self, ids_bs: &Tensor) -> Result<Tensor> {
        let rows = ids_bs.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec2::<i64>()?;
        let (mut sources, mut ids) = (Vec::new(), Vec::new());
        for (row, row_ids) in rows.iter().enumerate() {
            for (index, &id) in row_ids.iter().enumerate() {
                let source = self.source(row, index, id, ids.len())?;
                if matches!(source, Row::Table(_)) {
                    ids.push(id as u32);
                }
                sources.push(source);
            }
        }
        let device = self.table.device();
        let looked_up = (self.table.index_select(&Tensor::new(ids.as_slice(), device)?, 0)? * self.scale)?;
        if ids.len() == sources.len() {
            return Ok(looked_up);
        }
        let padding = match self.config.text.pad_token_id {
            Some(id) => (self.table.detach().narrow(0, id as usize, 1)? * self.scale)?,
            None => self.table.detach().narrow(0, 0, 1)?.zeros_like()?,
        };
        let parts = [&looked_up, &padding, &padding.zeros_like()?];
        let parts = if ids.is_empty() { &parts[1..] } else { &parts[..] };
        let count = ids.len() as u32;
        let places = sources.iter().map(|source| match *source {
            Row::Table(n) => n,
            Row::Padding => count,
            Row::Zero => count + 1,
        });
        let places = Tensor::from_iter(places, device)?;
        Ok(Tensor::cat(parts, 0)?.index_select(&places, 0)?)
    }

    fn source(&self, row: usize, index: usize, id: i64, looked_up: usize) -> Result<Row> {
        let vocab_size = self.shape.vocab_size;
        match u32::try_from(id) {
            Err(_) => Ok(Row::Zero),
            Ok(token) if Some(token) == self.config.text.pad_token_id => Ok(Row::Padding),
            Ok(token) if self.config.placeholders().contains(token) => Ok(Row::Padding),
            Ok(token) if (token as usize) < vocab_size => Ok(Row::Table(looked_up as u32)),
            Ok(_) => Err(Error::TokenId { row, index, id, vocab_size, setting: "vocab_size_per_layer_input" }),
        }
    }
}

/// What one layer does with its vectors.
#[derive(Debug, Clone)]
pub(crate) struct PerLayerBlock {
    gate: Linear,
    projection: Linear,
    norm: RmsNorm,
}

impl PerLayerBlock {
    /// `prefix` is that of the layer.
    pub(crate) fn new(prefix: &str, hidden: usize, width: usize, eps: f64, weights: &Weights) -> Result<Self> {
        let linear = |name: &str, outputs: usize, inputs: usize| -> Result<Linear> {
            Linear::load(weights, &format!("{prefix}.{name}.weight"), [outputs, inputs])
        };
        let norm = weights.get(&format!("{prefix}.{}.weight", names::POST_PER_LAYER_NORM), &[hidden])?;
        Ok(Self {
            gate: linear(names::PER_LAYER_GATE, width, hidden)?,
            projection: linear(names::PER_LAYER_PROJECTION, hidden, width)?,
            norm: RmsNorm::new(Some(norm), eps),
        })
    }

    /// `[batch, local tokens, hidden]` and `[batch, local tokens, width]` to the former shape.
    pub(crate) fn forward(&self, x_bsh: &Tensor, input_bsp: &Tensor) -> Result<Tensor> {
        let gated = gated(&self.gate.forward(x_bsh)?, input_bsp, Activation::GeluTanh)?;
        Ok((x_bsh + self.norm.forward(&self.projection.forward(&gated)?)?)?)
    }
}
