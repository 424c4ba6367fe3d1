//! Data sets by name, against a Hub on loopback; and folders of data.

// One Hub for several tests; this one does not use every behaviour of it.
#[allow(dead_code)]
mod fake_hub;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_finetune::hub::{HubError, HubOptions, resolve_data};
use fake_hub::{Body, FakeHub};
use tempfile::TempDir;

struct Setting {
    hub: FakeHub,
    dir: TempDir,
    options: HubOptions,
}

fn setting(files: &[(&str, &[u8])]) -> Setting {
    let hub = FakeHub::start(files);
    {
        let mut repository = hub.repository();
        repository.is_data = true;
        repository.large =
            files.iter().map(|(name, _)| name.to_string()).filter(|name| name.ends_with(".parquet")).collect();
    }
    let dir = tempfile::tempdir().unwrap();
    let options = HubOptions {
        endpoint: hub.endpoint(),
        token: Some("hf_test".to_string()),
        retries: 2,
        retry_pause: Duration::from_millis(1),
        timeout: Duration::from_secs(10),
        ..HubOptions::new(dir.path().join("hub"))
    };
    Setting { hub, dir, options }
}

impl Setting {
    fn pull(&self, spec: &str) -> Result<Vec<PathBuf>, HubError> {
        resolve_data(spec, &self.options, &mut |_| ())
    }

    /// The pulled files as paths in the commit's folder.
    fn pulled(&self, spec: &str) -> Vec<String> {
        let files = self.pull(spec).unwrap();
        let name = |file: &PathBuf| file.strip_prefix(self.snapshot()).unwrap().to_str().unwrap().to_string();
        assert!(files.iter().all(|file| file.is_file()));
        files.iter().map(name).collect()
    }

    fn snapshot(&self) -> PathBuf {
        self.dir.path().join("hub/datasets--org--tiny/snapshots/0123abc")
    }

    fn fails(&self, spec: &str, parts: &[&str]) -> HubError {
        let error = self.pull(spec).unwrap_err();
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}\nwithout one of {parts:?}");
        assert!(!text.contains("hf_test") && !text.contains("secret"), "{text}");
        error
    }

    fn lines(&self) -> Vec<String> {
        self.hub.take_log().into_iter().map(|seen| seen.line).collect()
    }
}

const CHATS: &[u8] = br#"{"prompt": "<|image|>", "completion": "1", "images": ["../images/a b#1.png"]}
{"messages": [{"role": "user", "content": [{"type": "image", "image": "c.png"}]}, {"role": "assistant", "content": "1"}]}
{"prompt": "<|image|>", "completion": "1", "images": ["absent.png"]}
"#;

fn jsonl() -> Setting {
    setting(&[
        ("README.md", b"#"),
        ("data/train.jsonl", CHATS),
        ("data/test.jsonl", b"{\"text\": \"1\"}\n"),
        ("data/c.png", b"c"),
        ("data/other.png", b"o"),
        ("images/a b#1.png", b"a"),
    ])
}

#[test]
fn a_split_of_jsonl_comes_with_the_pictures_it_names() {
    let setting = jsonl();
    assert_eq!(setting.pulled("hub:org/tiny"), ["data/train.jsonl"]);
    let log = setting.lines();
    assert_eq!(log[0], "GET /api/datasets/org/tiny/revision/main");
    assert!(log.contains(&"HEAD /datasets/org/tiny/resolve/0123abc/data/train.jsonl".to_string()), "{log:?}");
    let folder = setting.snapshot();
    assert_eq!(fs::read(folder.join("data/train.jsonl")).unwrap(), CHATS);
    assert_eq!(fs::read(folder.join("data/../images/a b#1.png")).unwrap(), b"a");
    assert_eq!(fs::read(folder.join("data/c.png")).unwrap(), b"c");
    assert!(!folder.join("data/other.png").exists() && !folder.join("data/test.jsonl").exists());
    assert_eq!(fs::read_to_string(folder.join("../../refs/main")).unwrap(), "0123abc");

    assert_eq!(setting.pulled("hub:org/tiny"), ["data/train.jsonl"]);
    assert_eq!(setting.lines(), ["GET /api/datasets/org/tiny/revision/main"]);
    assert_eq!(setting.pulled("hub:org/tiny@v1.0:test"), ["data/test.jsonl"]);
    assert_eq!(setting.pulled("hub:org/tiny:data/test.jsonl"), ["data/test.jsonl"]);
    // The token goes to the Hub alone, as for models.
    setting.fails("hub:org/tiny:validation", &["org/tiny@main has no split \"validation\"; it has test, train"]);
}

#[test]
fn a_list_that_the_hub_cuts_is_read_from_the_tree() {
    let setting = jsonl();
    setting.hub.repository().long_list = true;
    assert_eq!(setting.pulled("hub:org/tiny"), ["data/train.jsonl"]);
    assert!(setting.snapshot().join("images/a b#1.png").is_file());
    let log = setting.lines();
    let pages = log.iter().filter(|line| line.contains("/api/datasets/org/tiny/tree/0123abc")).count();
    assert_eq!(pages, 6, "{log:?}");
}

#[test]
fn offline_takes_what_was_pulled_and_names_what_was_not() {
    let mut setting = jsonl();
    setting.options.offline = true;
    setting.fails("hub:org/tiny", &["offline", "org/tiny at main: it was never pulled"]);
    setting.options.offline = false;
    setting.pull("hub:org/tiny").unwrap();
    setting.lines();
    setting.options.offline = true;
    assert_eq!(setting.pulled("hub:org/tiny"), ["data/train.jsonl"]);
    setting.fails("hub:org/tiny:test", &["org/tiny at main: data/test.jsonl is missing"]);
    setting.fails("hub:org/tiny:dev", &["the copy there has no split \"dev\"; it has test, train"]);
    fs::remove_file(setting.snapshot().join("data/c.png")).unwrap();
    setting.fails("hub:org/tiny", &["org/tiny at main: data/c.png is missing"]);
    assert!(setting.lines().is_empty());
    // Python's library leaves a list of its own; older ones leave none: then the folder tells.
    let repository = setting.snapshot().join("../..");
    fs::remove_dir_all(repository.join(".listed")).unwrap();
    fs::create_dir(repository.join("trees")).unwrap();
    let trees = r#"{"format_version": 1, "files": {"data/dev.jsonl": {"size": 1}, "data/train.jsonl": {"size": 1}}}"#;
    fs::write(repository.join("trees/0123abc.json"), trees).unwrap();
    setting.fails("hub:org/tiny:dev", &["data/dev.jsonl is missing"]);
    assert_eq!(setting.pulled("hub:org/tiny"), ["data/train.jsonl"]);
    fs::remove_dir_all(repository.join("trees")).unwrap();
    setting.fails("hub:org/tiny:dev", &["the copy there has no split \"dev\"; it has train"]);
    assert_eq!(setting.pulled("hub:org/tiny"), ["data/train.jsonl"]);
}

#[test]
fn without_network_the_copy_is_taken_and_said() {
    let mut setting = jsonl();
    let files = setting.pull("hub:org/tiny").unwrap();
    setting.options.endpoint = {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        format!("http://127.0.0.1:{closed}")
    };
    let mut said = Vec::new();
    let found = resolve_data("hub:org/tiny", &setting.options, &mut |event| said.push(format!("{event:?}"))).unwrap();
    assert_eq!(found, files);
    assert!(said.len() == 1 && said[0].contains("FromCache") && said[0].contains("org/tiny@main"), "{said:?}");
    setting.fails("hub:org/tiny:test", &["cannot be reached", "HF_HUB_OFFLINE=1"]);
}

#[test]
fn refusals_name_the_data_set_and_its_page() {
    for (status, code, all, parts) in [
        (403, "GatedRepo", false, ["org/tiny is gated", "accept its licence at", "/datasets/org/tiny, then"]),
        (401, "", true, ["refused the token (401)", "/settings/tokens", "org/tiny"]),
        (
            404,
            "RepoNotFound",
            true,
            ["there is no data set org/tiny at http://127", "check the spelling at", "/datasets/org/tiny"],
        ),
        (403, "", true, ["answered 403", "forbidden", "HF_TOKEN"]),
    ] {
        let setting = jsonl();
        setting.hub.repository().refusal = Some((status, code, all));
        setting.fails("hub:org/tiny", &parts);
    }
    let setting = jsonl();
    setting.fails("hub:org/tiny@v9", &["org/tiny has no revision \"v9\"", "there are main, v1.0"]);
    let error = setting.fails("hub:tiny", &["\"hub:tiny\" cannot be used", "exactly one '/'", "hub:ORG/NAME:test"]);
    assert!(error.is_usage());
}

#[test]
fn a_broken_connection_goes_on() {
    let content = [b"PAR1".as_slice(), &[7; 4000]].concat();
    let setting = setting(&[("data/x.jsonl", b""), ("data/train-00000-of-00001.parquet", &content)]);
    setting.hub.repository().bodies = [Body::Cut(1000), Body::Status(503)].into();
    if cfg!(feature = "parquet") {
        assert_eq!(setting.pulled("hub:org/tiny"), ["data/train-00000-of-00001.parquet"]);
        assert_eq!(fs::read(setting.snapshot().join("data/train-00000-of-00001.parquet")).unwrap(), content);
        let at_storage = setting.hub.take_log().into_iter().filter(|seen| seen.at_storage);
        let ranges: Vec<_> = at_storage.filter_map(|seen| seen.headers.get("range").cloned()).collect();
        assert_eq!(ranges, ["bytes=1000-", "bytes=1000-"]);
    } else {
        let parts =
            ["org/tiny@main has this data as Parquet (1 files", "build it with --features parquet; nothing was pulled"];
        assert!(setting.fails("hub:org/tiny", &parts).is_usage());
        assert_eq!(setting.lines(), ["GET /api/datasets/org/tiny/revision/main"]);
    }
}

#[test]
fn a_data_set_that_cannot_be_read_tells_what_can() {
    let setting = setting(&[("train.csv", b"a,b"), ("README.md", b"#")]);
    let error = setting.fails(
        "hub:org/tiny",
        &["org/tiny@main has no data that can be read, which is .jsonl or .parquet; it has README.md, train.csv"],
    );
    assert!(error.is_usage());
}

#[test]
fn local_files_folders_and_what_is_neither() {
    let setting = jsonl();
    let dir = tempfile::tempdir().unwrap();
    let name = |path: &Path| path.to_str().unwrap().to_string();
    setting.fails(&name(dir.path()), &["has no data that can be read", "no file at all"]);
    let write = |name: &str| {
        fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
        fs::write(dir.path().join(name), "{}").unwrap();
        dir.path().join(name)
    };
    let [b, a] = ["b.jsonl", "a.jsonl"].map(write);
    write("notes.txt");
    write(".hidden/c.jsonl");
    assert_eq!(setting.pull(&name(dir.path())).unwrap(), [a, b.clone()]);
    assert_eq!(setting.pull(&name(&b)).unwrap(), [b]);
    let train = write("data/train-00000-of-00001.jsonl");
    write("data/test-00000-of-00001.jsonl");
    assert_eq!(setting.pull(&name(dir.path())).unwrap()[..], [&*train]);
    fs::remove_file(train).unwrap();
    fs::remove_file(dir.path().join("a.jsonl")).unwrap();
    fs::remove_file(dir.path().join("b.jsonl")).unwrap();
    let error =
        setting.fails(&name(dir.path()), &["has no split \"train\"; it has test; give the file or the folder that"]);
    assert!(error.is_usage() && !error.to_string().contains(":test"), "{error}");
    setting
        .fails("absent.jsonl", &["\"absent.jsonl\" cannot be used: there is no such file or folder; data is a .jsonl"]);
    setting
        .fails("org/tiny", &["there is no such file or folder; if a data set of the Hub is meant, write hub:org/tiny"]);
    assert!(setting.lines().is_empty());
}

#[cfg(feature = "parquet")]
#[test]
fn shards_from_the_hub_are_one_data_set() {
    use candle_finetune::Encoder;
    use candle_finetune::jsonl::Lines;

    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shards = ["plain.parquet", "chat-inside.parquet"].map(|name| here.join("tests/data/parquet").join(name));
    let contents = shards.each_ref().map(|path| fs::read(path).unwrap());
    let setting = setting(&[
        ("data/train-00000-of-00002.parquet", &contents[0]),
        ("data/train-00001-of-00002.parquet", &contents[1]),
        ("data/test-00000-of-00001.parquet", b""),
    ]);
    let files = setting.pull("hub:org/tiny").unwrap();
    assert_eq!(files.len(), 2);
    let checkpoint = here.join("../fixtures/gemma4-dense/checkpoint");
    let config = candle_gemma4::Config::from_folder(&checkpoint).unwrap();
    let encoder = std::sync::Arc::new(Encoder::from_folder(&checkpoint, std::sync::Arc::new(config)).unwrap());
    let [pulled, local] = [&files[..], &shards[..]].map(|paths| Lines::read_all(paths, encoder.clone()).unwrap());
    assert_eq!((pulled.len(), local.len()), (8, 8));
    for index in 0..8 {
        assert_eq!(pulled.sample(index).unwrap(), local.sample(index).unwrap());
    }
}
