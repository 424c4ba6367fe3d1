//! Chat templates against transformers' renderings.

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use candle_vlm_processor::{ChatTemplate, Error, Message, Rendered, Result, TemplateInputs, TemplateValue};
use support::{chat_lines, data, json};

fn render(source: &str, messages: &[Message], inputs: &TemplateInputs) -> Result<Rendered> {
    let tokens = [("bos_token", "<bos>"), ("eos_token", "<eos>")];
    let tokens: BTreeMap<_, _> = tokens.map(|(name, token)| (name.to_owned(), token.to_owned())).into();
    ChatTemplate::from_source(source)?.render(messages, inputs, &tokens)
}

#[derive(serde::Deserialize)]
struct Cases {
    messages: Vec<Message>,
    tools: TemplateValue,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    template: String,
    text: Option<String>,
    #[serde(default)]
    generated: Vec<[usize; 2]>,
    error: Option<String>,
}

#[test]
fn every_feature_renders_as_in_transformers() {
    let text = std::fs::read_to_string(data("templates.json")).unwrap();
    let Cases { messages, tools, cases } = serde_json::from_str(&text).unwrap();
    assert!(cases.len() > 20);
    let mut faults = Vec::new();
    for case in cases {
        let inputs = TemplateInputs {
            tools: (case.name == "tools").then(|| tools.clone()),
            add_generation_prompt: case.name == "tokens",
            variables: BTreeMap::from([("enable_thinking".to_owned(), TemplateValue::from(true))]),
            ..TemplateInputs::default()
        };
        match (render(&case.template, &messages, &inputs), &case.error) {
            (Ok(rendered), None) => {
                let generated: Vec<_> = rendered.generated.iter().map(|r| [r.start, r.end]).collect();
                if Some(&rendered.text) != case.text.as_ref() || generated != case.generated {
                    let wrong = (&rendered.text, generated);
                    faults.push(format!("{}: {wrong:?}\n  not {:?} {:?}", case.name, case.text, case.generated));
                }
            }
            (Err(fault), Some(error)) if fault.to_string().contains(error.as_str()) => {}
            (result, _) => faults.push(format!("{}: {result:?}\n  not {:?} {:?}", case.name, case.text, case.error)),
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn null_content_is_absent() {
    let folder = data("null-content");
    let source = std::fs::read_to_string(folder.join("chat_template.jinja")).unwrap();
    let facts = json(&folder.join("facts.json"));
    let lines = chat_lines(&folder);
    assert_eq!(lines.len(), 3);
    for line in lines {
        let rendered = render(&source, &line.messages, &TemplateInputs::default()).unwrap();
        assert_eq!(rendered.text, facts["every line renders as"].as_str().unwrap());
    }
}

#[test]
fn features_that_broke_other_programs() {
    let folder = data("template-features");
    let text = std::fs::read_to_string(folder.join("messages.json")).unwrap();
    let support::Line { messages } = serde_json::from_str(&text).unwrap();
    let facts = json(&folder.join("facts.json"));
    assert_eq!(facts.as_object().unwrap().len(), 9);
    for (name, expected) in facts.as_object().unwrap() {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let rendered = render(&source, &messages, &TemplateInputs::default()).unwrap();
        assert_eq!(rendered.text, expected.as_str().unwrap(), "{name}");
        if name == "generation" {
            let generated: Vec<_> = rendered.generated.iter().map(|range| &rendered.text[range.clone()]).collect();
            assert_eq!(generated, ["tall and slow"]);
        }
    }
}

#[test]
fn faults_of_a_template_are_told_with_their_line() {
    let messages = [Message::text("user", "Hi")];
    let fault = |source: &str| render(source, &messages, &TemplateInputs::default()).unwrap_err().to_string();
    let message = fault("{{ messages[0].role }}\n{{ raise_exception('no system turn here') }}");
    assert_eq!(message, "chat template default: line 2: no system turn here");
    let message = fault("\n\n{% for m in %}");
    assert!(message.starts_with("chat template default: line 3: "), "{message}");
    let message = fault("{{ messages[0].a.b }}");
    assert!(message.contains("line 1"), "{message}");
}

#[test]
fn the_clock_can_be_set() {
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_709_210_096); // 2024-02-29 12:34:56, a Thursday
    let inputs = TemplateInputs { now: Some(now), ..TemplateInputs::default() };
    let date = |format: &str| render(&format!("{{{{ strftime_now('{format}') }}}}"), &[], &inputs);
    let text = date("%Y-%m-%d %d %b %B %y %H:%M:%S %I %p %A %a %j %w %-m %% %F %T").unwrap().text;
    let expected = "2024-02-29 29 Feb February 24 12:34:56 12 PM Thursday Thu 060 4 2 % 2024-02-29 12:34:56";
    assert_eq!(text, expected);
    assert!(date("%Q").unwrap_err().to_string().contains("%Q"));
}

#[test]
fn templates_are_found_where_checkpoints_keep_them() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let text = |name: Option<&str>| {
        let inputs = TemplateInputs { template: name.map(str::to_owned), ..TemplateInputs::default() };
        let templates = ChatTemplate::from_folder(folder.path())?;
        templates.render(&[], &inputs, &BTreeMap::new()).map(|rendered| rendered.text)
    };
    let none = text(None).unwrap_err();
    assert!(matches!(none, Error::MissingFile { .. }), "{none}");
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]}"#,
    );
    assert_eq!(text(None).unwrap(), "listed");
    assert_eq!(text(Some("tool_use")).unwrap(), "tools");
    let absent = text(Some("rag")).unwrap_err().to_string();
    assert_eq!(absent, "chat template rag: there is no template of this name; there are: default, tool_use");
    write("tokenizer_config.json", r#"{"chat_template": "single"}"#);
    assert_eq!(text(None).unwrap(), "single");
    write("tokenizer_config.json", r#"{"chat_template": 3}"#);
    assert!(matches!(text(None), Err(Error::Setting { .. })));
    write("chat_template.jinja", "file");
    std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/rag.jinja", "more");
    assert_eq!(text(None).unwrap(), "file");
    assert_eq!(text(Some("rag")).unwrap(), "more");
    write("chat_template.json", r#"{"chat_template": "old"}"#);
    assert_eq!(text(None).unwrap(), "old");
}

#[test]
fn places_that_cannot_be_found_are_an_error() {
    let messages = [Message::text("assistant", "one two")];
    let hidden = "{% set x %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}{{ x[4:] }}";
    let fault = render(hidden, &messages, &TemplateInputs::default()).unwrap_err().to_string();
    assert!(fault.contains("cannot be found"), "{fault}");
    let messages = [Message::text("assistant", "one\u{fdd1}two")];
    let plain = "{% generation %}{{ messages[0].content }}{% endgeneration %}";
    assert!(render(plain, &messages, &TemplateInputs::default()).is_err());
}
