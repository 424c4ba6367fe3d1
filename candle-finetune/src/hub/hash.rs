//! The two hashes by which the Hub names content.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

use super::error::{Result, io_at};

/// What the content of a file has to be, in small hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Hash {
    /// SHA-256 of the content; of large files.
    Sha256(String),
    /// The name git gives a file: SHA-1 of its kind, its length and its content.
    Git(String),
}

impl Hash {
    /// Reads a hash by its length; `None` if it is neither.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let is_hex = text.chars().all(|sign| sign.is_ascii_hexdigit());
        match text.len() {
            64 if is_hex => Some(Self::Sha256(text.to_ascii_lowercase())),
            40 if is_hex => Some(Self::Git(text.to_ascii_lowercase())),
            _ => None,
        }
    }

    /// Its kind, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::Git(_) => "git hash",
        }
    }

    /// The digits.
    pub(super) fn digits(&self) -> &str {
        match self {
            Self::Sha256(digits) | Self::Git(digits) => digits,
        }
    }

    /// The hash of this kind of a file of `size` bytes.
    pub(super) fn of_file(&self, path: &Path, size: u64) -> Result<String> {
        let mut context = match self {
            Self::Sha256(_) => Context::new(&SHA256),
            Self::Git(_) => Context::new(&SHA1_FOR_LEGACY_USE_ONLY),
        };
        if let Self::Git(_) = self {
            context.update(format!("blob {size}\0").as_bytes());
        }
        let mut file = File::open(path).map_err(io_at("read", path, 0))?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer).map_err(io_at("read", path, 0))? {
                0 => break,
                count => context.update(&buffer[..count]),
            }
        }
        Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_command_line_tools() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hello");
        std::fs::write(&path, "hello\n").unwrap();
        // `sha256sum hello` and `git hash-object hello`.
        for digits in [
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
            "ce013625030ba8dba906f756967f9e9ca394464a",
        ] {
            assert_eq!(Hash::parse(digits).unwrap().of_file(&path, 6).unwrap(), digits);
        }
        assert_eq!(Hash::parse(&"A".repeat(40)), Some(Hash::Git("a".repeat(40))));
        assert_eq!((Hash::parse("e1"), Hash::parse(&"g".repeat(64))), (None, None));
    }
}
