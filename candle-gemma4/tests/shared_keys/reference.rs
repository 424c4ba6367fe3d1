//! A text decoder with per-layer embeddings in plain Candle operations on full rows, f64, with dense masks. Nothing is
//! shared: a layer that reads the keys and values of an earlier one projects them again from that layer's input.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use serde_json::Value;

/// What the sharing layers do in the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// Their keys and values train the layer that they are from.
    Trained,
    /// They are constants: what the gradients must not be.
    Constant,
}

/// `[batch][tokens]` each: ids, documents (negative for padding), and labels (not shifted, negative for none).
pub struct Batch {
    pub ids: Vec<Vec<i64>>,
    pub documents: Vec<Vec<i64>>,
    pub labels: Vec<Vec<i64>>,
}

pub struct Reference {
    text: Value,
    pub variables: BTreeMap<String, Var>,
    shared: Shared,
}

impl Reference {
    /// Of a checkpoint's folder.
    pub fn load(folder: &Path, shared: Shared) -> Result<Self> {
        let json: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json"))?).unwrap();
        let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
        let variable = |(name, x): (&String, &Tensor)| Ok((name.clone(), Var::from_tensor(&x.to_dtype(DType::F64)?)?));
        let variables = tensors.iter().map(variable).collect::<Result<_>>()?;
        Ok(Self { text: json["text_config"].clone(), variables, shared })
    }

    fn size(&self, field: &str) -> usize {
        self.text[field].as_u64().unwrap_or_else(|| panic!("{field}")) as usize
    }

    fn number(&self, field: &str) -> f64 {
        self.text[field].as_f64().unwrap_or_else(|| panic!("{field}"))
    }

    fn get(&self, name: &str) -> &Tensor {
        &self.variables[&format!("model.language_model.{name}.weight")]
    }

    fn kind(&self, layer: usize) -> &str {
        self.text["layer_types"][layer].as_str().unwrap()
    }

    fn head_dim(&self, kind: &str) -> usize {
        self.size(if kind == "full_attention" { "global_head_dim" } else { "head_dim" })
    }

    /// The layer whose keys and values a layer reads.
    fn source(&self, layer: usize) -> usize {
        let first = self.size("num_hidden_layers") - self.size("num_kv_shared_layers");
        match layer < first {
            true => layer,
            false => (0..first).rev().find(|&other| self.kind(other) == self.kind(layer)).unwrap(),
        }
    }

    fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        x.broadcast_matmul(&self.get(name).t()?)
    }

    fn norm(&self, name: Option<&str>, x: &Tensor) -> Result<Tensor> {
        let square = (x.sqr()?.mean_keepdim(D::Minus1)? + self.number("rms_norm_eps"))?;
        let normed = x.broadcast_div(&square.sqrt()?)?;
        match name {
            Some(name) => normed.broadcast_mul(self.get(name)),
            None => Ok(normed),
        }
    }

    /// Rows of a table; those of the padding token and of padding are constants.
    fn look_up(&self, name: &str, batch: &Batch) -> Result<Tensor> {
        let pad = self.size("pad_token_id") as i64;
        let table = self.get(name);
        let ids = Tensor::new(batch.ids.clone(), &Device::Cpu)?;
        let (rows, tokens) = ids.dims2()?;
        let flat = ids.flatten_all()?;
        let is_pad = flat.eq(pad)?.to_dtype(DType::F64)?.unsqueeze(1)?;
        let trained = table.index_select(&flat, 0)?.broadcast_mul(&(1.0 - &is_pad)?)?;
        let constant = table.detach().index_select(&flat, 0)?.broadcast_mul(&is_pad)?;
        (trained + constant)?.reshape((rows, tokens, ()))
    }

    /// `[batch, tokens, layers, width]`.
    fn per_layer_inputs(&self, embeds: &Tensor, batch: &Batch) -> Result<Tensor> {
        let (rows, tokens, hidden) = embeds.dims3()?;
        let width = self.size("hidden_size_per_layer_input");
        let shape = (rows, tokens, self.size("num_hidden_layers"), width);
        let of_ids = (self.look_up("embed_tokens_per_layer", batch)? * (width as f64).sqrt())?.reshape(shape)?;
        let projected = (self.linear("per_layer_model_projection", embeds)? / (hidden as f64).sqrt())?;
        let of_embeds = self.norm(Some("per_layer_projection_norm"), &projected.reshape(shape)?)?;
        (of_ids + of_embeds)? / 2f64.sqrt()
    }

    /// `[batch, tokens, heads * size]` to `[batch, heads, tokens, size]`, normed.
    fn heads(&self, norm: Option<&str>, x: &Tensor, size: usize) -> Result<Tensor> {
        let (rows, tokens, _) = x.dims3()?;
        self.norm(norm, &x.reshape((rows, tokens, (), size))?)?.transpose(1, 2)?.contiguous()
    }

    /// Turns dimension `i` with dimension `i + size / 2` by the position in the document.
    fn turn(&self, x: &Tensor, kind: &str, batch: &Batch) -> Result<Tensor> {
        let (rows, _, tokens, size) = x.dims4()?;
        let rope = &self.text["rope_parameters"][kind];
        let turning = size as f64 / 2.0 * rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
        let theta = rope["rope_theta"].as_f64().unwrap();
        let angle = |position: usize, pair: usize| match (pair as f64) < turning.floor() {
            true => position as f64 * theta.powf(-2.0 * pair as f64 / size as f64),
            false => 0.0,
        };
        let mut angles = Vec::with_capacity(rows * tokens * size);
        for documents in &batch.documents {
            for (index, document) in documents.iter().enumerate() {
                let start = documents.iter().position(|other| other == document).unwrap();
                angles.extend((0..size).map(|dim| angle(index - start, dim % (size / 2))));
            }
        }
        let angles = Tensor::from_vec(angles, (rows, 1, tokens, size), &Device::Cpu)?;
        let (first, second) = (x.narrow(3, 0, size / 2)?, x.narrow(3, size / 2, size / 2)?);
        let swapped = Tensor::cat(&[second.neg()?, first], 3)?;
        x.broadcast_mul(&angles.cos()?)? + swapped.broadcast_mul(&angles.sin()?)?
    }

    /// 1 where a query may see a key, `[batch, 1, tokens, tokens]`.
    fn mask(&self, kind: &str, batch: &Batch) -> Result<Tensor> {
        let window = if kind == "full_attention" { usize::MAX } else { self.size("sliding_window") };
        let tokens = batch.documents[0].len();
        let mut mask = Vec::new();
        for row in &batch.documents {
            for query in 0..tokens {
                let sees = |key: usize| key <= query && query - key < window && row[key] == row[query] && row[key] >= 0;
                mask.extend((0..tokens).map(|key| f64::from(u8::from(sees(key)))));
            }
        }
        Tensor::from_vec(mask, (batch.documents.len(), 1, tokens, tokens), &Device::Cpu)
    }

    /// `inputs` are the residual streams before every layer up to this one.
    fn attention(&self, layer: usize, inputs: &[Tensor], batch: &Batch) -> Result<Tensor> {
        let (kind, source) = (self.kind(layer), self.source(layer));
        let (size, x) = (self.head_dim(kind), &inputs[layer]);
        let (rows, tokens, _) = x.dims3()?;
        let own = |name: &str| format!("layers.{layer}.{name}");
        let lent = |name: &str| format!("layers.{source}.{name}");

        let normed = self.norm(Some(&own("input_layernorm")), x)?;
        let query = self.linear(&own("self_attn.q_proj"), &normed)?;
        let query = self.turn(&self.heads(Some(&own("self_attn.q_norm")), &query, size)?, kind, batch)?;
        let normed = self.norm(Some(&lent("input_layernorm")), &inputs[source])?;
        let key = self.linear(&lent("self_attn.k_proj"), &normed)?;
        let key = self.turn(&self.heads(Some(&lent("self_attn.k_norm")), &key, size)?, kind, batch)?;
        let value = self.heads(None, &self.linear(&lent("self_attn.v_proj"), &normed)?, size)?;
        let (key, value) = match source != layer && self.shared == Shared::Constant {
            true => (key.detach(), value.detach()),
            false => (key, value),
        };

        let group = query.dim(1)? / key.dim(1)?;
        let spread = |x: &Tensor| {
            let (rows, heads, tokens, size) = x.dims4()?;
            x.unsqueeze(2)?.repeat((1, 1, group, 1, 1))?.reshape((rows, heads * group, tokens, size))
        };
        let mask = self.mask(kind, batch)?;
        let scores = query.matmul(&spread(&key)?.t()?)?.broadcast_add(&((&mask - 1.0)? * 1e4)?)?;
        let shares = scores.broadcast_sub(&scores.detach().max_keepdim(3)?)?.exp()?.broadcast_mul(&mask)?;
        let total = shares.sum_keepdim(3)?;
        let total = (&total + total.eq(0.0)?.to_dtype(DType::F64)?)?;
        let out = shares.broadcast_div(&total)?.matmul(&spread(&value)?)?;
        let out = out.transpose(1, 2)?.reshape((rows, tokens, ()))?;
        self.norm(Some(&own("post_attention_layernorm")), &self.linear(&own("self_attn.o_proj"), &out)?)
    }

    fn mlp(&self, layer: usize, x: &Tensor) -> Result<Tensor> {
        let own = |name: &str| format!("layers.{layer}.{name}");
        let normed = self.norm(Some(&own("pre_feedforward_layernorm")), x)?;
        let gate = gelu(&self.linear(&own("mlp.gate_proj"), &normed)?)?;
        let wide = (gate * self.linear(&own("mlp.up_proj"), &normed)?)?;
        self.norm(Some(&own("post_feedforward_layernorm")), &self.linear(&own("mlp.down_proj"), &wide)?)
    }

    fn per_layer(&self, layer: usize, x: &Tensor, input: &Tensor) -> Result<Tensor> {
        let own = |name: &str| format!("layers.{layer}.{name}");
        let gated = (gelu(&self.linear(&own("per_layer_input_gate"), x)?)? * input)?;
        self.norm(Some(&own("post_per_layer_input_norm")), &self.linear(&own("per_layer_projection"), &gated)?)
    }

    /// The mean cross entropy over all labels.
    pub fn loss(&self, batch: &Batch) -> Result<Tensor> {
        let embeds = (self.look_up("embed_tokens", batch)? * (self.size("hidden_size") as f64).sqrt())?;
        let per_layer = self.per_layer_inputs(&embeds, batch)?;
        let mut inputs = vec![embeds];
        for layer in 0..self.size("num_hidden_layers") {
            let x = (&inputs[layer] + self.attention(layer, &inputs, batch)?)?;
            let x = (&x + self.mlp(layer, &x)?)?;
            let x = (&x + self.per_layer(layer, &x, &per_layer.narrow(2, layer, 1)?.squeeze(2)?)?)?;
            let scalar = self.variables[&format!("model.language_model.layers.{layer}.layer_scalar")].detach();
            inputs.push(x.broadcast_mul(&scalar)?);
        }
        let hidden = self.norm(Some("norm"), &inputs[inputs.len() - 1])?;
        let cap = self.number("final_logit_softcapping");
        let logits = ((self.linear("embed_tokens", &hidden)? / cap)?.tanh()? * cap)?;
        let log_total = logits.exp()?.sum_keepdim(2)?.log()?;
        let log_probability = logits.broadcast_sub(&log_total)?;

        let (rows, tokens, vocabulary) = logits.dims3()?;
        let mut target = vec![0f64; rows * tokens * vocabulary];
        let mut count = 0;
        for (row, (documents, labels)) in batch.documents.iter().zip(&batch.labels).enumerate() {
            for token in 1..tokens {
                if labels[token] >= 0 && documents[token] >= 0 && documents[token] == documents[token - 1] {
                    target[(row * tokens + token - 1) * vocabulary + labels[token] as usize] = 1.0;
                    count += 1;
                }
            }
        }
        let target = Tensor::from_vec(target, (rows, tokens, vocabulary), &Device::Cpu)?;
        (log_probability * target)?.sum_all()? * (-1.0 / f64::from(count))
    }
}

/// Written out: Candle's own has a slope of six digits.
fn gelu(x: &Tensor) -> Result<Tensor> {
    let inner = ((x + (x.powf(3.0)? * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
    (x * 0.5)? * (inner.tanh()? + 1.0)?
}
