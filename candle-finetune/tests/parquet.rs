//! Parquet files: the same samples as from JSONL, and what is said about files and rows that cannot be used.

use std::path::{Path, PathBuf};

use candle_finetune::jsonl::Lines;
use candle_finetune::{Encoder, Result};
use candle_gemma4::Config;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/parquet").join(name)
}

fn encoder() -> Encoder {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint");
    Encoder::from_folder(&checkpoint, std::sync::Arc::new(Config::from_folder(&checkpoint).unwrap())).unwrap()
}

fn read(name: &str) -> Result<Lines> {
    Lines::read(&data(name), encoder())
}

#[cfg(not(feature = "parquet"))]
#[test]
fn without_the_feature_the_message_says_how_to_build() {
    let error = read("plain.parquet").unwrap_err();
    let text = error.to_string();
    assert!(
        error.is_usage() && text.contains("plain.parquet is a Parquet file") && text.contains("--features parquet")
    );
}

#[cfg(feature = "parquet")]
mod with_the_feature {
    use std::fs;

    use candle_finetune::{Error, Position, Sample, Source};
    use tempfile::TempDir;

    use super::*;

    fn samples(lines: &Lines) -> Vec<Sample> {
        (0..lines.len()).map(|index| lines.sample(index).unwrap()).collect()
    }

    /// A copy of one file alone: no picture lies beside it.
    fn alone(name: &str, as_name: &str) -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(as_name);
        fs::copy(data(name), &path).unwrap();
        (dir, path)
    }

    #[test]
    fn samples_are_those_of_the_same_lines_as_jsonl() {
        for (jsonl, parquet, unread) in [
            ("chat.jsonl", "chat-inside.parquet", Some("fields that are not read: \"id\" (5 rows)")),
            ("chat.jsonl", "chat-beside.parquet", None),
            ("chat.jsonl", "chat-json.parquet", None),
            ("texts.jsonl", "texts.parquet", None),
        ] {
            let expected = samples(&read(jsonl).unwrap());
            assert!(expected.iter().map(|sample| sample.pictures.len()).sum::<usize>() >= 3);
            // The content tells the format, whatever the name.
            let (_dir, path) = alone(parquet, "data.bin");
            let lines = Lines::read(&path, encoder()).unwrap();
            assert_eq!(samples(&lines), expected, "{parquet}");
            assert_eq!(lines.notices(), unread.map(str::to_string).into_iter().collect::<Vec<_>>(), "{parquet}");
            // Any order, and again once nobody holds the pictures.
            for index in (0..lines.len()).rev().chain([2, 0, 1]) {
                assert_eq!(lines.sample(index).unwrap(), expected[index], "{parquet} {index}");
            }
        }
        // One row has a path and no content: that picture is read from its file.
        assert_eq!(samples(&read("pairs.parquet").unwrap()), samples(&read("pairs.jsonl").unwrap()));
    }

    #[test]
    fn plain_texts_and_columns_that_are_not_read() {
        let lines = read("plain.parquet").unwrap();
        let ids = |text: &str| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("data.jsonl");
            fs::write(&path, format!("{{\"text\":\"{text}\"}}")).unwrap();
            Lines::read(&path, encoder()).unwrap().sample(0).unwrap()
        };
        assert_eq!(samples(&lines), ["1 2 3", "4 5", "6"].map(ids));
        assert_eq!(lines.notices(), ["fields that are not read: \"label\" (3 rows)"]);
        let cut = lines.fit(4, false).unwrap();
        let notice = &cut.notices()[1];
        assert!(notice.starts_with("left out 1 of 3 samples (row 1): longer than a row of 4 tokens"), "{notice}");
    }

    #[test]
    fn faults_name_their_rows_all_in_one_report() {
        let error = read("faults.parquet").unwrap_err();
        let text = error.to_string();
        assert!(error.is_usage() && text.contains("faults.parquet: 3 of 5 rows cannot be used; nothing was trained"));
        assert!(text.contains("\n  row 2: no field to learn from; \"label\" is unknown; allowed are"), "{text}");
        assert!(text.contains("\n  row 3: \"text\" is empty"), "{text}");
        assert!(text.contains("\n  row 5: \"text\" beside \"prompt\""), "{text}");
    }

    #[test]
    fn faults_that_only_parquet_has() {
        let text = read("odd.parquet").unwrap_err().to_string();
        for part in [
            "odd.parquet: 8 of 8 rows cannot be used",
            "row 1: \"messages\" is a text, but not a JSON list: expected ident",
            "row 2: \"messages\" is an object; a list is needed",
            "row 3: \"messages\" is a text, but not a JSON list: the key \"role\" stands twice in one object",
            "row 4: \"image\" beside \"images\"; keep one of the two columns",
            "row 5: \"text\" is binary; a text is needed: store it as a string",
            "row 6: tools.numbers has a key that is no text",
            "row 7: the key \"k\" stands twice in tools.words",
            "row 8: 0 image part(s) without a source of their own, but 1 picture(s)",
        ] {
            assert!(text.contains(part), "{text}\nwithout: {part}");
        }
    }

    /// The outcome of a file without rows and with this schema.
    fn with_schema(schema: &str) -> String {
        let schema = parquet::schema::parser::parse_message_type(&format!("message schema {{ {schema} }}")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.parquet");
        let file = fs::File::create(&path).unwrap();
        let writer = parquet::file::writer::SerializedFileWriter::new(file, schema.into(), Default::default()).unwrap();
        writer.close().unwrap();
        Lines::read(&path, encoder()).unwrap_err().to_string()
    }

    #[test]
    fn shapes_of_columns_that_are_read_and_that_are_not() {
        let text = "optional binary text (UTF8);";
        for (schema, part) in [
            (text.to_string(), "data.parquet has no sample"),
            // Lists of old writers, bare repeated fields, maps; other columns may have any type.
            (format!("{text} optional group tools (LIST) {{ repeated binary array (UTF8); }}"), "has no sample"),
            (
                format!("{text} optional group tools (LIST) {{ repeated group array {{ required int32 a; }} }}"),
                "has no sample",
            ),
            (format!("{text} repeated group tools {{ required int32 a; required boolean b; }}"), "has no sample"),
            (
                format!(
                    "{text} optional group tools (MAP) {{ repeated group key_value {{ required binary key (UTF8); optional double value; }} }}"
                ),
                "has no sample",
            ),
            (format!("{text} required int96 time; required group g {{ required int32 day (DATE); }}"), "has no sample"),
            (
                format!("{text} optional int32 tools (DATE);"),
                "column \"tools\" is of the type INT32 DATE, which is not read",
            ),
            (format!("{text} required group tools {{ required int96 t; }}"), "column \"t\" is of the type INT96 NONE"),
            (
                format!("{text} optional group tools (LIST) {{ required int32 a; }}"),
                "column \"tools\" is a list or map of an unknown form",
            ),
            (
                format!("{text} optional group tools (MAP) {{ repeated group key_value {{ required int32 key; }} }}"),
                "is a map without keys",
            ),
            (format!("{text} {text}"), "the column \"text\" stands twice"),
            (
                format!("{text} required group tools {{ required int32 a; required int32 a; }}"),
                "the field \"a\" stands twice in \"tools\"",
            ),
        ] {
            let found = with_schema(&schema);
            assert!(found.contains(part), "{schema}: {found}");
        }
    }

    #[test]
    fn columns_without_a_sample_are_named_with_those_that_are_understood() {
        let error = read("vqa.parquet").unwrap_err();
        let text = error.to_string();
        assert!(error.is_usage());
        for part in [
            "vqa.parquet has the columns image, question, answers; understood are messages",
            "prompt and completion (with images or image)",
            "rename_columns",
        ] {
            assert!(text.contains(part), "{text}\nwithout: {part}");
        }
    }

    #[test]
    fn several_files_are_one_data_set_and_messages_name_the_file() {
        let paths = [data("plain.parquet"), data("chat-inside.parquet"), data("chat.jsonl")];
        let lines = Lines::read_all(&paths, encoder()).unwrap();
        assert_eq!(lines.files().collect::<Vec<_>>(), paths);
        assert_eq!(lines.path(), data("").join("").parent().unwrap().join("parquet").as_path());
        let chats = samples(&read("chat.jsonl").unwrap());
        let expected = [samples(&read("plain.parquet").unwrap()), chats.clone(), chats].concat();
        assert_eq!(samples(&lines), expected);
        let mut source = lines.in_order();
        for epoch in 0..2 {
            assert_eq!(source.epoch_len(epoch), expected.len());
            for (taken, sample) in expected.iter().enumerate() {
                assert_eq!(&source.sample(Position { epoch, taken }).unwrap(), sample);
            }
        }
        let longest = expected[4].len();
        let fitted = lines.fit(longest - 1, false).unwrap();
        let notice = fitted.notices().pop().unwrap();
        assert!(notice.contains("(chat-inside.parquet row 2, chat.jsonl line 2)"), "{notice}");
        assert_eq!(fitted.fitted().too_long, [5, 10]);
        let error = fitted.fit(2, false).unwrap_err().to_string();
        assert!(error.contains("parquet: no sample fits") && error.contains("of 11, chat"), "{error}");

        let error = Lines::read_all(&[data("faults.parquet"), data("make.py")], encoder()).unwrap_err().to_string();
        assert!(error.contains("\n  faults.parquet row 5: \"text\" beside"), "{error}");
        assert!(error.contains("\n  make.py line 1: not valid JSON"), "{error}");
    }

    #[test]
    fn a_picture_that_cannot_be_used_is_named_by_its_cell_and_path() {
        // A byte of the header of a picture, which is not compressed.
        let (_dir, path) = alone("pairs.parquet", "pairs.parquet");
        let mut bytes = fs::read(&path).unwrap();
        let png = bytes.windows(8).position(|bytes| bytes == b"\x89PNG\r\n\x1a\n").unwrap();
        bytes[png] = b'G';
        fs::write(&path, &bytes).unwrap();
        fs::copy(data("b.png"), path.with_file_name("b.png")).unwrap();
        let error = Lines::read(&path, encoder()).map(|lines| lines.len()).unwrap_err().to_string();
        assert!(error.contains("row 1: picture 1 (image, a.png): is not a picture"), "{error}");
        fs::remove_file(path.with_file_name("b.png")).unwrap();
        let error = Lines::read(&path, encoder()).unwrap_err().to_string();
        assert!(error.contains("row 3: picture 1 (b.png): cannot read the file"), "{error}");
    }

    #[test]
    fn a_file_that_changes_after_the_check_is_told_with_its_row() {
        let (_dir, path) = alone("chat-beside.parquet", "chat.parquet");
        let lines = Lines::read(&path, encoder()).unwrap();
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..300]).unwrap();
        let error = lines.sample(3).unwrap_err().to_string();
        assert!(error.contains("chat.parquet cannot be read as Parquet: row 4, images[0], c.jpg: "), "{error}");
        fs::remove_file(&path).unwrap();
        assert!(lines.sample(3).unwrap_err().to_string().contains("No such file"));
    }

    #[test]
    fn cut_damaged_and_empty_files_are_told_apart_from_bad_rows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.parquet");
        let whole = fs::read(data("chat-inside.parquet")).unwrap();
        for length in [4, 5, 100, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            let error = Lines::read(&path, encoder()).unwrap_err();
            assert!(matches!(error, Error::Parquet { .. }) && error.is_usage(), "{error}");
            assert!(error.to_string().contains("cut or damaged: copy or pull it again"), "{error}");
        }
        // Damage in the first pages: the rows behind it in the same row group are not read, the next groups are.
        let mut damaged = whole.clone();
        damaged[4..1200].fill(0xff);
        fs::write(&path, &damaged).unwrap();
        let error = Lines::read(&path, encoder()).unwrap_err().to_string();
        assert!(error.contains("\n  row 1: ") && !error.contains("row 3"), "{error}");
        for text in ["PAR", "PAR1 is no data"] {
            fs::write(&path, text).unwrap();
            assert!(Lines::read(&path, encoder()).is_err());
        }
    }

    #[test]
    fn no_damaged_byte_makes_a_panic() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.parquet");
        let encoder = std::sync::Arc::new(encoder());
        for name in ["texts.parquet", "plain.parquet"] {
            let whole = fs::read(data(name)).unwrap();
            for place in (4..whole.len()).step_by(23) {
                let mut damaged = whole.clone();
                damaged[place] ^= 0x55;
                fs::write(&path, &damaged).unwrap();
                if let Ok(lines) = Lines::read(&path, encoder.clone()) {
                    (0..lines.len()).for_each(|index| drop(lines.sample(index)));
                }
            }
        }
    }
}
