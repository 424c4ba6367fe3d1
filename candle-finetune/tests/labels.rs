//! Lines of a data file: exactly the answers and the tokens that end them are supervised, shown by decoded text.

use std::fs;
use std::path::{Path, PathBuf};

use candle_finetune::family::Family;
use candle_finetune::jsonl::Lines;
use candle_finetune::{Encoder, Error, Part, Result};

fn checkpoint(family: Family) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../fixtures/{family}-dense/checkpoint"))
}

/// The family's checkpoint without weights, with another template, if there is one.
fn folder(family: Family, template: Option<&str>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in checkpoint(family).read_dir().unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_none_or(|extension| extension != "safetensors") {
            fs::copy(&entry, dir.path().join(entry.file_name().unwrap())).unwrap();
        }
    }
    if let Some(template) = template {
        fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    }
    // 24 x 12 pixels grow to 132 x 60, which is 11 x 5 soft tokens.
    image::RgbImage::new(24, 12).save(dir.path().join("ok.png")).unwrap();
    dir
}

fn read(folder: &Path, lines: &[&str]) -> Result<Lines> {
    let path = folder.join("data.jsonl");
    fs::write(&path, lines.join("\n")).unwrap();
    Lines::read(&path, Encoder::from_folder(folder, Family::read(folder).unwrap()).unwrap())
}

/// The supervised stretches of each line's tokens, decoded one by one.
fn supervised(lines: &Lines) -> Vec<Vec<String>> {
    let decode = |index| {
        let tokens = lines.sample(index).unwrap().tokens;
        let stretches = tokens.chunk_by(|a, b| a.learned.is_some() == b.learned.is_some());
        let ids = stretches.filter(|stretch| stretch[0].learned.is_some()).map(|s| s.iter().map(|t| t.id).collect());
        ids.map(|ids: Vec<u32>| lines.encoder().tokenizer().decode(&ids, false).unwrap()).collect()
    };
    (0..lines.len()).map(decode).collect()
}

const LINES: [(&str, &[&str]); 13] = [
    (
        r#"{"messages": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]}"#,
        &["Blue.<turn|>", "Yes.<turn|>"],
    ),
    (
        r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}]}"#,
        &["Blue.<turn|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": "Tide?"}, {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "tide", "arguments": {}}}]}, {"role": "tool", "content": "4.2 m"}, {"role": "assistant", "content": "High."}], "tools": [{"type": "function", "function": {"name": "tide"}}]}"#,
        &["<turn|>", "High.<turn|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "More"}, {"role": "assistant", "content": "Yes."}]}"#,
        &["<turn|>", "Yes.<turn|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": [{"type": "image", "image": "ok.png"}, {"type": "text", "text": "Wide?"}]}, {"role": "assistant", "content": "Wide."}]}"#,
        &["Yes?<turn|>", "Wide.<turn|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}, {"role": "assistant", "content": "Two."}], "images": ["ok.png", "ok.png"]}"#,
        &["Two.<turn|>"],
    ),
    // A picture in an answer is no model's writing.
    (
        r#"{"messages": [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": [{"type": "text", "text": "See"}, {"type": "image", "path": "ok.png"}, {"type": "text", "text": "there"}]}]}"#,
        &["See", "there<turn|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}]}"#,
        &["One.<turn|>", "Two.<turn|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A."}, {"role": "user", "content": "B?"}]}"#,
        &["A.<turn|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": "model\n"}, {"role": "assistant", "content": " model\nOù ? 🌊 \n"}]}"#,
        &["model\nOù ? 🌊<turn|>"],
    ),
    (r#"{"prompt": "Sky?", "completion": " Blue.\n"}"#, &["Blue.<turn|>"]),
    (
        r#"{"prompt": "<|image|>Wide?<|image|>", "completion": "Wide.", "images": ["ok.png", "ok.png"]}"#,
        &["Wide.<turn|>"],
    ),
    (r#"{"text": "A text.\n"}"#, &["A text.\n<eos>"]),
];

const QWEN_LINES: [(&str, &[&str]); 9] = [
    (
        r#"{"messages": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]}"#,
        &["Blue.<|im_end|>", "Yes.<|im_end|>"],
    ),
    (
        r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sky?"}, {"role": "assistant", "content": ""}]}"#,
        &["<|im_end|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": [{"type": "image", "image": "ok.png"}, {"type": "text", "text": "Wide?"}]}, {"role": "assistant", "content": "Wide."}]}"#,
        &["Yes?<|im_end|>", "Wide.<|im_end|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}, {"role": "assistant", "content": "Two."}], "images": ["ok.png", "ok.png"]}"#,
        &["Two.<|im_end|>"],
    ),
    // Neither a picture in an answer nor the tokens around it are the model's writing.
    (
        r#"{"messages": [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": [{"type": "text", "text": "See"}, {"type": "image", "path": "ok.png"}, {"type": "text", "text": "there"}]}]}"#,
        &["See", "there<|im_end|>"],
    ),
    (
        r#"{"messages": [{"role": "user", "content": "assistant\n"}, {"role": "assistant", "content": " assistant\nOù ? 🌊 \n"}]}"#,
        &["assistant\nOù ? 🌊<|im_end|>"],
    ),
    (r#"{"prompt": "Sky?", "completion": " Blue.\n"}"#, &["Blue.<|im_end|>"]),
    (
        r#"{"prompt": "<|vision_start|><|image_pad|><|vision_end|>Wide?", "completion": "Wide.", "images": ["ok.png"]}"#,
        &["Wide.<|im_end|>"],
    ),
    (r#"{"text": "A text.\n"}"#, &["A text.\n<|im_end|>"]),
];

#[test]
fn answers_and_their_ends_are_supervised_and_nothing_else() {
    check(Family::Gemma4, &LINES);
    check(Family::Qwen3_5, &QWEN_LINES);
}

fn check(family: Family, all: &[(&str, &[&str])]) {
    let folder = folder(family, None);
    let lines = read(folder.path(), &all.iter().map(|(line, _)| *line).collect::<Vec<_>>()).unwrap();
    assert_eq!(supervised(&lines), all.iter().map(|(_, expected)| *expected).collect::<Vec<_>>());
    let ends = |index| {
        let tokens = lines.sample(index).unwrap().tokens;
        let ends = tokens.iter().filter(|token| token.learned == Some(Part::End));
        ends.map(|token| lines.encoder().tokenizer().token(token.id).unwrap()).collect::<Vec<_>>()
    };
    for (index, (line, expected)) in all.iter().enumerate() {
        let expected: Vec<_> = expected.iter().filter_map(|text| text.find('<').map(|at| &text[at..])).collect();
        assert_eq!(ends(index), expected, "{line}");
    }
}

#[test]
fn tokens_around_the_placeholder_of_a_prompt_are_not_written_twice() {
    for (family, bare, around) in [
        (Family::Gemma4, "<|image|>", "<|image><|image|><image|>"),
        (Family::Qwen3_5, "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"),
    ] {
        let line = |image| format!(r#"{{"prompt": "See {image}!", "completion": "Yes.", "images": ["ok.png"]}}"#);
        let folder = folder(family, None);
        let lines = read(folder.path(), &[&line(bare), &line(around)]).unwrap();
        let tokens = |index| lines.sample(index).unwrap().tokens;
        assert_eq!(tokens(0), tokens(1), "{family}");
    }
}

#[test]
fn pictures_without_a_token_between_them_are_refused() {
    let bare = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}\
        {% for item in m.content %}{% if item.type == 'image' %}<|image_pad|>{% else %}{{ item.text }}{% endif %}\
        {% endfor %}{% endif %}<|im_end|>\n{% endfor %}";
    let two = |between: &str| {
        format!(
            r#"{{"prompt": "<|image_pad|>{between}<|image_pad|>", "completion": "No.", "images": ["ok.png", "ok.png"]}}"#
        )
    };
    let folder = folder(Family::Qwen3_5, Some(bare));
    assert_eq!(supervised(&read(folder.path(), &[&two("or")]).unwrap()), [["No.<|im_end|>"]]);
    let Err(error) = read(folder.path(), &[&two("or"), &two("")]) else { panic!("nothing is between the pictures") };
    let expected =
        "line 2: nothing is between pictures 1 and 2; write <|vision_start|><|image_pad|><|vision_end|> for each";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn what_a_template_cannot_take_is_told_in_its_words_with_the_line() {
    let strict = "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}\
        {{ raise_exception('System role not supported') }}{% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}<|turn>\
        {{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}";
    let folder = folder(Family::Gemma4, Some(strict));
    let [turns, system, tool, .., in_a_row, open, _, pair, _, _] = LINES.map(|(line, _)| line);
    let Error::Data { faults, lines: 6, .. } =
        read(folder.path(), &[turns, system, tool, in_a_row, open, pair]).unwrap_err()
    else {
        panic!("another error")
    };
    let found: Vec<_> = faults.iter().map(ToString::to_string).collect();
    let alternate = "Conversation roles must alternate user/assistant/user/assistant/...";
    let expected = [(2, "System role not supported"), (3, alternate), (4, alternate)];
    assert_eq!(found, expected.map(|(line, text)| format!("line {line}: chat template default: line 1: {text}")));
    let lines = read(folder.path(), &[turns, open, pair]).unwrap();
    let expected = [vec!["Blue.<turn|>", "Yes.<turn|>"], vec!["A.<turn|>"], vec![" Blue.\n<turn|>"]];
    assert_eq!(supervised(&lines), expected);
}
