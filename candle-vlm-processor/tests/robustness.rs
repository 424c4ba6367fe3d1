//! Whatever a checkpoint folder or a chat holds: a result or a typed error, never a panic, never a hang.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_vlm_processor::{
    AnswerFinder, ChatEncoder, ChatTemplate, Error, Gemma4ImageSettings, Gemma4Processor, ImageSettings, Message,
    Picture, PictureFault, Qwen3_5ImageSettings, Qwen3_5Processor, TemplateInputs, TextTokenizer,
};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, RngSeed};
use support::{data, fixture};

/// Fixed seed, nothing written to disk.
fn config(cases: u32) -> Config {
    Config {
        cases,
        rng_seed: RngSeed::Fixed(20_250_714),
        failure_persistence: None,
        max_shrink_time: 20_000,
        ..Config::default()
    }
}

/// One change of a file's bytes.
#[derive(Clone, Debug)]
enum Change {
    Remove(Index, usize),
    Insert(Index, Vec<u8>),
    Repeat(Index, usize),
    Replace(Index, usize, Vec<u8>),
}

/// What JSON and templates are made of, and numbers that do not fit.
const PIECES: [&str; 40] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "-1e-999",
    "0.5",
    "18446744073709551616",
    "9223372036854775807",
    "\\u0000",
    "\\ud800",
    "\\",
    "\u{fdd0}",
    "\u{fdd2}",
    "\u{fde2}",
    "\u{2028}",
    "\u{feff}",
    "é",
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "-",
    "endfor",
    "endif",
    "raise_exception('no')",
    "{% generation %}",
    "{% endgeneration %}",
    "<|turn>",
    "<turn|>",
    "<|image|>",
];

fn piece() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![select(&PIECES[..]).prop_map(|text| text.as_bytes().to_vec()), any::<[u8; 1]>().prop_map(Vec::from)]
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        (any::<Index>(), 1usize..40).prop_map(|(at, n)| Change::Remove(at, n)),
        (any::<Index>(), piece()).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        (any::<Index>(), 1usize..40).prop_map(|(at, n)| Change::Repeat(at, n)),
        (any::<Index>(), 1usize..8, piece()).prop_map(|(at, n, bytes)| Change::Replace(at, n, bytes)),
    ];
    prop::collection::vec(change, 1..5)
}

fn changed(bytes: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for change in changes {
        let (Change::Remove(at, _) | Change::Insert(at, _) | Change::Repeat(at, _) | Change::Replace(at, ..)) = change;
        let at = at.index(bytes.len() + 1);
        let end = |n: usize| (at + n).min(bytes.len());
        match change {
            Change::Remove(_, n) => drop(bytes.drain(at..end(*n))),
            Change::Insert(_, new) => drop(bytes.splice(at..at, new.iter().copied())),
            Change::Repeat(_, n) => {
                let again = bytes[at..end(*n)].to_vec();
                bytes.splice(at..at, again);
            }
            Change::Replace(_, n, new) => drop(bytes.splice(at..end(*n), new.iter().copied())),
        }
    }
    bytes
}

/// The templates of these tests and of the fixtures, with the tokenizer that belongs to each.
fn templates() -> Vec<(PathBuf, PathBuf)> {
    let (gemma, qwen) = (fixture("gemma4-dense/checkpoint"), fixture("qwen3_5-dense/checkpoint"));
    let ours = |name: &str| data("chat-templates").join(name);
    vec![
        (gemma.join("chat_template.jinja"), gemma.clone()),
        (data("turn-end/qwen.jinja"), qwen.clone()),
        (data("thinking-by-position/chat_template.jinja"), qwen.clone()),
        (data("null-content/chat_template.jinja"), qwen.clone()),
        (ours("gemma-tools.jinja"), gemma.clone()),
        (ours("qwen-tools.jinja"), qwen.clone()),
        (ours("strict.jinja"), gemma.clone()),
        (ours("generation-inside.jinja"), gemma),
        (ours("generation-behind.jinja"), qwen),
    ]
}

fn encoders() -> Vec<ChatEncoder> {
    let encoder = |(template, tokenizer): (PathBuf, PathBuf)| {
        let template = ChatTemplate::from_source(&fs::read_to_string(template).unwrap()).unwrap();
        ChatEncoder::new(template, TextTokenizer::from_folder(&tokenizer).unwrap())
    };
    templates().into_iter().map(encoder).collect()
}

/// All of the way of a chat; the answers must lie in the text, in order, each with its end.
fn encode(chat: &ChatEncoder, messages: &[Message]) -> Result<(), Error> {
    let inputs = TemplateInputs::default();
    let encoded = chat.encode(chat.render(messages, &inputs)?, "\u{fdd0}", &[])?;
    let answers = AnswerFinder::new(chat).find(chat, messages, &inputs, &encoded)?;
    let mut last = 0;
    for answer in answers {
        assert!(last <= answer.text.start && answer.text.end == answer.end.start && !answer.end.is_empty());
        assert!(!encoded.rendered[answer.text.clone()].is_empty() || answer.text.is_empty());
        assert!(!encoded.tokens_of(answer.end.clone()).is_empty());
        last = answer.end.end;
    }
    Ok(())
}

/// A JSON value that a message may have somewhere.
fn value() -> impl Strategy<Value = serde_json::Value> {
    let text = prop_oneof![select(&PIECES[..]).prop_map(str::to_owned), "\\PC{0,8}", Just("assistant".to_owned())];
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(serde_json::Value::from),
        any::<i64>().prop_map(serde_json::Value::from),
        any::<f64>().prop_map(serde_json::Value::from),
        text.prop_map(serde_json::Value::from),
    ];
    let key = select(&["type", "text", "image", "function", "name", "arguments", "content", "x"][..]);
    leaf.prop_recursive(4, 16, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(serde_json::Value::from),
            prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner, 0..4)
                .prop_map(serde_json::Value::from_iter),
        ]
    })
}

/// A list of messages that is mostly right.
fn messages() -> impl Strategy<Value = Vec<serde_json::Value>> {
    let text = prop_oneof![
        4 => select(&["", " ", "Hi", " Yes. \n", "<think>\na\n</think>\nb", "é🌊"][..]).prop_map(str::to_owned),
        1 => select(&PIECES[..]).prop_map(str::to_owned),
        1 => "\\PC{0,12}",
    ];
    let part = text.clone().prop_map(|text| serde_json::json!({"type": "text", "text": text}));
    let content = prop_oneof![
        5 => text.clone().prop_map(serde_json::Value::from),
        1 => prop::collection::vec(part, 0..3).prop_map(serde_json::Value::from),
        1 => value(),
    ];
    let role = prop_oneof![
        4 => select(&["user", "assistant", "system", "tool"][..]).prop_map(str::to_owned),
        1 => "\\PC{0,4}",
    ];
    let more = prop::collection::btree_map(
        select(&["tool_calls", "reasoning_content", "reasoning", "name"][..]).prop_map(str::to_owned),
        value(),
        0..2,
    );
    let message = (role, content, more).prop_map(|(role, content, more)| {
        let mut message = serde_json::Map::from_iter(more);
        message.insert("role".into(), role.into());
        message.insert("content".into(), content);
        serde_json::Value::from(message)
    });
    prop::collection::vec(message, 0..6)
}

#[test]
fn any_chat_through_every_template() {
    let encoders = encoders();
    let mut runner = proptest::test_runner::TestRunner::new(config(300));
    let mut good = 0;
    let ran = runner.run(&messages(), |messages| {
        let text = serde_json::to_string(&messages).unwrap();
        let Ok(messages) = Message::list_from_json(&text) else { return Ok(()) };
        for chat in &encoders {
            if let Err(error) = encode(chat, &messages) {
                prop_assert!(!error.to_string().is_empty());
            }
        }
        Ok(())
    });
    ran.unwrap();
    for chat in &encoders {
        let messages = [Message::text("user", "Hi"), Message::text("assistant", "Yes.")];
        good += usize::from(encode(chat, &messages).is_ok());
    }
    assert_eq!(good, encoders.len());
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn any_text_as_messages(text in prop_oneof!["\\PC{0,60}", prop::collection::vec(select(&PIECES[..]), 0..24).prop_map(|p| p.concat())]) {
        let _ = Message::list_from_json(&text);
    }

    #[test]
    fn damaged_templates(which in any::<Index>(), changes in changes()) {
        let all = templates();
        let (template, _) = &all[which.index(all.len())];
        let source = String::from_utf8_lossy(&changed(&fs::read(template).unwrap(), &changes)).into_owned();
        render(&source)?;
    }

    #[test]
    fn templates_of_pieces(pieces in prop::collection::vec(template_piece(), 0..16)) {
        render(&pieces.concat())?;
    }
}

fn template_piece() -> impl Strategy<Value = String> {
    let words = [
        "{{ ",
        " }}",
        "{% ",
        " %}",
        "{%- ",
        " -%}",
        "if ",
        "else",
        "elif ",
        "endif",
        "for ",
        " in ",
        "endfor",
        "set ",
        " = ",
        "messages",
        "m",
        ".content",
        "['role']",
        "[0]",
        "[-1]",
        "[1:]",
        "[::-1]",
        "[::0]",
        " | ",
        "tojson",
        "trim",
        "length",
        "list",
        "join",
        "tojson(indent=99999999999)",
        "(",
        ")",
        "1",
        " + ",
        " - ",
        " * ",
        " / ",
        " // ",
        " % ",
        " ** ",
        "0",
        "9223372036854775807",
        "170141183460469231731687303715884105727",
        "1e308",
        "'a'",
        "'é'",
        ".split('a')",
        ".rsplit('a', 18446744073709551615)",
        ".strip()",
        ".title()",
        ".index('')",
        ".partition('')",
        " is ",
        "defined",
        "string",
        "none",
        "true",
        "range(3)",
        "namespace(a=1)",
        "{% macro f(a) %}",
        "{% endmacro %}",
        "f(1)",
        "{% generation %}",
        "{% endgeneration %}",
        "{% raw %}",
        "{% endraw %}",
        "{#",
        "#}",
        "raise_exception('x')",
        "strftime_now('%Y')",
        "strftime_now('%')",
        "{",
        "}",
        "\n",
        " ",
        " and ",
        " or ",
        " not ",
        " ~ ",
        " < ",
        " == ",
        "loop",
        ".previtem",
        ".items()",
        "dictsort",
        "format",
        "'%s'",
        "indent(3)",
        "replace('', 'x')",
        "round",
        "int",
        "float",
        "abs",
        "slice(0)",
        "batch(0)",
        "batch(2)",
    ];
    prop_oneof![
        8 => select(words.map(str::to_owned).to_vec()),
        2 => select(vec!["{{ messages[0].content }}".to_owned(), "{% for m in messages %}{{ m.role }}{% endfor %}".to_owned()]),
        1 => "\\PC{0,6}",
    ]
}

/// Compiles and renders; both may fail, with the reason.
fn render(source: &str) -> Result<(), TestCaseError> {
    let messages = [Message::text("user", "Hi é"), Message::text("assistant", "Yes.")];
    let rendered = ChatTemplate::from_source(source)
        .and_then(|template| template.render(&messages, &TemplateInputs::default(), &BTreeMap::new()));
    match rendered {
        Ok(rendered) => {
            for range in rendered.generated {
                prop_assert!(rendered.text.get(range).is_some());
            }
            Ok(())
        }
        Err(error @ Error::Template { .. }) => {
            prop_assert!(!error.to_string().is_empty());
            Ok(())
        }
        Err(other) => Err(TestCaseError::fail(format!("another error: {other}"))),
    }
}

/// Templates that ask for more than they should get.
#[test]
fn templates_without_end_or_bounds_are_refused() {
    let deep = |open: &str, inner: &str, close: &str, n: usize| format!("{}{inner}{}", open.repeat(n), close.repeat(n));
    for source in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(),
        format!("{{{{ {} }}}}", deep("(", "1", ")", 100_000)),
        format!("{{{{ {} }}}}", deep("[", "1", "]", 100_000)),
        format!("{{{{ {}1 }}}}", "not ".repeat(100_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(100_000)),
        deep("{% if true %}", "x", "{% endif %}", 100_000),
        deep("{% for x in [1] %}", "x", "{% endfor %}", 100_000),
        "{% for x in range(1000000000) %}{% endfor %}".to_owned(),
        "{{ 'a' * 100000000000 }}".to_owned(),
        "{{ 2 ** 100000 }}".to_owned(),
        "{{ 1 // 0 }}".to_owned(),
        "{{ 1 % 0 }}".to_owned(),
        "{{ messages[::0] }}".to_owned(),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".to_owned(),
        "{% set n = namespace(t='ab') %}{% for a in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}".to_owned(),
        "{% raw %}".repeat(100_000),
    ] {
        let messages = [Message::text("user", "Hi")];
        let rendered = ChatTemplate::from_source(&source)
            .and_then(|template| template.render(&messages, &TemplateInputs::default(), &BTreeMap::new()));
        let start: String = source.chars().take(60).collect();
        let error = rendered.expect_err(&start);
        assert!(matches!(error, Error::Template { .. }), "{start}: {error}");
        assert!(error.to_string().len() < 1000, "{start}: a message of {} bytes", error.to_string().len());
    }
}

/// About a million tokens, in many messages or in few.
#[test]
fn long_chats_are_within_bounds() {
    for (count, words) in [(10_000, 80), (2, 400_000)] {
        let text = "a long text ".repeat(words / 2);
        let message = |n: usize| Message::text(["user", "assistant"][n % 2], &text);
        let messages: Vec<_> = (0..count).map(message).collect();
        for chat in encoders() {
            let rendered = chat.render(&messages, &TemplateInputs::default()).unwrap();
            assert!(rendered.text.len() > 4_000_000, "{}", rendered.text.len());
        }
    }
}

/// The engine walks expressions by recursion, so chains are bounded; what is within the bound is rendered.
#[test]
fn long_chains_do_not_overflow_the_stack() {
    let chains: [(&str, &str, &str, &str); 10] = [
        ("{{ x or 1", " + 1", " }}", "operators in one tag"),
        ("{{ x or 'a'", " ~ 'a'", " }}", "operators in one tag"),
        ("{{ x or 'a'", "|trim", " }}", "operators in one tag"),
        ("{{ messages", "[0:]", " }}", "operators in one tag"),
        ("{{ x or true", " and true", " }}", "operators in one tag"),
        ("{{ x or 1", " if y else 2", " }}", "operators in one tag"),
        ("{{ x or 1", " == 1", " }}", "operators in one tag"),
        ("{{ 'a'", ".strip()", " }}", "operators in one tag"),
        ("{% if x %}", "{% elif x %}", "{% endif %}", "`elif` in one template"),
        ("{% if x %}", "{%-\u{c} elif x %}", "{% endif %}", "`elif` in one template"),
    ];
    for (start, link, end, reason) in chains {
        let chain = |n: usize| format!("{start}{}{end}", link.repeat(n));
        render(&chain(400)).unwrap();
        let error = ChatTemplate::from_source(&format!("\n{}", chain(100_000))).unwrap_err().to_string();
        assert!(error.starts_with("chat template default: line 2: ") && error.contains(reason), "{error}");
    }
    // Texts in quotes are no chains, whatever stands in them.
    let text = format!("{{{{ '{}' }}}}", " + 1 and not a.b|c".repeat(10_000));
    ChatTemplate::from_source(&text).unwrap();
}

/// Copies a checkpoint's small files and writes one of them anew.
fn with_file(files: &[&str], name: &str, bytes: &[u8]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in files {
        fs::copy(fixture("gemma4-dense/checkpoint").join(file), dir.path().join(file)).unwrap();
    }
    fs::write(dir.path().join(name), bytes).unwrap();
    dir
}

const FILES: [&str; 4] = ["tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"];

fn load(folder: &Path) -> Result<(), Error> {
    let processor = Gemma4Processor::from_folder(folder)?;
    let messages = [Message::text("user", "Hi"), Message::text("assistant", "Yes.")];
    encode(processor.chat(), &messages)
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn damaged_files_of_a_checkpoint(which in 1usize..4, changes in changes()) {
        let name = FILES[which];
        let bytes = changed(&fs::read(fixture("gemma4-dense/checkpoint").join(name)).unwrap(), &changes);
        let dir = with_file(&FILES, name, &bytes);
        if let Err(error) = load(dir.path()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn settings_of_any_type(field in select(&["patch_size", "pooling_kernel_size", "max_soft_tokens", "rescale_factor",
        "do_normalize", "do_resize", "image_mean", "image_std", "resample", "image_processor_type"][..]), value in value())
    {
        let file = serde_json::json!({"image_processor": {"do_normalize": true, field: value}});
        let dir = with_file(&[], "processor_config.json", file.to_string().as_bytes());
        match Gemma4ImageSettings::from_folder(dir.path()) {
            Ok(_) => {}
            Err(Error::Setting { field: told, .. }) => prop_assert!(told.starts_with("image_processor.")),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
    }
}

/// The same for the other family.
const QWEN_FILES: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "chat_template.jinja"];

const QWEN_FIELDS: [&str; 16] = [
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "min_pixels",
    "max_pixels",
    "size",
    "rescale_factor",
    "do_rescale",
    "do_normalize",
    "do_resize",
    "do_convert_rgb",
    "do_center_crop",
    "image_mean",
    "image_std",
    "resample",
    "image_processor_type",
];

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn damaged_files_of_a_qwen_checkpoint(which in 1usize..4, changes in changes()) {
        let dir = tempfile::tempdir().unwrap();
        for (n, name) in QWEN_FILES.iter().enumerate() {
            let bytes = fs::read(fixture("qwen3_5-dense/checkpoint").join(name)).unwrap();
            let bytes = if n == which { changed(&bytes, &changes) } else { bytes };
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        let messages = [Message::text("user", "Hi"), Message::text("assistant", "Yes.")];
        let loaded = Qwen3_5Processor::from_folder(dir.path()).and_then(|p| encode(p.chat(), &messages));
        if let Err(error) = loaded {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn qwen_settings_of_any_type(
        field in select(&QWEN_FIELDS[..]), value in value(), edge in value(),
        (width, height) in (1usize..300, 1usize..300),
    ) {
        let value = if field == "size" { serde_json::json!({"shortest_edge": 64, "longest_edge": edge}) } else { value };
        let file = serde_json::json!({"image_processor": {"max_pixels": 90_000, field: value}});
        let dir = with_file(&[], "processor_config.json", file.to_string().as_bytes());
        match Qwen3_5ImageSettings::from_folder(dir.path()) {
            Ok(settings) => prop_assert!(settings.resized(height, width).is_ok() || settings.min_pixels > 90_000
                || height.max(width) > 200 * height.min(width)),
            Err(Error::Setting { field: told, .. }) => prop_assert!(told.starts_with("image_processor.")),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
    }

    #[test]
    fn any_size_is_resized_or_refused(
        (height, width) in (side(), side()), (patch_size, merge_size) in (0usize..1100, 0usize..70),
        (min_pixels, max_pixels) in (side(), side()),
    ) {
        let settings = Qwen3_5ImageSettings {
            patch_size, temporal_patch_size: 2, merge_size, min_pixels, max_pixels, rescale_factor: 1.0, normalize: None,
        };
        if settings.check().is_err() {
            let blank = Picture::from_rgb(8, 8, vec![9; 192]).unwrap();
            let _ = (settings.resized(height, width), settings.patches_as_is(&blank)); // no panic, whatever comes
            return Ok(());
        }
        match settings.resized(height, width) {
            Ok((new_height, new_width)) => {
                let side = settings.soft_token_side();
                prop_assert!(new_height > 0 && new_width > 0 && new_height % side == 0 && new_width % side == 0);
                prop_assert!(settings.soft_tokens(height, width).unwrap() == new_height / side * (new_width / side));
                if new_height * new_width < 100_000 && height < 1000 && width < 1000 {
                    let picture = Picture::from_rgb(width, height, vec![9; width * height * 3]).unwrap();
                    prop_assert_eq!(settings.patches(&picture).unwrap().resized, (new_height, new_width));
                }
            }
            Err(PictureFault::Shape { reason, .. }) => prop_assert!(!reason.is_empty()),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
    }
}

/// A number of pixels: small, or anything.
fn side() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0usize..600, 2 => 0usize..100_000, 1 => any::<usize>()]
}

proptest! {
    #![proptest_config(config(40))]

    #[test]
    fn a_damaged_tokenizer(changes in changes()) {
        let bytes = fs::read(fixture("gemma4-dense/checkpoint/tokenizer.json")).unwrap();
        let dir = with_file(&FILES[1..], "tokenizer.json", &changed(&bytes, &changes));
        if let Err(error) = load(dir.path()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn empty_and_deep_files_are_refused_by_name() {
    let deep = "[".repeat(200_000);
    for name in ["tokenizer.json", "tokenizer_config.json", "processor_config.json"] {
        for content in ["", "null", deep.as_str(), "\u{feff}{}", "[]", "7"] {
            let dir = with_file(&FILES, name, content.as_bytes());
            let error = load(dir.path()).expect_err(name).to_string();
            assert!(error.len() < 1000, "{name}: a message of {} bytes", error.len());
        }
        let dir = with_file(&FILES, name, b"\xff\xfe{\0");
        let error = load(dir.path()).expect_err(name).to_string();
        assert!(error.contains(name) && error.contains("UTF-8"), "{error}");
    }
}
