//! What is to be planned.

use std::collections::BTreeSet;

use candle_core::DType;
use candle_cp::{LayoutKind, Tokens};
use candle_cp_layers::Part;

use super::devices::DeviceSpec;
use crate::error::{Error, Result};

/// Settings of a run, as far as memory, work and traffic depend on them.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Tokens of a row.
    pub seq_len: usize,
    /// Rows of a batch.
    pub batch_rows: usize,
    /// Documents of a row, about equally long.
    pub documents: usize,
    /// Pictures of a row, spread over its documents.
    pub pictures: usize,
    /// Soft tokens of a picture.
    pub picture_tokens: usize,
    /// Batches of a step.
    pub accumulate: usize,
    /// Ranks that share every row.
    pub cp: usize,
    /// Groups of such ranks, each with rows of its own.
    pub dp: usize,
    /// Which tokens each rank owns.
    pub layout: LayoutKind,
    /// Type of weights and results: f32 or bf16.
    pub dtype: DType,
    /// Decoder layers run again in backward.
    pub recompute: bool,
    /// Moments and masters are spread over all ranks.
    pub zero: bool,
    /// Adapters of this rank in all projections of the text model, in place of the weights.
    pub lora_rank: Option<usize>,
    /// Parts that are left as they are.
    pub freeze: BTreeSet<Part>,
    /// What it runs on.
    pub device: DeviceSpec,
}

impl Request {
    /// One row of one document on one rank, full training in bf16 without recomputation.
    pub fn new(seq_len: usize, device: DeviceSpec) -> Self {
        Self {
            seq_len,
            batch_rows: 1,
            documents: 1,
            pictures: 0,
            picture_tokens: 0,
            accumulate: 1,
            cp: 1,
            dp: 1,
            layout: LayoutKind::HeadTail,
            dtype: DType::BF16,
            recompute: false,
            zero: false,
            lora_rank: None,
            freeze: BTreeSet::new(),
            device,
        }
    }

    /// All ranks.
    pub fn ranks(&self) -> usize {
        self.cp * self.dp
    }

    /// Soft tokens of all pictures of a batch.
    pub fn soft_tokens(&self) -> usize {
        self.batch_rows * self.pictures * self.picture_tokens
    }

    pub(super) fn check(&self) -> Result<()> {
        let positive = [
            ("--seq", self.seq_len),
            ("--batch-rows", self.batch_rows),
            ("--documents", self.documents),
            ("--accumulate", self.accumulate),
            ("--cp", self.cp),
            ("--dp", self.dp),
        ];
        if let Some((flag, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return Err(Error::flag(flag, 0, "a whole number from 1 on", "leave it out for the default"));
        }
        if self.seq_len > 1 << 31 || self.ranks() > 1 << 16 || self.batch_rows * self.accumulate > 1 << 20 {
            let given = format!("{} tokens on {} x {} ranks", self.seq_len, self.cp, self.dp);
            let allowed = "at most 2^31 tokens of a row, 65,536 ranks and 1,048,576 rows of a step";
            return Err(Error::flag("--seq", given, allowed, "plan a smaller run"));
        }
        if self.documents > self.seq_len {
            let allowed = format!("at most one per token, {}", self.seq_len);
            return Err(Error::flag("--documents", self.documents, allowed, "plan fewer documents in a row"));
        }
        if ![DType::F32, DType::BF16].contains(&self.dtype) {
            return Err(Error::flag("--dtype", self.dtype.as_str(), "f32 or bf16", "leave it out for bf16"));
        }
        if self.lora_rank == Some(0) {
            return Err(Error::flag("--lora-rank", 0, "a whole number from 1 on", "leave it out to train all weights"));
        }
        Ok(())
    }

    /// The documents and pictures of a batch.
    ///
    /// # Errors
    /// The pictures do not fit the documents.
    pub fn tokens(&self) -> Result<Tokens> {
        let (documents, groups) = (self.documents, self.pictures);
        let start = |document: usize| document * self.seq_len / documents;
        let mut row = Vec::with_capacity(self.seq_len);
        let mut images = vec![-1; self.seq_len];
        for document in 0..documents {
            row.resize(start(document + 1), document as i64);
            let [first, end] = [document, document + 1].map(|document| document * groups / documents);
            // A token between two pictures, and one before the first.
            let mut next = start(document) + 1;
            for picture in first..end {
                if next + self.picture_tokens > start(document + 1) {
                    let given = format!("{groups} pictures of {} tokens", self.picture_tokens);
                    let allowed = format!("what fits documents of {} tokens", start(document + 1) - start(document));
                    return Err(Error::flag("--pictures", given, allowed, "plan fewer pictures or longer documents"));
                }
                images[next..next + self.picture_tokens].fill(picture as i64);
                next += self.picture_tokens + 1;
            }
        }
        Ok(Tokens::new(vec![row; self.batch_rows], vec![images; self.batch_rows])?)
    }
}
