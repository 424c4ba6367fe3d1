//! Attention alone on a case of queries, keys and values, whole rows split over rank threads.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Tensor, Var};
use candle_cp::comm::threads;
use candle_cp::{
    Communicator, Coordinates, CpContext, LayerWork, LayoutKind, MaskRule, Tokens, attend_with_coordinates,
};
use serde::Deserialize;

use crate::case::{Tensors, integer_rows, read_tensors};
use crate::masks;
use crate::report::{Comparison, Report, compare};
use crate::tolerance::of_attention_tensor;

/// Tensors of an attention case that are inputs.
const GIVEN: [&str; 10] = ["q", "k", "v", "dout", "q_pos", "k_pos", "q_doc", "k_doc", "q_group", "k_group"];
/// Results that a case can hold.
const RESULTS: [&str; 6] = ["mask", "out", "lse", "dq", "dk", "dv"];

#[derive(Deserialize)]
struct Index {
    cases: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    file: String,
    kind: String,
    window: usize,
    scale: f64,
}

/// One attention case: its tensors, and the mask rule and scale from the `index.json` beside it.
pub struct AttentionCase {
    tensors: Tensors,
    query: Coordinates,
    key: Coordinates,
    rule: MaskRule,
    scale: f64,
}

/// How an attention case was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The rows were split over rank threads.
    Ranks,
    /// Queries and keys are different tokens, as one rank sees them: one call of the kernel.
    Kernel,
}

impl AttentionCase {
    /// Reads a case, and its kind, window and scale from the index.
    ///
    /// # Errors
    /// Files that cannot be read, a case that the index does not list, an unknown kind, missing or malformed tensors,
    /// no result to compare with.
    pub fn load(path: &Path) -> Result<Self> {
        let entry = index_entry(path)?;
        let rule = rule(&entry).with_context(|| format!("{} in the index", entry.file))?;
        Self::new(read_tensors(path)?, rule, entry.scale)
            .with_context(|| format!("{} is not an attention case", path.display()))
    }

    /// A case of tensors already in memory.
    ///
    /// # Errors
    /// As [`AttentionCase::load`].
    pub fn new(tensors: Tensors, rule: MaskRule, scale: f64) -> Result<Self> {
        if let Some(missing) = GIVEN.iter().find(|&&name| !tensors.contains_key(name)) {
            bail!("the tensor `{missing}` is missing; needed are {}", GIVEN.join(", "));
        }
        if !RESULTS.iter().any(|&name| tensors.contains_key(name)) {
            bail!("there is nothing to compare with: none of {}", RESULTS.join(", "));
        }
        let rows = |name: &str| integer_rows(name, &tensors[name]);
        let query = Coordinates { positions: rows("q_pos")?, documents: rows("q_doc")?, groups: rows("q_group")? };
        let key = Coordinates { positions: rows("k_pos")?, documents: rows("k_doc")?, groups: rows("k_group")? };
        Ok(Self { tensors, query, key, rule, scale })
    }

    /// All tensors of the file.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Whole rows if queries and keys are the same tokens and their positions restart in each document; then the case
    /// can be split over ranks.
    pub fn route(&self) -> Route {
        let same = self.query.documents == self.key.documents
            && self.query.groups == self.key.groups
            && self.query.positions == self.key.positions;
        match self.tokens() {
            Ok(tokens) if same && positions_agree(&tokens, &self.key) => Route::Ranks,
            _ => Route::Kernel,
        }
    }

    fn tokens(&self) -> candle_cp::Result<Tokens> {
        Tokens::new(self.key.documents.clone(), self.key.groups.clone())
    }

    /// Computes `mask`, `out`, `lse`, `dq`, `dk`, `dv` with queries, keys and values in `dtype`. A case of whole rows is
    /// split over `ranks` threads, another one runs on one.
    ///
    /// # Errors
    /// Shapes that do not fit together.
    pub fn run(&self, dtype: DType, ranks: usize, layout: LayoutKind) -> Result<Tensors> {
        let leaf = |name: &str| -> Result<Tensor> { Ok(self.tensors[name].to_dtype(dtype)?) };
        let leaves = Leaves { q: leaf("q")?, k: leaf("k")?, v: leaf("v")?, dout: leaf("dout")? };
        let mut computed = match self.route() {
            Route::Kernel => self.run_kernel(&leaves)?,
            Route::Ranks => {
                let tokens = self.tokens()?;
                let run = |comm: Arc<dyn Communicator>| -> Result<Tensors> {
                    let layout = layout.layout(&tokens, comm.size(), &[LayerWork { rule: self.rule, weight: 1.0 }])?;
                    self.run_rank(&leaves, &CpContext::new(comm, layout, tokens.clone())?)
                };
                let ranks = threads::run(ranks, &threads::Options::default(), run)?;
                ranks.into_iter().next().context("a run needs at least one rank")?
            }
        };
        computed.insert("mask".into(), masks::dense(&self.rule, &self.query, &self.key)?);
        Ok(computed)
    }

    fn run_rank(&self, leaves: &Leaves, context: &CpContext) -> Result<Tensors> {
        let vars = leaves.variables()?;
        let [q, k, v] = [context.shard(&vars[0], 2)?, context.shard(&vars[1], 2)?, context.shard(&vars[2], 2)?];
        let (out, lse) = context.attend_with_lse(&q, &k, &v, &self.rule, self.scale)?;
        let dout = context.shard(&leaves.dout, 2)?;
        let mut computed = Tensors::new();
        for (name, gradient) in gradients(&out, &dout, &vars)? {
            computed.insert(name.into(), context.comm().all_reduce_sum(&gradient)?);
        }
        computed.insert("out".into(), context.gather(&out.detach(), 2)?);
        computed.insert("lse".into(), context.gather(&lse, 2)?);
        Ok(computed)
    }

    fn run_kernel(&self, leaves: &Leaves) -> Result<Tensors> {
        let vars = leaves.variables()?;
        let qkv = (vars[0].as_tensor(), vars[1].as_tensor(), vars[2].as_tensor());
        let (out, lse) = attend_with_coordinates(qkv, &self.rule, self.scale, &self.query, &self.key)?;
        let mut computed = Tensors::new();
        for (name, gradient) in gradients(&out, &leaves.dout, &vars)? {
            computed.insert(name.into(), gradient);
        }
        computed.insert("out".into(), out.detach());
        computed.insert("lse".into(), lse);
        Ok(computed)
    }

    /// Compares what [`AttentionCase::run`] computed in `dtype` with every result of the case; the names in the report
    /// start with the type.
    ///
    /// # Errors
    /// An error of Candle.
    pub fn compare(&self, computed: &Tensors, dtype: DType, report: &mut Report) -> Result<()> {
        let largest = self.largest_score()?;
        for (name, expected) in self.tensors.iter().filter(|(name, _)| !GIVEN.contains(&name.as_str())) {
            let label = format!("{} {name}", dtype.as_str());
            match (of_attention_tensor(name, dtype, largest), computed.get(name)) {
                (Some(tolerance), Some(computed)) => {
                    report.add(compare(&label, expected, computed, tolerance, None)?);
                }
                (None, _) => report.skip(&label, "it is neither an input nor a result of an attention case"),
                (_, None) => report.add(Comparison::problem(&label, "it was not computed".into())),
            }
        }
        Ok(())
    }

    /// Largest absolute scaled score of a visible pair.
    fn largest_score(&self) -> Result<f64> {
        let (q, k) = (self.tensors["q"].to_dtype(DType::F64)?, self.tensors["k"].to_dtype(DType::F64)?);
        let (batch, heads, queries, size) = q.dims4()?;
        let (_, key_heads, keys, _) = k.dims4()?;
        if key_heads == 0 || heads % key_heads != 0 {
            bail!("q has {heads} heads and k has {key_heads}; the first has to be a multiple of the second");
        }
        let grouped = q.reshape((batch, key_heads, heads / key_heads * queries, size))?.contiguous()?;
        let scores = (grouped.matmul(&k.t()?.contiguous()?)? * self.scale)?.abs()?;
        let visible = masks::dense(&self.rule, &self.query, &self.key)?.to_dtype(DType::F64)?;
        let scores = scores.reshape((batch, heads, queries, keys))?.broadcast_mul(&visible)?;
        Ok(scores.flatten_all()?.to_vec1::<f64>()?.into_iter().fold(0.0, f64::max))
    }
}

struct Leaves {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
}

impl Leaves {
    /// Fresh variables of q, k and v: each rank pulls its own gradients.
    fn variables(&self) -> Result<[Var; 3]> {
        Ok([Var::from_tensor(&self.q)?, Var::from_tensor(&self.k)?, Var::from_tensor(&self.v)?])
    }
}

/// Gradients of `sum(out · dout)`; zeros where none arrived.
fn gradients(out: &Tensor, dout: &Tensor, vars: &[Var; 3]) -> Result<[(&'static str, Tensor); 3]> {
    let store = (out * dout)?.sum_all()?.backward()?;
    let of = |var: &Var| match store.get(var) {
        Some(gradient) => Ok(gradient.detach()),
        None => var.zeros_like(),
    };
    Ok([("dq", of(&vars[0])?), ("dk", of(&vars[1])?), ("dv", of(&vars[2])?)])
}

fn positions_agree(tokens: &Tokens, row: &Coordinates) -> bool {
    let agree = |(own, (given, documents)): (&Vec<i64>, (&Vec<i64>, &Vec<i64>))| {
        own.len() == given.len() && own.iter().zip(given).zip(documents).all(|((a, b), &d)| d < 0 || a == b)
    };
    tokens.positions().iter().zip(row.positions.iter().zip(&row.documents)).all(agree)
}

fn index_entry(path: &Path) -> Result<Entry> {
    let index_path = path.with_file_name("index.json");
    let text = std::fs::read_to_string(&index_path).with_context(|| {
        format!("cannot read {}, which holds kind, window and scale of the case", index_path.display())
    })?;
    let index: Index = serde_json::from_str(&text).with_context(|| format!("{} is malformed", index_path.display()))?;
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let listed: Vec<String> = index.cases.iter().map(|case| case.file.clone()).collect();
    index
        .cases
        .into_iter()
        .find(|case| case.file == file)
        .with_context(|| format!("{} does not list {file}; it lists {}", index_path.display(), listed.join(", ")))
}

fn rule(entry: &Entry) -> Result<MaskRule> {
    match (entry.kind.as_str(), entry.window) {
        ("full", 0) => Ok(MaskRule::causal()),
        ("sliding", 0) => Ok(MaskRule::causal().with_groups()),
        ("sliding", window) => Ok(MaskRule::sliding(window).with_groups()),
        ("bidirectional", 0) => Ok(MaskRule::bidirectional()),
        ("full" | "bidirectional", window) => {
            bail!("kind `{}` has window {window}; allowed is 0, or kind `sliding`", entry.kind)
        }
        (other, _) => bail!("kind is `{other}`; allowed are full, sliding and bidirectional"),
    }
}
