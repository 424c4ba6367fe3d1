//! One file, from the first byte to its final name: nothing is there under that name before length and hash are right.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use ureq::Response;

use super::client::{Client, pause};
use super::error::{HubError, Result, io_at};
use super::hash::Hash;
use super::options::HubOptions;
use super::progress::PullEvent;

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 18;

/// A file to be pulled.
#[derive(Debug)]
pub(super) struct Blob<'a> {
    /// Commit it is taken from.
    pub(super) commit: &'a str,
    /// Its name in the repository.
    pub(super) file: &'a str,
    /// Its bytes.
    pub(super) size: u64,
    /// What its content has to be; `None` if the Hub tells no hash, as some mirrors do.
    pub(super) hash: Option<Hash>,
    /// Where it goes.
    pub(super) path: PathBuf,
}

/// How one request ended.
enum Received {
    /// Whatever came was written; the length tells whether all came.
    Bytes,
    /// What was there does not fit what the server has.
    StartAgain(&'static str),
}

impl Blob<'_> {
    /// True if the file is there in full.
    pub(super) fn is_there(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|found| found.is_file() && found.len() == self.size)
    }

    /// Pulls the file, going on from what an interrupted run left. The caller holds the blob's lock.
    pub(super) fn pull(
        &self,
        client: &Client,
        options: &HubOptions,
        progress: &mut dyn FnMut(&PullEvent),
    ) -> Result<()> {
        let part = self.part();
        let mut file = File::options().create(true).append(true).open(&part).map_err(io_at("open", &part, 0))?;
        let mut resumed = self.length(&file, &part)? > 0;
        loop {
            self.fill(&mut file, &part, client, options, progress)?;
            match self.wrong_content(&part)? {
                None => break,
                // A beginning that an earlier run left may be of another file, or damaged since.
                Some(_) if resumed => {
                    resumed = false;
                    file.set_len(0).map_err(io_at("empty", &part, 0))?;
                    let reason = "what an earlier run left is not the beginning of this file";
                    progress(&PullEvent::Restarted { file: self.file, reason });
                }
                Some(error) => {
                    fs::remove_file(&part).map_err(io_at("delete", &part, 0))?;
                    return Err(error);
                }
            }
        }
        file.sync_all().map_err(io_at("write", &part, 0))?;
        fs::rename(&part, &self.path).map_err(io_at("rename", &part, 0))
    }

    fn part(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".incomplete");
        name.into()
    }

    fn length(&self, file: &File, part: &Path) -> Result<u64> {
        Ok(file.metadata().map_err(io_at("read", part, 0))?.len())
    }

    /// Requests bytes until the part has its full length. Attempts are counted from the last one that got further.
    fn fill(
        &self,
        file: &mut File,
        part: &Path,
        client: &Client,
        options: &HubOptions,
        progress: &mut dyn FnMut(&PullEvent),
    ) -> Result<()> {
        let mut furthest = 0;
        let mut attempts = 0;
        loop {
            let start = self.length(file, part)?;
            if start == self.size {
                return Ok(());
            }
            if start > furthest && start < self.size {
                (furthest, attempts) = (start, 0);
            }
            if attempts > options.retries {
                return Err(self.short(start, attempts));
            }
            if attempts > 0 {
                pause(options.retry_pause, attempts);
            }
            attempts += 1;
            let outcome = match start > self.size {
                true => Ok(Received::StartAgain("what an earlier run left is longer than this file")),
                false => self.receive(start, file, part, client, progress),
            };
            match outcome {
                Ok(Received::Bytes) => {}
                Ok(Received::StartAgain(reason)) if attempts > options.retries => {
                    let reason = format!("{}: {reason}", self.file);
                    return Err(HubError::Answer { url: options.endpoint.clone(), reason });
                }
                Ok(Received::StartAgain(reason)) => {
                    file.set_len(0).map_err(io_at("empty", part, 0))?;
                    progress(&PullEvent::Restarted { file: self.file, reason });
                }
                Err(error) if error.is_outage() && attempts <= options.retries => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn short(&self, found: u64, attempts: usize) -> HubError {
        HubError::Length { file: self.file.to_string(), expected: self.size, found, attempts }
    }

    /// One request for the bytes from `start` on.
    fn receive(
        &self,
        start: u64,
        file: &mut File,
        part: &Path,
        client: &Client,
        progress: &mut dyn FnMut(&PullEvent),
    ) -> Result<Received> {
        let (response, url) = match client.get(self.commit, self.file, start) {
            Err(HubError::Status { status: 416, .. }) if start > 0 => {
                return Ok(Received::StartAgain("the server does not have the rest of what an earlier run left"));
            }
            other => other?,
        };
        let mut from = start;
        match response.status() {
            200 if start > 0 => {
                file.set_len(0).map_err(io_at("empty", part, 0))?;
                from = 0;
                progress(&PullEvent::Restarted { file: self.file, reason: "the server sends whole files only" });
            }
            206 if range_start(&response) != Some(start) => {
                return Ok(Received::StartAgain("the server sent another part than was asked for"));
            }
            200 => {}
            206 if start > 0 => progress(&PullEvent::Resumed { file: self.file, from: start }),
            status => {
                let reason = format!("status {status} for a file");
                return Err(HubError::Answer { url: url.origin().ascii_serialization(), reason });
            }
        }
        self.copy(response, from, file, part, progress)
    }

    /// Writes a body to the part. A connection that breaks is no error here: what came is kept.
    fn copy(
        &self,
        response: Response,
        from: u64,
        file: &mut File,
        part: &Path,
        progress: &mut dyn FnMut(&PullEvent),
    ) -> Result<Received> {
        let mut left = self.size - from;
        let mut body = response.into_reader();
        let mut buffer = vec![0; CHUNK];
        loop {
            let count = match body.read(&mut buffer) {
                Ok(0) => return Ok(Received::Bytes),
                Ok(count) => count,
                Err(cause) if cause.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Ok(Received::Bytes),
            };
            if count as u64 > left {
                return Ok(Received::StartAgain("the server sent more than the file has"));
            }
            file.write_all(&buffer[..count]).map_err(io_at("write", part, left))?;
            left -= count as u64;
            progress(&PullEvent::Received { file: self.file, bytes: self.size - left });
        }
    }

    /// The error of a part whose content is not the one announced.
    fn wrong_content(&self, part: &Path) -> Result<Option<HubError>> {
        let Some(hash) = &self.hash else { return Ok(None) };
        let found = hash.of_file(part, self.size)?;
        Ok((found != hash.digits()).then(|| HubError::Content {
            file: self.file.to_string(),
            kind: hash.kind(),
            expected: hash.digits().to_string(),
            found,
        }))
    }
}

/// First byte of a partial answer.
fn range_start(response: &Response) -> Option<u64> {
    response.header("content-range")?.trim().strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}
