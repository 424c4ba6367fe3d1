//! The model families that the tool runs, behind one face.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_cp::{CpContext, LayerWork, MaskRule, ShardedLabels};
use candle_finetune::family;
use candle_gemma4::{Tap, Weights, vision_groups};
use candle_vlm_processor::qwen3_5::{image_runs, mrope_positions};

use crate::case::{Case, Rows, Tensors};

/// A family's configuration: what of a case depends on it.
pub trait Family: Send + Sync {
    /// The weights of a checkpoint folder, f32 on the CPU.
    ///
    /// # Errors
    /// Files that are missing or do not fit.
    fn weights(&self, folder: &Path) -> Result<Weights>;

    /// What attention costs, for layouts that even it out.
    fn layer_work(&self) -> Vec<LayerWork>;

    /// Image blocks of a row whose tokens see each other, by number; −1 elsewhere.
    fn groups(&self, ids: &[u32]) -> Vec<i64>;

    /// 0 = text, 1 = image, 2 = video, 3 = audio.
    fn token_type(&self, id: u32) -> i64;

    /// The kinds of attention by their names in case files.
    fn mask_rules(&self) -> Vec<(&'static str, MaskRule)>;

    /// What the family derives from the inputs alone, beside what is derived for all.
    ///
    /// # Errors
    /// Inputs that are malformed or do not fit each other.
    fn derived(&self, case: &Case) -> Result<Tensors>;

    /// The model of these weights on the inputs of a case.
    ///
    /// # Errors
    /// Inputs of another type, or weights that do not fit.
    fn network(&self, weights: &Weights, case: &Case) -> Result<Box<dyn Network>>;
}

/// A model and the full-sequence inputs of one case.
pub trait Network {
    /// Merged embeddings of the full sequence `[B, S, hidden]`.
    ///
    /// # Errors
    /// Inputs that do not fit the model.
    fn embed(&self, tap: &mut dyn Tap) -> Result<Tensor>;

    /// Final hidden states of this rank's slice of the embeddings.
    ///
    /// # Errors
    /// As the model's.
    fn decode(&self, embeds_bsh: &Tensor, context: &CpContext, tap: &mut dyn Tap) -> Result<Tensor>;

    /// Logits `[.., vocabulary]`.
    ///
    /// # Errors
    /// Another hidden size.
    fn logits(&self, hidden_bsh: &Tensor) -> Result<Tensor>;

    /// This rank's share of the mean loss.
    ///
    /// # Errors
    /// Shapes that do not fit.
    fn loss(&self, hidden_bsh: &Tensor, labels: &ShardedLabels) -> Result<Tensor>;

    /// Bound of the logits, if there is one.
    fn softcap(&self) -> Option<f64>;

    /// The head's matrix `[vocabulary, hidden]`.
    fn head_vh(&self) -> &Tensor;
}

/// Reads the configuration of a checkpoint folder; its `model_type` tells the family.
///
/// # Errors
/// There is none, or it has settings that the family does not support.
pub fn read_family(folder: &Path) -> Result<Arc<dyn Family>> {
    Ok(match family::Family::of_folder(folder)? {
        family::Family::Gemma4 => Arc::new(candle_gemma4::Config::from_folder(folder)?),
        family::Family::Qwen3_5 => Arc::new(candle_qwen3_5::Config::from_folder(folder)?),
    })
}

fn ids_bs(case: &Case) -> Result<Tensor> {
    Ok(Tensor::new(case.ids()?, &Device::Cpu)?)
}

fn as_type(case: &Case, name: &str, dtype: DType) -> Result<Option<Tensor>> {
    case.get(name).map(|x| x.to_dtype(dtype).with_context(|| name.to_string())).transpose()
}

impl Family for candle_gemma4::Config {
    fn weights(&self, folder: &Path) -> Result<Weights> {
        Ok(Weights::load(folder, self, DType::F32, &Device::Cpu)?)
    }

    fn layer_work(&self) -> Vec<LayerWork> {
        self.text.layer_work()
    }

    fn groups(&self, ids: &[u32]) -> Vec<i64> {
        vision_groups(ids, self)
    }

    fn token_type(&self, id: u32) -> i64 {
        match id {
            _ if id == self.image_token_id => 1,
            _ if Some(id) == self.video_token_id => 2,
            _ if Some(id) == self.audio_token_id => 3,
            _ => 0,
        }
    }

    fn mask_rules(&self) -> Vec<(&'static str, MaskRule)> {
        use candle_gemma4::LayerKind::{Full, Sliding};
        [Full, Sliding].map(|kind| (kind.name(), self.text.mask_rule(kind))).into()
    }

    fn derived(&self, _: &Case) -> Result<Tensors> {
        Ok(Tensors::new())
    }

    fn network(&self, weights: &Weights, case: &Case) -> Result<Box<dyn Network>> {
        let inputs = candle_gemma4::Inputs {
            input_ids_bs: ids_bs(case)?,
            pixel_values: as_type(case, "input.pixel_values", DType::F32)?,
            image_position_ids: as_type(case, "input.image_position_ids", DType::I64)?,
            input_features: as_type(case, "input.input_features", DType::F32)?,
            input_features_mask: as_type(case, "input.input_features_mask", DType::U8)?,
        };
        Ok(Box::new(Gemma4 { model: candle_gemma4::Model::new(self, weights)?, inputs }))
    }
}

struct Gemma4 {
    model: candle_gemma4::Model,
    inputs: candle_gemma4::Inputs,
}

impl Network for Gemma4 {
    fn embed(&self, tap: &mut dyn Tap) -> Result<Tensor> {
        Ok(self.model.embed(&self.inputs, tap)?)
    }

    fn decode(&self, embeds_bsh: &Tensor, context: &CpContext, tap: &mut dyn Tap) -> Result<Tensor> {
        let local = self.model.shard(embeds_bsh, &self.inputs.input_ids_bs, context)?;
        tap.record("input.position_ids", &context.positions(embeds_bsh.device())?)?;
        Ok(self.model.decode(&local, context, tap)?)
    }

    fn logits(&self, hidden_bsh: &Tensor) -> Result<Tensor> {
        Ok(self.model.logits(hidden_bsh)?)
    }

    fn loss(&self, hidden_bsh: &Tensor, labels: &ShardedLabels) -> Result<Tensor> {
        Ok(self.model.loss(hidden_bsh, labels)?)
    }

    fn softcap(&self) -> Option<f64> {
        self.model.softcap()
    }

    fn head_vh(&self) -> &Tensor {
        self.model.head_vh()
    }
}

impl Family for candle_qwen3_5::Config {
    fn weights(&self, folder: &Path) -> Result<Weights> {
        Ok(Weights::load(folder, self, DType::F32, &Device::Cpu)?)
    }

    fn layer_work(&self) -> Vec<LayerWork> {
        self.text.layer_work()
    }

    /// Tokens of a picture are causal like all others.
    fn groups(&self, ids: &[u32]) -> Vec<i64> {
        vec![-1; ids.len()]
    }

    fn token_type(&self, id: u32) -> i64 {
        let placeholders = self.placeholders();
        match id {
            _ if Some(id) == placeholders.image => 1,
            _ if Some(id) == placeholders.video => 2,
            _ => 0,
        }
    }

    fn mask_rules(&self) -> Vec<(&'static str, MaskRule)> {
        vec![("full_attention", MaskRule::causal())]
    }

    /// The positions, which the model is given: a file that has them is compared, not believed.
    fn derived(&self, case: &Case) -> Result<Tensors> {
        Ok([("input.position_ids".to_string(), positions_abs(self, case)?)].into())
    }

    fn network(&self, weights: &Weights, case: &Case) -> Result<Box<dyn Network>> {
        let inputs = candle_qwen3_5::Inputs {
            input_ids_bs: ids_bs(case)?,
            position_ids_abs: Some(positions_abs(self, case)?),
            pixel_values: as_type(case, "input.pixel_values", DType::F32)?,
            image_grid_thw: as_type(case, "input.image_grid_thw", DType::I64)?,
        };
        Ok(Box::new(Qwen3_5 { model: candle_qwen3_5::Model::new(self, weights)?, inputs }))
    }
}

/// Positions along time, height and width `[3, B, S]`, i64.
fn positions_abs(config: &candle_qwen3_5::Config, case: &Case) -> Result<Tensor> {
    let merge_size = config.vision.as_ref().map_or(1, |vision| vision.shape.spatial_merge_size);
    let grids: Rows = match as_type(case, "input.image_grid_thw", DType::I64)? {
        Some(grids) => grids.to_vec2().context("input.image_grid_thw")?,
        None => Rows::new(),
    };
    let side = |&side: &i64| usize::try_from(side).with_context(|| format!("input.image_grid_thw holds {side}"));
    let grids = grids.iter().map(|grid| {
        let sides = grid.iter().map(side).collect::<Result<Vec<usize>>>()?;
        <[usize; 3]>::try_from(sides).ok().context("input.image_grid_thw: allowed is [images, 3]")
    });
    let grids = grids.collect::<Result<Vec<[usize; 3]>>>()?;
    let (ids, documents_of) = (case.ids()?, case.documents()?);
    let mut axes: [Vec<i64>; 3] = Default::default();
    let mut taken = 0;
    for (row, (ids, documents)) in ids.iter().zip(&documents_of).enumerate() {
        let types: Vec<u8> = ids.iter().map(|&id| u8::from(config.token_type(id) == 1)).collect();
        let pictures = image_runs(&types, documents)?.len();
        // The last row is judged with all grids that are left.
        let end = if row + 1 == documents_of.len() { grids.len() } else { grids.len().min(taken + pictures) };
        let positions = mrope_positions(&types, documents, &grids[taken..end], merge_size)
            .with_context(|| format!("row {row} of input.input_ids and input.image_grid_thw"))?;
        taken = end;
        axes.iter_mut().zip(positions).for_each(|(axis, row)| axis.extend(row));
    }
    let shape = (3, ids.len(), ids.first().map_or(0, Vec::len));
    Ok(Tensor::from_vec(axes.concat(), shape, &Device::Cpu)?)
}

struct Qwen3_5 {
    model: candle_qwen3_5::Model,
    inputs: candle_qwen3_5::Inputs,
}

impl Network for Qwen3_5 {
    fn embed(&self, tap: &mut dyn Tap) -> Result<Tensor> {
        Ok(self.model.embed(&self.inputs, tap)?)
    }

    fn decode(&self, embeds_bsh: &Tensor, context: &CpContext, tap: &mut dyn Tap) -> Result<Tensor> {
        let local = self.model.shard(embeds_bsh, self.inputs.position_ids_abs.as_ref(), context)?;
        Ok(self.model.decode(&local, context, tap)?)
    }

    fn logits(&self, hidden_bsh: &Tensor) -> Result<Tensor> {
        Ok(self.model.logits(hidden_bsh)?)
    }

    fn loss(&self, hidden_bsh: &Tensor, labels: &ShardedLabels) -> Result<Tensor> {
        Ok(self.model.loss(hidden_bsh, labels)?)
    }

    fn softcap(&self) -> Option<f64> {
        None
    }

    fn head_vh(&self) -> &Tensor {
        self.model.head_vh()
    }
}
