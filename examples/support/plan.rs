//! Command line of the `plan` example.

use std::io::Write;

use anyhow::Result;
use candle_core::DType;
use candle_cp::LayoutKind;
use candle_finetune::family::VlmConfig;
use candle_finetune::planner::{DeviceSpec, PlannedModel, Request, advise, plan};
use clap::Parser;

/// Plans a run without making it: memory, attention work and traffic of every rank, whether transfers hide behind
/// compute, and what to change if it does not fit.
///
/// Exit status: 0 it fits, 1 it does not, 2 it could not be planned.
#[derive(Debug, Parser)]
#[command(name = "plan")]
pub struct Arguments {
    /// e2b, e4b, 26b-a4b, 31b, qwen-9b, qwen-27b, qwen-35b-a3b, qwen-122b-a10b, a checkpoint folder or a config.json
    #[arg(long)]
    pub model: String,
    /// Tokens of a row
    #[arg(long, value_name = "TOKENS")]
    pub seq: usize,
    /// Ranks that share every row
    #[arg(long, default_value_t = 1)]
    pub cp: usize,
    /// Replicas, each with rows of its own
    #[arg(long, default_value_t = 1)]
    pub dp: usize,
    /// h200, h100, a100 or cpu
    #[arg(long, default_value = "h200")]
    pub device: DeviceSpec,
    /// GB per second and direction between ranks, in place of the device's links
    #[arg(long, value_name = "GB/S")]
    pub bandwidth: Option<f64>,
    /// contiguous, head-tail or balanced
    #[arg(long, default_value_t = LayoutKind::HeadTail)]
    pub layout: LayoutKind,
    /// bf16 or f32
    #[arg(long, default_value = "bf16", value_parser = dtype)]
    pub dtype: DType,
    /// Decoder layers run again in backward
    #[arg(long)]
    pub recompute: bool,
    /// 1: moments and masters are spread over all ranks
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub zero: u8,
    /// Adapters of this rank in place of the weights
    #[arg(long, value_name = "RANK")]
    pub lora_rank: Option<usize>,
    /// Parts that are left as they are, with commas between them: text, vision, audio
    #[arg(long, value_delimiter = ',', value_parser = part)]
    pub freeze: Vec<candle_finetune::planner::Part>,
    /// Rows of a batch
    #[arg(long, default_value_t = 1, value_name = "ROWS")]
    pub batch_rows: usize,
    /// Batches of a step
    #[arg(long, default_value_t = 1, value_name = "BATCHES")]
    pub accumulate: usize,
    /// Equally long documents of a row
    #[arg(long, default_value_t = 1)]
    pub documents: usize,
    /// Pictures of a row
    #[arg(long, default_value_t = 0)]
    pub pictures: usize,
    /// Soft tokens of a picture; by default those of a large one
    #[arg(long, value_name = "TOKENS")]
    pub picture_tokens: Option<usize>,
    /// One JSON object in place of the tables
    #[arg(long)]
    pub json: bool,
}

fn dtype(name: &str) -> Result<DType, String> {
    match name {
        "bf16" => Ok(DType::BF16),
        "f32" => Ok(DType::F32),
        _ => Err("allowed: bf16, f32".to_string()),
    }
}

fn part(name: &str) -> Result<candle_finetune::planner::Part, String> {
    let all = candle_finetune::planner::Part::ALL;
    all.into_iter().find(|part| part.to_string() == name).ok_or_else(|| "allowed: text, vision, audio".to_string())
}

impl Arguments {
    /// Plans and prints to `out`. True if it fits.
    ///
    /// # Errors
    /// A setting that cannot be used.
    pub fn run(self, out: &mut impl Write) -> Result<bool> {
        let model = PlannedModel::find(&self.model)?;
        let json = self.json;
        let request = self.request(model.config.as_ref())?;
        let planned = plan(&model, &request)?;
        let advice = if planned.fits() { None } else { advise(&model, &request)? };
        match json {
            true => writeln!(out, "{}", planned.json(&model, advice.as_ref()))?,
            false => write!(out, "{}", planned.text(&model, advice.as_ref()))?,
        }
        Ok(planned.fits())
    }

    fn request(self, model: &dyn VlmConfig) -> Result<Request> {
        let usual = model.decoder_shape().vision.map_or(0, |vision| vision.tokens_per_picture);
        anyhow::ensure!(
            self.pictures == 0 || usual > 0,
            "--pictures is {}; this model takes none, leave it out",
            self.pictures
        );
        if let Some(gigabytes) = self.bandwidth {
            let allowed = gigabytes.is_finite() && gigabytes > 0.0;
            anyhow::ensure!(allowed, "--bandwidth is {gigabytes}; GB per second are above 0");
        }
        let device = match self.bandwidth {
            Some(gigabytes) => self.device.with_bandwidth(gigabytes * 1e9),
            None => self.device,
        };
        Ok(Request {
            batch_rows: self.batch_rows,
            documents: self.documents,
            pictures: self.pictures,
            picture_tokens: if self.pictures > 0 { self.picture_tokens.unwrap_or(usual) } else { 0 },
            accumulate: self.accumulate,
            cp: self.cp,
            dp: self.dp,
            layout: self.layout,
            dtype: self.dtype,
            recompute: self.recompute,
            zero: self.zero > 0,
            lora_rank: self.lora_rank,
            freeze: self.freeze.into_iter().collect(),
            ..Request::new(self.seq, device)
        })
    }
}
