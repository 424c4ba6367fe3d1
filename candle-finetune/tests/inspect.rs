//! What is told about a data file, to the letter.

use std::fs;
use std::path::Path;

use candle_finetune::{Config, Inspection, inspect};
use tempfile::TempDir;

/// Line 3 has a picture, line 5 is long, line 6 has a field that is not read.
const DATA: &str = r#"{"text": "Tides rise."}

{"prompt": "<|image|>Is it tall?", "completion": "No.", "images": ["ok.png"]}
{"messages": [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Teal."}, {"role": "user", "content": "Another?"}, {"role": "assistant", "content": "Ochre."}]}
{"prompt": "1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8 9", "completion": "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0"}
{"id": 6, "text": "Tides \u001b[31mfall."}
"#;

fn setup() -> (TempDir, Config) {
    setup_of("gemma4-dense", DATA)
}

fn setup_of(family: &str, text: &str) -> (TempDir, Config) {
    let dir = tempfile::tempdir().unwrap();
    image::RgbImage::from_pixel(24, 12, image::Rgb([51, 0, 255])).save(dir.path().join("ok.png")).unwrap();
    let data = dir.path().join("data.jsonl");
    fs::write(&data, text).unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../fixtures/{family}/checkpoint"));
    let config = Config { model: Some(model), data: Some(data), seq_len: 90, ..Config::default() };
    (dir, config)
}

/// The text, without the folder of the file.
fn told(config: &Config, inspection: &Inspection) -> String {
    let text = inspect(config, inspection).unwrap();
    let folder = config.data.as_ref().unwrap().parent().unwrap();
    text.replace(&format!("{}/", folder.display()), "")
}

/// Their samples have 10, 80, 52, 94 and 15 tokens, and 9, 4, 11, 21 and 14 of them are learned. In whatever order they
/// come, those that fit fill two rows of 90.
const TOLD: &str = r#"data.jsonl
5 samples, 251 tokens, 59 of them learned (23.5 %), 1 picture
fields that are not read: "id" (1 line)

samples by their tokens
  8 to  15  ████████████████████████████████████████ 2
 16 to  31   0
 32 to  63  ████████████████████ 1
 64 to 127  ████████████████████████████████████████ 2

   --seq-len      samples that fit     learned tokens in them
           8            0    0.0 %                 0    0.0 %
          16            2   40.0 %                23   39.0 %
          32            2   40.0 %                23   39.0 %
          64            3   60.0 %                34   57.6 %
>         90            4   80.0 %                38   64.4 %
         128            5  100.0 %                59  100.0 %

packed, one epoch: 4 samples in 2 rows of 90 tokens (1 batch of 2 rows, 1 step), 12.8 % padding
left out 1 of 5 samples (line 5): longer than a row of 90 tokens; the longest has 94: --seq-len 94 keeps all of them, --truncate cuts them

line 3: 80 tokens; 4 [[learned]]
<bos><|turn>user
<picture 57 tokens>Is it tall?<turn|>
<|turn>model
[[No.<turn|>]]
"#;

#[test]
fn a_file_is_told_to_the_letter() {
    let (_dir, config) = setup();
    let text = told(&config, &Inspection { line: Some(3), color: false });
    assert_eq!(text, TOLD);
    let histogram = text.split("\n\n").nth(1).unwrap();
    assert!(histogram.lines().all(|line| line.chars().count() <= 80), "{histogram}");
}

/// The part about the sample.
fn sample(config: &Config, inspection: Inspection) -> String {
    let text = told(config, &inspection);
    text[text.rfind("\nline ").unwrap() + 1..].to_string()
}

#[test]
fn what_is_learned_is_coloured_or_bracketed() {
    let (_dir, config) = setup();
    let show = |line, color| sample(&config, Inspection { line, color });
    let first = "line 1: 10 tokens; 9 [[learned]]\n<bos>[[Tides rise.<eos>]]\n";
    assert_eq!(show(None, false), first);
    assert_eq!(show(Some(1), false), first);
    let green = first.replace("[[", "\u{1b}[32m").replace("]]", "\u{1b}[0m");
    assert_eq!(show(None, true), green);
    let chat = show(Some(4), false);
    assert!(
        chat.ends_with(
            "\n<bos><|turn>user\nName a colour.<turn|>\n<|turn>model\n[[Teal.<turn|>]]\n<|turn>user\nAnother?<turn|>\n\
         <|turn>model\n[[Ochre.<turn|>]]\n"
        ),
        "{chat}"
    );
    let escape = show(Some(6), true);
    assert_eq!(escape.matches('\u{1b}').count(), 4, "only the marks: {escape:?}");
    assert!(escape.contains("Tides \\u{1b}[31mfall."), "{escape}");
}

/// Neither the role nor the line break behind a turn is learned; the tokens around a picture are counted with it.
#[test]
fn qwen_chats_are_told_with_their_own_words() {
    let data = r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "ok.png"}, {"type": "text", "text": "Tall?"}]}, {"role": "assistant", "content": "No."}]}
{"text": "Tides rise."}
"#;
    let (_dir, config) = setup_of("qwen3_5-dense", data);
    let chat = sample(&config, Inspection { line: Some(1), color: false });
    assert_eq!(
        chat,
        "line 1: 41 tokens; 4 [[learned]]\n<|im_start|>user\n<picture 20 tokens>Tall?<|im_end|>\n\
         <|im_start|>assistant\n[[No.<|im_end|>]]\n"
    );
    // The first token has nothing to be told from.
    let text = sample(&config, Inspection { line: Some(2), color: false });
    assert_eq!(text, "line 2: 9 tokens; 8 [[learned]]\nT[[ides rise.<|im_end|>]]\n");
}

#[test]
fn a_long_sample_is_shown_as_the_run_takes_it() {
    let (_dir, mut config) = setup();
    let line = |config: &Config| sample(config, Inspection { line: Some(5), color: false });
    let whole = line(&config);
    assert!(whole.contains("left out: longer than --seq-len 90; ") && whole.contains("0 0<turn|>]]"), "{whole}");
    config.truncate = true;
    let cut = line(&config);
    assert!(cut.contains(" tokens, cut to 90; ") && !cut.contains("0<turn|>]]"), "{cut}");
    config.seq_len = 20;
    let nothing = line(&config);
    assert!(nothing.contains(" tokens, cut to 20 and left out; 0 [[learned]]\n"), "{nothing}");
    // A row that nothing fits is told, not an error: the survivors show what would do.
    config.truncate = false;
    config.seq_len = 4;
    let text = told(&config, &Inspection::default());
    assert!(text.contains("\ndata.jsonl: no sample fits a row of 4 tokens; the longest of 5, line 5, has "), "{text}");
    assert!(text.contains(">          4            0    0.0 %                 0    0.0 %\n"), "{text}");
}

#[test]
fn flags_are_checked() {
    let parsed = |line, color, terminal| Inspection::from_flags(line, color, terminal).unwrap();
    assert_eq!(parsed(None, None, true), Inspection { line: None, color: true });
    assert_eq!(parsed(Some("7"), Some("auto"), false), Inspection { line: Some(7), color: false });
    assert_eq!(parsed(None, Some("always"), false), Inspection { line: None, color: true });
    assert_eq!(parsed(None, Some("never"), true), Inspection { line: None, color: false });
    for (line, color, expected) in [
        (Some("0"), None, "--inspect-line \"0\": allowed is the number of a line, from 1; write for example"),
        (Some("two"), None, "--inspect-line \"two\": allowed is the number of a line, from 1; write for example"),
        (None, Some("green"), "--color \"green\": allowed is auto, always or never; "),
    ] {
        let error = Inspection::from_flags(line, color, false).unwrap_err();
        assert!(error.is_usage() && error.to_string().starts_with(expected), "{error}");
    }
    let (_dir, config) = setup();
    for line in [2, 7] {
        let error = inspect(&config, &Inspection { line: Some(line), color: false }).unwrap_err();
        let text = error.to_string();
        assert!(
            error.is_usage() && text.starts_with(&format!("--inspect-line \"{line}\": allowed is a line")),
            "{text}"
        );
        assert!(text.contains("data.jsonl that has a sample; the last one is 6; "), "{text}");
    }
    let digits = inspect(&Config::default(), &Inspection::default()).unwrap_err();
    assert!(digits.is_usage() && digits.to_string().contains("beside --model DIR and --data FILE.jsonl"), "{digits}");
    fs::write(config.data.as_ref().unwrap(), "{\"text\":\"1\"}\nno\n").unwrap();
    let faults = inspect(&config, &Inspection::default()).unwrap_err().to_string();
    assert!(faults.contains("1 of 2 lines cannot be used") && faults.contains("line 2: not valid JSON"), "{faults}");
}
