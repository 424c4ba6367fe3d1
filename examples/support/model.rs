//! A checkpoint run on a case with the sequence sharded over rank threads.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{Communicator, CpContext, LayoutKind, LossOptions, Tokens, linear_cross_entropy};
use candle_gemma4::Weights;

use crate::case::{Case, Rows, Tensors};
use crate::masks;
use crate::networks::{Family, Network, read_family};

/// How a case is run.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Rank threads that share the sequence.
    pub ranks: usize,
    /// How the sequence is divided among them.
    pub layout: LayoutKind,
    /// Whether to compute the gradients of the mean loss.
    pub gradients: bool,
}

/// What a run produced, under the names of case files, for the full sequence without the tool's own padding.
pub struct Computed {
    /// Intermediate and final results, f32 or integers.
    pub tensors: Tensors,
    /// Gradients of the mean loss by parameter name, and of the merged embeddings as `inputs_embeds`.
    pub gradients: Tensors,
}

/// A model folder in memory, f32 on the CPU.
pub struct Checkpoint {
    family: Arc<dyn Family>,
    weights: Weights,
}

impl Checkpoint {
    /// Reads `config.json` and the weights of a folder.
    ///
    /// # Errors
    /// Settings that the model does not support (field and value are named), files that are missing or do not fit.
    pub fn load(folder: &Path) -> Result<Self> {
        let family = read_family(folder)?;
        Ok(Self { weights: family.weights(folder)?, family })
    }

    /// Runs a case: `settings.ranks` threads each decode their slice, and every result is gathered again.
    ///
    /// # Errors
    /// Inputs that are malformed or do not fit the model; gradients asked for without `input.labels`.
    pub fn run(&self, case: &Case, settings: &Settings) -> Result<Computed> {
        let batch = Batch::new(case, self.family.as_ref())?;
        if settings.gradients && batch.labels.is_none() {
            bail!("gradients are those of the mean loss, and the case has no input.labels; add them or leave --grads");
        }
        let ranks = threads::run(settings.ranks, &threads::Options::default(), |comm| {
            RankRun { checkpoint: self, batch: &batch, settings }.run(comm)
        })?;
        let reached: BTreeSet<String> = ranks.iter().flat_map(|rank| rank.reached.iter().cloned()).collect();
        let first = ranks.into_iter().next().context("a run needs at least one rank")?;
        let mut computed = first.computed;
        computed.gradients.retain(|name, _| reached.contains(name));
        computed.tensors.extend(batch.derived(case, self.family.as_ref())?);
        if let Some(selected) = logits_at_positions(case, &computed.tensors)? {
            computed.tensors.insert("out.logits_at_positions".into(), selected);
        }
        Ok(computed)
    }
}

/// What of a case is the same for all families.
struct Batch<'a> {
    case: &'a Case,
    tokens: Tokens,
    labels: Option<Tensor>,
}

impl<'a> Batch<'a> {
    fn new(case: &'a Case, family: &dyn Family) -> Result<Self> {
        let ids = case.ids()?;
        let groups = ids.iter().map(|row| family.groups(row)).collect();
        let tokens = Tokens::new(case.documents()?, groups)?;
        let labels = match case.rows("input.labels")? {
            Some(labels) => Some(Tensor::new(labels, &Device::Cpu)?),
            None => None,
        };
        Ok(Self { case, tokens, labels })
    }

    /// What the model derives from its inputs before it runs: image blocks, token types, document borders and the
    /// masks that the file has.
    fn derived(&self, case: &Case, family: &dyn Family) -> Result<Tensors> {
        let mut derived = family.derived(case)?;
        let mut put = |name: &str, rows: Rows| -> Result<()> {
            derived.insert(name.into(), Tensor::new(rows, &Device::Cpu)?);
            Ok(())
        };
        put("input.vision_group_ids", self.tokens.groups().to_vec())?;
        let types = |row: &Vec<u32>| row.iter().map(|&id| family.token_type(id)).collect();
        put("input.mm_token_type_ids", case.ids()?.iter().map(types).collect())?;
        if let [row] = self.tokens.documents() {
            let borders = document_borders(row);
            derived.insert("input.cu_seqlens".into(), Tensor::new(borders, &Device::Cpu)?);
        }
        let places = masks::coordinates(&self.tokens);
        for (kind, rule) in family.mask_rules() {
            let name = format!("mask.{kind}");
            if case.get(&name).is_some() {
                derived.insert(name, masks::dense(&rule, &places, &places)?);
            }
        }
        Ok(derived)
    }
}

/// Starts of the documents of a row, and the end of the last one.
fn document_borders(documents: &[i64]) -> Vec<i64> {
    let starts = (0..documents.len()).filter(|&i| documents[i] >= 0 && (i == 0 || documents[i] != documents[i - 1]));
    let mut borders: Vec<i64> = starts.map(|i| i as i64).collect();
    borders.extend(documents.iter().rposition(|&d| d >= 0).map(|last| last as i64 + 1));
    borders
}

/// What one rank brings back.
struct RankResult {
    computed: Computed,
    /// Names that this rank's backward pass reached.
    reached: Vec<String>,
}

struct RankRun<'a> {
    checkpoint: &'a Checkpoint,
    batch: &'a Batch<'a>,
    settings: &'a Settings,
}

impl RankRun<'_> {
    fn run(&self, comm: Arc<dyn Communicator>) -> Result<RankResult> {
        let layout =
            self.settings.layout.layout(&self.batch.tokens, comm.size(), &self.checkpoint.family.layer_work())?;
        let context = CpContext::new(comm, layout, self.batch.tokens.clone())?;
        let model = self.checkpoint.family.network(&self.checkpoint.weights, self.batch.case)?;

        let (mut tensors, mut local) = (Tensors::new(), Tensors::new());
        let embeds = model.embed(&mut tensors)?;
        // Candle keeps gradients of variables only, so zeros are added that receive the gradient of the embeddings.
        let probe = Var::zeros(embeds.shape(), embeds.dtype(), embeds.device())?;
        let embeds = (embeds + probe.as_tensor())?;
        let hidden = model.decode(&embeds, &context, &mut local)?;
        local.insert("out.logits".into(), model.logits(&hidden.detach())?);

        let (mut gradients, mut reached) = (Tensors::new(), Vec::new());
        if let Some(labels) = &self.batch.labels {
            let loss = self.losses(model.as_ref(), &context, &hidden, labels, &mut tensors, &mut local)?;
            if self.settings.gradients {
                (gradients, reached) = self.gradients(&context, &loss, &probe)?;
            }
        }
        for (name, x) in &local {
            let full = context.gather(&x.detach(), 1)?;
            // Case files have the router's results as one list of tokens.
            let full = if name.starts_with("router.") { full.flatten_to(1)? } else { full };
            tensors.insert(name.clone(), full);
        }
        Ok(RankResult { computed: Computed { tensors, gradients }, reached })
    }

    /// The local part of the mean loss; adds the results about the loss.
    fn losses(
        &self,
        model: &dyn Network,
        context: &CpContext,
        hidden: &Tensor,
        labels_bs: &Tensor,
        tensors: &mut Tensors,
        local: &mut Tensors,
    ) -> Result<Tensor> {
        let labels = context.shard_labels(labels_bs)?;
        let loss = model.loss(hidden, &labels)?;
        let options = LossOptions { softcap: model.softcap(), ..LossOptions::new(1.0) };
        let sum = linear_cross_entropy(&hidden.detach(), model.head_vh(), &labels.labels_bs, &options)?;
        for (name, x) in [("out.loss_mean", &loss), ("out.loss_sum", &sum)] {
            tensors.insert(name.into(), context.comm().all_reduce_sum(&x.detach())?.reshape(1)?);
        }
        tensors.insert("out.num_valid".into(), Tensor::new(&[labels.count as i64], &Device::Cpu)?);
        local.insert("out.token_loss".into(), token_loss(&local["out.logits"], &labels.labels_bs)?);
        Ok(loss)
    }

    /// Gradients summed over the ranks in name order, and the names that this rank's backward pass reached.
    fn gradients(&self, context: &CpContext, loss: &Tensor, probe: &Var) -> Result<(Tensors, Vec<String>)> {
        let store = loss.backward()?;
        let (mut summed, mut reached) = (Tensors::new(), Vec::new());
        let probe = ("inputs_embeds".to_string(), probe.clone());
        let parameters = self.checkpoint.weights.variables().iter().map(|(name, var)| (name.clone(), var.clone()));
        for (name, var) in parameters.chain([probe]) {
            let own = match store.get(&var) {
                Some(gradient) => {
                    reached.push(name.clone());
                    gradient.detach()
                }
                None => var.zeros_like()?,
            };
            summed.insert(name, context.comm().all_reduce_sum(&own)?);
        }
        Ok((summed, reached))
    }
}

/// Cross entropy of each token, `[B, S]` f32, 0 where the (shifted) label is negative; summed in f64 from the logits,
/// independently of the loss that is trained.
fn token_loss(logits_bsv: &Tensor, labels_bs: &Tensor) -> Result<Tensor> {
    let vocabulary = logits_bsv.dim(2)?;
    let labels = labels_bs.flatten_all()?.to_vec1::<i64>()?;
    let logits = logits_bsv.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    let mut losses = Vec::with_capacity(labels.len());
    for (row, &label) in logits.chunks(vocabulary).zip(&labels) {
        let Ok(label) = usize::try_from(label) else {
            losses.push(0.0);
            continue;
        };
        let Some(target) = row.get(label) else {
            bail!("input.labels holds {label}; allowed is −100 or a token id below {vocabulary}");
        };
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
        losses.push((largest + sum.ln() - target) as f32);
    }
    Ok(Tensor::from_vec(losses, labels_bs.dims(), &Device::Cpu)?)
}

/// Rows of the logits that the case lists in `out.positions`, for files that keep only those.
fn logits_at_positions(case: &Case, tensors: &Tensors) -> Result<Option<Tensor>> {
    let (Some(positions), Some(logits)) = (case.get("out.positions"), tensors.get("out.logits")) else {
        return Ok(None);
    };
    let (batch, length, _) = logits.dims3()?;
    let positions = positions.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    if let Some(other) = positions.iter().find(|&&p| p < 0 || p as usize >= length) {
        bail!("out.positions holds {other}; allowed is 0 to {}", length - 1);
    }
    if batch != 1 {
        bail!("out.positions goes with one row; the case has {batch}");
    }
    Ok(Some(logits.get(0)?.index_select(&Tensor::new(positions, &Device::Cpu)?, 0)?))
}
