//! Qwen 3.5's messages and pictures to ids, patches and positions, against transformers, and what happens to samples
//! that cannot be used. What both families share is tested in `processor.rs`.

mod support;

use std::path::Path;

use candle_vlm_processor::qwen3_5::mrope_positions;
use candle_vlm_processor::{
    AnswerFinder, ChatEncoder, ChatSample, Error, Gemma4ImageSettings, ImageSettings, Message, PictureFault,
    PictureSource, Processor, Qwen3_5ImageSettings, Qwen3_5Processor, Request, Result,
};
use support::{Tensors, fixture};

fn checkpoint() -> std::path::PathBuf {
    fixture("qwen3_5-dense/checkpoint")
}

fn processor() -> Qwen3_5Processor {
    Qwen3_5Processor::from_folder(&checkpoint()).unwrap()
}

/// The sample of a golden chat, and its messages.
fn run_case(family: &str, processor: &Processor<impl ImageSettings>) -> (ChatSample, Vec<Message>) {
    let case = support::json(&fixture(&format!("{family}/goldens/case6_chat.json")));
    let messages = Message::list_from_json(&case["messages"].to_string()).unwrap();
    let names = case["images"].as_array().unwrap().iter();
    let images: Vec<_> = names.map(|name| PictureSource::from_text(name.as_str().unwrap())).collect();
    let folder = fixture("imaging");
    let request = Request { images: &images, folder: &folder, ..Request::new("case 6", &messages) };
    let sample = processor.process(&request).unwrap();
    assert_eq!(sample.chat.rendered, case["rendered"].as_str().unwrap());
    assert_eq!(serde_json::json!(sample.soft_tokens), case["soft_tokens"]);
    (sample, messages)
}

#[test]
fn a_chat_with_two_pictures_equals_transformers() {
    let golden = Tensors::open(&fixture("qwen3_5-dense/goldens/case6_chat.safetensors"));
    let processor = processor();
    let (sample, messages) = run_case("qwen3_5-dense", &processor);

    let ids: Vec<i64> = sample.chat.ids.iter().map(|&id| i64::from(id)).collect();
    assert_eq!(ids, golden.i64("input.input_ids"));
    let types: Vec<i64> = sample.token_types.iter().map(|&t| i64::from(t)).collect();
    assert_eq!(types, golden.i64("input.mm_token_type_ids"));
    let pixels: Vec<f32> = sample.images.iter().flat_map(|i| i.pixels.clone()).collect();
    assert!(pixels == golden.f32("input.pixel_values"), "pixels differ"); // bit for bit
    let grids: Vec<_> = sample.images.iter().map(|i| i.grid_thw).collect();
    let flat: Vec<i64> = grids.iter().flatten().map(|&n| n as i64).collect();
    assert_eq!(flat, golden.i64("input.image_grid_thw"));
    let positions = mrope_positions(&sample.token_types, &vec![0; ids.len()], &grids, 2).unwrap();
    assert_eq!(positions.concat(), golden.i64("input.position_ids"));

    // What the finder calls the assistant's, and nothing else, is labelled.
    let inputs = Default::default();
    let answers = AnswerFinder::new(processor.chat()).find(processor.chat(), &messages, &inputs, &sample.chat).unwrap();
    let mut labels = vec![-100; ids.len()];
    for token in answers.iter().flat_map(|answer| sample.chat.tokens_of(answer.whole())) {
        labels[token] = ids[token];
    }
    assert_eq!(labels, golden.i64("input.labels"));

    // A picture's tokens are its soft tokens: the template wrote those around them.
    for (n, image) in sample.images.iter().enumerate() {
        let tokens = sample.chat.tokens_of_picture(n);
        assert_eq!(tokens.len(), image.soft_tokens);
        assert!(sample.token_types[tokens].iter().all(|&t| t == 1));
    }
}

#[test]
fn one_type_holds_the_processor_of_either_family() {
    let boxed = |family: &str| -> Result<Processor<Box<dyn ImageSettings>>> {
        let folder = fixture(&format!("{family}/checkpoint"));
        let settings: Box<dyn ImageSettings> = match family {
            "gemma4-dense" => Box::new(Gemma4ImageSettings::from_folder(&folder)?),
            _ => Box::new(Qwen3_5ImageSettings::from_folder(&folder)?),
        };
        Processor::new(ChatEncoder::from_folder(&folder)?, settings)
    };
    for family in ["gemma4-dense", "qwen3_5-dense"] {
        let (sample, _) = run_case(family, &boxed(family).unwrap());
        let pixels: Vec<f32> = sample.images.iter().flat_map(|i| i.pixels.clone()).collect();
        let golden = Tensors::open(&fixture(&format!("{family}/goldens/case6_chat.safetensors")));
        assert!(pixels == golden.f32("input.pixel_values"), "{family}: pixels differ");
        for image in &sample.images {
            let real = image.positions.iter().filter(|position| position[0] >= 0).count();
            assert_eq!(real, image.grid_thw.iter().product::<usize>(), "{family}");
        }
    }
    // The files of one family are refused by the other.
    let other = Gemma4ImageSettings::from_folder(&fixture("qwen3_5-dense/checkpoint")).unwrap_err();
    assert!(matches!(other, Error::Setting { .. }), "{other}");
    let other = Qwen3_5ImageSettings::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap_err();
    assert!(matches!(other, Error::Setting { .. }), "{other}");
}

fn fault(messages: &str, max_tokens: Option<usize>) -> Error {
    let messages = Message::list_from_json(messages).unwrap();
    let folder = fixture("imaging");
    let request = Request { folder: &folder, max_tokens, ..Request::new("s", &messages) };
    match processor().check(&request).unwrap_err() {
        Error::Sample { sample, cause } if sample == "s" => *cause,
        other => panic!("no sample named: {other}"),
    }
}

#[test]
fn samples_that_cannot_be_used_are_refused() {
    let written = r#"[{"role": "user", "content": "What is <|image_pad|>?"}]"#;
    assert!(matches!(fault(written, None), Error::PlaceholderCount { placeholders: 1, pictures: 0, .. }));
    let two = r#"[{"role": "user", "content": [{"type": "image", "image": "wide.png"}, {"type": "text", "text": "and"},
                   {"type": "image", "image": "tall.png"}, {"type": "text", "text": "What?"}]}]"#;
    match fault(two, Some(60)) {
        Error::PictureTooLong { index: 2, name, soft_tokens: 30, .. } => assert_eq!(name, "tall.png"),
        other => panic!("{other}"),
    }
}

#[test]
fn thin_pictures_are_refused_by_name() {
    let picture = candle_vlm_processor::Picture::from_rgb(1, 201, vec![0; 603]).unwrap();
    let part = candle_vlm_processor::Part::Image(PictureSource::Decoded("thin".into(), picture.into()));
    let messages = [Message::parts("user", [part])];
    let Err(Error::Sample { cause, .. }) = processor().check(&Request::new("line 2", &messages)) else {
        panic!("it was taken")
    };
    assert!(matches!(
        *cause,
        Error::Picture { index: 1, fault: PictureFault::Shape { width: 1, height: 201, .. }, .. }
    ));
}

#[test]
fn tokens_that_no_file_names_are_the_usual_ones() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "chat_template.jinja", "preprocessor_config.json"] {
        std::fs::copy(checkpoint().join(name), folder.path().join(name)).unwrap();
    }
    let open = |folder: &Path| Qwen3_5Processor::from_folder(folder);
    let ids = |processor: &Qwen3_5Processor| (processor.image_token().to_owned(), processor.image_token_id());
    assert_eq!(ids(&open(folder.path()).unwrap()), ("<|image_pad|>".to_owned(), 504));
    std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"image_token": "<|video_pad|>"}"#).unwrap();
    assert_eq!(ids(&open(folder.path()).unwrap()), ("<|video_pad|>".to_owned(), 505));
    std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"image_token": "<picture>"}"#).unwrap();
    assert!(open(folder.path()).unwrap_err().to_string().starts_with("image_token is \"<picture>\": it is not one"));
    std::fs::remove_file(folder.path().join("tokenizer_config.json")).unwrap();
    let gemma = fixture("gemma4-dense/checkpoint/tokenizer.json");
    std::fs::copy(gemma, folder.path().join("tokenizer.json")).unwrap();
    let message = open(folder.path()).unwrap_err().to_string();
    assert!(message.starts_with("image_token is \"<|image_pad|>\": it is not a token of tokenizer.json"), "{message}");
}
