//! Whole samples against transformers, and every fault named.

mod support;

use std::path::Path;
use std::sync::Arc;

use candle_vlm_processor::{
    Error, Gemma4Processor, Message, Part, Picture, PictureFault, PictureLimits, PictureSource, Request,
};
use support::{Tensors, chat_lines, data, fixture, json};

fn processor() -> Gemma4Processor {
    Gemma4Processor::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap()
}

#[test]
fn a_chat_with_two_pictures_equals_transformers() {
    let case = json(&fixture("gemma4-dense/goldens/case6_chat.json"));
    let golden = Tensors::open(&fixture("gemma4-dense/goldens/case6_chat.safetensors"));
    let messages = Message::list_from_json(&case["messages"].to_string()).unwrap();
    let images: Vec<_> =
        case["images"].as_array().unwrap().iter().map(|n| PictureSource::from_text(n.as_str().unwrap())).collect();
    let folder = fixture("imaging");
    let request = Request { images: &images, folder: &folder, ..Request::new("case 6", &messages) };
    let sample = processor().process(&request).unwrap();

    assert_eq!(sample.chat.rendered, case["rendered"].as_str().unwrap());
    assert_eq!(serde_json::json!(sample.soft_tokens), case["soft_tokens"]);
    let ids: Vec<i64> = sample.chat.ids.iter().map(|&id| i64::from(id)).collect();
    assert_eq!(ids, golden.i64("input.input_ids"));
    let types: Vec<i64> = sample.token_types.iter().map(|&t| i64::from(t)).collect();
    assert_eq!(types, golden.i64("input.mm_token_type_ids"));
    let pixels: Vec<f32> = sample.images.iter().flat_map(|i| i.pixels.clone()).collect();
    assert!(pixels == golden.f32("input.pixel_values"), "pixels differ"); // bit for bit
    let positions: Vec<i64> = sample.images.iter().flat_map(|i| i.positions.as_flattened().to_vec()).collect();
    assert_eq!(positions, golden.i64("input.image_position_ids"));

    // The answers, found in the text, are the labelled tokens.
    let labels = golden.i64("input.labels");
    let mut found = vec![-100; labels.len()];
    for answer in ["A red circle over a blue field.<turn|>", "Yes, it is tall.<turn|>"] {
        let start = sample.chat.rendered.find(answer).unwrap();
        for token in sample.chat.tokens_of(start..start + answer.len()) {
            found[token] = ids[token];
        }
    }
    assert_eq!(found, labels);
    for (n, image) in sample.images.iter().enumerate() {
        let tokens = sample.chat.tokens_of_picture(n);
        assert_eq!(tokens.len(), image.soft_tokens + 2);
        assert!(sample.token_types[tokens.start + 1..tokens.end - 1].iter().all(|&t| t == 1));
    }
}

#[test]
fn check_does_all_but_the_pixels() {
    let messages = Message::list_from_json(
        r#"[{"role": "user", "content": [{"type": "image", "path": "wide.png"}, {"type": "text", "text": "What?"}]}]"#,
    )
    .unwrap();
    let folder = fixture("imaging");
    let request = Request { folder: &folder, ..Request::new("line 1", &messages) };
    let (checked, mut processed) = (processor().check(&request).unwrap(), processor().process(&request).unwrap());
    assert!(checked.images.is_empty() && processed.images.len() == 1);
    processed.images.clear();
    assert_eq!(checked, processed);
}

#[test]
fn a_picture_may_come_in_any_form() {
    let path = fixture("imaging/square.png");
    let content: Arc<[u8]> = std::fs::read(&path).unwrap().into();
    let picture = Arc::new(Picture::decode(&content, &PictureLimits::default()).unwrap());
    let sources = [
        PictureSource::Path(path.clone()),
        PictureSource::from_text(&format!("file://{}", path.display())),
        PictureSource::Bytes("in memory".into(), content),
        PictureSource::Decoded("pixels".into(), picture),
    ];
    let processor = processor();
    let samples: Vec<_> = sources
        .into_iter()
        .map(|source| {
            let messages = [Message::parts("user", [Part::Image(source), Part::Text("What?".into())])];
            processor.process(&Request::new("sample", &messages)).unwrap()
        })
        .collect();
    assert!(samples.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(samples[0].soft_tokens, [64]);
}

#[test]
fn pasted_pictures_and_addresses_are_parts_as_well() {
    let lines = chat_lines(&data("base64"));
    let samples: Vec<_> = (1..)
        .zip(&lines)
        .filter(|(number, _)| *number != 8)
        .map(|(number, line)| {
            processor().process(&Request::new(&format!("line {number}"), &line.messages)).unwrap().images
        })
        .collect();
    assert!(samples.windows(2).all(|pair| pair[0] == pair[1]));
    let message = processor().process(&Request::new("chat.jsonl line 8", &lines[7].messages)).unwrap_err().to_string();
    assert!(message.starts_with("chat.jsonl line 8: picture 1 (base64 text of"), "{message}");
    assert!(message.contains("is not base64: '!' at character"), "{message}");
}

#[test]
fn broken_pictures_are_named_with_their_sample() {
    let folder = data("broken");
    let lines = chat_lines(&folder);
    assert_eq!(lines.len(), 7);
    for (number, line) in (1..).zip(&lines) {
        let name = format!("chat.jsonl line {number}");
        let result = processor().check(&Request { folder: &folder, ..Request::new(&name, &line.messages) });
        match number {
            1 => assert_eq!(result.unwrap().soft_tokens.len(), 1),
            _ => {
                let message = result.unwrap_err().to_string();
                assert!(message.starts_with(&format!("{name}: picture 1 (")), "{message}");
            }
        }
    }
}

#[test]
fn pictures_of_other_formats_are_named_with_their_sample() {
    let folder = data("wrong-name");
    for line in chat_lines(&folder) {
        let request = Request { folder: &folder, ..Request::new("a line", &line.messages) };
        if let Err(fault) = processor().process(&request) {
            let message = fault.to_string();
            let gif = message.starts_with("a line: picture 1 (gif-inside.png): has a GIF inside");
            assert!(gif || message.starts_with("a line: picture 1 (webp-inside.png): has a WebP"), "{message}");
        }
    }
}

#[test]
fn huge_pictures_are_named_with_their_sample() {
    let messages = [Message::parts("user", [Part::Image(PictureSource::from_text("wide.png"))])];
    let folder = fixture("imaging");
    let request = Request { folder: &folder, ..Request::new("line 3", &messages) };
    let limits = PictureLimits { max_pixels: 7999, ..PictureLimits::default() };
    let message = processor().with_limits(limits).process(&request).unwrap_err().to_string();
    assert!(message.starts_with("line 3: picture 1 (wide.png): is 160 x 50 = 8000 pixels; at most 7999"), "{message}");
}

/// The fault of a request for the given JSON messages, without the name of the sample.
fn fault(messages: &str, images: &[PictureSource], max_tokens: Option<usize>) -> Error {
    let messages = Message::list_from_json(messages).unwrap();
    let folder = fixture("imaging");
    let request = Request { images, folder: &folder, max_tokens, ..Request::new("s", &messages) };
    match processor().process(&request).unwrap_err() {
        Error::Sample { sample, cause } if sample == "s" => *cause,
        other => panic!("no sample named: {other}"),
    }
}

#[test]
fn counts_that_differ_are_errors() {
    let wide = || PictureSource::from_text("wide.png");
    let one_part = r#"[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]"#;
    assert!(matches!(fault(one_part, &[], None), Error::PictureList { parts: 1, pictures: 0 }));
    assert!(matches!(fault(one_part, &[wide(), wide()], None), Error::PictureList { parts: 1, pictures: 2 }));
    let written = r#"[{"role": "user", "content": "What is <|image|>?"}]"#;
    assert!(matches!(fault(written, &[], None), Error::PlaceholderCount { placeholders: 1, pictures: 0, .. }));
    let both = r#"[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or <|image|>?"}]}]"#;
    assert!(matches!(fault(both, &[wide()], None), Error::PlaceholderCount { placeholders: 2, pictures: 1, .. }));
}

#[test]
fn too_many_tokens_name_the_picture_that_does_not_fit() {
    let two = r#"[{"role": "user", "content": [{"type": "image", "image": "wide.png"}, {"type": "text", "text": "and"},
                   {"type": "image", "image": "tall.png"}, {"type": "text", "text": "What?"}]}]"#;
    match fault(two, &[], Some(100)) {
        Error::PictureTooLong { index: 2, name, soft_tokens: 65, max_tokens: 100, end, total } => {
            assert_eq!(name, "tall.png");
            assert!(end > 100 && total > end);
            assert!(matches!(fault(two, &[], Some(end)), Error::TooLong { .. })); // only the text is cut off
            assert!(matches!(fault(two, &[], Some(end - 1)), Error::PictureTooLong { index: 2, .. }));
        }
        other => panic!("{other}"),
    }
    assert!(matches!(fault(two, &[], Some(20)), Error::PictureTooLong { index: 1, .. }));
    let text = r#"[{"role": "user", "content": "A long story."}]"#;
    assert!(matches!(fault(text, &[], Some(3)), Error::TooLong { max_tokens: 3, .. }));
}

#[test]
fn messages_of_other_forms_are_refused_with_their_place() {
    let cases = [
        (r#"["Hi"]"#, "messages[0]: must be an object"),
        (r#"[{"role": "user", "content": "a"}, {"content": "b"}]"#, "messages[1]: has no `role`"),
        (r#"[{"from": "human", "value": "What?"}]"#, "messages in the form {from, value}"),
        (r#"[{"role": "user", "content": 3}]"#, "`content` must be a text or a list of parts, not number"),
        (r#"[{"role": "user", "content": ["Hi"]}]"#, "content[0] must be an object with a `type`"),
        (r#"[{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]"#, "is of type \"video\"; only"),
        (r#"[{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]"#, "is of type \"audio\"; only"),
        (r#"[{"role": "user", "content": [{"type": "text"}]}]"#, "is of type text but has no `text`"),
        (r#"[{"role": "user", "content": [{"type": "image", "image": {"a": 1}}]}]"#, "by a text"),
        (r#"[{"role": "user", "content": [{"type": "image", "url": "a", "path": "b"}]}]"#, "names its picture twice"),
        (r#"[{"role": "user", "content": [{"type": "image_url"}]}]"#, "no address in `image_url`"),
        (r#"{"role": "user"}"#, "the list of messages is not valid"),
    ];
    for (messages, reason) in cases {
        let message = Message::list_from_json(messages).unwrap_err().to_string();
        assert!(message.contains(reason), "{messages}: {message}");
    }
}

#[test]
fn a_checkpoint_without_a_token_is_refused() {
    let from = fixture("gemma4-dense/checkpoint");
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "chat_template.jinja", "processor_config.json"] {
        std::fs::copy(from.join(name), folder.path().join(name)).unwrap();
    }
    let open = || Gemma4Processor::from_folder(folder.path()).unwrap_err().to_string();
    assert!(open().starts_with("image_token is not set: tokenizer_config.json must name it"));
    std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"image_token": "<picture>"}"#).unwrap();
    assert!(open().starts_with("image_token is \"<picture>\": it is not one token"));
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    assert!(open().contains("has no tokenizer.json"));
}

#[test]
fn threads_share_one_processor() {
    fn shared<T: Send + Sync>(_: &T) {}
    let processor = processor();
    shared(&processor);
    let folder = fixture("imaging");
    let messages = [Message::parts(
        "user",
        [Part::Image(PictureSource::from_text("tall.png")), Part::Text("Is this image tall?".into())],
    )];
    let request = Request { folder: &folder, ..Request::new("sample", &messages) };
    let alone = processor.process(&request).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| processor.process(&request).unwrap())).collect();
        assert!(threads.into_iter().all(|thread| thread.join().unwrap() == alone));
    });
}

#[test]
fn web_addresses_are_not_fetched() {
    let messages = [Message::parts("user", [Part::Image(PictureSource::from_text("https://example.org/a.png"))])];
    let request = Request { folder: Path::new(""), ..Request::new("line 1", &messages) };
    let Err(Error::Sample { cause, .. }) = processor().process(&request) else { panic!("it was fetched") };
    assert!(matches!(*cause, Error::Picture { index: 1, fault: PictureFault::WebAddress, .. }));
}
