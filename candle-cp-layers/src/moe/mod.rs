//! Mixture of experts: which tokens go to which experts, and experts that compute only for the tokens that chose them.
//!
//! Rows are the tokens of a rank in the order of the flattened `[batch, local tokens]`. Padding rows go to no expert:
//! their output is 0, and they leave no trace in any gradient.

mod composed;
mod dispatch;
mod experts;
mod grouped;
mod routing;

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use candle_cp::CpContext;

use crate::linear::Linear;
use crate::lora::Adapter;

pub use self::dispatch::Dispatch;
pub use self::experts::Experts;
pub use self::routing::Routing;

/// Which rows hold tokens; the others are padding.
#[derive(Debug, Clone)]
pub struct RealRows {
    total: usize,
    /// In ascending order; `None` if every row is real.
    rows: Option<Arc<[u32]>>,
}

impl RealRows {
    /// No padding.
    pub fn all(total: usize) -> Self {
        Self { total, rows: None }
    }

    /// One flag per row.
    pub fn from_mask(is_real: &[bool]) -> Self {
        let rows: Vec<u32> = (0u32..).zip(is_real).filter(|(_, real)| **real).map(|(row, _)| row).collect();
        let total = is_real.len();
        Self { total, rows: (rows.len() < total).then(|| rows.into()) }
    }

    /// The rows of this rank: neither padding of the batch nor tokens by which the layout is longer than the batch.
    pub fn of_rank(context: &CpContext) -> Self {
        let indices = context.layout().global_indices(context.rank());
        let is_real = |document: &Vec<i64>, index: &usize| document.get(*index).is_some_and(|&id| id >= 0);
        let documents = context.tokens().documents().iter();
        let mask: Vec<bool> = documents.flat_map(|row| indices.iter().map(move |index| is_real(row, index))).collect();
        Self::from_mask(&mask)
    }

    /// Number of rows, padding included.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Number of real rows.
    pub fn len(&self) -> usize {
        self.rows.as_ref().map_or(self.total, |rows| rows.len())
    }

    /// Whether no row is real.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A projection of all rows as one of the real rows only; where there are none, as one of a row of zeros.
    pub fn narrow(&self, linear: &Linear) -> Linear {
        let adapter = match (linear.adapter.clone(), &self.rows) {
            (Some(adapter), Some(rows)) if rows.is_empty() => Some(Adapter { dropout: None, ..adapter }),
            (Some(adapter), Some(rows)) => Some(adapter.select(rows)),
            (adapter, _) => adapter,
        };
        Linear { adapter, ..linear.clone() }
    }

    /// The row that the `index`-th real row is.
    pub fn row(&self, index: usize) -> u32 {
        self.rows.as_ref().map_or(index as u32, |rows| rows[index])
    }

    /// `[rows, width]` to `[real rows, width]`.
    fn select(&self, x_rw: &Tensor) -> Result<Tensor> {
        match &self.rows {
            None => Ok(x_rw.clone()),
            Some(rows) => x_rw.index_select(&Tensor::new(&rows[..], x_rw.device())?, 0),
        }
    }

    /// `[real rows, width]` to `[rows, width]`, on the CPU and outside of the graph, with `fill` in padding rows.
    fn spread(&self, x_rw: &Tensor, fill: f64) -> Result<Tensor> {
        let x_rw = x_rw.detach().to_device(&Device::Cpu)?;
        let Some(rows) = &self.rows else { return Ok(x_rw) };
        let width = x_rw.dim(1)?;
        let filled = Tensor::full(fill, (1, width), &Device::Cpu)?.to_dtype(x_rw.dtype())?;
        let mut sources = vec![rows.len() as u32; self.total];
        rows.iter().zip(0..).for_each(|(&row, source)| sources[row as usize] = source);
        Tensor::cat(&[&x_rw, &filled], 0)?.index_select(&Tensor::new(sources, &Device::Cpu)?, 0)
    }
}
