//! From messages and picture files to the loss: processor and model together against Hugging Face transformers.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use candle_cp::LayoutKind;
use candle_cp_examples::case::{Case, Tensors, read_tensors};
use candle_cp_examples::compare::compare_case;
use candle_cp_examples::model::{Checkpoint, Settings};
use candle_vlm_processor::{
    ChatSample, Gemma4Processor, ImageSettings, Message, PictureSource, Processor, Qwen3_5Processor, Request,
};

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

fn sample<S: ImageSettings>(processor: &Processor<S>, chat: &serde_json::Value) -> ChatSample {
    let messages = Message::list_from_json(&chat["messages"].to_string()).unwrap();
    let names = chat["images"].as_array().unwrap().iter();
    let images: Vec<_> = names.map(|name| PictureSource::from_text(name.as_str().unwrap())).collect();
    let folder = fixture("imaging");
    let request = Request { images: &images, folder: &folder, ..Request::new("the chat", &messages) };
    processor.process(&request).unwrap()
}

/// Patches and their positions `[images, patches, ..]`, all pictures padded to one number of patches.
fn gemma4_inputs(sample: &ChatSample) -> Tensors {
    let (images, patches, patch_dim) = (sample.images.len(), sample.images[0].patches, sample.images[0].patch_dim);
    let pixels: Vec<f32> = sample.images.iter().flat_map(|image| image.pixels.clone()).collect();
    let positions: Vec<i64> = sample.images.iter().flat_map(|image| image.positions.concat()).collect();
    let pixels = Tensor::from_vec(pixels, (images, patches, patch_dim), &Device::Cpu).unwrap();
    let positions = Tensor::from_vec(positions, (images, patches, 2), &Device::Cpu).unwrap();
    [("input.pixel_values".to_string(), pixels), ("input.image_position_ids".to_string(), positions)].into()
}

/// The patches of all pictures in a row, and the grid of each.
fn qwen3_5_inputs(sample: &ChatSample) -> Tensors {
    let patches: usize = sample.images.iter().map(|image| image.patches).sum();
    let pixels: Vec<f32> = sample.images.iter().flat_map(|image| image.pixels.clone()).collect();
    let grids: Vec<i64> = sample.images.iter().flat_map(|image| image.grid_thw.map(|side| side as i64)).collect();
    let pixels = Tensor::from_vec(pixels, (patches, sample.images[0].patch_dim), &Device::Cpu).unwrap();
    let grids = Tensor::from_vec(grids, (sample.images.len(), 3), &Device::Cpu).unwrap();
    [("input.pixel_values".to_string(), pixels), ("input.image_grid_thw".to_string(), grids)].into()
}

/// The golden case with every input made here, but for its labels.
fn check(family: &str, processed: impl Fn(&Path, &serde_json::Value) -> (ChatSample, Tensors)) {
    let text = std::fs::read_to_string(fixture(&format!("{family}/goldens/case6_chat.json"))).unwrap();
    let chat: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut tensors = read_tensors(&fixture(&format!("{family}/goldens/case6_chat.safetensors"))).unwrap();
    let folder = fixture(&format!("{family}/checkpoint"));
    let (sample, inputs) = processed(&folder, &chat);
    assert_eq!(sample.chat.rendered, chat["rendered"].as_str().unwrap());
    let ids: Vec<i64> = sample.chat.ids.iter().map(|&id| i64::from(id)).collect();
    assert_eq!(tensors["input.input_ids"].flatten_all().unwrap().to_vec1::<i64>().unwrap(), ids);
    for (name, input) in inputs {
        let golden = tensors.insert(name.clone(), input).unwrap();
        assert_eq!(golden.dims(), tensors[&name].dims(), "{family}: {name}");
    }
    let case = Case::new(tensors).unwrap();
    let checkpoint = Checkpoint::load(&folder).unwrap();
    for ranks in [1, 4] {
        let settings = Settings { ranks, layout: LayoutKind::HeadTail, gradients: false };
        let report = compare_case(&case, &checkpoint.run(&case, &settings).unwrap().tensors).unwrap();
        assert!(report.passed(), "{family}, cp {ranks}\n{report}");
        for name in ["out.loss_mean", "out.logits_at_positions", "input.position_ids"] {
            assert!(report.get(name).is_some(), "{family}: {name} is not compared");
        }
    }
}

#[test]
fn messages_and_pictures_give_the_loss_of_transformers() {
    check("gemma4-dense", |folder, chat| {
        let sample = sample(&Gemma4Processor::from_folder(folder).unwrap(), chat);
        let inputs = gemma4_inputs(&sample);
        (sample, inputs)
    });
}

#[test]
fn messages_and_pictures_give_the_loss_of_transformers_for_qwen() {
    check("qwen3_5-dense", |folder, chat| {
        let sample = sample(&Qwen3_5Processor::from_folder(folder).unwrap(), chat);
        let inputs = qwen3_5_inputs(&sample);
        (sample, inputs)
    });
}
