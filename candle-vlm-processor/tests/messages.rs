//! Every message says what was given, what is allowed, and what to do about it.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_vlm_processor::{
    AnswerFinder, ChatEncoder, ChatTemplate, Error, Gemma4ImageSettings, Gemma4Processor, ImageSettings, Message,
    PatchLayout, Picture, PictureLimits, PictureSource, Request, TemplateInputs, TextTokenizer,
};
use support::fixture;

#[track_caller]
fn holds(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message}\nwithout: {part}");
    }
}

fn checkpoint() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"] {
        fs::copy(fixture("gemma4-dense/checkpoint").join(name), dir.path().join(name)).unwrap();
    }
    dir
}

fn open(folder: &Path) -> String {
    Gemma4Processor::from_folder(folder).unwrap_err().to_string()
}

#[test]
fn files_that_are_absent() {
    for (name, parts) in [
        ("tokenizer.json", ["has no tokenizer.json; ", "copy it from the released checkpoint"]),
        (
            "chat_template.jinja",
            ["has no chat_template.jinja, no chat_template in tokenizer_config.json", "write the template"],
        ),
        (
            "processor_config.json",
            ["a section `image_processor`, no preprocessor_config.json", "copy it from the released"],
        ),
    ] {
        let folder = checkpoint();
        fs::remove_file(folder.path().join(name)).unwrap();
        let message = open(folder.path());
        holds(&message, &parts);
        assert!(message.starts_with(&folder.path().display().to_string()), "{message}");
    }
}

#[test]
fn files_that_cannot_be_read() {
    for name in ["tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"] {
        let folder = checkpoint();
        let path = folder.path().join(name);
        fs::write(&path, b"{\"a\": \"\xe9\"}").unwrap();
        holds(&open(folder.path()), &["cannot read ", &path.display().to_string(), "UTF-8"]);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        holds(&open(folder.path()), &["cannot read ", &path.display().to_string(), "directory"]);
    }
    let folder = checkpoint();
    fs::write(folder.path().join("additional_chat_templates"), "").unwrap();
    holds(&open(folder.path()), &["cannot read ", "additional_chat_templates"]);
}

#[test]
fn files_that_do_not_parse() {
    for (name, text, parts) in [
        ("tokenizer.json", "{", ["tokenizer.json: ", "line 1 column 1"]),
        ("tokenizer_config.json", "{\n,", ["tokenizer_config.json is not valid: ", "line 2 column 1"]),
        ("processor_config.json", "{\"a\" 1}", ["processor_config.json is not valid: ", "line 1 column 6"]),
        ("chat_template.jinja", "\n{% if %}", ["chat template default: line 2: ", "unexpected"]),
        (
            "chat_template.json",
            "{\"chat_template\": [1]}",
            ["chat_template.json: chat_template is [1]: must be a text,", "a name and a template"],
        ),
    ] {
        let folder = checkpoint();
        fs::write(folder.path().join(name), text).unwrap();
        holds(&open(folder.path()), &parts);
    }
}

#[test]
fn tokens_that_are_not_named() {
    let folder = checkpoint();
    fs::write(folder.path().join("tokenizer_config.json"), r#"{"image_token": "<|image|>"}"#).unwrap();
    holds(&open(folder.path()), &["boi_token is not set", "tokenizer_config.json must name it"]);
    fs::write(folder.path().join("tokenizer_config.json"), r#"{"image_token": "two words"}"#).unwrap();
    holds(&open(folder.path()), &["image_token is \"two words\"", "not one token of tokenizer.json", "add it there"]);
}

#[test]
fn texts_that_the_tokenizer_has_no_token_for() {
    let words = r#"{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}"#;
    let tokenizer = TextTokenizer::from_json("words", words).unwrap();
    let message = tokenizer.encode("b", false).unwrap_err().to_string();
    holds(&message, &["the text cannot be encoded: ", "[UNK]"]);
    holds(&TextTokenizer::from_json("words.json", "[]").unwrap_err().to_string(), &["words.json: "]);
}

#[test]
fn settings_made_by_hand_or_of_a_wrong_kind() {
    let good = Gemma4ImageSettings::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap();
    let chat = || ChatEncoder::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap();
    for (settings, parts) in [
        (Gemma4ImageSettings { patch_size: 1025, ..good.clone() }, ["patch_size is 1025: ", "1 to 1024"]),
        (Gemma4ImageSettings { pooling_kernel_size: 65, ..good.clone() }, ["pooling_kernel_size is 65: ", "1 to 64"]),
        (
            Gemma4ImageSettings { max_soft_tokens: 71, ..good.clone() },
            ["max_soft_tokens is 71: ", "70, 140, 280, 560 or 1120"],
        ),
    ] {
        let message = Gemma4Processor::new(chat(), settings).unwrap_err().to_string();
        assert!(message.starts_with("image settings: "), "{message}");
        holds(&message, &parts);
    }
    for (text, parts) in [
        (r#""image_mean": [1, 2]"#, ["image_processor.image_mean is [1,2]: ", "a list of three numbers"]),
        (r#""image_std": "1""#, ["image_processor.image_std is \"1\": ", "a list of three numbers"]),
        (r#""image_std": [1, 0, 1]"#, ["image_processor.image_std is [1,0,1]: ", "must not be 0"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let file = format!(r#"{{"image_processor": {{"do_normalize": true, {text}}}}}"#);
        fs::write(folder.path().join("processor_config.json"), file).unwrap();
        let message = Gemma4ImageSettings::from_folder(folder.path()).unwrap_err().to_string();
        holds(&message, &parts);
        assert!(message.starts_with("processor_config.json: "), "{message}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = r#"{"processor_class": "Qwen3VLProcessor", "image_processor": {}}"#;
    fs::write(folder.path().join("processor_config.json"), file).unwrap();
    let message = Gemma4ImageSettings::from_folder(folder.path()).unwrap_err().to_string();
    holds(&message, &["processor_class is ", "only Gemma 4's processors", "Gemma4ImageProcessor"]);
}

#[test]
fn what_fails_inside_of_a_template() {
    let render = |source: &str| {
        let template = ChatTemplate::from_source(source).unwrap();
        template.render(&[], &TemplateInputs::default(), &BTreeMap::new()).unwrap_err().to_string()
    };
    for (source, part) in [
        ("{{ 1 | tojson(separators=[',']) }}", "tojson: separators must be two texts"),
        ("{{ 1 | tojson(indent=[]) }}", "tojson: indent must be a number or a text"),
        ("{{ nothing | tojson }}", "tojson: a value of type undefined cannot be written as JSON"),
        ("{{ {(1, 2): 1} | tojson }}", "tojson: a key of type sequence cannot be written as JSON"),
        ("{{ 1 | tojson(sort=true) }}", "unknown keyword argument 'sort'"),
        ("{{ 'abc'.index('d') }}", "\"d\" is not in the text"),
        ("{{ strftime_now('%z') }}", "strftime_now(\"%z\"): "),
    ] {
        holds(&render(source), &["chat template default: line 1: ", part]);
    }
}

/// What the answers of a short chat cannot be told for.
fn answers(template: &str, messages: &[Message]) -> String {
    let tokenizer = TextTokenizer::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap();
    let chat = ChatEncoder::new(ChatTemplate::from_source(template).unwrap(), tokenizer);
    let inputs = TemplateInputs::default();
    let encoded = chat.encode(chat.render(messages, &inputs).unwrap(), "\u{fdd0}", &[]).unwrap();
    AnswerFinder::new(&chat).find(&chat, messages, &inputs, &encoded).unwrap_err().to_string()
}

#[test]
fn answers_that_cannot_be_told() {
    let of = |body: &str| format!("{{% for m in messages %}}<|turn>{{{{ m.role }}}}\n{body}<turn|>\n{{% endfor %}}");
    let ask = |answer: &str| [Message::text("user", "Hi"), Message::text("assistant", answer)];
    for (template, messages, part) in [
        (of("{{ m.content }}"), ask("<|tool_response>4"), "<|tool_response> in an answer without <tool_response|>"),
        (
            of("{{ m.content }}{% if messages | length == 2 %}{{ m.content }}{% endif %}"),
            ask("Yes"),
            "the template writes messages[0] more than once",
        ),
        (
            of("{% if loop.first or messages | length > 2 %}{{ m.content }}{% endif %}"),
            ask("Yes"),
            "the template does not write the text of messages[1]",
        ),
        (
            of("{{ m.content }}")
                .replace("{% for", "{% if messages | length == 2 %}{{ messages[1].content }}{% endif %}{% for")
                .replace("{{ m.content }}<turn|>", "{{ m.content if loop.first or messages | length > 2 }}<turn|>"),
            ask("Yes"),
            "messages[1] does not stand where the template writes answers",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}".to_owned(),
            ask("Yes"),
            "writes nothing that tells where an answer begins; give it {% generation %} blocks",
        ),
        (of("{{ m.content }}"), ask("Yes<turn|>"), "messages[1] holds <turn|>, which ends an answer; remove it"),
    ] {
        let message = answers(&template, &messages);
        holds(&message, &["what the assistant wrote cannot be told from the rendered chat: ", part]);
    }
}

#[test]
fn messages_of_other_forms() {
    for (json, part) in [
        (r#"[{"role": 7, "content": "a"}]"#, "messages[0]: `role` must be a text"),
        (r#"[{"role": "user", "content": [{"text": "a"}]}]"#, "messages[0]: content[0] has no `type`"),
        (
            r#"[{"role": "user", "content": [{"type": "image", "url": "a", "base64": "b"}]}]"#,
            "names its picture twice, in `url` and in `base64`",
        ),
        (
            r#"[{"role": "user", "content": [{"type": "image", "path": 1}]}]"#,
            "must name its picture in `path` by a text",
        ),
    ] {
        holds(&Message::list_from_json(json).unwrap_err().to_string(), &[part]);
    }
}

#[test]
fn samples_whose_pictures_do_not_fit() {
    let processor = Gemma4Processor::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap();
    let folder = fixture("imaging");
    let fault = |json: &str, images: &[PictureSource], max_tokens: Option<usize>| {
        let messages = Message::list_from_json(json).unwrap();
        let request = Request { images, folder: &folder, max_tokens, ..Request::new("line 7", &messages) };
        processor.process(&request).unwrap_err().to_string()
    };
    let one = r#"[{"role": "user", "content": [{"type": "image"}]}]"#;
    let wide = PictureSource::from_text("wide.png");
    holds(
        &fault(one, &[], None),
        &["line 7: 1 image part(s) without a source", "0 picture(s) in the list", "one picture per part"],
    );
    let two = r#"[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<|image|>"}]}]"#;
    let parts = [
        "line 7: the rendered chat has 2 placeholder(s) <|image|>, but there are 1 picture(s)",
        "must not contain <|image|>",
    ];
    holds(&fault(two, std::slice::from_ref(&wide), None), &parts);
    let parts = [
        "line 7: picture 1 (wide.png) takes ",
        " soft tokens and ends at token ",
        "the sequence may have 9",
        "raise the limit, drop a picture, or lower what the processor's files allow",
    ];
    holds(&fault(one, &[wide], Some(9)), &parts);
    let text = r#"[{"role": "user", "content": "A long story."}]"#;
    holds(
        &fault(text, &[], Some(3)),
        &["line 7: ", " tokens, but the sequence may have 3: raise the limit or shorten the text"],
    );
}

#[test]
fn sources_without_a_usable_picture() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("empty.png"), "").unwrap();
    fs::write(folder.path().join("page.png"), "<html>").unwrap();
    let limits = PictureLimits { max_bytes: 5, ..PictureLimits::default() };
    let load = |source: &str, limits: &PictureLimits| {
        PictureSource::from_text(source).load(folder.path(), limits).unwrap_err().to_string()
    };
    for (source, parts) in [
        ("https://x.org/a.png", &["is a web address", "nothing is fetched", "download it and give its path"][..]),
        ("data:image/png,abc", &["is a data: URL without `;base64,`", "only base64"]),
        ("data:image/png;base64", &["is a data: URL without `;base64,`"]),
        ("data:image/png;base64,iVB!", &["is not base64: '!' at character 26"]),
        ("data:image/png;base64,a", &["is not base64: "]),
        ("data:image/png;base64,", &["is empty (0 bytes)"]),
        ("empty.png", &["is empty (0 bytes)"]),
        ("absent.png", &["cannot read the file: "]),
        (".", &["cannot read the file: it is no regular file"]),
        ("page.png", &["is not a picture: it starts with \"<html>\""]),
    ] {
        holds(&load(source, &PictureLimits::default()), parts);
    }
    holds(&load("page.png", &limits), &["has 6 bytes; at most 5 are allowed", "scale it down, or raise the limit"]);
}

#[test]
fn contents_of_other_formats() {
    let decode = |content: &[u8]| Picture::decode(content, &PictureLimits::default()).unwrap_err().to_string();
    for (content, found) in [
        (&b"GIF89a"[..], "a GIF"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "a WebP picture"),
        (b"BM\0\0", "a BMP picture"),
        (b"II*\0", "a TIFF picture"),
        (b"MM\0*", "a TIFF picture"),
        (b"\0\0\0\x20ftypavif", "an AVIF picture"),
        (b"\0\0\0\x20ftypheic", "a HEIF picture"),
        (b"\0\0\0\x20ftypisom", "a film"),
        (b"\xff\x0a", "a JPEG XL picture"),
        (b"\0\0\0\x0cJXL \r\n", "a JPEG XL picture"),
        (b"\0\0\0\x0cjP  \r\n", "a JPEG 2000 picture"),
        (b"%PDF-1.7", "a PDF"),
        (b"\x1f\x8b\x08", "gzip data"),
    ] {
        holds(
            &decode(content),
            &[&format!("has {found} inside; only PNG and JPEG are read"), "not the name", "convert it"],
        );
    }
    let jpeg = |frame: &[u8]| [&b"\xff\xd8"[..], frame, b"\xff\xd9"].concat();
    let frame = |precision: u8, height: u8, components: u8| {
        let body = [precision, 0, height, 0, 8, components];
        let table = (0..components).flat_map(|n| [n + 1, 0x11, 0]);
        let body: Vec<u8> = body.into_iter().chain(table).collect();
        jpeg(&[&[0xff, 0xc0, 0, body.len() as u8 + 2][..], &body].concat())
    };
    for (content, message) in [
        (jpeg(b""), "is damaged: the JPEG has no frame header"),
        (jpeg(b"\xff\xc0\0\x04\x08\0"), "is damaged: its frame header is too short"),
        (b"\xff\xd8\xff\xe0".to_vec(), "is cut short: the JPEG ends in its segments, without its end marker"),
        (b"\xff\xd8\xff\xda\0\x02abc".to_vec(), "is cut short: the JPEG ends in its pixels, without its end marker"),
        (frame(12, 8, 3), "is of a kind that is not read: a JPEG with 12-bit samples"),
        (frame(8, 8, 2), "is of a kind that is not read: a JPEG with 2 components"),
        (frame(8, 0, 3), "is of a kind that is not read: a JPEG of 8 x 0 pixels"),
    ] {
        assert_eq!(decode(&content), message);
    }
    let png = b"\x89PNG\r\n\x1a\n";
    holds(&decode(png), &["is cut short: the PNG data ends before the last row"]);
    holds(&decode(&[&png[..], &[0; 64]].concat()), &["is damaged: "]);
}

#[test]
fn shapes_and_lengths() {
    let settings = Gemma4ImageSettings {
        patch_size: 4,
        pooling_kernel_size: 2,
        max_soft_tokens: 70,
        rescale_factor: 1.0,
        normalize: None,
        layout: PatchLayout::Tower,
    };
    holds(&settings.resized(0, 7).unwrap_err().to_string(), &["is 7 x 0: a side is 0"]);
    let picture = |width: usize, height: usize| Picture::from_rgb(width, height, vec![0; width * height * 3]).unwrap();
    let odd = settings.patches_as_is(&picture(12, 8)).unwrap_err().to_string();
    holds(&odd, &["is 12 x 8: both sides must be multiples of 8 (patch_size x pooling_kernel_size)"]);
    let large = settings.patches_as_is(&picture(128, 128)).unwrap_err().to_string();
    holds(&large, &["is 128 x 128: at most 280 patches are allowed"]);
    let short = Picture::from_rgb(2, 3, vec![0; 17]).unwrap_err().to_string();
    holds(&short, &["2 x 3 RGB pixels need 18 bytes, not 17"]);
    let huge = Picture::from_rgb(usize::MAX, 2, vec![0; 17]).unwrap_err();
    assert!(!huge.to_string().is_empty());
    let error = Error::Template { name: "a".into(), reason: "b".into() };
    assert_eq!(error.to_string(), "chat template a: b");
}
