//! Models by name, against a Hub on loopback.

mod fake_hub;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_finetune::hub::{HubError, HubOptions, PullEvent, resolve_model};
use fake_hub::{Body, FakeHub};
use tempfile::TempDir;

const CONFIG: &[u8] = b"{\"model_type\":\"gemma4\"}\n";
const TOKENIZER: &[u8] = b"{}";
const WEIGHTS: &str = "model.safetensors";
/// By `git hash-object` and `sha256sum`.
const CONFIG_HASH: &str = "b5fdf4d87b9ddf4a60a141b927c1b8c46686df09";
const WEIGHTS_HASH: &str = "736ebd75fc61ad316a1a32b0a614da811f3ba05b0493c8e56d903a8dbc16bf00";

fn weights() -> Vec<u8> {
    (0..4096_u32).map(|place| ((place * place + 7 * place) % 251) as u8).collect()
}

/// A Hub with one model whose hashes are real, an empty cache, and settings for both.
struct Setting {
    hub: FakeHub,
    dir: TempDir,
    options: HubOptions,
}

fn setting() -> Setting {
    let weights = weights();
    let files = [
        ("config.json", CONFIG),
        ("tokenizer.json", TOKENIZER),
        (WEIGHTS, &weights),
        ("README.md", b"#"),
        ("model.gguf", b"x"),
        ("additional_chat_templates/tool.jinja", b"t"),
    ];
    let hub = FakeHub::start(&files);
    let hashes = [("config.json", CONFIG_HASH), (WEIGHTS, WEIGHTS_HASH)];
    hub.repository().etags = hashes.map(|(file, hash)| (file.to_string(), hash.to_string())).into();
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
    fn pull(&self, spec: &str) -> Result<PathBuf, HubError> {
        resolve_model(spec, &self.options, &mut |_| ())
    }

    fn fails(&self, spec: &str, parts: &[&str]) -> HubError {
        let error = self.pull(spec).unwrap_err();
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        assert!(!text.contains("hf_test") && !text.contains("secret"), "{text}");
        error
    }

    /// The restarts and resumes of a pull, and what it came to.
    fn notes(&self) -> (Vec<String>, Result<PathBuf, HubError>) {
        let mut notes = Vec::new();
        let result = resolve_model("org/tiny", &self.options, &mut |event| match event {
            PullEvent::Resumed { from, .. } => notes.push(format!("resumed {from}")),
            PullEvent::Restarted { .. } => notes.push("restarted".to_string()),
            _ => {}
        });
        (notes, result)
    }

    fn lines(&self) -> Vec<String> {
        self.hub.take_log().into_iter().map(|seen| seen.line).collect()
    }

    fn bodies(&self, bodies: impl IntoIterator<Item = Body>) {
        self.hub.repository().bodies = bodies.into_iter().collect();
    }

    fn blobs(&self) -> PathBuf {
        self.dir.path().join("hub/models--org--tiny/blobs")
    }

    fn blob(&self) -> PathBuf {
        self.blobs().join(WEIGHTS_HASH)
    }

    fn part(&self) -> PathBuf {
        self.blobs().join(format!("{WEIGHTS_HASH}.incomplete"))
    }

    fn assert_whole(&self, folder: &Path) {
        assert_eq!(fs::read(folder.join(WEIGHTS)).unwrap(), weights());
        assert_eq!(fs::read(folder.join("config.json")).unwrap(), CONFIG);
        let left: Vec<_> = fs::read_dir(self.blobs()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| !name.to_string_lossy().contains("incomplete")), "{left:?}");
    }
}

#[test]
fn a_whole_pull_lies_as_python_lays_it_and_a_second_one_asks_for_the_commit_only() {
    let setting = setting();
    let folder = setting.pull("org/tiny").unwrap();
    let model = setting.dir.path().join("hub/models--org--tiny");
    assert_eq!(folder, model.join("snapshots/0123abc"));
    setting.assert_whole(&folder);
    assert_eq!(fs::read_to_string(model.join("refs/main")).unwrap(), "0123abc");
    assert_eq!(fs::read_link(folder.join(WEIGHTS)).unwrap(), Path::new("../../blobs").join(WEIGHTS_HASH));
    assert_eq!(fs::read_link(folder.join("config.json")).unwrap(), Path::new("../../blobs").join(CONFIG_HASH));
    assert_eq!(fs::read(folder.join("additional_chat_templates/tool.jinja")).unwrap(), b"t");
    assert!(!folder.join("README.md").exists() && !folder.join("model.gguf").exists());
    assert_eq!(setting.lines().iter().filter(|line| line.starts_with("GET /blob/")).count(), 1);

    assert_eq!(setting.pull("org/tiny").unwrap(), folder);
    assert_eq!(setting.lines(), ["GET /api/models/org/tiny/revision/main"]);
    // Another name of the same commit: nothing new to pull, and the name is known offline afterwards.
    assert_eq!(setting.pull("org/tiny@refs/pr/1").unwrap(), folder);
    assert_eq!(setting.lines(), ["GET /api/models/org/tiny/revision/refs%2Fpr%2F1"]);
    assert_eq!(fs::read_to_string(model.join("refs/refs/pr/1")).unwrap(), "0123abc");
    assert_eq!(setting.pull("org/tiny@0123abc").unwrap(), folder);
    assert!(!model.join("refs/0123abc").exists());
}

#[test]
fn a_new_commit_pulls_what_changed() {
    let setting = setting();
    let first = setting.pull("org/tiny").unwrap();
    setting.lines();
    {
        let mut repository = setting.hub.repository();
        repository.commit = "4567def".to_string();
        repository.files.insert("tokenizer.json".to_string(), b"{\"a\":1}".to_vec());
        repository.etags.insert("tokenizer.json".to_string(), "second".to_string());
    }
    let second = setting.pull("org/tiny").unwrap();
    assert!(first.ends_with("0123abc") && second.ends_with("4567def"));
    setting.assert_whole(&second);
    assert_eq!(fs::read(first.join("tokenizer.json")).unwrap(), TOKENIZER);
    let lines = setting.lines();
    let gets: Vec<_> = lines.iter().filter(|line| line.starts_with("GET") && line.contains("resolve/")).collect();
    assert_eq!(gets, ["GET /org/tiny/resolve/4567def/tokenizer.json"]);
}

#[test]
fn shards_are_those_of_the_index() {
    let setting = setting();
    {
        let mut repository = setting.hub.repository();
        let index = r#"{"weight_map": {"a": "b-1.safetensors", "b": "b-2.safetensors"}}"#;
        repository.files.insert("model.safetensors.index.json".to_string(), index.into());
        repository.files.insert("b-1.safetensors".to_string(), b"1".to_vec());
    }
    let error = setting.fails("org/tiny", &["org/tiny at main has no b-2.safetensors", "never uploaded"]);
    assert!(error.is_usage());
    setting.hub.repository().files.insert("b-2.safetensors".to_string(), b"".to_vec());
    let folder = setting.pull("org/tiny").unwrap();
    assert_eq!(fs::read(folder.join("b-1.safetensors")).unwrap(), b"1");
    assert_eq!(fs::read(folder.join("b-2.safetensors")).unwrap(), b"");
    assert!(!folder.join(WEIGHTS).exists());
}

#[test]
fn an_existing_folder_wins_and_anything_else_is_told_both_ways() {
    let setting = setting();
    let folder = setting.dir.path().join("my-model");
    fs::create_dir(&folder).unwrap();
    assert_eq!(setting.pull(folder.to_str().unwrap()).unwrap(), folder);
    let file = folder.join("x");
    fs::write(&file, "").unwrap();
    setting.fails(file.to_str().unwrap(), &["neither an existing folder nor", "it is a file"]);
    let error =
        setting.fails("gemma", &["\"gemma\" is neither an existing folder nor", "org/name@revision", "one '/'"]);
    assert!(error.is_usage() && setting.lines().is_empty());
    let without = HubOptions { cache: None, ..setting.options.clone() };
    let error = resolve_model("org/tiny", &without, &mut |_| ()).unwrap_err();
    assert!(error.to_string().contains("set HF_HOME"), "{error}");
    for endpoint in ["huggingface.co", "ftp://x", ""] {
        let wrong = HubOptions { endpoint: endpoint.to_string(), ..setting.options.clone() };
        let error = resolve_model("org/tiny", &wrong, &mut |_| ()).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("HF_ENDPOINT"), "{error}");
    }
}

/// The exchange of a mirror, as reported: a relative redirect before the ETag, and a storage on another port.
#[test]
fn a_mirror_redirects_and_the_token_stays_at_the_hub() {
    let setting = setting();
    let text = include_str!("data/mirror-redirect/exchange.json");
    let exchange: Vec<serde_json::Value> = serde_json::from_str(text).unwrap();
    for answer in exchange.iter().filter(|answer| answer["request"].is_string()) {
        let headers = answer["headers"].as_object().unwrap();
        let headers = headers.iter().map(|(key, value)| (key.clone(), value.as_str().unwrap().to_string()));
        let line = answer["request"].as_str().unwrap().replace("/main/", "/0123abc/");
        let status = u16::try_from(answer["status"].as_u64().unwrap()).unwrap();
        let headers: Vec<_> = headers.collect();
        if status >= 300 {
            setting.hub.repository().script.insert(line.replace("HEAD", "GET"), (status, headers.clone()));
        }
        setting.hub.repository().script.insert(line, (status, headers));
    }
    let folder = setting.pull("org/tiny").unwrap();
    assert!(folder.ends_with("snapshots/0123abc"));
    assert_eq!(fs::read_link(folder.join("config.json")).unwrap(), Path::new("../../blobs/e1"));
    assert_eq!(fs::read_link(folder.join(WEIGHTS)).unwrap(), Path::new("../../blobs/sha9"));
    setting.assert_whole(&folder);
    let log = setting.hub.take_log();
    assert!(log.iter().any(|seen| seen.line == "GET /blob/9" && seen.at_storage));
    assert!(log.iter().any(|seen| seen.line.contains("/api/resolve-cache/")));
    for seen in log {
        let token = seen.headers.get("authorization").map(String::as_str);
        assert_eq!(token, (!seen.at_storage).then_some("Bearer hf_test"), "{}", seen.line);
    }
}

#[test]
fn a_renamed_repository_is_followed() {
    let setting = setting();
    setting.hub.repository().earlier_name = Some("old/name".to_string());
    // The list of files of the old name redirects too.
    let api = "GET /api/models/old/name/revision/main".to_string();
    let location = ("location".to_string(), "/api/models/org/tiny/revision/main".to_string());
    setting.hub.repository().script.insert(api, (307, vec![location]));
    let folder = setting.pull("old/name").unwrap();
    assert!(folder.ends_with("models--old--name/snapshots/0123abc"));
    assert_eq!(fs::read(folder.join(WEIGHTS)).unwrap(), weights());
}

/// The four exchanges as reported: cut and then sent in whole, a byte short, a byte changed.
#[test]
fn a_server_that_ignores_ranges_or_sends_too_little() {
    let text = include_str!("data/range-ignored/exchange.json");
    let exchange: Vec<serde_json::Value> = serde_json::from_str(text).unwrap();
    let sends: Vec<&str> = exchange.iter().map(|answer| answer["send"].as_str().unwrap()).collect();
    let body = |send: &str| match send {
        "first 1000 of 4096 bytes, then close" => Body::Cut(1000),
        "all 4096 bytes" => Body::Whole,
        "4095 bytes, then close cleanly" => Body::WholeCut(4095),
        "right length, one byte changed" => Body::Changed,
        other => panic!("{other}"),
    };
    let one = setting();
    one.bodies([body(sends[0]), body(sends[1])]);
    let (notes, folder) = one.notes();
    assert_eq!(notes, ["restarted"]);
    one.assert_whole(&folder.unwrap());
    let ranges = one.hub.take_log().into_iter().filter(|seen| seen.at_storage);
    let ranges: Vec<_> = ranges.map(|seen| seen.headers.get("range").cloned()).collect();
    assert_eq!(ranges, [None, Some("bytes=1000-".to_string())]);

    let two = setting();
    two.bodies(vec![body(sends[2]); 9]);
    let error = two.fails("org/tiny", &["model.safetensors: 4095 bytes came of 4096", "run again"]);
    assert!(!error.is_usage() && !two.blob().exists() && two.part().exists());
    assert!(!two.dir.path().join("hub/models--org--tiny/refs/main").exists());

    let three = setting();
    three.bodies([body(sends[3])]);
    three.fails("org/tiny", &["right length but not the content", "SHA-256", WEIGHTS_HASH, "deleted"]);
    assert!(!three.blob().exists() && !three.part().exists());
    three.assert_whole(&three.pull("org/tiny").unwrap());
}

#[test]
fn a_changed_small_file_is_noticed_by_its_git_hash() {
    let setting = setting();
    let changed = CONFIG.to_ascii_uppercase();
    setting.hub.repository().files.insert("config.json".to_string(), changed);
    setting.fails("org/tiny", &["config.json", "git hash", CONFIG_HASH]);
    assert!(!setting.blobs().join(CONFIG_HASH).exists());
}

#[test]
fn a_broken_connection_goes_on_within_a_run() {
    let setting = setting();
    setting.bodies([Body::Cut(1000), Body::Status(503), Body::Cut(500), Body::Cut(0)]);
    let (notes, folder) = setting.notes();
    assert_eq!(notes, ["resumed 1000", "resumed 1500", "resumed 1500"]);
    setting.assert_whole(&folder.unwrap());
}

#[test]
fn an_interrupted_run_goes_on_in_the_next_one() {
    let setting = setting();
    setting.bodies([Body::Cut(1000), Body::Cut(0), Body::Cut(0), Body::Cut(0)]);
    setting.fails("org/tiny", &["1000 bytes came of 4096", "in 3 attempts"]);
    assert_eq!(fs::read(setting.part()).unwrap(), weights()[..1000]);
    setting.lines();
    let (notes, folder) = setting.notes();
    assert_eq!(notes, ["resumed 1000"]);
    setting.assert_whole(&folder.unwrap());
    // Small files were there already.
    assert!(setting.lines().iter().all(|line| !line.contains("config.json")));
}

#[test]
fn what_an_earlier_run_left_is_not_trusted() {
    for (left, notes) in [
        (vec![7; 1000], &["resumed 1000", "restarted"][..]),
        (vec![7; 4096], &["restarted"]),
        (vec![7; 5000], &["restarted"]),
        (weights(), &[]),
    ] {
        let setting = setting();
        fs::create_dir_all(setting.blobs()).unwrap();
        fs::write(setting.part(), left).unwrap();
        let (found, folder) = setting.notes();
        assert_eq!(found, notes);
        setting.assert_whole(&folder.unwrap());
    }
    // A blob of the wrong length under its final name, as another program may leave it.
    let setting = setting();
    fs::create_dir_all(setting.blobs()).unwrap();
    fs::write(setting.blob(), &weights()[..4000]).unwrap();
    setting.assert_whole(&setting.pull("org/tiny").unwrap());
}

#[test]
fn a_server_that_sends_too_much() {
    let setting = setting();
    setting.bodies(vec![Body::TooLong; 3]);
    let error =
        setting.fails("org/tiny", &["model.safetensors: the server sent more than the file has", "HF_ENDPOINT"]);
    assert!(!error.is_usage() && !setting.blob().exists());
    setting.bodies([Body::TooLong]);
    setting.assert_whole(&setting.pull("org/tiny").unwrap());
}

#[test]
fn a_storage_that_sends_another_part_or_refuses() {
    let setting = setting();
    setting.bodies([Body::Cut(1000), Body::OtherPart]);
    let (notes, folder) = setting.notes();
    assert_eq!(notes, ["restarted"]);
    setting.assert_whole(&folder.unwrap());

    // The address of the storage carries a signature, which no message shows; the token has no part in it.
    let setting = self::setting();
    for (status, part) in [(403, "access is forbidden"), (404, "try again later"), (416, "try again later")] {
        setting.bodies([Body::Status(status)]);
        setting.fails("org/tiny", &["/blob/model.safetensors answered", &status.to_string(), part]);
    }
    fs::write(setting.part(), &weights()[..1000]).unwrap();
    setting.bodies([Body::Status(416)]);
    let (notes, folder) = setting.notes();
    assert_eq!(notes, ["restarted"]);
    setting.assert_whole(&folder.unwrap());
}

#[test]
fn refusals_say_what_to_do() {
    for (status, code, all, token, parts) in [
        (401, "GatedRepo", false, false, ["is gated: log in, accept its licence at", "/org/tiny", "set HF_TOKEN"]),
        (403, "GatedRepo", false, true, ["is gated: log in, accept its licence at", "/org/tiny", "has no access yet"]),
        (
            401,
            "RepoNotFound",
            true,
            false,
            ["there is no folder org/tiny", "check the spelling", "private set HF_TOKEN"],
        ),
        (404, "RepoNotFound", true, true, ["there is no folder org/tiny", "check the spelling", "the token in use"]),
        (401, "", true, true, ["refused the token (401)", "/settings/tokens", "set HF_TOKEN"]),
        (403, "", true, true, ["answered 403", "forbidden", "HF_TOKEN"]),
        (429, "", true, true, ["answered 429", "too many requests", "HF_TOKEN"]),
        (500, "", true, true, ["answered 500", "try again later", "is kept"]),
    ] {
        let mut setting = setting();
        setting.hub.repository().refusal = Some((status, code, all));
        setting.options.token = token.then(|| "hf_test".to_string());
        let error = setting.fails("org/tiny", &parts);
        assert_eq!(error.is_usage(), status < 429 && !(status == 403 && code.is_empty()), "{error}");
    }
}

#[test]
fn a_revision_or_a_file_that_does_not_exist() {
    for codes in [true, false] {
        let setting = setting();
        setting.hub.repository().codes = codes;
        let parts = ["org/tiny has no revision \"v2\"", "there are main, v1.0, refs/pr/1", "leave @v2 out"];
        assert!(setting.fails("org/tiny@v2", &parts).is_usage());
        setting
            .fails("org/missing", &["there is no folder org/missing, and no model of this name at http://127.0.0.1"]);
        let line = "HEAD /org/tiny/resolve/0123abc/tokenizer.json".to_string();
        let code = codes.then(|| ("x-error-code".to_string(), "EntryNotFound".to_string()));
        setting.hub.repository().script.insert(line, (404, code.into_iter().collect()));
        setting.fails("org/tiny", &["org/tiny at main has no file tokenizer.json", "its own list"]);
    }
}

#[test]
fn a_repository_that_is_no_model() {
    let setting = setting();
    setting.hub.repository().files.retain(|name, _| !name.ends_with(".safetensors") && name != "tokenizer.json");
    let parts =
        ["org/tiny at main has no tokenizer.json, no model.safetensors; it has", "model.gguf", "not a conversion"];
    assert!(setting.fails("org/tiny", &parts).is_usage());
}

#[test]
fn offline_asks_nobody() {
    let mut setting = setting();
    setting.options.offline = true;
    let error =
        setting.fails("org/tiny", &["offline", "org/tiny at main: it was never pulled", "unset HF_HUB_OFFLINE"]);
    assert!(error.is_usage());
    setting.options.offline = false;
    let folder = setting.pull("org/tiny").unwrap();
    setting.lines();
    setting.options.offline = true;
    assert_eq!(setting.pull("org/tiny").unwrap(), folder);
    assert_eq!(setting.pull("org/tiny@0123abc").unwrap(), folder);
    setting.fails("org/tiny@v1.0", &["org/tiny at v1.0: it was never pulled"]);
    // Python's library pulls single files too: such a folder is no model.
    fs::remove_file(setting.blob()).unwrap();
    setting.fails("org/tiny", &["org/tiny at main: model.safetensors is missing", "copy the folder"]);
    assert!(setting.lines().is_empty());
}

#[test]
fn without_network_a_whole_copy_is_taken_and_said() {
    let mut setting = setting();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = std::mem::replace(&mut setting.options.endpoint, format!("http://127.0.0.1:{closed}"));
    let error = setting.fails("org/tiny", &["cannot be reached", "check the network", "HF_HUB_OFFLINE=1"]);
    assert!(!error.is_usage());
    let gone = std::mem::replace(&mut setting.options.endpoint, endpoint);
    let folder = setting.pull("org/tiny").unwrap();
    setting.options.endpoint = gone;
    let mut said = Vec::new();
    let found = resolve_model("org/tiny", &setting.options, &mut |event| said.push(format!("{event:?}")));
    assert_eq!(found.unwrap(), folder);
    assert!(said.len() == 1 && said[0].contains("FromCache") && said[0].contains("0123abc"), "{said:?}");
    // An answer that is about the model is no outage.
    setting.options.endpoint = setting.hub.endpoint();
    setting.hub.repository().refusal = Some((401, "", true));
    setting.fails("org/tiny", &["refused the token"]);
}

#[test]
fn answers_that_are_not_the_hubs() {
    let header = |key: &str, value: &str| (key.to_string(), value.to_string());
    let head = format!("HEAD /org/tiny/resolve/0123abc/{WEIGHTS}");
    let list = "GET /api/models/org/tiny/revision/main";
    for (line, status, headers, part) in [
        (head.as_str(), 200, vec![], "ETag of model.safetensors"),
        (&head, 200, vec![header("etag", "\"../../../x\"")], "ETag of model.safetensors"),
        (&head, 200, vec![header("etag", "\"..\"")], "ETag of model.safetensors"),
        (&head, 302, vec![header("location", "/org/tiny/resolve/0123abc/model.safetensors")], "redirects"),
        (&head, 302, vec![header("location", "http://[")], "a redirect to"),
        (list, 200, vec![], "EOF"),
    ] {
        let setting = setting();
        setting.hub.repository().script.insert(line.to_string(), (status, headers));
        setting.fails("org/tiny", &["does not answer as the Hub does", part]);
    }
    let setting = setting();
    setting.hub.repository().commit = "../up".to_string();
    setting.fails("org/tiny", &["\"../up\" is no commit"]);
}

#[test]
fn two_pulls_at_once_share_one_download() {
    let setting = setting();
    let folders: Vec<PathBuf> = std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4).map(|_| scope.spawn(|| setting.pull("org/tiny").unwrap())).collect();
        pulls.into_iter().map(|pull| pull.join().unwrap()).collect()
    });
    assert!(folders.iter().all(|folder| *folder == folders[0]));
    setting.assert_whole(&folders[0]);
    assert_eq!(setting.lines().iter().filter(|line| line.starts_with("GET /blob/")).count(), 1);
}

/// Writing to this device fails as a full disk does.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_says_so() {
    let setting = setting();
    fs::create_dir_all(setting.blobs()).unwrap();
    std::os::unix::fs::symlink("/dev/full", setting.part()).unwrap();
    let error = setting.fails("org/tiny", &["no space is left", "4096 bytes to go", "another disk"]);
    assert!(!error.is_usage() && !setting.blob().exists());
}
