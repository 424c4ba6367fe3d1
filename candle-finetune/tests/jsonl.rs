//! JSONL files: what a line becomes, and what is said about lines that cannot be used.

use std::fs;
use std::path::{Path, PathBuf};

use candle_finetune::jsonl::{HeldOut, Lines};
use candle_finetune::{Encoder, Error, Packer, Part, Position, Result, Sample, Source};
use candle_gemma4::Config;
use tempfile::TempDir;

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint")
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn config() -> Config {
    Config::from_folder(&checkpoint()).unwrap()
}

fn open(path: &Path, seq_len: usize) -> Result<Lines> {
    Lines::read(path, Encoder::from_folder(&checkpoint(), std::sync::Arc::new(config())).unwrap())?.fit(seq_len, false)
}

fn load_with(bytes: &[u8], seq_len: usize) -> (TempDir, Result<Lines>) {
    let dir = tempfile::tempdir().unwrap();
    image::RgbImage::from_pixel(24, 12, image::Rgb([51, 0, 255])).save(dir.path().join("ok.png")).unwrap();
    fs::write(dir.path().join("page.png"), "<html>").unwrap();
    let path = dir.path().join("data.jsonl");
    fs::write(&path, bytes).unwrap();
    let lines = open(&path, seq_len);
    (dir, lines)
}

fn load(text: &str) -> (TempDir, Result<Lines>) {
    load_with(text.as_bytes(), 400)
}

fn decode(ids: &[u32]) -> String {
    let encoder = Encoder::from_folder(&checkpoint(), std::sync::Arc::new(config())).unwrap();
    encoder.tokenizer().decode(ids, false).unwrap()
}

fn text_of(sample: &Sample) -> String {
    decode(&sample.tokens.iter().map(|token| token.id).collect::<Vec<_>>())
}

fn learned_of(sample: &Sample, parts: &[Part]) -> String {
    let learned = sample.tokens.iter().filter(|token| token.learned.is_some_and(|part| parts.contains(&part)));
    decode(&learned.map(|token| token.id).collect::<Vec<_>>())
}

fn first(text: &str) -> Sample {
    let (_dir, lines) = load(text);
    lines.unwrap().sample(0).unwrap()
}

/// The one fault of a file whose second line is `line`.
fn fault(line: &str) -> String {
    match load(&format!("{{\"text\":\"read\"}}\n{line}\n")).1.unwrap_err() {
        Error::Data { faults, lines: 2, path, .. } => {
            assert_eq!(path.file_name(), Some("data.jsonl".as_ref()));
            let [fault] = faults.as_slice() else { panic!("{faults:?}") };
            assert_eq!(fault.line, 2);
            fault.reason.clone()
        }
        other => panic!("{other}"),
    }
}

fn image(soft_tokens: usize) -> String {
    format!("<|image>{}<image|>", "<|image|>".repeat(soft_tokens))
}

#[test]
fn a_prompt_becomes_a_turn_and_its_images_become_soft_tokens() {
    let line = r#"{"prompt":" <|image|>read<|image|>\n","completion":"\n3 5 ","images":["ok.png","ok.png"]}"#;
    let sample = first(line);
    // 24 x 12 pixels grow to 132 x 60, which is 11 x 5 squares of 12.
    let image = image(55);
    assert_eq!(text_of(&sample), format!("<bos><|turn>user\n{image}read{image}<turn|>\n<|turn>model\n3 5<turn|>\n"));
    assert_eq!(learned_of(&sample, &[Part::Text]), "3 5");
    assert_eq!(learned_of(&sample, &[Part::End]), "<turn|>");
    assert!(sample.tokens.last().unwrap().learned.is_none(), "the newline after the end is not learned");
    assert_eq!(sample.pictures.len(), 2);
    assert_eq!(sample.pictures[0].soft_tokens, 55);
    assert_eq!(sample.pictures[1].pixels[..3], [0.2, 0.0, 1.0]);
}

#[test]
fn a_prompt_is_the_same_as_two_messages() {
    let pair = first(r#"{"prompt":"Seen <|image|> here?","completion":"Yes.","images":["ok.png"]}"#);
    let parts = r#"[{"type":"text","text":"Seen "},{"type":"image","image":"ok.png"},{"type":"text","text":" here?"}]"#;
    let chat = first(&format!(
        r#"{{"messages":[{{"role":"user","content":{parts}}},{{"role":"assistant","content":"Yes."}}]}}"#
    ));
    assert_eq!(pair, chat);
    let plain = first(r#"{"prompt":" Hi ","completion":"Yes.","images":null}"#);
    let chat = first(r#"{"messages":[{"role":"user","content":" Hi "},{"role":"assistant","content":"Yes."}]}"#);
    assert_eq!(plain, chat);
}

#[test]
fn pictures_in_later_turns_and_in_data_urls() {
    let (dir, _) = load("{}");
    let base64 = |bytes: &[u8]| {
        let symbols = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let group = |chunk: &[u8]| {
            let n = (0..3).fold(0u32, |n, i| n << 8 | u32::from(*chunk.get(i).unwrap_or(&0)));
            (0..=chunk.len()).map(move |i| symbols[(n >> (18 - 6 * i)) as usize & 63] as char).collect::<String>()
        };
        bytes.chunks(3).map(group).collect::<String>()
    };
    let url = format!("data:image/png;base64,{}", base64(&fs::read(dir.path().join("ok.png")).unwrap()));
    let sample = first(&format!(
        r#"{{"messages":[{{"role":"user","content":"Hi"}},{{"role":"assistant","content":"Yes?"}},{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"{url}"}}}},{{"type":"image"}}]}},{{"role":"assistant","content":"Two."}}],"images":["ok.png"]}}"#
    ));
    assert_eq!(learned_of(&sample, &Part::ALL), "Yes?<turn|>Two.<turn|>");
    assert_eq!(sample.pictures.len(), 2);
    assert_eq!(sample.pictures[0], sample.pictures[1]);
}

#[test]
fn pictures_of_the_assistant_are_not_learned() {
    let sample = first(
        r#"{"messages":[{"role":"user","content":"Draw"},{"role":"assistant","content":[{"type":"text","text":"See "},{"type":"image","path":"ok.png"},{"type":"text","text":"there"}]}]}"#,
    );
    assert_eq!(learned_of(&sample, &Part::ALL), "Seethere<turn|>");
}

#[test]
fn the_end_of_every_turn_is_learned() {
    let lines = open(&data("turn-end/chat.jsonl"), 64).unwrap();
    let sample = lines.sample(0).unwrap();
    let facts: serde_json::Value = serde_json::from_slice(&fs::read(data("turn-end/facts.json")).unwrap()).unwrap();
    let facts = &facts["gemma4-dense"];
    let ids: Vec<u32> = sample.tokens.iter().map(|token| token.id).collect();
    assert_eq!(serde_json::json!(ids), facts["ids"]);
    let places: Vec<usize> = (0..ids.len()).filter(|&place| sample.tokens[place].learned.is_some()).collect();
    assert_eq!(serde_json::json!(places), facts["supervised"]);
    assert_eq!(places.len(), 11);
    assert_eq!(learned_of(&sample, &[Part::End]), "<turn|><turn|>");
}

#[test]
fn a_text_is_learned_whole_but_for_its_first_token() {
    let (_dir, lines) = load("{\"text\":\"read 4\"}\n{\"text\":\"<bos>read\"}");
    let lines = lines.unwrap();
    let sample = lines.sample(0).unwrap();
    assert_eq!(text_of(&sample), "<bos>read 4<eos>");
    assert_eq!(text_of(&lines.sample(1).unwrap()), "<bos>read<eos>");
    assert_eq!(learned_of(&sample, &[Part::Text]), "read 4");
    assert_eq!(sample.tokens.last().unwrap().learned, Some(Part::End));
}

#[test]
fn no_document_learns_the_first_token_of_the_next() {
    let lines = open(&data("boundary-label/two.jsonl"), 19).unwrap();
    let facts: serde_json::Value =
        serde_json::from_slice(&fs::read(data("boundary-label/facts.json")).unwrap()).unwrap();
    let facts = &facts["gemma4-dense"];
    struct InOrder<'a>(&'a Lines);
    impl Source for InOrder<'_> {
        fn epoch_len(&mut self, _: usize) -> usize {
            self.0.len()
        }
        fn sample(&mut self, place: Position) -> Result<Sample> {
            self.0.sample(place.taken)
        }
    }
    let config = config();
    let batch = Packer::new(Box::new(InOrder(&lines)), &config, 1, 19).next_batch().unwrap().unwrap();
    assert_eq!(serde_json::json!(batch.ids[0]), facts["input_ids"]);
    let documents: Vec<i64> = batch.documents[0].iter().map(|document| document + 1).collect();
    assert_eq!(serde_json::json!(documents), facts["document_ids"]);
    let context = candle_cp::CpContext::single(batch.tokens().unwrap()).unwrap();
    let labels = context.shard_labels(&batch.labels_bs(&candle_core::Device::Cpu).unwrap()).unwrap();
    assert_eq!(serde_json::json!(labels.labels_bs.to_vec2::<i64>().unwrap()[0]), facts["shifted labels"]);
    assert_eq!(labels.count, 17);
}

#[test]
fn byte_order_mark_crlf_and_empty_lines_are_fine() {
    for name in ["bom.jsonl", "crlf-blank-no-end.jsonl"] {
        let lines = open(&data("bom-crlf").join(name), 64).unwrap();
        let learned: Vec<_> = (0..lines.len()).map(|i| learned_of(&lines.sample(i).unwrap(), &[Part::Text])).collect();
        assert_eq!(learned, ["1", "2", "3"], "{name}");
    }
    let error = open(&data("bom-crlf/bad-line-5.jsonl"), 64).unwrap_err().to_string();
    assert!(error.contains("1 of 4 lines cannot be used") && error.contains("\n  line 5: not valid JSON"), "{error}");
    let (_dir, lines) = load("{\"text\":\"a\u{2028}b\"}\n");
    assert_eq!(text_of(&lines.unwrap().sample(0).unwrap()), "<bos>a\u{2028}b<eos>");
}

#[test]
fn lines_of_many_shapes_load_or_are_refused_with_their_own_reason() {
    let whole = fs::read_to_string(data("mixed-shapes/chat.jsonl")).unwrap();
    let Error::Data { faults, lines: 14, .. } = open(&data("mixed-shapes/chat.jsonl"), 128).unwrap_err() else {
        panic!("another error")
    };
    let expected = [
        (7, "2 image part(s) without a source of their own, but 1 picture(s)"),
        (8, "\"video\"; only text, image"),
        (9, "\"conversations\" with from and value: rewrite it as \"messages\""),
        (10, "nothing to learn: \"messages\" has no turn of the role assistant"),
        (12, "\"messages\" has no message"),
        (13, "\"messages\" is a string; a list is needed"),
        (14, "\"text\" beside \"messages\""),
    ];
    assert_eq!(faults.len(), expected.len(), "{faults:?}");
    for (fault, (line, part)) in faults.iter().zip(expected) {
        assert!(fault.line == line && fault.reason.contains(part), "{fault}\nwithout: {part}");
    }
    let good: Vec<&str> = whole.lines().enumerate().filter(|(i, _)| *i < 6 || *i == 10).map(|(_, line)| line).collect();
    let dir = tempfile::tempdir().unwrap();
    fs::copy(data("mixed-shapes/a.png"), dir.path().join("a.png")).unwrap();
    fs::write(dir.path().join("good.jsonl"), good.join("\n")).unwrap();
    let lines = open(&dir.path().join("good.jsonl"), 128).unwrap();
    let learned: Vec<_> = (0..lines.len()).map(|i| learned_of(&lines.sample(i).unwrap(), &Part::ALL)).collect();
    assert_eq!(learned[..6], ["A.<turn|>"; 6]);
    assert_eq!(learned[6], "A.<turn|>B.<turn|>");
    let pictures: Vec<_> = (0..lines.len()).map(|i| lines.sample(i).unwrap().pictures.len()).collect();
    assert_eq!(pictures, [1, 0, 1, 1, 1, 1, 0]);
}

#[test]
fn other_encodings_are_refused_with_line_and_byte() {
    for (name, parts) in [
        ("latin1.jsonl", vec!["line 1: not UTF-8 at byte offset 47 of the line"]),
        ("gbk.jsonl", vec!["line 1: not UTF-8 at byte offset 43 of the line"]),
        ("utf16.jsonl", vec!["line 1: not UTF-8 at byte offset 0 of the line", "UTF-16"]),
        ("utf8-then-latin1.jsonl", vec!["1 of 2 lines", "line 2: not UTF-8 at byte offset 47 of the line"]),
        ("gzip-inside.jsonl", vec!["line 1: not UTF-8 at byte offset 0 of the line", "gzip"]),
    ] {
        let error = open(&data("encodings").join(name), 64).unwrap_err();
        assert!(error.is_usage());
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)) && text.contains(name), "{text}");
    }
    let bare: Vec<u8> = "{\"text\":\"a\"}\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let text = load_with(&bare, 64).1.unwrap_err().to_string();
    assert!(text.contains("UTF-16 text without a byte order mark"), "{text}");
}

#[test]
fn every_fault_says_what_is_wrong_and_what_is_allowed() {
    let prompt = |rest: &str| format!(r#"{{"prompt":"<|image|>read","completion":"1"{rest}}}"#);
    let chat = |user: &str| {
        format!(r#"{{"messages":[{{"role":"user","content":{user}}},{{"role":"assistant","content":"1"}}]}}"#)
    };
    for (line, parts) in [
        ("{\"text\":".to_string(), vec!["not valid JSON"]),
        ("[1]".to_string(), vec!["a list instead of an object", "\"prompt\""]),
        (r#"{"text":"1","text":"2"}"#.to_string(), vec!["the key \"text\" stands twice in one object"]),
        (chat(r#"[{"type":"text","text":"1","text":"2"}]"#), vec!["the key \"text\" stands twice in one object"]),
        (r#"{"messages":[{"content":"1"}]}"#.to_string(), vec!["messages[0]", "has no `role`"]),
        (r#"{"messages":[{"role":"user","content":7}]}"#.to_string(), vec!["messages[0]", "must be a text or a list"]),
        (r#"{"messages":[{"role":"user"}],"prompt":"1"}"#.to_string(), vec!["\"messages\" beside \"prompt\""]),
        (r#"{"messages":[{"role":"assistant"}],"tools":"x"}"#.to_string(), vec!["\"tools\" is a string", "a list"]),
        (chat(r#""<|audio|>""#), vec!["<|audio|>", "remove it"]),
        (chat(r#""a<|turn>model\nb""#), vec!["messages[0] (user) stands in what looks like an answer"]),
        (
            chat(r#"[{"type":"image","url":"https://x.org/a.png"}]"#),
            vec!["picture 1 (https://x.org/a.png)", "web address"],
        ),
        (chat(r#"[{"type":"image","url":"absent.png"}]"#), vec!["picture 1 (absent.png)", "cannot read the file"]),
        (
            r#"{"prompt":"1","compeltion":"2"}"#.to_string(),
            vec!["unknown field \"compeltion\"; is \"completion\" meant?", "allowed are"],
        ),
        (r#"{"mesages":[],"id":7}"#.to_string(), vec!["unknown field \"mesages\"; is \"messages\" meant?"]),
        (r#"{"id":7,"Text":"1"}"#.to_string(), vec!["unknown field \"Text\"; is \"text\" meant?"]),
        (r#"{"id":7,"source":"x"}"#.to_string(), vec!["no field to learn from; \"id\" is unknown; allowed are"]),
        (r#"{"id":7,"prompt":"1"}"#.to_string(), vec!["no \"completion\""]),
        (prompt(r#","image":["ok.png"]"#), vec!["unknown field \"image\" and no \"images\": write \"images\""]),
        (
            r#"{"messages":[{"role":"assistant","content":"1"}],"Tool":[]}"#.to_string(),
            vec!["unknown field \"Tool\" and no \"tools\": write \"tools\""],
        ),
        (r#"{"text":"1","images":[]}"#.to_string(), vec!["\"text\" beside \"images\""]),
        (r#"{"text":7}"#.to_string(), vec!["\"text\" is a number", "a string is needed"]),
        (r#"{"text":""}"#.to_string(), vec!["\"text\" is empty"]),
        (r#"{"text":"<|image|>"}"#.to_string(), vec!["<|image|>, which stands for a picture", "remove it"]),
        (r#"{"prompt":"1"}"#.to_string(), vec!["no \"completion\""]),
        (r#"{"completion":"1"}"#.to_string(), vec!["no \"prompt\""]),
        ("{}".to_string(), vec!["no \"prompt\""]),
        (r#"{"prompt":"1","completion":" \n"}"#.to_string(), vec!["\"completion\" is empty"]),
        (r#"{"prompt":"1","completion":null}"#.to_string(), vec!["no \"completion\""]),
        (r#"{"prompt":"1","completion":"<|image|>"}"#.to_string(), vec!["<|image|> in \"completion\""]),
        (r#"{"prompt":"<|video|>","completion":"1"}"#.to_string(), vec!["<|video|>", "remove it"]),
        (prompt(""), vec!["1 placeholders <|image|>", "but 0 images"]),
        (prompt(r#","images":["ok.png","ok.png"]"#), vec!["1 placeholders <|image|>", "but 2 images"]),
        (prompt(r#","images":7"#), vec!["\"images\" is a number", "a list is needed"]),
        (prompt(r#","images":[null]"#), vec!["null in \"images\""]),
        (prompt(r#","images":["page.png"]"#), vec!["picture 1 (page.png): is not a picture"]),
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
    assert!(text.contains("\n  line 3: not UTF-8 at byte offset 12 of the line"), "{text}");
    assert!(text.contains("\n  line 5: not valid JSON"), "{text}");
    let many = "no\n".repeat(25);
    let text = load(&many).1.unwrap_err().to_string();
    assert!(text.contains("line 20:") && !text.contains("line 21:") && text.ends_with("and 5 more"), "{text}");
}

#[test]
fn files_without_a_sample_are_refused() {
    for text in ["", "\n\r\n"] {
        let error = load(text).1.unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("has no sample"), "{error}");
    }
    let error = open(Path::new("absent.jsonl"), 64).unwrap_err().to_string();
    assert!(error.starts_with("cannot read absent.jsonl"), "{error}");
}

#[test]
fn a_picture_that_changes_after_the_check_is_told_with_its_line() {
    let line = r#"{"prompt":"<|image|>","completion":"1","images":["ok.png"]}"#;
    let (dir, lines) = load(&format!("\n{line}"));
    let lines = lines.unwrap();
    image::RgbImage::new(12, 24).save(dir.path().join("ok.png")).unwrap();
    assert!(lines.sample(0).is_ok(), "as many soft tokens as before");
    image::RgbImage::new(12, 12).save(dir.path().join("ok.png")).unwrap();
    let error = lines.sample(0).unwrap_err().to_string();
    assert!(error.contains("data.jsonl line 2: ok.png has changed"), "{error}");
    fs::remove_file(dir.path().join("ok.png")).unwrap();
    let error = lines.sample(0).unwrap_err().to_string();
    assert!(error.contains("data.jsonl line 2: picture 1 (ok.png): cannot read the file"), "{error}");
}

#[test]
fn ranks_that_hold_a_sample_share_its_pictures() {
    let (_dir, lines) = load(r#"{"prompt":"<|image|>","completion":"1","images":["ok.png"]}"#);
    let lines = lines.unwrap();
    let first = lines.sample(0).unwrap();
    assert!(std::sync::Arc::ptr_eq(&first.pictures[0], &lines.sample(0).unwrap().pictures[0]));
    let kept = std::sync::Arc::downgrade(&first.pictures[0]);
    drop(first);
    assert!(kept.upgrade().is_none(), "no picture stays in memory");
}

#[test]
fn a_folder_without_a_template_reads_texts_only() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(checkpoint().join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let load = |text: &str| {
        let path = dir.path().join("data.jsonl");
        fs::write(&path, text).unwrap();
        Lines::read(&path, Encoder::from_folder(dir.path(), std::sync::Arc::new(config())).unwrap())
    };
    assert_eq!(text_of(&load("{\"text\":\"read\"}").unwrap().sample(0).unwrap()), "<bos>read<eos>");
    let chat = r#"{"prompt":"1","completion":"2"}"#;
    let error = load(chat).unwrap_err().to_string();
    assert!(error.contains("chats cannot be used") && error.contains("no chat_template.jinja"), "{error}");
    for name in ["chat_template.jinja", "tokenizer_config.json"] {
        fs::copy(checkpoint().join(name), dir.path().join(name)).unwrap();
    }
    assert_eq!(learned_of(&load(chat).unwrap().sample(0).unwrap(), &Part::ALL), "2<turn|>");
    let error = load(r#"{"prompt":"1","completion":"2","images":["a.png"]}"#).unwrap_err().to_string();
    assert!(error.contains("pictures cannot be used") && error.contains("processor_config.json"), "{error}");
    let settings = fs::read_to_string(checkpoint().join("processor_config.json")).unwrap();
    let other = settings.replace("\"patch_size\": 4", "\"patch_size\": 8");
    fs::write(dir.path().join("processor_config.json"), other).unwrap();
    let error = Encoder::from_folder(dir.path(), std::sync::Arc::new(config())).unwrap_err().to_string();
    assert!(
        error.contains("patch_size 8") && error.contains("patch_size 4") && error.contains("one checkpoint"),
        "{error}"
    );
}

#[test]
fn each_sample_comes_once_per_epoch_in_an_order_of_its_own() {
    let text: String = (0..8).map(|digit| format!("{{\"text\":\"{digit}\"}}\n")).collect();
    let (_dir, lines) = load(&text);
    let lines = lines.unwrap();
    let mut source = lines.training(3);
    let mut epoch = |epoch| -> Vec<String> {
        let places = (0..source.epoch_len(epoch)).map(|taken| Position { epoch, taken });
        places.map(|place| text_of(&source.sample(place).unwrap())).collect()
    };
    let (first, second) = (epoch(0), epoch(1));
    assert_ne!(first, second);
    assert_eq!(epoch(0), first);
    let sorted = |mut texts: Vec<String>| {
        texts.sort();
        texts
    };
    let all: Vec<String> = (0..lines.len()).map(|index| text_of(&lines.sample(index).unwrap())).collect();
    assert_eq!(sorted(first), all);
    assert_eq!(sorted(second), all);
}

#[test]
fn texts_are_turns_and_all_pictures_come_before_the_first() {
    let texts = first(
        r#"{"texts":[{"user":"One?","assistant":"1","source":"x"},{"user":"Two?","assistant":"2"}],"images":["ok.png","ok.png"]}"#,
    );
    let chat = first(
        r#"{"messages":[{"role":"user","content":[{"type":"image"},{"type":"image"},{"type":"text","text":"One?"}]},{"role":"assistant","content":"1"},{"role":"user","content":"Two?"},{"role":"assistant","content":"2"}],"images":["ok.png","ok.png"]}"#,
    );
    assert_eq!(texts, chat);
    for (line, part) in [
        (r#"{"texts":[]}"#, "\"texts\" has no pair of user and assistant"),
        (r#"{"texts":"x"}"#, "\"texts\" is a string; a list is needed"),
        (r#"{"texts":["x"]}"#, "texts[0] has no \"user\"; allowed are"),
        (r#"{"texts":[{"user":"1","assistant":"2"},{"user":"1","assistant":null}]}"#, "texts[1] has no \"assistant\""),
        (r#"{"texts":[{"user":"1","assistant":2}]}"#, "\"assistant\" of texts[0] is a number; a string is needed"),
        (r#"{"texts":[{"user":"1","assistant":" "}]}"#, "\"assistant\" of texts[0] is empty"),
        (r#"{"texts":[{"user":"1","assistant":"2"}],"messages":[]}"#, "\"messages\" beside \"texts\""),
    ] {
        let reason = fault(line);
        assert!(reason.contains(part), "{reason}");
    }
}

#[test]
fn a_key_that_stands_twice_is_named_at_any_depth() {
    for line in [
        r#"{"text":"1","text":"1"}"#,
        r#"{"text":null,"text":"1"}"#,
        r#"{"messages":[{"role":"user","content":"1","text":1,"text":2},{"role":"assistant","content":"2"}]}"#,
        r#"{"prompt":"1","completion":"2","meta":{"a":[{"text":1,"te\u0078t":2}]}}"#,
        r#"{"messages":[],"tools":[{"function":{"parameters":{"text":{},"text":{}}}}]}"#,
    ] {
        assert!(fault(line).contains("the key \"text\" stands twice in one object"), "{}", fault(line));
    }
    // The same key in different objects is fine.
    first(r#"{"messages":[{"role":"user","content":"1"},{"role":"assistant","content":"2"}],"meta":{"role":1}}"#);
}

#[test]
fn a_very_long_line_is_a_line_like_others() {
    let text = format!("{{\"text\":\"{}\"}}\nno\n{{\"text\":\"1\"}}\n", "long ".repeat(400_000));
    let error = load_with(text.as_bytes(), 64).1.unwrap_err().to_string();
    assert!(error.contains("1 of 3 lines") && error.contains("line 2: not valid JSON"), "{error}");
    let (_dir, lines) = load_with(text.replace("\nno\n", "\n\n").as_bytes(), 64);
    let lines = lines.unwrap();
    assert_eq!((lines.len(), &lines.fitted().too_long[..]), (1, &[1][..]));
    let deep = format!("{{\"text\":\"1\",\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(fault(&deep).contains("not valid JSON: recursion limit exceeded"));
}

#[test]
fn separators_inside_of_a_text_end_no_line() {
    // As they are, not escaped: only a line feed ends a line.
    let text = "{\"text\":\"a\u{2028}b\u{2029}c\u{85}d\u{0b}e\"}\nno\n";
    let error = load(text).1.unwrap_err().to_string();
    assert!(error.contains("2 of 2 lines") && error.contains("line 1: not valid JSON: control character"), "{error}");
    let (_dir, lines) = load(&text.replace('\u{0b}', "").replace("\nno", ""));
    assert_eq!(text_of(&lines.unwrap().sample(0).unwrap()), "<bos>a\u{2028}b\u{2029}c\u{85}de<eos>");
    // A lone carriage return ends none either: two objects on one line.
    let error = load("{\"text\":\"1\"}\r{\"text\":\"2\"}\n").1.unwrap_err().to_string();
    assert!(error.contains("1 of 1 lines") && error.contains("line 1: not valid JSON: trailing characters"), "{error}");
}

#[test]
fn null_counts_as_absent_everywhere() {
    let plain = first(
        r#"{"messages":[{"role":"user","content":[{"type":"text","text":"1"},{"type":"image","image":"ok.png"}]},{"role":"assistant","content":"2"}]}"#,
    );
    let nulls = first(
        r#"{"text":null,"prompt":null,"images":null,"tools":null,"messages":[{"role":"user","name":null,"content":[{"type":"text","text":"1","image":null},{"type":"image","image":"ok.png","text":null,"url":null}]},{"role":"assistant","content":"2","tool_calls":null}]}"#,
    );
    assert_eq!(plain, nulls);
}

#[test]
fn held_out_samples_are_chosen_by_a_seed_and_nothing_is_lost() {
    let text: String = (0..10).map(|digit| format!("\n{{\"text\":\"{digit}\"}}\n")).collect();
    let texts = |lines: &Lines| -> Vec<String> {
        (0..lines.len()).map(|index| text_of(&lines.sample(index).unwrap())).collect()
    };
    let split = |held_out, seed| load(&text).1.unwrap().split(held_out, seed);
    let (train, held_out) = split(HeldOut::Count(3), 1).unwrap();
    let (train, held_out) = (texts(&train), texts(&held_out));
    assert_eq!((train.len(), held_out.len()), (7, 3));
    assert!(train.is_sorted() && held_out.is_sorted());
    let mut all = [train, held_out.clone()].concat();
    all.sort();
    assert_eq!(all, texts(&load(&text).1.unwrap()));
    assert_eq!(texts(&split(HeldOut::Share(0.3), 1).unwrap().1), held_out);
    let others: Vec<_> = (2..8).map(|seed| texts(&split(HeldOut::Count(3), seed).unwrap().1)).collect();
    assert!(others.iter().any(|other| *other != held_out));
    for (asked, parts) in [
        (HeldOut::Count(0), "holding 0 of 10 samples out leaves 10 to train on and 0 to validate with"),
        (HeldOut::Count(10), "holding 10 of 10 samples out leaves 0 to train on and 10 to validate with"),
        (HeldOut::Count(99), "holding 99 of 10 samples out leaves 0 to train on and 99 to validate with"),
        (HeldOut::Share(0.01), "holding a share of 0.01 of 10 samples out leaves 10 to train on and 0 to"),
        (
            HeldOut::Share(1.0),
            "leaves 0 to train on and 10 to validate with; both need at least 1: hold out a count from 1 to 9",
        ),
        (HeldOut::Share(-1.0), "leaves 10 to train on and 0 to"),
        (HeldOut::Share(f64::NAN), "a share of NaN"),
    ] {
        let error = split(asked, 1).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(parts), "{error}");
    }
}

#[test]
fn both_parts_share_files_and_keep_their_line_numbers() {
    let line = r#"{"prompt":"<|image|>","completion":"1","images":["ok.png"]}"#;
    let (dir, lines) = load(&format!("\n{line}\n\n{line}\n{line}\n"));
    let lines = lines.unwrap();
    let encoder = lines.encoder().clone();
    let (train, held_out) = lines.split(HeldOut::Count(1), 0).unwrap();
    assert!(std::sync::Arc::ptr_eq(&encoder, train.encoder()) && std::sync::Arc::ptr_eq(&encoder, held_out.encoder()));
    assert_eq!(train.sample(0).unwrap(), held_out.sample(0).unwrap());
    fs::remove_file(dir.path().join("ok.png")).unwrap();
    let number = |lines: &Lines, index: usize| {
        let text = lines.sample(index).unwrap_err().to_string();
        [2, 4, 5].into_iter().find(|number| text.contains(&format!("data.jsonl line {number}: picture 1"))).unwrap()
    };
    let mut numbers = vec![number(&train, 0), number(&train, 1), number(&held_out, 0)];
    assert!(numbers[0] < numbers[1]);
    numbers.sort_unstable();
    assert_eq!(numbers, [2, 4, 5]);
}

#[test]
fn samples_come_in_the_order_of_the_file() {
    let (_dir, lines) = load("{\"text\":\"2\"}\n{\"text\":\"1\"}\n");
    let lines = lines.unwrap();
    let mut source = lines.in_order();
    for epoch in 0..2 {
        assert_eq!(source.epoch_len(epoch), 2);
        for (taken, text) in ["<bos>2<eos>", "<bos>1<eos>"].into_iter().enumerate() {
            assert_eq!(text_of(&source.sample(Position { epoch, taken }).unwrap()), text);
        }
    }
}
