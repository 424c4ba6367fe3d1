//! Requests to the Hub: redirects, the token, and what an answer means.

use std::io::Read;
use std::time::Duration;

use serde::Deserialize;
use ureq::{Agent, Response};
use url::Url;

use super::error::{HubError, Result};
use super::options::HubOptions;
use super::spec::{Kind, RepoName, is_plain};

/// Redirects that are followed for one request.
const MAX_REDIRECTS: usize = 10;
/// A list of files of this length may be cut; the tree tells all, page by page.
const LONG_LIST: usize = 50_000;
/// Pages of a tree that are asked for; no repository has as many.
const MAX_PAGES: usize = 10_000;
/// Longest list or error text that is read, in bytes.
const MAX_TEXT: u64 = 32 << 20;
/// Characters of an error text that a message shows.
const SHOWN_TEXT: usize = 200;

/// Asks the Hub about one repository. Not `Debug`: it holds the token.
pub(super) struct Client<'a> {
    agent: Agent,
    endpoint: Url,
    token: Option<&'a str>,
    name: &'a RepoName,
}

/// Which redirects are followed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Follow {
    /// Those that stay at the Hub: a renamed repository, a mirror's own paths. The one that leaves for the storage is the
    /// answer, since only the Hub tells commit and hash.
    AtHub,
    All,
}

/// What the Hub knows of a file before it is sent.
#[derive(Debug)]
pub(super) struct FileHead {
    /// Name of the blob: a SHA-256 of large files, a git hash of small ones, anything at a mirror.
    pub(super) etag: String,
    /// Bytes of the file, if told.
    pub(super) size: Option<u64>,
}

/// What the Hub knows of a revision.
#[derive(Debug, Deserialize)]
pub(super) struct Info {
    /// The commit.
    #[serde(rename = "sha")]
    pub(super) commit: String,
    /// All files.
    #[serde(default)]
    pub(super) siblings: Vec<Listed>,
}

/// A file in the list of a revision.
#[derive(Debug, Deserialize)]
pub(super) struct Listed {
    /// Its path.
    #[serde(rename = "rfilename")]
    pub(super) path: String,
    /// Its bytes.
    pub(super) size: Option<u64>,
    /// Its git hash.
    #[serde(rename = "blobId")]
    pub(super) git_hash: Option<String>,
    /// Of a large file.
    pub(super) lfs: Option<Lfs>,
}

/// A large file in the list of a revision.
#[derive(Debug, Deserialize)]
pub(super) struct Lfs {
    /// Hash of its content.
    pub(super) sha256: Option<String>,
}

/// A file or folder in a page of the tree of a revision.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    size: Option<u64>,
    /// Its git hash.
    oid: Option<String>,
    lfs: Option<EntryLfs>,
}

#[derive(Deserialize)]
struct EntryLfs {
    /// Hash of its content.
    oid: Option<String>,
}

/// Names in the list of branches and tags.
#[derive(Deserialize)]
struct Refs {
    #[serde(default)]
    branches: Vec<Ref>,
    #[serde(default)]
    tags: Vec<Ref>,
}

#[derive(Deserialize)]
struct Ref {
    name: String,
}

impl<'a> Client<'a> {
    pub(super) fn new(options: &'a HubOptions, name: &'a RepoName) -> Result<Self> {
        let given = &options.endpoint;
        let wrong = |reason: String| HubError::Address { what: "HF_ENDPOINT", given: given.clone(), reason };
        let endpoint = Url::parse(given).map_err(|error| wrong(error.to_string()))?;
        if !matches!(endpoint.scheme(), "http" | "https") || !endpoint.has_host() {
            return Err(wrong("it is no http or https address".to_string()));
        }
        let mut agent = ureq::builder()
            .redirects(0)
            .timeout_connect(options.timeout)
            .timeout_read(options.timeout)
            .timeout_write(options.timeout)
            .user_agent(concat!("candle-finetune/", env!("CARGO_PKG_VERSION")));
        if let Some(proxy) = &options.proxy {
            let what = "the proxy";
            let wrong =
                |error: ureq::Error| HubError::Address { what, given: proxy.clone(), reason: error.to_string() };
            agent = agent.proxy(ureq::Proxy::new(proxy).map_err(wrong)?);
        }
        Ok(Self { agent: agent.build(), endpoint, token: options.token.as_deref(), name })
    }

    /// Commit and files of the revision.
    pub(super) fn info(&self) -> Result<Info> {
        let RepoName { kind, repo, .. } = self.name;
        let path = format!("api/{}/{repo}/revision/{}?blobs=true", kind.plural(), self.name.revision_segment());
        let url = self.url(&path)?;
        let mut info: Info = match self.json(&url) {
            Err(error @ (HubError::RepoNotFound { .. } | HubError::RevisionNotFound { .. })) => {
                // Not every mirror says which of the two is missing, and no Hub says which revisions there are.
                let names = self.refs().ok_or(error)?;
                let (repo, revision) = (self.name.repo.clone(), self.name.revision.clone());
                return Err(HubError::RevisionNotFound { repo, revision, names });
            }
            other => other?,
        };
        if info.commit.is_empty() || !info.commit.chars().all(|sign| sign.is_ascii_alphanumeric()) {
            return Err(answer(&url, format!("{:?} is no commit", info.commit)));
        }
        if info.siblings.len() >= LONG_LIST {
            info.siblings = self.tree(&info.commit)?;
        }
        Ok(info)
    }

    /// All files of a commit, in as many requests as the Hub wants for them.
    fn tree(&self, commit: &str) -> Result<Vec<Listed>> {
        let RepoName { kind, repo, .. } = self.name;
        let mut url = self.url(&format!("api/{}/{repo}/tree/{commit}?recursive=true&expand=false", kind.plural()))?;
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let (page, next) = self.page::<Vec<Entry>>(&url)?;
            files.extend(page.into_iter().filter(|entry| entry.kind == "file").map(|entry| Listed {
                path: entry.path,
                size: entry.size,
                git_hash: entry.oid,
                lfs: entry.lfs.map(|lfs| Lfs { sha256: lfs.oid }),
            }));
            match next {
                None => return Ok(files),
                Some(next) => url = url.join(&next).map_err(|_| answer(&url, format!("a next page at {next:?}")))?,
            }
        }
        Err(answer(&url, format!("a tree of more than {MAX_PAGES} pages")))
    }

    /// Names of branches and tags; `None` if the Hub does not tell.
    fn refs(&self) -> Option<Vec<String>> {
        let url = self.url(&format!("api/{}/{}/refs", self.name.kind.plural(), self.name.repo)).ok()?;
        let refs: Refs = self.json(&url).ok()?;
        Some(refs.branches.into_iter().chain(refs.tags).map(|found| found.name).collect())
    }

    /// Hash and size of a file.
    pub(super) fn head(&self, commit: &str, file: &str) -> Result<FileHead> {
        let (response, url) = self.send("HEAD", self.file_url(commit, file)?, None, Follow::AtHub, Some(file))?;
        let tag = response.header("x-linked-etag").or_else(|| response.header("etag"));
        let etag = tag.map(|tag| tag.trim_start_matches("W/").trim_matches('"').to_string());
        let Some(etag) = etag.filter(|etag| !etag.is_empty() && etag.chars().all(is_plain) && !etag.starts_with('.'))
        else {
            return Err(answer(&url, format!("the header ETag of {file} is {tag:?}")));
        };
        let own_size = (response.status() < 300).then(|| response.header("content-length")).flatten();
        let size = response.header("x-linked-size").or(own_size).and_then(|bytes| bytes.trim().parse().ok());
        Ok(FileHead { etag, size })
    }

    /// The bytes of a file from `start` on, from wherever the Hub sends one to. A server may ignore `start` (status 200).
    pub(super) fn get(&self, commit: &str, file: &str, start: u64) -> Result<(Response, Url)> {
        let range = (start > 0).then(|| format!("bytes={start}-"));
        self.send("GET", self.file_url(commit, file)?, range.as_deref(), Follow::All, Some(file))
    }

    fn json<T: for<'de> Deserialize<'de>>(&self, url: &Url) -> Result<T> {
        self.page(url).map(|(value, _)| value)
    }

    /// An answer, and the address of the next page of it if there is one.
    fn page<T: for<'de> Deserialize<'de>>(&self, url: &Url) -> Result<(T, Option<String>)> {
        let (response, url) = self.send("GET", url.clone(), None, Follow::All, None)?;
        let next = response.header("link").and_then(next_page);
        let mut text = Vec::new();
        let read = response.into_reader().take(MAX_TEXT).read_to_end(&mut text);
        read.map_err(|cause| HubError::Network { url: plain(&url), cause: cause.to_string() })?;
        let value = serde_json::from_slice(&text).map_err(|error| answer(&url, error.to_string()))?;
        Ok((value, next))
    }

    fn url(&self, path: &str) -> Result<Url> {
        let text = format!("{}/{path}", self.endpoint.as_str().trim_end_matches('/'));
        let wrong = |error: url::ParseError| HubError::Address {
            what: "HF_ENDPOINT",
            given: self.endpoint.to_string(),
            reason: error.to_string(),
        };
        Url::parse(&text).map_err(wrong)
    }

    fn file_url(&self, commit: &str, file: &str) -> Result<Url> {
        let RepoName { kind, repo, .. } = self.name;
        let mut url = self.url(&format!("{}{repo}/resolve/{commit}", kind.page_prefix()))?;
        // Names of files may hold any sign; the library escapes those that mean something in an address.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.extend(file.split('/'));
        }
        Ok(url)
    }

    fn send(
        &self,
        method: &str,
        mut url: Url,
        range: Option<&str>,
        follow: Follow,
        file: Option<&str>,
    ) -> Result<(Response, Url)> {
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.request_url(method, &url).set("accept-encoding", "identity");
            if let Some(range) = range {
                request = request.set("range", range);
            }
            // A redirect leads to a storage that belongs to somebody else: the token is for the Hub's own port.
            if let Some(token) = self.token.filter(|_| self.at_hub(&url)) {
                request = request.set("authorization", &format!("Bearer {token}"));
            }
            let response = match request.call() {
                Ok(response) => response,
                Err(ureq::Error::Status(_, response)) => return Err(self.refused(response, &url, file)),
                Err(ureq::Error::Transport(cause)) => {
                    return Err(HubError::Network { url: plain(&url), cause: cause_of(&cause) });
                }
            };
            if !matches!(response.status(), 301 | 302 | 303 | 307 | 308) {
                return Ok((response, url));
            }
            let location = response.header("location").unwrap_or_default();
            let next = url.join(location).map_err(|_| answer(&url, format!("a redirect to {location:?}")))?;
            if url.scheme() == "https" && next.scheme() != "https" {
                return Err(answer(&url, format!("a redirect from https to {}", plain(&next))));
            }
            if follow == Follow::AtHub && !self.at_hub(&next) {
                return Ok((response, url));
            }
            url = next;
        }
        Err(answer(&url, format!("more than {MAX_REDIRECTS} redirects")))
    }

    fn at_hub(&self, url: &Url) -> bool {
        url.origin() == self.endpoint.origin()
    }

    /// What an answer of 400 and more says.
    fn refused(&self, response: Response, url: &Url, file: Option<&str>) -> HubError {
        let status = response.status();
        let repo = self.name.repo.clone();
        let page = self
            .url(&format!("{}{repo}", self.name.kind.page_prefix()))
            .map_or_else(|_| repo.clone(), |url| url.to_string());
        let token_sent = self.token.is_some();
        let code = response.header("x-error-code").unwrap_or_default().to_string();
        let at_hub = self.at_hub(url);
        match (code.as_str(), status) {
            ("GatedRepo", _) if at_hub => HubError::Gated { repo, page, token_sent },
            ("RevisionNotFound", _) if at_hub => {
                HubError::RevisionNotFound { repo, revision: self.name.revision.clone(), names: Vec::new() }
            }
            (_, 401) if at_hub && token_sent && code.is_empty() => {
                let page = self.url("settings/tokens").map_or(page, |url| url.to_string());
                HubError::Token { repo, status, page }
            }
            ("EntryNotFound", _) | ("", 404) if at_hub && file.is_some() => HubError::FileNotFound {
                repo,
                revision: self.name.revision.clone(),
                file: file.unwrap_or_default().to_string(),
            },
            ("RepoNotFound", _) | ("", 401 | 404) if at_hub => HubError::RepoNotFound {
                repo,
                is_data: self.name.kind == Kind::Data,
                endpoint: self.endpoint.as_str().trim_end_matches('/').to_string(),
                page,
                token_sent,
            },
            _ => HubError::Status { url: plain(url), status, body: said(response) },
        }
    }
}

/// The address of `<https://...>; rel="next"` in a list of such links.
fn next_page(links: &str) -> Option<String> {
    let next = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    Some(next.split_once('<')?.1.split_once('>')?.0.to_string())
}

/// A pause that doubles, up to a minute.
pub(super) fn pause(first: Duration, attempt: usize) {
    let factor = 1 << attempt.saturating_sub(1).min(6);
    std::thread::sleep((first * factor).min(Duration::from_secs(60)));
}

fn said(response: Response) -> String {
    let message = response.header("x-error-message").map(str::to_string);
    let mut body = Vec::new();
    let body = || {
        // The text is for people only; what cannot be read is left out.
        response.into_reader().take(4096).read_to_end(&mut body).ok()?;
        String::from_utf8_lossy(&body).lines().map(|line| line.trim().to_string()).find(|line| !line.is_empty())
    };
    message.or_else(body).unwrap_or_default().chars().take(SHOWN_TEXT).collect()
}

fn answer(url: &Url, reason: String) -> HubError {
    HubError::Answer { url: plain(url), reason }
}

/// Without the query: addresses of the storage carry a signature in it.
fn plain(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.to_string()
}

fn cause_of(transport: &ureq::Transport) -> String {
    let mut text = transport.kind().to_string();
    if let Some(message) = transport.message() {
        text += &format!(": {message}");
    }
    match std::error::Error::source(transport) {
        Some(source) => format!("{text}: {source}"),
        None => text,
    }
}
