//! What a person sees of a pull, on standard error: a bar per large file on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};

use crate::progress::tell;

/// Files below this size get no bar of their own, in bytes.
const SMALL: u64 = 1 << 20;

/// What happens while a model is pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PullEvent<'a> {
    /// The Hub told which commit the name stands for.
    Found {
        /// `org/name@revision`.
        name: &'a str,
        /// The commit.
        commit: &'a str,
    },
    /// A file is requested, from the start or from where an earlier run ended.
    File {
        /// Its name.
        file: &'a str,
        /// Its bytes.
        size: u64,
    },
    /// Bytes of the file that are there now.
    Received {
        /// The file.
        file: &'a str,
        /// Bytes of it so far.
        bytes: u64,
    },
    /// The file goes on from what was there.
    Resumed {
        /// The file.
        file: &'a str,
        /// Bytes that were there.
        from: u64,
    },
    /// The file begins again.
    Restarted {
        /// The file.
        file: &'a str,
        /// Why what was there cannot be used.
        reason: &'a str,
    },
    /// Another process pulls the same file; this one waits for it.
    Waiting {
        /// The file.
        file: &'a str,
    },
    /// The file has its name now; length and, if the Hub tells one, hash are right.
    Stored {
        /// The file.
        file: &'a str,
    },
    /// The Hub is out of reach; a whole copy from an earlier pull is used instead.
    FromCache {
        /// `org/name@revision`.
        name: &'a str,
        /// The commit that the copy is of.
        commit: &'a str,
        /// Why the Hub could not be asked.
        reason: &'a str,
    },
}

/// Shows a pull on standard error.
#[derive(Debug, Default)]
pub struct PullBar {
    bar: Option<ProgressBar>,
}

impl PullBar {
    /// Shows one event.
    pub fn show(&mut self, event: &PullEvent) {
        match event {
            PullEvent::Found { name, commit } => self.say(&format!("{name} is commit {commit}")),
            PullEvent::File { file, size } if *size >= SMALL => match std::io::stderr().is_terminal() {
                true => self.bar = Some(bar(file, *size)),
                false => self.say(&format!("pulling {file}, {:.1} MB", *size as f64 / 1e6)),
            },
            PullEvent::Received { bytes, .. } => {
                if let Some(bar) = &self.bar {
                    bar.set_position(*bytes);
                }
            }
            PullEvent::Resumed { file, from } => {
                if let Some(bar) = &self.bar {
                    bar.set_position(*from);
                    bar.reset_eta();
                }
                self.say(&format!("{file} goes on from byte {from}"));
            }
            PullEvent::Restarted { file, reason } => self.say(&format!("{file} begins again: {reason}")),
            PullEvent::Waiting { file } => self.say(&format!("another process pulls {file}; waiting for it")),
            PullEvent::Stored { .. } => {
                if let Some(bar) = self.bar.take() {
                    bar.finish();
                }
            }
            PullEvent::FromCache { name, commit, reason } => {
                self.say(&format!("note: {name} from the cache, commit {commit}, because {reason}"));
            }
            PullEvent::File { .. } => {}
        }
    }

    fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => tell(&format!("{line}\n")),
        }
    }
}

fn bar(file: &str, size: u64) -> ProgressBar {
    let style = "{bar:30} {bytes}/{total_bytes}  {binary_bytes_per_sec}  {msg}  [{elapsed} < {eta}]";
    let style = ProgressStyle::with_template(style).expect("the template is valid");
    let name = Path::new(file).file_name().unwrap_or_default().to_string_lossy().into_owned();
    ProgressBar::new(size).with_style(style).with_message(name)
}
