//! A template and a list of messages, apart by a zero byte: a chat and its answers, or an error.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use candle_vlm_processor::{AnswerFinder, ChatEncoder, ChatTemplate, Message, Result, TemplateInputs, TextTokenizer};
use libfuzzer_sys::fuzz_target;

static TOKENIZER: LazyLock<String> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint");
    std::fs::read_to_string(folder.join("tokenizer.json")).expect("the fixture is sound")
});

fuzz_target!(|text: &str| {
    let (template, messages) = text.split_once('\0').unwrap_or((text, r#"[{"role": "assistant", "content": "A."}]"#));
    let _ = encode(template, messages);
});

fn encode(template: &str, messages: &str) -> Result<()> {
    let messages = Message::list_from_json(messages)?;
    let template = ChatTemplate::from_source(template)?;
    let inputs = TemplateInputs::default();
    let rendered = template.render(&messages, &inputs, &Default::default())?;
    let chat = ChatEncoder::new(template, TextTokenizer::from_json("tokenizer.json", &TOKENIZER)?);
    let encoded = chat.encode(rendered, "<|image|>", &[])?;
    for answer in AnswerFinder::new(&chat).find(&chat, &messages, &inputs, &encoded)? {
        assert!(!encoded.tokens_of(answer.whole()).is_empty());
    }
    Ok(())
}
