//! From messages and picture files to the loss: processor and model together against Hugging Face transformers.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use candle_cp::LayoutKind;
use candle_cp_examples::case::{Case, Tensors, read_tensors};
use candle_cp_examples::compare::compare_case;
use candle_cp_examples::model::{Checkpoint, Settings};
use candle_vlm_processor::{ChatSample, Gemma4Processor, Message, PictureSource, Request};

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

fn sample(chat: &serde_json::Value) -> ChatSample {
    let messages = Message::list_from_json(&chat["messages"].to_string()).unwrap();
    let names = chat["images"].as_array().unwrap().iter();
    let images: Vec<_> = names.map(|name| PictureSource::from_text(name.as_str().unwrap())).collect();
    let folder = fixture("imaging");
    let request = Request { images: &images, folder: &folder, ..Request::new("the chat", &messages) };
    Gemma4Processor::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap().process(&request).unwrap()
}

/// The golden case with every input made here, but for its labels.
fn case(sample: &ChatSample, golden: &Tensors) -> Case {
    let mut tensors = golden.clone();
    let tokens = sample.chat.ids.len();
    let mut put = |name: &str, x: candle_core::Result<Tensor>| tensors.insert(name.into(), x.unwrap());
    put("input.input_ids", Tensor::from_slice(&sample.chat.ids, (1, tokens), &Device::Cpu));
    let (patches, patch_dim) = (sample.images[0].patches, sample.images[0].patch_dim);
    let pixels: Vec<f32> = sample.images.iter().flat_map(|image| image.pixels.clone()).collect();
    put("input.pixel_values", Tensor::from_vec(pixels, (sample.images.len(), patches, patch_dim), &Device::Cpu));
    let positions: Vec<i64> = sample.images.iter().flat_map(|image| image.positions.concat()).collect();
    put("input.image_position_ids", Tensor::from_vec(positions, (sample.images.len(), patches, 2), &Device::Cpu));
    Case::new(tensors).unwrap()
}

#[test]
fn messages_and_pictures_give_the_loss_of_transformers() {
    let text = std::fs::read_to_string(fixture("gemma4-dense/goldens/case6_chat.json")).unwrap();
    let chat: serde_json::Value = serde_json::from_str(&text).unwrap();
    let golden = read_tensors(&fixture("gemma4-dense/goldens/case6_chat.safetensors")).unwrap();
    let sample = sample(&chat);
    assert_eq!(sample.chat.rendered, chat["rendered"].as_str().unwrap());
    let ids: Vec<i64> = sample.chat.ids.iter().map(|&id| i64::from(id)).collect();
    assert_eq!(golden["input.input_ids"].flatten_all().unwrap().to_vec1::<i64>().unwrap(), ids);
    let case = case(&sample, &golden);
    let checkpoint = Checkpoint::load(&fixture("gemma4-dense/checkpoint")).unwrap();
    for ranks in [1, 4] {
        let settings = Settings { ranks, layout: LayoutKind::HeadTail, gradients: false };
        let report = compare_case(&case, &checkpoint.run(&case, &settings).unwrap().tensors).unwrap();
        assert!(report.passed(), "cp {ranks}\n{report}");
        assert!(report.comparisons.iter().any(|compared| compared.name == "out.loss_mean"));
    }
}
