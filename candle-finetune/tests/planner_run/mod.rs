//! Real small runs that plans are held to.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device};
use candle_cp::{CpContext, ShardedLabels};
use candle_cp_layers::{LoadOptions, Recompute, Weights};
use candle_finetune::family::{Family, VlmConfig, VlmModel};
use candle_finetune::planner::{DeviceSpec, PlannedModel, Request};
use candle_finetune::{Batch, Gradients};
use candle_vlm_processor::{ImagePatches, Picture};

/// The checkpoint of a fixture.
pub fn checkpoint(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name).join("checkpoint")
}

/// The checkpoint of a fixture with the tokenizer of its family; some have none of their own.
pub fn with_tokenizer(name: &str) -> tempfile::TempDir {
    let dense = if name.starts_with("gemma4") { "gemma4-dense" } else { "qwen3_5-dense" };
    let folder = tempfile::tempdir().unwrap();
    for source in [dense, name] {
        for file in std::fs::read_dir(checkpoint(source)).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
        }
    }
    folder
}

/// A fixture to plan for.
pub fn model(name: &str) -> PlannedModel {
    let config = Family::read(&checkpoint(name)).expect("a fixture");
    PlannedModel { name: name.to_string(), config }
}

/// A request for f32 on the CPU.
pub fn request(seq_len: usize, cp: usize) -> Request {
    let cpu: DeviceSpec = "cpu".parse().expect("there is a CPU");
    Request { cp, dtype: DType::F32, ..Request::new(seq_len, cpu) }
}

/// A picture of 2 x 2 soft tokens.
pub fn picture(config: &dyn VlmConfig) -> Arc<ImagePatches> {
    let settings = config.image_settings().expect("the fixture takes pictures");
    let side = 2 * settings.soft_token_side();
    let rgb = (0..3 * side * side).map(|sample| (sample * 7 % 251) as u8).collect();
    let cut = settings.patches_as_is(&Picture::from_rgb(side, side, rgb).expect("samples")).expect("it fits");
    assert_eq!(cut.soft_tokens, 4);
    Arc::new(cut)
}

/// The batch that a request is about; every token of text is learned.
pub fn batch(config: &dyn VlmConfig, request: &Request) -> Batch {
    let tokens = request.tokens().expect("documents and pictures");
    let (documents, groups) = (tokens.documents().to_vec(), tokens.groups().to_vec());
    let image = config.placeholders().image;
    let id = |place: usize, group: i64| match image {
        Some(image) if group >= 0 => image,
        _ => 100 + (place * 37 % 390) as u32,
    };
    let ids: Vec<Vec<u32>> =
        groups.iter().map(|row| row.iter().enumerate().map(|(place, &group)| id(place, group)).collect()).collect();
    let label = |(&id, &group): (&u32, &i64)| if group >= 0 { -100 } else { i64::from(id) };
    let labels: Vec<Vec<i64>> =
        ids.iter().zip(&groups).map(|(ids, row)| ids.iter().zip(row).map(label).collect()).collect();
    let parts = labels.iter().map(|row| row.iter().map(|&label| if label < 0 { -100 } else { 0 }).collect()).collect();
    let pictures = (0..request.batch_rows * request.pictures).map(|_| picture(config)).collect();
    Batch { ids, labels, parts, documents, groups, pictures }
}

/// Weights of a fixture.
pub fn weights(name: &str, config: &dyn VlmConfig, options: &LoadOptions) -> Weights {
    Weights::load_with(&checkpoint(name), config, DType::F32, &Device::Cpu, options).expect("a fixture")
}

/// One rank's share of one batch's gradients, as the trainer takes it.
pub fn local_gradients(
    (model, weights): (&dyn VlmModel, &Weights),
    batch: &Batch,
    context: &CpContext,
    recompute: bool,
) -> candle_finetune::Result<Gradients> {
    let labels: ShardedLabels = context.shard_labels(&batch.labels_bs(&Device::Cpu)?)?;
    let recompute = if recompute { Recompute::on() } else { Recompute::off() };
    let hidden = model.hidden(batch, context, &recompute, DType::F32, &Device::Cpu)?;
    let loss = model.loss(&hidden, &labels)?;
    Gradients::collect(&recompute.backward(&loss)?, weights.variables())
}
