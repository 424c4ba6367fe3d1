//! A Hub on loopback: one port is the Hub, another one is the storage that it redirects to. Real paths, headers and
//! status codes; plain HTTP; every request is logged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// What the storage does with one request for a file, in the order of requests; afterwards it behaves well.
#[derive(Debug, Clone)]
pub enum Body {
    /// The first bytes of the answer, then the connection ends.
    Cut(usize),
    /// Status 200 and the whole file, whatever was asked for.
    Whole,
    /// As [`Body::Whole`] but only so many bytes come.
    WholeCut(usize),
    /// A byte in the middle is another one.
    Changed,
    /// A byte more than the file has.
    TooLong,
    /// Status 206 with the part after the one that was asked for.
    OtherPart,
    /// An error of the storage.
    Status(u16),
}

/// A request that came.
#[derive(Debug, Clone)]
pub struct Seen {
    pub at_storage: bool,
    /// Method and path without the query.
    pub line: String,
    pub headers: BTreeMap<String, String>,
}

/// What the Hub has.
#[derive(Debug, Default)]
pub struct Repository {
    /// Whether it is a data set; else a model.
    pub is_data: bool,
    pub name: String,
    pub commit: String,
    pub files: BTreeMap<String, Vec<u8>>,
    /// Files that the storage sends.
    pub large: BTreeSet<String>,
    /// Whether the list of files is so long that the Hub cuts it: then it has none of these, and the tree has all.
    pub long_list: bool,
    /// ETags; a file without an entry has one that is no hash.
    pub etags: BTreeMap<String, String>,
    pub revisions: Vec<String>,
    /// An earlier name that redirects to this one.
    pub earlier_name: Option<String>,
    /// Status and error code for everything but the list of files, or for that as well.
    pub refusal: Option<(u16, &'static str, bool)>,
    /// False for a mirror that sends no error codes.
    pub codes: bool,
    pub bodies: VecDeque<Body>,
    /// Fixed answers by request line: status and headers. `OTHER` is the storage's port.
    pub script: BTreeMap<String, (u16, Vec<(String, String)>)>,
    pub log: Vec<Seen>,
}

/// The two servers; they end with it.
pub struct FakeHub {
    repository: Arc<Mutex<Repository>>,
    ports: [u16; 2],
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl FakeHub {
    /// Serves `org/tiny` with these files; those that end in `.safetensors` come from the storage.
    pub fn start(files: &[(&str, &[u8])]) -> Self {
        let repository = Arc::new(Mutex::new(Repository {
            name: "org/tiny".to_string(),
            commit: "0123abc".to_string(),
            files: files.iter().map(|(name, content)| (name.to_string(), content.to_vec())).collect(),
            large: files
                .iter()
                .map(|(name, _)| name.to_string())
                .filter(|name| name.ends_with(".safetensors"))
                .collect(),
            revisions: vec!["main".to_string(), "v1.0".to_string(), "refs/pr/1".to_string()],
            codes: true,
            ..Repository::default()
        }));
        let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = [0, 1].map(|place| listeners[place].local_addr().unwrap().port());
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for (place, listener) in listeners.into_iter().enumerate() {
            let (repository, stop) = (repository.clone(), stop.clone());
            threads.push(std::thread::spawn(move || {
                for stream in listener.incoming() {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    // A client may leave at any time.
                    let _ = answer(stream.unwrap(), place == 1, ports[1], &repository);
                }
            }));
        }
        Self { repository, ports, stop, threads }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports[0])
    }

    pub fn repository(&self) -> MutexGuard<'_, Repository> {
        self.repository.lock().unwrap()
    }

    /// Takes the requests since the last call.
    pub fn take_log(&self) -> Vec<Seen> {
        std::mem::take(&mut self.repository().log)
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for port in self.ports {
            let _ = TcpStream::connect(("127.0.0.1", port));
        }
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

fn answer(
    mut stream: TcpStream,
    at_storage: bool,
    storage: u16,
    repository: &Mutex<Repository>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut words = first.split(' ');
    let (method, target) = (words.next().unwrap_or_default().to_string(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap().replace("%20", " ").replace("%23", "#");
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((key, value)) = line.split_once(": ") else { break };
        headers.insert(key.to_ascii_lowercase(), value.to_string());
    }
    let range = headers.get("range").map(|range| range["bytes=".len()..].trim_end_matches('-').parse().unwrap());
    let mut repository = repository.lock().unwrap();
    let line = format!("{method} {path}");
    repository.log.push(Seen { at_storage, line: line.clone(), headers });
    let (status, mut head, body) = match repository.script.get(&line) {
        Some((status, head)) => (*status, head.clone(), Vec::new()),
        None if at_storage => repository.storage_answer(&path, range),
        None => repository.hub_answer(&path, storage),
    };
    drop(repository);
    head.push(("connection".to_string(), "close".to_string()));
    if !head.iter().any(|(key, _)| key == "content-length") {
        head.push(("content-length".to_string(), body.len().to_string()));
    }
    let head: String = head.iter().map(|(key, value)| format!("{key}: {value}\r\n")).collect();
    let head = format!("HTTP/1.1 {status} -\r\n{head}\r\n").replace("OTHER", &storage.to_string());
    stream.write_all(head.as_bytes())?;
    if method != "HEAD" {
        stream.write_all(&body)?;
    }
    stream.flush()
}

type Answer = (u16, Vec<(String, String)>, Vec<u8>);

fn reply(status: u16, head: &[(&str, &str)], body: impl Into<Vec<u8>>) -> Answer {
    (status, head.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(), body.into())
}

impl Repository {
    fn etag(&self, file: &str) -> String {
        let plain = |sign: char| if matches!(sign, '/' | ' ' | '#') { '-' } else { sign };
        self.etags
            .get(file)
            .cloned()
            .unwrap_or_else(|| format!("tag-of-{}", file.chars().map(plain).collect::<String>()))
    }

    fn error(&self, status: u16, code: &str) -> Answer {
        let head = [("x-error-code", code)];
        reply(status, if self.codes && !code.is_empty() { &head } else { &[] }, "{\"error\": \"no\"}")
    }

    fn hub_answer(&self, path: &str, storage: u16) -> Answer {
        if let Some(rest) = self.earlier_name.as_ref().and_then(|name| path.strip_prefix(&format!("/{name}/"))) {
            return reply(307, &[("location", &format!("/{}/{rest}", self.name))], "");
        }
        let (kind, prefix) = if self.is_data { ("datasets", "/datasets") } else { ("models", "") };
        let api = format!("/api/{kind}/{}/", self.name);
        let resolve = format!("{prefix}/{}/resolve/", self.name);
        let cached = format!("/api/resolve-cache/{kind}/{}/{}/", self.name, self.commit);
        if let Some((status, code, _)) = self.refusal.filter(|(.., all)| *all || !path.starts_with(&api)) {
            return self.error(status, code);
        }
        if let Some(page) = path.strip_prefix(&format!("{api}tree/{}", self.commit)) {
            return self.tree(&api, page);
        }
        if let Some(rest) = path.strip_prefix(&api) {
            return match rest.strip_prefix("revision/").map(|revision| revision.replace("%2F", "/")) {
                Some(revision) if self.knows(&revision) => reply(200, &[], self.list()),
                None if rest == "refs" => reply(200, &[], self.refs()),
                _ => self.error(404, "RevisionNotFound"),
            };
        }
        if let Some(file) = path.strip_prefix(&cached) {
            return match self.files.get(file) {
                Some(content) => {
                    let etag = format!("\"{}\"", self.etag(file));
                    reply(200, &[("etag", &etag), ("x-repo-commit", &self.commit)], content.clone())
                }
                None => self.error(404, "EntryNotFound"),
            };
        }
        let Some((revision, file)) = path.strip_prefix(&resolve).and_then(|rest| rest.split_once('/')) else {
            return self.error(404, "RepoNotFound");
        };
        match self.files.get(file) {
            None => self.error(404, "EntryNotFound"),
            Some(_) if !self.knows(revision) => self.error(404, "RevisionNotFound"),
            Some(content) if self.large.contains(file) => {
                let location = format!("http://127.0.0.1:{storage}/blob/{file}?signature=secret");
                let (etag, size) = (format!("\"{}\"", self.etag(file)), content.len().to_string());
                let head =
                    [("x-linked-etag", etag.as_str()), ("x-linked-size", &size), ("x-repo-commit", &self.commit)];
                reply(302, &[&head[..], &[("location", &location)]].concat(), "")
            }
            Some(_) => {
                reply(307, &[("location", &format!("{cached}{file}").replace(' ', "%20").replace('#', "%23"))], "")
            }
        }
    }

    fn knows(&self, revision: &str) -> bool {
        revision == self.commit || self.revisions.iter().any(|known| known == revision)
    }

    /// One file a page; the page's number is a part of the path.
    fn tree(&self, api: &str, page: &str) -> Answer {
        let page: usize = page.trim_start_matches('/').parse().unwrap_or(0);
        let (name, content) = self.files.iter().nth(page).unwrap();
        let size = content.len();
        let body = format!(
            "[{{\"type\": \"directory\", \"path\": \"d\", \"oid\": \"1\", \"size\": 0}}, {{\"type\": \"file\", \"path\": \"{name}\", \
             \"oid\": \"2\", \"size\": {size}, \"lfs\": {{\"oid\": \"3\", \"size\": {size}, \"pointerSize\": 9}}}}]"
        );
        let next = format!("<{api}tree/{}/{}?cursor=x>; rel=\"next\"", self.commit, page + 1);
        let head = [("link", next.as_str())];
        reply(200, if page + 1 < self.files.len() { &head } else { &[] }, body)
    }

    fn list(&self) -> String {
        if self.long_list {
            let files: Vec<String> = (0..50_000).map(|n| format!("{{\"rfilename\": \"images/{n}.png\"}}")).collect();
            return format!("{{\"sha\": \"{}\", \"siblings\": [{}]}}", self.commit, files.join(", "));
        }
        let files = self
            .files
            .iter()
            .map(|(name, content)| format!("{{\"rfilename\": \"{name}\", \"size\": {}}}", content.len()));
        format!("{{\"sha\": \"{}\", \"siblings\": [{}]}}", self.commit, files.collect::<Vec<_>>().join(", "))
    }

    fn refs(&self) -> String {
        let names =
            self.revisions.iter().map(|name| format!("{{\"name\": \"{name}\"}}")).collect::<Vec<_>>().join(", ");
        format!("{{\"branches\": [{names}], \"converts\": [], \"tags\": []}}")
    }

    fn storage_answer(&mut self, path: &str, range: Option<usize>) -> Answer {
        let file = path.strip_prefix("/blob/").unwrap_or(path);
        // A fixed answer of the Hub may name the place of the one large file as it likes.
        let named = self.files.get(file).or_else(|| self.files.get(self.large.first()?));
        let Some(content) = named.cloned() else { return self.error(404, "") };
        let size = content.len();
        let honest = |start: usize, content: &[u8]| {
            let range = format!("bytes {start}-{}/{size}", size - 1);
            match range_of(start, size) {
                false => reply(416, &[], ""),
                true if start == 0 => reply(200, &[], content),
                true => reply(206, &[("content-range", &range)], &content[start..]),
            }
        };
        let start = range.unwrap_or(0);
        let cut = |mut answer: Answer, count: usize| {
            answer.1.push(("content-length".to_string(), answer.2.len().to_string()));
            answer.2.truncate(count);
            answer
        };
        match self.bodies.pop_front() {
            None => honest(start, &content),
            Some(Body::Cut(count)) => cut(honest(start, &content), count),
            Some(Body::Whole) => reply(200, &[], content),
            Some(Body::WholeCut(count)) => cut(reply(200, &[], content), count),
            Some(Body::Changed) => {
                let mut changed = content;
                changed[size / 2] ^= 1;
                honest(start, &changed)
            }
            Some(Body::TooLong) => reply(200, &[], [content, vec![0]].concat()),
            Some(Body::OtherPart) => honest(start + 100, &content),
            Some(Body::Status(status)) => reply(status, &[], "busy"),
        }
    }
}

fn range_of(start: usize, size: usize) -> bool {
    start < size || (start == 0 && size == 0)
}
