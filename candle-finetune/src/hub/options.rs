//! Where the Hub is, where the cache is, and who asks.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// The public Hub.
const ENDPOINT: &str = "https://huggingface.co";

/// Settings for [`resolve_model`](super::resolve_model). Nothing is read from the environment there; a program makes them
/// with [`HubOptions::from_vars`] when it starts.
#[derive(Clone, PartialEq, Eq)]
pub struct HubOptions {
    /// Address of the Hub, without a `/` at the end.
    pub endpoint: String,
    /// The cache that Python's library shares (`.../huggingface/hub`); `None` if no place for it is known.
    pub cache: Option<PathBuf>,
    /// Token that is sent to the Hub itself, and to nobody else.
    pub token: Option<String>,
    /// True to ask nobody and to take what the cache has.
    pub offline: bool,
    /// Proxy for all requests, such as `http://proxy:3128`.
    pub proxy: Option<String>,
    /// Further attempts at a file whose connection broke.
    pub retries: usize,
    /// Pause before the first further attempt; it doubles each time.
    pub retry_pause: Duration,
    /// Longest wait for a connection, and for the next bytes.
    pub timeout: Duration,
}

impl HubOptions {
    /// The public Hub without a token, and this cache.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        Self { cache: Some(cache.into()), ..Self::without_cache() }
    }

    /// What the variables and files of Python's library say. `var` looks a variable up; a program gives
    /// `|name| std::env::var(name).ok()`.
    ///
    /// Read are `HF_ENDPOINT`; the cache from `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME` or `HOME`; the token from
    /// `HF_TOKEN`, or the file `HF_TOKEN_PATH`, or `token` in `HF_HOME`, unless `HF_HUB_DISABLE_IMPLICIT_TOKEN`;
    /// `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE`; `HF_HUB_DOWNLOAD_TIMEOUT` in seconds; `HTTPS_PROXY` and `ALL_PROXY`,
    /// also in small letters. An empty variable counts as not set.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let var = |name: &str| var(name).filter(|value| !value.trim().is_empty());
        let user_home = var("HOME").or_else(|| var("USERPROFILE")).map(PathBuf::from);
        let path = |name: &str| var(name).map(|value| expand(&value, user_home.as_deref()));
        let home = path("HF_HOME").or_else(|| {
            let caches = path("XDG_CACHE_HOME").or_else(|| Some(user_home.as_ref()?.join(".cache")));
            Some(caches?.join("huggingface"))
        });
        let cache =
            path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).or_else(|| Some(home.as_ref()?.join("hub")));
        let is_true = |name: &str| var(name).is_some_and(|value| is_true(&value));
        let token_file = || path("HF_TOKEN_PATH").or_else(|| Some(home.as_ref()?.join("token")));
        let token = var("HF_TOKEN").or_else(|| var("HUGGING_FACE_HUB_TOKEN")).or_else(|| {
            let file = token_file().filter(|_| !is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN"))?;
            std::fs::read_to_string(file).ok()
        });
        let seconds = var("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|value| value.trim().parse().ok());
        let default = Self::without_cache();
        Self {
            endpoint: var("HF_ENDPOINT").map_or(default.endpoint, |url| url.trim().trim_end_matches('/').to_string()),
            cache,
            token: token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
            offline: is_true("HF_HUB_OFFLINE") || is_true("TRANSFORMERS_OFFLINE"),
            proxy: ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"].into_iter().find_map(var),
            timeout: seconds.filter(|&seconds| seconds > 0).map_or(default.timeout, Duration::from_secs),
            ..default
        }
    }

    fn without_cache() -> Self {
        Self {
            endpoint: ENDPOINT.to_string(),
            cache: None,
            token: None,
            offline: false,
            proxy: None,
            retries: 5,
            retry_pause: Duration::from_secs(1),
            timeout: Duration::from_secs(30),
        }
    }
}

/// The token stays out of logs.
impl std::fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "set"))
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

fn is_true(value: &str) -> bool {
    matches!(value.trim().to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

/// `~/x` as a shell has it.
fn expand(value: &str, home: Option<&Path>) -> PathBuf {
    match (value.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(vars: &[(&str, &str)]) -> HubOptions {
        HubOptions::from_vars(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn the_cache_is_found_as_python_finds_it() {
        for (vars, cache) in [
            (&[("HOME", "/h")][..], "/h/.cache/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "~/hf"), ("XDG_CACHE_HOME", "/x")], "/h/hf/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "")], "/h/.cache/huggingface/hub"),
            (&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")], "/c"),
        ] {
            assert_eq!(options(vars).cache, Some(PathBuf::from(cache)), "{vars:?}");
        }
        assert_eq!(options(&[]).cache, None);
    }

    #[test]
    fn the_token_comes_from_the_variable_or_else_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap();
        std::fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        std::fs::write(dir.path().join("other"), " hf_other ").unwrap();
        let other = dir.path().join("other");
        let other = other.to_str().unwrap();
        let token = |vars: &[(&str, &str)]| options(vars).token;
        assert_eq!(token(&[("HF_HOME", home)]).as_deref(), Some("hf_file"));
        assert_eq!(token(&[("HF_HOME", home), ("HF_TOKEN", " hf_var\n")]).as_deref(), Some("hf_var"));
        assert_eq!(token(&[("HF_HOME", home), ("HF_TOKEN_PATH", other)]).as_deref(), Some("hf_other"));
        assert_eq!(token(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert_eq!(token(&[("HF_HOME", "/nowhere")]), None);
        let shown = format!("{:?}", options(&[("HF_TOKEN", "hf_secret")]));
        assert!(!shown.contains("hf_secret") && shown.contains("\"set\""), "{shown}");
    }

    #[test]
    fn endpoint_offline_proxy_and_timeout() {
        let plain = options(&[("HF_HUB_OFFLINE", "0"), ("HF_HUB_DOWNLOAD_TIMEOUT", "soon")]);
        assert_eq!((plain.endpoint.as_str(), plain.offline, plain.proxy), ("https://huggingface.co", false, None));
        assert_eq!(plain.timeout, Duration::from_secs(30));
        let set = options(&[
            ("HF_ENDPOINT", "http://mirror:80/"),
            ("TRANSFORMERS_OFFLINE", "yes"),
            ("https_proxy", "http://p:1"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "7"),
        ]);
        assert_eq!((set.endpoint.as_str(), set.offline), ("http://mirror:80", true));
        assert_eq!((set.proxy.as_deref(), set.timeout), (Some("http://p:1"), Duration::from_secs(7)));
    }
}
