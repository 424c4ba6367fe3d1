//! JSONL files: what a line becomes, and what is said about lines that cannot be used.

use std::fs;
use std::path::Path;

use candle_finetune::jsonl::Lines;
use candle_finetune::{Error, Part, Result, Sample, Source, Vocabulary, small_model};
use tempfile::TempDir;

fn load_with(bytes: &[u8], seq_len: usize) -> (TempDir, Result<Lines>) {
    let dir = tempfile::tempdir().unwrap();
    image::RgbImage::from_pixel(8, 4, image::Rgb([51, 0, 255])).save(dir.path().join("ok.png")).unwrap();
    image::RgbImage::new(8, 6).save(dir.path().join("odd.png")).unwrap();
    fs::write(dir.path().join("page.png"), "<html>").unwrap();
    let path = dir.path().join("data.jsonl");
    fs::write(&path, bytes).unwrap();
    let config = small_model::config().unwrap();
    let json = small_model::tokenizer_json();
    let vocabulary = Vocabulary::from_json("built in", json.as_bytes(), &config).unwrap();
    let lines = Lines::load(&path, &vocabulary, &config, seq_len);
    (dir, lines)
}

fn load(text: &str) -> Result<Lines> {
    load_with(text.as_bytes(), 64).1
}

fn text_of(sample: &Sample) -> String {
    let config = small_model::config().unwrap();
    let json = small_model::tokenizer_json();
    let vocabulary = Vocabulary::from_json("built in", json.as_bytes(), &config).unwrap();
    sample.tokens.iter().map(|token| vocabulary.token(token.id)).collect()
}

/// The one fault of a file whose second line is `line`.
fn fault(line: &str) -> String {
    match load(&format!("{{\"text\":\"read\"}}\n{line}\n")).unwrap_err() {
        Error::Data { faults, lines: 2, path } => {
            assert_eq!(path.file_name(), Some("data.jsonl".as_ref()));
            let [fault] = faults.as_slice() else { panic!("{faults:?}") };
            assert_eq!(fault.line, 2);
            fault.reason.clone()
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_prompt_becomes_a_turn_and_its_images_become_soft_tokens() {
    let line = r#"{"prompt":" <|image|>read<|image|>\n","completion":"\n3 5 ","images":["ok.png","ok.png"]}"#;
    let lines = load(line).unwrap();
    let [sample] = lines.samples() else { panic!("one sample") };
    let image = "<|image><|image|><|image|><image|>";
    assert_eq!(text_of(sample), format!("<bos><|turn>user\n{image}read{image}<turn|>\n<|turn>model\n3 5<turn|>\n"));
    let learned: Vec<_> = sample.tokens.iter().filter_map(|token| token.learned).collect();
    assert_eq!(learned, [Part::Text, Part::Text, Part::Text, Part::End]);
    assert!(sample.tokens.last().unwrap().learned.is_none(), "the newline after the end is not learned");
    assert_eq!(sample.pictures.len(), 2);
    assert_eq!(sample.pictures[0].rgb[..3], [51, 0, 255]);
}

#[test]
fn a_text_is_learned_whole_but_for_its_first_token() {
    let lines = load("{\"text\":\"read 4\"}\n{\"text\":\"<bos>read\"}").unwrap();
    assert_eq!(text_of(&lines.samples()[0]), "<bos>read 4<eos>");
    assert_eq!(text_of(&lines.samples()[1]), "<bos>read<eos>");
    let learned: Vec<_> = lines.samples()[0].tokens.iter().map(|token| token.learned).collect();
    assert_eq!(learned, [None, Some(Part::Text), Some(Part::Text), Some(Part::Text), Some(Part::End)]);
}

#[test]
fn byte_order_mark_crlf_and_empty_lines_are_fine() {
    let bytes = b"\xef\xbb\xbf{\"text\":\"1\"}\r\n\r\n  \n{\"text\":\"2\"}\r\n{\"text\":\"3\"}";
    let lines = load_with(bytes, 64).1.unwrap();
    let texts: Vec<String> = lines.samples().iter().map(text_of).collect();
    assert_eq!(texts, ["<bos>1<eos>", "<bos>2<eos>", "<bos>3<eos>"]);
}

#[test]
fn every_fault_says_what_is_wrong_and_what_is_allowed() {
    let prompt = |rest: &str| format!(r#"{{"prompt":"<|image|>read","completion":"1"{rest}}}"#);
    for (line, parts) in [
        ("{\"text\":".to_string(), vec!["not valid JSON"]),
        ("[1]".to_string(), vec!["a list instead of an object", "\"prompt\""]),
        (r#"{"messages":[]}"#.to_string(), vec!["\"messages\" are not supported yet", "\"text\""]),
        (r#"{"prompt":"1","compeltion":"2"}"#.to_string(), vec!["unknown field \"compeltion\"", "\"completion\""]),
        (r#"{"text":"1","images":[]}"#.to_string(), vec!["\"text\" beside other fields"]),
        (r#"{"text":7}"#.to_string(), vec!["\"text\" is a number", "a string is needed"]),
        (r#"{"text":""}"#.to_string(), vec!["\"text\" is empty"]),
        (r#"{"text":"<|image|>"}"#.to_string(), vec!["<|image|> in \"text\"", "\"prompt\" only"]),
        (r#"{"prompt":"1"}"#.to_string(), vec!["no \"completion\""]),
        (r#"{"completion":"1"}"#.to_string(), vec!["no \"prompt\""]),
        ("{}".to_string(), vec!["no \"prompt\""]),
        (r#"{"prompt":"1","completion":" \n"}"#.to_string(), vec!["\"completion\" is empty"]),
        (r#"{"prompt":"1","completion":"<|image|>"}"#.to_string(), vec!["<|image|> in \"completion\""]),
        (r#"{"prompt":"<|video|>","completion":"1"}"#.to_string(), vec!["<|video|> in \"prompt\"", "remove it"]),
        (prompt(""), vec!["1 placeholders <|image|>", "but 0 images"]),
        (prompt(r#","images":["ok.png","ok.png"]"#), vec!["1 placeholders <|image|>", "but 2 images"]),
        (prompt(r#","images":"ok.png""#), vec!["\"images\" is a string", "a list of paths"]),
        (prompt(r#","images":[null]"#), vec!["null in \"images\""]),
        (prompt(r#","images":["absent.png"]"#), vec!["image absent.png: "]),
        (prompt(r#","images":["page.png"]"#), vec!["image page.png: "]),
        (prompt(r#","images":["odd.png"]"#), vec!["image odd.png is 8 x 6 pixels", "multiples of 4", "resize it"]),
        (
            format!(r#"{{"text":"{}"}}"#, "1".repeat(63)),
            vec!["65 tokens, but a row has 64", "--seq-len to at least 65"],
        ),
    ] {
        let reason = fault(&line);
        for part in parts {
            assert!(reason.contains(part), "{line}\ngave: {reason}\nwithout: {part}");
        }
    }
}

#[test]
fn all_faults_come_in_one_report_with_their_lines() {
    let (_dir, result) = load_with(b"\n{\"text\":\"1\"}\n{\"text\":\"caf\xe9\"}\r\n\nno\n", 64);
    let text = result.unwrap_err().to_string();
    assert!(text.contains("data.jsonl: 2 of 3 lines cannot be used; nothing was trained"), "{text}");
    assert!(text.contains("\n  line 3: not UTF-8 from byte 13 of the line on"), "{text}");
    assert!(text.contains("\n  line 5: not valid JSON"), "{text}");
    let many = "no\n".repeat(25);
    let text = load(&many).unwrap_err().to_string();
    assert!(text.contains("line 20:") && !text.contains("line 21:") && text.ends_with("and 5 more"), "{text}");
}

#[test]
fn files_without_a_sample_are_refused() {
    for text in ["", "\n\r\n"] {
        let error = load(text).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("has no sample"), "{error}");
    }
    let config = small_model::config().unwrap();
    let json = small_model::tokenizer_json();
    let vocabulary = Vocabulary::from_json("built in", json.as_bytes(), &config).unwrap();
    let error = Lines::load(Path::new("absent.jsonl"), &vocabulary, &config, 64).unwrap_err().to_string();
    assert!(error.starts_with("cannot read absent.jsonl"), "{error}");
}

#[test]
fn each_sample_comes_once_per_epoch_in_an_order_of_its_own() {
    let text: String = (0..8).map(|digit| format!("{{\"text\":\"{digit}\"}}\n")).collect();
    let lines = load(&text).unwrap();
    let mut stream = lines.training(3);
    let mut epoch = || {
        let mut texts = Vec::new();
        while let Some(sample) = stream.next_sample().unwrap() {
            texts.push(text_of(&sample));
        }
        texts
    };
    let (first, second) = (epoch(), epoch());
    assert_ne!(first, second);
    let sorted = |mut texts: Vec<String>| {
        texts.sort();
        texts
    };
    let all: Vec<String> = lines.samples().iter().map(text_of).collect();
    assert_eq!(sorted(first), all);
    assert_eq!(sorted(second), all);
}
