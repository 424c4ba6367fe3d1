//! The language model head.

use candle_core::Tensor;
use candle_cp::{LossOptions, ShardedLabels, linear_cross_entropy};

use crate::error::{Error, Result};
use crate::norm::wide;

/// From hidden states to logits, or to the loss without holding them.
#[derive(Debug, Clone)]
pub struct Head {
    head_vh: Tensor,
    softcap: Option<f64>,
}

impl Head {
    /// The matrix `[vocabulary, hidden]`, and the cap `c` of `c * tanh(logit / c)` if there is one.
    pub fn new(head_vh: Tensor, softcap: Option<f64>) -> Self {
        Self { head_vh, softcap }
    }

    /// The matrix `[vocabulary, hidden]`.
    pub fn head_vh(&self) -> &Tensor {
        &self.head_vh
    }

    /// The cap of the logits; `None` for none.
    pub fn softcap(&self) -> Option<f64> {
        self.softcap
    }

    /// Logits `[.., vocabulary]` in f32 (f64 for f64), soft cap applied. Meant for short inputs; training uses
    /// [`Head::loss`], which never holds them all.
    ///
    /// # Errors
    /// The last dimension is not the hidden size.
    pub fn logits(&self, hidden_bsh: &Tensor) -> Result<Tensor> {
        let (vocab, hidden) = self.head_vh.dims2()?;
        let mut dims = hidden_bsh.dims().to_vec();
        let rows = hidden_bsh.elem_count() / hidden;
        match dims.last_mut() {
            Some(last) if *last == hidden => *last = vocab,
            _ => {
                return Err(Error::Input {
                    name: "hidden states",
                    found: format!("{dims:?}"),
                    expected: format!("[.., {hidden}]"),
                });
            }
        }
        let flat = hidden_bsh.reshape((rows, hidden))?;
        let logits = flat.matmul(&self.head_vh.t()?)?.to_dtype(wide(hidden_bsh.dtype()))?;
        let logits = match self.softcap {
            Some(cap) => ((logits / cap)?.tanh()? * cap)?,
            None => logits,
        };
        Ok(logits.reshape(dims)?)
    }

    /// This rank's share of the mean loss: the sum of its tokens' cross entropies over the number of labels in the
    /// whole batch. The ranks' shares add up to the loss.
    ///
    /// # Errors
    /// Hidden states and labels do not have the same number of tokens.
    pub fn loss(&self, hidden: &Tensor, labels: &ShardedLabels) -> Result<Tensor> {
        let mut options = LossOptions::new(labels.count as f64);
        options.softcap = self.softcap;
        Ok(linear_cross_entropy(hidden, &self.head_vh, &labels.labels_bs, &options)?)
    }
}
