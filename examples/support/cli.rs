//! Command line of the `parity` example.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_core::DType;
use candle_cp::LayoutKind;
use clap::Parser;

use crate::attention::{AttentionCase, Route};
use crate::case::{Case, Tensors, read_tensors, write_tensors};
use crate::compare::{compare_case, compare_gradients, has_results};
use crate::model::{Checkpoint, Settings};
use crate::report::Report;

/// Runs a checkpoint (or attention alone) on a case file with the sequence sharded over rank threads, and compares
/// every tensor with the file.
///
/// Exit status: 0 all within tolerance, 1 something past it, 2 the case could not be run.
#[derive(Debug, Parser)]
#[command(name = "parity")]
pub struct Arguments {
    /// Model folder in Hugging Face layout: config.json and safetensors
    #[arg(required_unless_present = "attention", conflicts_with = "attention")]
    pub checkpoint: Option<PathBuf>,
    /// Case file with `input.*` tensors and the results to compare with
    #[arg(required_unless_present = "attention", conflicts_with = "attention")]
    pub case: Option<PathBuf>,
    /// Attention case; kind, window and scale come from the index.json beside it
    #[arg(long, value_name = "CASE")]
    pub attention: Option<PathBuf>,
    /// Ranks that share the sequence
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub cp: u16,
    /// How the sequence is divided: contiguous, head-tail or balanced
    #[arg(long, default_value_t = LayoutKind::Contiguous)]
    pub layout: LayoutKind,
    /// Gradients of the mean loss to compare with, by parameter name
    #[arg(long, value_name = "FILE", conflicts_with = "attention")]
    pub grads: Option<PathBuf>,
    /// Writes the inputs and what was computed under the names of the case file
    #[arg(long, value_name = "FILE")]
    pub dump: Option<PathBuf>,
}

/// The error and its causes in one line, each said once.
pub fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            let colon = if text.is_empty() { "" } else { ": " };
            text = format!("{text}{colon}{cause}");
        }
    }
    text
}

impl Arguments {
    /// Runs what was asked for and prints the tables to `out`. True if everything is within its tolerance.
    ///
    /// # Errors
    /// Files that cannot be read or written, settings of the checkpoint that are not supported, malformed inputs, and
    /// files without anything to compare with.
    pub fn run(&self, out: &mut dyn Write) -> Result<bool> {
        match (&self.attention, &self.checkpoint, &self.case) {
            (Some(case), _, _) => self.run_attention(case, out),
            (None, Some(checkpoint), Some(case)) => self.run_model(checkpoint, case, out),
            _ => bail!("nothing to run: give CHECKPOINT and CASE, or --attention CASE"),
        }
    }

    fn run_model(&self, checkpoint: &Path, case_path: &Path, out: &mut dyn Write) -> Result<bool> {
        let case = Case::load(case_path)?;
        if !has_results(&case) && self.dump.is_none() {
            bail!("{} holds inputs only, nothing to compare with; --dump FILE writes the results", case_path.display());
        }
        let reference = self.grads.as_deref().map(read_tensors).transpose()?;
        let settings = Settings { ranks: self.cp.into(), layout: self.layout, gradients: reference.is_some() };
        let computed = Checkpoint::load(checkpoint)?.run(&case, &settings)?;
        if let Some(path) = &self.dump {
            let mut all = case.given();
            all.extend(computed.tensors.clone());
            all.extend(computed.gradients.clone());
            write_tensors(path, &all)?;
        }
        writeln!(out, "{}, cp {}, {}", case_path.display(), self.cp, self.layout)?;
        let mut passed = true;
        if has_results(&case) {
            let report = compare_case(&case, &computed.tensors)?;
            write!(out, "{report}")?;
            passed = report.passed();
        } else {
            writeln!(out, "no result compared: the case holds inputs only")?;
        }
        if let (Some(reference), Some(path)) = (&reference, &self.grads) {
            passed &= self.report_gradients(reference, &computed.gradients, path, out)?;
        }
        Ok(passed)
    }

    fn report_gradients(
        &self,
        reference: &Tensors,
        computed: &Tensors,
        path: &Path,
        out: &mut dyn Write,
    ) -> Result<bool> {
        let report = compare_gradients(reference, computed)?;
        if report.comparisons.is_empty() {
            bail!("{} holds no gradient; needed are tensors under the names of the parameters", path.display());
        }
        write!(out, "\ngradients, {}\n{report}", path.display())?;
        Ok(report.passed())
    }

    fn run_attention(&self, path: &Path, out: &mut dyn Write) -> Result<bool> {
        let case = AttentionCase::load(path)?;
        let mut report = Report::default();
        let mut dump = case.tensors().clone();
        for dtype in [DType::F64, DType::F32] {
            let computed = case
                .run(dtype, self.cp.into(), self.layout)
                .with_context(|| format!("{} in {}", path.display(), dtype.as_str()))?;
            case.compare(&computed, dtype, &mut report)?;
            let prefix = if dtype == DType::F64 { "f64." } else { "" };
            dump.extend(computed.into_iter().map(|(name, x)| (format!("{prefix}{name}"), x)));
        }
        if let Some(path) = &self.dump {
            write_tensors(path, &dump)?;
        }
        match case.route() {
            Route::Ranks => writeln!(out, "{}, cp {}, {}", path.display(), self.cp, self.layout)?,
            Route::Kernel => writeln!(out, "{}, one rank: queries and keys are different tokens", path.display())?,
        }
        write!(out, "{report}")?;
        Ok(report.passed())
    }
}
