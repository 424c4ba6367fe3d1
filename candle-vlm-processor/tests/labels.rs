//! Exactly what the assistant wrote is supervised, and the tokens that end it: every template with every shape of chat.
//!
//! What is expected was written by hand from the templates and the rule; what is found are token ids, decoded.

mod support;

use std::path::{Path, PathBuf};

use candle_vlm_processor::{
    AnswerFinder, ChatEncoder, ChatTemplate, Error, Message, TemplateInputs, TemplateValue, TextTokenizer,
};
use support::{data, fixture};

/// What a template does with a shape.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// The supervised stretches of tokens, as text.
    Learned(Vec<String>),
    /// The template cannot take it: an error of the template that holds this.
    Raised(&'static str),
    /// It cannot be told, or a picture is lost: another error that holds this.
    Refused(&'static str),
}

/// Name, messages, and whether tools are declared.
type Shape = (&'static str, &'static str, bool);

const SHAPES: [Shape; 14] = [
    (
        "turns",
        r#"[{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."},
            {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]"#,
        false,
    ),
    (
        "system",
        r#"[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sky?"},
            {"role": "assistant", "content": "Blue."}]"#,
        false,
    ),
    (
        "tool",
        r#"[{"role": "user", "content": "Tide?"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}]},
            {"role": "tool", "content": "4.2 m"}, {"role": "assistant", "content": "High."}]"#,
        true,
    ),
    (
        "two tools",
        r#"[{"role": "user", "content": "Tides?"},
            {"role": "assistant", "content": "Wait.", "tool_calls": [
                {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}},
                {"type": "function", "function": {"name": "tide", "arguments": {"port": "Dover"}}}]},
            {"role": "tool", "content": "4.2 m"}, {"role": "tool", "content": "0.3 m"},
            {"role": "assistant", "content": "High, low."}]"#,
        true,
    ),
    (
        "empty answer",
        r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""},
            {"role": "user", "content": "More"}, {"role": "assistant", "content": "Yes."}]"#,
        false,
    ),
    (
        "picture in a later turn",
        r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Wide?"}]},
            {"role": "assistant", "content": "Wide."}]"#,
        false,
    ),
    (
        "two answers in a row",
        r#"[{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One."},
            {"role": "assistant", "content": "Two."}]"#,
        false,
    ),
    (
        "reasoning",
        r#"[{"role": "user", "content": "1?"}, {"role": "assistant", "reasoning_content": "hm", "content": "One."},
            {"role": "user", "content": "2?"}, {"role": "assistant", "reasoning": "ha", "content": "Two."}]"#,
        false,
    ),
    (
        "question at the end",
        r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A."}, {"role": "user", "content": "B?"}]"#,
        false,
    ),
    (
        "answer in parts",
        r#"[{"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "A "}, {"type": "text", "text": " B"}]}]"#,
        false,
    ),
    (
        "blanks and letters of several bytes",
        r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "  Où ? 🌊 \n"}]"#,
        false,
    ),
    (
        "the same text",
        r#"[{"role": "user", "content": "A."}, {"role": "assistant", "content": "A."},
            {"role": "user", "content": "A."}, {"role": "assistant", "content": "A."}]"#,
        false,
    ),
    (
        "system in the middle",
        r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A."},
            {"role": "system", "content": "French."}, {"role": "user", "content": "Et ?"},
            {"role": "assistant", "content": "Oui."}]"#,
        false,
    ),
    (
        "answer first",
        r#"[{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes."}]"#,
        false,
    ),
];

/// Where a family's tokenizer is, and how it writes a picture of two soft tokens.
struct Family {
    tokenizer: PathBuf,
    placeholder: &'static str,
    picture: &'static str,
}

fn gemma() -> Family {
    let tokenizer = fixture("gemma4-dense/checkpoint");
    Family { tokenizer, placeholder: "<|image|>", picture: "<|image><|image|><|image|><image|>" }
}

fn qwen() -> Family {
    let tokenizer = fixture("qwen3_5-dense/checkpoint");
    Family { tokenizer, placeholder: "<|image_pad|>", picture: "<|image_pad|><|image_pad|>" }
}

/// The supervised stretches of tokens, decoded one by one.
fn supervised(chat: &ChatEncoder, family: &Family, (_, json, with_tools): Shape) -> Result<Vec<String>, Error> {
    let messages = Message::list_from_json(json)?;
    let tools: TemplateValue = serde_json::from_str(r#"[{"type": "function", "function": {"name": "tide"}}]"#).unwrap();
    let inputs = TemplateInputs { tools: with_tools.then_some(tools), ..TemplateInputs::default() };
    let rendered = chat.render(&messages, &inputs)?;
    let pictures = messages.iter().map(Message::image_parts).sum();
    let encoded = chat.encode(rendered, family.placeholder, &vec![family.picture.to_owned(); pictures])?;
    let answers = AnswerFinder::new(chat).find(chat, &messages, &inputs, &encoded)?;
    let mut learned = vec![false; encoded.ids.len()];
    for answer in answers {
        learned[encoded.tokens_of(answer.whole())].fill(true);
    }
    let places: Vec<usize> = (0..learned.len()).collect();
    let stretches = places.chunk_by(|&a, &b| learned[a] == learned[b]).filter(|stretch| learned[stretch[0]]);
    let decode =
        |stretch: &[usize]| chat.tokenizer().decode(&encoded.ids[stretch[0]..stretch[0] + stretch.len()], false);
    stretches.map(decode).collect()
}

fn check(family: Family, template: &Path, expected: [Outcome; SHAPES.len()]) {
    let source = std::fs::read_to_string(template).unwrap();
    let tokenizer = TextTokenizer::from_folder(&family.tokenizer).unwrap();
    let chat = ChatEncoder::new(ChatTemplate::from_source(&source).unwrap(), tokenizer);
    let mut faults = Vec::new();
    for (shape, expected) in SHAPES.into_iter().zip(expected) {
        let found = supervised(&chat, &family, shape);
        let holds = match (&found, &expected) {
            (Ok(found), Outcome::Learned(pieces)) => found == pieces,
            (Err(error @ Error::Template { .. }), Outcome::Raised(part)) => error.to_string().contains(part),
            (Err(error @ (Error::Answers { .. } | Error::PlaceholderCount { .. })), Outcome::Refused(part)) => {
                error.to_string().contains(part)
            }
            _ => false,
        };
        if !holds {
            let found = found.map_err(|error| error.to_string());
            faults.push(format!("{}: {found:?}\n   not {expected:?}", shape.0));
        }
    }
    assert!(faults.is_empty(), "{}\n{}", template.display(), faults.join("\n"));
}

/// Texts, each with the token that ends it.
fn learned(end: &str, texts: &[&str]) -> Outcome {
    Outcome::Learned(texts.iter().map(|text| format!("{text}{end}")).collect())
}

const TRIMMED: &str = "Où ? 🌊";
const BLANKS: &str = "  Où ? 🌊 \n";
const LOST: &str = "has 0 placeholder(s)";
const PARTS: &str = "[{'type': 'text', 'text': 'A '}, {'type': 'text', 'text': ' B'}]";

/// Plain templates: every turn with its text trimmed, calls of tools and reasoning left out.
fn plain(end: &str) -> [Outcome; SHAPES.len()] {
    let of = |texts: &[&str]| learned(end, texts);
    [
        of(&["Blue.", "Yes."]),
        of(&["Blue."]),
        of(&["", "High."]),
        of(&["Wait.", "High, low."]),
        of(&["", "Yes."]),
        of(&["Yes?", "Wide."]),
        of(&["One.", "Two."]),
        of(&["One.", "Two."]),
        of(&["A."]),
        of(&["AB"]),
        of(&[TRIMMED]),
        of(&["A.", "A."]),
        of(&["A.", "Oui."]),
        of(&["Hello.", "Yes."]),
    ]
}

#[test]
fn gemma_checkpoints() {
    check(gemma(), &fixture("gemma4-dense/checkpoint/chat_template.jinja"), plain("<turn|>"));
}

#[test]
fn qwen_checkpoints() {
    check(qwen(), &data("turn-end/qwen.jinja"), plain("<|im_end|>"));
}

#[test]
fn thoughts_after_the_last_question() {
    let of = |texts: &[&str]| learned("<|im_end|>", texts);
    let expected = [
        of(&["Blue.", "<think>\n\n</think>\n\nYes."]),
        of(&["<think>\n\n</think>\n\nBlue."]),
        Outcome::Raised("line 7: undefined has no method named split"),
        of(&["<think>\n\n</think>\n\nWait.", "<think>\n\n</think>\n\nHigh, low."]),
        of(&["", "<think>\n\n</think>\n\nYes."]),
        Outcome::Refused(LOST),
        of(&["<think>\n\n</think>\n\nOne.", "<think>\n\n</think>\n\nTwo."]),
        of(&["One.", "<think>\n\n</think>\n\nTwo."]),
        of(&["A."]),
        Outcome::Raised("has no method named split"),
        of(&["<think>\n\n</think>\n\n  Où ? 🌊 \n"]),
        of(&["A.", "<think>\n\n</think>\n\nA."]),
        of(&["A.", "<think>\n\n</think>\n\nOui."]),
        of(&["Hello.", "<think>\n\n</think>\n\nYes."]),
    ];
    check(qwen(), &data("thinking-by-position/chat_template.jinja"), expected);
}

#[test]
fn calls_behind_the_text() {
    let of = |texts: &[&str]| learned("<|im_end|>", texts);
    let expected = [
        of(&["Blue.", "Yes."]),
        of(&["Blue."]),
        of(&["[tide port=\"Brest\"]", "High."]),
        of(&["Wait.[tide port=\"Brest\"][tide port=\"Dover\"]", "High, low."]),
        of(&["", "Yes."]),
        Outcome::Refused(LOST),
        of(&["One.", "Two."]),
        of(&["One.", "Two."]),
        of(&["A."]),
        // The template writes whatever it is given.
        of(&[PARTS]),
        of(&[BLANKS]),
        of(&["A.", "A."]),
        of(&["A.", "Oui."]),
        of(&["Hello.", "Yes."]),
    ];
    check(qwen(), &data("null-content/chat_template.jinja"), expected);
}

#[test]
fn answers_of_tools_inside_of_a_turn() {
    let of = |texts: &[&str]| learned("<turn|>", texts);
    let pieces = |texts: &[&str]| Outcome::Learned(texts.iter().map(|&text| text.to_owned()).collect());
    let call = |port: &str| format!("<|tool_call>tide{{\"port\": \"{port}\"}}<tool_call|>");
    let expected = [
        of(&["Blue.", "Yes."]),
        of(&["Blue."]),
        pieces(&[&format!("{}<|tool_response>", call("Brest")), "High.<turn|>"]),
        pieces(&[&format!("Wait.{}{}<|tool_response>", call("Brest"), call("Dover")), "High, low.<turn|>"]),
        of(&["", "Yes."]),
        of(&["Yes?", "Wide."]),
        of(&["One.", "Two."]),
        of(&["One.", "<|channel>thought\nha<channel|>Two."]),
        of(&["A."]),
        of(&["AB"]),
        of(&[TRIMMED]),
        of(&["A.", "A."]),
        of(&["A.", "Oui."]),
        of(&["Hello.", "Yes."]),
    ];
    check(gemma(), &data("chat-templates/gemma-tools.jinja"), expected);
}

#[test]
fn answers_of_tools_as_questions() {
    let of = |texts: &[&str]| learned("<|im_end|>", texts);
    let thought = |text: &str| format!("<think>\n\n</think>\n\n{text}");
    let call = |port: &str| format!("<tool_call>\ntide\nport={port}\n</tool_call>");
    let expected = [
        of(&["Blue.", &thought("Yes.")]),
        of(&[&thought("Blue.")]),
        of(&[&thought(&call("Brest")), &thought("High.")]),
        of(&[&thought(&format!("Wait.\n{}\n{}", call("Brest"), call("Dover"))), &thought("High, low.")]),
        of(&["", &thought("Yes.")]),
        of(&["Yes?", &thought("Wide.")]),
        of(&[&thought("One."), &thought("Two.")]),
        of(&["One.", "<think>\nha\n</think>\n\nTwo."]),
        of(&["A."]),
        of(&[&thought("A  B")]),
        of(&[&thought(TRIMMED)]),
        of(&["A.", &thought("A.")]),
        Outcome::Raised("System message must be at the beginning."),
        of(&["Hello.", &thought("Yes.")]),
    ];
    check(qwen(), &data("chat-templates/qwen-tools.jinja"), expected);
}

#[test]
fn templates_that_refuse() {
    let of = |texts: &[&str]| learned("<turn|>", texts);
    let alternate = || Outcome::Raised("Conversation roles must alternate user/assistant/user/assistant/...");
    let text = || Outcome::Raised("Only text content is supported");
    let expected = [
        of(&["Blue.", "Yes."]),
        Outcome::Raised("System role not supported"),
        text(),
        alternate(),
        Outcome::Raised("Empty turn of assistant"),
        text(),
        alternate(),
        of(&["One.", "Two."]),
        of(&["A."]),
        text(),
        of(&[TRIMMED]),
        of(&["A.", "A."]),
        Outcome::Raised("System role not supported"),
        alternate(),
    ];
    check(gemma(), &data("chat-templates/strict.jinja"), expected);
}

#[test]
fn generation_blocks_with_the_end_inside() {
    let of = |texts: &[&str]| learned("<turn|>", texts);
    let expected = [
        of(&["Blue.", "Yes."]),
        of(&["Blue."]),
        of(&["<|tool_call>tide<tool_call|>", "High."]),
        of(&["Wait.<|tool_call>tide<tool_call|><|tool_call>tide<tool_call|>", "High, low."]),
        of(&["", "Yes."]),
        of(&["Yes?", "Wide."]),
        of(&["One.", "Two."]),
        of(&["<|channel>thought\nhm<channel|>One.", "<|channel>thought\nha<channel|>Two."]),
        of(&["A."]),
        of(&["A  B"]),
        of(&[BLANKS]),
        of(&["A.", "A."]),
        of(&["A.", "Oui."]),
        of(&["Hello.", "Yes."]),
    ];
    check(gemma(), &data("chat-templates/generation-inside.jinja"), expected);
}

#[test]
fn generation_blocks_with_the_end_behind() {
    let of = |texts: &[&str]| learned("<|im_end|>", texts);
    let expected = [
        of(&["Blue.", "Yes."]),
        of(&["Blue."]),
        of(&["", "High."]),
        of(&["Wait.", "High, low."]),
        of(&["", "Yes."]),
        Outcome::Refused(LOST),
        of(&["One.", "Two."]),
        of(&["One.", "Two."]),
        of(&["A."]),
        of(&[PARTS]),
        of(&[BLANKS]),
        of(&["A.", "A."]),
        of(&["A.", "Oui."]),
        of(&["Hello.", "Yes."]),
    ];
    check(qwen(), &data("chat-templates/generation-behind.jinja"), expected);
}
