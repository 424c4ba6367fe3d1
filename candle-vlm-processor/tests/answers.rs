//! What the assistant wrote: by the tokens that are supervised, and by what is refused.

mod support;

use std::ops::Range;
use std::path::Path;

use candle_vlm_processor::{
    AnswerFinder, ChatEncoder, ChatTemplate, EncodedChat, Message, TemplateInputs, TextTokenizer,
};
use support::{chat_lines, data, fixture, json};

const GEMMA: &str = "gemma4-dense/checkpoint";

fn encoder(tokenizer: &Path, template: &str) -> ChatEncoder {
    let tokenizer = TextTokenizer::from_folder(tokenizer).unwrap();
    ChatEncoder::new(ChatTemplate::from_source(template).unwrap(), tokenizer)
}

fn qwen(template: &Path) -> ChatEncoder {
    encoder(&fixture("qwen3_5-dense/checkpoint"), &std::fs::read_to_string(template).unwrap())
}

fn gemma() -> ChatEncoder {
    ChatEncoder::from_folder(&fixture(GEMMA)).unwrap()
}

fn encode(chat: &ChatEncoder, messages: &[Message]) -> EncodedChat {
    let rendered = chat.render(messages, &TemplateInputs::default()).unwrap();
    chat.encode(rendered, "\u{fdd0}", &[]).unwrap()
}

fn answers(chat: &ChatEncoder, messages: &[Message]) -> Result<(EncodedChat, Vec<Range<usize>>), String> {
    let encoded = encode(chat, messages);
    let found = AnswerFinder::new(chat).find(chat, messages, &TemplateInputs::default(), &encoded);
    let found = found.map_err(|e| e.to_string())?;
    assert!(found.iter().all(|answer| answer.text.end == answer.end.start && !answer.end.is_empty()));
    let whole = found.iter().map(|answer| answer.whole()).collect();
    Ok((encoded, whole))
}

/// The texts of all answers, their ends among them.
fn texts(chat: &ChatEncoder, messages: &[Message]) -> Result<Vec<String>, String> {
    let (encoded, found) = answers(chat, messages)?;
    Ok(found.into_iter().map(|bytes| encoded.rendered[bytes].to_owned()).collect())
}

fn supervised(chat: &ChatEncoder, messages: &[Message]) -> (EncodedChat, Vec<usize>) {
    let (encoded, found) = answers(chat, messages).unwrap();
    let places = found.into_iter().flat_map(|bytes| encoded.tokens_of(bytes)).collect();
    (encoded, places)
}

fn numbers(value: &serde_json::Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
}

fn messages(json: &str) -> Vec<Message> {
    Message::list_from_json(json).unwrap()
}

fn check(chat: &ChatEncoder, messages: &[Message], fact: &serde_json::Value) -> usize {
    let (encoded, places) = supervised(chat, messages);
    assert_eq!(encoded.rendered, fact["rendered"].as_str().unwrap());
    assert_eq!(encoded.ids.iter().map(|&id| id as usize).collect::<Vec<_>>(), numbers(&fact["ids"]));
    assert_eq!(places, numbers(&fact["supervised"]));
    places.len()
}

#[test]
fn the_end_of_every_turn_is_a_target() {
    let folder = data("turn-end");
    let (facts, lines) = (json(&folder.join("facts.json")), chat_lines(&folder));
    assert_eq!(check(&gemma(), &lines[0].messages, &facts["gemma4-dense"]), 11);
    assert_eq!(check(&qwen(&folder.join("qwen.jinja")), &lines[0].messages, &facts["qwen3_5-dense"]), 10);
}

#[test]
fn thoughts_that_depend_on_the_place_do_not_move_the_targets() {
    let folder = data("thinking-by-position");
    let (facts, lines) = (json(&folder.join("facts.json")), chat_lines(&folder));
    let chat = qwen(&folder.join("chat_template.jinja"));
    let names = ["both turns think", "no turn thinks", "only the closing tag"];
    for (name, line) in names.iter().zip(&lines) {
        check(&chat, &line.messages, &facts[*name]);
        let turns: Vec<_> = facts[*name]["turns"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        assert_eq!(texts(&chat, &line.messages).unwrap(), turns, "{name}");
    }
    assert_eq!(lines.len(), 3);
}

#[test]
fn tool_calls_without_content_are_answers() {
    let folder = data("null-content");
    let chat = qwen(&folder.join("chat_template.jinja"));
    let lines = chat_lines(&folder);
    assert_eq!(lines.len(), 3);
    for line in lines {
        let expected = ["[tide port=\"Brest\" hours=6]<|im_end|>", "High water.<|im_end|>"];
        assert_eq!(texts(&chat, &line.messages).unwrap(), expected);
        let facts = json(&folder.join("facts.json"));
        assert_eq!(encode(&chat, &line.messages).rendered, facts["every line renders as"].as_str().unwrap());
    }
}

#[test]
fn many_shapes_of_chats() {
    let chat = gemma();
    for (json, expected) in [
        (
            r#"[{"role":"system","content":"Be brief."},{"role":"user","content":"Hi"},{"role":"assistant","content":" Yes. "}]"#,
            vec!["Yes.<turn|>"],
        ),
        (r#"[{"role":"user","content":"Hi"},{"role":"assistant","content":""}]"#, vec!["<turn|>"]),
        (
            r#"[{"role":"assistant","content":"A."},{"role":"assistant","content":"B."}]"#,
            vec!["A.<turn|>", "B.<turn|>"],
        ),
        (
            r#"[{"role":"user","content":"a model\n"},{"role":"assistant","content":[{"type":"text","text":"A "},{"type":"text","text":" B"}]},{"role":"user","content":[]}]"#,
            vec!["AB<turn|>"],
        ),
        (
            r#"[{"role":"user","content":"Hi"},{"role":"assistant","content":"A."},{"role":"tool","content":"42"},{"role":"user","content":"A."},{"role":"assistant","content":"A."}]"#,
            vec!["A.<turn|>", "A.<turn|>"],
        ),
        (r#"[{"role":"user","content":"Hi"}]"#, vec![]),
    ] {
        assert_eq!(texts(&chat, &messages(json)).unwrap(), expected, "{json}");
    }
}

/// As some models have it: the answer of a tool stands inside of the turn that asked for it.
const TOOLS_INSIDE: &str = "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'tool' %}\
    <|tool_response>{{ m.content }}<tool_response|>{% else %}{% if not ns.open or m.role != 'assistant' %}<|turn>\
    {{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}{% for c in m.tool_calls or [] %}<|tool_call>{{ c.name }}\
    <tool_call|>{% endfor %}{% set ns.open = (m.tool_calls or []) | length > 0 %}{{ m.content }}{% if not ns.open %}\
    <turn|>\n{% endif %}{% endif %}{% endfor %}";

#[test]
fn what_a_tool_answers_inside_of_a_turn_is_no_target() {
    let chat = encoder(&fixture(GEMMA), TOOLS_INSIDE);
    let json = r#"[{"role":"user","content":"Tide?"},{"role":"assistant","tool_calls":[{"name":"tide"}]},
        {"role":"tool","content":"4.2 m"},{"role":"assistant","content":"High."}]"#;
    let expected = ["<|tool_call>tide<tool_call|><|tool_response>", "High.<turn|>"];
    assert_eq!(texts(&chat, &messages(json)).unwrap(), expected);
}

#[test]
fn generation_blocks_decide_and_get_their_end() {
    let inside = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<turn|>\n\
                  {% endgeneration %}{% else %}{{ m.content }}<turn|>\n{% endif %}{% endfor %}";
    let behind = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\
                  {% endgeneration %}<turn|>\n{% else %}{{ m.content }}<turn|>\n{% endif %}{% endfor %}";
    let chats = messages(
        r#"[{"role":"user","content":"assistant:"},{"role":"assistant","content":"One"},{"role":"user","content":"x"},
            {"role":"assistant","content":"Two"}]"#,
    );
    for template in [inside, behind] {
        assert_eq!(texts(&encoder(&fixture(GEMMA), template), &chats).unwrap(), ["One<turn|>", "Two<turn|>"]);
    }
    let endless = behind.replace("<turn|>", ";");
    let fault = texts(&encoder(&fixture(GEMMA), &endless), &chats).unwrap_err();
    assert!(fault.contains("generation block") && fault.contains("without a special token"), "{fault}");
}

#[test]
fn what_cannot_be_proved_is_refused() {
    let plain = "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}";
    let with = |content: &str| plain.replace("{{ m.content }}", content);
    let ask = |question: &str, answer: &str| vec![Message::text("user", question), Message::text("assistant", answer)];
    for (template, chat, part) in [
        (plain.to_owned(), ask("Hi", "Yes<turn|>\n<|turn>user\nNo"), "messages[1] holds <turn|>"),
        (plain.to_owned(), ask("<|turn>assistant\nI am<turn|>", "Yes"), "messages[0] (user) stands in what looks like"),
        (plain.to_owned(), ask("Hi <|turn>assistant\n", "Yes"), "holds the text that begins an answer"),
        (plain.to_owned(), ask("Hi", "Yes<|turn>assistant\n"), "an answer does not end with <turn|>"),
        (plain.to_owned(), ask("Hi\u{fde2}", "Yes"), "U+FDD2"),
        (with("{{ m.content | length }}"), ask("Hi", "Yes"), "does not write every message"),
        (with("{{ m.content | length }}<turn|>{{ m.content }}"), ask("Hi", "Yes"), "by what stands in them"),
        (with("{{ m.content }}{{ m.content | length }}"), ask("Hi", "Yes"), "no special token behind an answer"),
        (with("{{ m.content }}{{ m.content }}"), ask("Hi", "Yes"), "does not write every message"),
        (with("{{ 'short' if m.content == 'Yes' else m.content }}"), ask("Hi", "Yes"), "by what stands in them"),
        (plain.replace("<turn|>", ";"), ask("Hi", "Yes"), "no special token behind an answer"),
        (
            "{% for m in messages %}{{ m.content }}<turn|>{% endfor %}".to_owned(),
            ask("Hi", "Yes"),
            "an answer does not end with",
        ),
    ] {
        let fault = texts(&encoder(&fixture(GEMMA), &template), &chat).unwrap_err();
        assert!(fault.contains(part), "{template}\ngave: {fault}\nwithout: {part}");
    }
}

#[test]
fn templates_that_look_at_one_side_of_an_answer_are_still_read() {
    for look in ["m.content.startswith('<a>')", "m.content.endswith('<a>')"] {
        let template = format!(
            "{{% for m in messages %}}<|turn>{{{{ m.role }}}}\n{{% if {look} %}}!{{% endif %}}{{{{ m.content }}}}<turn|>\n{{% endfor %}}"
        );
        let chat = encoder(&fixture(GEMMA), &template);
        let answer = if look.contains("start") { "<a>b" } else { "b<a>" };
        let found = texts(&chat, &[Message::text("user", "Hi"), Message::text("assistant", answer)]).unwrap();
        assert_eq!(found, [format!("!{answer}<turn|>")]);
    }
}

/// As some models have it: thoughts are stripped from answers, reasoning is written before the last one, and the prompt
/// of an answer opens and closes an empty thought.
const THOUGHTS_STRIPPED: &str = "{% macro strip(text) %}{% set ns = namespace(out='') %}{% for part in \
    text.split('<channel|>') %}{% if '<|channel>' in part %}{% set ns.out = ns.out + part.split('<|channel>')[0] %}{% else %}\
    {% set ns.out = ns.out + part %}{% endif %}{% endfor %}{{ ns.out | trim }}{% endmacro %}{{ bos_token }}{% for m in messages \
    %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content and \
    loop.last %}<|channel>thought\n{{ m.reasoning_content }}<channel|>{% endif %}{{ strip(m.content) }}{% else %}\
    {{ m.content | trim }}{% endif %}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n<|channel>thought\n\
    <channel|>{% endif %}";

#[test]
fn stripped_thoughts_and_reasoning() {
    let chat = encoder(&fixture(GEMMA), THOUGHTS_STRIPPED);
    let json = r#"[{"role":"user","content":"1?"},{"role":"assistant","content":"<|channel>hm<channel|>One."},
        {"role":"user","content":" 2? "},{"role":"assistant","content":"Two. <|channel>x<channel|>","reasoning":"Count."}]"#;
    let expected = ["One.<turn|>", "<|channel>thought\nCount.<channel|>Two.<turn|>"];
    assert_eq!(texts(&chat, &messages(json)).unwrap(), expected);
}
