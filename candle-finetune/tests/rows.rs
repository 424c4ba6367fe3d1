//! Samples and rows: what is left out, what is cut, what is said about it; and fields that are not read.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_finetune::jsonl::Lines;
use candle_finetune::{Config, Encoder, Error, Job, Part, Plan, Result, Sample, Watcher, run, train_watched};
use tempfile::TempDir;

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gemma4-dense/checkpoint")
}

fn encoder() -> Encoder {
    let model = candle_gemma4::Config::from_folder(&checkpoint()).unwrap();
    Encoder::from_folder(&checkpoint(), std::sync::Arc::new(model)).unwrap()
}

fn file(text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    image::RgbImage::from_pixel(24, 12, image::Rgb([51, 0, 255])).save(dir.path().join("ok.png")).unwrap();
    let path = dir.path().join("data.jsonl");
    fs::write(&path, text).unwrap();
    (dir, path)
}

fn read(text: &str) -> (TempDir, Result<Lines>) {
    let (dir, path) = file(text);
    let lines = Lines::read(&path, encoder());
    (dir, lines)
}

fn fit(text: &str, seq_len: usize, truncate: bool) -> Result<Lines> {
    let (_dir, lines) = read(text);
    lines.unwrap().fit(seq_len, truncate)
}

fn samples(lines: &Lines) -> Vec<Sample> {
    (0..lines.len()).map(|index| lines.sample(index).unwrap()).collect()
}

fn learned(sample: &Sample) -> usize {
    sample.tokens.iter().skip(1).filter(|token| token.learned.is_some()).count()
}

/// Lines 1, 3, 4 and 6 of 5, 8, 5 and 12 tokens.
const TEXTS: &str =
    "{\"text\":\"1 2\"}\n\n{\"text\":\"1 2 3 4 5 \"}\n{\"text\":\"3 4\"}\r\n\n{\"text\":\"1 2 3 4 5 6 7 8 9\"}\n";

fn lengths(lines: &Lines) -> Vec<usize> {
    samples(lines).iter().map(Sample::len).collect()
}

#[test]
fn samples_longer_than_a_row_are_left_out_and_told_once() {
    let (_dir, all) = read(TEXTS);
    let all = lengths(&all.unwrap());
    let [short, long, longest] = [all[0], all[1], all[3]];
    assert!(all[2] == short && short < long && long < longest, "{all:?}");

    let kept = fit(TEXTS, longest, false).unwrap();
    assert_eq!(lengths(&kept), all);
    assert_eq!((kept.fitted().dropped(), kept.notices()), (0, vec![]));

    let kept = fit(TEXTS, long, false).unwrap();
    assert_eq!(lengths(&kept), all[..3]);
    assert_eq!(kept.fitted().too_long, [6]);
    let kept = fit(TEXTS, long - 1, false).unwrap();
    assert_eq!(lengths(&kept), [short, short]);
    assert_eq!((&kept.fitted().too_long[..], kept.fitted().dropped()), (&[3, 6][..], 2));
    assert_eq!(
        kept.notices(),
        [format!(
            "left out 2 of 4 samples (lines 3, 6): longer than a row of {} tokens; the longest has {longest}: --seq-len \
             {longest} keeps all of them, --truncate cuts them",
            long - 1
        )]
    );
    let text = format!("{}{{\"text\":\"1\"}}\n", "{\"text\":\"1 2 3\"}\n".repeat(10));
    let notice = &fit(&text, 4, false).unwrap().notices()[0];
    assert!(notice.starts_with("left out 10 of 11 samples (lines 1, 2, 3, 4, 5, 6, 7, 8 and 2 more): "), "{notice}");
}

#[test]
fn a_file_of_which_nothing_fits_names_the_longest_sample_and_the_fix() {
    let longest = *lengths(&read(TEXTS).1.unwrap()).last().unwrap();
    let (dir, path) = file(TEXTS);
    let error = Lines::read(&path, encoder()).unwrap().fit(3, false).unwrap_err();
    assert!(error.is_usage());
    let expected = format!(
        "{}: no sample fits a row of 3 tokens; the longest of 4, line 6, has {longest} tokens: give --seq-len {longest} to \
         keep them all, or cut them with --truncate",
        path.display()
    );
    assert_eq!(error.to_string(), expected);
    let error = Lines::read(&path, encoder()).unwrap().fit(1, true).unwrap_err();
    let expected = format!(
        "{}: no sample has a learned token within the 1 tokens of a row; the longest of 4, line 6, has {longest} tokens: \
         give --seq-len {longest} to keep them whole",
        path.display()
    );
    assert_eq!(error.to_string(), expected);
    drop(dir);
}

#[test]
fn samples_are_cut_to_a_row_and_lose_their_end() {
    let (_dir, whole) = read(TEXTS);
    let whole = samples(&whole.unwrap());
    let row = whole[1].len() - 1;
    let cut = fit(TEXTS, row, true).unwrap();
    assert_eq!((&cut.fitted().cut[..], cut.fitted().dropped()), (&[3, 6][..], 0));
    for (cut, whole) in samples(&cut).iter().zip(&whole) {
        assert_eq!(cut.tokens, whole.tokens[..whole.len().min(row)]);
        let ends = cut.tokens.iter().any(|token| token.learned == Some(Part::End));
        assert_eq!(ends, cut.len() == whole.len());
    }
    assert_eq!(
        cut.notices(),
        [format!(
            "cut 2 of 4 samples (lines 3, 6): longer than a row of {row} tokens; an answer that is cut loses the token \
             that ends it; --seq-len {} keeps all samples whole",
            whole[3].len()
        )]
    );
}

#[test]
fn a_cut_never_parts_a_picture() {
    let chat = r#"{"messages":[{"role":"user","content":[{"type":"image","image":"ok.png"},{"type":"text","text":"1?"}]},{"role":"assistant","content":"2"},{"role":"user","content":[{"type":"text","text":"3?"},{"type":"image","image":"ok.png"}]},{"role":"assistant","content":"4 5"}]}"#;
    let (_dir, path) = file(chat);
    let read = || Lines::read(&path, encoder()).unwrap();
    let whole = read().sample(0).unwrap();
    let encoder = encoder();
    let places = |token: &str| -> Vec<usize> {
        let id = encoder.tokenizer().id(token);
        (0..whole.len()).filter(|&place| Some(whole.tokens[place].id) == id).collect()
    };
    // In the tiny tokenizer the opening token is not the placeholder, and there is one of each per picture.
    let (opens, closes) = (places(&named("boi_token")), places(&named("eoi_token")));
    assert_eq!((opens.len(), closes.len()), (2, 2));
    assert_eq!((closes[0] - opens[0], closes[1] - opens[1]), (56, 56));
    let first_learned = whole.tokens.iter().position(|token| token.learned.is_some()).unwrap();
    for row in 1..=whole.len() {
        let inside = (0..2).find(|&n| opens[n] < row && row <= closes[n]);
        let len = inside.map_or(row, |n| opens[n]);
        match read().fit(row, true) {
            Err(Error::NothingFits { truncate: true, .. }) => assert!(len <= first_learned, "{row}"),
            Err(error) => panic!("{error}"),
            Ok(lines) => {
                assert!(len > first_learned, "{row}");
                let sample = lines.sample(0).unwrap();
                assert_eq!(sample.tokens, whole.tokens[..len], "{row}");
                let pictures = closes.iter().filter(|&&close| close < len).count();
                assert_eq!(sample.pictures, whole.pictures[..pictures], "{row}");
                assert_eq!(lines.fitted().cut.len(), usize::from(row < whole.len()), "{row}");
            }
        }
    }
}

fn named(field: &'static str) -> String {
    encoder().tokenizer().named_token(field).unwrap().0
}

#[test]
fn a_sample_with_nothing_to_learn_before_the_cut_is_left_out() {
    let text = format!(
        "{{\"text\":\"1\"}}\n{{\"prompt\":\"{}\",\"completion\":\"2\"}}\n{{\"prompt\":\"1\",\"completion\":\"{}\"}}\n",
        "1 ".repeat(60),
        "2 ".repeat(60)
    );
    let lines = fit(&text, 40, true).unwrap();
    assert_eq!(lines.len(), 2);
    assert_eq!((&lines.fitted().cut[..], &lines.fitted().nothing_left[..]), (&[3][..], &[2][..]));
    assert_eq!(lines.fitted().dropped(), 1);
    assert!(samples(&lines).iter().all(|sample| learned(sample) > 0));
    let notices = lines.notices();
    assert!(notices[0].starts_with("cut 1 of 3 samples (line 3): longer than a row of 40 tokens; "), "{notices:?}");
    assert_eq!(notices[1..], ["left out 1 of 3 samples (line 2): no learned token within the 40 tokens of a row"]);
}

#[test]
fn other_fields_are_named_once_and_not_read() {
    let chat = r#""messages":[{"role":"user","content":"1"},{"role":"assistant","content":"2"}]"#;
    let plain = format!("{{{chat}}}\n{{\"prompt\":\"1\",\"completion\":\"2\"}}\n{{\"text\":\"3\"}}\n");
    let with = format!(
        "{{\"id\":7,{chat},\"source\":{{\"a\":[1]}},\"conversations\":[],\"none\":null}}\n\
         {{\"prompt\":\"1\",\"id\":8,\"completion\":\"2\",\"pages\":2}}\n{{\"id\":9,\"text\":\"3\",\"image\":\"x\"}}\n"
    );
    let [(_a, plain), (_b, with)] = [read(&plain), read(&with)];
    let (plain, with) = (plain.unwrap(), with.unwrap());
    assert_eq!(samples(&plain), samples(&with));
    assert_eq!(plain.notices(), Vec::<String>::new());
    let expected = "fields that are not read: \"conversations\" (1 line), \"id\" (3 lines), \"image\" (1 line), \
                    \"pages\" (1 line), \"source\" (1 line)";
    assert_eq!(with.notices(), [expected]);
    let many: String = (10..22).map(|n| format!("{{\"text\":\"1\",\"c{n}\":1}}\n")).collect();
    let notice = &read(&many).1.unwrap().notices()[0];
    assert!(notice.ends_with("\"c17\" (1 line) and 4 more"), "{notice}");
}

#[derive(Default)]
struct Notices(Mutex<Vec<String>>);

impl Watcher for Notices {
    fn notice(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_string());
    }
}

#[test]
fn a_run_says_what_it_left_out_and_counts_it_in_its_summary() {
    let text = format!("{TEXTS}{{\"id\":1,\"text\":\"6\"}}\n");
    let (dir, path) = file(&text);
    let row = lengths(&Lines::read(&path, encoder()).unwrap())[1] - 1;
    let config = Config {
        cp: 1,
        steps: Some(1),
        model: Some(checkpoint()),
        data: Some(path),
        out: dir.path().join("out"),
        batch_rows: 1,
        seq_len: row,
        ..Config::default()
    };
    let job = Job::prepare(&config).unwrap();
    let notices = Notices::default();
    train_watched(&job, &config, None, &notices).unwrap();
    let notices = notices.0.into_inner().unwrap();
    assert_eq!(notices, job.notices());
    assert_eq!(notices[0], "fields that are not read: \"id\" (1 line)");
    assert!(notices[1].starts_with("left out 2 of 5 samples (lines 3, 6)"), "{notices:?}");
    assert_eq!(notices.len(), 2);
    for (truncate, dropped, cut) in [(false, 2, 0), (true, 0, 2)] {
        let json = run(&Config { truncate, ..config.clone() }, &|_, _| Ok(())).unwrap().to_json();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["samples_dropped"], &json["samples_cut"]), (&dropped.into(), &cut.into()), "{json}");
    }
}

#[test]
fn the_plan_of_lengths_is_what_the_packer_does() {
    let text: String = (0..17).map(|i| format!("{{\"text\":\"{}\"}}\n", "1 ".repeat(1 + i * i % 11))).collect();
    let (dir, path) = file(&text);
    let longest = lengths(&Lines::read(&path, encoder()).unwrap()).into_iter().max().unwrap();
    let config = Config {
        epochs: Some(4),
        accumulate: 2,
        model: Some(checkpoint()),
        data: Some(path.clone()),
        out: dir.path().join("out"),
        batch_rows: 2,
        seq_len: longest + 3,
        ..Config::default()
    };
    let job = Job::prepare(&config).unwrap();
    let mut packer = job.training(&config);
    let mut steps = Vec::new();
    for epoch in 0..4 {
        let batches: Vec<_> = std::iter::from_fn(|| packer.next_batch().unwrap()).collect();
        steps.push(batches.len().div_ceil(2));
        if epoch == 0 {
            let lines = Lines::read(&path, encoder()).unwrap().fit(config.seq_len, false).unwrap();
            let plan = Plan::make(&lines, &config).first();
            let rows = batches.iter().map(|batch| batch.ids.len()).sum();
            let tokens = batches.iter().map(|batch| batch.token_count()).sum();
            assert_eq!((plan.samples, plan.batches, plan.rows, plan.tokens), (17, batches.len(), rows, tokens));
            assert!(batches.len() > 2, "{plan:?}");
        }
    }
    assert_eq!(job.steps(), steps.iter().sum::<usize>(), "{steps:?}");
}
